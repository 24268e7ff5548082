"""Prometheus' text form, written from values of the moment.

    Metric ── name, kind, help, labels, read(source) ──► # HELP …
                                                         # TYPE …
                                                         name{labels} value

A metric may have several names (ours, and those that scrapers know); its values are read once for all of them. The
form is written here and not by prometheus-client, which took 5 ms for these metrics where this takes a fraction of
one; a test holds it against that package's parser. Nothing is kept between two scrapes but the names' spelling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from octavo.core.base.metrics import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Source = TypeVar("Source")
Labels = tuple[str, ...]
Value = float | Histogram | Mapping[Labels, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Generic[Source]):
    """One quantity.

    Attributes:
        name: ours.
        kind: counter, gauge or histogram.
        help: in one line.
        read: its value; with labels a value for each of their values; None: there is nothing to tell.
        labels: names of labels besides those of the whole text.
        aliases: other names for the same.
    """

    name: str
    kind: str
    help: str
    read: Callable[[Source], Value | None]
    labels: Labels = ()
    aliases: Sequence[str] = ()


class Exposition(Generic[Source]):
    """Writes metrics of one source.

    Args:
        metrics: in the order of the text.
        labels: of every value.
        aliases: whether metrics are given under their other names, too.
    """

    def __init__(self, metrics: Iterable[Metric[Source]], labels: Mapping[str, str], *, aliases: bool) -> None:
        self._base = tuple(labels.items())
        self._metrics = [(metric, _names(metric, aliases=aliases)) for metric in metrics]

    def write(self, source: Source) -> bytes:
        """The whole text."""
        lines: list[str] = []
        for metric, names in self._metrics:
            if (value := metric.read(source)) is not None:
                for name in names:
                    lines += self._lines(metric, name, value)
        return "".join(lines).encode()

    def _lines(self, metric: Metric[Source], name: str, value: Value) -> Iterable[str]:
        yield f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n"
        if isinstance(value, Histogram):
            yield from self._histogram(name, value)
        elif isinstance(value, Mapping):
            for values, one in value.items():
                labels = (*self._base, *zip(metric.labels, values, strict=True))
                yield f"{name}{_written(labels)} {one}\n"
        else:
            yield f"{name}{_written(self._base)} {value}\n"

    def _histogram(self, name: str, value: Histogram) -> Iterable[str]:
        """Its ranges, each with all below it, as the form wants them."""
        below = 0
        for bucket, count in zip(_buckets(name, self._base, value.bounds), value.counts, strict=True):
            below += count
            yield f"{bucket}{below}\n"
        labels = _written(self._base)
        yield f"{name}_sum{labels} {value.total}\n{name}_count{labels} {below}\n"


def _names(metric: Metric[Source], *, aliases: bool) -> Sequence[str]:
    return (metric.name, *metric.aliases) if aliases else (metric.name,)


def _written(labels: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@lru_cache(maxsize=256)
def _buckets(name: str, labels: tuple[tuple[str, str], ...], bounds: tuple[float, ...]) -> Sequence[str]:
    """How each range's line begins."""
    ends = [*map(str, bounds), "+Inf"]
    return [f"{name}_bucket{_written((*labels, ('le', end)))} " for end in ends]
