"""Hostile grammars: recursive, doubling, nullable, ambiguous, with huge counts, in every way to write them.

Used by `fuzz.py`. A case is one of `fuzz_json.py`'s: a completion that asks for an answer of such a shape.
"""

import json
from typing import Any

from hypothesis import strategies as st

from benchmarks.fuzz_json import Case

sizes = st.sampled_from([0, 1, 2, 3, 8, 16, 23, 32, 40, 64, 100, 200, 1000, 10_000])
counts = st.sampled_from(
    [
        0,
        1,
        2,
        9,
        100,
        999,
        1000,
        1001,
        9_999,
        10_000,
        10_001,
        65_536,
        10**6,
        2**31 - 1,
        2**31,
        2**32,
        2**63,
        2**64,
        10**30,
    ]
)
words = st.sampled_from(["x", "ab", "", "0", "é", "👍", "yes", "<|im_end|>", '"', "\\", "\n", "a" * 300])
classes = st.sampled_from(
    [
        "[a-z]",
        "[^a]",
        "[^\\n]",
        "[\\u0000-\\uffff]",
        "[α-ω]",
        "[😀-🙏]",
        "[z-a]",
        "[]",
        "[^]",
        ".",
        "\\w",
        "\\d",
        "\\p{L}",
        "[\\s\\S]",
    ]
)
prefixes = st.sampled_from(["", '"start " ', '"{" ', '"x" "y" '])  # harmless beginnings, with the rest behind


def quoted(word: str) -> str:
    return json.dumps(word, ensure_ascii=False)


# -- GBNF --------------------------------------------------------------------------------------------------------------


@st.composite
def gbnf(draw: st.DrawFn) -> str:
    word, size, prefix = draw(words), draw(sizes), draw(prefixes)
    tail = f"root ::= {prefix}a\n"
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
            return tail + f"a ::= a {quoted(word)} | {quoted(word)}\n"
        case 3:
            return tail + "a ::= b\nb ::= a\n"
        case 4:
            return tail + f'a ::= "" | a a | {quoted(word)}\n'
        case 5:
            return tail + f"a ::= {draw(classes)}{{{draw(counts)},{draw(counts)}}}\n"
        case 6:
            return tail + f"a ::= ({quoted(word)}{{{draw(counts)}}}){{{draw(counts)}}}\n"
        case 7:
            return tail + "a ::= " + " | ".join(f'"{word_idx}"' for word_idx in range(size)) + "\n"
        case 8:
            size = min(size, 200)
            return tail + "a ::= " + "(" * size + quoted(word) + ")*" * size + "\n"
        case 9:
            return tail + f"a ::= ({quoted(word)}*)* ({draw(classes)}+)+ ({quoted(word)}?)*\n"
        case 10:
            return tail + f"a ::= {draw(classes)}* a {draw(classes)}* | a a a | {quoted(word)}\n"
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
            return draw(
                st.sampled_from(
                    [
                        "(?=a)b",
                        "(?<=a)b",
                        "(a)\\1",
                        "(?P<n>a)(?P=n)",
                        "\\b",
                        "^a$",
                        "a{,5}",
                        "a{5,2}",
                        "(?i)ß",
                        "\\u{110000}",
                        "[",
                        "(",
                        "*",
                    ]
                )
            )
        case 8:
            return f"({'a?' * min(size, 1000)}){'a' * min(size, 1000)}"
        case 9:
            return f"(start )({inner}{{0,{draw(counts)}}}){{0,{draw(counts)}}}"
        case 10:
            return "".join(f"(a{idx}|b)?" for idx in range(min(size, 2000)))
        case _:
            return draw(st.text(st.sampled_from(list("ab()[]{}*+?|\\^$.,-0123é")), max_size=60))


# -- JSON schemas ------------------------------------------------------------------------------------------------------

numbers = st.sampled_from(
    [
        0,
        1,
        -1,
        0.1,
        1e-9,
        1e300,
        2**63,
        2**64,
        {"$raw": "1" + "0" * 400},
        {"$raw": "9" * 4300},
        {"$raw": "1e999"},
        {"$raw": "5e-324"},
    ]
)
simple = st.sampled_from(
    [
        {},
        True,
        False,
        {"type": "string"},
        {"type": "integer"},
        {"type": "null"},
        {"const": 1},
        {"enum": []},
        {"type": []},
        {"type": "nobody"},
    ]
)


@st.composite
def schemas(draw: st.DrawFn, depth: int = 0) -> Any:
    inner = schemas(depth + 1) if depth < 2 else simple
    size = draw(sizes)
    match draw(st.integers(0, 17)):
        case 0:
            return draw(simple)
        case 1:
            return {
                "$ref": draw(
                    st.sampled_from(
                        [
                            "#",
                            "#/$defs/a",
                            "#/nowhere",
                            "http://example.org/x",
                            "file:///etc/passwd",
                            "#/$defs/a~1b",
                            "",
                        ]
                    )
                )
            }
        case 2:
            return {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
        case 3:
            return {
                "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": draw(counts)}},
                "$ref": "#/$defs/a",
            }
        case 4:  # doubles at every step
            size = min(size, 100)
            steps = {
                f"d{idx}": {
                    "type": "array",
                    "prefixItems": [{"$ref": f"#/$defs/d{idx + 1}"}] * 2,
                    "minItems": 2,
                    "items": False,
                }
                for idx in range(size)
            }
            return {"$defs": steps | {f"d{size}": {"const": "x"}}, "$ref": "#/$defs/d0"}
        case 5:
            return {
                "type": "array",
                "items": draw(inner),
                "minItems": draw(counts),
                "maxItems": draw(counts),
                "uniqueItems": draw(st.booleans()),
            }
        case 6:
            return {"type": "string", "minLength": draw(counts), "maxLength": draw(counts)}
        case 7:
            return {"type": "string", "pattern": draw(regexes())}
        case 8:
            return {
                "type": draw(st.sampled_from(["integer", "number"])),
                draw(st.sampled_from(["minimum", "maximum", "exclusiveMinimum"])): draw(numbers),
            }
        case 9:
            return {"type": "number", "multipleOf": draw(numbers), "minimum": draw(numbers), "maximum": draw(numbers)}
        case 10:
            names = [f"p{idx}" for idx in range(min(size, 1000))]
            return {
                "type": "object",
                "properties": {name: {"type": "string"} for name in names},
                "required": names,
                "minProperties": draw(counts),
            }
        case 11:
            return {
                "type": "object",
                "patternProperties": {draw(regexes()): draw(inner)},
                "additionalProperties": draw(inner),
                "maxProperties": draw(counts),
            }
        case 12:
            return {
                draw(st.sampled_from(["anyOf", "oneOf", "allOf"])): [
                    draw(inner) for _ in range(draw(st.integers(0, 4)))
                ]
                * min(size, 200)
            }
        case 13:
            return {"not": draw(inner), "if": draw(inner), "then": draw(inner), "else": draw(inner)}
        case 14:
            return {"enum": [f"w{idx}" for idx in range(size)]}
        case 15:
            return {"allOf": [{"type": "string"}, {"type": "integer"}], "minLength": draw(counts)}
        case 16:
            return {
                "type": "string",
                "format": draw(st.sampled_from(["date", "email", "uuid", "uri", "regex", "nobody"])),
                "pattern": draw(regexes()),
            }
        case _:
            nested: Any = draw(inner)
            for _ in range(min(size, 55)):
                nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
            return nested


@st.composite
def tags(draw: st.DrawFn) -> Any:
    tag = {"begin": draw(words), "schema": draw(schemas()), "end": draw(words)}
    match draw(st.integers(0, 3)):
        case 0:
            return {
                "type": "structural_tag",
                "structures": [tag] * min(draw(sizes), 100),
                "triggers": [draw(words)] * min(draw(sizes), 100),
            }
        case 1:
            content = {"type": "json_schema", "json_schema": draw(schemas())}
            return {
                "type": "structural_tag",
                "format": {"type": "tag", "begin": draw(words), "content": content, "end": draw(words)},
            }
        case 2:
            return {
                "type": "structural_tag",
                "format": {
                    "type": "sequence",
                    "elements": [{"type": "regex", "pattern": draw(regexes())}] * min(draw(sizes), 100),
                },
            }
        case _:
            return {"type": "structural_tag", "format": {"type": draw(words), "elements": draw(schemas())}}


# -- requests ----------------------------------------------------------------------------------------------------------


@st.composite
def grammar_cases(draw: st.DrawFn) -> Case:
    written = gbnf().map(lambda text: {"guided_grammar": text})
    asked = draw(
        written
        | written
        | lark().map(lambda text: {"guided_grammar": text})
        | regexes().map(lambda text: {"guided_regex": text})
        | schemas().map(lambda schema: {"structured_outputs": {"json": schema}})
        | schemas().map(
            lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        )
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
