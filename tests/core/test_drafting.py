"""How many drafts are verified: as many as were worth it, none for a while after a miss, none in a full step."""

from hypothesis import given
from hypothesis import strategies as st

from quire.config.speculation import Speculation
from quire.core.drafting import CPU_TOKENS, MAX_PAUSE, Drafting, DraftLength

MOST = 8


def test_accepted_drafts_lengthen_and_rejected_ones_shorten():
    length = DraftLength(MOST)
    assert length.take() == 3 and DraftLength(2).take() == 2
    length.saw(3, 3, MOST)
    assert length.take() == 6
    length.saw(6, 6, MOST)
    assert length.take() == MOST
    length.saw(8, 1, MOST)
    assert length.take() == 2


def test_after_a_miss_there_is_a_pause_and_it_grows():
    length = DraftLength(MOST)
    pauses = []
    for _ in range(7):
        length.saw(max(1, length.wanted), 0, MOST)
        pauses.append(next(steps for steps in range(100) if length.take()))
    assert pauses == [1, 3, 7, 15, 31, 31, 31] and MAX_PAUSE == 31
    length.saw(1, 1, MOST)
    length.saw(2, 0, MOST)
    assert [length.take(), length.take()] == [0, 1]


@given(st.lists(st.integers(0, 8), max_size=50))
def test_one_is_always_tried_again(results):
    length = DraftLength(MOST)
    for accepted in results:
        taken = next(taken for _ in range(MAX_PAUSE + 1) if (taken := length.take()))
        assert 1 <= taken <= MOST
        length.saw(taken, min(accepted, taken), MOST)


def test_a_full_step_has_no_drafts():
    drafting = Drafting(4, None, on_cpu=True)
    assert [drafting.most(rows) for rows in (1, 2, 4, 8, CPU_TOKENS, 100)] == [4, 3, 1, 0, 0, 0]


def test_the_operators_own_table_decides():
    drafting = Drafting(4, Speculation("ngram", 4, by_batch_size=((1, 4), (8, 2), (32, 0))))
    assert [drafting.most(rows) for rows in (1, 7, 8, 31, 32, 1000)] == [4, 4, 2, 2, 0, 0]
