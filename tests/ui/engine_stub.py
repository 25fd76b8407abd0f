"""The page's stub server with a `/v1/engine/live` of docs/live.md's shape, made up by a small simulation.

The engine view's tests and its screenshots look at it: load, preemption, refusals and nonsense come when asked for.
"""

import copy
import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.ui import stub
from tests.ui.stub import Stub, StubServer

COLUMNS = "id phase prompt cached computed output max_output blocks preemptions arrived_s timeline".split()
NODE_COLUMNS = ["id", "parent", "tokens", "requests", "hits", "hit_tokens", "cached"]
STEP_COLUMNS = ["prefill", "decode", "rows", "host_ms", "device_ms"]
HISTORY_COLUMNS = "prefill decode steps running waiting used host_ms device_ms preemptions".split()
STARTUP = {
    "device": "cpu",
    "dtype": "bfloat16",
    "attention": "cpu",
    "quantization": "gguf",
    "kv_dtype": "auto",
    "executor": "inproc",
    "workers": 1,
    "pipeline_depth": 1,
    "load_s": 0.9,
    "allocate_s": 0.3,
    "graphs": 1,
}
BLOCK = 16
STEP_S = 0.04


@dataclass
class SimRequest:
    id: str
    prompt: int
    cached: int
    max_output: int
    arrived: float
    computed: int = 0
    output: int = 0
    phase: str = "queued"
    preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    timeline: list[list[Any]] = field(default_factory=list)

    def row(self, now: float) -> list[Any]:
        if self.timeline and self.timeline[-1][0] in ("queue", "decode") and self.phase != "ended":
            self.timeline[-1][2] = round(now, 3)
        return [
            self.id,
            self.phase,
            self.prompt,
            self.cached,
            self.computed,
            self.output,
            self.max_output,
            len(self.blocks),
            self.preemptions,
            round(self.arrived, 3),
            self.timeline[-16:],
        ]


class Simulation:
    """An engine that computes nothing: requests arrive, fill blocks, are preempted when there are none, and end."""

    def __init__(self, seed: int = 1, load: float = 2.1, blocks: int = 767, max_running: int = 20) -> None:
        self.random = random.Random(seed)
        self.load, self.num_blocks, self.max_running = load, blocks, max_running
        self.now = 0.0
        self.free = list(range(blocks))
        self.cached: deque[int] = deque()
        self.running: list[SimRequest] = []
        self.waiting: list[SimRequest] = []
        self.ended: deque[SimRequest] = deque(maxlen=8)
        self.steps: deque[list[float]] = deque(maxlen=64)
        self.history: deque[list[float]] = deque(maxlen=120)
        self.slot = [0.0] * 9
        self.count = self.preemptions = self.preempted_in_slot = self.queries = self.hits = self.updates = 0
        self.nodes = [[self.random.randrange(1, 9999), 0, 256, 0, 0, 0, 1]]
        for i in range(14):
            parent = self.nodes[self.random.randrange(max(1, i // 2))][0]
            self.nodes.append([i + 10000, parent, 32 * self.random.randrange(1, 40), 0, 0, 0, int(i % 5 != 4)])

    def run(self, seconds: float) -> "Simulation":
        for _ in range(round(seconds / STEP_S)):
            self.step()
        return self

    def step(self) -> None:
        self.now += STEP_S
        if self.random.random() < self.load * STEP_S:
            self._arrive()
        self._admit()
        prefill, decode = self._compute()
        rows = len(self.running)
        device = 0.0 if rows == 0 else 12 + 0.45 * rows + prefill * 0.012 + self.random.random() * 2
        host = 0.25 + 0.02 * rows + self.random.random() * 0.1
        if rows:
            self.count += 1
            self.steps.append([prefill, decode, rows, round(host, 2), round(device, 2)])
        self._record(prefill, decode, rows, host, device)

    def _arrive(self) -> None:
        prompt = int(40 + self.random.paretovariate(1.1) * 160) % 4000
        cached = self._through_tree(prompt)
        most = self.random.choice([64, 128, 256, 512])
        request = SimRequest(f"{self.random.getrandbits(32):08x}", prompt, cached, most, self.now)
        request.timeline.append(["queue", round(self.now, 3), round(self.now, 3)])
        self.queries += prompt
        self.waiting.append(request)

    def _through_tree(self, prompt: int) -> int:
        node, found = self.nodes[0], 0
        while True:
            node[3] += 1
            if node[3] > 1 and node[6]:
                node[4] += 1
                node[5] += node[2]
                found += node[2]
            children = [child for child in self.nodes if child[1] == node[0]]
            if not children or self.random.random() < 0.3:
                break
            node = self.random.choice(children)
        found = min(found, (prompt - 1) // BLOCK * BLOCK)
        self.hits += found
        return found

    def _take(self, request: SimRequest, tokens: int) -> bool:
        while len(request.blocks) * BLOCK < tokens:
            if not self.free and self.cached:
                self.free.append(self.cached.popleft())
            if not self.free:
                return False
            request.blocks.append(self.free.pop(0))
        return True

    def _let_go(self, request: SimRequest) -> None:
        for block in request.blocks:
            (self.cached if self.random.random() < 0.6 else self.free).append(block)
        request.blocks = []
        self.free.sort()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if len(self.free) + len(self.cached) < (request.prompt + request.output) // BLOCK + 1:
                return
            self.waiting.pop(0)
            request.timeline[-1][2] = round(self.now, 3)
            request.phase, request.computed = "prefill", request.cached
            self.running.append(request)

    def _compute(self) -> tuple[int, int]:
        budget, prefill, decode = 2048 - len(self.running), 0, 0
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for one before it
            goal = request.prompt + request.output
            if request.phase == "prefill":
                tokens = min(budget, goal - request.computed, 1024)
                if tokens and self._room(request, request.computed + tokens):
                    self._prefill(request, tokens, goal)
                    budget, prefill = budget - tokens, prefill + tokens
            elif self._room(request, goal + 1):
                self._decode(request)
                decode += 1
        return prefill, decode

    def _room(self, request: SimRequest, tokens: int) -> bool:
        while not self._take(request, tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: SimRequest) -> None:
        self.running.remove(request)
        self._let_go(request)
        at = round(self.now, 3)
        if request.timeline[-1][0] == "decode":
            request.timeline[-1][2] = at
        request.timeline += [["preempt", at, at], ["queue", at, at]]
        request.phase, request.computed = "preempted", 0
        request.preemptions += 1
        self.preemptions += 1
        self.preempted_in_slot += 1
        self.waiting.insert(0, request)

    def _prefill(self, request: SimRequest, tokens: int, goal: int) -> None:
        request.timeline.append(["prefill", round(self.now - STEP_S, 3), round(self.now, 3), tokens])
        request.computed += tokens
        if request.computed >= goal:
            request.phase = "decode"
            request.timeline.append(["decode", round(self.now, 3), round(self.now, 3), 0])

    def _decode(self, request: SimRequest) -> None:
        request.output += 1
        request.computed += 1
        request.timeline[-1][2:] = [round(self.now, 3), request.timeline[-1][3] + 1]
        if request.output < request.max_output and self.random.random() > 0.002:
            return
        self.running.remove(request)
        self._let_go(request)
        request.phase = "ended"
        request.timeline.append(["end", round(self.now, 3), round(self.now, 3)])
        self.ended.appendleft(request)

    def _record(self, prefill: int, decode: int, rows: int, host: float, device: float) -> None:
        slot = self.slot
        slot[0] += prefill
        slot[1] += decode
        slot[2] += 1
        slot[6] += host
        slot[7] += device
        if self.now % 0.5 < STEP_S:
            used = sum(len(r.blocks) for r in self.running) / self.num_blocks
            steps = max(1, slot[2])
            self.history.append(
                [
                    slot[0],
                    slot[1],
                    slot[2],
                    rows,
                    len(self.waiting),
                    round(used, 3),
                    round(slot[6] / steps, 2),
                    round(slot[7] / steps, 2),
                    self.preempted_in_slot,
                ]
            )
            self.slot, self.preempted_in_slot = [0.0] * 9, 0

    def update(self) -> dict[str, Any]:
        self.updates += 1
        return {
            "version": 1,
            "time_s": time.time(),
            "core_age_s": 0.004,
            "server": self._server(),
            "core": self._core(),
        }

    def _server(self) -> dict[str, Any]:
        ended = len(self.ended)
        return {
            "state": "awake",
            "model": "smollm2",
            "uptime_s": 4000 + self.now,
            "engine": 0,
            "engines": 1,
            "watchers": 1,
            "requests": len(self.running) + len(self.waiting),
            "max_requests": 4096,
            "restarts": {"count": 0, "recent": []},
            "suspects": {"groups": [], "convicted": 0},
            "latency": {
                "window_s": 60,
                "ttft_ms": _percentiles(ended, 48.1),
                "latency_ms": _percentiles(ended, 3820.4),
                "token_ms": _percentiles(ended, 21.4),
            },
        }

    def _core(self) -> dict[str, Any]:
        requests = self.running[:64] + self.waiting[:16] + list(self.ended)
        last = list(self.history)[-4:] or [[0.0] * 9]
        rates = [sum(point[i] for point in last) / 2 for i in range(3)]
        left_out = [max(0, len(self.running) - 64), max(0, len(self.waiting) - 16)]
        return {
            "update": self.updates,
            "watched_s": self.now,
            "now_s": round(self.now, 3),
            "counts": {
                "running": len(self.running),
                "waiting": len(self.waiting),
                "deferred": 0,
                "preemptions": self.preemptions,
                "prefix_queries": self.queries,
                "prefix_hits": self.hits,
            },
            "limits": {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 8192},
            "rates": dict(zip(["prefill_tokens_s", "decode_tokens_s", "steps_s"], rates, strict=True)),
            "requests": {"columns": COLUMNS, "rows": [r.row(self.now) for r in requests], "left_out": left_out},
            "steps": {"count": self.count} | _columns(STEP_COLUMNS, self.steps),
            "history": {"interval_s": 0.5} | _columns(HISTORY_COLUMNS, self.history),
            "kv": {"pools": [self._pool(requests)]},
            "prefix": {"enabled": True, "columns": NODE_COLUMNS, "nodes": [node for node in self.nodes if node[3] > 0]},
            "speculation": None,
            "startup": STARTUP | {"kv_tokens": self.num_blocks * BLOCK},
        }

    def _pool(self, requests: list[SimRequest]) -> dict[str, Any]:
        per = -(-self.num_blocks // 400)
        cells = -(-self.num_blocks // per)
        owned, cached, owner = [0] * cells, [0] * cells, [-1] * cells
        for idx, request in enumerate(requests):
            for block in request.blocks:
                owned[block // per] += 1
                owner[block // per] = idx
        for block in self.cached:
            cached[block // per] += 1
        total, kept = sum(owned), len(self.cached)
        return {
            "blocks": self.num_blocks,
            "free": self.num_blocks - total - kept,
            "cached": kept,
            "owned": total,
            "block_tokens": [BLOCK],
            "cell_blocks": per,
            "refresh_s": 0.25,
            "cells": {"owned": owned, "cached": cached, "owner": owner},
        }


def _columns(names: list[str], rows: Iterable[list[float]]) -> dict[str, list[float]]:
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def _percentiles(count: int, middle: float) -> dict[str, Any]:
    if count == 0:
        return {"count": 0, "p50": None, "p90": None, "p99": None}
    return {"count": count, "p50": middle, "p90": round(middle * 1.9, 1), "p99": round(middle * 3.1, 1)}


class EngineStub(StubServer):
    """`with EngineStub() as stub: stub.url`. `refuse` makes the next watchers fail, `drop()` ends the streams there
    are, `is_silent` keeps them open and says nothing, `change` edits each update before it is sent; `raw` and `once`
    are sent in its place."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.busy = Simulation().run(88)  # what every test begins with
        self.lock = threading.Lock()
        self.epoch = self.num_streams = self.num_sent = 0
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.reset()

    def reset(self, is_frozen: bool = False) -> None:
        with self.lock:
            self.stub = Stub()
            self.simulation = copy.deepcopy(self.busy)
            self.last_step = time.monotonic()
            self.is_frozen = is_frozen  # the simulation stands still
            self.refuse = 0  # a status
            self.is_silent = False
            self.key = ""
            self.change: Callable[[dict[str, Any]], Any] = lambda update: update
            self.raw: bytes | None = None
            self.once: list[bytes] = []  # whole events
            self.paths: list[str] = []

    def __enter__(self) -> "EngineStub":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()
        self.shutdown()
        self.server_close()

    def drop(self) -> None:
        self.epoch += 1

    def next_update(self) -> bytes:
        with self.lock:
            now = time.monotonic()
            if not self.is_frozen:
                self.simulation.run(min(1.0, now - self.last_step))
            self.last_step = now
            if self.once:
                return self.once.pop(0)
            if self.raw is not None:
                return b"data: " + self.raw + b"\n\n"
            return b"data: " + json.dumps(self.change(self.simulation.update())).encode() + b"\n\n"

    def stream(self) -> Iterator[bytes]:
        epoch = self.epoch
        while epoch == self.epoch:
            if not self.is_silent:
                yield self.next_update()
            time.sleep(0.25)


class Handler(stub.Handler):
    server: EngineStub

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        if self.path.partition("?")[0] == "/v1/engine/live":
            self._live()
        else:
            super().do_GET()

    def _live(self) -> None:
        server = self.server
        if server.refuse:
            soon = [("Retry-After", "1")] if server.refuse < 500 or server.refuse == 503 else []  # tests need not wait
            return self.error(server.refuse, "refused", "not now", soon)
        if server.key and self.headers.get("Authorization", "") != f"Bearer {server.key}":
            return self.error(401, "invalid_api_key", "an operator's key is needed")
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        server.num_streams += 1
        try:
            for event in server.stream():
                self.wfile.write(event)
                server.num_sent += 1
        except OSError:
            pass  # the page left
        finally:
            server.num_streams -= 1
