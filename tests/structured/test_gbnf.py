"""llama.cpp's grammar language, judged by what llama.cpp's own tests and grammars say, in both engines."""

import re
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

from quire import env
from quire.errors import RequestError
from quire.messages import Vocabulary
from quire.structured.engines.llguidance import LLGuidance
from quire.structured.engines.xgrammar import XGrammar
from quire.structured.grammars.gbnf import gbnf_grammar
from quire.structured.running.trial import Setup, Trial
from quire.structured.spec import GrammarSpec, check
from tests.frontend.conftest import SDIST, _download

BYTES = Vocabulary([b"<s>", b"</s>", *(bytes([byte]) for byte in range(256))], [0, 1], [1], 300)
SHIPPED = {  # by grammar: texts that belong to it, and texts that do not
    "arithmetic": (["a1=2\n", "(x +3)*4 = y\n1=1\n"], ["a1=2", "=2\n", "1+=2\n", "A=2\n"]),
    "c": (
        ["", "int f(){return 1;}", "int f(float x){x = g(x, 2)+-y;if(x<=3){return x;}else{// no\n}}"],
        ["int f()", "int f(){return 1}", "f(){}", "int f(){return 1;"],
    ),
    "chess": (["1. e4 e5\n2. Nf3 Nc6\n", "1. e4 e5\n12. O-O exd8=Q+\n"], ["1. e4 e5\n", "2. e4 e5\n", "1. e9 e5\n"]),
    "english": (["Hello, world!", "a\n[b]"], ["", " a", "Grüße", "a  b"]),
    "japanese": (["こんにちは、カナ", "日本 語"], ["", "hello", "日本  語"]),
    "json": (
        ['{"a": [1, -2.5e3, "\\u00e9", null], "ü": {}}', "{}"],
        ["[]", '{"a": 01}', "{'a': 1}", '{"a": "\x01"}', "{"],
    ),
    "json_arr": (["[\n]", '[\n1,\n{"a": "b"}]'], ["[]", "[1]", "[\n1,]"]),
    "list": (["- one\n- two\n", "- Zürich, 東京\n"], ["", "- one", "one\n", "- \n", "- a\u2028b\n"]),
}
WRITTEN = [  # grammars of our own: texts that belong, and texts that do not
    (r'root ::= "\x41B" "\u00e9" "\U0001F600"', ["ABé😀"], ["A", "\u041bé😀"]),
    (r"root ::= [\x30-9a\-c\]\[]+", ["0a-c][9"], ["b", "\\", ""]),
    ("root ::= [^-x]  [a-]", ["ya", "y-"], ["xa", "-a", "yb"]),
    ("root ::= [+-] . [^\\n]", ["+\n.", "-😀é"], ["+\n\n", "+a"]),
    ('root ::= a-b # a comment | "no"\n\n\n  # another\n a-b ::= "x"\r\n', ["x"], ["no", "a"]),
    ('root ::= (\n "a"\n | b # why not\n)\nb ::= "b" |\n  "c"', ["a", "b", "c"], ["", "ab"]),
    ('root ::= "a"\n  | "b"\n  | "c"', ["a", "b", "c"], [""]),
    ('root ::= "(" [)]? "|" "#"', ["(|#", "()|#"], ["(", "(|"]),
    ('root ::= | "a"', ["", "a"], ["aa"]),
    ('root ::= "a" ("" | "b")', ["a", "ab"], ["b", ""]),
    (
        'root ::= ("a" | "bc"){2} "d"{1,} [ef]{0,2} "g"{ 1 , 2 }',
        ["aadg", "bcaddefgg"],
        ["adg", "aag", "aadeffg", "aadggg"],
    ),
    ('root ::= ("ab"?)+ "c"*', ["", "ab", "abababcc"], ["a", "abcab"]),
    ("root ::= [0-9]{3}+", ["123", "123456"], ["", "12", "1234"]),
    ('root ::= x x\nx ::= "1"\nx ::= "2"', ["22"], ["11", "12"]),
    ('root ::= root "a" | "b"', ["b", "baa"], ["a", "ab"]),
    ('root ::= "a" | "b" never\nnever ::= "c" never', ["a"], ["b", "bc"]),
    ('root ::= "a" never* "d"\nnever ::= "c" never', ["ad"], ["acd"]),
    ("root ::= Start_2\nStart_2 ::= [A-Za-z_]+", ["Ab_"], ["1"]),
    ('root ::= "' + "ab" * 50 + '"', ["ab" * 50], ["ab" * 49]),
    ('root ::= [a-z]{1,400} "."', ["a" * 400 + "."], ["a" * 401 + ".", "."]),
]


@pytest.fixture(scope="module", params=[XGrammar, LLGuidance], ids=lambda engine: engine.name)
def engine(request):
    return request.param(BYTES)


@pytest.fixture(scope="session")
def llama_cpp() -> Path:
    """The grammars and tests of llama.cpp, as the sdist of llama-cpp-python has them; fetched once per machine."""
    folder = env.cache_dir() / "testdata" / f"{SDIST.replace('==', '-')}-grammars"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            with tarfile.open(_download(Path(work))) as archive:
                names = re.compile(r".*/vendor/llama\.cpp/(grammars/.*\.gbnf|tests/test-grammar-integration\.cpp)")
                archive.extractall(work, [entry for entry in archive if names.fullmatch(entry.name)], filter="data")
            (root,) = Path(work).glob("*/vendor/llama.cpp")
            try:
                root.rename(folder)
            except OSError:  # another run was faster
                assert folder.is_dir()
    return folder


def belongs(grammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept(byte + 2) for byte in text.encode()) and matcher.is_complete


def wrongly_judged(engine, text: str, fitting: list[str], others: list[str]) -> list[str]:
    spec = GrammarSpec("gbnf", text)
    check(spec)
    grammar = engine.compile(spec)
    refused = [fit for fit in fitting if not belongs(grammar, fit)]
    return refused + [other for other in others if belongs(grammar, other)]


@pytest.mark.parametrize("name", SHIPPED)
def test_grammars_that_come_with_llama_cpp_hold_what_they_should(engine, llama_cpp, name):
    text = (llama_cpp / "grammars" / f"{name}.gbnf").read_text()
    assert wrongly_judged(engine, text, *SHIPPED[name]) == []


def test_there_are_texts_for_every_grammar_that_comes_with_llama_cpp(llama_cpp):
    assert {path.stem for path in (llama_cpp / "grammars").glob("*.gbnf")} == SHIPPED.keys()


def integration_cases(source: str) -> list[tuple[str, list[str], list[str]]]:
    """The calls of test_grammar(name, grammar, {texts that fit}, {texts that do not}) in llama.cpp's own test."""
    piece = re.compile(r'//[^\n]*|R"""\((.*?)\)"""|"((?:[^"\\]|\\.)*)"|.', re.DOTALL)
    cases = []
    for call in re.finditer(r"\n    test_grammar\((.*?)\n    \);", source, re.DOTALL):
        texts: list[list[str]] = [[]]
        for found in piece.finditer(call[1]):
            if found[0] in "{}":
                texts.append([])
            elif found[1] is not None or found[2] is not None:
                escaped = found[2] or ""
                plain = escaped.encode().decode("unicode_escape") if "\\" in escaped else escaped
                texts[-1].append(found[1] if found[1] is not None else plain)
        if "<[" not in call[1]:  # those with tokens by their number
            cases.append(("".join(texts[0][1:]), texts[1], texts[3]))
    return cases


def test_llama_cpps_own_test_passes(engine, llama_cpp):
    cases = integration_cases((llama_cpp / "tests" / "test-grammar-integration.cpp").read_text())
    assert len(cases) >= 10 and sum(len(fitting) + len(others) for _, fitting, others in cases) > 100
    for text, fitting, others in cases:
        assert wrongly_judged(engine, text, fitting, others) == [], text


@pytest.mark.parametrize(("text", "fitting", "others"), WRITTEN, ids=lambda value: str(value)[:40])
def test_a_grammar_holds_what_llama_cpp_says_it_does(engine, text, fitting, others):
    assert wrongly_judged(engine, text, fitting, others) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('start ::= "a"', "root"),
        ("root ::= nobody", "nobody"),
        ('root ::= "a', "in the rule 'root', at '\"a': a text in quotes"),
        ('root ::= "a"\nb ::= [a', "in the rule 'b', at '[a': a list of characters"),
        ('root ::= ("a"\nb ::= "c"', "parenthesis"),
        ('root ::= "a")', "not part of a rule"),
        ('root = "a"', "a rule must begin"),
        ('root ::= "a" ::= "b"', "not part of a rule"),
        (r'root ::= "\d"', "means nothing"),
        (r'root ::= "\x4"', "means nothing"),
        (r'root ::= "\ud83d\ude00"', "no character"),
        (r'root ::= "\UFFFFFFFF"', "no character"),
        ("root ::= []", "no character is in"),
        (r"root ::= [^\x00-\U0010ffff]", "no character is in"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= *", "must follow what it counts"),
        ('root ::= "a"{2,1}', "ends before it begins"),
        ('root ::= "a"{,3}', "must follow"),
        ('root ::= "a"{20000}', "10000 times"),
        ('root ::= "a"{1' + "0" * 30 + "}", "must follow"),
        ("root ::= <think>", "tokens cannot be named"),
        ("root ::= !<[5]>", "tokens cannot be named"),
        ("root ::= " + '(")" ' * 5000, "deeper than 100"),
        ("root ::= root", "no output"),
        ("root ::= " + "a{9000} " * 50 + '\na ::= "x"', "add up to too much"),
        ("root ::= " + "a{0,9000} " * 5 + '\na ::= "x"', "too complex"),
        ("# nothing", "root"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_grammar_that_is_wrong_gets_a_sentence_about_it(text, says):
    with pytest.raises(RequestError, match=re.escape(says)):
        gbnf_grammar(text)


def test_reading_takes_time_in_proportion_to_the_grammar():
    long = "root ::= a\n" + "".join(f'a{idx} ::= [^a-c\\x41{chr(300 + idx)}] "b"? | ( "c" )\n' for idx in range(3500))
    other = "root ::= [^" + "".join(map(chr, range(1000, 100_000, 2))).encode("utf8", "ignore").decode() + "]"
    for text in (long + 'a ::= "x"', other[:131_000].removesuffix("]") + "]"):
        started = time.process_time()
        gbnf_grammar(text)
        assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "text",
    [
        'root ::= (("a"?)*)*',
        'root ::= ((("a"{0,90}){0,90}){0,90}){0,90}',
        'root ::= root root | ""',
        "\n".join([*(f"r{idx} ::= " + f"r{idx + 1}? " * 8 for idx in range(20)), 'r20 ::= "x"', "root ::= r0"]),
        'root ::= [ab]* "a" [ab]{200}',
    ],
    ids=lambda text: text[:40],
)
def test_a_hostile_grammar_is_tried_like_any_other(text):
    found = Trial(Setup("auto", BYTES, timeout_s=10.0)).run(GrammarSpec("gbnf", text))
    assert found.error == "" or found.error.endswith(".")


def test_a_grammar_that_counts_far_is_followed_by_the_engine_for_that():
    trial = Trial(Setup("auto", BYTES, timeout_s=10.0))
    assert trial.run(GrammarSpec("gbnf", "root ::= [a-z]{1,1500}")).engine == "llguidance"
    assert trial.run(GrammarSpec("gbnf", "root ::= [a-z]{1,15}")).engine == "xgrammar"
