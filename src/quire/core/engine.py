"""THE loop: plan, submit, apply.

Owned by whoever runs a core: `LLM` in its own process, or `core/process.py` behind a socket. Knows requests and steps,
not text, tensors or clients.
"""

import importlib
import logging
import time
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec

from quire import registry
from quire.config import EngineConfig, resolved
from quire.core.drafting import Drafting
from quire.core.pipeline import Pipeline, PlannedStep
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.errors import EngineError
from quire.executor.base import Executor
from quire.kv.groups import check_capacity, form_layout, with_blocks
from quire.kv.manager import KVManager
from quire.kv.news import PrefixNews
from quire.kv.specs import KVLayout
from quire.kv.tier import NoTier
from quire.messages import (
    Abort,
    AddRequest,
    Answer,
    Check,
    ChoiceDelta,
    Constraint,
    EngineStats,
    FromCore,
    Hold,
    Prefixes,
    Ready,
    ResetPrefixCache,
    Sleep,
    StepOutputs,
    ToCore,
    Vocabulary,
    WakeUp,
    Watch,
)
from quire.utils.flight import FlightRecorder, NoRecorder

if TYPE_CHECKING:
    from quire.core.guides import Guides
    from quire.core.live.view import LiveView

log = logging.getLogger(__name__)

GUIDES = "quire.core.guides"  # imported when the first request needs it: grammar engines are large
LIVE = "quire.core.live.view"  # imported when somebody watches


def executor_module(name: str) -> ModuleType:
    """The executor's file; what follows a colon in `name` is read by the executor itself."""
    return registry.load("quire.executor", name.partition(":")[0])


class NoGuides:
    """Stands for `Guides` as long as the vocabulary is not known: no request can have a grammar."""

    waiting = ()
    has_work = False
    num_tokens = 0

    def add(self, request: Request, constraint: Constraint) -> None:
        raise EngineError("a request with a grammar came before the vocabulary: this is a bug in the frontend")

    def take_decided(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        return [], []

    def abort(self, request_id: str, choice_idx: int | None) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


class Engine:
    """A core: `handle` takes a frontend's messages, `step` returns what one step gave. `config` is resolved."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor | None = None,
        recorder: NoRecorder | FlightRecorder = NoRecorder(),
        tier: NoTier = NoTier(),
    ) -> None:
        self.config = config
        self.max_model_len = resolved(config.model.max_model_len)
        started = time.monotonic()
        self.executor = executor or executor_module(config.parallel.executor).EXECUTOR(config)
        self.load_s = time.monotonic() - started
        try:
            layout = self._layout(tier)
            self.executor.allocate(layout)
        except BaseException:
            self.executor.close()
            raise
        self.allocate_s = time.monotonic() - started - self.load_s
        self.pipeline = Pipeline(self.executor, resolved(config.scheduler.pipeline_depth), recorder)
        self.is_one_of_several = config.parallel.num_engines > 1  # among which the frontend chooses
        self.num_received = 0  # requests
        self.news = PrefixNews() if self.is_one_of_several and config.cache.enable_prefix_caching else None
        self.kv = KVManager(layout, config.cache.enable_prefix_caching, tier, self.news)
        drafting = Drafting(
            self.executor.num_drafts,
            config.speculative.speculation,
            on_cpu=config.device.device == "cpu",
            num_ahead=self.executor.num_ahead,
            draft_cost=self.executor.draft_cost,
        )
        num_stages = config.parallel.pipeline_parallel_size
        counts_work = self.is_one_of_several
        self.scheduler = Scheduler(config.scheduler, self.kv, self.pipeline, drafting, num_stages, counts_work)
        # An operator's own logits processors look at the one token of a request that is next.
        self.can_propose = self.kv.can_rewind and not config.structured.logits_processors
        self.guides: NoGuides | Guides = NoGuides()
        self.unsent: list[ChoiceDelta] = []  # for the next step's outputs: requests that will never run, and others
        self.live: LiveView | None = None  # what those who watch are shown
        self.is_asleep = False
        self.is_held = False  # nothing is computed: the operator has paused everything

    def handle(self, message: ToCore) -> FromCore | None:
        """Acts on a message; returns the answer, if it has one."""
        match message:
            case AddRequest():
                self._add(message)
            case Vocabulary():
                guides = importlib.import_module(GUIDES).Guides.of(message, self.config.structured, self.executor)
                self.guides = guides
                self.pipeline.late_inputs = guides
            case Abort():
                self._abort(message)
            case Watch():
                self._watch(message.is_on)
            case Check():
                return Answer(self._problem())
            case ResetPrefixCache():
                return Answer(self._reset_prefix_cache(message.reset_running_requests))
            case Sleep():
                self._sleep(message.keep_weights)
                return Answer()
            case WakeUp():
                self._wake_up()
                return Answer()
            case Hold():
                self._finish_steps()
                self.is_held = message.is_held
                return Answer()
        return None

    def step(self) -> StepOutputs:
        """One turn: fill the pipeline, then wait for the oldest step and apply its results."""
        return self._step() if self.live is None else self.live.timed(self._step)

    def _step(self) -> StepOutputs:
        """Threads fill grammars' masks from the moment a step's tokens arrive until the next step is planned."""
        unsent, self.unsent = self.unsent, []
        if self.is_asleep or self.is_held:
            return StepOutputs(unsent, self.stats())
        self._admit_guided()
        while self.pipeline.has_room and (step := self.scheduler.plan()) is not None:
            self.pipeline.submit(step)
        if not self.pipeline.steps:
            if self.scheduler.has_work:
                raise EngineError("requests are waiting and none can run: this is a bug in the scheduler")
            unsent, self.unsent = unsent + self.unsent, []
            if not unsent:
                self.guides.wait()
            return StepOutputs(unsent, self.stats())
        step, result = self.pipeline.wait()
        deltas = self.scheduler.apply(step, result)
        deltas += unsent
        if self.live is not None:
            self._show(step)
        return StepOutputs(deltas, self.stats(step.plan.total_tokens))

    def refuse(self, request_id: str, choice_idx: int = 0, error: str = "") -> None:
        """Ends a request that never ran. `error`: what is wrong with the request, if that is the reason."""
        self.unsent.append(ChoiceDelta(request_id, choice_idx, [], "error", error=error))

    def _add(self, message: AddRequest) -> None:
        """Adds all choices of a request, or none of them if one fails. Other requests are not affected."""
        self.num_received += 1
        try:
            for choice_idx in message.choices:
                self._add_choice(message, choice_idx)
        except Exception:
            log.exception("request %s cannot be added", message.request_id)
            self._abort(Abort(message.request_id))
            self.refuse(message.request_id)

    def _add_choice(self, message: AddRequest, choice_idx: int) -> None:
        params = message.params
        if choice_idx > 0 and params.prompt_logprobs is not None:
            # They are the same for every choice: only the first computes them.
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        request = Request(message, choice_idx, params, self.max_model_len)
        if self.can_propose:
            request.proposer = self.scheduler.drafting.proposer(message)
        if message.constraint is None or message.wants_vector:
            self.scheduler.add(request)
        else:
            self.guides.add(request, message.constraint)

    def _admit_guided(self) -> None:
        """Requests whose grammar is compiled join the line; those whose grammar cannot be compiled are refused."""
        ready, refused = self.guides.take_decided()
        for request in ready:
            self.scheduler.add(request)
        for request, error in refused:
            self.refuse(request.request_id, request.choice_idx, error)

    def _abort(self, message: Abort) -> None:
        self.guides.abort(message.request_id, message.choice_idx)
        if message.choice_idx is not None:
            choices = [message.choice_idx]
        else:
            known = self.scheduler.requests
            choices = [choice_idx for request_id, choice_idx in known if request_id == message.request_id]
        for choice_idx in choices:
            self.scheduler.abort(message.request_id, choice_idx)

    def _watch(self, is_on: bool) -> None:
        if is_on and self.live is None:
            self.live = importlib.import_module(LIVE).LiveView(self)
        elif not is_on and self.live is not None:
            self.live.close()
            self.live = None

    def _show(self, step: PlannedStep) -> None:
        """Whatever goes wrong with what is shown, requests go on."""
        try:
            if self.live is not None:
                self.live.saw(step)
        except Exception:
            log.exception("what the engine does cannot be shown")
            self._watch(False)

    def live_update(self) -> bytes | None:
        """What those who watch are shown next, if it is time for it."""
        try:
            return self.live.due_update() if self.live is not None else None
        except Exception:
            log.exception("what the engine does cannot be shown")
            self._watch(False)
            return None

    def _problem(self) -> str:
        """What is wrong with the KV cache's bookkeeping; empty if nothing is."""
        try:
            self.kv.check()
        except Exception as error:
            return str(error) or type(error).__name__
        return ""

    def _reset_prefix_cache(self, reset_running_requests: bool) -> str:
        """Why the cached blocks were not forgotten; empty if they were."""
        if reset_running_requests:
            self.scheduler.preempt_all()
        elif self.kv.live:
            return "requests are running, which hold blocks"
        self.kv.forget_prefixes()
        return ""

    def _sleep(self, keep_weights: bool) -> None:
        """Gives the device's memory back; running requests will compute their tokens again."""
        if self.is_asleep:
            return
        self._finish_steps()
        self._reset_prefix_cache(reset_running_requests=True)
        self.executor.sleep(keep_weights)
        self.is_asleep = True

    def _finish_steps(self) -> None:
        while self.pipeline.steps:
            step, result = self.pipeline.wait()
            self.unsent += self.scheduler.apply(step, result)
            self._show(step)

    def _wake_up(self) -> None:
        if self.is_asleep:
            self.executor.wake_up()
            self.is_asleep = False

    @property
    def has_work(self) -> bool:
        if self.is_asleep or self.is_held:
            return bool(self.unsent)
        return self.scheduler.has_work or self.guides.has_work or bool(self.unsent)

    def ready(self) -> Ready:
        """What a frontend is told when the engine takes requests."""
        kv = self.kv
        if self.news is None:
            return Ready(kv.num_tokens)
        return Ready(kv.num_tokens, kv.block_sizes[kv.told_group], kv.hit_unit)

    def prefixes(self) -> Prefixes | None:
        """What changed in the prefix cache, where a frontend wants to know."""
        return Prefixes(*self.news.take()) if self.news else None

    def stats(self, step_tokens: int = 0) -> EngineStats:
        scheduler = self.scheduler
        stats = msgspec.structs.replace(
            scheduler.stats,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self.guides.waiting),
            kv_usage=self.kv.usage,
            step_tokens=step_tokens,
            accepted_drafts=list(scheduler.stats.accepted_drafts),
            num_deferred=len(self.guides.waiting),
        )
        if self.is_one_of_several:
            stats.num_received = self.num_received
            stats.num_to_compute = scheduler.num_to_compute() + self.guides.num_tokens
        return stats

    def close(self) -> None:
        self.guides.close()
        self.executor.close()

    def _layout(self, tier: NoTier) -> KVLayout:
        """Groups, and as many blocks as the memory holds; raises if a request of max_model_len would not fit."""
        cache, scheduler = self.config.cache, self.config.scheduler
        layout = form_layout(self.executor.kv_specs(), resolved(cache.block_size))
        if cache.num_gpu_blocks_override is not None:
            num_blocks = [cache.num_gpu_blocks_override] * len(layout.pools)
        else:
            num_blocks = self.executor.num_blocks(layout)
        layout = with_blocks(layout, num_blocks, tier.num_places)
        check_capacity(layout, self.max_model_len, resolved(scheduler.max_num_batched_tokens))
        log.info("KV cache: %s blocks of %d tokens", " and ".join(map(str, num_blocks)), resolved(cache.block_size))
        return layout
