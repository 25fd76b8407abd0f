"""What runs in the next step, and what a finished step means.

Called by the engine's loop: `plan()` gives some requests some tokens, `apply()` takes the results in. There are no phases: a
request that knows more tokens than are computed gets tokens, whether they are prompt, answer or both again after
a preemption. Must not know tensors, text or sockets.

`running` is kept in line order. Going through it in that order, room is always made at the expense of those behind,
which this plan has not touched yet; so the first in line always moves, and nobody starves.
"""

import bisect
import itertools
import time

from quire.config import SchedulerConfig
from quire.core.pipeline import Entry, Pipeline, PlannedStep
from quire.core.request import Request, Status
from quire.core.waiting import POLICIES, WaitingQueue
from quire.kv.manager import KVManager
from quire.messages import ChoiceDelta, EngineStats
from quire.step import NOTHING, TOKEN, VECTOR, ForcedTokens, RowStart, StepPlan, StepResult


class Scheduler:
    def __init__(self, config: SchedulerConfig, kv: KVManager, pipeline: Pipeline, num_drafts: int = 0) -> None:
        """`num_drafts`: tokens that the workers' drafter guesses behind each one they choose."""
        self.kv = kv
        self.num_drafts = num_drafts if kv.can_rewind else 0
        self.pipeline = pipeline
        self.max_tokens = config.max_num_batched_tokens
        self.line_key = POLICIES[config.scheduling_policy]
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self.requests: dict[tuple[str, int], Request] = {}
        self.arrivals = itertools.count()
        self.step_ids = itertools.count()
        self.stats = EngineStats()

    # -- coming and going ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        request.key = self.line_key(request, next(self.arrivals))
        request.blocks = self.kv.open(request.token_ids, request.cache_salt)
        self.requests[request.request_id, request.choice_idx] = request
        leader = self.requests.get((request.request_id, 0))
        if leader is not None and leader is not request and leader.num_computed < leader.num_prompt_tokens:
            request.status, request.leader = Status.PARKED, leader
            leader.followers.append(request)
            leader.num_dependents += 1
            self.kv.pin(leader.blocks, leader.num_prompt_tokens - 1)
        else:
            self.waiting.push(request)

    def abort(self, request_id: str, choice_idx: int) -> None:
        """Forgets the request at once; results it still has in flight are dropped when they come."""
        request = self.requests.get((request_id, choice_idx))
        if request is not None:
            self._finish(request)

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or bool(self.pipeline.steps)

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self) -> PlannedStep | None:
        """The next step, or None when nobody can be given a token now."""
        step = PlannedStep(StepPlan(-1, [], [], [], [], [], []), [])
        self._yield_to_priority()
        preemptions = self.stats.num_preemptions
        budget = self._continue_running(step, self.max_tokens)
        if self.stats.num_preemptions == preemptions:  # who was just pushed out would only push back in
            self._admit_waiting(step, budget)
        if not step.entries:
            return None
        step.plan.step_id = next(self.step_ids)
        step.plan.moves = self.kv.take_moves()
        return step

    def _continue_running(self, step: PlannedStep, budget: int) -> int:
        idx = 0
        while idx < len(self.running):
            request = self.running[idx]
            behind = len(self.running) - idx - 1  # each of them is owed one token of the budget
            num_planned = request.num_planned
            num_tokens = min(request.num_known - num_planned, budget - behind)
            if num_tokens > 0:
                num_drafts = self._num_drafts(request, num_planned, num_tokens, budget - behind)
                new_blocks = self.kv.grow(request.blocks, num_planned + num_tokens + num_drafts)
                if new_blocks is not None:
                    num_tokens += num_drafts
                else:  # nobody is preempted for drafts
                    new_blocks = self._make_room(request, num_planned + num_tokens)
                if new_blocks is not None:
                    self._give(step, request, num_planned, num_tokens, new_blocks)
                    budget -= num_tokens
                elif request.status is not Status.RUNNING:
                    continue  # preempted itself: the next one has moved to idx
            idx += 1
        return budget

    def _make_room(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Blocks for the request to hold `num_tokens`, preempting from the end of the line if it must."""
        while (new_blocks := self.kv.grow(request.blocks, num_tokens)) is None:
            if self.kv.num_limbo:
                return None  # blocks come free when the step in flight is applied: wait for those
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return None
        return new_blocks

    def _admit_waiting(self, step: PlannedStep, budget: int) -> None:
        while budget > 0 and self.free_rows and (request := self.waiting.peek()) is not None:
            if request.num_in_flight:
                return  # preempted a moment ago: its last token is not here yet
            num_cached = self._enter(request)
            num_tokens = min(request.num_known - num_cached, budget)
            new_blocks = self.kv.grow(request.blocks, num_cached + num_tokens) if num_cached >= 0 else None
            if new_blocks is None:
                self.kv.release(request.blocks, self.pipeline.newest_step)
                return
            self.waiting.remove(request, Status.RUNNING)
            bisect.insort(self.running, request, key=lambda r: r.key)
            self._start_row(step, request, num_cached)
            self._give(step, request, num_cached, num_tokens, [list(table) for table in request.blocks.tables])
            budget -= num_tokens

    def _enter(self, request: Request) -> int:
        """The request takes hold of what is cached of it; returns how many tokens, -1 when the rest would not fit."""
        kv, blocks, leader = self.kv, request.blocks, request.leader
        if leader is not None and leader.status is Status.RUNNING and not kv.prefix_caching:
            return kv.fork(leader.blocks, blocks, min(leader.num_computed, request.num_prompt_tokens - 1))
        num_cached = self._num_cached(request)
        if not kv.can_admit(blocks, num_cached, self.max_tokens):
            return -1
        kv.enter(blocks, num_cached)
        return num_cached

    def _num_cached(self, request: Request) -> int:
        """Tokens that need not be computed; a prompt whose logprobs are owed is computed all the same."""
        owes_logprobs = (
            request.params.prompt_logprobs is not None and request.num_prompt_logprobs < request.num_prompt_tokens - 1
        )
        return 0 if owes_logprobs else self.kv.find_prefix(request.blocks)

    def _start_row(self, step: PlannedStep, request: Request, num_cached: int) -> None:
        self._leave_leader(request)
        request.row = self.free_rows.pop()
        request.num_computed = num_cached
        request.forced_from = None
        request.num_row_start = len(request.token_ids)
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
            request.queue_s = time.monotonic() - request.arrival
            self.stats.prefix_queries += len(request.token_ids)
            self.stats.prefix_hits += num_cached
        step.plan.new_rows.append(
            RowStart(
                row=request.row,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.params,
                seed=request.seed,
                choice_idx=request.choice_idx,
                stop_ids=sorted(request.eos_ids | request.stop_ids),
                bad_words=request.bad_words,
                num_prompt_logprobs=request.num_prompt_logprobs,
            )
        )

    def _give(
        self, step: PlannedStep, request: Request, start: int, num_tokens: int, new_blocks: list[list[int]]
    ) -> None:
        num_missing = start + num_tokens - (len(request.token_ids) + request.num_sampling)
        if num_missing < 0:
            produces = NOTHING
        elif request.wants_vector:
            produces = VECTOR
        else:
            produces = TOKEN + num_missing  # tokens behind the known ones are drafts
        plan = step.plan
        plan.rows.append(request.row)
        plan.starts.append(start)
        plan.num_tokens.append(num_tokens)
        plan.produces.append(produces)
        plan.new_blocks.append(new_blocks)
        if request.forced_from is not None:
            plan.forced.append(ForcedTokens(request.row, request.forced_from, request.token_ids[request.forced_from :]))
            request.forced_from = None
        step.entries.append(Entry(request, num_tokens, produces, request.num_preemptions, request.num_forced))
        request.num_in_flight += num_tokens
        request.num_sampling += max(NOTHING, produces)

    def _num_drafts(self, request: Request, start: int, num_tokens: int, budget: int) -> int:
        """How many drafts a row that computes `num_tokens` verifies as well: those behind the token that the step before chose."""
        if not self.num_drafts or num_tokens != 1 or start < request.num_row_start or request.guide is not None:
            return 0
        num_left = request.max_total_tokens - len(request.token_ids) - request.num_sampling  # to be chosen, at least
        return max(0, min(self.num_drafts, budget - 1, num_left - 1))

    def _yield_to_priority(self) -> None:
        """Whoever waits with strictly better priority than the last in line gets that one's place."""
        while (
            (request := self.waiting.peek()) is not None and self.running and request.key[0] < self.running[-1].key[0]
        ):
            if self.free_rows and self.kv.can_admit(request.blocks, self._num_cached(request), self.max_tokens):
                return
            if self.free_rows and self.kv.num_limbo:
                return  # blocks are on their way
            self._preempt(self.running[-1])

    # -- applying ------------------------------------------------------------------------------------------------

    def apply(self, step: PlannedStep, result: StepResult) -> list[ChoiceDelta]:
        """Takes a step's results in, in the order steps were planned."""
        deltas = []
        newest_step = self.pipeline.newest_step
        for idx, entry in enumerate(step.entries):
            request, is_wanted = entry.request, entry.is_wanted
            request.num_in_flight -= entry.num_tokens
            if entry.num_forced == request.num_forced:
                request.num_sampling -= max(NOTHING, entry.produces)
            if request.finished:
                continue  # aborted, or stopped by the step before: this step's share of it is surplus
            # A preempted request's tokens are as good as any: only its cache is gone.
            delta = None
            if is_wanted or idx in result.prompt_logprobs:
                delta = self._extend(request, result, idx, is_wanted)
                deltas.append(delta)
            if entry.num_preemptions == request.num_preemptions:
                num_rejected = max(NOTHING, entry.produces) - len(result.token_ids[idx])
                self._advance(request, entry.num_tokens - num_rejected, newest_step)
            if delta is not None and delta.finish_reason is not None:
                self._finish(request)
        self.kv.step_applied(step.plan.step_id)
        return deltas

    def _extend(self, request: Request, result: StepResult, idx: int, is_wanted: bool) -> ChoiceDelta:
        """The request gets its new tokens; what they mean for its grammar and for whether it ends."""
        delta = ChoiceDelta(request.request_id, request.choice_idx, [])
        if request.num_output_tokens == 0:
            delta.num_cached_tokens, delta.queue_s = request.num_cached_tokens, request.queue_s
        if idx in result.prompt_logprobs:
            delta.prompt_logprobs = result.prompt_logprobs[idx]
            request.num_prompt_logprobs += len(delta.prompt_logprobs)
        if not is_wanted:
            return delta
        if idx in result.vectors:
            delta.vector, delta.finish_reason = result.vectors[idx], "stop"
            return delta
        delta.token_ids = list(result.token_ids[idx])
        delta.finish_reason, delta.stop_reason = request.extend(delta.token_ids)
        if idx in result.logprobs:
            delta.logprobs = result.logprobs[idx][: len(delta.token_ids)]
        if request.guide is not None:
            request.guide.follow(request, delta, len(self.running))
        return delta

    def _advance(self, request: Request, num_tokens: int, newest_step: int | None) -> None:
        """So many more tokens are computed. The request knows them all by now, unless it ended among them."""
        request.num_computed = min(request.num_computed + num_tokens, len(request.token_ids))
        self.kv.advance(request.blocks, request.num_computed, newest_step)
        if request.followers and request.num_computed >= request.num_prompt_tokens:
            self._unpark(request)

    # -- leaving -------------------------------------------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        """Back to its place in the line; what it computed is let go and computed again later."""
        self._leave_row(request)
        request.blocks.pinned = None  # memory is short: siblings will have to compute the prompt themselves
        request.num_computed = 0
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.push(request)

    def _finish(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._leave_row(request)
            request.status = Status.FINISHED
        elif request.status is Status.WAITING:
            self.waiting.remove(request, Status.FINISHED)
        elif request.status is Status.PARKED:
            request.leader.followers.remove(request)
            request.status = Status.FINISHED
        self._leave_leader(request)
        self.requests.pop((request.request_id, request.choice_idx), None)
        self._unpark(request)

    def _leave_leader(self, request: Request) -> None:
        """The request needs nothing more of the sibling that computed their prompt; who leaves last lifts the pin."""
        leader, request.leader = request.leader, None
        if leader is not None:
            leader.num_dependents -= 1
            if leader.num_dependents == 0:
                leader.blocks.pinned = None

    def _leave_row(self, request: Request) -> None:
        # In-flight tokens stay counted: their results still come, and num_in_flight keeps it from re-entering before.
        self.running.remove(request)
        self.kv.release(request.blocks, self.pipeline.newest_step)
        self.free_rows.append(request.row)
        request.row = None

    def _unpark(self, leader: Request) -> None:
        for follower in leader.followers:
            self.waiting.push(follower)
        leader.followers = []
