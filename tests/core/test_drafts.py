"""Drafts that are right or wrong by hash: whatever happens, every request gets the tokens it gets without them.

The drafter belongs to the executor, as a model's would: at depth 2 a step is planned before the core knows how many
drafts of the step before were accepted.
"""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv.specs import EntryPart, State
from quire.step import TOKEN
from tests.core.fake import VOCAB_SIZE, FakeExecutor, next_token
from tests.core.harness import ALL_STOPS, FULL, HYBRID, Core, answer_to

NUM_DRAFTS = 3
BLOCK_SIZE = 4
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


class Drafting(FakeExecutor):
    """Guesses right two times of three.

    `outcomes` counts (place among the drafts, whether it is the first token of a block, "accepted" or "rejected").
    """

    num_drafts = NUM_DRAFTS

    def __init__(self, config, specs) -> None:
        super().__init__(config, specs)
        self.max_len = config.model.max_model_len
        self.outcomes: Counter[tuple[int, bool, str]] = Counter()

    def draft(self, state) -> list[int]:
        history = list(state.token_ids)
        for _ in range(NUM_DRAFTS):
            token = next_token(history, state.seed, state.choice_idx)
            is_wrong = (sum(history) + len(history)) % 3 == 0
            history.append((token + is_wrong) % VOCAB_SIZE)
        return history[-NUM_DRAFTS:]

    def _compute(self, state, first, count, produces, allowed):
        num_known, num_drafts = len(state.token_ids), max(0, produces - TOKEN)
        assert num_drafts <= len(state.drafts), "drafts were planned that nobody made"
        assert first + count < self.max_len, "a position was planned that no request may have"
        chosen = super()._compute(state, first, count, produces, allowed)
        for place in range(min(num_drafts, len(chosen))):
            is_first = (num_known + place) % BLOCK_SIZE == 0
            self.outcomes[place, is_first, "accepted" if place < len(chosen) - 1 else "rejected"] += 1
        return chosen


def drafting(specs=FULL, **options) -> Core:
    return Core(specs, executor=Drafting, **{"block_size": BLOCK_SIZE, **options})


@DEPTHS
def test_one_request_gets_its_tokens_in_fewer_steps(depth):
    core = drafting(pipeline_depth=depth)
    core.add("a", [1, 2, 3], max_tokens=40)
    core.run()
    core.assert_all_as_expected()
    core.assert_nothing_is_held()
    assert len([outputs for outputs in core.steps if outputs.deltas]) < 30


class LateDrafting(Drafting):
    """Guesses wrong at first, then right."""

    def draft(self, state) -> list[int]:
        history = list(state.token_ids)
        for _ in range(NUM_DRAFTS):
            history.append(next_token(history, state.seed, state.choice_idx))
        return [(token + (len(state.token_ids) < 12)) % VOCAB_SIZE for token in history[-NUM_DRAFTS:]]

    def _run(self, plan, masks):
        """As a drafter that guesses only what was asked for."""
        result = super()._run(plan, masks)
        result.num_drafts = [min(NUM_DRAFTS, num) for num in plan.num_wanted]
        return result


@DEPTHS
def test_after_a_pause_guessing_begins_again(depth):
    core = Core(FULL, executor=LateDrafting, block_size=BLOCK_SIZE, pipeline_depth=depth)
    core.add("a", [1, 2, 3], max_tokens=60)
    core.run()
    core.assert_all_as_expected()
    stats = core.engine.stats()
    assert stats.num_draft_tokens - sum(stats.accepted_drafts) >= 3  # wrong at first
    assert sum(stats.accepted_drafts) > 20


@DEPTHS
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_an_answer_is_never_longer_than_it_may_be(depth, max_tokens):
    core = drafting(pipeline_depth=depth, max_model_len=24)
    core.add("a", list(range(6)), max_tokens=max_tokens)
    core.add("b", list(range(14)), max_tokens=None)
    core.run()
    core.assert_all_as_expected()


@DEPTHS
def test_a_stop_among_accepted_drafts_ends_the_answer_there(depth):
    core = drafting(pipeline_depth=depth)
    for idx in range(12):
        core.add(f"r{idx}", [idx, idx + 1], max_tokens=40, eos=ALL_STOPS)
    core.run()
    core.assert_all_as_expected()
    assert "stop" in core.reasons.values()
    core.assert_nothing_is_held()


@DEPTHS
def test_blocks_are_named_by_the_tokens_they_hold(depth):
    """A later request finds only what was computed: a hit on a block with a rejected draft would change its tokens."""
    core = drafting(pipeline_depth=depth)
    core.add("a", list(range(9)), max_tokens=30)
    core.run()
    answer = core.tokens["a", 0]
    core.add("b", list(range(9)) + answer[:20], max_tokens=10)
    core.run()
    core.assert_all_as_expected()
    assert core.engine.scheduler.stats.prefix_hits >= 24


def test_a_cache_that_cannot_go_back_gets_no_drafts():
    state = State((EntryPart("hash", "uint8", (32,)),), every=8)
    core = drafting({**FULL, "recurrent:state": state}, pipeline_depth=2)
    core.add("a", list(range(9)), max_tokens=30)
    core.run()
    core.assert_all_as_expected()
    assert not core.executor.outcomes


def test_nobody_is_preempted_for_drafts():
    core = drafting(num_gpu_blocks_override=12, max_model_len=40, max_num_seqs=2)
    core.add("a", list(range(10)), max_tokens=10)
    core.add("b", list(range(20, 30)), max_tokens=10)
    core.run()
    core.assert_all_as_expected()
    assert core.engine.scheduler.stats.num_preemptions == 0


def small_core(rng: random.Random, depth: int, hybrid: bool, caching: bool, **options) -> Core:
    return Core(
        HYBRID if hybrid else FULL,
        block_size=BLOCK_SIZE,
        pipeline_depth=depth,
        enable_prefix_caching=caching,
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.randint(5, 30),
        num_gpu_blocks_override=rng.randint(56, 80) if hybrid else rng.randint(17, 40),
        max_model_len=40,
        **options,
    )


def traffic(seed: int, depth: int, hybrid: bool, caching: bool, predicts: bool = False, drafts: bool = True) -> Core:
    rng = random.Random(seed)
    core = small_core(rng, depth, hybrid, caching, executor=Drafting if drafts else None)
    aborted = core.random_traffic(rng, predicts=predicts)
    core.assert_all_as_expected(but=aborted)
    core.assert_nothing_is_held()
    return core


@DEPTHS
def test_drafts_are_accepted_and_rejected_at_every_place_and_across_block_edges(depth):
    """Else the next test would prove nothing."""
    total: Counter[tuple[int, bool, str]] = Counter()
    for seed in range(30):
        total += traffic(seed, depth, hybrid=seed % 2 == 0, caching=seed % 3 > 0).executor.outcomes
    for place in range(NUM_DRAFTS):
        for is_first in (False, True):
            accepted, rejected = (total[place, is_first, outcome] for outcome in ("accepted", "rejected"))
            print(f"depth {depth}, draft {place}, first of block {is_first}: {accepted} accepted, {rejected} rejected")
            assert accepted > 0 and rejected > 0


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2]), st.booleans(), st.booleans(), st.booleans())
def test_any_traffic_with_drafts_gives_every_request_its_own_tokens(seed, depth, hybrid, caching, predicts):
    traffic(seed, depth, hybrid, caching, predicts)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2]), st.booleans(), st.booleans())
def test_any_traffic_with_predictions_gives_every_request_its_own_tokens(seed, depth, hybrid, caching):
    traffic(seed, depth, hybrid, caching, predicts=True, drafts=False)


@DEPTHS
def test_predictions_are_accepted_and_rejected_at_every_place(depth):
    """Else the test before would prove nothing."""
    total: Counter[int] = Counter()
    for seed in range(20):
        stats = traffic(seed, depth, seed % 2 == 0, seed % 3 > 0, predicts=True, drafts=False).engine.stats()
        total["steps"] += stats.num_drafts
        total["drafts"] += stats.num_draft_tokens
        for place, count in enumerate(stats.accepted_drafts):
            total[place] += count
    print(total)
    num_accepted = sum(total[place] for place in range(4))
    assert total[0] > total[1] > total[2] > 0 and 0.3 * total["drafts"] < num_accepted < 0.95 * total["drafts"]


@DEPTHS
def test_a_predicted_answer_takes_few_steps_and_is_counted(depth):
    core = Core(pipeline_depth=depth, block_size=BLOCK_SIZE)
    right = answer_to([1, 2, 3], 40)
    core.add("a", [1, 2, 3], max_tokens=40, prediction=right[:18] + [5, 6, 7] + right[21:])
    core.run()
    core.assert_all_as_expected()
    deltas = [delta for outputs in core.steps for delta in outputs.deltas]
    assert len(deltas) < 20
    assert sum(delta.num_accepted for delta in deltas) >= 25
    assert 1 <= sum(delta.num_rejected for delta in deltas) <= 8


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2]), st.booleans(), st.booleans())
def test_any_traffic_that_repeats_itself_gives_every_request_its_own_tokens(seed, depth, hybrid, caching):
    repeated(seed, depth, hybrid, caching)


def repeated(seed: int, depth: int, hybrid: bool, caching: bool) -> Core:
    """The same traffic twice, with suffix decoding."""
    suffix = {"method": "suffix", "num_speculative_tokens": 4}
    core = small_core(random.Random(seed), depth, hybrid, caching, speculative_config=suffix)
    aborted = core.random_traffic(random.Random(seed))
    aborted |= core.random_traffic(random.Random(seed), prefix="again")
    core.assert_all_as_expected(but=aborted)
    core.assert_nothing_is_held()
    return core


@DEPTHS
def test_repeated_answers_are_found(depth):
    """Else the test before would prove nothing."""
    stats = [repeated(seed, depth, seed % 2 == 0, seed % 3 > 0).engine.stats() for seed in range(20)]
    assert sum(sum(entry.accepted_drafts) for entry in stats) > 200


def test_answers_are_found_by_the_same_key_and_salt_only():
    core = Core(block_size=BLOCK_SIZE, speculative_config={"method": "suffix"})

    def num_drafts(name, **sender):
        before = core.engine.stats().num_draft_tokens
        core.add(name, [1, 2, 3], max_tokens=30, **sender)
        core.run()
        core.assert_all_as_expected()
        return core.engine.stats().num_draft_tokens - before

    assert num_drafts("first", owner="a", cache_salt="s") == 0
    assert num_drafts("another key", owner="b", cache_salt="s") == 0
    assert num_drafts("another salt", owner="a", cache_salt="t") == 0
    assert num_drafts("neither") == 0
    assert num_drafts("the same", owner="a", cache_salt="s") > 10


def test_a_cache_that_cannot_go_back_gets_no_predictions():
    state = State((EntryPart("hash", "uint8", (32,)),), every=8)
    core = Core({**FULL, "recurrent:state": state}, pipeline_depth=2)
    core.add("a", [1, 2, 3], max_tokens=30, prediction=answer_to([1, 2, 3], 30))
    core.run()
    core.assert_all_as_expected()
    assert core.engine.stats().num_drafts == 0
