"""The figures of a run of the load generator."""

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.bench.loadgen import Load, Report, Shot


def _latencies(good: "list[Shot]") -> dict[str, dict[str, float]]:
    """Times to the first token, between events, per token after the first, and of whole requests."""
    first_token_ms: list[float] = []
    per_token_ms: list[float] = []
    gaps_ms: list[float] = []
    whole_ms: list[float] = []
    for shot in good:
        gaps_ms.extend(gap_us / 1e3 for gap_us in shot.gaps_us)
        whole_ms.append((shot.end_s - shot.sent_s) * 1e3)
        if shot.first_s is None or shot.last_s is None:
            continue
        first_token_ms.append((shot.first_s - shot.sent_s) * 1e3)
        if shot.num_output_tokens > 1:
            per_token_ms.append((shot.last_s - shot.first_s) / (shot.num_output_tokens - 1) * 1e3)
    return {
        "ttft_ms": spread(first_token_ms),
        "itl_ms": spread(gaps_ms),
        "tpot_ms": spread(per_token_ms),
        "e2e_ms": spread(whole_ms),
    }


def summary(load: "Load", reports: "list[Report]") -> dict[str, Any]:
    """The figures of a run; times in milliseconds, of requests that went well."""
    shots = [shot for report in reports for shot in report.shots or ()]
    good = [shot for shot in shots if shot.error is None]
    duration_s = max(shot.end_s for shot in shots) - min(shot.sent_s for shot in shots)
    num_input = sum(shot.num_input_tokens for shot in good)
    num_output = sum(shot.num_output_tokens for shot in good)
    return {
        "model": load.model,
        "workload": f"http-{load.concurrency or 'open'}-{load.num_prompts}-{load.input_len}-{load.output_len}",
        "request_rate": load.request_rate,
        "duration_s": duration_s,
        "num_requests": len(shots),
        "num_errors": len(shots) - len(good),
        "errors": dict(Counter(shot.error for shot in shots if shot.error is not None)),
        "num_input_tokens": num_input,
        "num_output_tokens": num_output,
        "num_events": sum(shot.num_events for shot in good),
        "req_s": len(good) / duration_s,
        "in_tok_s": num_input / duration_s,
        "out_tok_s": num_output / duration_s,
        **_latencies(good),
        "num_client_processes": len(reports),
        "client_cpu_s": sum(report.cpu_s for report in reports),
        # How much of one core the busiest process used.
        "client_cpu_share": max(report.cpu_s / report.wall_s for report in reports),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Mean and percentiles; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {"mean": sum(ordered) / len(ordered)} | {f"p{p}": percentile(ordered, p) for p in (50, 90, 99)}


def percentile(ordered: list[float], percent: float) -> float:
    """By linear interpolation between the two nearest ranks, as numpy does."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
