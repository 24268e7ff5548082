# Octavo for NVIDIA's H100 and H200. No model is inside: mount one, or let it come from the hub into a volume.
#
#   docker build -f containers/cuda.Dockerfile --build-arg TORCH_INDEX=<address of PyTorch's CUDA index> -t octavo:cuda .
#   docker run --rm --gpus all -p 127.0.0.1:8000:8000 -v "$PWD/model:/models/model:ro" octavo:cuda
#
# Versions are those of requirements/cpu.lock, which names torch without its build; that build brings CUDA's libraries, and
# the host its driver. Triton compiles a small launcher when it starts, hence gcc in the image.

FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY requirements requirements
COPY src src
COPY core core
COPY backends backends
COPY conformance conformance
COPY examples/octavo-vllm-alias examples/octavo-vllm-alias
ARG TORCH_INDEX
ARG EXTRAS=serve,client,structured,tracing,gpu
RUN python -m venv /opt/octavo \
    && /opt/octavo/bin/pip install --no-cache-dir --extra-index-url "${TORCH_INDEX:?see the top of this file}" \
      -c requirements/cpu.lock ".[${EXTRAS}]" \
    && /opt/octavo/bin/pip install --no-cache-dir --no-deps ./examples/octavo-vllm-alias

FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home octavo
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH \
    HF_HOME=/models/hub \
    OCTAVO_HOST=0.0.0.0 \
    OCTAVO_PORT=8000 \
    OCTAVO_PROGRESS=false \
    OCTAVO_BACKEND=cuda \
    TRITON_CACHE_DIR=/tmp/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['OCTAVO_PORT']}/health\")"]
ENTRYPOINT ["octavo"]
CMD ["serve", "/models/model"]
