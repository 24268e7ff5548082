"""The suite under pytest, once pytest_plugin.py has seen that it is asked for: options and fixtures.

    one pytest item per case of the profile ──► one worker for the session ──► CaseResult ──► pass | fail | skip | xfail

An item fails when its case keeps the profile from being met. Cases that say nothing about the backend are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from octavo.conformance.gaps import Gap, load_gaps
from octavo.conformance.harness.worker import Runner
from octavo.conformance.session import Settings, backend_info, fresh_seed, known_cases, open_runner, selected
from octavo.core.base.errors import UserError

SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("octavo conformance")
    group.addoption("--backend", metavar="NAME", default="auto", help="as `octavo backends` lists them")
    group.addoption("--backend-option", metavar="KEY=VALUE", action="append", default=[], help="an option of it")
    group.addoption("--profile", metavar="NAME", help="set of cases (default: core; with --only: full)")
    group.addoption("--only", metavar="NAME", help="an op, a case, or the beginning of a case's name")
    group.addoption("--seed", metavar="N", type=int, help="of everything drawn (default: fresh, and in the header)")
    group.addoption("--in-process", action="store_true", help="no worker process: quicker, but a crash ends it all")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout: of pytest-timeout, where that is installed")
    seed = config.getoption("--seed")
    config.stash[SETTINGS] = Settings(
        backend=config.getoption("--backend"),
        profile=config.getoption("--profile"),
        only=config.getoption("--only"),
        seed=fresh_seed() if seed is None else seed,
        options=dict(word.partition("=")[::2] for word in config.getoption("--backend-option")),
        in_process=config.getoption("--in-process"),
    )


def pytest_report_header(config: pytest.Config) -> str:
    settings = config.stash[SETTINGS]
    return f"octavo conformance: backend {settings.backend}, profile {settings.profile_name}, seed {settings.seed}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        try:
            cases = selected(metafunc.config.stash[SETTINGS])
        except UserError as error:
            raise pytest.UsageError(str(error)) from None
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


@pytest.fixture(scope="session")
def settings(pytestconfig: pytest.Config) -> Settings:
    return pytestconfig.stash[SETTINGS]


@pytest.fixture(scope="session")
def runner(settings: Settings) -> Iterator[Runner]:
    """The backend, in a worker of its own; ends the session when it can't be made."""
    torch.set_num_threads(1)  # The oracle's tensors are small, and the backend brings its own threads.
    try:
        running = open_runner(settings, backend_info(settings.backend).name)
    except UserError as error:
        pytest.exit(f"octavo: error: {error}", returncode=pytest.ExitCode.USAGE_ERROR)
    yield running
    running.close()


@pytest.fixture(scope="session")
def gaps(settings: Settings) -> dict[str, Gap]:
    return load_gaps(backend_info(settings.backend), known_cases(settings.profile_name))
