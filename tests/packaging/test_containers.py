"""containers/: images are not built here; what they name exists, flags are Octavo's, and probes its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.core.base.options import read_environment
from octavo.core.cli import serve
from octavo.core.cli.flags import _all_options, engine_config, serve_config
from octavo.core.cli.parser import Parser
from octavo.core.serve.door import OPEN_PATHS
from octavo.core.serve.launch import CLOSE_SECONDS

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "containers"
DOCKERFILES = sorted(path.name for path in CONTAINERS.glob("*.Dockerfile"))


def instructions(name: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions, in order, continued lines joined."""
    lines = [line for line in (CONTAINERS / name).read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for line in joined.splitlines() if line for word, rest in [line.split(maxsplit=1)]]


def last_stage(name: str) -> list[tuple[str, str]]:
    found = instructions(name)
    start = max(index for index, (word, _) in enumerate(found) if word == "FROM")
    return found[start:]


def values(found: list[tuple[str, str]], wanted: str) -> list[str]:
    return [rest for word, rest in found if word == wanted]


def variables(name: str) -> dict[str, str]:
    return dict(word.split("=", 1) for rest in values(last_stage(name), "ENV") for word in rest.split())


def served(words: list[str], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What `octavo serve` makes of flags and variables: the configs of engine and server."""
    assert words[0] == "serve"
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    parser = Parser("octavo serve", None)
    serve.add_arguments(parser)
    args = parser.parse(words[1:])
    return engine_config(args), serve_config(args)


def test_there_is_one_for_each_device() -> None:
    backends = {path.parent.name for path in (ROOT / "backends").glob("*/plugin.py")}
    assert {name.removesuffix(".Dockerfile") for name in DOCKERFILES} == backends


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_and_installed_exists(name: str) -> None:
    found = instructions(name)
    copied = [word for rest in values(found, "COPY") if not rest.startswith("--from") for word in rest.split()[:-1]]
    assert copied
    assert not [word for word in copied if not (ROOT / word).exists()]
    packages = {f"src/octavo/{folder}" for folder in ("core", "backends", "conformance")}
    assert {f"src/octavo/{word}" for word in copied} >= packages
    (extras,) = (rest.removeprefix("EXTRAS=") for rest in values(found, "ARG") if rest.startswith("EXTRAS"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    commands = " ".join(values(found, "RUN"))
    assert "requirements/cpu.lock" in commands
    assert f"[{'${EXTRAS}'}]" in commands


@pytest.mark.parametrize("name", DOCKERFILES)
def test_nobody_is_root_and_signals_reach_the_server(name: str) -> None:
    stage = last_stage(name)
    assert values(stage, "USER") == ["10001"]
    assert any("useradd --uid 10001" in command for command in values(stage, "RUN"))
    assert json.loads(values(stage, "ENTRYPOINT")[0]) == ["octavo"], "no shell stands between"
    user = [word for word, _ in stage].index("USER")
    assert not {"RUN", "COPY", "ADD"} & {word for word, _ in stage[user:]}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_its_flags_and_variables_are_octavos(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, environ = last_stage(name), variables(name)
    ours = {key: value for key, value in environ.items() if key.startswith("OCTAVO_")}
    assert len(read_environment(ours, _all_options())) == len(ours)
    engine, server = served(json.loads(values(stage, "CMD")[0]), ours, monkeypatch)
    assert (server.host, [str(server.port)]) == ("0.0.0.0", values(stage, "EXPOSE"))
    assert not engine.progress
    assert engine.backend in ("auto", name.removesuffix(".Dockerfile"))


@contextmanager
def health(status: int) -> Iterator[int]:
    """A server whose /health has a status, as its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("name", DOCKERFILES)
@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_follows_the_servers_health(name: str, status: int, code: int) -> None:
    (check,) = values(last_stage(name), "HEALTHCHECK")
    python, *rest = json.loads(check.split(" CMD ")[1])
    assert python.startswith("python")
    with health(status) as port:
        environ = {**os.environ, "OCTAVO_PORT": str(port)}
        done = subprocess.run([sys.executable, *rest], env=environ, capture_output=True, timeout=30, check=False)
    assert done.returncode == code


def test_compose_serves_this_machine_and_drains_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compose = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())
    (service,) = compose["services"].values()
    dockerfile = (CONTAINERS / service["build"]["context"] / service["build"]["dockerfile"]).resolve()
    assert dockerfile == CONTAINERS / "cpu.Dockerfile"
    arguments = {rest.split("=")[0] for rest in values(instructions(dockerfile.name), "ARG")}
    assert set(service["build"]["args"]) <= arguments
    environ = {**variables(dockerfile.name), **service["environment"]}
    ours = {key: value for key, value in environ.items() if key.startswith("OCTAVO_")}
    _, server = served(service["command"], ours, monkeypatch)
    assert float(service["stop_grace_period"].removesuffix("s")) > server.drain_seconds + CLOSE_SECONDS
    assert server.api_key_file == f"/run/secrets/{service['secrets'][0]}"
    assert service["secrets"][0] in compose["secrets"]
    (port,) = service["ports"]
    assert port == f"127.0.0.1:{server.port}:{server.port}"


def test_kubernetes_probes_what_needs_no_key_and_gives_time_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, service = yaml.safe_load_all((CONTAINERS / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ours = {each["name"]: each["value"] for each in container["env"]}
    assert len(read_environment(ours, _all_options())) == len(ours)
    _, server = served(container["args"], {**variables("cpu.Dockerfile"), **ours}, monkeypatch)
    (port,) = container["ports"]
    assert port["containerPort"] == server.port
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {each["port"] for each in probes.values()} == {port["name"]}
    assert {name: each["path"] for name, each in probes.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/health",
    }
    assert {each["path"] for each in probes.values()} <= OPEN_PATHS
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > pause + server.drain_seconds + CLOSE_SECONDS
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    mounts = [each["mountPath"] for each in container["volumeMounts"]]
    assert any(str(server.api_key_file).startswith(f"{path}/") for path in mounts)
    assert any(container["args"][1].startswith(f"{path}/") for path in mounts)
    assert pod["securityContext"]["runAsUser"] == 10001
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
