"""Limits of a key: requests and tokens over a sliding minute, counted to the token by a clock of the test's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.api.server.errors import problem
from quire.api.server.limits import WINDOW_S, Limits
from quire.errors import RateLimitedError


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def limits(rpm: int | None = None, tpm: int | None = None) -> tuple[Limits, Clock]:
    clock = Clock()
    return Limits(rpm, tpm, clock), clock


def wait_s(limited: Limits, num_tokens: int = 0) -> int:
    """What Retry-After says to a call that is refused."""
    with pytest.raises(RateLimitedError) as error:
        limited.start_call().reserve(num_tokens)
    answer = problem(error.value, "r1")
    assert (answer.status, answer.error.type, answer.error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    ((name, value),) = answer.headers
    assert name == b"retry-after"
    return int(value)


def test_requests_are_counted_over_a_sliding_minute():
    limited, clock = limits(rpm=3)
    for _ in range(3):
        limited.start_call()
        clock.now_s += 10
    assert wait_s(limited) == 30  # at 1030: the first was at 1000
    clock.now_s = 1059.9
    assert wait_s(limited) == 1
    clock.now_s = 1060.0
    limited.start_call()
    assert wait_s(limited) == 10
    clock.now_s = 1070.0
    limited.start_call()
    assert wait_s(limited) == 10


def test_a_refused_call_does_not_count():
    limited, clock = limits(rpm=1)
    limited.start_call()
    for _ in range(10):
        assert wait_s(limited) == 60
    clock.now_s += 60
    limited.start_call()


def test_tokens_are_reserved_and_returned_to_the_token():
    limited, clock = limits(tpm=1000)
    first = limited.start_call()
    first.reserve(600)
    assert wait_s(limited, 401) == 60
    second = limited.start_call()
    second.reserve(400)
    assert wait_s(limited, 1) == 60
    clock.now_s += 10
    first.settle(250)  # 350 of its 600 were not used
    assert wait_s(limited, 351) == 50
    third = limited.start_call()
    third.reserve(350)
    assert wait_s(limited, 1) == 50
    second.settle(400)
    assert limited.tokens.total == 250 + 400 + 350
    clock.now_s = 1060.0  # what the first two used is a minute old
    third.settle(350)
    assert wait_s(limited, 651) == 10
    limited.start_call().reserve(650)
    assert wait_s(limited, 1) == 10  # the third's
    clock.now_s = 1070.0
    limited.start_call().reserve(350)
    assert wait_s(limited, 1) == 50


def test_a_request_larger_than_the_limit_takes_all_of_it():
    limited, clock = limits(tpm=100)
    call = limited.start_call()
    call.reserve(5000)
    call.reserve(5000)  # another prompt of the same call
    assert wait_s(limited, 1) == 60
    call.settle(7000)
    assert limited.tokens.total == 100
    clock.now_s += 60
    limited.start_call().reserve(100)


def test_what_comes_back_after_a_minute_is_not_returned_twice():
    limited, clock = limits(tpm=100)
    call = limited.start_call()
    call.reserve(80)
    clock.now_s += 61
    limited.start_call().reserve(100)
    call.settle(10)
    assert limited.tokens.total == 100
    call.settle(0)
    assert limited.tokens.total == 100


def test_without_a_limit_nothing_is_kept():
    limited, _ = limits()
    for _ in range(1000):
        limited.start_call().reserve(10**9)
    assert not limited.tokens.slots and not limited.requests.slots


def test_many_requests_take_little_memory():
    limited, clock = limits(tpm=10**12)
    for _ in range(50_000):
        clock.now_s += 0.001
        limited.start_call().reserve(3)
    assert len(limited.tokens.slots) <= 1300 and limited.tokens.total == 150_000


calls = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, 7.0, 30.0, 61.0]), st.integers(0, 60), st.integers(0, 60)), max_size=60
)


@given(calls)
def test_never_more_than_the_limit_in_any_minute_and_the_wait_is_exact(steps):
    limited, clock = limits(tpm=100)
    taken: list[list[float]] = []  # [when, how much], as a book kept by hand
    for pause_s, asked, used in steps:
        clock.now_s += pause_s
        in_window = [entry for entry in taken if clock.now_s - entry[0] < WINDOW_S]
        fits = sum(amount for _, amount in in_window) + asked <= 100
        call = limited.start_call()
        if fits:
            call.reserve(asked)
            call.settle(used)
            taken.append([clock.now_s, min(asked, used)])
            continue
        with pytest.raises(RateLimitedError) as error:
            call.reserve(asked)
        times = [when + WINDOW_S for when, _ in in_window]
        fitting = [
            until
            for until in times
            if sum(amount for when, amount in in_window if until - when < WINDOW_S) + asked <= 100
        ]
        assert error.value.retry_after_s == pytest.approx(min(fitting) - clock.now_s)
