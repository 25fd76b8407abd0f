"""What a server tells its operators: the numbers of its engines, with vLLM's metric names under `quire:`, or a prefix.

Made by the frontend, read by the server's /metrics. The numbers are those of `engine.py`, which become
prometheus-client's metric families when they are scraped, with a label that names the engine. Has no global state.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quire.metrics.engine import COUNTERS, GAUGES, HISTOGRAMS, LABELLED_COUNTERS, EngineMetrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

PREFIX = "quire:"
# Paths that machines ask for all the time: those that vLLM does not count, and ours of their kind.
UNCOUNTED = {"/metrics", "/health", "/live", "/ready", "/load", "/ping", "/version", "/server_info"}


class ServingMetrics:
    """All methods but `render` take a few microseconds at most, and none may be called from two threads at once."""

    def __init__(self, model_name: str, engines: Sequence[str] = ("0",)) -> None:
        """`engines`: the names of the server's engines."""
        self.model_name = model_name  # as clients call it
        self.prefix = PREFIX
        self.http: dict[tuple[str, str, str], int] = {}  # calls by method, path and status
        self.engines = [EngineMetrics(name) for name in engines]

    def http_request(self, method: str, handler: str, status: int) -> None:
        """A call was answered. `handler`: its path as the table of endpoints has it, of which there are few."""
        if handler not in UNCOUNTED:
            key = (method, handler, f"{status // 100}xx")
            self.http[key] = self.http.get(key, 0) + 1
        if status == 429:
            self.rejected("rate_limit")

    def rejected(self, reason: str) -> None:
        """Before an engine was chosen: such requests count for the first."""
        self.engines[0].count("admission_rejections", reason)

    def totals(self) -> tuple[dict[str, float], dict[str, int]]:
        """Gauges and counters of all engines together; the share of KV blocks in use is their mean."""
        gauges = {name: sum(engine.gauges[name] for engine in self.engines) for name in GAUGES}
        gauges["kv_cache_usage_perc"] /= len(self.engines)
        return gauges, {name: sum(engine.counters[name] for engine in self.engines) for name in COUNTERS}

    def render(self) -> tuple[bytes, str]:
        """(body, content type) for a scrape."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    @functools.cached_property
    def registry(self) -> "CollectorRegistry":
        """These metrics and the process's own (memory, CPU, files), for programs that serve them themselves."""
        # Imported at the first scrape: that takes 15 ms in a server, 90 ms in a program that has not loaded ssl.
        from prometheus_client import CollectorRegistry, ProcessCollector

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        ProcessCollector(registry=registry)
        return registry

    def collect(self) -> "Iterator[Metric]":
        """prometheus-client's collector interface."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names, prefix = ["model_name", "engine"], self.prefix
        labelled = [(engine, [self.model_name, engine.name]) for engine in self.engines]
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(prefix + name, text, labels=names)
            for engine, values in labelled:
                gauge.add_metric(values, engine.gauges[name])
            yield gauge
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(prefix + name, text, labels=names)
            for engine, values in labelled:
                counter.add_metric(values, engine.counters[name])
            yield counter
        for name, (label, text) in LABELLED_COUNTERS.items():
            counter = CounterMetricFamily(prefix + name, text, labels=[*names, label])
            for engine, values in labelled:
                for value, count in list(engine.labelled[name].items()):
                    counter.add_metric([*values, value], count)
            yield counter
        for name, (text, _) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(prefix + name, text, labels=names)
            for engine, values in labelled:
                counted = engine.histograms[name]
                histogram.add_metric(values, counted.cumulative(), counted.sum)
            yield histogram
        yield from self._parts(names, labelled)
        yield from self._server()

    def _parts(self, names: list[str], labelled: "list[tuple[EngineMetrics, list[str]]]") -> "Iterator[Metric]":
        """What follows from other metrics, so that it costs nothing until somebody asks."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        text = "Waiting requests: for room (capacity) or for their grammar (deferred)."
        waiting = GaugeMetricFamily(self.prefix + "num_requests_waiting_by_reason", text, labels=[*names, "reason"])
        text = "Prompt tokens by where their keys and values came from."
        tokens = CounterMetricFamily(self.prefix + "prompt_tokens_by_source", text, labels=[*names, "source"])
        for engine, values in labelled:
            num_deferred = engine.core.num_deferred
            waiting.add_metric([*values, "capacity"], engine.gauges["num_requests_waiting"] - num_deferred)
            waiting.add_metric([*values, "deferred"], num_deferred)
            num_cached = engine.counters["prompt_tokens_cached"]
            tokens.add_metric([*values, "local_compute"], engine.counters["prompt_tokens"] - num_cached)
            tokens.add_metric([*values, "local_cache_hit"], num_cached)
            tokens.add_metric([*values, "external_kv_transfer"], 0)
        yield waiting
        yield tokens

    def _server(self) -> "Iterator[Metric]":
        """What is not about requests: how the cache was set up, and calls by path."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        text = "How the KV cache was set up: always 1."
        labels = ["model_name", "engine", *self.engines[0].cache_info]
        info = GaugeMetricFamily(self.prefix + "cache_config_info", text, labels=labels)
        for engine in self.engines:
            info.add_metric([self.model_name, engine.name, *engine.cache_info.values()], 1)
        yield info
        calls = CounterMetricFamily("http_requests", "HTTP requests.", labels=["method", "handler", "status"])
        for key, count in list(self.http.items()):
            calls.add_metric(list(key), count)
        yield calls
