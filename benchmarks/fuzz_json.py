"""Hostile JSON for every endpoint of a server's own OpenAPI document: how a case is made, sent and its answer judged.

Used by `fuzz.py`. A case is a plain dict that can be printed and read back: the method, the path and a body, in which
huge things are written as recipes ({"$list": [1, 100000]}), and what is done to the bytes and to the connection.
"""

import http.client
import json
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st
from tests.security.conftest import LEAKS

from quire.config.server import ServerConfig

Case = dict[str, Any]

PATIENCE_S = 4.0  # then the client leaves
MAX_BODY = ServerConfig().max_body_bytes + 64

# -- values ------------------------------------------------------------------------------------------------------------

BITS = (0, 7, 8, 15, 16, 31, 32, 52, 53, 62, 63, 64, 127, 128)
_POSITIVE_BORDERS = [2**bits + by for bits in BITS for by in (-1, 0, 1)]
BORDERS = sorted({*_POSITIVE_BORDERS, *(-number for number in _POSITIVE_BORDERS)})
RAW_NUMBERS = [
    *"5e-324 1.7976931348623157e308 1e308 2.2250738585072014e-308 -0 -0.0 1e-999 0.1e1".split(),
    *("9" * 19, "9" * 20, "9" * 300, "9" * 4300, "9" * 4301, "9" * 20_000),
    *("-" + "9" * 5000, "0." + "3" * 5000, "1" + "0" * 400),
]
NO_NUMBERS = [*"NaN Infinity -Infinity 1e999 -1e999 1E400 01 1. .5 0x10 1_000".split(), "1e" + "9" * 30]
TEXTS = [
    *("", " ", "a", "Hello", "\0", "a\0b", "\x7f", "\u2028", "\ufeff", "\U0010ffff", "é" * 50, "👩‍👩‍👧‍👦"),
    *("<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "</s>"),
    *("{{ 7 * 7 }}", "{% for x in range(10**9) %}x{% endfor %}", "../../etc/passwd", "%s%n%x"),
    *("null", "true", "1", "\r\nX: y", "a" * 1025, "a" * 4097),
]
RAW_TEXTS = [
    *(r'"\ud800"', r'"\udc00\ud800"', r'"a\ud83d"', r'"\u0000"', r'"\x41"'),
    *('"\t"', '"\n"', "'a'", r'"\ud83d\ude00"'),
]
COUNTS = [
    *(0, 1, 2, 3, 16, 64, 65, 128, 129, 255, 256, 257, 512, 1000, 1024, 1025, 4096, 4097),
    *(10_000, 32_000, 65_537, 100_000, 262_000, 300_000, 1_000_000),
]

counts = st.sampled_from(COUNTS)
integers = st.sampled_from(BORDERS) | st.integers(-300, 70_000)
raw_numbers = st.sampled_from(RAW_NUMBERS) | st.sampled_from(RAW_NUMBERS) | st.sampled_from(NO_NUMBERS)
numbers = integers | raw_numbers.map(lambda text: {"$raw": text}) | st.floats(allow_nan=False, allow_infinity=False)
controls = st.integers(0, 0x9F).map(chr)
repeated = st.sampled_from(["x", "é", "\\", '"', "[", " ", "\n", "word ", "<|im_end|>"])
texts = (
    st.sampled_from(TEXTS)
    | st.sampled_from(RAW_TEXTS).map(lambda text: {"$raw": text})
    | st.text(controls | st.characters(exclude_categories=["Cs"]), max_size=30)
    | st.tuples(repeated, counts).map(lambda pair: {"$text": list(pair)})
)
scalars = st.none() | st.booleans() | numbers | texts
names = st.sampled_from(["a", "type", "role", ""])
small = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))
depths = st.sampled_from([1, 10, 60, 63, 64, 65, 500, 10_000, 1_000_000])
members = st.lists(st.tuples(st.sampled_from(["a", "a", "type"]), scalars), max_size=4)
huge = (
    st.tuples(scalars, counts).map(lambda pair: {"$list": list(pair)})
    | counts.map(lambda count: {"$ids": count})
    | st.tuples(st.sampled_from(["", "k", "-"]), counts).map(lambda pair: {"$map": list(pair)})
    | st.tuples(st.sampled_from(["[", '{"a":']), depths).map(lambda pair: {"$nest": list(pair)})
    | members.map(lambda pairs: {"$pairs": list(map(list, pairs))})
)
hostile = scalars | small | huge


def render(value: Any) -> bytes:
    """A value with recipes in it, as JSON or as what only looks like it."""
    match value:
        case {"$raw": text}:
            return text.encode()
        case {"$text": [text, count]}:
            return b'"' + json.dumps(text)[1:-1].encode() * _fits(count, len(text)) + b'"'
        case {"$list": [item, count]}:
            rendered = render(item)
            return b"[" + b",".join([rendered] * _fits(count, len(rendered) + 1)) + b"]"
        case {"$ids": count}:
            return b"[" + ",".join(map(str, range(count))).encode() + b"]"
        case {"$map": [prefix, count]}:
            return ("{" + ",".join(f'"{prefix}{idx}":0' for idx in range(count)) + "}").encode()
        case {"$nest": [opening, count]}:
            closing = "]" if opening == "[" else "}"
            return (opening * count + "0" + closing * count).encode()
        case {"$pairs": pairs}:
            return _render_object(pairs)
        case dict():
            return _render_object(value.items())
        case list():
            return b"[" + b",".join(map(render, value)) + b"]"
    return json.dumps(value).encode()


def _render_object(pairs: Iterable[Sequence[Any]]) -> bytes:
    return b"{" + b",".join(json.dumps(name).encode() + b":" + render(item) for name, item in pairs) + b"}"


def _fits(count: int, num_bytes: int) -> int:
    return min(count, MAX_BODY // max(1, num_bytes))


# -- bodies ------------------------------------------------------------------------------------------------------------


def fitting(schema: dict[str, Any], document: dict[str, Any], depth: int = 0) -> st.SearchStrategy:
    """Values as a schema of the document wants them, small enough to be answered soon."""
    if "$ref" in schema:
        return fitting(_referred(schema, document), document, depth)
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of(*(fitting(branch, document, depth) for branch in branches))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object":
            return _objects(schema, document, depth)
        case "array":
            items = fitting(schema.get("items", {}), document, depth + 1)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=3)
        case "string":
            return st.sampled_from(["a", "Hello", "one two three", "<|im_end|>"])
        case "integer":
            low = schema.get("minimum", 0)
            return st.integers(max(low, 0), min(schema.get("maximum", 32), 32))
        case "number":
            low, high = max(schema.get("minimum", 0), 0), min(schema.get("maximum", 2), 2)
            return st.floats(low, high, exclude_min=schema.get("minimum") == 0)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return small if depth < 3 else scalars


def _referred(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """What a schema refers to, or the schema itself."""
    if "$ref" not in schema:
        return schema
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def _objects(schema: dict[str, Any], document: dict[str, Any], depth: int) -> st.SearchStrategy:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not properties:
        named = schema.get("additionalProperties")
        values = fitting(named if isinstance(named, dict) else {}, document, depth + 1)
        return st.dictionaries(st.sampled_from(["1", "2", "a"]), values, max_size=3)
    inner = {
        name: st.deferred(lambda value=value: fitting(value, document, depth + 1)) for name, value in properties.items()
    }
    needed = st.fixed_dictionaries({name: inner[name] for name in required if name in inner})
    others = sorted(set(properties) - set(required))
    if not others:
        return needed

    @st.composite
    def objects(draw: st.DrawFn) -> dict[str, Any]:
        chosen = draw(st.lists(st.sampled_from(others), max_size=5 if depth == 0 else 2, unique=True))
        return draw(needed) | {name: draw(inner[name]) for name in chosen}

    return objects()


# Fields whose cost multiplies, with values at and over their limits.
COSTLY: dict[str, list[Any]] = {
    "n": [1, 2, 127, 128, 129, {"$raw": "9" * 4300}],
    "logprobs": [0, 64, 65, True],
    "top_logprobs": [0, 20, 64, 65],
    "prompt_logprobs": [0, 64, 65],
    "echo": [True],
    "stream": [True, True, False],
    "best_of": [1, 128, 2**63],
    "max_tokens": [0, 1, 4, 64, 10_000, 2**31, 2**63 - 1, 2**63, 2**64],
    "min_tokens": [0, 64, 2**63 - 1, 2**64],
    "prompt": [
        "",
        {"$list": ["Hello", 256]},
        {"$list": ["Hello", 257]},
        {"$list": [1, 8000]},
        {"$ids": 100_000},
        {"$list": [{"$list": [1, 2000]}, 100]},
        {"$text": ["word ", 5000]},
        {"$text": ["word ", 1_000_000]},
        [],
        [[]],
        [1, "a"],
        {"$list": [-1, 3]},
        {"$list": [49_152, 3]},
    ],
    "stop": [
        {"$list": ["x", 32]},
        {"$list": ["x", 33]},
        {"$text": ["x", 1024]},
        {"$list": [{"$text": ["x", 1024]}, 32]},
        {"$list": ["", 2]},
    ],
    "bad_words": [
        {"$list": ["x", 256]},
        {"$list": [{"$text": ["word ", 200]}, 256]},
        {"$list": ["x", 1_000_000]},
        [""],
        [" "],
    ],
    "allowed_token_ids": [{"$ids": 49_152}, {"$list": [1, 300_000]}, {"$list": [1, 1_000_000]}, [], {"$ids": 49_153}],
    "stop_token_ids": [{"$ids": 256}, {"$ids": 257}, {"$ids": 1_000_000}],
    "logit_bias": [
        {"$map": ["", 1024]},
        {"$map": ["", 1025]},
        {"$map": ["", 1_000_000]},
        {"0": {"$raw": "1e999"}},
        {"-1": 1},
        {"a": 1},
    ],
    "cache_salt": ["", "s", {"$text": ["s", 256]}, {"$text": ["s", 257]}, {"$text": ["s", 1_000_000]}],
    "priority": [-(2**31), 2**31 - 1, 2**31, 2**64, -(2**128)],
    "timeout_s": [5e-324, 1e-9, 0.001, 0.1, 1e308, {"$raw": "1e309"}, 0, -1, 2**63, 9.3e18],
    "temperature": [0, 5e-324, 1e-6, 100, 100.1, 1e308, {"$raw": "NaN"}],
    "seed": BORDERS,
    "top_k": BORDERS,
    "extra_args": [
        {"x": 2**64},
        {"x": {"$raw": "9" * 4300}},
        {"x": {"$list": [1.5, 300_000]}},
        {"$map": ["k", 100_000]},
        {"x": {"$nest": ["[", 60]}},
        {"x": {"$raw": '"\\ud800"'}},
        {"": None},
    ],
    "chat_template_kwargs": [
        {"messages": []},
        {"tokenize": True},
        {"add_generation_prompt": 5},
        {"x": {"$list": [1, 300_000]}},
        {"$map": ["k", 100_000]},
        {"tools": 1},
        {"raise_exception": 1},
        {"x": {"$nest": ["[", 60]}},
    ],
    "messages": [
        [],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": 5, "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": {"$list": [{"type": "text", "text": "x"}, 10_000]}}],
        {"$list": [{"role": "user", "content": "x"}, 4096]},
        {"$list": [{"role": "user", "content": ""}, 4097]},
        [{"role": "assistant", "tool_calls": {"$nest": ["[", 50]}}],
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": 1, "arguments": "{"}}]}],
        [{"role": "user", "content": {"$text": ["word ", 200_000]}}],
        [{"role": "user", "content": "x", "extra": {"$map": ["k", 10_000]}}],
    ],
    "tools": [
        {"$list": [{"type": "function", "function": {"name": "f"}}, 512]},
        {"$list": [{"type": "function", "function": {"name": "f"}}, 513]},
        [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
        [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"not": {"maxItems": {"$raw": "1" + "0" * 400}}}},
            }
        ],
        [{"type": "function", "function": {"name": "f", "parameters": {"enum": {"$ids": 100_000}}}}],
        [{"type": "function", "function": {"name": "f\n", "description": {"$text": ["x", 100_000]}}}],
    ],
    "tool_choice": [
        "required",
        "auto",
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "nobody"}},
        5,
    ],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
        {"type": "text"},
        {"type": {"$nest": ["[", 50]}},
    ],
    "tokens": [{"$ids": 49_153}, {"$ids": 49_152}, {"$list": [1, 1_000_000]}, [-1], [2**64], []],
    "model": ["smollm2", "smollm2", "smollm2", "", "nobody", {"$text": ["m", 100_000]}],
    "stream_options": [{"include_usage": True, "continuous_usage_stats": True}, {"include_usage": 5}],
}
UNKNOWN = [
    *("unknown", "", "\0", "prompt_embeds", "use_beam_search", "truncate_prompt_tokens"),
    *("functions", "chat_template", "x" * 300),
]


# Fields that are valid in most cases, so that the server also looks at the rest of a case.
SOUND: dict[str, st.SearchStrategy] = {
    "model": st.just("smollm2"),
    "prompt": st.sampled_from(
        ["Hello", "one two three", "<|im_end|>", [1000, 1001], ["a", "b"], [[1000], [1001, 1002]]]
    ),
    "messages": st.sampled_from(
        [[{"role": "user", "content": "Hello"}], [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]]
    ),
    "tokens": st.sampled_from([[1000], [1, 2, 3]]),
    "max_tokens": st.integers(1, 40),
    "max_completion_tokens": st.integers(1, 40),
}
# These exclude each other, or have a fuzzer of their own: only now and then.
SHAPES = frozenset(
    """
    response_format structured_outputs guided_json guided_regex guided_choice guided_grammar
    tools tool_choice thinking_token_budget best_of stream_options min_tokens
    """.split()
)


@st.composite
def _bodies(draw: st.DrawFn, schema: dict[str, Any], document: dict[str, Any]) -> Any:
    """A sound body in which a few fields are costly, or hostile, or both."""
    properties = schema.get("properties", {})
    names = sorted(properties)
    always = {*schema.get("required", []), "model", "max_tokens"}
    body = {name: draw(SOUND[name]) for name in names if name in SOUND and name in always}
    if not schema.get("required"):  # /tokenize, which takes either
        choice = draw(st.sampled_from(["prompt", "messages"]))
        body |= {choice: "Hello" if choice == "prompt" else draw(SOUND[choice])}
    calm = [name for name in names if name not in SHAPES and name not in SOUND]
    for name in draw(st.lists(st.sampled_from(calm), max_size=3, unique=True)) if calm else ():
        body[name] = draw(fitting(properties[name], document, 1))
    costly = [name for name in names if name in COSTLY]
    way = draw(st.integers(0, 9))
    if way < 7 and costly:
        for name in draw(st.lists(st.sampled_from(costly), min_size=1, max_size=3, unique=True)):
            body[name] = draw(st.sampled_from(COSTLY[name]))
    if way > 5:
        for _ in range(draw(st.integers(1, 2))):
            body[draw(st.sampled_from(names) | st.sampled_from(UNKNOWN))] = draw(hostile)
    if draw(st.integers(0, 25)) == 7:  # a field twice
        return {"$pairs": [*map(list, body.items()), [draw(st.sampled_from(names)), draw(hostile)]]}
    return body if draw(st.integers(0, 50)) != 7 else draw(hostile)


@st.composite
def _posts(draw: st.DrawFn, path: str, schema: dict[str, Any], document: dict[str, Any]) -> Case:
    case: Case = {"method": "POST", "path": path, "body": draw(_bodies(schema, document))}
    match draw(st.integers(0, 24)):
        case 7:
            case["cut"] = draw(st.floats(0, 1))
        case 8:
            flips = st.tuples(st.floats(0, 1), st.integers(0, 255)).map(list)
            case["flips"] = draw(st.lists(flips, min_size=1, max_size=4))
        case 9 | 10 | 11:
            case["leave_after_s"] = draw(st.sampled_from([0.0, 0.01, 0.05, 0.3]))
    return case


def json_cases(document: dict[str, Any]) -> st.SearchStrategy:
    """Requests for every endpoint of the document; those that reach the engine more often."""
    weighted: list[st.SearchStrategy] = []  # each as often as it is to be drawn
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                reaches_engine = "text/event-stream" in operation["responses"]["200"]["content"]
                posts = _posts(path, _referred(schema, document), document)
                weighted += [posts] * (8 if reaches_engine else 2)
            elif "{" in path:
                weighted.append(_odd_paths(method, path))
    return st.integers(0, len(weighted) - 1).flatmap(lambda idx: weighted[idx])


def _odd_paths(method: str, path: str) -> st.SearchStrategy:
    """Requests whose path has odd text in place of its parameter."""
    printable = st.characters(min_codepoint=33, max_codepoint=126)
    odd = st.text(printable, min_size=1, max_size=50) | st.sampled_from(["%00", "x" * 5000, "smollm2"])
    return odd.map(lambda text: {"method": method.upper(), "path": re.sub("{.*}", lambda _: text, path)})


# -- sending and judging -----------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    path: str  # that was asked
    status: int  # 0: none came
    content_type: str
    content: bytes
    complete: bool  # read to its end
    seconds: float
    broken: bool = False  # the server ended the connection; if the answer is incomplete without this, the client left


def play(port: int, key: str, case: Case, patience_s: float = PATIENCE_S) -> Answer:
    """Sends a case and reads its answer, for as long as the patience lasts."""
    started = time.monotonic()
    body = body_of(case)
    deadline = started + min(patience_s, case.get("leave_after_s", patience_s))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience_s)
    status, content_type = 0, ""
    content = bytearray()
    complete = broken = False
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        try:
            connection.request(case["method"], case["path"], body, headers)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before all was sent: there may be an answer nevertheless
        if connection.sock is not None:
            connection.sock.settimeout(max(0.01, deadline - time.monotonic()))
        response = connection.getresponse()
        status, content_type = response.status, response.getheader("content-type", "")
        while piece := response.read1(1 << 16):
            content += piece
            if (left := deadline - time.monotonic()) <= 0:
                break
            if connection.sock is not None:
                connection.sock.settimeout(left)
        else:
            complete = True
    except (http.client.InvalidURL, TimeoutError):
        pass  # it cannot be sent, or nobody answered in time
    except (http.client.HTTPException, OSError):
        broken = True
    finally:
        connection.close()
    return Answer(case["path"], status, content_type, bytes(content), complete, time.monotonic() - started, broken)


def body_of(case: Case) -> bytes | None:
    if "body" not in case:
        return None
    body = bytearray(render(case["body"])[:MAX_BODY])
    if "cut" in case:
        del body[int(len(body) * case["cut"]) :]
    for where, byte in case.get("flips", []):
        if body:
            body[min(int(len(body) * where), len(body) - 1)] = byte
    return bytes(body)


def judge(answer: Answer) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if answer.broken:
        return f"the connection ended before a whole answer (status {answer.status})"
    if not answer.complete:
        return ""  # the client left first; what the server does then is seen elsewhere
    if answer.status >= 400:
        return _judge_error(answer)
    if answer.content_type.startswith("text/event-stream"):
        return _judge_events(answer.content)
    if answer.content_type.startswith("application/json"):
        try:
            json.loads(answer.content)
        except ValueError as error:
            return f"an answer of status {answer.status} is no JSON: {error}"
    return ""


_PLACE = re.compile(r"line \d+,? column \d+")  # in the client's own grammar


def _judge_error(answer: Answer) -> str:
    shown = answer.content[:300].decode("utf-8", "replace")
    try:
        message, is_internal = _error_of(json.loads(answer.content), answer.path)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"the error of status {answer.status} is in no protocol's shape: {shown}"
    if answer.status == 500 and is_internal:
        return f"status 500: {message}"
    if len(message) > 1000:
        return f"an error's message has {len(message)} characters"
    if found := LEAKS.search(_PLACE.sub("", message)):
        return f"an error tells too much ({found[0]!r}): {shown}"
    return ""


def _error_of(body: Any, path: str) -> tuple[str, bool]:
    """An error's message, and whether it is our own fault; ValueError if it is not written as OpenAI writes errors or,
    on their paths, Anthropic and Ollama."""
    error = body["error"]
    if path.startswith("/api/") and isinstance(error, str):
        message, is_internal, has_shape = error, False, body.keys() == {"error"}
    elif path.startswith("/v1/messages") and body.get("type") == "error":
        message, is_internal = error["message"], error["type"] == "api_error"
        has_shape = error.keys() == {"type", "message"} and bool(body["request_id"])
    else:
        message, is_internal = error["message"], error["code"] is None
        has_shape = error.keys() == {"message", "type", "param", "code"}
    if not (has_shape and isinstance(message, str) and message):
        raise ValueError("an error of another shape")
    return message, is_internal


def _judge_named_events(content: bytes) -> str:
    """Of Anthropic's protocol."""
    *events, rest = content.split(b"\n\n")
    if rest:
        return "a stream ends in the middle of an event"
    for event in events:
        name, _, data = event.partition(b"\ndata: ")
        try:
            has_name = json.loads(data)["type"] == name.removeprefix(b"event: ").decode()
        except (ValueError, KeyError, TypeError):
            has_name = False
        if not has_name:
            return f"an event is not of the type it says: {event[:200]!r}"
    if name not in (b"event: message_stop", b"event: error"):
        return f"a stream ends without message_stop and without an error: {event[:200]!r}"
    return ""


def _judge_events(content: bytes) -> str:
    if content.startswith(b"event: "):
        return _judge_named_events(content)
    events = content.split(b"\n\n")
    if events.pop():
        return "a stream ends in the middle of an event"
    for event in events[:-1]:
        try:
            json.loads(event.removeprefix(b"data: "))
        except ValueError:
            return f"an event is no JSON: {event[:200]!r}"
    last = events[-1] if events else b""
    if last == b"data: [DONE]":
        return ""
    try:
        error = json.loads(last.removeprefix(b"data: "))["error"]
    except (ValueError, KeyError, TypeError):
        return f"a stream ends without [DONE] and without an error: {last[:200]!r}"
    is_internal = error["code"] is None and error["type"] == "server_error"
    return f"a stream ends with an internal error: {error['message']}" if is_internal else ""
