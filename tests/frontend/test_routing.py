"""Which core takes a request: ready ones first, the least work, known prefixes counted; and no core is left idle."""

from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.routing import MAX_AHEAD, Load, choose, num_cached

COUNT = st.integers(0, 100_000)
LOADS = st.lists(st.builds(Load, st.booleans(), COUNT, st.integers(0, 500), COUNT, COUNT), min_size=1, max_size=8)


def load(num_to_compute: int = 0, num_live: int = 0, num_cached: int = 0, num_known: int = 0, is_ready=True) -> Load:
    return Load(is_ready, num_to_compute, num_live, num_cached, num_known)


@given(LOADS)
def test_a_core_that_is_not_ready_is_chosen_only_if_none_is(loads):
    assert loads[choose(loads)].is_ready == any(load.is_ready for load in loads)


@given(LOADS)
def test_no_ready_core_is_better_in_everything_than_the_one_chosen(loads):
    chosen = loads[choose(loads)]
    for other in loads:
        if other.is_ready == chosen.is_ready:
            worse = (chosen.num_to_compute, chosen.num_live, -chosen.num_cached, chosen.num_known)
            better = (other.num_to_compute, other.num_live, -other.num_cached, other.num_known)
            assert not (all(a < b for a, b in zip(better, worse)))


@given(LOADS, st.integers(0, 1000))
def test_work_that_all_have_changes_nothing(loads, num_more):
    more = [each._replace(num_to_compute=each.num_to_compute + num_more) for each in loads]
    assert choose(more) == choose(loads)


@given(st.lists(COUNT, min_size=2, max_size=8))
def test_the_core_with_the_fewest_tokens_to_compute_takes_it(counts):
    assert choose([load(count) for count in counts]) == counts.index(min(counts))


@given(st.lists(st.integers(0, 100_000), min_size=2, max_size=4))
def test_a_core_that_knows_the_prefix_is_ahead_of_others_by_so_many_requests_and_no_more(cached):
    """Whatever a prefix saves, a hundred requests that begin alike, and only generate, are not one core's."""
    live = [0] * len(cached)
    for _ in range(100):
        live[choose([load(0, num_live, num_cached) for num_live, num_cached in zip(live, cached)])] += 1
        assert max(live) - min(live) <= MAX_AHEAD + 1


def test_requests_with_nothing_in_common_go_round():
    live = [0] * 4
    order = []
    for _ in range(64):
        order.append(choose([load(0, num_live) for num_live in live]))
        live[order[-1]] += 1
    assert order == [0, 1, 2, 3] * 16


def test_one_after_the_other_fill_all_caches():
    """Each is answered before the next comes: no core has any work, and still not all prefixes are to be one core's."""
    known = [0, 0]
    for _ in range(8):
        known[choose([load(0, 0, 0, num_known) for num_known in known])] += 20
    assert known == [80, 80]


def test_a_long_prompt_that_is_cached_waits_for_a_little_work():
    assert choose([load(300, 2, 2000), load(0, 0, 0)]) == 0
    assert choose([load(5000, 2, 2000), load(0, 0, 0)]) == 1


@given(st.integers(0, 20), st.integers(1, 4), st.integers(0, 30))
def test_a_hit_is_as_long_as_the_first_blocks_that_are_known(num_first, blocks_per_unit, num_blocks):
    """Whether a core told of them, or will have them when it has computed what it was sent."""
    known = {*range(0, num_first, 2), *range(num_first + 1, 40)}
    expected = {*range(1, num_first, 2)}
    found = num_cached(range(num_blocks), known, expected, 16, 16 * blocks_per_unit)
    longest = min(num_first, num_blocks) * 16
    assert found % (16 * blocks_per_unit) == 0 and longest - 16 * blocks_per_unit < found <= longest
