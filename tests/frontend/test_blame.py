"""Whoever takes the core down is found, and nobody else is ever blamed for it."""

from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.blame import MAX_DEATHS, MAX_GUILTY, Blame, Cause


class World:
    """Cores that crash as soon as a poisoned request is in a step; every request needs a few tokens."""

    def __init__(
        self, num: int, poisoned: set[int], tokens_each: int = 2, cause: Cause = Cause.OWN, step_size: int = 1000
    ) -> None:
        self.cause = cause
        self.step_size = step_size
        self.blame = Blame()
        self.left = {f"r{idx}": tokens_each for idx in range(num)}  # in the order of the waiting line
        self.poisoned = {f"r{idx}" for idx in poisoned}
        self.convicted: list[str] = []
        self.most_deaths = self.num_deaths = 0

    def run_to_the_end(self) -> None:
        for _ in range(100_000):
            if not self.left:
                return
            allowed = list(filter(self.blame.may_run, self.left))
            assert allowed, "nobody may run"
            step = allowed[: self.step_size]
            for request_id in step:  # to the end of the line
                self.left[request_id] = self.left.pop(request_id)
            if self.poisoned & set(step):
                self.num_deaths += 1
                guilty = self.blame.died(self.cause, step, self.left)
                self.most_deaths = max(self.most_deaths, self.blame.num_deaths)
                if guilty is not None:
                    self.convicted.append(guilty)
                    del self.left[guilty]
                    self.blame.forget(guilty)
                continue
            for request_id in step:
                self.left[request_id] -= 1
                if not self.left[request_id]:
                    del self.left[request_id]
                self.blame.progressed(request_id)
        raise AssertionError("never ends")


@given(st.integers(1, 300), st.data())
def test_exactly_the_poisoned_requests_are_convicted(num, data):
    poisoned = data.draw(st.sets(st.integers(0, num - 1), max_size=5))
    world = World(num, poisoned)
    world.run_to_the_end()
    assert set(world.convicted) == world.poisoned


@given(st.integers(2, 2000), st.integers(0, 1999))
def test_one_among_many_is_found_before_the_server_gives_up_and_in_few_falls(num, which):
    world = World(num, {which % num})
    world.run_to_the_end()
    assert world.most_deaths < MAX_DEATHS
    assert world.num_deaths <= 2 + num.bit_length()


@given(st.integers(1, 100), st.integers(1, 100), st.data())
def test_a_request_that_makes_the_core_stand_still_is_found_however_steps_are_cut(num, step_size, data):
    poisoned = data.draw(st.sets(st.integers(0, num - 1), min_size=1, max_size=2))
    world = World(num, poisoned, 5, Cause.STALL, step_size)
    world.run_to_the_end()
    assert set(world.convicted) == world.poisoned
    assert world.num_deaths <= len(poisoned) * (3 + num.bit_length())


def test_a_kill_from_outside_blames_nobody():
    blame = Blame()
    for _ in range(3):
        assert blame.died(Cause.OUTSIDE, ["a", "b"], {"a", "b", "c"}) is None
        assert all(map(blame.may_run, "abc"))


def test_a_stall_blames_nobody_but_who_is_in_two_without_a_token_between_is_suspect():
    blame = Blame()
    blame.died(Cause.STALL, ["a", "b"], {"a", "b", "c"})
    assert all(map(blame.may_run, "abc"))
    blame.progressed("a")
    blame.progressed("b")
    blame.died(Cause.STALL, ["a", "b"], {"a", "b", "c"})
    assert all(map(blame.may_run, "abc"))
    blame.progressed("c")
    blame.progressed("b")
    blame.died(Cause.STALL, ["a", "b", "c"], {"a", "b", "c"})
    assert list(map(blame.may_run, "abc")) == [True, False, False]
    assert blame.died(Cause.STALL, ["a"], {"a", "b", "c"}) == "a"  # on trial, alone: that was it


def test_a_request_that_fell_once_is_tried_again_before_it_is_blamed():
    blame = Blame()
    assert blame.died(Cause.OWN, ["a"], {"a", "b"}) is None
    assert blame.may_run("a") and not blame.may_run("b")
    assert blame.progressed("a")
    assert blame.may_run("b")


def test_whoever_leaves_during_a_trial_holds_nobody_up():
    blame = Blame()
    blame.died(Cause.OWN, ["a", "b", "c", "d"], set("abcde"))
    assert blame.may_run("a") and blame.may_run("b") and not blame.may_run("c")
    assert not blame.forget("c")
    blame.progressed("a")
    assert blame.forget("b")
    assert blame.may_run("d") and not blame.may_run("e")
    assert blame.forget("d")
    assert blame.may_run("e")


def test_a_kill_during_a_trial_starts_the_trial_again():
    blame = Blame()
    blame.died(Cause.OWN, ["a", "b"], {"a", "b"})
    assert blame.died(Cause.OUTSIDE, ["a"], {"a", "b"}) is None
    assert blame.may_run("a") and not blame.may_run("b")


def test_eight_deaths_without_a_token_are_hopeless():
    blame = Blame()
    for _ in range(MAX_DEATHS):
        assert not blame.hopeless
        blame.died(Cause.OUTSIDE, [], set())
    assert blame.hopeless


def test_guilty_requests_explain_deaths_up_to_a_number():
    """One poisoned request after the other does not end an idle server; an engine that always crashes does."""
    blame = Blame()
    for idx in range(MAX_GUILTY):
        assert not blame.hopeless
        assert blame.died(Cause.OWN, [f"r{idx}"], {f"r{idx}"}) is None
        assert blame.died(Cause.OWN, [f"r{idx}"], {f"r{idx}"}) == f"r{idx}"
        blame.forget(f"r{idx}")
    assert blame.hopeless
    blame.progressed("another")
    assert not blame.hopeless
