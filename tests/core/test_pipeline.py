"""Steps in flight: whatever happens at whatever moment, every request gets the tokens its history dictates.

The fake executor chooses tokens by hashing the history it reads back through the block tables, so these tests see wrong
slots, stale tokens and blocks reused too early as wrong output.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.request import Status
from quire.core.scheduler import Scheduler
from tests.core.harness import ALL_STOPS, FULL, HYBRID, Core

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@DEPTHS
def test_one_request_gets_its_tokens(depth):
    core = Core(pipeline_depth=depth)
    core.add("a", [1, 2, 3], max_tokens=10)
    core.run()
    core.assert_all_as_expected()
    core.assert_nothing_is_held()


@DEPTHS
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(depth):
    core = Core(pipeline_depth=depth, max_num_batched_tokens=5)
    core.add("a", list(range(40)), max_tokens=8)
    core.run()
    core.assert_all_as_expected()


def test_at_depth_two_a_step_is_launched_before_the_last_one_is_applied():
    core = Core(pipeline_depth=2)
    core.add("a", [1, 2, 3], max_tokens=10)
    core.step()
    assert len(core.engine.pipeline.steps) == 1
    core.step()
    assert len(core.engine.pipeline.steps) == 1


@pytest.mark.parametrize("moment", range(14))
@pytest.mark.parametrize("specs", [FULL, HYBRID], ids=["full", "hybrid"])
@DEPTHS
def test_an_abort_at_every_moment_leaves_the_others_untouched(depth, specs, moment):
    core = Core(specs, pipeline_depth=depth, max_num_batched_tokens=6, num_gpu_blocks_override=50)
    for name, length in (("a", 9), ("b", 3), ("c", 14)):
        core.add(name, list(range(length)), max_tokens=8)
    for _ in range(moment):
        core.step()
    core.abort("b")
    core.add("d", [5, 6, 7], max_tokens=5)
    core.run()
    core.assert_all_as_expected(but={"b"})
    core.assert_nothing_is_held()


@pytest.mark.parametrize("moment", range(12))
@DEPTHS
def test_a_preemption_at_every_moment_keeps_every_token(depth, moment):
    core = Core(pipeline_depth=depth, max_num_batched_tokens=6)
    core.add("a", list(range(9)), max_tokens=9)
    core.add("b", list(range(5)), max_tokens=9)
    for _ in range(moment):
        core.step()
    scheduler = core.engine.scheduler
    if scheduler.running:
        scheduler._preempt(scheduler.running[-1])
        core.engine.kv.check()
    core.run()
    core.assert_all_as_expected()
    core.assert_nothing_is_held()


@DEPTHS
def test_requests_that_do_not_fit_together_preempt_and_still_finish(depth):
    core = Core(pipeline_depth=depth, num_gpu_blocks_override=18, max_model_len=60)
    for idx in range(6):
        core.add(f"r{idx}", [idx] * 10, max_tokens=30)
    core.run()
    assert core.engine.scheduler.stats.num_preemptions > 0
    core.assert_all_as_expected()
    core.assert_nothing_is_held()


@DEPTHS
def test_stops_end_an_answer_and_the_step_launched_meanwhile_is_surplus(depth):
    core = Core(pipeline_depth=depth)
    for idx in range(8):
        core.add(f"r{idx}", [idx, idx + 1], max_tokens=40, eos=ALL_STOPS)
    core.run()
    core.assert_all_as_expected()
    assert "stop" in core.reasons.values()
    core.assert_nothing_is_held()


def test_without_the_surplus_discard_the_oracle_notices(monkeypatch):
    """Breaks the discard by hand: results of finished requests are applied as if they still ran."""

    def apply_without_discard(self, step, result):
        deltas = []
        for idx, entry in enumerate(step.entries):
            entry.request.num_in_flight -= entry.num_tokens
            entry.request.num_sampling -= entry.produces
            if entry.request.status is not Status.FINISHED:
                entry.request.num_computed += entry.num_tokens
                self.kv.advance(entry.request.blocks, entry.request.num_computed, None)
            if entry.produces:
                deltas.append(self._extend(entry.request, result, idx, True))
        self.kv.step_applied(step.plan.step_id)
        return deltas

    monkeypatch.setattr(Scheduler, "apply", apply_without_discard)
    core = Core(pipeline_depth=2)
    for idx in range(8):
        core.add(f"r{idx}", [idx, idx + 1], max_tokens=40, eos=ALL_STOPS)
    with pytest.raises(AssertionError, match="after it finished"):
        core.run()


@pytest.mark.parametrize("caching", [True, False])
@DEPTHS
def test_choices_of_one_request_share_its_prompt(depth, caching):
    core = Core(pipeline_depth=depth, enable_prefix_caching=caching)
    core.add("a", list(range(13)), n=3, max_tokens=6)
    core.run()
    core.assert_all_as_expected()
    num_computed = sum(outputs.stats.step_tokens for outputs in core.steps)
    assert num_computed < 13 + 3 * 6 + 2 * 4 + 4  # the prompt once, not three times; siblings redo at most a block
    assert len({tuple(token_ids) for token_ids in core.tokens.values()}) == 3


@DEPTHS
def test_a_leader_that_is_aborted_sets_its_siblings_free(depth):
    core = Core(pipeline_depth=depth, max_num_batched_tokens=4)
    core.add("a", list(range(13)), n=3, max_tokens=6)
    core.step()
    core.abort("a", 0)
    core.run()
    assert [core.tokens["a", i] for i in (1, 2)] == [core.expected("a", i) for i in (1, 2)]
    core.assert_nothing_is_held()


@DEPTHS
def test_a_request_resumed_with_its_tokens_goes_on_where_it_was(depth):
    whole = Core()
    whole.add("a", [1, 2, 3], max_tokens=10)
    whole.run()
    answer = whole.tokens["a", 0]
    core = Core(pipeline_depth=depth)
    core.add("a", [1, 2, 3], max_tokens=10, output_token_ids=answer[:4])
    core.run()
    assert core.tokens["a", 0] == answer[4:]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.sampled_from([1, 2]),
    hybrid=st.booleans(),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_any_traffic_at_any_depth_gives_every_request_its_own_tokens(seed, depth, hybrid, caching, policy):
    rng = random.Random(seed)
    core = Core(
        HYBRID if hybrid else FULL,
        pipeline_depth=depth,
        enable_prefix_caching=caching,
        scheduling_policy=policy,
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.randint(5, 20),
        num_gpu_blocks_override=rng.randint(56, 80) if hybrid else rng.randint(17, 40),
        max_model_len=40,
    )
    aborted = core.random_traffic(rng)
    core.assert_all_as_expected(but=aborted)
    core.assert_nothing_is_held()
