"""A backend's known gaps: `gaps.toml`, shipped in its own package, next to the module of its factory.

    [[gap]]
    case = "rms_norm/float32-w64"       # or op = "lora_gemm": all its cases
    kind = "notimpl"                    # notimpl: no kernel yet | notyet: known wrong | never: won't be
    reason = "one line, for the report"

Strict: a name that is no case of the suite is an error (cases above the ops, whose modules import the engine, are
looked up when their profile is run), and a gap whose case passes is `xpass`, a failure, so that
the file can only shrink truthfully. A case that passes on the reference ops is what notimpl says, and no pass.
"""

from __future__ import annotations

import enum
import importlib.resources
import importlib.util
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.conformance.case import Case
from octavo.conformance.profiles import level_of
from octavo.core.backend import BackendInfo
from octavo.core.base.errors import ConfigError

FILE = "gaps.toml"


class GapKind(enum.StrEnum):
    NOTIMPL = "notimpl"
    NOTYET = "notyet"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Gap:
    """One case that the backend is known to fail."""

    case: str
    kind: GapKind
    reason: str


def load_gaps(info: BackendInfo, cases: Iterable[Case]) -> dict[str, Gap]:
    """The gaps of the package that holds the backend's factory; none when it ships no gaps.toml."""
    module = info.factory.partition(":")[0]
    spec = importlib.util.find_spec(module)
    package = module if spec is not None and spec.submodule_search_locations is not None else module.rpartition(".")[0]
    if not package:
        return {}
    file = importlib.resources.files(package) / FILE
    if not file.is_file():
        return {}
    return parse_gaps(file.read_text(encoding="utf-8"), cases, source=f"{FILE} of {package}")


def parse_gaps(text: str, cases: Iterable[Case], *, source: str = "gaps.toml") -> dict[str, Gap]:
    """Case name -> gap. Raises ConfigError naming the source for anything that isn't exactly as described above."""
    known = list(cases)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is no TOML: {error}", field="gaps") from error
    if set(document) - {"gap"}:
        raise ConfigError(
            f"{source} has unknown keys {sorted(set(document) - {'gap'})}; only [[gap]] is read", field="gaps"
        )
    gaps: dict[str, Gap] = {}
    for entry in document.get("gap", []):
        for gap in _entry(entry, known, source):
            if gap.case in gaps:
                raise ConfigError(f"{source} names the case {gap.case} twice; keep one entry", field="gaps")
            gaps[gap.case] = gap
    return gaps


def _entry(entry: dict[str, str], cases: list[Case], source: str) -> list[Gap]:
    target = {"case", "op"} & set(entry)
    if len(target) != 1 or set(entry) - target != {"kind", "reason"} or not str(entry.get("reason", "")).strip():
        raise ConfigError(f"{source}: {entry} must have case or op, kind and reason, and nothing else", field="gaps")
    if entry["kind"] not in list(GapKind):
        raise ConfigError(f"{source}: kind {entry['kind']!r} must be one of {', '.join(GapKind)}", field="gaps")
    key = target.pop()
    names = [c.name for c in cases if (c.name if key == "case" else c.op) == entry[key]]
    level = level_of(str(entry[key]))
    if level is not None and not any(c.op == level for c in cases):
        return []  # Not a name that can be looked up in this run.
    if not names:
        raise ConfigError(
            f"{source}: {key} {entry[key]!r} is none of the suite; see `octavo conform list`", field="gaps"
        )
    return [Gap(name, GapKind(entry["kind"]), str(entry["reason"]).strip()) for name in names]
