"""Hostile grammars: recursive, doubling, nullable, ambiguous, with huge counts, in every way to write them.

Used by `fuzz.py`. A case is one of `fuzz_json.py`'s: a completion that asks for an answer of such a shape.
"""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from benchmarks.fuzz_json import Case

sizes = st.sampled_from([0, 1, 2, 3, 8, 16, 23, 32, 40, 64, 100, 200, 1000, 10_000])
counts = st.sampled_from(
    [
        *(0, 1, 2, 9, 100, 999, 1000, 1001, 9_999, 10_000, 10_001, 65_536, 10**6),
        *(2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30),
    ]
)
words = st.sampled_from(["x", "ab", "", "0", "é", "👍", "yes", "<|im_end|>", '"', "\\", "\n", "a" * 300])
classes = st.sampled_from(r"[a-z] [^a] [^\n] [\u0000-\uffff] [α-ω] [😀-🙏] [z-a] [] [^] . \w \d \p{L} [\s\S]".split())
prefixes = st.sampled_from(["", '"start " ', '"{" ', '"x" "y" '])  # harmless beginnings, which the hostile part follows


def quoted(word: str) -> str:
    return json.dumps(word, ensure_ascii=False)


# -- GBNF --------------------------------------------------------------------------------------------------------------


@st.composite
def gbnf(draw: st.DrawFn) -> str:
    word = draw(words)
    size = draw(sizes)
    prefix = draw(prefixes)
    root = f"root ::= {prefix}a\n"
    match draw(st.integers(0, 12)):
        case 0:  # doubles at every step
            size = min(size, 2000)
            rules = "".join(f"r{idx} ::= r{idx + 1} r{idx + 1}\n" for idx in range(size))
            return f"root ::= {prefix}r0\n{rules}r{size} ::= {quoted(word)}\n"
        case 1:  # doubles, as a choice
            size = min(size, 500)
            rules = "".join(f"r{idx} ::= r{idx + 1} | r{idx + 1} r{idx + 1}\n" for idx in range(size))
            return f"root ::= {prefix}r0\n{rules}r{size} ::= {quoted(word)}\n"
        case 2:
            return root + f"a ::= a {quoted(word)} | {quoted(word)}\n"
        case 3:
            return root + "a ::= b\nb ::= a\n"
        case 4:
            return root + f'a ::= "" | a a | {quoted(word)}\n'
        case 5:
            return root + f"a ::= {draw(classes)}{{{draw(counts)},{draw(counts)}}}\n"
        case 6:
            return root + f"a ::= ({quoted(word)}{{{draw(counts)}}}){{{draw(counts)}}}\n"
        case 7:
            return root + "a ::= " + " | ".join(f'"{word_idx}"' for word_idx in range(size)) + "\n"
        case 8:
            size = min(size, 200)
            return root + "a ::= " + "(" * size + quoted(word) + ")*" * size + "\n"
        case 9:
            return root + f"a ::= ({quoted(word)}*)* ({draw(classes)}+)+ ({quoted(word)}?)*\n"
        case 10:
            return root + f"a ::= {draw(classes)}* a {draw(classes)}* | a a a | {quoted(word)}\n"
        case 11:
            size = min(size, 300)
            rules = "".join(f'r{idx} ::= r{idx + 1} | "a" r{idx + 1} "a"\n' for idx in range(size))
            return f"root ::= {prefix}r0\n{rules}r{size} ::= [ab]*\n"
        case _:
            return draw(st.text(st.sampled_from(list('abr ::=|()*+?{}[]"\\^-.,\n0123')), max_size=80))


# -- Lark --------------------------------------------------------------------------------------------------------------


@st.composite
def lark(draw: st.DrawFn) -> str:
    word, size = draw(words) or "x", draw(sizes)
    match draw(st.integers(0, 7)):
        case 0:
            size = min(size, 1000)
            rules = "".join(f"r{idx}: r{idx + 1} r{idx + 1}\n" for idx in range(size))
            return f"start: r0\n{rules}r{size}: {quoted(word)}\n"
        case 1:
            return f"start: start {quoted(word)} | {quoted(word)}\n"
        case 2:
            return "start: a\na: b\nb: a\n"
        case 3:
            return f"start: WORD~{draw(counts)}..{draw(counts)}\nWORD: /{draw(regexes())}/\n".replace("\0", "")
        case 4:
            return "start: " + " | ".join(f'"w{idx}"' for idx in range(min(size, 5000) + 1)) + "\n"
        case 5:
            return f"start: (({quoted(word)}?)*)+ NAME\nNAME: /(a+)+b/\n%ignore /\\s*/\n"
        case 6:
            return "start: A\nA: B B\nB: C C\nC: A A\n"
        case _:
            return draw(st.text(st.sampled_from(list('start: AB|()*+?~."/\\\n%ignore')), max_size=80))


# -- regular expressions -----------------------------------------------------------------------------------------------

odd_regexes = st.sampled_from(r"(?=a)b (?<=a)b (a)\1 (?P<n>a)(?P=n) \b ^a$ a{,5} a{5,2} (?i)ß \u{110000} [ ( *".split())


@st.composite
def regexes(draw: st.DrawFn) -> str:
    inner, size = draw(classes), draw(sizes)
    match draw(st.integers(0, 11)):
        case 0:
            return f"({inner}+)+b"
        case 1:
            return f"{inner}{{{draw(counts)},{draw(counts)}}}"
        case 2:
            return f"(({inner}{{{draw(counts)}}}){{{draw(counts)}}}){{{draw(counts)}}}"
        case 3:
            return "(" * min(size, 300) + "a" + ")*" * min(size, 300)
        case 4:
            return "|".join(f"w{idx}" for idx in range(min(size, 10_000)))
        case 5:
            return f"(a|a?)+{inner}*{inner}*{inner}*x"
        case 6:
            return f".*{inner}.{{{draw(counts)}}}"  # as an automaton it doubles with the count
        case 7:
            return draw(odd_regexes)
        case 8:
            return f"({'a?' * min(size, 1000)}){'a' * min(size, 1000)}"
        case 9:
            return f"(start )({inner}{{0,{draw(counts)}}}){{0,{draw(counts)}}}"
        case 10:
            return "".join(f"(a{idx}|b)?" for idx in range(min(size, 2000)))
        case _:
            return draw(st.text(st.sampled_from(list("ab()[]{}*+?|\\^$.,-0123é")), max_size=60))


# -- JSON schemas ------------------------------------------------------------------------------------------------------

Schemas = st.SearchStrategy[Any]

numbers = st.sampled_from(
    [
        *(0, 1, -1, 0.1, 1e-9, 1e300, 2**63, 2**64),
        *({"$raw": "1" + "0" * 400}, {"$raw": "9" * 4300}, {"$raw": "1e999"}, {"$raw": "5e-324"}),
    ]
)
simple = st.sampled_from(
    [
        *({}, True, False, {"type": "string"}, {"type": "integer"}, {"type": "null"}),
        *({"const": 1}, {"enum": []}, {"type": []}, {"type": "nobody"}),
    ]
)
references = st.sampled_from(
    ["#", "#/$defs/a", "#/nowhere", "http://example.org/x", "file:///etc/passwd", "#/$defs/a~1b", ""]
)


# Each kind of schema draws what it needs; `inner` makes the schemas within it, `size` was drawn before.


def _simple(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    return draw(simple)


def _reference(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    return {"$ref": draw(references)}


def _reference_cycle(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    return {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


def _array_of_itself(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    array = {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": draw(counts)}
    return {"$defs": {"a": array}, "$ref": "#/$defs/a"}


def _doubling(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    """Every step is two of the next."""
    size = min(size, 100)
    definitions: dict[str, Any] = {}
    for idx in range(size):
        pair = [{"$ref": f"#/$defs/d{idx + 1}"}] * 2
        definitions[f"d{idx}"] = {"type": "array", "prefixItems": pair, "minItems": 2, "items": False}
    definitions[f"d{size}"] = {"const": "x"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _array(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    return {
        "type": "array",
        "items": draw(inner),
        "minItems": draw(counts),
        "maxItems": draw(counts),
        "uniqueItems": draw(st.booleans()),
    }


def _string_of_length(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    return {"type": "string", "minLength": draw(counts), "maxLength": draw(counts)}


def _string_of_pattern(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    return {"type": "string", "pattern": draw(regexes())}


def _bounded_number(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    return {
        "type": draw(st.sampled_from(["integer", "number"])),
        draw(st.sampled_from(["minimum", "maximum", "exclusiveMinimum"])): draw(numbers),
    }


def _multiple(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    return {"type": "number", "multipleOf": draw(numbers), "minimum": draw(numbers), "maximum": draw(numbers)}


def _large_object(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    names = [f"p{idx}" for idx in range(min(size, 1000))]
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": names, "minProperties": draw(counts)}


def _object_of_patterns(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    return {
        "type": "object",
        "patternProperties": {draw(regexes()): draw(inner)},
        "additionalProperties": draw(inner),
        "maxProperties": draw(counts),
    }


def _combination(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    keyword = draw(st.sampled_from(["anyOf", "oneOf", "allOf"]))
    options = [draw(inner) for _ in range(draw(st.integers(0, 4)))]
    return {keyword: options * min(size, 200)}


def _condition(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    return {"not": draw(inner), "if": draw(inner), "then": draw(inner), "else": draw(inner)}


def _large_enum(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    return {"enum": [f"w{idx}" for idx in range(size)]}


def _contradiction(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    return {"allOf": [{"type": "string"}, {"type": "integer"}], "minLength": draw(counts)}


def _string_of_format(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    formats = st.sampled_from(["date", "email", "uuid", "uri", "regex", "nobody"])
    return {"type": "string", "format": draw(formats), "pattern": draw(regexes())}


def _nested(draw: st.DrawFn, inner: Schemas, size: int) -> Any:
    schema = draw(inner)
    for _ in range(min(size, 55)):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


# A seed's cases depend on the order: a new kind goes to the end.
SCHEMA_KINDS: list[Callable[[st.DrawFn, Schemas, int], Any]] = [
    _simple,
    _reference,
    _reference_cycle,
    _array_of_itself,
    _doubling,
    _array,
    _string_of_length,
    _string_of_pattern,
    _bounded_number,
    _multiple,
    _large_object,
    _object_of_patterns,
    _combination,
    _condition,
    _large_enum,
    _contradiction,
    _string_of_format,
    _nested,
]


@st.composite
def schemas(draw: st.DrawFn, depth: int = 0) -> Any:
    inner = schemas(depth + 1) if depth < 2 else simple
    size = draw(sizes)
    make = SCHEMA_KINDS[draw(st.integers(0, len(SCHEMA_KINDS) - 1))]
    return make(draw, inner, size)


@st.composite
def tags(draw: st.DrawFn) -> Any:
    tag = {"begin": draw(words), "schema": draw(schemas()), "end": draw(words)}
    match draw(st.integers(0, 3)):
        case 0:
            structures = [tag] * min(draw(sizes), 100)
            triggers = [draw(words)] * min(draw(sizes), 100)
            return {"type": "structural_tag", "structures": structures, "triggers": triggers}
        case 1:
            content = {"type": "json_schema", "json_schema": draw(schemas())}
            marked = {"type": "tag", "begin": draw(words), "content": content, "end": draw(words)}
            return {"type": "structural_tag", "format": marked}
        case 2:
            elements = [{"type": "regex", "pattern": draw(regexes())}] * min(draw(sizes), 100)
            return {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
        case _:
            return {"type": "structural_tag", "format": {"type": draw(words), "elements": draw(schemas())}}


# -- requests ----------------------------------------------------------------------------------------------------------


@st.composite
def grammar_cases(draw: st.DrawFn) -> Case:
    def json_format(schema: Any) -> Case:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}

    written = gbnf().map(lambda text: {"guided_grammar": text})
    asked = draw(
        written
        | written
        | lark().map(lambda text: {"guided_grammar": text})
        | regexes().map(lambda text: {"guided_regex": text})
        | schemas().map(lambda schema: {"structured_outputs": {"json": schema}})
        | schemas().map(json_format)
        | tags().map(lambda tag: {"structured_outputs": {"structural_tag": tag}})
        | tags().map(lambda tag: {"response_format": tag})
        | st.lists(words, max_size=5).map(lambda choices: {"guided_choice": choices})
    )
    body = {
        "prompt": "The answer is",
        "max_tokens": draw(st.sampled_from([1, 4, 16, 32])),
        "temperature": 0.0,
        "stream": draw(st.booleans()),
    }
    return {"method": "POST", "path": "/v1/completions", "body": body | asked}
