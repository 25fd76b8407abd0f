"""Who runs when: budgets, order, priorities, preemption and fairness, on the fake executor."""

import pytest

from quire.core.request import Status
from quire.messages import Answer, ResetPrefixCache
from tests.core.harness import FULL, HYBRID, Core, RecordingExecutor


def names_running(core: Core) -> list[str]:
    return [request.request_id for request in core.engine.scheduler.running]


def test_a_step_never_exceeds_its_token_budget():
    core = Core(max_num_batched_tokens=7, max_num_seqs=3)
    for idx in range(5):
        core.add(f"r{idx}", list(range(20)), max_tokens=4)
    core.run()
    assert max(outputs.stats.step_tokens for outputs in core.steps) <= 7
    core.assert_all_as_expected()


def test_prefill_and_decode_share_a_step():
    core = Core(max_num_batched_tokens=8)
    core.add("a", [1, 2, 3], max_tokens=20)
    core.step()
    core.add("b", list(range(30)), max_tokens=4)
    core.step()
    assert core.steps[-1].stats.step_tokens == 8  # one token of a, seven of b's prompt
    assert [delta.request_id for delta in core.steps[-1].deltas] == ["a"]


def test_a_long_prompt_does_not_hold_up_those_who_answer():
    core = Core(max_num_batched_tokens=8, num_gpu_blocks_override=80)
    core.add("long", list(range(60)), max_tokens=2)
    core.add("short", [1, 2], max_tokens=5)
    for _ in range(20):
        core.step()
        if ("short", 0) in core.reasons:
            break
    assert ("long", 0) not in core.reasons or core.steps[-1].stats.step_tokens
    assert core.tokens["short", 0] == core.expected("short")


def test_first_come_is_first_served():
    core = Core(max_num_seqs=1)
    for name in "abc":
        core.add(name, [1, 2, 3], max_tokens=3)
    core.run()
    assert [name for name, _ in core.reasons] == ["a", "b", "c"]


def test_lower_priority_numbers_run_earlier():
    core = Core(max_num_seqs=1, scheduling_policy="priority")
    core.add("late", [1, 2, 3], max_tokens=3, priority=5)
    core.add("soon", [1, 2, 3], max_tokens=3, priority=-1)
    core.add("also-soon", [1, 2, 3], max_tokens=3, priority=-1)
    core.run()
    assert [name for name, _ in core.reasons] == ["soon", "also-soon", "late"]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_urgent_request_takes_the_place_of_the_least_urgent(depth):
    core = Core(max_num_seqs=2, scheduling_policy="priority", pipeline_depth=depth)
    core.add("low", [1, 2, 3], max_tokens=20, priority=9)
    core.add("middle", [1, 2, 3], max_tokens=20, priority=5)
    core.step()
    core.add("urgent", [4, 5], max_tokens=2, priority=0)
    core.step()
    core.step()
    assert "low" not in names_running(core)
    core.run()
    assert list(core.reasons)[0] == ("urgent", 0)
    core.assert_all_as_expected()


def test_an_urgent_request_that_takes_no_hit_is_given_room_for_all_of_it():
    """It wants logprobs of its prompt, which another has in the cache; were the hit counted, there would be room."""
    core = Core(scheduling_policy="priority", num_gpu_blocks_override=17, max_model_len=64)
    prompt = list(range(40))
    core.add("low", prompt, max_tokens=20, priority=9)
    for _ in range(4):
        core.step()
    core.add("urgent", prompt, max_tokens=2, priority=0, prompt_logprobs=1)
    core.run()
    assert list(core.reasons)[0] == ("urgent", 0)
    core.assert_all_as_expected()


def test_equal_priorities_do_not_push_each_other_out():
    core = Core(max_num_seqs=1, scheduling_policy="priority")
    core.add("a", [1, 2, 3], max_tokens=9, priority=1)
    core.step()
    core.add("b", [1, 2, 3], max_tokens=9, priority=1)
    core.run()
    assert core.engine.scheduler.stats.num_preemptions == 0


def test_the_latest_arrival_is_preempted_first():
    core = Core(num_gpu_blocks_override=12, max_model_len=40)
    core.add("first", [1] * 12, max_tokens=20)
    core.add("second", [2] * 12, max_tokens=20)
    while core.engine.scheduler.stats.num_preemptions == 0:
        core.step()
    assert names_running(core) == ["first"]
    core.run()
    core.assert_all_as_expected()


def test_nobody_starves_while_others_keep_coming():
    core = Core(num_gpu_blocks_override=12, max_model_len=40, max_num_seqs=2)
    core.add("patient", list(range(30)), max_tokens=8)
    for idx in range(30):
        core.add(f"new{idx}", [idx, idx], max_tokens=6)
        core.step()
        if ("patient", 0) in core.reasons:
            break
    assert ("patient", 0) in core.reasons


def test_a_prefix_hit_is_counted_and_reported():
    core = Core()
    core.add("a", list(range(20)), max_tokens=2)
    core.run()
    core.add("b", list(range(20)), max_tokens=2)
    core.run()
    deltas = [delta for outputs in core.steps for delta in outputs.deltas]
    assert max(delta.num_cached_tokens for delta in deltas if delta.request_id == "b") == 16
    assert core.engine.stats().prefix_hits == 16
    core.assert_all_as_expected()


def test_a_request_that_wants_prompt_logprobs_takes_no_hit():
    core = Core()
    core.add("a", list(range(20)), max_tokens=2)
    core.run()
    core.add("b", list(range(20)), max_tokens=2, prompt_logprobs=1)
    core.run()
    assert core.engine.stats().prefix_hits == 0


def test_max_tokens_and_max_model_len_end_an_answer_with_length():
    core = Core(max_model_len=10)
    core.add("a", [1, 2, 3], max_tokens=2)
    core.add("b", [1, 2, 3], max_tokens=None)
    core.run()
    assert core.reasons == {("a", 0): "length", ("b", 0): "length"}
    assert [len(core.tokens[name, 0]) for name in "ab"] == [2, 7]


def test_stop_tokens_wait_for_min_tokens():
    core = Core()
    core.add("a", [1, 2, 3], max_tokens=12, min_tokens=7, stop_token_ids=list(range(256)))
    core.run()
    assert len(core.tokens["a", 0]) >= 7
    core.assert_all_as_expected()


def test_an_aborted_request_frees_everything_at_once():
    core = Core(HYBRID)
    core.add("a", list(range(20)), n=2, max_tokens=20)
    core.step()
    core.abort("a")
    assert not core.engine.has_work
    core.assert_nothing_is_held()


def test_aborting_what_is_unknown_or_done_is_harmless():
    core = Core()
    core.abort("nobody")
    core.add("a", [1], max_tokens=1)
    core.run()
    core.abort("a")


def test_a_waiting_request_can_be_aborted():
    core = Core(max_num_seqs=1)
    core.add("a", [1], max_tokens=5)
    core.add("b", [1], max_tokens=5)
    core.step()
    core.abort("b")
    assert all(request.status is not Status.WAITING for request in core.engine.scheduler.requests.values())
    core.run()
    assert core.tokens["b", 0] == []


class Overflowing(RecordingExecutor):
    """Rows with token 49 in their prompt have logits that are no numbers."""

    def _run(self, plan, masks):
        result = super()._run(plan, masks)
        result.overflowed = [idx for idx, row in enumerate(plan.rows) if 49 in self.rows[row].token_ids[:4]]
        return result


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_whose_logits_overflow_ends_and_its_neighbours_go_on(depth):
    core = Core(executor=Overflowing, pipeline_depth=depth)
    for name, prompt in {"a": [1, 2, 3, 4], "bad": [1, 2, 49, 4], "b": [5, 6, 7, 8, 9]}.items():
        core.add(name, prompt, max_tokens=9)
    core.run()
    core.assert_all_as_expected(but={"bad"})
    core.assert_nothing_is_held()
    assert core.reasons["bad", 0] == "error" and core.tokens["bad", 0] == []
    errors = [delta.error for outputs in core.steps for delta in outputs.deltas if delta.request_id == "bad"]
    assert len(errors) == 1 and "--dtype bfloat16" in errors[0]


# -- resetting the prefix cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_the_prefix_cache_is_reset_when_nobody_holds_blocks(depth):
    core = Core(pipeline_depth=depth)
    core.add("a", list(range(20)), max_tokens=4)
    core.step()
    assert core.engine.handle(ResetPrefixCache()).problem
    core.run()
    core.add("b", list(range(20)), max_tokens=4)
    core.run()
    assert core.engine.handle(ResetPrefixCache()) == Answer()
    hits = core.engine.stats().prefix_hits
    assert hits > 0
    core.add("c", list(range(20)), max_tokens=4)
    core.run()
    assert core.engine.stats().prefix_hits == hits
    core.assert_all_as_expected()


@pytest.mark.parametrize("specs", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("depth", [1, 2])
def test_running_requests_go_on_after_a_reset(depth, specs):
    core = Core(specs, pipeline_depth=depth)
    for name in "abc":
        core.add(name, list(range(20)), n=2, max_tokens=12)
    for _ in range(30):
        core.step()
        assert core.engine.handle(ResetPrefixCache(reset_running_requests=True)) == Answer()
        core.engine.kv.check()
        for _ in range(3):
            core.step()
    core.run()
    core.assert_all_as_expected()


def test_a_request_may_leave_the_prefix_cache_unread():
    core = Core()
    for name, skips in (("a", None), ("b", None), ("c", True)):
        core.add(name, list(range(20)), max_tokens=4, skip_reading_prefix_cache=skips)
        core.run()
    firsts = [delta for outputs in core.steps for delta in outputs.deltas if delta.num_cached_tokens]
    assert [delta.request_id for delta in firsts] == ["b"]
    core.assert_all_as_expected()
