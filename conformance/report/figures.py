"""Figures of builds and of measurements, as columns: what the profiles `compile` and `perf` give instead of shares.

entries ──► columns: KNOWN ones first, whatever else a backend names after them ──► a table in the page
        └─► spread: the least and the most of the KNOWN ones of an op           ──► its row in the terminal
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.conformance.report.json import Entry

KNOWN = {
    "registers": "registers",
    "spill_bytes": "spilled bytes",
    "shared_bytes": "shared bytes",
    "programs_per_unit": "programs per unit",
    "us": "µs",
    "gigabytes_per_s": "GB/s",
    "teraflops_per_s": "TFLOP/s",
    "share_of_limit": "share of limit",
}
"""Figure -> its title, in the order in which they are shown. Never written to."""


def columns(entries: Iterable[Entry]) -> dict[str, str]:
    """Figure -> title, of all that any entry has."""
    present = dict.fromkeys(name for entry in entries for name in entry.figures)
    rest = {name: name.replace("_", " ") for name in present if name not in KNOWN}
    return {name: title for name, title in KNOWN.items() if name in present} | rest


def spread(entries: Sequence[Entry]) -> str:
    """ "registers 40–168 · spilled bytes 0", the least and the most of each known figure; empty without any."""
    parts = []
    for name, title in columns(entries).items():
        values = [entry.figures[name] for entry in entries if name in entry.figures]
        if name in KNOWN:
            least, most = plain(min(values)), plain(max(values))
            parts.append(f"{title} {least}" if least == most else f"{title} {least}–{most}")
    return " · ".join(parts)


def plain(value: float | None) -> str:
    """Whole numbers in full, others in three digits, never as a power of ten; "-" for none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
