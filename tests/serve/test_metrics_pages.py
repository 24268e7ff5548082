"""docs/metrics.md and the Grafana dashboard speak of metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.core.serve.metrics.catalogue import METRICS

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "containers" / "grafana" / "octavo.json"
NAME = re.compile(r"\b(?:octavo_|vllm:)\w+")


def table() -> str:
    """The table of docs/metrics.md."""
    rows = ["| metric | kind | labels | also as | |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels, aliases = (" ".join(f"`{name}`" for name in names) for names in (metric.labels, metric.aliases))
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {aliases} | {metric.help} |")
    return "\n".join(rows)


def sample_names() -> set[str]:
    """What stands before the braces in the text."""
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    names = ((metric.kind, name) for metric in METRICS for name in (metric.name, *metric.aliases))
    return {name + end for kind, name in names for end in ends.get(kind, ("",))}


def expressions() -> Iterator[str]:
    """What the dashboard asks Prometheus."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    yield from (variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query")
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])


def test_the_page_has_the_catalogue() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert table() in text, f"replace the table in docs/metrics.md by\n\n{table()}"
    known = {name for metric in METRICS for name in (metric.name, *metric.aliases)} | sample_names()
    assert set(NAME.findall(text)) <= known


def test_every_expression_names_a_metric_that_exists() -> None:
    asked = list(expressions())
    assert len(asked) > 20
    for expression in asked:
        names = NAME.findall(expression)
        assert names, expression
        assert set(names) <= sample_names(), expression
        assert expression.count("(") == expression.count(")")


def test_expressions_group_by_labels_that_are_there() -> None:
    labels = {"le", "instance"} | {label for metric in METRICS for label in metric.labels}
    for expression in expressions():
        assert set(re.findall(r"by \((\w+)\)", expression)) <= labels, expression


def test_counters_are_only_shown_as_rates() -> None:
    rising = {metric.name for metric in METRICS if metric.kind == "counter"}
    for expression in expressions():
        for name in rising & set(NAME.findall(expression)):
            assert f"rate({name}{{" in expression


def test_panels_lie_side_by_side() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (place["x"] + i, place["y"] + j)
        for place in (panel["gridPos"] for panel in panels)
        for i in range(place["w"])
        for j in range(place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
