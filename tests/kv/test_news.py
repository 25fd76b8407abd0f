"""What a core tells of its prefix cache: whoever adds it up knows which blocks can be found, and expects the hits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv import news as telling
from quire.kv.groups import form_layout
from quire.kv.manager import KVManager
from quire.kv.news import PrefixNews
from quire.kv.prefix import digests, prefix_digests
from quire.kv.specs import Full, Sliding
from tests.kv.test_manager import run

FULL = Full(num_kv_heads=1, head_size=1, dtype="bfloat16")
NEAR = Sliding(num_kv_heads=1, head_size=1, dtype="bfloat16", window=6)


def manager(*specs, num_blocks: int = 12) -> KVManager:
    layout = form_layout({f"layer{i}:kv": spec for i, spec in enumerate(specs)}, 4, num_blocks)
    return KVManager(layout, news=PrefixNews())


def told(known: set[int], news: PrefixNews) -> set[int]:
    while news:
        is_reset, came, went = news.take()
        if is_reset:
            known.clear()
        known.update(digests(came))
        known.difference_update(digests(went))
    return known


def found(kv: KVManager) -> set[int]:
    """What really is in the cache."""
    hashes = [key[1] for pool in kv.pools for key in pool.cached if key[0] == kv.told_group]
    return set(digests(b"".join(each[:8] for each in hashes)))


PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=24)


@pytest.mark.parametrize("specs", [[FULL], [NEAR, FULL], [NEAR]], ids=["full", "hybrid", "window"])
@given(steps=st.lists(st.tuples(PROMPTS, st.sampled_from(["", "salt"]), st.booleans(), st.booleans()), max_size=30))
@settings(max_examples=60)
def test_what_was_told_is_what_is_there(specs, steps):
    kv = manager(*specs, num_blocks=10 * len(specs))
    known: set[int] = set()
    for tokens, salt, is_told, is_forgotten in steps:
        blocks, _ = run(kv, tokens, salt)
        kv.release(blocks, None)
        if is_forgotten:
            kv.forget_prefixes()
        if is_told:
            assert told(known, kv.news) == found(kv)
    assert told(known, kv.news) == found(kv)


@given(st.lists(st.tuples(PROMPTS, st.sampled_from(["", "salt"])), min_size=1, max_size=30))
@settings(max_examples=60)
def test_a_frontend_expects_the_hit_that_a_core_finds(prompts):
    kv = manager(FULL)
    known: set[int] = set()
    for tokens, salt in prompts:
        expected = 0
        for digest in prefix_digests(tokens, salt, 4):
            if digest not in told(known, kv.news):
                break
            expected += 4
        blocks, hit = run(kv, tokens, salt)
        assert hit == expected
        kv.release(blocks, None)


def test_much_news_comes_in_parts(monkeypatch):
    monkeypatch.setattr(telling, "MAX_DIGESTS", 3)
    kv = manager(FULL, num_blocks=40)
    run(kv, list(range(40)))
    assert len(kv.news) == 10
    _, came, went = kv.news.take()
    assert len(came) == 3 * 8 and not went
    assert told(set(digests(came)), kv.news) == found(kv)


def test_a_group_that_needs_every_block_is_told_of():
    assert manager(NEAR, FULL).told_group == 1 and manager(FULL, NEAR).told_group == 0
