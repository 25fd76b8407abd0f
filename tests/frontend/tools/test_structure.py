"""What a format's grammar admits is what its parser parses: random walks through xgrammar come back as valid calls."""

import json
import random

import jsonschema_rs
import pytest
import xgrammar

from quire import registry
from quire.errors import RequestError
from quire.frontend.tools import llama_pythonic
from quire.structured.engines.xgrammar import XGrammar
from quire.structured.spec import GrammarSpec
from tests.frontend.tools import transcripts
from tests.frontend.tools.transcripts import CASES, SOURCES, parsed

FORMATS = registry.names("quire.frontend.tools")
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "unit": {"enum": ["C", "F"]},
            "place": {"$ref": "#/$defs/place"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "number"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    "weather_map": {
        "type": "object",
        "properties": {"zoom": {"type": "integer"}, "label": {"type": ["string", "null"]}},
        "additionalProperties": False,
    },
    "note": {
        "type": "object",
        "properties": {
            "day": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
            "word": {"type": "string", "minLength": 2, "maxLength": 5},
            "for": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "to": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
            "rank": {"anyOf": [{"enum": ["first", "2"]}, {"type": "integer", "minimum": 3, "maximum": 9}]},
            "mixed": {"enum": ["a", 1, None]},
        },
        "required": ["word", "rank"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "anything": {},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
VALIDATORS = {name: jsonschema_rs.validator_for(schema) for name, schema in SCHEMAS.items()}

# Marks are tokens, as in real vocabularies.
MARKS = [
    *"<tool_call> </tool_call> <|tool_call|> <|/tool_call|> functools [TOOL_CALLS] [ARGS] <|python_tag|>".split(),
    *"<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜> ```".split(),
    *"<arg_key> </arg_key> <arg_value> </arg_value> <|start|> <|channel|> <|message|> <|constrain|>".split(),
    *('{"name": "', "assistant", "[weather(", "[now(", " to=functions.", "commentary", "<|end|>"),
    "<|channel|>commentary to=functions.",
    *"<function= <parameter= </parameter> </function> <seed:tool_call> </seed:tool_call> <longcat_tool_call>".split(),
    *("<function_calls>", '<invoke name="', '<parameter name="', "</invoke>", '<|"|>', "<|tool_call>", "<tool_call|>"),
    *"<minimax:tool_call> </minimax:tool_call> <|tool_calls_section_begin|> <|tool_calls_section_end|>".split(),
    *"<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> <tool_calls> </tool_calls>".split(),
    *"<tool_calls:opensource> </tool_calls:opensource> <tool_call:opensource> </tool_call:opensource>".split(),
    *"<tool_sep:opensource> <arg_key:opensource> </arg_key:opensource> <arg_value:opensource>".split(),
    *("</arg_value:opensource>", "\n</parameter>", '[{"name": "', '}, {"name": "'),
]
CHARACTERS = [*map(chr, range(32, 127)), "\n", "é", "東", "🦙", "｜", "▁"]
TOKENS = ["<eos>", *MARKS, *CHARACTERS, "null", "true", "12", '": ', '", "']
WEIGHTS = {"<eos>": 3, '"': 15, "}": 15, "]": 9, ")": 15, '", "': 0.3, "\\": 0.3, " ": 0.5, "\n": 0.5}
WEIGHTS |= dict.fromkeys(MARKS, 6)
WEIGHTS |= dict.fromkeys(("</arg_value>", "</parameter>", "\n</parameter>", "</arg_value:opensource>", '<|"|>'), 40)
WEIGHTS |= {"</tool_call>": 20, "{": 0.5, "[": 0.5}
MAX_STEPS = 400


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    encoded = [token.encode() for token in TOKENS]
    info = xgrammar.TokenizerInfo(encoded, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[0])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def compile_form(compiler: xgrammar.GrammarCompiler, form: dict) -> xgrammar.CompiledGrammar:
    spec = GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    return compiler.compile_structural_tag(XGrammar.lower(spec).text)


def walk(compiled: xgrammar.CompiledGrammar, seed: int) -> str | None:
    """A random text of the grammar; None if it did not end."""
    source = random.Random(seed)
    matcher = xgrammar.GrammarMatcher(compiled)
    text = ""
    mask = xgrammar.allocate_token_bitmask(1, len(TOKENS))
    for _ in range(MAX_STEPS):
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [idx for idx in range(len(TOKENS)) if words[idx // 32] >> (idx % 32) & 1]
        assert allowed, f"nothing may follow {text!r}"
        token = source.choices(allowed, [WEIGHTS.get(TOKENS[idx], 1) for idx in allowed])[0]
        assert matcher.accept_token(token)
        if not token:
            return text
        text += TOKENS[token]
    return None


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_the_grammar_admits_parses(name: str, required: bool, parallel: bool, compiler) -> None:
    module = registry.load("quire.frontend.tools", name)
    form = module.structure(TOOLS, required=required, parallel=parallel)
    compiled = compile_form(compiler, form)
    texts = [text for seed in range(40) if (text := walk(compiled, seed)) is not None]
    most = 0
    names = set()
    for text in texts:
        content, reasoning, calls = parsed(module.Parser(TOOLS), text)
        for called, arguments in calls:
            VALIDATORS[called].validate(json.loads(arguments))
            names.add(called)
        most = max(most, len(calls))
        if required:
            assert calls and not content and not reasoning, text
        assert parallel or len(calls) <= 1
    assert len(texts) >= 10 and most >= 1, texts
    if required:
        assert len(names) >= 3
        makes_several = parallel and name != "harmony"
        assert most > 1 or not makes_several


OWN_WORDS = {"qwen3_coder", "seed_oss", "minimax_m2", "hy_v3", "glm4", "gemma4", "deepseek_v31", "longcat", "olmo3"}


@pytest.mark.parametrize("source", [s for s in SOURCES if s.format in OWN_WORDS], ids=lambda source: source.template)
def test_the_grammar_admits_what_the_template_writes(source, compiler) -> None:
    module = registry.load("quire.frontend.tools", source.format)
    for required in (False, True):
        compiled = compile_form(compiler, module.structure(transcripts.TOOLS, required=required, parallel=True))
        for case in ("one", "unicode", "empty", "two"):
            text = source.transcript(CASES[case]).strip()
            if source.format == "longcat":
                text = text.replace("call>{", "call>\n{").replace("}</long", "}\n</long")
            matcher = xgrammar.GrammarMatcher(compiled)
            assert matcher.accept_string(text.replace("'", '"')) and matcher.is_completed(), text


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_choice_is_one_tool_that_is_required(name: str, compiler) -> None:
    module = registry.load("quire.frontend.tools", name)
    form = module.structure(TOOLS[:1], required=True, parallel=False)
    compiled = compile_form(compiler, form)
    texts = [text for seed in range(15) if (text := walk(compiled, seed)) is not None]
    assert texts
    for text in texts:
        ((called, arguments),) = parsed(module.Parser(TOOLS), text)[2]
        assert called == "weather"
        VALIDATORS["weather"].validate(json.loads(arguments))


def test_free_text_is_free(compiler) -> None:
    for name in FORMATS:
        form = registry.load("quire.frontend.tools", name).structure(TOOLS, required=False, parallel=True)
        compiled = compile_form(compiler, form)
        for text in ("", "Hi!", 'JSON: {"a": [1]} <b> (x) ```py\n[1]\n```', "say <tool"):
            matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=False)
            assert matcher.accept_string(text), (name, text)
            mask = xgrammar.allocate_token_bitmask(1, len(TOKENS))
            matcher.fill_next_token_bitmask(mask)
            assert mask[0, 0].item() & 1, (name, text)


def test_pythonic_calls_refuse_schemas_they_cannot_honour() -> None:
    loop = {"properties": {"a": {"$ref": "#"}}}
    for parameters, word in [({"anyOf": [{}]}, "anyOf"), ({"properties": {"a-b": {}}}, "a-b"), (loop, "ref")]:
        function = {"name": "f", "parameters": parameters}
        with pytest.raises(RequestError, match=word):
            llama_pythonic.structure([{"type": "function", "function": function}], required=True, parallel=False)
        with pytest.raises(RequestError, match=word):
            strict = {"type": "function", "function": {**function, "strict": True}}
            llama_pythonic.structure([strict], required=False, parallel=False)
        assert llama_pythonic.structure([{"type": "function", "function": function}], required=False, parallel=False)
