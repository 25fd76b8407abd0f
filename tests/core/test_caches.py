"""Caches that no model has yet, through the whole core: recurrent states, entries of several tokens, a tier outside.

The fake executor reads everything back through block tables, so a state resumed at the wrong token, or a block loaded
from the wrong place, changes the tokens.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv.pool import NULL_BLOCK
from quire.kv.specs import CacheSpec, EntryPart, Full, Sliding, State
from quire.kv.tier import NoTier
from tests.core.fake import hidden_state
from tests.core.harness import FULL, HYBRID, Core, ToyTier

EVERY = 64  # tokens between two states that others may resume from
STATE = State((EntryPart("hash", "uint8", (32,)),), every=EVERY)
RECURRENT = {"attention:kv": Full(1, 1, "bfloat16"), "recurrent:state": STATE}
ONLY_STATES = {"recurrent:state": STATE}
# Like DeepSeek V4: a window, entries of 4 tokens, and the state of the compressor that makes these entries.
COMPRESSED_PARTS = EntryPart("keys", "int8", (6,)), EntryPart("scales", "float32", (2,))
COMPRESSED = {
    "window:kv": Sliding(1, 4, "bfloat16", window=12),
    "compressed:kv": CacheSpec("full", COMPRESSED_PARTS, tokens_per_entry=4),
    "compressor:tail": State((EntryPart("tail", "float32", (3,)),), every=32),
}
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def recurrent_core(specs=RECURRENT, **options) -> Core:
    defaults = {"max_model_len": 400, "max_num_batched_tokens": 100, "num_gpu_blocks_override": 200}
    return Core(specs, **{**defaults, **options})


# -- states ------------------------------------------------------------------------------------------------------------


@DEPTHS
def test_a_request_resumes_from_the_last_state_that_was_kept(depth):
    core = recurrent_core(pipeline_depth=depth)
    prompt = [token % 50 for token in range(300)]
    core.add("first", prompt, max_tokens=5)
    core.run()
    core.add("second", prompt, max_tokens=5)
    core.run()
    core.assert_all_as_expected()
    # Steps of 100 tokens end at 100, 200, 300: states were kept at 64, 192 and 256.
    assert core.engine.scheduler.stats.prefix_hits == 256
    core.add("third", prompt[:200], max_tokens=5)
    core.run()
    core.assert_all_as_expected()
    assert core.engine.scheduler.stats.prefix_hits == 256 + 192


def test_only_blocks_that_get_a_state_are_taken():
    core = recurrent_core(ONLY_STATES, max_num_batched_tokens=400)
    core.add("a", list(range(300)), max_tokens=100)
    core.step()
    (table,) = core.engine.scheduler.running[0].blocks.tables
    # Block 4 has token 299; the block that ends at 256 was released.
    assert [idx for idx, block in enumerate(table) if block != NULL_BLOCK] == [4]
    assert core.engine.kv.pools[0].num_free == 200 - 1 - 1


@pytest.mark.parametrize("caching", [True, False])
@DEPTHS
def test_choices_share_states_too(depth, caching):
    core = recurrent_core(pipeline_depth=depth, enable_prefix_caching=caching)
    core.add("a", [token % 50 for token in range(150)], n=3, max_tokens=80)
    core.run()
    core.assert_all_as_expected()
    core.assert_nothing_is_held()
    num_computed = sum(outputs.stats.step_tokens for outputs in core.steps)
    assert num_computed < 150 + 3 * 80 + 2 * (150 - 128) + 10  # forks begin at 128


@pytest.mark.parametrize("moment", range(1, 10))
@DEPTHS
def test_states_survive_a_preemption_at_every_moment(depth, moment):
    core = recurrent_core(pipeline_depth=depth, max_num_batched_tokens=70)
    for name in ("a", "b"):
        core.add(name, [token % 50 for token in range(140)], max_tokens=9)
    for _ in range(moment):
        core.step()
    if core.engine.scheduler.running:
        core.engine.scheduler._preempt(core.engine.scheduler.running[-1])
    core.run()
    core.assert_all_as_expected()
    core.assert_nothing_is_held()


def test_a_state_of_other_tokens_is_noticed():
    core = recurrent_core()
    prompt = [token % 50 for token in range(300)]
    core.add("first", prompt, max_tokens=5)
    core.run()
    for block in core.executor.blocks[1]:
        block.update({key: b"another's" for key in block})
    core.add("second", prompt, max_tokens=5)
    core.run()
    assert core.tokens["second", 0] != core.expected("second")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.sampled_from([1, 2]),
    caching=st.booleans(),
    specs=st.sampled_from([RECURRENT, ONLY_STATES, COMPRESSED]),
)
def test_any_traffic_with_states_gives_every_request_its_own_tokens(seed, depth, caching, specs):
    rng = random.Random(seed)
    core = Core(
        specs,
        pipeline_depth=depth,
        enable_prefix_caching=caching,
        max_num_seqs=rng.randint(1, 5),
        max_model_len=200,
        max_num_batched_tokens=rng.randint(5, 150),
        num_gpu_blocks_override=rng.randint(110, 160),
    )
    aborted = core.random_traffic(rng, longest_shared=150)
    core.assert_all_as_expected(but=aborted)
    core.assert_nothing_is_held()


# -- a tier ------------------------------------------------------------------------------------------------------------


def returning(tier: ToyTier, specs=FULL, **options) -> Core:
    """A prompt is computed, pushed out of the pool by others, and comes back."""
    core = Core(specs, tier=tier, **{"num_gpu_blocks_override": 20, "max_num_seqs": 1, **options})
    prompt = list(range(30))
    core.add("first", prompt, max_tokens=4)
    for idx in range(4):
        core.add(f"other{idx}", [100 + idx] * 40, max_tokens=4)
    core.run()
    core.add("again", prompt, max_tokens=4)
    core.run()
    return core


@DEPTHS
def test_what_the_pool_forgets_is_loaded_back(depth):
    core = returning(ToyTier(200), pipeline_depth=depth)
    core.assert_all_as_expected()
    core.assert_nothing_is_held()
    assert core.engine.scheduler.stats.prefix_hits == 28
    assert returning(NoTier()).engine.scheduler.stats.prefix_hits == 0


def test_a_wrong_load_changes_the_tokens():
    core = returning(ToyTier(200, wrong=True))
    assert core.tokens["again", 0] != core.expected("again")


def test_a_step_moves_no_more_bytes_than_it_may():
    block_bytes = 4 * 4
    for num_blocks in (0, 1, 3):
        core = returning(ToyTier(200, max_step_bytes=num_blocks * block_bytes))
        core.assert_all_as_expected()
        assert core.engine.scheduler.stats.prefix_hits <= 4 * num_blocks
        assert max(len(plan.moves) for plan in core.executor.plans) <= num_blocks


def test_saves_leave_room_for_the_loads_that_cause_them():
    """If every free block has content, each load evicts something that is saved, and both count."""
    options = dict(num_gpu_blocks_override=12, max_num_seqs=1, max_model_len=44, max_num_batched_tokens=8)
    core = Core(tier=ToyTier(200, max_step_bytes=2 * 4 * 4), **options)
    for name, first in (("first", 0), ("fills", 100), ("again", 0)):
        core.add(name, [first + idx for idx in range(43)], max_tokens=1)
        core.run()
    core.assert_all_as_expected()
    assert sum(move.is_load for plan in core.executor.plans for move in plan.moves) > 0
    assert max(len(plan.moves) for plan in core.executor.plans) <= 2


@DEPTHS
@pytest.mark.parametrize("caching", [True, False])
def test_a_window_moves_on_when_all_choices_have_the_prompt(depth, caching):
    """Until then what they need of it is kept for them."""
    most = {}
    for n in (1, 3):
        core = Core(HYBRID, pipeline_depth=depth, enable_prefix_caching=caching)
        core.add("a", list(range(20)), n=n, max_tokens=40)
        for _ in range(20):
            core.step()
        leader = core.engine.scheduler.requests["a", 0]
        most[n] = [sum(map(bool, table)) for table in leader.blocks.tables[1:]]
        core.run()
        core.assert_all_as_expected()
    assert max(most[3]) <= max(most[1]) + 1


def test_a_tier_smaller_than_a_hit_never_gives_away_what_a_step_loads():
    for num_places in range(1, 12):
        core = returning(ToyTier(num_places))
        core.assert_all_as_expected()


def test_random_traffic_saves_and_loads():
    """Else the next test would prove nothing."""
    moves = []
    for seed in range(40):
        for plan in tier_traffic(seed, 2, FULL).executor.plans:
            moves += plan.moves
    num_loads = sum(move.is_load for move in moves)
    print(f"{num_loads} loads, {len(moves) - num_loads} saves")
    assert num_loads > 20 and len(moves) - num_loads > 100


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2]), st.sampled_from([FULL, HYBRID, RECURRENT]))
def test_any_traffic_with_a_tier_gives_every_request_its_own_tokens(seed, depth, specs):
    tier_traffic(seed, depth, specs)


def tier_traffic(seed: int, depth: int, specs: dict[str, CacheSpec]) -> Core:
    rng = random.Random(seed)
    tier = ToyTier(rng.choice([1, 5, 30, 300]), max_step_bytes=rng.choice([64, 300, 1 << 20]))
    core = Core(
        specs,
        tier=tier,
        pipeline_depth=depth,
        max_num_seqs=rng.randint(1, 4),
        max_model_len=100,
        max_num_batched_tokens=rng.randint(5, 60),
        num_gpu_blocks_override=rng.randint(26, 40) if specs is FULL else rng.randint(84, 100),
    )
    aborted = core.random_traffic(rng, longest_shared=60)
    core.assert_all_as_expected(but=aborted)
    core.assert_nothing_is_held()
    return core


# -- rows that give a vector -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [FULL, HYBRID, RECURRENT], ids=["full", "hybrid", "recurrent"])
@DEPTHS
def test_rows_that_give_a_vector_run_beside_others(depth, specs):
    core = Core(specs, pipeline_depth=depth, max_num_batched_tokens=9, num_gpu_blocks_override=100)
    prompts = {f"v{length}": list(range(length)) for length in (1, 4, 15, 40, 64)}
    for idx, (name, prompt) in enumerate(prompts.items()):
        core.add(name, prompt, max_tokens=7, wants_vector=True)
        core.add(f"a{idx}", [5, 6, 7 + idx], max_tokens=9)
    core.run()
    assert core.vectors == {name: hidden_state(prompt) for name, prompt in prompts.items()}
    assert all(core.tokens[name, 0] == [] and core.reasons[name, 0] == "stop" for name in prompts)
    core.assert_all_as_expected(but=set(prompts))
    core.assert_nothing_is_held()
