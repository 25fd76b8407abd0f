"""What the engine does, for those who watch: an update four times a second, as the JSON that `docs/live.md` describes.

Made by the engine when the first watcher comes and dropped with the last, so that it costs nothing else. The engine
tells it of every step; everything else is looked up when an update is due. Reads what the core has, changes nothing of
it, and shows no text, token, hash or id that a client knows.
"""

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config import resolved
from quire.core.live import requests as tracking
from quire.core.live.blocks import BlockMap
from quire.core.live.prefixes import MAX_NODES, PrefixTree
from quire.core.live.requests import MAX_ENTRIES, MAX_RUNNING, MAX_WAITING, Tracks
from quire.core.live.steps import StepHistory, TimedExecutor
from quire.core.pipeline import PlannedStep
from quire.core.request import Request, Status
from quire.messages import EngineStats, StepOutputs
from quire.step import TOKEN

if TYPE_CHECKING:
    from quire.core.engine import Engine

INTERVAL_S = 0.25
MAX_BYTES = 31_000  # of an update: the server adds its part, and both together are at most 32 KB
# (entries of a timeline, nodes of the tree) where an update would be too long, more and more of them left out.
SHORTER = ((MAX_ENTRIES, MAX_NODES), (4, 120), (2, 60), (1, 30))
TRY_LONGER = 20  # updates after which it is tried whether more fits again

_encode = msgspec.json.Encoder().encode


class LiveView:
    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.origin = time.monotonic()
        self.executor = TimedExecutor(engine.pipeline.executor)
        engine.pipeline.executor = self.executor
        self.on_cpu = engine.config.device.device == "cpu"
        self.steps = StepHistory(self.origin, engine.stats())
        self.tracks = Tracks(self.origin, len(engine.kv.groups))
        self.blocks = BlockMap(engine.kv)
        self.prefixes = PrefixTree(engine.kv)
        self.limits = msgspec.Raw(_encode(_limits(engine)))
        self.startup = msgspec.Raw(_encode(_startup(engine)))
        self.num_updates = 0
        self.due = self.origin
        self.shorter = 0  # index into SHORTER
        self.prefilling: set[Request] = set()  # part of whose prompt is computed
        self.last = (0, 0, 0)  # of the last step: prefill tokens, decode tokens, requests
        self.seen_preemptions = engine.scheduler.stats.num_preemptions
        self.seen_requests = len(engine.scheduler.requests)

    def close(self) -> None:
        self.engine.pipeline.executor = self.executor.executor

    # -- steps ---------------------------------------------------------------------------------------------------

    def timed(self, step: Callable[[], StepOutputs]) -> StepOutputs:
        """Takes a step of the engine, and measures it."""
        executor = self.executor
        executor.launch_s = executor.wait_s = 0.0
        started = time.perf_counter()
        outputs = step()
        if outputs.stats.step_tokens:
            device_s = executor.wait_s + (executor.launch_s if self.on_cpu else 0.0)
            host_s = time.perf_counter() - started - device_s
            self.steps.add(*self.last, host_s * 1000, device_s * 1000)
        return outputs

    def saw(self, step: PlannedStep) -> None:
        """A step was applied."""
        plan, scheduler = step.plan, self.engine.scheduler
        now = time.monotonic()
        launched = self.executor.launched.pop(plan.step_id, now)
        num_rows = len(plan.rows)
        num_prefill = 0
        if plan.new_rows or self.prefilling or plan.num_tokens != plan.produces:
            num_prefill = self._saw_prompts(step, launched - self.origin, now - self.origin)
        self.last = (num_prefill, plan.total_tokens - num_prefill, num_rows)
        if scheduler.stats.num_preemptions != self.seen_preemptions:
            self.seen_preemptions = scheduler.stats.num_preemptions
            self.tracks.find_preempted(now - self.origin)
            self.prefilling = {request for request in self.prefilling if request.status is Status.RUNNING}
        if len(scheduler.requests) != self.seen_requests:
            self.seen_requests = len(scheduler.requests)
            self._find_ended(now - self.origin)

    def _saw_prompts(self, step: PlannedStep, launched_s: float, now_s: float) -> int:
        """Notes the chunks of prompts that the step computed; how many tokens these were."""
        plan = step.plan
        new_rows = {start.row for start in plan.new_rows}
        num_prefill = 0
        for row, start, entry in zip(plan.rows, plan.starts, step.entries):
            request = entry.request
            if entry.num_preemptions != request.num_preemptions:  # since then it got another row, or none
                num_prefill += entry.num_tokens if entry.num_tokens != entry.produces else 0
            elif start < request.num_row_start:  # else it is generating
                num_prefill += entry.num_tokens
                self.tracks.of(request).computed_prompt(launched_s, now_s, entry.num_tokens)
                if entry.produces < TOKEN and request.status is Status.RUNNING:
                    self.prefilling.add(request)
                else:
                    self.prefilling.discard(request)
            if row in new_rows and entry.num_preemptions == 0:
                self._saw_prefix(request)
        return num_prefill

    def _saw_prefix(self, request: Request) -> None:
        size = self.prefixes.block_tokens
        hashes = request.blocks.chains[size].hashes
        self.prefixes.insert(hashes, request.num_prompt_tokens // size, request.num_cached_tokens // size)

    def _find_ended(self, now_s: float) -> None:
        self.tracks.find_ended(now_s)
        self.prefilling = {request for request in self.prefilling if request.status is not Status.FINISHED}

    # -- updates -------------------------------------------------------------------------------------------------

    def wait_ms(self, longest_ms: int) -> int:
        """How long an idle core may wait for messages."""
        return max(1, min(longest_ms, int((self.due - time.monotonic()) * 1000) + 1))

    def due_update(self) -> bytes | None:
        """The next update, if it is time for it."""
        now = time.monotonic()
        if now < self.due:
            return None
        self.due = self.due + INTERVAL_S if now < self.due + INTERVAL_S else now + INTERVAL_S
        return self.update(now)

    def update(self, now: float) -> bytes:
        engine, now_s = self.engine, now - self.origin
        self.num_updates += 1
        stats = engine.stats()
        self.steps.end_points(now, stats)
        self.tracks.find_preempted(now_s)
        self._find_ended(now_s)
        if self.shorter and self.num_updates % TRY_LONGER == 0:
            self._shorten(self.shorter - 1)
        while len(body := _encode(self._shown(stats, now_s))) > MAX_BYTES and self.shorter < len(SHORTER) - 1:
            self._shorten(self.shorter + 1)
        return body

    def _shorten(self, level: int) -> None:
        self.shorter = level
        self.prefixes.forget_encoded()

    def _shown(self, stats: EngineStats, now_s: float) -> dict[str, Any]:
        max_entries, max_nodes = SHORTER[self.shorter]
        requests, row_of = self._requests(stats, now_s, max_entries)
        self.blocks.sweep(row_of)
        return {
            "update": self.num_updates,
            "watched_s": round(now_s, 3),
            "now_s": round(now_s, 3),
            "counts": {
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "deferred": stats.num_deferred,
                "preemptions": stats.num_preemptions,
                "prefix_queries": stats.prefix_queries,
                "prefix_hits": stats.prefix_hits,
            },
            "limits": self.limits,
            "rates": self.steps.rates(),
            "requests": requests,
            "steps": self.steps.last_steps(),
            "history": self.steps.history(),
            "kv": self.blocks.shown(INTERVAL_S),
            "prefix": self.prefixes.shown(max_nodes),
            "speculation": self._speculation(stats),
            "startup": self.startup,
        }

    def _requests(self, stats: EngineStats, now_s: float, max_entries: int) -> tuple[dict[str, Any], dict[int, int]]:
        """The table of requests, and the row of each that runs by the number that the map of blocks has for it."""
        tracks, blocks = self.tracks, self.blocks
        scheduler, guides = self.engine.scheduler, self.engine.guides
        now = f"{now_s:.3f}"
        rows: list[str] = []
        row_of: dict[int, int] = {}
        for request in scheduler.running[:MAX_RUNNING]:
            track = tracks.running(request, now_s)
            row_of[track.number] = len(rows)
            num_blocks = blocks.walk(track.number, request.blocks, track.seen)
            rows.append(track.row(tracking.running_phase(request), num_blocks, now, max_entries))
        num_running = len(rows)
        deferred = [request for request, *_ in guides.waiting]
        tracks.forget_refused(deferred, scheduler.requests)
        waiting = [(tracks.deferred(request), "grammar") for request in deferred[:MAX_WAITING]]
        in_line = (request for request in scheduler.requests.values() if request.status is not Status.RUNNING)
        for request in itertools.islice(in_line, MAX_WAITING - len(waiting)):
            waiting.append((tracks.of(request), tracking.waiting_phase(request)))
        rows += [track.row(phase, 0, now, max_entries) for track, phase in waiting]
        rows += [track.row("ended", 0, now, max_entries) for track in tracks.ended]
        left_out = stats.num_running - num_running, max(0, stats.num_waiting - len(waiting))
        encoded = msgspec.Raw(f"[{','.join(rows)}]".encode())
        return {"columns": tracking.COLUMNS, "rows": encoded, "left_out": left_out}, row_of

    def _speculation(self, stats: EngineStats) -> dict[str, Any] | None:
        speculation = self.engine.config.speculative.speculation
        if speculation is None and not stats.num_drafts:
            return None
        accepted, drafted = sum(stats.accepted_drafts), stats.num_draft_tokens
        return {
            "method": speculation.method if speculation is not None else "prediction",
            "drafts": stats.num_drafts,
            "draft_tokens": drafted,
            "accepted": accepted,
            "acceptance": round(accepted / drafted, 3) if drafted else None,
            "recent_acceptance": self.steps.recent_acceptance(),
            "by_place": stats.accepted_drafts,
        }


def _limits(engine: "Engine") -> dict[str, Any]:
    scheduler = engine.config.scheduler
    return {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": resolved(scheduler.max_num_batched_tokens),
        "max_model_len": engine.max_model_len,
    }


def _startup(engine: "Engine") -> dict[str, Any]:
    config = engine.config
    return {
        "device": config.device.device,
        "dtype": config.model.dtype,
        "attention": config.device.attention_backend,
        "quantization": config.model.quantization,
        "kv_dtype": config.cache.kv_cache_dtype,
        "executor": config.parallel.executor.partition(":")[0].rpartition(".")[2],
        "workers": config.parallel.num_workers,
        "pipeline_depth": resolved(config.scheduler.pipeline_depth),
        "load_s": round(engine.load_s, 3),
        "allocate_s": round(engine.allocate_s, 3),
        "graphs": engine.executor.num_graphs,
        "kv_tokens": engine.kv.num_tokens,
    }
