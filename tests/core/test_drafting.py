"""How many drafts are verified: as many as were worth it, none for a while after a miss, none in a full step."""

from hypothesis import given
from hypothesis import strategies as st

from quire.config.speculation import Speculation
from quire.core.drafting import CPU_TOKENS, MAX_PAUSE, Drafting, DraftLength, best_length, costs

MOST = 8
ON_CPU, ON_GPU = costs(MOST, on_cpu=True), costs(MOST, on_cpu=False)


def test_accepted_drafts_lengthen_and_rejected_ones_shorten():
    length = DraftLength(ON_CPU)
    assert length.take() == 3 and DraftLength(ON_CPU[:2]).take() == 1
    for _ in range(6):
        length.saw(length.wanted, length.wanted)
    assert length.take() == 7
    for accepted in (1, 0, 1, 0):
        length.saw(3, accepted)
    assert 1 <= length.take() < 3


def test_a_cpu_fills_the_rows_that_it_multiplies_at_once():
    """Four take little longer than one; five take much longer than four."""
    assert best_length(0.8, ON_CPU) == 3 and best_length(0.99, ON_CPU) == 7


def test_what_a_guess_costs_counts():
    cheap, dear = costs(MOST, True, 0.05), costs(MOST, True, 0.4)
    assert best_length(0.7, cheap) == 3 and best_length(0.7, dear) == 1 and best_length(0.4, dear) == 0


@given(st.floats(0, 1), st.lists(st.floats(0.01, 1), min_size=1, max_size=12))
def test_no_other_length_is_faster(acceptance, dearer):
    found = [1.0]
    for more in dearer:
        found.append(found[-1] + more)
    speeds = [sum(acceptance**i for i in range(k + 1)) / cost for k, cost in enumerate(found)]
    assert speeds[best_length(acceptance, found)] >= max(speeds) - 1e-9


def test_a_drafter_that_is_mostly_right_is_never_paused_for_one_miss():
    length = DraftLength(ON_GPU[:5])
    for accepted in (4, 2, 4, 1, 3, 4, 0, 4, 2, 0, 3):
        assert length.take() >= 3
        length.saw(4, accepted)


def test_after_misses_there_is_a_pause_and_it_grows():
    length = DraftLength(ON_CPU)
    pauses = []
    for _ in range(12):
        length.saw(max(1, length.wanted), 0)
        pauses.append(next(steps for steps in range(100) if length.take()))
    num_tries = pauses.index(1)  # before it is given up for the first time
    assert 1 <= num_tries <= 4
    assert pauses[num_tries : num_tries + 6] == [1, 3, 7, 15, 31, 31] and MAX_PAUSE == 31
    for _ in range(3):
        length.saw(length.wanted, length.wanted)
    assert length.take() >= 3


@given(st.lists(st.integers(0, 8), max_size=50), st.sampled_from([ON_CPU, ON_GPU, costs(MOST, True, 2.0)]))
def test_one_is_always_tried_again(results, step_costs):
    length = DraftLength(step_costs)
    for accepted in results:
        taken = next(taken for _ in range(MAX_PAUSE + 1) if (taken := length.take()))
        assert 1 <= taken <= MOST
        most = length.next_most(taken)
        length.saw(taken, min(accepted, taken))
        assert length.pause or length.wanted <= most


def test_a_full_step_has_no_drafts():
    drafting = Drafting(4, None, on_cpu=True)
    assert [drafting.most(rows) for rows in (1, 2, 4, 8, CPU_TOKENS, 100)] == [4, 3, 1, 0, 0, 0]


def test_the_operators_own_table_decides():
    drafting = Drafting(4, Speculation("ngram", 4, by_batch_size=((1, 4), (8, 2), (32, 0))))
    assert [drafting.most(rows) for rows in (1, 7, 8, 31, 32, 1000)] == [4, 4, 2, 2, 0, 0]
