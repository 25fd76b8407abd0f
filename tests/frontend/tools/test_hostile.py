"""Text that seems to be calls: nothing is lost, nothing crashes, nothing takes long."""

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import registry
from quire.frontend.parse import OutputParser
from quire.frontend.reasoning import harmony as harmony_reasoning
from quire.frontend.tools import base
from tests.frontend.tools.transcripts import CASES, SOURCES, TOOLS, cut, parsed

FORMATS = registry.names("quire.frontend.tools")
fuzzing = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))

# What formats are made of, for texts that come close to calls without being any.
FRAGMENTS = [
    *"<tool_call> </tool_call> <|tool_call|> <|/tool_call|> functools [TOOL_CALLS] [ARGS] [CALL_ID]".split(),
    *"<|python_tag|> <|python_start|> <|tool_call_start|> <tool_calls> ```json ```".split(),
    *"<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>".split(),
    "function",
    *"<function= <parameter= </parameter> </function> > <seed:tool_call> </seed:tool_call> <function_calls>".split(),
    *("<minimax:tool_call>", '<invoke name="', '<parameter name="', '">', "</invoke>", "</minimax:tool_call>"),
    *"<tool_calls:opensource> <tool_call:opensource> <tool_sep:opensource> </tool_call:opensource>".split(),
    *"<arg_key:opensource> </arg_key:opensource> <arg_value:opensource> </arg_value:opensource>".split(),
    *"<|tool_calls_section_begin|> <|tool_call_begin|> <|tool_call_argument_begin|> {} <|tool_call_end|>".split(),
    "functions.",
    *("<|tool_call>", "call:", '<|"|>', "<tool_call|>", "<longcat_tool_call>", "</longcat_tool_call>", ":0"),
    *"<arg_key> </arg_key> <arg_value> </arg_value>".split(),
    *"<|start|> <|channel|> <|message|> <|end|> <|call|> assistant commentary".split(),
    *(" to=functions.", "get_weather", "now", "get_weath", "unknown", "(", ")", "=", "city", "'", '"'),
    *("{", "}", "[", "]", ":", ",", ";", " ", "\n", "\\", "\\u12", "1", "-", "true", "None", "x", "é"),
    *('{"name": ', '"name"', '"arguments"', '"parameters": {', '{"city": "Rome"}', '"get_weather"', "<", "<|", "[T"),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)
cuts = st.lists(st.integers(0, 400), max_size=8)


def parser(name: str, tools=TOOLS):
    return registry.load("quire.frontend.tools", name).Parser(tools)


@pytest.mark.parametrize("name", FORMATS)
@given(text=texts, positions=cuts)
@fuzzing
def test_any_cut_of_any_text_gives_the_same(name: str, text: str, positions: list[int]) -> None:
    whole = parsed(parser(name), text)
    assert parsed(parser(name), cut(text, positions)) == whole
    assert parsed(parser(name), list(text)) == whole


@pytest.mark.parametrize("name", FORMATS)
@given(text=texts)
@fuzzing
def test_no_text_is_lost_when_no_call_parses(name: str, text: str) -> None:
    content, reasoning, calls = parsed(parser(name), text)
    if name == "harmony":  # marks of messages, and headers of complete ones, are no text
        text = text.replace("<|message|>", "")
        content, _, calls = parsed(parser(name), text)
        assert calls == [] and _without_ends(content) == _without_ends(text)
    elif not calls:
        assert (content, reasoning) == (text, "")


def _without_ends(text: str) -> str:
    return text.replace("<|end|>", "").replace("<|call|>", "")


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.format}-{source.template}")
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_a_call_cut_short_never_looks_whole(source, data) -> None:
    """Arguments that were cut are not JSON, so that no client runs half a command."""
    text = source.transcript(CASES["one"])
    text = text[: data.draw(st.integers(0, len(text)))]
    for name, arguments in parsed(parser(source.format), text)[2]:
        try:
            complete = json.loads(arguments)
        except ValueError:
            assert arguments == "" or arguments.startswith("{")
        else:
            assert (name, complete) == CASES["one"][0]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.format}-{source.template}")
def test_a_call_to_an_unknown_tool_is_content(source) -> None:
    text = source.transcript(CASES["one"])
    others = [tool for tool in TOOLS if tool["function"]["name"] == "now"]
    content, reasoning, calls = parsed(parser(source.format, others), text)
    assert calls == [] and reasoning == ""
    assert content == text.removesuffix("<|call|>")


CALL = '<tool_call>{"name": "get_weather", "arguments": '


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "a" "b"}',
        '{"city": tru}',
        '{"city": 01}',
        '{"city": NaN}',
        '{"city": "\\q"}',
        '{"city": "\\ud8zz"}',
        '{"city": ' + "[" * 5000,
        '{"city": ' + "9" * 5000 + "}",
        "{city: 1}",
        '{"city": 1,}',
        "{'city': 1}",
    ],
)
def test_a_call_that_breaks_keeps_its_beginning_and_the_rest_is_content(arguments: str) -> None:
    text = f"{CALL}{arguments}}}</tool_call> and more"
    content, _, calls = parsed(parser("hermes"), text)
    ((name, streamed),) = calls
    assert name == "get_weather" and streamed + content == text[len(CALL) :]
    with pytest.raises(ValueError):
        json.loads(streamed)
    assert parsed(parser("hermes"), list(text)) == (content, "", calls)


@pytest.mark.parametrize("text", ["[1, 2]", '"text"', "7", "true", '"[1]"', '"not json"'])
def test_arguments_that_are_no_object_are_content(text: str) -> None:
    call = f"{CALL}{text}}}</tool_call>"
    assert parsed(parser("hermes"), call) == (call, "", [])


@pytest.mark.parametrize(
    "call, arguments",
    [
        ('{"name": "now"}', "{}"),
        ('{"name": "now", "arguments": null}', "{}"),
        ('{"name": "now", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}', '{"a": "é"}'),
        ('{"arguments": { "a" : 1.50 } , "name": "now"}', '{ "a" : 1.50 }'),
        ('{"id": "7", "type": "function", "name": "now", "parameters": {"a": {"b": []}}}', '{"a": {"b": []}}'),
        ('\n {\n"name" :"now",\n "arguments": {"a":\n1e5}\n}\n', '{"a":\n1e5}'),
        ('{"name": "now", "arguments": {"a": "two\nlines"}}', '{"a": "two\\nlines"}'),
    ],
)
def test_what_models_write_for_a_call_is_understood(call: str, arguments: str) -> None:
    assert parsed(parser("hermes"), f"<tool_call>{call}</tool_call>") == ("", "", [("now", arguments)])


def test_marks_inside_strings_are_text() -> None:
    value = {"city": "</tool_call><tool_call>{[TOOL_CALLS]<|tool_call|>"}
    text = f"<tool_call>{json.dumps({'name': 'get_weather', 'arguments': value})}</tool_call>"
    assert parsed(parser("hermes"), text) == ("", "", [("get_weather", json.dumps(value))])


def test_arguments_stream_as_they_come() -> None:
    machine = parser("hermes")
    machine.feed('<tool_call>\n{"name": "get_weather", ')
    first = machine.feed('"arguments": {"city": "Ro')
    assert [(call.name, call.arguments) for call in first.calls] == [("get_weather", ""), (None, '{"city": "Ro')]
    assert [call.arguments for call in machine.feed("me, the").calls] == ["me, the"]


def test_json_that_is_no_call_is_shown_at_once() -> None:
    for name in ("llama3_json", "generic_json"):
        machine = parser(name)
        assert machine.feed('{"answer": 4').content == '{"answer": 4'
        assert machine.feed('2, "name": "now"}').content == '2, "name": "now"}'


def test_python_is_read_and_never_run() -> None:
    simple = ("1+1", "f(x)", "[x for x in y]", "lambda: 0", "'a' 'b'", "b'x'", "0x10")
    for value in ("__import__('os').system('x')", *simple):
        text = f"[get_weather(city={value})]"
        content, _, calls = parsed(parser("llama_pythonic"), text)
        assert len(calls) == 1 and not base.is_json(calls[0][1])
        assert "".join(calls[0][1].removeprefix('{"city": ').replace('"', "'") + content).endswith(")]")


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3))


@given(value=values, positions=cuts)
@settings(max_examples=60, deadline=None)
def test_pythons_own_writing_of_a_value_is_read_as_that_value(value, positions: list[int]) -> None:
    pieces = cut(f"[get_weather_map(x={value!r})]", positions)
    ((_, arguments),) = parsed(parser("llama_pythonic"), pieces)[2]
    assert json.loads(arguments) == {"x": value}


# A call of f with the argument x, in the formats whose values have no type.
UNTYPED = {
    "glm4": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=x>{}</parameter>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="x">{}</parameter></invoke></minimax:tool_call>',
    "hy_v3": (
        "<tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource><arg_key:opensource>x</arg_key:opensource>"
        "<arg_value:opensource>{}</arg_value:opensource></tool_call:opensource></tool_calls:opensource>"
    ),
}


@pytest.mark.parametrize("name", UNTYPED)
def test_untyped_values_follow_the_schema(name: str) -> None:
    for schema, written, meant in [
        ({"type": "string"}, "", ""),
        ({"type": "string"}, "\n\n a\r\n", "\n\n a\r\n"),
        ({"type": "string"}, "True", "True"),
        ({"type": "string"}, '"\\u0041"', '"\\u0041"'),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["integer", "string"]}, "1.5", "1.5"),
        ({"type": ["integer", "string"]}, "1", 1),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "object"}, "{'a': (1, None), 'b': \"it's\"}", {"a": [1, None], "b": "it's"}),
        ({"type": "object"}, '{"a": "</arg_value></parameter></arg_value:opensource>"}', None),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": "array"}, "__import__('os')", "__import__('os')"),
        ({"type": "string", "enum": ["C"]}, "\nC ", "C"),
        ({"allOf": [{"$ref": "#/$defs/s"}]}, "5", "5"),
        ({"anyOf": 5, "enum": 6, "oneOf": {}, "allOf": "x", "type": {}}, "5", 5),
        ({"type": "string"}, "123", "123"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, ' "q" \\ \n', ' "q" \\ \n'),
        ({"type": "integer"}, " 123 ", 123),
        ({"type": "integer"}, "12x", "12x"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "123", "123"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/s"}, "5", "5"),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({}, "5", 5),
        ({}, "five", "five"),
        ({}, '"five"', '"five"'),
        ({}, "[" * 5000, "[" * 5000),
    ]:
        parameters = {"properties": {"x": schema}, "$defs": {"s": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        text = UNTYPED[name].replace("{}", written)
        ((_, arguments),) = parsed(parser(name, tools), text)[2]
        if meant is None and written.startswith("{"):
            meant = json.loads(written)
        assert json.loads(arguments) == {"x": meant}, (schema, written)
        assert parsed(parser(name, tools), list(text)) == ("", "", [("f", arguments)])


@pytest.mark.parametrize("name", UNTYPED)
def test_untyped_values_that_were_cut_short_never_look_whole(name: str) -> None:
    for kind in ("string", "integer", "object"):
        parameters = {"properties": {"x": {"type": kind}}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        whole = UNTYPED[name].replace("{}", '{"a": 5}}}')
        for place in range(whole.index("x") + 1, whole.index("5}}}") + 4):
            for _, arguments in parsed(parser(name, tools), whole[:place])[2]:
                assert not base.is_json(arguments)


def test_a_model_may_leave_out_the_tags_around_calls() -> None:
    for name, call in [
        ("qwen3_coder", "<function=now>\n<parameter=x>\n1\n</parameter>\n</function>"),
        ("seed_oss", "<function=now><parameter=x>1</parameter></function>"),
        ("minimax_m2", '<invoke name="now"><parameter name="x">1</parameter></invoke>'),
        ("kimi_k2", '<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>'),
    ]:
        assert parsed(parser(name), f"So: {call} Done.") == ("So: Done.", "", [("now", '{"x": 1}')])


def test_a_second_call_in_a_block_that_is_none_is_content() -> None:
    call = '<invoke name="{}">\n</invoke>\n'
    text = f"<minimax:tool_call>\n{call.format('now')}{call.format('other')}</minimax:tool_call>"
    content, _, calls = parsed(parser("minimax_m2"), text)
    assert calls == [("now", "{}")] and content == f"{call.format('other')}</minimax:tool_call>"


REPEATED = [
    *("{", "[", "[[", '{"name": "now", "arguments": ', "<tool_call>", "<tool_call>now<arg_key>", '{"arguments": '),
    *("\\", " ", "<", "[now(a=", "<|start|>", "now", "<tool_call>\n<function=now>\n<parameter=a>[", "<function="),
    *("<function=now><parameter=a>[</parameter>", '<invoke name="now"><parameter name="', "<parameter=a>\n"),
    *('<|tool_call>call:now{a:<|"|>', '<|"|>', "<|tool_call_begin|>functions.now:", "0", "<function_calls>now("),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("piece", REPEATED)
def test_time_is_linear_in_the_text(name: str, piece: str) -> None:
    start = time.process_time()
    machine = parser(name)
    for _ in range(5_000):
        machine.feed(piece)
    machine.finish()
    assert time.process_time() - start < 1


def test_one_parser_after_the_other_reads_harmony() -> None:
    text = (
        "<|channel|>analysis<|message|>Think <b>.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Rome"}<|call|>'
    )
    expected = ("I look.", "Think <b>.", [("get_weather", '{"city": "Rome"}')])
    assert parsed(OutputParser(harmony_reasoning.Parser(False), parser("harmony")), text) == expected
    assert parsed(OutputParser(harmony_reasoning.Parser(False), parser("harmony")), list(text)) == expected
    assert parsed(OutputParser(None, parser("harmony")), list(text)) == expected
