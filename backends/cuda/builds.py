"""Kernels of this backend, compiled for a chip that need not be here: what profile `compile` builds and reads."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from octavo.backends.common.aot.builds import Build, list_builds
from octavo.backends.common.tuning import TuningTable
from octavo.backends.cuda import chips, read
from octavo.backends.cuda.ops import make_ops
from octavo.core.base.errors import ConfigError


def builds(target: str | None) -> Sequence[Build]:
    """All builds for an architecture; None: the one that this backend is written for. Raises ConfigError."""
    chip = next((chip for chip in chips.BUILDABLE if target in (None, chip.arch)), None)
    if chip is None:
        known = ", ".join(sorted({chip.arch for chip in chips.BUILDABLE}))
        raise ConfigError(f"target is {target!r}; this backend compiles for {known}", field="target")
    siblings = [other for other in chips.BUILDABLE if other.arch == chip.arch]
    tuning = TuningTable.load(files("octavo.backends.cuda") / "tuning")
    return list_builds(make_ops, chip, tuning, read, siblings)
