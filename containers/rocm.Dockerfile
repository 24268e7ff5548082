# Octavo for AMD's MI300X. No model is inside: mount one, or let it come from the hub into a volume.
#
#   docker build -f containers/rocm.Dockerfile --build-arg BASE=<an image with ROCm, Python 3.11+ and torch 2.11+> -t octavo:rocm .
#   docker run --rm --device /dev/kfd --device /dev/dri --group-add video --group-add render \
#     -p 127.0.0.1:8000:8000 -v "$PWD/model:/models/model:ro" octavo:rocm
#
# The base image brings torch and the Triton that was built with it, which are kept: hence not the extra gpu, whose Triton is
# NVIDIA's. The versions of all else are those of requirements/cpu.lock.

ARG BASE=rocm/pytorch:latest
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY requirements requirements
COPY src src
COPY core core
COPY backends backends
COPY conformance conformance
COPY examples/octavo-vllm-alias examples/octavo-vllm-alias
ARG EXTRAS=serve,client,structured,tracing
RUN grep -v '^torch==' requirements/cpu.lock > /tmp/constraints.txt \
    && python3 -m pip install --no-cache-dir -c /tmp/constraints.txt ".[${EXTRAS}]" \
    && python3 -m pip install --no-cache-dir --no-deps ./examples/octavo-vllm-alias \
    && rm -rf /source/* /tmp/constraints.txt
RUN useradd --uid 10001 --create-home octavo
ENV HF_HOME=/models/hub \
    OCTAVO_HOST=0.0.0.0 \
    OCTAVO_PORT=8000 \
    OCTAVO_PROGRESS=false \
    OCTAVO_BACKEND=rocm \
    TRITON_CACHE_DIR=/tmp/triton
WORKDIR /home/octavo
USER 10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['OCTAVO_PORT']}/health\")"]
ENTRYPOINT ["octavo"]
CMD ["serve", "/models/model"]
