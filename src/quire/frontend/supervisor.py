"""Keeps a core alive under the live requests: starts it, hands out what it gives, replaces it when it dies or stands still.

Used by AsyncLLM. The truth about each request is in its RequestState, so a fresh core gets every unfinished request with the tokens
it has, and streams go on. Who may run after a crash is decided in `blame.py`. Knows requests and processes, not text or protocols.
"""

import asyncio
import contextlib
import hashlib
import logging
import shutil
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire import errors
from quire.config import EngineConfig, ServingConfig
from quire.errors import DeadlineError, EngineError, PoisonError, RequestError
from quire.frontend.blame import MAX_DEATHS, Blame, Cause
from quire.frontend.core_client import CoreClient, start_process
from quire.frontend.requests import RequestState
from quire.frontend.stream import Stream
from quire.messages import Abort, Check, Checked, EngineStats, Failed, FromCore, Ready, StepOutputs, Vocabulary
from quire.metrics.serving import ServingMetrics

log = logging.getLogger(__name__)

TICK_S = 0.25
SPARE_DELAY_S = 2.0
SLOW_STEPS = 3  # a core may be silent for this many of its longest recent steps
STEP_DECAY = 0.99  # per step: how long a long step is remembered
REFUSED_FOR_S = 600.0
MAX_REFUSED = 1024
MAX_SOCKET_PATH = 90  # bytes; the system's limit is 107


class Supervisor:
    def __init__(
        self, config: EngineConfig, serving: ServingConfig, metrics: ServingMetrics, vocabulary: Callable[[], Vocabulary],
        process: Process | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.serving = serving
        self.metrics = metrics
        self._vocabulary = vocabulary  # asked for when the first request needs it
        self.live: dict[str, Stream] = {}
        self.blame = Blame()
        self.refused: dict[bytes, float] = {}  # fingerprint -> until when, by time.monotonic()
        self.core: CoreClient | None = None
        self.spare = process  # one that has imported everything and waits, if there is one
        self.epoch = 0
        self.stats = EngineStats()
        self.num_restarts = 0
        self.failure: errors.QuireError | None = None  # why there is no core and will be none
        self.silent_s = 0.0  # since the core's last message
        self.longest_step_s = 0.0  # decays
        self._checks: list[asyncio.Future[str]] = []
        self.num_kv_tokens = 0  # that fit into the KV cache; the core says so when it is ready
        self._first_core = asyncio.Event()
        self._folder = _private_folder()
        self._task: asyncio.Task | None = None
        self._closing = False

    # -- living --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when the first core takes requests; raises what kept it from that."""
        self._task = asyncio.create_task(self._supervise(), name="core supervisor")
        await self._first_core.wait()
        if self.failure is not None:
            await self.close()
            raise self.failure

    async def close(self) -> None:
        self._closing = True
        if self.core is not None:
            self.core.kill()  # the supervising task sees it end, or starts none if it had not come to that
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._end_spare()
        self._end_all(EngineError("the engine was shut down"))
        shutil.rmtree(self._folder, ignore_errors=True)

    def health(self) -> str | None:
        if self.failure is not None:
            return str(self.failure)
        if self.core is None or not self.core.ready:
            return "the engine is starting"
        if self.silent_s > self._patience_s:
            return f"the engine has not moved for {self.silent_s:.0f} s"
        return None

    async def check(self) -> str:
        """What is wrong with the core's books; empty if nothing is."""
        if self.core is None or not self.core.ready:
            return "no core"
        answer = asyncio.get_running_loop().create_future()
        self._checks.append(answer)
        self.core.send(Check())
        return await answer

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, stream: Stream) -> None:
        if self.failure is not None:
            raise self.failure
        if self.refused:
            self._refuse_poison(stream.request)
        self.live[stream.request.request_id] = stream
        self._submit(stream)

    def abort(self, request_id: str) -> None:
        """Forgets a request; the core drops it within a step."""
        self._forget(request_id, "abort")

    def _forget(self, request_id: str, reason: str) -> None:
        stream = self.live.pop(request_id, None)
        if stream is None:
            return
        stream.request.end(reason)
        self.metrics.finished(stream.request, reason)
        if stream.epoch == self.epoch and self.core is not None and self.core.ready:
            self.core.send(Abort(request_id))
        if self.blame.forget(request_id):
            self._submit_all()

    def expire(self, stream: Stream) -> None:
        """The request's time is up."""
        if stream.request.request_id in self.live:
            self._forget(stream.request.request_id, "error")
            stream.fail(DeadlineError("the request's time limit passed before it was finished: raise timeout_s"))

    def _submit(self, stream: Stream) -> None:
        core = self.core
        if core is None or not core.ready or stream.epoch == self.epoch or not self.blame.may_run(stream.request.request_id):
            return
        for message in stream.request.restart() if stream.epoch >= 0 else stream.request.messages:
            if message.constraint is not None and not core.knows_vocabulary:
                core.send(self._vocabulary())
                core.knows_vocabulary = True
            core.send(message)
        stream.epoch = self.epoch

    def _submit_all(self) -> None:
        for stream in list(self.live.values()):
            self._submit(stream)

    # -- what the core says --------------------------------------------------------------------------------------

    async def _pump(self, core: CoreClient) -> None:
        while True:
            self._take(await core.receive())

    def _take(self, message: FromCore) -> None:
        self.silent_s = 0.0
        match message:
            case StepOutputs():
                self._take_outputs(message)
            case Ready():
                self.num_kv_tokens = message.num_tokens
                self.core.ready = True
                self._first_core.set()
                self._submit_all()
            case Failed():
                kind = getattr(errors, message.kind, EngineError)
                self.failure = kind(message.message) if not self._first_core.is_set() else None
                log.error("the engine could not start: %s", message.message)
            case Checked():
                self._checks.pop(0).set_result(message.problem)

    def _take_outputs(self, outputs: StepOutputs) -> None:
        live, blame = self.live, self.blame
        num_tokens, released = 0, False
        for delta in outputs.deltas:
            stream = live.get(delta.request_id)
            if stream is None:
                continue
            request = stream.request
            if delta.finish_reason == "error":
                self._forget(delta.request_id, "error")
                stream.fail(RequestError(delta.error) if delta.error else EngineError("the engine could not take this request in"))
                continue
            is_first = request.metrics.first_token_time is None
            abort = request.take(delta)
            if abort is not None:
                self.core.send(abort)
            if delta.token_ids:
                num_tokens += len(delta.token_ids)
                if is_first:
                    self.metrics.first_token(request)
                if blame.watches:
                    released |= blame.progressed(delta.request_id)
            if request.finished:
                del live[delta.request_id]
                self.metrics.finished(request)
            stream.wake()
        if released:
            self._submit_all()
        self.stats = outputs.stats
        self.metrics.step(outputs.stats, outputs.step_s, num_tokens)
        self.longest_step_s = max(outputs.step_s, self.longest_step_s * STEP_DECAY)

    # -- the core's life -----------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        try:
            while not self._closing and self.failure is None:
                await self._one_core()
        except Exception:
            log.exception("the supervisor failed")
            self.failure = EngineError("the engine's supervisor failed: see the log")
        finally:
            self._first_core.set()
            if self.failure is not None:
                self._end_all(self.failure)

    async def _one_core(self) -> None:
        """From the start of a core to its death, and what follows from that."""
        self.epoch += 1
        self.silent_s = 0.0
        core = self.core = CoreClient(self.config, self._folder, self.epoch)
        cause = Cause.OUTSIDE
        tasks: list[asyncio.Task] = []
        try:
            spare, self.spare = self.spare, None
            if self._closing:
                return
            await core.start(spare if spare is not None and spare.returncode is None else None)
            pump, watch = asyncio.create_task(self._pump(core)), asyncio.create_task(self._watch(core))
            tasks = [pump, watch, asyncio.create_task(self._prepare_spare())]
            own_fault = await core.exited()
            if watch.done():
                cause = Cause.STALL
            elif own_fault and core.ready:
                cause = Cause.OWN
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for message in core.rest():
                self._take(message)
            in_flight, was_ready = core.in_flight(), core.ready
            core.ready = False
            await core.close()
        if not self._closing:
            await self._bury(cause, in_flight, was_ready)

    async def _prepare_spare(self) -> None:
        """When the core has taken up its work: importing would slow its start."""
        if self.serving.standby:
            await self._first_core.wait()
            await asyncio.sleep(SPARE_DELAY_S)
            self.spare = await start_process(self.config)

    async def _end_spare(self) -> None:
        if self.spare is not None:
            with contextlib.suppress(ProcessLookupError):
                self.spare.kill()
            await self.spare.wait()
            self.spare.stdin.close()

    async def _bury(self, cause: Cause, in_flight: list[str], was_ready: bool) -> None:
        for check in self._checks:
            check.set_result("the core died")
        self._checks.clear()
        if self.failure is None and not self._first_core.is_set():
            self.failure = EngineError("the engine could not start: see the log above")
        if self.failure is not None:
            return
        log.warning("the engine %s; %d requests go on in a new one", cause.value, len(self.live))
        self.num_restarts += 1
        self.metrics.restarted(cause.name.lower())
        guilty = self.blame.died(cause, in_flight, self.live)
        if guilty is not None:
            self._convict(guilty)
        if self.blame.hopeless:
            self.failure = EngineError(f"the engine died {MAX_DEATHS} times in a row without producing a token: giving up")
            log.critical("%s", self.failure)
        elif self.blame.num_deaths > 1 and not was_ready:
            await asyncio.sleep(min(0.1 * 2**self.blame.num_deaths, 5.0))  # it does not even start: no hurry

    async def _watch(self, core: CoreClient) -> None:
        """Returns after it has killed a core that stood still. Time in which this very process slept does not count."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.silent_s += min(now - last, 2 * TICK_S)
            last = now
            if self.silent_s > (self._patience_s if core.ready else self.serving.startup_timeout_s):
                log.error("the engine has not moved for %.0f s: replacing it", self.silent_s)
                await core.dump_and_kill()
                return

    @property
    def _patience_s(self) -> float:
        return max(self.serving.watchdog_s, SLOW_STEPS * self.longest_step_s)

    # -- poison --------------------------------------------------------------------------------------------------

    def _convict(self, request_id: str) -> None:
        stream = self.live.get(request_id)
        if stream is None:
            return
        log.error("request %s takes the engine down: refused for %.0f minutes", request_id, REFUSED_FOR_S / 60)
        while len(self.refused) >= MAX_REFUSED:
            del self.refused[next(iter(self.refused))]
        self.refused[_fingerprint(stream.request)] = time.monotonic() + REFUSED_FOR_S
        self._forget(request_id, "error")
        stream.fail(PoisonError("this request makes the engine fail and was stopped; others are not affected"))

    def _refuse_poison(self, request: RequestState) -> None:
        fingerprint, now = _fingerprint(request), time.monotonic()
        self.refused = {known: until for known, until in self.refused.items() if until > now}
        if fingerprint in self.refused:
            raise PoisonError("this request made the engine fail a short while ago and is refused for ten minutes")

    def _end_all(self, error: errors.QuireError) -> None:
        for request_id, stream in list(self.live.items()):
            self._forget(request_id, "error")
            stream.fail(error)


def _fingerprint(request: RequestState) -> bytes:
    content = msgspec.msgpack.encode((request.prompt_token_ids, request.params))
    return hashlib.sha256(content).digest()


def _private_folder() -> Path:
    """Where sockets and records lie: only this user may enter. A long TMPDIR would not fit into a socket's address."""
    default = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="quire-", dir=default if len(default) < MAX_SOCKET_PATH - 30 else "/tmp"))
