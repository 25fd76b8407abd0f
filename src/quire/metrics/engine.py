"""What one engine of a server counts, with vLLM's metric names: gauges, counters and histograms as plain numbers.

Fed by the frontend once per step and a few times per request, never per token; shown by `serving.py`. Has no global
state, and knows neither text nor clients.
"""

from collections.abc import Sequence
from typing import Protocol

from quire.messages import EngineStats
from quire.metrics.histogram import Histogram
from quire.metrics.latencies import Latencies
from quire.outputs import RequestMetrics
from quire.params import SamplingParams

# Bounds include vLLM's, so that queries which name a bucket still find it; finer for short times, for small models.
STEP_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
REQUEST_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0,
    10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
REQUEST_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))

GAUGES = {
    "num_requests_running": "Requests in the batch of the last step.",
    "num_requests_waiting": "Requests that wait to be computed.",
    "kv_cache_usage_perc": "Share of KV blocks in use, 0 to 1.",
}
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Times a running request had to give its blocks back.",
    "prompt_tokens": "Prompt tokens of requests that got their first token.",
    "prompt_tokens_cached": "Of these, tokens that were found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "spec_decode_num_drafts": "Times that guessed tokens of a request were verified.",
    "spec_decode_num_draft_tokens": "Guessed tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Guessed tokens that were right.",
}
LABELLED_COUNTERS = {  # name: (label, help)
    "request_success": ("finished_reason", "Requests that ended, by reason: stop, length, abort, error or repetition."),
    "admission_rejections": ("reason", "Requests turned away before they could wait."),
    "engine_restarts": ("reason", "Times the engine core was replaced."),
    "spec_decode_num_accepted_tokens_per_pos": (
        "position",
        "Guessed tokens that were right, by their place among those guessed at once.",
    ),
}
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {  # name: (help, bounds of its buckets)
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", FIRST_TOKEN_S),
    "inter_token_latency_seconds": (
        "Between two tokens of a request; all tokens of a step count the step's time.",
        STEP_S,
    ),
    "request_time_per_output_token_seconds": ("A request's mean time per token after its first.", STEP_S),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", REQUEST_S),
    "request_queue_time_seconds": ("How long a request waited for its first step.", REQUEST_S),
    "request_inference_time_seconds": ("From a request's first step to its last token.", REQUEST_S),
    "request_prefill_time_seconds": ("From a request's first step to its first token.", REQUEST_S),
    "request_decode_time_seconds": ("From a request's first token to its last.", REQUEST_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", REQUEST_TOKENS),
    "request_generation_tokens": ("Tokens generated for a request, all choices together.", REQUEST_TOKENS),
    "request_max_num_generation_tokens": ("Tokens generated for the longest choice of a request.", REQUEST_TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens of a request that were not cached.", REQUEST_TOKENS),
    "request_params_max_tokens": ("Tokens that an answer may have.", REQUEST_TOKENS),
    "request_params_n": ("Choices a request asks for.", (1, 2, 5, 10, 20)),
    "iteration_tokens_total": ("Tokens computed in a step.", STEP_TOKENS),
    "engine_step_seconds": ("Time of one engine step.", STEP_S),
}
# Values of labels that are shown as 0 from the start: a rate cannot be computed from a counter that first appears as 1.
KNOWN_VALUES = {
    "request_success": ("stop", "length", "abort", "error", "repetition"),
    "admission_rejections": ("queue_full", "rate_limit"),
    "engine_restarts": ("own", "outside", "stall"),  # the core crashed by itself, was killed, stopped making progress
    "spec_decode_num_accepted_tokens_per_pos": ("0",),
}


class Choice(Protocol):
    finish_reason: str | None

    @property
    def token_ids(self) -> Sequence[int]: ...


class Request(Protocol):
    """What is read of the frontend's RequestState."""

    metrics: RequestMetrics
    params: SamplingParams

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...

    @property
    def choices(self) -> Sequence[Choice]: ...


class EngineMetrics:
    """All methods take a few microseconds at most, and none may be called from two threads at once."""

    def __init__(self, name: str = "0") -> None:
        self.name = name  # of the engine
        self.cache_info: dict[str, str] = {}  # how the KV cache was set up, once that is known
        self.gauges = dict.fromkeys(GAUGES, 0.0)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.labelled = {name: dict.fromkeys(values, 0) for name, values in KNOWN_VALUES.items()}
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.latencies: Latencies | None = None  # of the last minute, while somebody watches
        self.core = EngineStats()  # as last reported by the core, whose counts start at zero with every restart
        self._num_first_tokens = 0  # since the last step: these are no time between two tokens

    def first_token(self, request: Request) -> None:
        """A request got its first token; called before `step` for the step that brought it."""
        times = request.metrics
        histograms = self.histograms
        self._num_first_tokens += 1
        self.counters["prompt_tokens"] += len(request.prompt_token_ids)
        self.counters["prompt_tokens_cached"] += times.num_cached_tokens
        histograms["time_to_first_token_seconds"].observe(times.first_token_latency)
        if self.latencies is not None:
            self.latencies.first_token.add(times.first_token_latency)
        histograms["request_queue_time_seconds"].observe(times.scheduled_ts - times.queued_ts)
        histograms["request_prefill_time_seconds"].observe(max(0.0, times.first_token_ts - times.scheduled_ts))

    def step(self, stats: EngineStats, step_s: float, num_new_tokens: int) -> None:
        """A step produced `num_new_tokens`, of all requests together. `step_s` is 0 in the reports of an idle core."""
        gauges = self.gauges
        counters = self.counters
        histograms = self.histograms
        before = self.core
        gauges["num_requests_running"] = stats.num_running
        gauges["num_requests_waiting"] = stats.num_waiting
        gauges["kv_cache_usage_perc"] = stats.kv_usage
        counters["num_preemptions"] += stats.num_preemptions - before.num_preemptions
        counters["prefix_cache_queries"] += stats.prefix_queries - before.prefix_queries
        counters["prefix_cache_hits"] += stats.prefix_hits - before.prefix_hits
        counters["generation_tokens"] += num_new_tokens
        if stats.num_drafts != before.num_drafts:
            self._drafts(stats, before)
        self.core = stats
        if not step_s:
            return
        histograms["engine_step_seconds"].observe(step_s)
        histograms["iteration_tokens_total"].observe(stats.step_tokens)
        histograms["inter_token_latency_seconds"].observe(step_s, max(0, num_new_tokens - self._num_first_tokens))
        self._num_first_tokens = 0

    def _drafts(self, stats: EngineStats, before: EngineStats) -> None:
        counters = self.counters
        counters["spec_decode_num_drafts"] += stats.num_drafts - before.num_drafts
        counters["spec_decode_num_draft_tokens"] += stats.num_draft_tokens - before.num_draft_tokens
        accepted_before = before.accepted_drafts + [0] * (len(stats.accepted_drafts) - len(before.accepted_drafts))
        for position, count in enumerate(stats.accepted_drafts):
            gained = count - accepted_before[position]
            counters["spec_decode_num_accepted_tokens"] += gained
            self.count("spec_decode_num_accepted_tokens_per_pos", str(position), gained)

    def finished(self, request: Request, reason: str | None = None) -> None:
        """A request ended: by itself, or for `reason` ("abort", "error")."""
        times = request.metrics
        histograms = self.histograms
        num_tokens = [len(choice.token_ids) for choice in request.choices]
        self.count("request_success", reason or request.choices[0].finish_reason or "abort")
        num_prompt_tokens = len(request.prompt_token_ids)
        histograms["request_prompt_tokens"].observe(num_prompt_tokens)
        histograms["request_generation_tokens"].observe(sum(num_tokens))
        histograms["request_max_num_generation_tokens"].observe(max(num_tokens))
        histograms["request_prefill_kv_computed_tokens"].observe(num_prompt_tokens - times.num_cached_tokens)
        histograms["request_params_n"].observe(len(num_tokens))
        if request.params.max_tokens is not None:
            histograms["request_params_max_tokens"].observe(request.params.max_tokens)
        if times.finished_ts:
            histograms["e2e_request_latency_seconds"].observe(times.finished_ts - times.queued_ts)
            if self.latencies is not None and reason is None:
                self.latencies.request.add(times.finished_ts - times.queued_ts)
        if times.first_token_ts:
            decode_s = times.last_token_ts - times.first_token_ts
            longest = max(num_tokens)
            histograms["request_decode_time_seconds"].observe(decode_s)
            histograms["request_inference_time_seconds"].observe(times.last_token_ts - times.scheduled_ts)
            if longest > 1:
                histograms["request_time_per_output_token_seconds"].observe(decode_s / (longest - 1))
                if self.latencies is not None:
                    self.latencies.token.add(decode_s / (longest - 1))

    def restarted(self, reason: str) -> None:
        """The core is being replaced: `reason` is one of a few words, never a message."""
        self.count("engine_restarts", reason)
        self.core = EngineStats()
        self.gauges = dict.fromkeys(GAUGES, 0.0)

    def count(self, name: str, value: str, amount: int = 1) -> None:
        counts = self.labelled[name]
        counts[value] = counts.get(value, 0) + amount
