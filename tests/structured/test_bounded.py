"""Calls that take too long are left alone: whoever asked goes on, and only the grammar's own requests fail."""

import hashlib
import threading
import time

import numpy
import pytest

from quire.messages import Vocabulary
from quire.structured.engines.base import Grammar, Matcher
from quire.structured.running import bounded
from quire.structured.running.bounded import Job, TooSlowError
from quire.structured.running.compiler import Compiler
from quire.structured.running.guide import ALL, TOO_SLOW, Guide
from quire.structured.running.masks import Masker
from quire.structured.spec import GrammarSpec

VOCABULARY = Vocabulary([b"x"] * 64, [63], [63], 64)
AT_MOST_S = 15.0  # a slow call takes 30 s of CPU time, and more on a busy machine
SLOW_TOKEN = 7


ENOUGH = threading.Event()


def burn(seconds: float = 30.0) -> None:
    """Works without Python's lock, like a library."""
    until = time.thread_time() + seconds
    while time.thread_time() < until and not ENOUGH.is_set():
        hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)


def let_go() -> None:
    """What was left alone comes to its end."""
    ENOUGH.set()
    while bounded.num_stuck():
        time.sleep(0.01)
    ENOUGH.clear()


class Toy(Matcher):
    """Allows one token, the one written in its grammar; slow in the call that is named there."""

    def __init__(self, token_id: int, slow: str) -> None:
        super().__init__(VOCABULARY)
        self.token_id = token_id
        self.slow = slow
        self.num_seen = 0

    is_complete = terminated = property(lambda self: False)

    def _work(self, what: str) -> None:
        if what == self.slow and self.num_seen:
            burn()

    def _accept(self, token_id: int) -> bool:
        self._work("accept")
        self.num_seen += 1
        return True

    def rollback(self, count: int) -> None:
        self.num_seen -= count

    def _fill(self, mask: numpy.ndarray) -> None:
        self._work("fill")
        mask[:] = 0
        mask[0] = 1 << self.token_id


class ToyGrammar(Grammar):
    def __init__(self, token_id: int, slow: str = "") -> None:
        self.token_id, self.slow = token_id, slow

    def _matcher(self) -> Matcher:
        return Toy(self.token_id, self.slow)


def guide(grammar: Grammar) -> Guide:
    return Guide(grammar.matcher(), None, [63])


@pytest.fixture(autouse=True)
def nothing_stuck():
    yield
    let_go()


def test_a_slow_part_is_left_alone_and_those_behind_it_are_run():
    ran: list[str] = []
    started = time.monotonic()
    job = Job([lambda: ran.append("first"), burn, lambda: ran.append("last")])
    assert job.wait() == [1] and ran == ["first", "last"]
    assert time.monotonic() - started < AT_MOST_S and bounded.num_stuck() == 1


def test_what_a_call_returns_or_raises_reaches_its_caller():
    assert bounded.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        bounded.call(lambda: 1 // 0)
    with pytest.raises(TooSlowError):
        bounded.call(burn)


def test_waiting_for_the_machine_is_not_held_against_a_call():
    assert bounded.call(lambda: time.sleep(3 * bounded.LIMIT_S) or "done") == "done"


@pytest.mark.parametrize("slow", ["accept", "fill"])
@pytest.mark.parametrize("in_batch", [True, False])
def test_a_matcher_that_takes_for_ever_fails_alone_and_its_late_mask_reaches_nobody(slow, in_batch):
    bad, good = ToyGrammar(1, slow), ToyGrammar(2)
    guides = [guide(bad), guide(good), guide(good)]
    masker = Masker(VOCABULARY.num_words)
    started = time.monotonic()
    for step in range(4):
        ahead = None
        if in_batch and step:
            for each in guides:
                each.rest()
            tokens = [(place, each, SLOW_TOKEN) for place, each in enumerate(guides) if not each.problem]
            ahead = masker.begin(tokens, len(guides))
        for each in guides:
            each.advance([SLOW_TOKEN])
        masks = masker.masks([(place, guide, ()) for place, guide in enumerate(guides)], ahead)
        words = numpy.frombuffer(masks.words, numpy.int32).reshape(3, -1)
        by_place = {place: words[row] for row, place in enumerate(masks.places)}
        assert by_place[1][0] == by_place[2][0] == 1 << 2
    assert time.monotonic() - started < AT_MOST_S
    assert [each.problem for each in guides] == [TOO_SLOW, "", ""] and by_place[0][0] == ALL
    assert bad.too_slow and not good.too_slow and guide(bad).advance([SLOW_TOKEN]) == TOO_SLOW
    let_go()  # now it writes its mask
    masks = masker.masks([(place, guide, ()) for place, guide in enumerate(guides[1:])])
    assert (numpy.frombuffer(masks.words, numpy.int32).reshape(2, -1)[:, 0] == 1 << 2).all()


def test_slow_accepts_count_like_slow_masks(monkeypatch):
    monkeypatch.setattr("quire.structured.engines.base.SLOW_S", 0.01)
    monkeypatch.setattr(Toy, "_work", lambda self, what: time.sleep(0.02) if what == "accept" else None)
    slow = guide(ToyGrammar(1))
    assert [slow.advance([SLOW_TOKEN]) for _ in range(3)] == ["", "", TOO_SLOW]


def test_a_grammar_that_was_left_alone_is_refused_and_so_are_new_ones_while_too_many_run(monkeypatch):
    compiler = Compiler("auto", Vocabulary([bytes([i]) for i in range(256)] + [b"</s>"], [256], [256], 320))
    try:
        spec = GrammarSpec("regex", "[a-c]+")
        ticket = compiler.submit(spec)
        assert ticket.wait(60) and ticket.grammar is not None
        ticket.grammar.too_slow = True
        again = compiler.submit(spec)
        assert again.done and "too long" in str(again.error)
        monkeypatch.setattr(bounded, "MAX_STUCK", 0)
        assert "try again later" in str(compiler.submit(GrammarSpec("regex", "[a-d]+")).error)
    finally:
        compiler.close()
