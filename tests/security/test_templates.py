"""Chat templates and tokenizers made by strangers: a few characters that stand for terabytes, years or recursion."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.security.conftest import check
from tests.security.trial import Trial, refused

DOUBLED = "{%% set ns = namespace(s=%s) %%}{%% for i in range(60) %%}{%% set ns.s = %s %%}{%% endfor %%}{{ ns.s }}"
LATE = "{% set ns = namespace() %}{% set l = [ns] * 100000 %}{% set ns.s = 'x' * 1000000 %}"
LOOPS = "{% for a in range(100000) %}"
TEMPLATES = {
    "multiplied text": "{{ 'x' * 10**10 }}",
    "multiplied list": "{{ [range(100000)|list] * 100000 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": DOUBLED % ("3", "ns.s * ns.s"),
    "doubled by ~": DOUBLED % ("'x'", "ns.s ~ ns.s"),
    "doubled by +": DOUBLED % ("'x'", "ns.s + ns.s"),
    "doubled list": DOUBLED % ("[1]", "ns.s + ns.s"),
    "doubled by nesting": DOUBLED % ("[1]", "[ns.s, ns.s]"),
    "doubled in objects": DOUBLED % ("{}", "{'a': ns.s, 'b': ns.s}"),
    "doubled in views": DOUBLED % ("{}", "{'a': ns.s.items(), 'b': ns.s.items()}"),
    "doubled by dict()": DOUBLED % ("{}", "dict(a=ns.s, b=ns.s)"),
    "doubled by format": DOUBLED % ("'x'", "'{0}{0}'.format(ns.s)"),
    "doubled by %": DOUBLED % ("'x'", "'%s%s' % (ns.s, ns.s)"),
    "doubled by join": DOUBLED % ("'x'", "[ns.s, ns.s]|join"),
    "doubled by a macro": "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}" + DOUBLED % ("'x'", "d(ns.s)"),
    "doubled by a block": DOUBLED.replace(
        "{%% set ns.s = %s %%}", "{%% set t %%}{{ ns.s }}{{ ns.s }}{%% endset %%}{%% set ns.s = t %%}"
    )
    % "'x'",
    "compared": DOUBLED % ("[1]", "[ns.s, ns.s]") + "{{ ns.s == ns.s|list }}",
    "width of |format": "{{ '%1000000000d'|format(1) }}",
    "width of %": "{{ '%1000000000d' % 1 }}",
    "given width of %": "{{ '%*d' % (1000000000, 1) }}",
    "precision": "{{ '%.1000000000f' % 1.5 }}",
    "width of format": "{{ '{:>1000000000}'.format(1) }}",
    "given width of format": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "width of format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "format as an attribute": "{{ ('{:>1000000000}'|attr('format'))(1) }}",
    "mapped format": "{{ ['%1000000000d']|map('format', 1)|list }}",
    "|center": "{{ 'x'|center(10**9) }}",
    "center": "{{ 'x'.center(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "translate": "{{ ('x' * 1000000).translate({120: 'y' * 1000000}) }}",
    "|indent": "{{ 'a\nb'|indent(10**9) }}",
    "|tojson(indent)": "{{ [1]|tojson(indent=10**9) }}",
    "|batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "|slice": "{{ [1]|slice(10**9)|list }}",
    "|round": "{{ 1.5|round(10**9, 'ceil') }}",
    "|replace": "{{ ('x' * 1000000)|replace('x', 'y' * 1000000) }}",
    "replace": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "|join": "{{ ([1] * 100000)|join('x' * 1000000) }}",
    "|sum": "{{ ([[1] * 1000] * 100)|sum(start=[]) }}",
    "|map": "{{ (['x' * 10000000] * 100000)|map('upper')|list }}",
    "|map('default')": "{{ ([none] * 100000)|map('default', ['x'] * 100000, true)|list }}",
    "attributes set later": LATE + "{{ l|map(attribute='s')|join }}",
    "attributes joined later": LATE + "{{ l|join(attribute='s') }}",
    "attributes joined by join": LATE + "{{ ''.join(l|map(attribute='s')) }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "range": "{{ range(10**9)|list }}",
    "date": "{{ strftime_now('%Y' * 10000000) }}",
    "kept in a list": "{% set ns = namespace(l=[]) %}" + LOOPS + "{% set ns.l = [ns.l, 'x' * 1000000] %}{% endfor %}",
    "kept in a block": "{% set s %}" + LOOPS + "y" * 100000 + "{% endfor %}{% endset %}",
    "kept in recursion": "{% macro f(s) %}{{ f(s[1:]) }}{% endmacro %}{{ f('x' * 30000000) }}",
    "endless macro": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "endless loop": "{% for i in range(3) recursive %}{{ loop(range(3)) }}{% endfor %}",
    "endless block": "{% block a %}{{ self.a() }}{% endblock %}",
    "a long refusal": "{{ raise_exception('x' * 30000000) }}",
    "too many loops": "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
    "too many brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "too many ifs": "{% if x %}" * 3000 + "{% endif %}" * 3000,
    "too long": "x" * 2_000_000,
}
SLOW = {
    "five loops": LOOPS * 5 + "{% endfor %}" * 5,
    "loop that takes nothing": LOOPS + "{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
    "macro that calls itself": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "searches in a list": "{% set l = range(100000)|list %}" + LOOPS + "{% if -1 in l %}{% endif %}{% endfor %}",
    "searches in text": "{% set s = 'x' * 30000000 %}{{ range(100000)|map('string')|select('in', s)|list }}",
    "linked list": "{% set ns = namespace(l=0) %}"
    + LOOPS
    + LOOPS
    + "{% set ns.l = (ns.l, 1) %}{% endfor %}{% endfor %}",
}


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    trial = Trial()
    yield trial
    trial.close()


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_that_makes_too_much_is_stopped(trial, source):
    said = refused(trial.run(do="render", source=source), "RequestError", "ConfigError", seconds=10)
    check("chat template" in said, said)


@pytest.mark.parametrize("source", SLOW.values(), ids=SLOW)
def test_a_template_that_takes_too_long_is_stopped(trial, source):
    answer = trial.run(do="render", source=source, seconds=0.5)
    check("stopped" in refused(answer, "RequestError", seconds=10), answer)


def test_ordinary_use_of_the_same_things_is_not(trial):
    source = (
        "{{ 'ab' * 3 }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ '%03d|%-4s|' % (7, 'x') }} {{ '{:>5}|{a}'.format(1, a=[2]) }}"
        " {{ 'x'|center(5) }} {{ 'a\nb'|indent(2) }} {{ [1, 2, 3]|batch(2)|list }} {{ [1, 2]|join('-') }}"
        " {{ [{'a': 1}]|sum('a') }} {{ {'a': [1]}|tojson(indent=1) }}"
        " {{ 1 ~ 'x' ~ none }} {{ [1] + [2] }} {{ 'abc'[1:] }} {{ ', '.join(['a', 'b']) }}"
    )
    expected = "ababab 1024 3 007|x   |     1|[2]   x   a\n  b [[1, 2], [3]] 1-2 1 "
    expected += '{\n "a": [\n  1\n ]\n} 1xNone [1, 2] bc a, b'
    check(trial.run(do="render", source=source)["result"] == expected, trial.run(do="render", source=source))


# -- tokenizer.json ---------------------------------------------------------------------


def tokenizer_json(**changes: Any) -> str:
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {"a": 0, "b": 1, "x": 2},
        "merges": [],
    }
    parts = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    parts["model"] = {**model, **changes.pop("model", {})}
    return json.dumps({**parts, **changes})


def sequence(key: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def special(count: int, ids: int) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": "a", "type_id": 0}}] * count
    tokens = {"a": {"id": "a", "ids": [0] * ids, "tokens": ["a"] * ids}}
    return {
        "type": "TemplateProcessing",
        "single": [*single, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": tokens,
    }


TOKENIZERS = {
    "deep": lambda: '{"model":' + "[" * 1_000_000,
    "deep rules": lambda: tokenizer_json().replace(
        '"normalizer": null', '"normalizer": ' + '{"type":"Sequence","normalizers":[' * 30_000
    ),
    "many entries": lambda: tokenizer_json().replace('"merges": []', '"merges": [' + "0," * 20_000_000 + "0]"),
    "large rules": lambda: tokenizer_json(normalizer=sequence("normalizers", *[{"type": "NFC"}] * 300_000)),
    "huge id": lambda: tokenizer_json(model={"vocab": {"a": 2**63}}),
    "slow regex": lambda: tokenizer_json(pre_tokenizer=split("(a+)+$")),
    "slow alternatives": lambda: tokenizer_json(pre_tokenizer=split("(a|a)*b")),
    "broken regex": lambda: tokenizer_json(pre_tokenizer=split("((((")),
    "doubling": lambda: tokenizer_json(normalizer=sequence("normalizers", *[replace("a", "aa")] * 24)),
    "doubling nested": lambda: tokenizer_json(
        normalizer=sequence("normalizers", *[sequence("normalizers", *[replace("q", "qq")] * 8)] * 3)
    ),
    "doubling between": lambda: tokenizer_json(normalizer=sequence("normalizers", *[replace("", "a", "Regex")] * 24)),
    "long prefixes": lambda: tokenizer_json(
        normalizer=sequence("normalizers", *[{"type": "Prepend", "prepend": "a" * 1000}] * 1000)
    ),
    "doubling decoder": lambda: tokenizer_json(decoder=sequence("decoders", *[replace("a", "aa")] * 24)),
    "bytes of bytes": lambda: tokenizer_json(
        pre_tokenizer=sequence(
            "pretokenizers",
            *[{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}] * 30,
        )
    ),
    "special tokens": lambda: tokenizer_json(post_processor=special(1000, 1000)),
    "bad table": lambda: tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": "////////"}),
    "long words": lambda: tokenizer_json(
        model={
            "type": "WordPiece",
            "unk_token": "a",
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 10**9,
        }
    ),
}


@pytest.mark.parametrize("made", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_when_it_is_opened(trial, tmp_path: Path, made):
    (tmp_path / "tokenizer.json").write_text(made())
    said = refused(trial.run(do="open_tokenizer", path=str(tmp_path), text="a" * 200), "BadModelFileError", seconds=6)
    check("tokenizer.json" in said, said)


def test_a_text_that_a_regex_gives_up_on_is_refused_alone(trial, tmp_path: Path):
    """Which texts those are cannot be known when the file is opened."""
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(pre_tokenizer=split("(b+)+$")))
    check(trial.run(do="open_tokenizer", path=str(tmp_path), text="aaa")["result"] == [0, 0, 0])
    for text in ("b" * 40 + "!", "b" * 40 + "!" * 1000):  # short and long texts take two ways
        refused(trial.run(do="open_tokenizer", path=str(tmp_path), text=text), "RequestError", seconds=6)


def test_padding_and_truncation_of_a_file_are_dropped(trial, tmp_path: Path):
    padding = {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(padding=padding))
    answer = trial.run(do="open_tokenizer", path=str(tmp_path), text="ab")
    check(answer["result"] == [0, 1] and answer["grown_mb"] < 256, answer)


def test_tokens_listed_beside_the_file_are_added_in_little_time(trial, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    listed = {str(3 + i): {"content": f"<t{i}>", "special": i % 7 == 0} for i in range(30_000)}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {**listed, "9" * 5000: {"content": "<x>"}, "99999999": "<y>"}})
    )
    answer = trial.run(do="open_tokenizer", path=str(tmp_path), text="a<t5><t29999>")
    check(answer["result"] == [0, 8, 30_002] and answer["seconds"] < 8, answer)
