"""Metrics: names are the published ones, numbers are prometheus-client's, and counting costs next to nothing."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from quire.frontend.requests import RequestState
from quire.messages import ChoiceDelta, EngineStats
from quire.metrics.engine import HISTOGRAMS
from quire.metrics.histogram import Histogram
from quire.metrics.serving import ServingMetrics
from quire.params import SamplingParams

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs" / "grafana.json"

# As vLLM spells them after its own prefix, and three of ours. Renaming one breaks somebody's dashboard or alert.
NAMES = """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc cache_config_info
    prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens generation_tokens
    prompt_tokens_cached prompt_tokens_by_source
    request_success admission_rejections
    time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds
    request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_inference_time_seconds
    request_prompt_tokens request_generation_tokens request_params_n iteration_tokens_total
    request_max_num_generation_tokens request_params_max_tokens request_prefill_kv_computed_tokens
    engine_restarts engine_step_seconds
    spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
    spec_decode_num_accepted_tokens_per_pos
""".split()


def families(metrics: ServingMetrics) -> dict[str, prometheus_client.Metric]:
    """What a Prometheus server would read."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def values(metrics: ServingMetrics) -> dict[str, float]:
    """Samples by name and by the labels that are neither model nor engine."""
    found = {}
    for family in families(metrics).values():
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
            found[" ".join([sample.name.removeprefix("quire:"), *labels])] = sample.value
    return found


def answered(n: int = 1, num_tokens: int = 5) -> RequestState:
    """A request that arrived at 100 s, waited for one, and got its tokens from 103 to 107."""
    request = RequestState("r", None, list(range(30)), SamplingParams(n=n), [], None)
    for choice_idx in range(n):
        request.add_delta(ChoiceDelta("r", choice_idx, list(range(num_tokens)), "length"))
    times = request.metrics
    times.arrival_time = 100.0
    times.queued_ts = 100.0
    times.scheduled_ts = 101.0
    times.first_token_ts = 103.0
    times.first_token_latency = 3.0
    times.last_token_ts = 107.0
    times.finished_ts = 107.5
    return request


def test_names_are_the_published_ones():
    found = families(ServingMetrics("m"))
    assert sorted(n.removeprefix("quire:") for n in found if n.startswith("quire:")) == sorted(NAMES)


def test_the_prefix_can_be_vllms():
    metrics = ServingMetrics("m")
    metrics.prefix = "vllm:"
    found = families(metrics)
    assert {f"vllm:{name}" for name in NAMES} <= set(found) and not any("quire" in name for name in found)


def test_every_sample_names_the_model():
    for name, family in families(ServingMetrics("org/model-1")).items():
        if name.startswith("quire:"):
            assert family.samples and all(s.labels["model_name"] == "org/model-1" for s in family.samples)
            assert all(s.labels["engine"] == "0" for s in family.samples)
            assert family.documentation


def test_names_agree_with_openmetrics_and_the_text_format():
    """The strict parser refuses bad buckets, missing sums and names that clash."""
    from prometheus_client.openmetrics.exposition import generate_latest
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as strict

    metrics = ServingMetrics("m")
    metrics.engines[0].finished(answered())
    names = {family.name for family in strict(generate_latest(metrics.registry).decode())}
    assert "quire:e2e_request_latency_seconds" in names


def test_two_engines_in_a_process_count_apart():
    one, two = ServingMetrics("one"), ServingMetrics("two")
    one.engines[0].restarted("stall")
    assert values(one)["engine_restarts_total stall"] == 1
    assert values(two)["engine_restarts_total stall"] == 0
    assert not any("quire" in family.name for family in prometheus_client.REGISTRY.collect())


def test_drafts_are_counted_by_place_and_over_restarts():
    metrics = ServingMetrics("m")
    metrics.engines[0].step(EngineStats(num_drafts=2, num_draft_tokens=6, accepted_drafts=[2, 1, 0]), 0.01, 5)
    metrics.engines[0].step(EngineStats(num_drafts=3, num_draft_tokens=10, accepted_drafts=[3, 2, 1, 1]), 0.01, 5)
    metrics.engines[0].restarted("own")
    metrics.engines[0].step(EngineStats(num_drafts=1, num_draft_tokens=2, accepted_drafts=[1, 0]), 0.01, 2)
    found = values(metrics)
    assert found["spec_decode_num_drafts_total"] == 4
    assert found["spec_decode_num_draft_tokens_total"] == 12
    assert found["spec_decode_num_accepted_tokens_total"] == 8
    by_place = [found[f"spec_decode_num_accepted_tokens_per_pos_total {place}"] for place in range(4)]
    assert by_place == [4, 2, 1, 1]


def test_a_step_moves_gauges_counters_and_latencies():
    metrics = ServingMetrics("m")
    counts = {"num_preemptions": 2, "prefix_queries": 100, "prefix_hits": 40, "step_tokens": 48}
    metrics.engines[0].step(EngineStats(num_running=3, num_waiting=7, kv_usage=0.25, **counts), 0.03, 3)
    found = values(metrics)
    assert (found["num_requests_running"], found["num_requests_waiting"], found["kv_cache_usage_perc"]) == (3, 7, 0.25)
    assert found["num_preemptions_total"] == 2
    assert (found["prefix_cache_queries_total"], found["prefix_cache_hits_total"]) == (100, 40)
    assert found["generation_tokens_total"] == 3
    assert (found["iteration_tokens_total_count"], found["iteration_tokens_total_sum"]) == (1, 48)
    assert (found["engine_step_seconds_count"], found["engine_step_seconds_sum"]) == (1, 0.03)
    assert found["inter_token_latency_seconds_count"] == 3
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.09)
    assert found["inter_token_latency_seconds_bucket 0.025"] == 0
    assert found["inter_token_latency_seconds_bucket 0.03"] == 3


def test_a_first_token_is_no_time_between_tokens():
    metrics = ServingMetrics("m")
    metrics.engines[0].first_token(answered())
    metrics.engines[0].step(EngineStats(), 0.5, 4)
    metrics.engines[0].step(EngineStats(), 0.5, 4)
    found = values(metrics)
    assert found["inter_token_latency_seconds_count"] == 3 + 4
    assert found["prompt_tokens_total"] == 30
    assert found["time_to_first_token_seconds_sum"] == 3
    assert found["request_queue_time_seconds_sum"] == 1
    assert found["request_prefill_time_seconds_sum"] == 2


def test_a_finished_request_leaves_its_times_and_sizes():
    metrics = ServingMetrics("m")
    metrics.engines[0].finished(answered(n=2))
    found = values(metrics)
    assert found["request_success_total length"] == 1
    assert found["e2e_request_latency_seconds_sum"] == 7.5
    assert found["request_decode_time_seconds_sum"] == 4
    assert found["request_time_per_output_token_seconds_sum"] == 1  # four more tokens in four seconds
    assert found["request_prompt_tokens_sum"] == 30
    assert found["request_generation_tokens_sum"] == 10
    assert found["request_params_n_sum"] == 2
    assert found["request_max_num_generation_tokens_sum"] == 5
    assert found["request_params_max_tokens_sum"] == 16  # the default
    assert found["request_inference_time_seconds_sum"] == 6


def test_a_request_that_never_got_a_token_counts_as_aborted():
    metrics = ServingMetrics("m")
    metrics.engines[0].finished(RequestState("r", None, [1, 2], SamplingParams(), [], None))
    metrics.engines[0].finished(RequestState("r", None, [1, 2], SamplingParams(), [], None), "error")
    found = values(metrics)
    assert (found["request_success_total abort"], found["request_success_total error"]) == (1, 1)
    assert found["e2e_request_latency_seconds_count"] == found["request_time_per_output_token_seconds_count"] == 0


def test_counters_never_fall_when_the_core_is_replaced():
    metrics = ServingMetrics("m")
    metrics.engines[0].step(EngineStats(num_running=9, num_preemptions=5, prefix_queries=1000, prefix_hits=10), 0.01, 1)
    metrics.engines[0].restarted("outside")
    assert values(metrics)["num_requests_running"] == 0
    metrics.engines[0].step(EngineStats(num_preemptions=1, prefix_queries=2000, prefix_hits=20), 0.01, 1)
    found = values(metrics)
    assert found["num_preemptions_total"] == 6
    assert (found["prefix_cache_queries_total"], found["prefix_cache_hits_total"]) == (3000, 30)
    assert found["engine_restarts_total outside"] == 1


def test_an_idle_core_moves_gauges_only():
    metrics = ServingMetrics("m")
    metrics.engines[0].step(EngineStats(num_running=1, num_preemptions=1), 0.01, 1)
    metrics.engines[0].step(EngineStats(num_running=0, num_preemptions=2), 0.0, 0)
    found = values(metrics)
    assert (found["num_requests_running"], found["num_preemptions_total"]) == (0, 2)
    assert found["engine_step_seconds_count"] == 1


def test_every_engine_of_a_server_has_its_own_series():
    metrics = ServingMetrics("m", ["0", "1"])
    metrics.engines[1].step(EngineStats(num_running=3, num_waiting=2, num_deferred=1), 0.01, 5)
    metrics.engines[0].step(EngineStats(num_running=1, kv_usage=0.5), 0.01, 7)
    for family in families(metrics).values():
        if family.name.startswith("quire:"):
            assert {sample.labels["engine"] for sample in family.samples} == {"0", "1"}
    running = {s.labels["engine"]: s.value for s in families(metrics)["quire:num_requests_running"].samples}
    assert running == {"0": 1, "1": 3}
    gauges, counters = metrics.totals()
    assert gauges["num_requests_running"] == 4 and gauges["kv_cache_usage_perc"] == 0.25
    assert counters["generation_tokens"] == 12


def test_rejections_are_counted_by_reason():
    metrics = ServingMetrics("m")
    metrics.rejected("queue_full")
    metrics.http_request("POST", "/v1/completions", 429)
    found = values(metrics)
    assert found["admission_rejections_total queue_full"] == found["admission_rejections_total rate_limit"] == 1


def test_calls_are_counted_without_a_prefix_by_kind_of_status():
    metrics = ServingMetrics("m")
    for status in (200, 200, 400, 404, 503):
        metrics.http_request("POST", "/v1/completions", status)
    metrics.http_request("GET", "/metrics", 200)
    found = {name: value for name, value in values(metrics).items() if name.startswith("http_requests_total")}
    path = "http_requests_total /v1/completions POST"
    assert found == {f"{path} 2xx": 2, f"{path} 4xx": 2, f"{path} 5xx": 1}


def test_prompt_tokens_are_told_apart_by_source():
    metrics, request = ServingMetrics("m"), answered()
    request.metrics.num_cached_tokens = 16
    metrics.engines[0].first_token(request)
    metrics.engines[0].finished(request)
    found = values(metrics)
    assert found["prompt_tokens_total"] == 30 and found["prompt_tokens_cached_total"] == 16
    assert found["prompt_tokens_by_source_total local_compute"] == 14
    assert found["prompt_tokens_by_source_total local_cache_hit"] == 16
    assert found["prompt_tokens_by_source_total external_kv_transfer"] == 0
    assert found["request_prefill_kv_computed_tokens_sum"] == 14


def test_waiting_requests_are_told_apart_by_reason():
    metrics = ServingMetrics("m")
    metrics.engines[0].step(EngineStats(num_waiting=7, num_deferred=2), 0.01, 0)
    found = values(metrics)
    assert found["num_requests_waiting_by_reason capacity"] == 5
    assert found["num_requests_waiting_by_reason deferred"] == 2
    metrics.engines[0].restarted("own")
    assert values(metrics)["num_requests_waiting_by_reason capacity"] == 0


def test_how_the_cache_was_set_up_is_told():
    metrics = ServingMetrics("m")
    metrics.engines[0].cache_info = {"block_size": "16", "num_gpu_blocks": "512"}
    (sample,) = families(metrics)["quire:cache_config_info"].samples
    assert sample.value == 1
    assert sample.labels == {"model_name": "m", "engine": "0", "block_size": "16", "num_gpu_blocks": "512"}


# Bounds that vLLM's histograms have: dashboards and alerts name them.
VLLM_BOUNDS = {
    "time_to_first_token_seconds": (0.001, 0.02, 0.25, 7.5, 160.0, 2560.0),
    "inter_token_latency_seconds": (0.01, 0.025, 0.075, 0.75, 80.0),
    "request_inference_time_seconds": (0.3, 0.8, 1.5, 60.0, 1920.0),
    "request_params_max_tokens": (1, 2, 5, 100, 20_000),
    "request_max_num_generation_tokens": (1, 50, 5000),
    "request_prefill_kv_computed_tokens": (10, 500_000),
}


def test_histograms_have_vllms_bounds():
    for name, bounds in VLLM_BOUNDS.items():
        assert set(bounds) <= set(HISTOGRAMS[name][1])


def test_the_process_shows_its_memory_and_file_descriptors():
    found = values(ServingMetrics("m"))
    assert found["process_resident_memory_bytes"] > 1 << 20 and found["process_open_fds"] > 2


@given(st.lists(st.tuples(st.floats(0, 200, allow_nan=False), st.integers(1, 5))))
def test_a_histogram_counts_as_prometheus_client_does(observations):
    bounds = HISTOGRAMS["inter_token_latency_seconds"][1]
    ours, theirs = Histogram(bounds), prometheus_client.Histogram("x", "x", buckets=bounds, registry=None)
    for value, times in observations:
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    samples = next(iter(theirs.collect())).samples
    assert ours.cumulative() == [(s.labels["le"], s.value) for s in samples if s.name == "x_bucket"]
    assert ours.sum == pytest.approx(next(s.value for s in samples if s.name == "x_sum"))


def test_counting_costs_microseconds():
    metrics, request = ServingMetrics("m"), answered()
    stats = EngineStats(num_running=256)
    num_calls = 2000

    def us(call) -> float:
        def once() -> float:
            started = time.process_time()
            for _ in range(num_calls):
                call()
            return (time.process_time() - started) / num_calls * 1e6

        return min(once() for _ in range(5))

    assert us(lambda: metrics.engines[0].step(stats, 0.02, 256)) < 20  # about 1.5 on a desktop; per step, not per token
    assert us(lambda: metrics.engines[0].finished(request)) < 40


def test_counting_needs_no_prometheus_client():
    program = (
        "import sys; from quire.metrics.serving import ServingMetrics; from quire.messages import EngineStats\n"
        "m = ServingMetrics('m'); m.engines[0].step(EngineStats(), 0.1, 3)\n"
        "sys.exit('prometheus_client' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_dashboard_asks_only_for_metrics_that_exist_and_for_all_of_them():
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"quire:\w+", query)}
    samples = {sample.name for family in families(ServingMetrics("m")).values() for sample in family.samples}
    assert asked <= samples
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert {f"quire:{name}" for name in NAMES} <= shown | {name.removesuffix("_total") for name in shown}


def test_dashboard_panels_have_titles_units_and_places_of_their_own():
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["uid"] and dashboard["title"] and dashboard["templating"]["list"]
    taken = set()
    for panel in dashboard["panels"]:
        box = panel["gridPos"]
        cells = {(box["x"] + x, box["y"] + y) for x in range(box["w"]) for y in range(box["h"])}
        assert panel["title"] and box["x"] + box["w"] <= 24 and not cells & taken
        taken |= cells
        assert panel["type"] == "row" or panel["fieldConfig"]["defaults"]["unit"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
