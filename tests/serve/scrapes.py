"""What GET /metrics says, as Prometheus reads it."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

Labels = dict[str, str]


@dataclass(frozen=True)
class Scrape:
    """One answer of /metrics.

    Attributes:
        kinds: name of each family, as it stands in the text -> counter, gauge or histogram.
        samples: (name, labels but those of every sample) -> value.
    """

    kinds: dict[str, str]
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def __getitem__(self, name: str) -> float:
        """The only value of a name."""
        return self.of(name)

    def of(self, name: str, **labels: str) -> float:
        """The value of a name with exactly these labels."""
        return self.samples[name, frozenset(labels.items())]

    def labels(self, name: str) -> Labels:
        """The labels of a name that has one value."""
        (labels,) = (labels for known, labels in self.samples if known == name)
        return dict(labels)

    def buckets(self, name: str) -> dict[str, float]:
        """End of each range of a histogram -> observations up to there."""
        return {
            dict(labels)["le"]: value for (known, labels), value in self.samples.items() if known == f"{name}_bucket"
        }


def scrape(http: httpx.Client) -> Scrape:
    """Ask, and read the answer with Prometheus' own parser."""
    response = http.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    kinds, samples = {}, {}
    for family in text_string_to_metric_families(response.text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name not in kinds, f"{name} stands there twice"
        assert family.documentation
        kinds[name] = family.type
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny", "0")
            samples[sample.name, frozenset(labels.items())] = sample.value
    return Scrape(kinds, samples)
