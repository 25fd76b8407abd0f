"""Keeps a core running for the live requests: starts it, hands out what it gives, replaces it when it dies or stalls.

Made by `cores.py`, for each core of a server. The truth about each request is in its RequestState, so a fresh core gets
every unfinished request with the tokens it has, and streams go on. Who may run after a crash is decided in `blame.py`,
and whether anybody may in `suspension.py`. Knows requests and processes, not text or protocols.
"""

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable
from pathlib import Path

from quire import errors
from quire.config import EngineConfig, ServingConfig
from quire.errors import (
    ClusterError,
    DeadlineError,
    EngineError,
    InternalError,
    PoisonError,
    QuireError,
    RequestError,
)
from quire.frontend.blame import MAX_DEATHS, Blame, Cause
from quire.frontend.convicted import REFUSED_FOR_S, Convicted
from quire.frontend.core_client import CoreClient, encode, end_process, start_process
from quire.frontend.core_load import CoreLoad
from quire.frontend.stream import Stream
from quire.frontend.suspension import Suspension
from quire.messages import (
    Abort,
    Answer,
    ChoiceDelta,
    EngineStats,
    Failed,
    FromCore,
    LiveUpdate,
    Prefixes,
    Question,
    Ready,
    StepOutputs,
    Vocabulary,
    Watch,
)
from quire.metrics.engine import EngineMetrics
from quire.utils.loop_share import LoopShare

log = logging.getLogger(__name__)

TICK_S = 0.25
SPARE_DELAY_S = 2.0
OUTAGE_PAUSE_S = 2.0  # before the next core looks for the machines it needs
SLOW_STEPS = 3  # a core may be silent for this many of its longest recent steps
STEP_DECAY = 0.99  # per step: how long a long step is remembered
MAX_RESTARTS = 16  # that are remembered for those who watch
MAX_SOCKET_PATH = 90  # bytes; the system's limit is 107
MAX_REQUEST_BYTES = 16 << 20  # of a request as it is sent to the core


class Supervisor:
    def __init__(
        self,
        config: EngineConfig,
        serving: ServingConfig,
        metrics: EngineMetrics,
        vocabulary: Callable[[], Vocabulary],
        convicted: Convicted,
        process: Process | None = None,
    ) -> None:
        """`convicted`: of all cores of the server. `process`: one that was started ahead."""
        parallel = config.parallel
        self.name = f"engine {parallel.data_parallel_index}" if parallel.num_engines > 1 else "the engine"
        self.config = config
        self.serving = serving
        self.metrics = metrics
        self._vocabulary = vocabulary  # asked for when the first request needs it
        self.live: dict[str, Stream] = {}
        self.blame = Blame()
        self.convicted = convicted
        self.core: CoreClient | None = None
        self.spare = process  # one that has imported everything and waits, if there is one
        self.epoch = 0
        self.stats = EngineStats()
        self.is_one_of_several = parallel.num_engines > 1
        self.load = CoreLoad()  # which it is chosen by, if it is
        self.num_restarts = 0
        self.restarts: deque[tuple[float, Cause, bool]] = deque(maxlen=MAX_RESTARTS)  # when, why, whether it was ready
        self._on_live: Callable[[bytes], None] | None = None  # gets what the core shows those who watch
        self.failure: QuireError | None = None  # why there is no core and will be none
        self.outage: ClusterError | None = None  # there is no core until the machines are back that it needs
        self.silent_s = 0.0  # since the core's last message
        self.longest_step_s = 0.0  # decays
        self._asked: list[asyncio.Future[str]] = []  # questions that the core has not answered, oldest first
        self._unsent = asyncio.Event()  # live requests may wait to be sent to the core
        self.suspension = Suspension(self.live, self.ask, self._unsent.set, self._tell_watched)
        self._sending = False  # the task that sends them is at work: new requests wait until their turn
        self.num_kv_tokens = 0  # that fit into the KV cache; the core says so when it is ready
        self._first_core = asyncio.Event()
        self._folder = _private_folder()
        self._task: asyncio.Task | None = None
        self._closing = False

    # -- living --------------------------------------------------------------------------------------------------

    @property
    def _ready_core(self) -> CoreClient | None:
        """The core, if it takes requests now."""
        return self.core if self.core is not None and self.core.ready else None

    @property
    def is_ready(self) -> bool:
        return self._ready_core is not None

    @property
    def takes_requests(self) -> bool:
        """Whether a new request would run now, and not wait for another core or for the end of a trial."""
        return self.health() is None and not self.blame.groups

    @property
    def num_to_compute(self) -> int:
        """Tokens of the core's requests that are not computed yet, as far as is known."""
        return self.stats.num_to_compute + self.load.num_unanswered

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
            self.core.kill()  # the supervising task then sees it end, or does not start it at all
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._end_spare()
        self._end_all(EngineError("the engine was shut down"))
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """As `close`, at once: for callers that cannot wait. What is left to do is done if the loop goes on."""
        self._closing = True
        if self.core is not None:
            self.core.kill()
        if self.spare is not None:
            with contextlib.suppress(ProcessLookupError):
                self.spare.kill()
        self._end_all(EngineError("the engine was shut down"))
        shutil.rmtree(self._folder, ignore_errors=True)

    def health(self) -> str | None:
        if self.failure is not None:
            return str(self.failure)
        if self.outage is not None:
            return str(self.outage)
        if self._ready_core is None:
            return "the engine is starting"
        if self.suspension.state != "awake":
            return f"the engine is {self.suspension.state}"
        if self.silent_s > self._patience_s:
            return f"the engine has not moved for {self.silent_s:.0f} s"
        return None

    async def ask(self, question: Question) -> str:
        """The problem of the core's answer; empty if there is none."""
        core = self._ready_core
        if core is None:
            return "no core"
        answer = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        core.send(question)
        return await answer

    def watch(self, on_live: Callable[[bytes], None] | None) -> None:
        """`on_live` gets what this core and those after it show, several times a second; None: nobody watches."""
        self._on_live = on_live
        self._tell_watched()

    def _tell_watched(self) -> None:
        """A core that loads nothing before it is woken up takes any message for that: it is told afterwards."""
        core = self._ready_core
        if core is not None and self.suspension.state != "asleep":
            core.send(Watch(self._on_live is not None))

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, stream: Stream, num_to_compute: int) -> None:
        """Takes a request in, which no core has. Whatever is raised here, nothing of it stays.

        `num_to_compute`: its tokens, as far as the core has not cached them."""
        if self.outage is not None:
            raise self.outage
        request = stream.request
        message = encode(request.message)
        if len(message) > MAX_REQUEST_BYTES:
            raise RequestError(
                f"the request takes {len(message):,} bytes, and {MAX_REQUEST_BYTES:,} are the limit: send less"
            )
        self.convicted.check(request)
        self.live[request.request_id] = stream
        self.load.expect(stream)
        try:
            if self._unsent.is_set() or self._sending:
                self._unsent.set()  # those who came before are sent first
            else:
                self._send(stream, message, num_to_compute)
        except BaseException:
            self._forget(request.request_id, "error")
            raise

    def abort(self, request_id: str) -> None:
        """Forgets a request; the core drops it within a step."""
        self._forget(request_id, "abort")

    def _forget(self, request_id: str, reason: str) -> None:
        stream = self.live.pop(request_id, None)
        if stream is None:
            return
        stream.request.end(reason)
        self.load.expect_no_more(stream)
        self.metrics.finished(stream.request, reason)
        core = self._ready_core
        if core is not None and stream.epoch == self.epoch:
            core.send(Abort(request_id))
        if self.blame.forget(request_id):
            self._unsent.set()

    def expire(self, stream: Stream) -> None:
        """The request's time is up."""
        if stream.request.request_id in self.live:
            self._fail(stream, DeadlineError("the request's time limit passed before it was finished: raise timeout_s"))

    def _send(self, stream: Stream, encoded: bytes | None = None, num_to_compute: int | None = None) -> None:
        """Sends a request to the core, unless it has it already or must not have it now.

        `encoded`: the request's first message, if the caller has encoded it. `num_to_compute`: as for `add`.
        """
        core, request = self._ready_core, stream.request
        is_sent = stream.epoch == self.epoch
        if core is None or is_sent or self.suspension.holds(stream):
            return
        if not self.blame.may_run(request.request_id):
            return
        if stream.epoch >= 0:
            encoded = encode(request.restart())
        elif encoded is None:
            encoded = encode(request.message)
        core.prepare(request.message, self._vocabulary)
        core.send_encoded(encoded)
        stream.epoch = self.epoch
        if self.is_one_of_several:
            self.load.sent(len(request.prompt_token_ids) if num_to_compute is None else num_to_compute)

    async def _send_unsent(self) -> None:
        """Sends live requests that the core does not have, in the order they came.

        There are some when a core is fresh, and when a trial (`blame.py`) is over.
        """
        while True:
            await self._unsent.wait()
            self._unsent.clear()
            self._sending = True
            share = LoopShare()
            for stream in list(self.live.values()):
                try:
                    self._send(stream)
                except Exception as error:
                    self._fail(stream, error)
                await share.pause()
            self._sending = False

    def _fail(self, stream: Stream, error: Exception) -> None:
        """`error`: what the core says of this request, or an exception that only this request may have caused."""
        request_id = stream.request.request_id
        if not isinstance(error, QuireError):
            log.error("request %s failed: others go on", request_id, exc_info=error)
            error = InternalError("the server failed on this request, others are not affected: its log has more")
        self._forget(request_id, "error")
        stream.fail(error)

    # -- what the core says --------------------------------------------------------------------------------------

    async def _pump(self, core: CoreClient) -> None:
        share = LoopShare()
        while True:
            self._handle(core, await core.receive())
            await share.pause()

    def _handle(self, core: CoreClient, message: FromCore) -> None:
        self.silent_s = 0.0
        match message:
            case StepOutputs():
                self._apply_outputs(core, message)
            case Ready():
                self.num_kv_tokens = message.num_tokens
                self.load.ready(message)
                core.ready = True
                self.outage = None
                self._first_core.set()
                self._unsent.set()
                if self._on_live is not None:
                    self._tell_watched()
            case Failed():
                kind = getattr(errors, message.kind, EngineError)
                log.error("%s could not start: %s", self.name, message.message)
                if not self._first_core.is_set():
                    self.failure = kind(message.message)
                elif issubclass(kind, ClusterError):
                    self._lose_cluster()
            case Answer():
                self._answer(message.problem)
            case LiveUpdate():
                if self._on_live is not None:
                    self._on_live(message.body)
            case Prefixes():
                self.load.told(message)

    def _lose_cluster(self) -> None:
        """Nobody knows for how long: whoever waits is told, and may come again."""
        self.outage = ClusterError("the machines that compute this model are not all there: try again in a moment")
        self._end_all(self.outage)

    def _answer(self, problem: str) -> None:
        answer = self._asked.pop(0)
        if not answer.done():  # whoever asked may have given up
            answer.set_result(problem)

    def _apply_outputs(self, core: CoreClient, outputs: StepOutputs) -> None:
        num_tokens = 0
        for delta in outputs.deltas:  # one call or object less here is one less for every token
            stream = self.live.get(delta.request_id)
            if stream is None:
                continue  # it ended here before the core knew
            try:
                self._apply_delta(core, stream, delta)
            except Exception as error:
                self._fail(stream, error)
            num_tokens += len(delta.token_ids)
        self.stats = outputs.stats
        self.load.counted(outputs.stats)
        self.metrics.step(outputs.stats, outputs.step_s, num_tokens)
        self.longest_step_s = max(outputs.step_s, self.longest_step_s * STEP_DECAY)

    def _apply_delta(self, core: CoreClient, stream: Stream, delta: ChoiceDelta) -> None:
        request = stream.request
        had_no_token = not request.metrics.first_token_ts
        error = core.apply_delta(request, delta)
        if error is not None:
            self._fail(stream, error)
            return
        if had_no_token and delta.token_ids:
            self.metrics.first_token(request)
            self.load.expect_no_more(stream)
        if delta.token_ids or request.finished:
            if self.blame.watches and self.blame.progressed(request.request_id):
                self._unsent.set()
        if request.finished:
            del self.live[request.request_id]
            self.load.expect_no_more(stream)
            self.metrics.finished(request)
        stream.wake()

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
        self._sending = False
        self._forget_core()
        core = self.core = CoreClient(self.config, self._folder, self.epoch)
        cause = Cause.OUTSIDE
        tasks: list[asyncio.Task] = []
        try:
            spare, self.spare = self.spare, None
            if self._closing:
                return
            is_usable = spare is not None and spare.returncode is None
            await core.start(spare if is_usable else None, self.suspension.state == "asleep")
            attendants = self._pump(core), self._send_unsent(), self._watch(core)
            tasks = [asyncio.create_task(self._prepare_spare(core)), *map(asyncio.create_task, attendants)]
            cause = await self._until_exit(core, tasks[1:])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._handle_rest(core)
            in_flight = core.in_flight()
            was_ready = core.ready
            core.ready = False
            while self._asked:
                self._answer("the core died")
            await core.close()
        if not self._closing:
            await self._after_core_exit(cause, in_flight, was_ready)

    def _forget_core(self) -> None:
        """What was known of the last core does not hold for the next."""
        self.stats = EngineStats()
        self.load.forget_core()

    async def _handle_rest(self, core: CoreClient) -> None:
        share = LoopShare()
        try:
            for message in core.rest():
                self._handle(core, message)
                await share.pause()
        except Exception:
            log.exception("what the engine said last cannot be taken in: its requests go on from what was before")

    async def _until_exit(self, core: CoreClient, attendants: list[asyncio.Task]) -> Cause:
        """Waits for the core's end, and says why it came.

        `attendants`: the tasks that work for the core. If one of them fails, the core is killed: nobody looks after it.
        """
        exited = asyncio.create_task(core.exited())
        await asyncio.wait([exited, *attendants], return_when=asyncio.FIRST_COMPLETED)
        failures = [error for task in attendants if task.done() and (error := task.exception()) is not None]
        stood_still = any(task.done() for task in attendants) and not failures
        for error in failures:
            log.error("a task of the supervisor failed: the engine is replaced", exc_info=error)
            core.kill()
        fell_by_itself = await exited
        if failures:
            return Cause.OUTSIDE
        if stood_still:
            return Cause.STALL
        return Cause.OWN if fell_by_itself and core.ready else Cause.OUTSIDE

    async def _prepare_spare(self, core: CoreClient) -> None:
        """Starts the next core's process once this core works: its imports would slow this core's start."""
        if not self.serving.standby:
            return
        while not core.ready:
            await asyncio.sleep(TICK_S)
        await asyncio.sleep(SPARE_DELAY_S)
        try:
            self.spare = await start_process(self.config)
        except Exception:
            log.exception("no process stands by: the next engine will take longer to start")

    async def _end_spare(self) -> None:
        if self.spare is not None:
            await end_process(self.spare)

    async def _after_core_exit(self, cause: Cause, in_flight: list[str], was_ready: bool) -> None:
        if self.failure is None and not self._first_core.is_set():
            self.failure = EngineError("the engine could not start: see the log above")
        if self.failure is not None:
            return
        if self.outage is not None:
            await asyncio.sleep(OUTAGE_PAUSE_S)
            return
        log.warning("%s %s; %d requests go on in a new one", self.name, cause.value, len(self.live))
        self.num_restarts += 1
        self.restarts.append((time.monotonic(), cause, was_ready))
        self.metrics.restarted(cause.name.lower())
        guilty = self.blame.died(cause, in_flight, self.live)
        if guilty is not None:
            self._convict(guilty)
        if self.blame.hopeless:
            self.failure = EngineError(
                f"{self.name} died {MAX_DEATHS} times in a row without producing a token: giving up"
            )
            log.critical("%s", self.failure)
        elif self.blame.num_deaths > 1 and not was_ready:
            await asyncio.sleep(min(0.1 * 2**self.blame.num_deaths, 5.0))  # it does not even start: wait longer

    async def _watch(self, core: CoreClient) -> None:
        """Returns after it has killed a core that stood still; time in which this process slept is not counted."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.silent_s += min(now - last, 2 * TICK_S)
            last = now
            is_loading = self.suspension.is_loading or not core.ready
            if self.silent_s > (self.serving.startup_timeout_s if is_loading else self._patience_s):
                log.error("%s has not moved for %.0f s: replacing it", self.name, self.silent_s)
                await core.dump_and_kill()
                return

    @property
    def _patience_s(self) -> float:
        return max(self.serving.watchdog_s, SLOW_STEPS * self.longest_step_s)

    def _convict(self, request_id: str) -> None:
        stream = self.live.get(request_id)
        if stream is None:
            return
        log.error("request %s takes the engine down: refused for %.0f minutes", request_id, REFUSED_FOR_S / 60)
        self.convicted.add(stream.request)
        self._fail(stream, PoisonError("this request makes the engine fail and was stopped; others are not affected"))

    def _end_all(self, error: QuireError) -> None:
        for stream in list(self.live.values()):
            self._fail(stream, error)


def _private_folder() -> Path:
    """Where sockets and records lie: only this user may enter. A long TMPDIR would not fit into a socket's address."""
    default = tempfile.gettempdir()
    parent = default if len(default) < MAX_SOCKET_PATH - 30 else "/tmp"
    return Path(tempfile.mkdtemp(prefix="quire-", dir=parent))
