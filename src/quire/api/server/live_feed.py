"""What those who watch an engine are shown: the core's part and the server's, encoded once for all of them.

Kept by the service, one for each engine; `live.py` is the endpoint. While nobody watches it does nothing, and has the
core record nothing. Sends an update when the core has one, and without the core's help when it is silent. Knows counts
and times, no text.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from quire.api.server import logs
from quire.errors import OverloadedError, RequestError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.supervisor import Supervisor
from quire.metrics.latencies import WINDOW_S, Latencies

MAX_WATCHERS = 8  # of all engines together
INTERVAL_S = 0.25
PATIENCE_S = 0.06  # for the core's own update, before one is made without it
MAX_NAME_CHARS = 128
MAX_GROUPS = 32  # of suspects
VERSION = 1

_encode = msgspec.json.Encoder().encode


class Watcher:
    """Iterating gives the newest update, each once. One that is slow to ask for the next misses some."""

    def __init__(self, feed: "LiveFeed") -> None:
        self.feed = feed
        self.news = asyncio.Event()
        self.is_over = False

    def end(self) -> None:
        self.is_over = True
        self.news.set()

    def leave(self) -> None:
        self.feed.watchers.discard(self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await self.news.wait()
            self.news.clear()
            if self.is_over:
                return
            yield self.feed.event


class LiveFeeds:
    """One for each engine that somebody watches or has watched."""

    def __init__(self, llm: AsyncLLM, model_name: str, started_s: float) -> None:
        self.llm = llm
        self.model_name = model_name[:MAX_NAME_CHARS]
        self.started_s = started_s  # seconds since 1970
        self.feeds = [LiveFeed(self, idx) for idx in range(len(llm.metrics.engines))]

    @property
    def num_watchers(self) -> int:
        return sum(len(feed.watchers) for feed in self.feeds)

    def join(self, engine: int) -> Watcher:
        """A new watcher, who must `leave`. OverloadedError: there are enough of them."""
        if engine >= len(self.feeds):
            there_are = f"this server has {len(self.feeds)}, counted from 0"
            raise RequestError(f"there is no engine {engine}: {there_are}", "engine")
        if self.num_watchers >= MAX_WATCHERS:
            text = f"{MAX_WATCHERS} watch the engine already, which is the limit: close another view of it"
            raise OverloadedError(text, retry_after_s=5)
        return self.feeds[engine].join()


class LiveFeed:
    def __init__(self, feeds: LiveFeeds, engine: int) -> None:
        self.feeds = feeds
        self.engine = engine
        self.llm = feeds.llm
        self.metrics = feeds.llm.metrics.engines[engine]
        self.watchers: set[Watcher] = set()
        self.event = b""  # the newest update, as it is sent
        self.core_part: bytes | None = None
        self.core_epoch = 0  # of the core whose part it is
        self.core_ts = 0.0  # when it came, by time.monotonic()
        self._watched: Supervisor | None = None
        self._core_spoke = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def join(self) -> Watcher:
        watcher = Watcher(self)
        self.watchers.add(watcher)
        if self._task is None:
            self.metrics.latencies = Latencies()
            self._task = asyncio.create_task(self._run(), name="live feed")
        return watcher

    async def _run(self) -> None:
        try:
            while self.watchers and self._is_running:
                self._attach()
                is_stale = time.monotonic() - self.core_ts > 2 * INTERVAL_S
                try:
                    async with asyncio.timeout(INTERVAL_S + (0 if is_stale else PATIENCE_S)):
                        await self._core_spoke.wait()
                except TimeoutError:
                    pass
                self._core_spoke.clear()
                self._publish()
        except Exception:
            logs.log.exception("the engine cannot be shown any more")
        finally:
            self._stop()

    @property
    def _is_running(self) -> bool:
        """A server that stops does not wait for those who watch."""
        return self.llm.accepting and self.llm.failure is None

    def _attach(self) -> None:
        if self.llm.cores is not None and self._watched is None:
            self._watched = self.llm.cores.supervisors[self.engine]
            self._watched.watch(self._take)

    def _take(self, part: bytes) -> None:
        """Called with what the core shows."""
        self.core_part = part
        self.core_ts = time.monotonic()
        self.core_epoch = self._watched.epoch if self._watched is not None else 0
        self._core_spoke.set()

    def _publish(self) -> None:
        self.event = b"data: " + self.encoded() + b"\n\n"
        for watcher in self.watchers:
            watcher.news.set()

    def _stop(self) -> None:
        self._task = None
        for watcher in self.watchers:
            watcher.end()
        if self._watched is not None:
            self._watched.watch(None)
            self._watched = None
        self.metrics.latencies = None
        self.core_part = None
        self.core_ts = 0.0

    # -- an update -----------------------------------------------------------------------------------------------

    def encoded(self) -> bytes:
        now = time.monotonic()
        supervisor = self._watched
        core = self.core_part
        if supervisor is None or not supervisor.is_ready or supervisor.epoch != self.core_epoch:
            core = None
        head = {
            "version": VERSION,
            "time_s": round(time.time(), 3),
            "core_age_s": round(now - self.core_ts, 3) if core is not None else None,
            "server": self._server(supervisor, now),
        }
        return _encode(head)[:-1] + b',"core":' + (core or b"null") + b"}"

    def _server(self, supervisor: Supervisor | None, now: float) -> dict[str, Any]:
        restarts = supervisor.restarts if supervisor is not None else ()
        recent = [
            {"ago_s": round(now - when, 1), "cause": cause.name.lower(), "was_ready": was_ready}
            for when, cause, was_ready in restarts
        ]
        groups = list(supervisor.blame.groups) if supervisor is not None else []
        return {
            "state": self._state(supervisor),
            "model": self.feeds.model_name,
            "engine": self.engine,
            "engines": len(self.feeds.feeds),
            "uptime_s": round(time.time() - self.feeds.started_s, 1),
            "watchers": self.feeds.num_watchers,
            "requests": len(supervisor.live) if supervisor is not None else 0,
            "max_requests": self.llm.serving.max_queued_requests,
            "restarts": {"count": supervisor.num_restarts if supervisor is not None else 0, "recent": recent},
            "suspects": {
                "groups": [len(group) for group in groups[:MAX_GROUPS]],
                "convicted": len(supervisor.convicted) if supervisor is not None else 0,
            },
            "latency": self._latency(),
        }

    def _state(self, supervisor: Supervisor | None) -> str:
        if supervisor is not None and supervisor.failure is not None:
            return "failed"
        if supervisor is None or not supervisor.is_ready:
            return "starting"
        if supervisor.suspension.state != "awake":
            return supervisor.suspension.state
        if supervisor.health() is not None:
            return "silent"
        return "paused" if supervisor.suspension.is_paused else "awake"

    def _latency(self) -> dict[str, Any]:
        latencies = self.metrics.latencies or Latencies()
        return {
            "window_s": WINDOW_S,
            "ttft_ms": latencies.first_token.percentiles(),
            "latency_ms": latencies.request.percentiles(),
            "token_ms": latencies.token.percentiles(),
        }
