"""Decides what runs in the next step, and updates requests with the results of a finished one.

Called by the engine's loop: `plan()` chooses which requests compute how many tokens, `apply()` takes the results. There
are no separate phases for prompts and answers: a request with tokens that are known but not computed gets some of them
computed, whether they are prompt, answer, or both again after a preemption. Must not know tensors, text or sockets.

`running` is kept in line order. A plan goes through it in that order, and preempts only from the end of the line,
requests that this plan has not reached yet. So the first in line always advances, and nobody starves.
"""

import bisect
import itertools
import time

from quire.config import SchedulerConfig, resolved
from quire.core.drafting import Drafting
from quire.core.pipeline import Entry, Pipeline, PlannedStep
from quire.core.request import NO_ROW, Request, Status
from quire.core.waiting import POLICIES, WaitingQueue
from quire.kv.manager import KVManager
from quire.messages import ChoiceDelta, EngineStats
from quire.spec.proposer import Proposer
from quire.step import NOTHING, TOKEN, VECTOR, RowStart, RowTokens, StepPlan, StepResult, max_samples

NOTHING_PROPOSED: list[int] = []  # never changed
OVERFLOW = "float16 is too small for this model's numbers: start with --dtype bfloat16"


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        pipeline: Pipeline,
        drafting: Drafting = Drafting(),
        num_stages: int = 1,
        counts_work: bool = False,
    ) -> None:
        """`num_stages`: of workers, of which only the last knows the tokens that it chooses; the first is told.

        `counts_work`: somebody asks for `num_to_compute`."""
        self.kv = kv
        self.counts_work = counts_work
        self.drafting = drafting if kv.can_rewind else Drafting()
        self.pipeline = pipeline
        self.num_stages = num_stages
        self.max_tokens = resolved(config.max_num_batched_tokens)
        self.max_samples = max_samples(config.max_num_seqs, drafting.num_drafts)
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
        request.draft_length = self.drafting.draft_length(request.proposer)
        request.blocks = self.kv.open(request.token_ids, request.cache_salt)
        if self.counts_work:
            request.num_expected = self._num_cached(request)
        self.requests[request.request_id, request.choice_idx] = request
        leader = self.requests.get((request.request_id, 0), request)
        if leader is not request and leader.num_computed < leader.num_prompt_tokens:
            request.status = Status.PARKED
            request.leader = leader
            leader.followers.append(request)
            leader.num_dependents += 1
            self.kv.pin(leader.blocks, leader.num_prompt_tokens - 1)
        else:
            self.waiting.push(request)

    def abort(self, request_id: str, choice_idx: int) -> None:
        """Removes the request at once; results that it still has in flight are dropped when they come."""
        request = self.requests.get((request_id, choice_idx))
        if request is not None:
            self._finish(request)

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or bool(self.pipeline.steps)

    def num_to_compute(self) -> int:
        """Known tokens that no step has been given yet; the next token of a request that generates is not counted."""
        num_tokens = self.waiting.num_tokens
        for request in self.running:
            num_left = len(request.token_ids) - request.num_computed - request.num_in_flight
            if num_left > 1:
                num_tokens += num_left
        return num_tokens

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self) -> PlannedStep | None:
        """The next step, or None if no request can compute a token now."""
        step = PlannedStep(StepPlan(-1, [], [], [], [], [], []), [])
        self._yield_to_priority()
        preemptions = self.stats.num_preemptions
        budget = self._continue_running(step, self.max_tokens)
        if self.stats.num_preemptions == preemptions:  # a request that was just preempted must not come back at once
            self._admit_waiting(step, budget)
        if not step.entries:
            return None
        step.plan.step_id = next(self.step_ids)
        step.plan.moves = self.kv.take_moves()
        if self.drafting.num_drafts:
            self._ask_for_drafts(step)
        return step

    def _continue_running(self, step: PlannedStep, budget: int) -> int:
        """Gives running requests their next tokens; returns what is left of the budget."""
        running = self.running
        most = self.drafting.most(len(running)), self.drafting.most_proposed(len(running))
        # Places for drafts of the core, after one for each request that may be part of the step.
        num_places = self.max_samples - min(len(self.requests), len(running) + len(self.free_rows))
        # Every stage is to have a step: each gets its share of the requests that are ready.
        rows_left = -(-len(running) // self.num_stages)
        idx = 0
        while idx < len(running) and rows_left:
            request = running[idx]
            if self.num_stages > 1 and request.num_sampling:
                idx += 1
                continue  # the first stage does not know its next token yet
            room = budget - (len(running) - idx - 1)  # one token of the budget is reserved for each request behind
            start = request.num_computed + request.num_in_flight
            num_tokens = min(request.num_known - start, room)
            if num_tokens > 0:
                num_drafts, proposed = 0, NOTHING_PROPOSED
                if num_tokens == 1 and any(most):
                    if self._waits_to_propose(request, most[1]):
                        idx += 1
                        continue
                    num_drafts, proposed = self._drafts(request, start, *most, room - 1, num_places)
                    num_places -= len(proposed)
                new_blocks = self._grow_ahead(request, start + num_tokens + num_drafts)
                if new_blocks is not None:
                    num_tokens += num_drafts
                else:  # no request is preempted to verify drafts
                    proposed = NOTHING_PROPOSED
                    new_blocks = self._make_room(request, start + num_tokens)
                if new_blocks is not None:
                    self._give(step, request, start, num_tokens, new_blocks, proposed)
                    budget -= num_tokens
                    rows_left -= 1
                elif request.status is not Status.RUNNING:
                    continue  # the request itself was preempted: the next one is at idx now
            idx += 1
        return budget

    def _grow_ahead(self, request: Request, end: int) -> list[list[int]] | None:
        """New blocks, so that the request can hold `end` tokens, and more where the drafter can use them."""
        if self.drafting.num_ahead:
            last = min(end + self.drafting.num_ahead, request.max_total_tokens)
            if last > end and (new_blocks := self.kv.grow(request.blocks, last)) is not None:
                return new_blocks
        return self.kv.grow(request.blocks, end)

    def _make_room(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """New blocks, so that the request can hold `num_tokens`; preempts from the end of the line if needed."""
        while (new_blocks := self.kv.grow(request.blocks, num_tokens)) is None:
            if self.kv.num_limbo:
                return None  # wait for the blocks that become free when the step in flight is applied
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return None
        return new_blocks

    def _admit_waiting(self, step: PlannedStep, budget: int) -> None:
        self.waiting.settle_now_and_then(self.running)
        while budget > 0 and self.free_rows:
            request = self.waiting.peek()
            if request is None or request.num_in_flight:
                return  # in flight: it was just preempted, and its last token has not arrived yet
            num_cached = self._enter(request)
            num_tokens = min(request.num_known - num_cached, budget)
            new_blocks = self.kv.grow(request.blocks, num_cached + num_tokens) if num_cached >= 0 else None
            if new_blocks is None:
                self.kv.release(request.blocks, self.pipeline.newest_step)
                return
            self.waiting.remove(request, Status.RUNNING)
            bisect.insort(self.running, request, key=lambda running: running.key)
            self._start_row(step, request, num_cached)
            self._give(step, request, num_cached, num_tokens, [list(table) for table in request.blocks.tables])
            budget -= num_tokens

    def _enter(self, request: Request) -> int:
        """The request gets the blocks that are cached of it; returns how many tokens, -1 if the rest would not fit."""
        leader = request.leader
        if leader is not None and not self.kv.prefix_caching:
            if leader.status is Status.RUNNING:
                max_tokens = min(leader.num_computed, request.num_prompt_tokens - 1)
                return self.kv.fork(leader.blocks, request.blocks, max_tokens)
        num_cached = self._num_cached(request)
        if not self.kv.can_admit(request.blocks, num_cached, self.max_tokens):
            return -1
        self.kv.enter(request.blocks, num_cached)
        return num_cached

    def _num_cached(self, request: Request) -> int:
        """Tokens that need not be computed; none while logprobs of the prompt are still to be delivered."""
        if request.params.skip_reading_prefix_cache:
            return 0
        if request.params.prompt_logprobs is not None and request.num_prompt_logprobs < request.num_prompt_tokens - 1:
            return 0
        return self.kv.find_prefix(request.blocks)

    def _start_row(self, step: PlannedStep, request: Request, num_cached: int) -> None:
        self._leave_leader(request)
        request.row = self.free_rows.pop()
        request.num_computed = num_cached
        request.forced_from = None
        request.num_drafts = None
        request.num_row_start = len(request.token_ids)
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
            request.queue_s = time.monotonic() - request.arrival
            self.stats.prefix_queries += len(request.token_ids)
            self.stats.prefix_hits += num_cached
            self.waiting.charge(request, num_cached)
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
        self,
        step: PlannedStep,
        request: Request,
        start: int,
        num_tokens: int,
        new_blocks: list[list[int]],
        proposed: list[int] = NOTHING_PROPOSED,
    ) -> None:
        """Adds `num_tokens` tokens of the request, from position `start` on, to the step.

        The last of them are `proposed`, if the core guessed any.
        """
        num_unknown = start + num_tokens - (len(request.token_ids) + request.num_sampling)
        if num_unknown < 0:
            produces = NOTHING
        elif request.wants_vector:
            produces = VECTOR
        else:
            produces = TOKEN + num_unknown  # tokens after the known ones are drafts
        plan = step.plan
        plan.rows.append(request.row)
        plan.starts.append(start)
        plan.num_tokens.append(num_tokens)
        plan.produces.append(produces)
        plan.new_blocks.append(new_blocks)
        first_forced = request.forced_from
        if first_forced is not None:
            plan.forced.append(RowTokens(request.row, first_forced, request.token_ids[first_forced:]))
            request.forced_from = None
        if proposed:
            plan.drafts.append(RowTokens(request.row, len(request.token_ids), proposed))
        preemptions, forced = request.num_preemptions, request.num_forced
        step.entries.append(Entry(request, num_tokens, produces, preemptions, forced, proposed))
        request.num_in_flight += num_tokens
        if produces > 0:
            request.num_sampling += produces

    def _ask_for_drafts(self, step: PlannedStep) -> None:
        """Says how many drafts of the workers the next step may want."""
        wanted = [0] * len(step.entries)
        if most := self.drafting.most(len(self.running)):
            wanted = [min(most, self._num_wanted(entry)) for entry in step.entries]
            step.plan.num_wanted = wanted
        for entry, num_wanted in zip(step.entries, wanted):
            if entry.request.guide is not None:
                entry.request.num_wanted = num_wanted
                step.plan.tells_drafts |= num_wanted > 0

    def _num_wanted(self, entry: Entry) -> int:
        """How many drafts of the workers the request may want to verify in the step after this one."""
        request = entry.request
        if entry.produces <= 0 or request.proposer is not None:
            return 0
        return request.draft_length.next_most(entry.produces - TOKEN)

    def _drafts(
        self, request: Request, start: int, most: int, most_proposed: int, room: int, num_places: int
    ) -> tuple[int, list[int]]:
        """How many drafts a row that computes one token also verifies; and which, if they are guesses of the core."""
        if request.proposer is None:
            return self._num_drafts(request, start, min(most, room)), NOTHING_PROPOSED
        proposed = self._propose(request, request.proposer, min(most_proposed, room, num_places))
        return len(proposed), proposed

    def _num_drafts(self, request: Request, start: int, most: int) -> int:
        """How many drafts of the workers: those after the last token that the row chose."""
        wanted = request.draft_length.take()
        if start < request.num_row_start or request.num_drafts == 0:
            return 0
        if request.guide is not None:
            wanted = 0 if request.guide.may_think else min(wanted, request.num_wanted)
        num_left = request.max_total_tokens - len(request.token_ids) - request.num_sampling  # to be chosen, at least
        guessed = most if request.num_drafts is None else request.num_drafts
        return max(0, min(most, guessed, num_left - 1, wanted))

    def _waits_to_propose(self, request: Request, most: int) -> bool:
        """Whether its next tokens can be guessed, as far as is known, once those in flight have arrived."""
        if request.proposer is None or not most or not request.num_in_flight or request.draft_length.pause:
            return False
        return bool(request.proposer.propose(request.token_ids, 1))

    def _propose(self, request: Request, proposer: Proposer, most: int) -> list[int]:
        """Guesses of the core."""
        num_left = request.max_total_tokens - len(request.token_ids) - request.num_sampling
        wanted = min(most, num_left - 1, request.draft_length.take())
        if wanted <= 0 or request.num_in_flight:
            return []
        found = proposer.propose(request.token_ids, wanted)
        return found if request.guide is None else request.guide.allowed(found)

    def _yield_to_priority(self) -> None:
        """A waiting request with strictly better priority than the last running one takes that one's place."""
        while self.running and (request := self.waiting.peek()) is not None:
            last = self.running[-1]
            if request.key[0] >= last.key[0]:
                return
            if self.free_rows and self.kv.can_admit(request.blocks, self._num_cached(request), self.max_tokens):
                return
            if self.free_rows and self.kv.num_limbo:
                return  # blocks become free when the step in flight is applied
            self._preempt(last)

    # -- applying ------------------------------------------------------------------------------------------------

    def apply(self, step: PlannedStep, result: StepResult) -> list[ChoiceDelta]:
        """Updates requests with a step's results; called in the order in which steps were planned."""
        deltas = []
        newest_step = self.pipeline.newest_step
        for idx, entry in enumerate(step.entries):
            request = entry.request
            num_tokens = entry.num_tokens
            produces = entry.produces
            request.num_in_flight -= num_tokens
            if request.status is Status.FINISHED:
                continue  # aborted, or ended by the step before: its results of this step are dropped
            if produces > 0:
                if entry.num_forced == request.num_forced:
                    request.num_sampling -= produces
                num_chosen = len(result.token_ids[idx])
                num_tokens -= produces - num_chosen  # drafts that were rejected are not computed
                if result.drafts:
                    request.drafts = result.drafts[idx]
                if self.drafting.num_drafts or produces > TOKEN:
                    self._learn(request, produces - TOKEN, num_chosen - 1, result.num_drafts, idx)
            # Tokens of a request that was preempted since are valid: only its cache is gone.
            delta = None
            is_wanted = entry.is_wanted
            if is_wanted or idx in result.prompt_logprobs:
                delta = self._extend(request, result, idx, is_wanted)
                if request.is_predicted and produces > TOKEN:
                    delta.num_accepted, delta.num_rejected = num_chosen - 1, produces - num_chosen
                deltas.append(delta)
            if entry.num_preemptions == request.num_preemptions:
                # Tokens after one that ended the request are not counted.
                num_computed = min(request.num_computed + num_tokens, len(request.token_ids))
                request.num_computed = num_computed
                self.kv.advance(request.blocks, num_computed, newest_step)
                if request.followers and num_computed >= request.num_prompt_tokens:
                    self._unpark(request)
            if delta is not None and delta.finish_reason is not None:
                self._finish(request)
        self.kv.step_applied(step.plan.step_id)
        return deltas

    def _extend(self, request: Request, result: StepResult, idx: int, is_wanted: bool) -> ChoiceDelta:
        """Adds its new tokens to the request; the delta also says whether they end it."""
        token_ids = result.token_ids[idx] if is_wanted else []  # no copy: nobody else reads them later
        delta = ChoiceDelta(request.request_id, request.choice_idx, token_ids)
        if len(request.token_ids) == request.num_prompt_tokens:
            delta.num_cached_tokens = request.num_cached_tokens
            delta.queue_s = request.queue_s
        if idx in result.prompt_logprobs:
            delta.prompt_logprobs = result.prompt_logprobs[idx]
            request.num_prompt_logprobs += len(delta.prompt_logprobs)
        if not is_wanted:
            return delta
        if idx in result.overflowed:
            delta.token_ids, delta.finish_reason, delta.error = [], "error", OVERFLOW
            return delta
        if request.wants_vector:
            delta.vector = result.vectors[idx]
            delta.finish_reason = "stop"
            return delta
        if self.num_stages > 1 and request.forced_from is None:
            request.forced_from = len(request.token_ids)
        delta.finish_reason, delta.stop_reason = request.extend(token_ids)
        if idx in result.logprobs:
            delta.logprobs = result.logprobs[idx][: len(token_ids)]
        if request.guide is not None:
            request.guide.follow(request, delta, len(self.running))
        return delta

    def _learn(self, request: Request, num_drafts: int, num_accepted: int, guessed: list[int], idx: int) -> None:
        """What a step says about drafts: how many were right, and how many there are for the next one."""
        request.num_drafts = guessed[idx] if guessed else None
        if num_drafts:
            request.draft_length.saw(num_drafts, num_accepted)
            stats = self.stats
            stats.num_drafts += 1
            stats.num_draft_tokens += num_drafts
            stats.accepted_drafts += [0] * (num_drafts - len(stats.accepted_drafts))
            for place in range(num_accepted):
                stats.accepted_drafts[place] += 1

    # -- leaving -------------------------------------------------------------------------------------------------

    def preempt_all(self) -> None:
        """All running requests will compute their tokens again."""
        while self.running:
            self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        """The request goes back to its place in the line; its blocks are freed, and computed again later."""
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
        elif request.status is Status.PARKED and request.leader is not None:
            request.leader.followers.remove(request)
            request.status = Status.FINISHED
        self._leave_leader(request)
        if request.proposer is not None:
            request.proposer.finish(request.token_ids)
        self.requests.pop((request.request_id, request.choice_idx), None)
        self._unpark(request)

    def _leave_leader(self, request: Request) -> None:
        """The request no longer needs the sibling that computed their prompt; the last one to leave removes the pin."""
        leader, request.leader = request.leader, None
        if leader is not None:
            leader.num_dependents -= 1
            if leader.num_dependents == 0:
                leader.blocks.pinned = None

    def _leave_row(self, request: Request) -> None:
        self.waiting.settle((request,))
        # `num_in_flight` stays: results of steps in flight still come, and the request must not run again before.
        self.running.remove(request)
        self.kv.release(request.blocks, self.pipeline.newest_step)
        self.free_rows.append(request.row)
        request.row = NO_ROW

    def _unpark(self, leader: Request) -> None:
        for follower in leader.followers:
            if self.counts_work:
                follower.num_expected = self._num_cached(follower)
            self.waiting.push(follower)
        leader.followers = []
