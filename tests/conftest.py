"""What every test runs under: no network, no colours, and the same random examples each time.

`make nightly` sets OCTAVO_NIGHTLY=1: new random examples each night, and many more of them.
"""

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from octavo.core.base.config import EngineConfig, ServeConfig
from octavo.core.base.options import options_of

os.environ.update({"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "120"})
# A developer's own settings must not reach the tests.
for option in [*options_of(EngineConfig).values(), *options_of(ServeConfig).values()]:
    os.environ.pop(option.env, None)

# A shell starts what runs in the background deaf to Ctrl-C, and processes pass that on to those that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nightly" if os.environ.get("OCTAVO_NIGHTLY") == "1" else "default")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """The command line sets logging up for its process; a test that ran it must leave none of that to the next."""
    root, octavo = logging.getLogger(), logging.getLogger("octavo")
    before = root.handlers[:], root.level, octavo.level
    yield
    root.handlers[:], level, octavo_level = before
    root.setLevel(level)
    octavo.setLevel(octavo_level)
