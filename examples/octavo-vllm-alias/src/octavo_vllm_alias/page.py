"""docs/vllm-flags.md, made from flags.toml:

PYTHONPATH=examples/octavo-vllm-alias/src python -m octavo_vllm_alias.page > docs/vllm-flags.md
"""

from __future__ import annotations

import sys

from octavo_vllm_alias.table import IDLE, REFUSED, TAKEN, Flag, load_table

HEAD = """# vLLM's flags

What becomes of each flag of `vllm serve` (vLLM {version}, and older flags, marked °) when Octavo is started under that
name by `examples/octavo-vllm-alias`. Made from its `flags.toml`; see there for how to install it.

- **same**: Octavo has the flag. **renamed**: under another name. The third column tells what is different.
- **idle**: accepted, and told once at the start that it does nothing here.
- **refused**: the server does not start, and says why; it would not do what was asked. A value in parentheses is
  accepted.

An unknown flag is an error that offers the nearest. Settings that vLLM has not are set by Octavo's own variables, such
as `OCTAVO_BACKEND=cpu`. {counts}

| flag | here | |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    table = load_table()
    flags = sorted(table.flags, key=lambda flag: flag.name)
    found = {fate: sum(flag.fate == fate for flag in flags) for fate in (TAKEN, IDLE, REFUSED)}
    counts = f"{len(flags)} flags: {found[TAKEN]} taken, {found[IDLE]} idle, {found[REFUSED]} refused."
    return HEAD.format(version=table.version, counts=counts) + "".join(map(_row, flags))


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names) + ("°" if flag.older else "")
    return f"| {names} | {_fate(flag)} | {_text(flag)} |\n"


def _fate(flag: Flag) -> str:
    if flag.fate != TAKEN:
        return f"**{flag.fate}**" if flag.fate == REFUSED else flag.fate
    return "same" if flag.to == flag.name else f"renamed: `{flag.to}`"


def _text(flag: Flag) -> str:
    values = ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in flag.values.items())
    allowed = "" if flag.allowed is None else f"({', '.join(f'`{value}`' for value in flag.allowed)} only)"
    if flag.fate == REFUSED and flag.allowed is not None:
        allowed = f"({', '.join(f'`{value}`' for value in flag.allowed)})"
    return "; ".join(filter(None, [values, flag.text])) + (f" {allowed}" if allowed else "")


if __name__ == "__main__":
    sys.stdout.write(page())
