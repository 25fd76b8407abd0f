"""A snapshot of an engine's metrics as plain objects, by vLLM's names for them.

Made for `LLM.get_metrics()`, from the same numbers that a server's /metrics shows. Knows Prometheus' families only.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

POSITION = "position"  # the label of counters that are a vector


@dataclass
class Metric:
    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: int


@dataclass
class Vector(Metric):
    """Counters in order: how many guessed tokens were right, by their place."""

    values: list[int]


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]  # highest value -> how many observations are at most this; the last is "+Inf"


def snapshot(families: "Iterable[Family]") -> list[Metric]:
    found: list[Metric] = []
    for family in families:
        if family.type == "gauge":
            found += [Gauge(family.name, sample.labels, sample.value) for sample in family.samples]
        elif family.type == "counter":
            found += _counters(family)
        elif family.type == "histogram":
            found += _histograms(family)
    return found


def _counters(family: "Family") -> list[Metric]:
    samples = [sample for sample in family.samples if sample.name == f"{family.name}_total"]
    if not any(POSITION in sample.labels for sample in samples):
        return [Counter(family.name, sample.labels, int(sample.value)) for sample in samples]
    vectors: dict[tuple[tuple[str, str], ...], dict[int, int]] = {}
    for sample in samples:
        rest = tuple((name, value) for name, value in sample.labels.items() if name != POSITION)
        vectors.setdefault(rest, {})[int(sample.labels[POSITION])] = int(sample.value)
    return [
        Vector(family.name, dict(labels), [counts.get(position, 0) for position in range(max(counts) + 1)])
        for labels, counts in vectors.items()
    ]


def _histograms(family: "Family") -> list[Metric]:
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        histogram = found.setdefault(tuple(labels.items()), Histogram(family.name, labels, 0, 0.0, {}))
        if sample.name.endswith("_bucket"):
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            histogram.sum = sample.value
    return list(found.values())
