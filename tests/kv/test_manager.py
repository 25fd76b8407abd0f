"""The KV cache's bookkeeping: hits, forks, windows, eviction; and check(), which must see every way to break it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import CapacityError, EngineError
from quire.kv.groups import check_capacity, form_layout
from quire.kv.manager import KVManager, RequestBlocks
from quire.kv.pool import NULL_BLOCK
from quire.kv.specs import Full, KVLayout, Sliding

FULL = Full(num_kv_heads=1, head_size=1, dtype="bfloat16")
NEAR = Sliding(num_kv_heads=1, head_size=1, dtype="bfloat16", window=6)
NEARER = Sliding(num_kv_heads=1, head_size=1, dtype="bfloat16", window=5)
THIN = Sliding(num_kv_heads=1, head_size=2, dtype="uint8", window=9)
WIDE = Full(num_kv_heads=2, head_size=1, dtype="bfloat16")


def manager(*specs, num_blocks=40, block_size=4, caching=True) -> KVManager:
    layout = form_layout({f"layer{i}:kv": spec for i, spec in enumerate(specs)}, block_size, num_blocks)
    return KVManager(layout, caching)


def run(kv: KVManager, tokens: list[int], salt: str = "", chunk: int = 1000) -> tuple[RequestBlocks, int]:
    """A request goes in and computes all its tokens; returns it and its hit."""
    blocks = kv.open(tokens, salt)
    hit = kv.find_prefix(blocks)
    kv.enter(blocks, hit)
    done = hit
    while done < len(tokens):
        done = min(done + chunk, len(tokens))
        assert kv.grow(blocks, done) is not None
        kv.advance(blocks, done, None)
        kv.check()
    return blocks, hit


# -- prefix hits -------------------------------------------------------------------------------------------------------


def test_a_prompt_that_begins_alike_reuses_full_blocks_only():
    kv = manager(FULL)
    first, _ = run(kv, list(range(10)))
    second, hit = run(kv, list(range(8)) + [99, 98])
    assert hit == 8
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.tables[0][2] != first.tables[0][2]


def test_a_hit_never_covers_the_last_token():
    kv = manager(FULL)
    run(kv, list(range(8)))
    assert run(kv, list(range(8)))[1] == 4


@pytest.mark.parametrize("specs", [[FULL], [FULL, NEAR, NEARER]])
def test_forgotten_prefixes_are_found_no_more_and_blocks_stay_with_their_holders(specs):
    kv = manager(*specs)
    gone, _ = run(kv, list(range(20)))
    kv.release(gone, 5)  # its blocks wait for a step in flight
    held, _ = run(kv, list(range(50, 70)))
    kv.forget_prefixes()
    kv.check()
    kv.step_applied(5)
    kv.check()
    assert run(kv, list(range(20)))[1] == run(kv, list(range(50, 70)))[1] == 0
    tokens = held.tokens
    tokens += range(70, 90)
    assert kv.grow(held, len(tokens)) is not None
    kv.advance(held, len(tokens), None)
    kv.check()
    kv.release(held, None)
    kv.check()


def test_a_hit_survives_its_request_until_the_blocks_are_evicted():
    kv = manager(FULL, num_blocks=6)
    kv.release(run(kv, list(range(12)))[0], None)
    assert kv.find_prefix(kv.open(list(range(12)) + [0], "")) == 12
    kv.release(run(kv, list(range(100, 120)))[0], None)
    assert kv.find_prefix(kv.open(list(range(12)) + [0], "")) == 0


def test_eviction_takes_the_least_recently_used_and_the_tails_first():
    kv = manager(FULL, num_blocks=9)  # eight usable
    old, new = list(range(12)), list(range(100, 112))
    kv.release(run(kv, old)[0], None)
    kv.release(run(kv, new)[0], None)
    run(kv, list(range(200, 216)))  # four blocks: two were never used, then the tail of the older prompt
    assert kv.find_prefix(kv.open(old + [0], "")) == 4
    assert kv.find_prefix(kv.open(new + [0], "")) == 12


def test_a_salt_keeps_prompts_apart():
    kv = manager(FULL)
    run(kv, list(range(12)), salt="a")
    assert run(kv, list(range(12)), salt="b")[1] == 0
    assert run(kv, list(range(12)), salt="a")[1] == 8


def test_the_same_tokens_after_another_beginning_are_no_hit():
    kv = manager(FULL)
    run(kv, [1, 2, 3, 4, 5, 6, 7, 8, 0])
    assert run(kv, [9, 9, 9, 9, 5, 6, 7, 8, 0])[1] == 0


def test_without_prefix_caching_nothing_is_found():
    kv = manager(FULL, caching=False)
    run(kv, list(range(12)))
    assert run(kv, list(range(12)))[1] == 0


# -- windows -----------------------------------------------------------------------------------------------------------


def test_a_sliding_group_holds_its_window_and_no_more():
    kv = manager(NEAR)
    blocks, _ = run(kv, list(range(60)), chunk=4)
    held = [block for block in blocks.tables[0] if block != NULL_BLOCK]
    # The next query is at position 60 and reads 55..60: blocks 13 and 14.
    assert len(held) == 2
    assert kv.pools[0].num_free == kv.pools[0].num_blocks - 1 - 2


def test_a_hit_of_a_sliding_group_needs_only_its_window():
    kv = manager(NEAR, num_blocks=12)
    tokens = list(range(33))
    kv.release(run(kv, tokens, chunk=4)[0], None)
    blocks, hit = run(kv, tokens)
    assert hit == 32
    assert blocks.tables[0][:6] == [NULL_BLOCK] * 6  # never looked for
    kv.check()


def test_a_hit_of_a_hybrid_is_what_every_group_supports():
    kv = manager(FULL, NEAR, num_blocks=40)
    tokens = list(range(32))
    blocks, _ = run(kv, tokens)
    kv.release(blocks, None)
    evicted = kv.pools[0].cached.pop((1, blocks.chains[4].hashes[6]))  # block 6 of the sliding group
    kv.pools[0].content[evicted] = None
    # 28 would need blocks 5 and 6 of the window, 24 needs 4 and 5.
    assert kv.find_prefix(kv.open(tokens, "")) == 24


def test_groups_of_different_width_share_one_pool_with_equal_bytes():
    layout = form_layout({"a": WIDE, "b": FULL, "c": FULL}, block_size=4, num_blocks=10)
    assert [group.block_size for group in layout.groups] == [4, 8, 8]
    assert {group.block_size * group.spec.bytes_per_token for group in layout.groups} == {layout.pools[0].plane_bytes}
    assert layout.pools[0].num_planes == 1


def test_too_little_memory_for_one_request_says_what_would_fit():
    layout = form_layout({"a": FULL}, block_size=4, num_blocks=11)
    check_capacity(layout, max_model_len=40, chunk_tokens=16)
    with pytest.raises(CapacityError, match="lower --max-model-len to 40"):
        check_capacity(layout, max_model_len=41, chunk_tokens=16)


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [(FULL,), (FULL, NEAR, NEARER)], ids=["full", "hybrid"])
def test_a_fork_shares_full_blocks_and_outlives_its_parent(specs):
    kv = manager(*specs, caching=False)
    parent = kv.open(list(range(14)), "")
    kv.pin(parent, 13)
    kv.enter(parent, 0)
    assert kv.grow(parent, 14) is not None
    kv.advance(parent, 14, None)
    child = kv.open(list(range(14)), "")
    assert kv.fork(parent, child, 13) == 12
    kv.check()
    kv.release(parent, None)
    kv.check()
    assert kv.grow(child, 14) is not None
    kv.release(child, None)
    kv.check()
    assert kv.pools[0].num_free == kv.pools[0].num_blocks - 1


# -- steps in flight ---------------------------------------------------------------------------------------------------


def test_blocks_named_by_a_step_in_flight_wait_in_limbo():
    kv = manager(FULL, num_blocks=4)
    blocks, _ = run(kv, list(range(12)))
    kv.release(blocks, step_in_flight=7)
    kv.check()
    assert kv.pools[0].num_free == 0
    assert kv.find_prefix(kv.open(list(range(12)), "")) == 0  # not even as a hit
    kv.step_applied(6)
    assert kv.pools[0].num_free == 0
    kv.step_applied(7)
    assert kv.pools[0].num_free == 3
    assert kv.find_prefix(kv.open(list(range(12)), "")) == 8


# -- any order of events -----------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    specs=st.sampled_from([(FULL,), (NEAR,), (FULL, NEAR, NEARER), (WIDE, THIN, FULL)]),
    caching=st.booleans(),
)
def test_check_holds_after_any_sequence_of_events(seed, specs, caching):
    rng = random.Random(seed)
    kv = manager(*specs, num_blocks=rng.randint(8, 40), caching=caching)
    live: dict[int, tuple[RequestBlocks, int]] = {}
    salts: dict[int, str] = {}
    in_flight: list[int] = []
    prompts = [[rng.randrange(9) for _ in range(rng.randint(1, 40))] for _ in range(3)]
    for event in range(60):
        newest = in_flight[-1] if in_flight else None
        match rng.choice(["add", "grow", "grow", "release", "fork", "submit", "apply"]):
            case "add":
                beginning = rng.choice(prompts)[: rng.randint(1, 40)]
                tokens = beginning + [rng.randrange(9) for _ in range(rng.randint(1, 6))]
                salts[event] = rng.choice(["", "s"])
                blocks = kv.open(tokens, salts[event])
                hit = kv.find_prefix(blocks)
                assert hit < len(tokens)
                if kv.can_admit(blocks, hit, 16):
                    kv.enter(blocks, hit)
                    live[event] = (blocks, hit)
            case "grow" if live:
                key = rng.choice(list(live))
                blocks, done = live[key]
                goal = min(len(blocks.tokens), done + rng.randint(1, 16))
                if kv.grow(blocks, goal) is not None:
                    kv.advance(blocks, goal, newest)
                    if goal == len(blocks.tokens):
                        blocks.tokens.append(rng.randrange(9))
                    live[key] = (blocks, goal)
            case "release" if live:
                kv.release(live.pop(rng.choice(list(live)))[0], newest)
            case "fork" if live:
                key = rng.choice(list(live))
                parent, done = live[key]
                salts[event] = salts[key]
                child = kv.open(list(parent.tokens), salts[key])
                shared = kv.fork(parent, child, min(done, len(child.tokens) - 1))
                assert shared <= done
                live[event] = (child, shared)
            case "submit":
                in_flight.append(event)
            case "apply" if in_flight:
                kv.step_applied(in_flight.pop(0))
        kv.check()
    for blocks, _ in live.values():
        kv.release(blocks, None)
    kv.step_applied(10**9)
    kv.check()
    assert kv.pools[0].num_free == kv.pools[0].num_blocks - 1


# -- check() sees what is broken ---------------------------------------------------------------------------------------


def broken_count(kv, blocks):
    kv.pools[0].ref_counts[blocks.tables[0][0]] += 1


def broken_free_list(kv, blocks):
    kv.pools[0].free[blocks.tables[0][0]] = None


def lost_block(kv, blocks):
    kv.pools[0].free.popitem()


def null_block_owned(kv, blocks):
    kv.pools[0].free[NULL_BLOCK] = None


def stale_index(kv, blocks):
    kv.pools[0].content[blocks.tables[0][0]] = None


def unlisted_content(kv, blocks):
    kv.pools[0].cached.popitem()


def wrong_content(kv, blocks):
    blocks.chains[4].hashes[0] = b"other"


def block_twice_in_a_table(kv, blocks):
    blocks.tables[0][1] = blocks.tables[0][0]


def needed_block_dropped(kv, blocks):
    kv.pools[0].let_go([blocks.tables[0][1]], None)
    blocks.tables[0][1] = NULL_BLOCK


def limbo_miscounted(kv, blocks):
    kv.pools[0].num_limbo += 1


def in_limbo_and_held(kv, blocks):
    kv.pools[0].limbo.append((1, [blocks.tables[0][0]]))
    kv.pools[0].num_limbo += 1


@pytest.mark.parametrize(
    "break_it",
    [
        broken_count,
        broken_free_list,
        lost_block,
        null_block_owned,
        stale_index,
        unlisted_content,
        wrong_content,
        block_twice_in_a_table,
        needed_block_dropped,
        limbo_miscounted,
        in_limbo_and_held,
    ],
)
def test_check_sees(break_it):
    kv = manager(FULL)
    blocks, _ = run(kv, list(range(14)))
    kv.check()
    break_it(kv, blocks)
    with pytest.raises(EngineError):
        kv.check()


def test_a_layout_is_plain_data_that_survives_a_message():
    import msgspec

    layout = form_layout({"a": FULL, "b": NEAR}, 4, 10)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout) == layout
