"""Tickets: nothing waits, the same spec compiles once, monsters end themselves alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.server_process import children

from quire.errors import ConfigError
from quire.messages import Vocabulary
from quire.structured.running import compiler as module
from quire.structured.running.compiler import Compiler
from quire.structured.spec import GrammarSpec
from tests.serving import alive, until
from tests.structured.replay import replayed

VOCABULARY = Vocabulary([bytes([i]) for i in range(256)] + [b"</s>"], [256], [256], 320)
PATIENCE_S = 300  # engines take seconds to load, on a busy machine a minute
MONSTER = GrammarSpec("regex", ".*" * 400 + "x")


@pytest.fixture(scope="module")
def compiler():
    compiler = Compiler("auto", VOCABULARY, timeout_s=2.0)
    yield compiler
    compiler.close()


def settled(compiler, kind: str, text: str):
    ticket = compiler.submit(GrammarSpec(kind, text))
    assert ticket.wait(PATIENCE_S)
    return ticket


def test_submitting_never_waits_and_the_same_spec_compiles_once(compiler):
    started = time.perf_counter()
    tickets = [compiler.submit(GrammarSpec("regex", "[a-c]+")) for _ in range(10)]
    assert time.perf_counter() - started < 0.5
    assert len({id(ticket) for ticket in tickets}) == 1
    assert tickets[0].wait(PATIENCE_S) and tickets[0].grammar.matcher().accept(ord("a")) and tickets[0].error is None
    assert compiler.submit(GrammarSpec("regex", "[a-c]+")).done


def test_a_refusal_comes_with_the_ticket(compiler):
    ticket = settled(compiler, "json", '{"$ref": "http://example.com"}')
    assert ticket.grammar is None and "$ref" in str(ticket.error)


def test_a_monster_ends_alone_and_the_next_one_is_served(compiler):
    settled(compiler, "regex", "ready")
    monster = compiler.submit(MONSTER)
    other = compiler.submit(GrammarSpec("regex", "[x-z]+"))
    assert monster.wait(30) and "too complex" in str(monster.error)
    assert other.wait(PATIENCE_S) and other.grammar is not None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", "root ::= root"),
        ("grammar", 'root ::= x\nx ::= x "a"'),
        ("regex", "[]"),
        ("json", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
    ],
)
def test_an_empty_language_is_refused(compiler, kind, text):
    assert settled(compiler, kind, text).error is not None


def test_auto_takes_what_only_the_other_engine_can(compiler):
    assert replayed(settled(compiler, "grammar", 'start: "a" start | "b"').grammar, b"aab").is_complete
    assert replayed(settled(compiler, "regex", r"\p{Lu}+").grammar, b"AB").is_complete
    assert replayed(settled(compiler, "json", '{"type": "string", "maxLength": 4000}').grammar, b'"abc"').is_complete


def test_the_cache_is_bounded(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_CACHED", 3)
    for i in range(6):
        assert settled(compiler, "choice", json.dumps([f"word {i}"])).grammar
    assert len(compiler._tickets) <= 3
    assert compiler.submit(GrammarSpec("choice", '["word 5"]')).done


def test_an_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match="outlines"):
        Compiler("outlines", VOCABULARY)


def trial_process(compiler) -> int:
    """Its pid. A spec that was not seen yet makes sure that there is one."""
    assert settled(compiler, "regex", f"ready {time.monotonic_ns()}").error is None
    return compiler._workers[0]._process.pid


@pytest.mark.parametrize("how", ["time", "killed", "stopped"])
def test_after_a_trial_that_died_the_next_is_made_by_the_same_loaded_process(compiler, how):
    trial = trial_process(compiler)
    (child,) = children(trial)
    if how == "time":
        text = MONSTER.text + "y"
    else:
        os.kill(child, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        text = f"after it was {how}"
    ticket = compiler.submit(GrammarSpec("regex", text))
    assert ticket.wait(30) and "too complex" in str(ticket.error)
    until(lambda: not Path(f"/proc/{child}").exists(), what="the child to be reaped")
    assert trial_process(compiler) == trial  # what takes seconds, loading the engines, was not done again


def test_a_stopped_trial_process_is_replaced_and_takes_its_child_along(compiler):
    trial = trial_process(compiler)
    (child,) = children(trial)
    os.kill(trial, signal.SIGSTOP)
    ticket = compiler.submit(GrammarSpec("regex", "a stopped trial"))
    assert ticket.wait(30) and ticket.error is not None
    until(lambda: not alive(child), what="the end of the child")
    assert settled(compiler, "regex", "another trial").grammar is not None and not Path(f"/proc/{trial}").exists()


def test_finding_10_what_goes_wrong_in_the_trial_is_told_and_it_lives_on(compiler):
    trial = trial_process(compiler)
    (child,) = children(trial)
    long = '{"not": {"maxItems": 1' + "0" * 400 + "}}"
    for text in (long, '{"not": {"minItems": 1e99999999}}', '{"minimum": 1e99999999}'):
        error = settled(compiler, "json", text).error
        assert error is not None and "more time" not in str(error), error
    assert children(compiler._workers[0]._process.pid) == children(trial) == [child]


@pytest.mark.parametrize("raised", [MemoryError, SystemExit, KeyboardInterrupt, OverflowError])
def test_whatever_is_raised_the_ticket_is_answered_and_the_thread_goes_on(compiler, monkeypatch, raised):
    def broken(*args):
        raise raised

    monkeypatch.setattr(module, "send", broken)
    assert "could not be compiled" in str(settled(compiler, "regex", f"a{raised.__name__}").error)
    monkeypatch.undo()
    assert settled(compiler, "regex", f"b{raised.__name__}").grammar is not None


CORE = """
import sys
from quire.messages import Vocabulary
from quire.structured.running.compiler import Compiler
from quire.structured.spec import GrammarSpec
compiler = Compiler("auto", Vocabulary([bytes([i]) for i in range(256)] + [b"</s>"], [256], [256], 320), timeout_s=60)
compiler.submit(GrammarSpec("regex", "ready")).wait(300)
compiler.submit(GrammarSpec("regex", ".*" * 400 + "x"))
print(compiler._workers[0]._process.pid, flush=True)
sys.stdin.read()
"""


def test_the_trial_and_its_child_end_with_the_core_stopped_or_at_work():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", CORE], text=True, **pipes) as core:
        trial = int(core.stdout.readline())
        (child,) = children(trial)
        os.kill(trial, signal.SIGSTOP)
        core.kill()
    until(lambda: not alive(trial) and not alive(child), what="the end of both")


def test_the_process_that_is_copied_has_one_thread(compiler):
    settled(compiler, "regex", "ready")
    assert len(os.listdir(f"/proc/{compiler._workers[0]._process.pid}/task")) == 1
