"""The shape a call asks for: response_format, structured_outputs and tools, as one constraint and one parser.

Used by `chat.py` and `completions.py`. The grammars of tool calls and how calls are read are defined by the formats in
`frontend/tools/`; how thinking is read, by those in `frontend/reasoning/`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from quire.api.server.fields import Name, SamplingFields, Text, at_most
from quire.errors import RequestError
from quire.frontend.inputs import grammar_spec
from quire.frontend.model import ModelInfo
from quire.frontend.parse import OutputParser
from quire.params import GrammarObject, StructuredOutputs

MAX_TOOLS = 512
MAX_TOOLS_BYTES = 120_000  # in one grammar, whose own limit is a little higher
TOOL_BYTES = 128  # roughly what a format adds to each tool
_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,64}")
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Function(msgspec.Struct, omit_defaults=True):
    """A function the model may call; `parameters` is the JSON schema of its arguments."""

    name: Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^{_NAME.pattern}$"})]
    description: Text | None = None
    parameters: GrammarObject | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"] = "function"  # first, as in the prompts models were trained with
    function: Function


Tools = Annotated[list[Tool], at_most(MAX_TOOLS)]


class NamedFunction(msgspec.Struct):
    name: Name


class NamedTool(msgspec.Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class ChatFields(SamplingFields, kw_only=True):
    """What a chat may ask of its answer, beside sampling."""

    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None  # false: thinking is left out of the answer

    @property
    def has_shape(self) -> bool:
        """Whether its answer may be anything but plain text."""
        asked = (
            self.tools,
            self.response_format,
            self.structured_outputs,
            self.guided_json,
            self.guided_regex,
            self.guided_choice,
            self.guided_grammar,
            self.grammar,
            self.json_schema,
        )
        return any(value is not None for value in asked)


@dataclass(frozen=True)
class AnswerShape:
    structured: StructuredOutputs | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)  # as the template and the parser see them
    is_named: bool = False  # the request names the tool to call; such an answer ends with "stop", not "tool_calls"


def answer_constraint(fields: SamplingFields) -> StructuredOutputs | None:
    """From OpenAI's response_format, vLLM's structured_outputs and older names, or llama.cpp's names."""
    asked: dict[str, StructuredOutputs] = {}
    if (of_format := _of_format(fields.response_format)) is not None:
        asked["response_format"] = of_format
    if fields.structured_outputs is not None:
        asked["structured_outputs"] = fields.structured_outputs
    if fields.guided_json is not None:
        asked["guided_json"] = StructuredOutputs(json=fields.guided_json)
    if fields.guided_regex is not None:
        asked["guided_regex"] = StructuredOutputs(regex=fields.guided_regex)
    if fields.guided_choice is not None:
        asked["guided_choice"] = StructuredOutputs(choice=fields.guided_choice)
    if fields.guided_grammar is not None:
        asked["guided_grammar"] = StructuredOutputs(grammar=fields.guided_grammar)
    if fields.grammar:  # llama.cpp takes an empty one for none
        asked["grammar"] = StructuredOutputs(gbnf=fields.grammar)
    if fields.json_schema is not None:
        asked["json_schema"] = StructuredOutputs(json=fields.json_schema)
    names = list(asked)
    if len(names) > 1:
        raise RequestError(f"{names[0]} and {names[1]} exclude each other: give one", names[1])
    return asked[names[0]] if names else None


def _of_format(form: dict[str, Any] | None) -> StructuredOutputs | None:
    match form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object" | "json_schema", "schema": dict(schema) | bool(schema)}:  # llama.cpp's way
            return StructuredOutputs(json=schema)
        case {"type": "json_object"}:
            return StructuredOutputs(json_object=True)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema) | bool(schema)}}:
            return StructuredOutputs(json=schema)
        case {"type": "json_schema"}:
            message = "response_format of type json_schema needs json_schema with a name and a schema in it"
        case {"type": "structural_tag"}:
            return StructuredOutputs(structural_tag=form)
        case _:
            message = "response_format must have the type text, json_object, json_schema or structural_tag"
    raise RequestError(message, "response_format")


def chat_constraint(asked: ChatFields, model: ModelInfo) -> AnswerShape:
    """What a chat's answer must be: text of a format, calls of tools, or either of the two."""
    structured = answer_constraint(asked)
    choice = asked.tool_choice or ("auto" if asked.tools else "none")
    if not asked.tools:
        if choice not in ("none", "auto"):
            raise RequestError("tool_choice needs tools to choose from", "tool_choice")
        return _of_text(structured, model)
    tools = [_checked(tool) for tool in asked.tools]
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise RequestError("two tools have the same name", "tools")
    if choice == "none":
        return _of_text(structured, model)
    is_free = choice == "auto"
    if structured is not None and not is_free:
        message = "an answer cannot be a call and have a format at once: leave response_format out"
        raise RequestError(message, "tool_choice")
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return _of_calls(tools, named, is_free, asked.parallel_tool_calls is not False, structured, model)


def _of_calls(
    tools: list[dict[str, Any]],
    named: str | None,
    is_free: bool,
    parallel: bool,
    structured: StructuredOutputs | None,
    model: ModelInfo,
) -> AnswerShape:
    """The shape of an answer with calls: of the tool that is `named`, or of any. `is_free`: or of an answer without."""
    if model.tool_format is None:
        message = "this model is not known to call tools: leave tools out"
        raise RequestError(message, "tools", "unsupported_parameter", hint="--tool-call-parser")
    callable_tools = _callable(tools, named)
    must_hold = structured is not None or any(tool["function"].get("strict") for tool in tools)
    if len(msgspec.json.encode(callable_tools)) + TOOL_BYTES * len(callable_tools) > MAX_TOOLS_BYTES:
        if is_free and not must_hold:
            return AnswerShape(None, tools)  # the model is told of them and its calls are read, without a grammar
        too_many = f"the tools have over {MAX_TOOLS_BYTES} characters, too many for a grammar"
        raise RequestError(f"{too_many}: send fewer or shorter ones", "tools")
    form = model.tool_format.structure(
        [_honoured(tool, is_free) for tool in callable_tools],
        required=not is_free or structured is not None,
        parallel=parallel and named is None,  # a tool that is named is called once
    )
    if is_free and not must_hold and len(json.dumps(form)) > MAX_TOOLS_BYTES:
        return AnswerShape(None, tools)  # some formats write tools at greater length
    if structured is not None:
        form = {"type": "or", "elements": [form, _answer(structured, model)]}
    return AnswerShape(_tag(form, structured), tools, is_named=named is not None)


def _callable(tools: list[dict[str, Any]], named: str | None) -> list[dict[str, Any]]:
    """The tools that may be called: the one that is named, or all."""
    if named is None:
        return tools
    found = [tool for tool in tools if tool["function"]["name"] == named]
    if not found:
        raise RequestError(f"tool_choice names {named!r:.80}, which is none of the tools", "tool_choice")
    return found


def _checked(tool: Tool) -> dict[str, Any]:
    name = tool.function.name
    parameters = tool.function.parameters or ANY_OBJECT
    if not _NAME.fullmatch(name):
        raise RequestError(f"a tool is named {name!r:.80}: names have up to 64 letters, digits, and . _ : -", "tools")
    if parameters.get("type", "object") != "object":
        raise RequestError(f"the parameters of the tool {name} must be a schema of type object", "tools")
    return msgspec.to_builtins(tool)


def _honoured(tool: dict[str, Any], is_free: bool) -> dict[str, Any]:
    """The tool with a schema that grammars can express. Where the model is free to call it or not, a schema that they
    cannot express is replaced by that of any object, unless the tool is strict."""
    function = tool["function"]
    parameters = function.get("parameters") or ANY_OBJECT
    try:
        grammar_spec(StructuredOutputs(json=parameters))
    except RequestError as error:
        if not is_free or function.get("strict"):
            raise RequestError(f"the parameters of the tool {function['name']}: {error}", "tools") from None
        parameters = ANY_OBJECT
    return {**tool, "function": {**function, "parameters": parameters}}


def _of_text(structured: StructuredOutputs | None, model: ModelInfo) -> AnswerShape:
    """The shape of an answer without calls. Some models write a header before it, which is then part of the grammar."""
    if structured is None or structured.structural_tag is not None:
        return AnswerShape(structured)
    has_header = hasattr(model.reasoning_format, "answer")
    return AnswerShape(_tag(_answer(structured, model), structured) if has_header else structured)


def _answer(structured: StructuredOutputs, model: ModelInfo) -> dict[str, Any]:
    """The format of an answer as part of a structural tag."""
    spec = grammar_spec(structured)
    form: dict[str, Any]
    match spec.kind:
        case "json":
            form = {"type": "json_schema", "json_schema": json.loads(spec.text)}
        case "regex":
            form = {"type": "regex", "pattern": spec.text}
        case "choice":
            choices = [{"type": "const_string", "value": choice} for choice in json.loads(spec.text)]
            form = {"type": "or", "elements": choices}
        case "grammar" if "::=" in spec.text:
            form = {"type": "grammar", "grammar": spec.text}
        case "gbnf":
            form = {"type": "gbnf", "grammar": spec.text}
        case _:
            message = "here an answer's format can be a JSON schema, regex, choice or GBNF grammar only"
            raise RequestError(message, "guided_grammar")
    wrap = getattr(model.reasoning_format, "answer", None)
    return wrap(form) if wrap is not None else form


def _tag(form: dict[str, Any], asked: StructuredOutputs | None) -> StructuredOutputs:
    """`asked`: what the form was made of, and says which blanks its JSON may have."""
    tag = msgspec.structs.replace(
        StructuredOutputs(structural_tag={"type": "structural_tag", "format": form}),
        disable_any_whitespace=asked is not None and asked.disable_any_whitespace,
        whitespace_pattern=asked.whitespace_pattern if asked is not None else None,
    )
    try:
        grammar_spec(tag)
    except RequestError as error:
        raise RequestError(f"the tools make no grammar: {error}", "tools") from None
    return tag


def parsers(
    model: ModelInfo, tools: list[dict[str, Any]], prompt_token_ids: list[int]
) -> Callable[[], OutputParser] | None:
    """What makes the parser of one answer; None where an answer is plain text."""
    reasoning = model.reasoning_format
    calls = model.tool_format if tools else None
    if reasoning is None and calls is None:
        return None
    is_open = reasoning is not None and model.thinking_is_open(prompt_token_ids)

    def make() -> OutputParser:
        return OutputParser(
            reasoning.Parser(is_open) if reasoning is not None else None,
            calls.Parser(tools) if calls is not None else None,
            model.special_spellings if shows_special_tokens(model, tools) else None,
        )

    return make


def shows_special_tokens(model: ModelInfo, tools: list[dict[str, Any]]) -> bool:
    """Whether special tokens must be part of the text, because a format is made of them."""
    formats = [model.reasoning_format, model.tool_format if tools else None]
    return any(form is not None and form.NEEDS_SPECIAL_TOKENS for form in formats)
