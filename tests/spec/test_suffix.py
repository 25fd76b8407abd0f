"""What suffix decoding guesses: the rule on small texts, and what of recent answers is kept."""

import random

import pytest

from quire.config.speculation import Speculation
from quire.spec import suffix
from quire.spec.suffix import Recent, Suffix, Text, likeliest

RULE = Speculation("suffix", 8)


def guess(text: list[int], most: int = 8, **rule) -> list[int]:
    return Suffix(Speculation("suffix", 8, **rule), 0).propose(text, most)


def test_as_many_tokens_follow_as_were_matched():
    assert guess([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4]
    assert guess([1, 2, 3, 4, 5, 9, 1, 2, 3]) == [4, 5, 9]
    assert guess([1, 2, 3, 4, 5, 9, 1, 2], max_spec_factor=2.0) == [3, 4, 5, 9]
    assert guess([1, 2, 3, 4, 5, 9, 1, 2, 3], most=1) == [4]


def test_one_token_in_common_is_not_enough():
    assert guess([1, 2, 3, 2]) == [] and guess([7]) == [] and guess([]) == []


def test_the_most_frequent_continuation_is_taken_until_it_is_unlikely():
    text = [1, 2, 3, 10, 1, 2, 3, 11, 1, 2, 4, 12, 1, 2]
    assert guess(text)[:1] == [3]
    assert guess(text, min_token_prob=0.7) == []


def test_a_longer_match_wins_over_a_frequent_one():
    text = [5, 1, 2, 7, 8, 9, 0, 1, 2, 3, 0, 1, 2, 3, 0, 5, 1, 2]
    assert guess(text)[0] == 7


def test_a_run_goes_on_with_itself():
    assert guess([4, 4, 4, 4, 4])[0] == 4


@pytest.mark.parametrize("seed", range(30))
def test_drafts_are_what_followed_the_longest_match_somewhere(seed):
    """Against the rule written out, where each pair occurs less often than places are kept."""
    rng = random.Random(seed)
    text = [rng.randrange(12) for _ in range(60)]
    drafts = guess(text, min_token_prob=0.0)
    for end in range(2, len(text)):
        if drafts and text[end - 2 : end] == text[-2:] and text[end] == drafts[0]:
            return
    occurs = any(text[end - 2 : end] == text[-2:] for end in range(2, len(text)))
    assert not drafts and not occurs


def test_a_long_prompt_is_indexed_piece_by_piece(monkeypatch):
    monkeypatch.setattr(suffix, "INDEXED_AT_ONCE", 10)
    proposer = Suffix(RULE, 0)
    text = [1, 2, 3] * 8
    assert [bool(proposer.propose(text, 4)) for _ in range(3)] == [False, False, True]


def test_places_are_bounded():
    text = Text([1, 2] * 1000)
    text.index()
    assert max(map(len, text.ends.values())) <= 2 * suffix.MAX_PLACES
    assert likeliest([text], [1, 2], 4, 1.0, 0.1)[1] == [1, 2]


def test_answers_do_not_run_into_each_other():
    recent = Recent(RULE)
    recent.add(("", ""), [1, 2, 3])
    recent.add(("", ""), [8, 9])
    assert Suffix(RULE, 0, recent).propose([5, 1, 2], 8) == [3]
    assert Suffix(RULE, 0, recent).propose([5, 2, 3], 8) == []


def test_the_oldest_answers_are_dropped(monkeypatch):
    monkeypatch.setattr(suffix, "PART_TOKENS", 100)
    recent = Recent(RULE)
    for idx in range(100):
        recent.add(("", ""), [idx, 1000, 2000 + idx, 7, 7, 7, 7, 7])
        (answers,) = recent.by_scope.values()
        assert answers.num_tokens < suffix.SCOPE_TOKENS + 250
    assert Suffix(RULE, 0, recent).propose([0, 1000], 4) == []
    assert Suffix(RULE, 0, recent).propose([99, 1000], 4) == [2099, 7]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 9])
def test_as_many_answers_are_kept_as_were_asked_for(most):
    """The latest ones; with several keys or salts as many in all."""
    recent = Recent(Speculation("suffix", 8, max_cached_requests=most))
    for idx in range(20):
        recent.add(("", ""), [idx, 1000, 2000 + idx])
        kept = [i for i in range(idx + 1) if Suffix(RULE, 0, recent).propose([i, 1000], 4)]
        assert kept == list(range(idx + 1))[-len(kept) :] and min(idx + 1, (most + 1) // 2) <= len(kept) <= most
    for idx in range(20):
        recent.add(("key", str(idx)), [1, 2, 3])
        assert recent.num_answers == sum(answers.num_answers for answers in recent.by_scope.values()) <= most


def test_no_answer_is_kept_where_none_was_asked_for():
    none = Recent(Speculation("suffix", 8, max_cached_requests=0))
    none.add(("", ""), [1, 2, 3])
    assert not none.by_scope


def test_keys_and_salts_share_one_bound(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_SHARED_TOKENS", 3000)
    recent = Recent(RULE)
    for idx in range(50):
        recent.add(("key", str(idx)), [1, 2, 3])
        recent.add(("key", "0"), [4, 5, 6])
    assert recent.num_tokens <= 3000 and len(recent.by_scope) <= 11 and ("key", "0") in recent.by_scope
    assert recent.num_tokens == sum(answers.num_tokens for answers in recent.by_scope.values())
