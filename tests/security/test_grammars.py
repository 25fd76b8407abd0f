"""Grammars that want to freeze the core: refused, or followed with every call bounded, and nobody beside them waits."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.messages import Thinking, Vocabulary
from quire.structured.engines.base import MAX_FORCED, Grammar, Matcher
from quire.structured.engines.llguidance import LLGuidance
from quire.structured.engines.xgrammar import XGrammar
from quire.structured.running import bounded
from quire.structured.running.compiler import Compiler
from quire.structured.running.guide import TOO_SLOW, Guide
from quire.structured.running.masks import Masker
from quire.structured.running.trial import Setup, Trial
from quire.structured.spec import GrammarSpec
from tests.security.conftest import check, refused
from tests.serving import ServerProcess

COMPLETIONS = "/v1/completions"
NUM_TOKENS = 80  # of a bystander's answer
LATE_S = 2.0  # how long a bystander may wait for a token
# Of the process's CPU time, for all that one step asks of a grammar: `bounded.LIMIT_S` at most, in two threads.
STEP_S = 4.0
STOP = 256
TOKENS = [*(bytes([byte]) for byte in range(256)), b"</s>", b"aa", b"ab", b"aaaa", b"xx", b"xxxx"]
VOCABULARY = Vocabulary(TOKENS, [STOP], [STOP], 320)


def doublings(count: int, leaf: str, start: str = "r0") -> str:
    doubled = [f"r{idx} ::= r{idx + 1} r{idx + 1}" for idx in range(count)]
    return "\n".join([f"root ::= {start}", *doubled, f"r{count} ::= {leaf}"])


OPTIONAL = "\n".join(f"q{idx} ::= q{idx + 1}* [a-z]?" for idx in range(100)) + "\nq100 ::= [a-z ]"
# Slow only after a Q: the trial walks at random and almost never begins with one; the hostile request prefers it.
HIDDEN = {
    "counts": 'root ::= "Q" c | [^Q]+\nc ::= ((([a-z]{0,1000}){0,1000}){0,1000} " "){0,1000}',
    "empty leaves": doublings(40, '"x" | ""', '"Q" r0 | [^Q]+'),
    "optional words": f'root ::= "Q" q0 | [^Q]+\n{OPTIONAL}',
}


# == Over HTTP =========================================================================================================


class Bystander:
    """Someone else's stream, and the longest time it waited for a token."""

    def __init__(self, server: ServerProcess) -> None:
        self.url = server.url + COMPLETIONS
        self.times: list[float] = []
        self.is_whole = False
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", self.url, json=body, timeout=60) as response:
            for line in response.iter_lines():
                self.times.append(time.monotonic())
                self.is_whole |= re.search(r'"finish_reason": ?"length"', line) is not None

    def __enter__(self) -> "Bystander":
        self._thread.start()
        time.sleep(0.5)
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.join()

    @property
    def longest_s(self) -> float:
        return max(after - before for before, after in zip(self.times, self.times[1:]))


def beside_a_bystander(server: ServerProcess, body: dict) -> httpx.Response:
    with Bystander(server) as bystander:
        core = server.core_pid()
        response = server.post(COMPLETIONS, {"prompt": "a", "temperature": 0, "max_tokens": 40, **body})
    check(bystander.is_whole, "its stream broke off")
    check(bystander.longest_s < LATE_S, f"it waited {bystander.longest_s:.1f} s for a token")
    check(server.core_pid() == core, "the core crashed")
    return response


def test_finding_2_doublings_do_not_freeze_the_core(server):
    response = beside_a_bystander(server, {"structured_outputs": {"grammar": doublings(40, '"x"')}})
    check(response.status_code == 200, response.text)
    check(set(response.json()["choices"][0]["text"]) == {"x"}, response.text)


@pytest.fixture(scope="module")
def victim(smollm2) -> Iterator[ServerProcess]:
    """A server of its own: calls that are left alone go on for a while."""
    flags = ["--max-model-len", "256", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "64M"]
    with ServerProcess("smollm2", *flags) as process:
        yield process


@pytest.mark.parametrize("name", HIDDEN)
def test_a_grammar_that_becomes_slow_later_fails_alone(victim, name):
    (q,) = victim.post("/tokenize", {"prompt": "Q", "add_special_tokens": False}).json()["tokens"]
    body = {"structured_outputs": {"grammar": HIDDEN[name]}, "logit_bias": {str(q): 100}}
    for _ in range(2):  # the second time it is known
        response = beside_a_bystander(victim, body)
        check(TOO_SLOW.partition(":")[0] in response.text, response.text)


def test_finding_10_a_number_without_end_is_refused_by_name_and_the_next_schema_is_quick(server):
    schema = '{"not": {"maxItems": 1' + "0" * 400 + "}}"
    started = time.monotonic()
    body = '{"prompt": "a", "max_tokens": 4, "structured_outputs": {"json": ' + schema + "}}"
    response = server.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    refused(response, 400)
    check("more time" not in response.text and "too complex" not in response.text, response.text)
    body = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"json": {"const": f"innocent {time.time()}"}}}
    check(server.post(COMPLETIONS, body).status_code == 200, "others suffer")
    check(time.monotonic() - started < 3, "the next one waited")


# == Every call is one the trial made before ===========================================================================


def functions(kind: type[Matcher]) -> Iterator[tuple[type, str]]:
    for owner in kind.__mro__[:-1]:
        yield from ((owner, name) for name in vars(owner) if not name.startswith("__"))


class Recorder:
    """Which functions and properties of a kind of matcher are used."""

    def __init__(self, kind: type[Matcher], monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[str] = set()
        for owner, name in list(functions(kind)):
            made = vars(owner)[name]
            if isinstance(made, property):
                monkeypatch.setattr(owner, name, property(self._noted(name, made.fget)))
            elif isinstance(made, classmethod):
                monkeypatch.setattr(owner, name, classmethod(self._noted(name, made.__func__)))
            elif callable(made) and name != "_abc_impl":
                monkeypatch.setattr(owner, name, self._noted(name, made))

    def _noted(self, name: str, function: Callable) -> Callable:
        def noted(*args, **options):
            self.seen.add(name)
            return function(*args, **options)

        return noted


def follow_like_the_core(grammar: Grammar) -> None:
    """All ways in which guides and masks ask a matcher."""
    may_think = Thinking(False, [ord("a"), 5], [6], 1)
    guides = [Guide(grammar.matcher(), thinking, [STOP]) for thinking in (None, may_think)]
    masker = Masker(VOCABULARY.num_words)
    for step in range(6):
        ahead = None
        if step % 2:
            for guide in guides:
                guide.rest()
            ahead = masker.begin([(place, guide, ord("a")) for place, guide in enumerate(guides)], len(guides))
        for guide in guides:
            guide.advance([ord("a")])
            guide.forced()
        masker.masks([(place, guide, ()) for place, guide in enumerate(guides)], ahead)
    taken_for_thought = Guide(grammar.matcher(), Thinking(False, [ord("a"), ord("b")], [6], 1), [STOP])
    taken_for_thought.advance([ord("a"), ord("b")])


@pytest.mark.parametrize("engine", [XGrammar, LLGuidance], ids=lambda engine: engine.name)
def test_the_trial_makes_every_call_that_the_core_makes(engine, monkeypatch):
    trial = Trial(Setup(engine.name, VOCABULARY, 10.0))
    spec = GrammarSpec("grammar", "root ::= [ab]+")
    grammar = engine(VOCABULARY).compile(spec)
    recorder = Recorder(type(grammar.matcher()), monkeypatch)
    follow_like_the_core(grammar)
    by_core, recorder.seen = recorder.seen, set()
    check(trial.run(spec).error == "", "the trial refuses")
    by_trial = recorder.seen
    check({"_fill", "_accept", "fill_all", "accept_all", "forced", "rollback", "terminated"} <= by_core, by_core)
    check(by_core - by_trial <= {"too_slow", "grammar"}, by_core - by_trial)  # which ask no library


@pytest.mark.parametrize("engine", [XGrammar, LLGuidance], ids=lambda engine: engine.name)
def test_forced_tokens_come_in_pieces(engine):
    matcher = engine(VOCABULARY).compile(GrammarSpec("grammar", f'root ::= "{"xyz" * 100}"')).matcher()
    forced = matcher.forced()
    check(0 < len(forced) <= MAX_FORCED, len(forced))


# == Grammars made up at random ========================================================================================


@st.composite
def grammars(draw: st.DrawFn) -> str:
    """Doublings, recursion, empty words, counts, alternatives; the dangerous part at once or behind a harmless one."""
    count = draw(st.integers(2, 12))
    names = [f"r{idx}" for idx in range(count)]
    words = ['"a"', '"x"', '""', '"ab"', '"xx"*', "[a-z]", "[^b]", "[a-z]?", "[a-b]{0,40}", "([a-c]{0,9}){0,9}"]
    leaves = st.sampled_from(words)
    symbols = st.one_of(st.sampled_from(names), leaves)
    rules = ["root ::= " + draw(st.sampled_from(["r0", "[a-z]{60} r0", '"x" r0 | [^x]+']))]
    for idx, name in enumerate(names):
        doubled = " ".join([names[min(idx + 1, count - 1)]] * draw(st.integers(1, 3)))
        others = [" ".join(draw(st.lists(symbols, min_size=1, max_size=4))) for _ in range(draw(st.integers(0, 3)))]
        ends = [draw(leaves)] if idx == count - 1 or draw(st.booleans()) else []
        rules.append(f"{name} ::= " + " | ".join([doubled, *others, *ends]))
    return "\n".join(rules)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def compiler(request):
    compiler = Compiler(request.param, VOCABULARY, timeout_s=0.3)
    check(compiler.submit(GrammarSpec("regex", "ready")).wait(60), "the engines do not load")
    yield compiler
    compiler.close()


@settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(text=grammars(), seed=st.integers(0, 3))
def test_any_grammar_is_refused_or_followed_in_bounded_steps(compiler, text, seed):
    ticket = compiler.submit(GrammarSpec("grammar", text))
    check(ticket.wait(20), "nobody answers")
    if ticket.error is not None:
        return
    guide = Guide(ticket.grammar.matcher(), None, [STOP])
    masker = Masker(VOCABULARY.num_words)
    random = numpy.random.default_rng(seed)
    for _ in range(200):
        started = time.process_time()
        words = numpy.frombuffer(masker.masks([(0, guide, ())]).words, numpy.int32)
        allowed = numpy.flatnonzero(numpy.unpackbits(words.view(numpy.uint8), bitorder="little"))
        allowed = allowed[allowed != STOP]
        if guide.problem or not len(allowed):
            break
        problem = guide.advance([int(random.choice(allowed))])
        check(len(guide.forced()) <= MAX_FORCED, "too many at once")
        took = time.process_time() - started
        check(took < STEP_S, f"a step took {took:.1f} s")
        if problem:
            break
    check(bounded.num_stuck() < bounded.MAX_STUCK, "too many are left alone")


def test_a_schema_whose_alternatives_multiply_is_refused_or_followed_in_bounded_steps():
    schema = {"$ref": "#/$defs/d0", "$defs": {}}
    for idx in range(20):
        references = [f"#/$defs/d{(idx * 7 + step) % 20}" for step in range(10)]
        lists = [{"type": "array", "items": {"$ref": reference}} for reference in references]
        schema["$defs"][f"d{idx}"] = {"anyOf": [*lists, {"type": "integer"}]}
    grammar = XGrammar(VOCABULARY).compile(GrammarSpec("json", json.dumps(schema)))
    guide = Guide(grammar.matcher(), None, [STOP])
    masker = Masker(VOCABULARY.num_words)
    for _ in range(10):
        started = time.process_time()
        masker.masks([(0, guide, ())])
        problem = guide.advance([ord("[")])
        check(time.process_time() - started < STEP_S, "it stood still")
    check(problem == TOO_SLOW, problem)
