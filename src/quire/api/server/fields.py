"""Request bodies: from JSON to checked structs, and the fields that chat and completions have in common.

Used by every handler with a body. The declaration of a field says how much it may hold: `decode` refuses more, and the
OpenAPI document states the limit. A body's class also names the fields that have no effect, and those it refuses since
they would change the answer: nobody gets an answer to another question. Fields that nobody knows are ignored, with one
warning each. docs/api.md is written from all of these.
"""

import functools
import logging
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from quire import params as limits
from quire.config import ServingConfig
from quire.errors import RequestError
from quire.frontend.async_llm import MAX_TIMEOUT_S
from quire.frontend.inputs import MAX_CACHE_SALT_CHARS, PRIORITY_LIMIT
from quire.frontend.model import ModelInfo
from quire.params import RepetitionDetectionParams, SamplingParams, StructuredOutputs, free
from quire.utils.loop_share import LoopShare

log = logging.getLogger(__name__)

MAX_CHOICES = 256  # prompts × n of one call
MAX_FIELDS = 512  # of a body, known or not
MAX_MESSAGES = 4096
MAX_MESSAGE_VALUES = 32_768  # all names and values of all messages
MAX_TEMPLATE_VALUES = 4096  # of chat_template_kwargs
MAX_NAME_CHARS = 1024
MAX_REQUEST_ID_CHARS = 128
REQUEST_ID = r"^[A-Za-z0-9._-]+$(?!\n)"  # what can be logged as it is
MAX_TOKEN_IDS = 1 << 22  # in one list; --max-json-values and the context are tighter
MAX_TOKEN_ID = 2**31 - 1

# How msgspec words that a bound is exceeded, and how it names the field at the end of a message.
_NUMBER_BOUND = re.compile(r"Expected `(int|float)` (>=|<=) (\S+)")
_LENGTH_BOUND = re.compile(r"Expected `(str|array|object)` of length (>=|<=) (\d+)")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_BOUND_WORDS = {">=": "at least", "<=": "at most"}
# OpenAI's words for what is wrong, by msgspec's: "integer_above_max_value", "array_below_min_length".
_KINDS = {"int": "integer", "float": "decimal", "str": "string", "array": "array", "object": "object"}
_BOUND_CODES = {">=": "below_min", "<=": "above_max"}
_PATH = re.compile(r" - at (`key` in )?`\$\.?(.*?)`$")
_MAX_WARNINGS = 100  # names of unknown fields that are remembered: bounded, because clients choose them
_warned: set[str] = set()

# Accepted and without effect: they describe the client, or ask for what is always done.
CLIENT_FIELDS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention session_id".split()
)
# Likewise: of vLLM's fields, those about what this server never sends.
UNUSED_FIELDS = frozenset("routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs".split())

# name of a field -> whether a value of it would change the answer
Refusals = Mapping[str, Callable[[Any], bool]]


def given(value: Any) -> bool:
    """Whether a value is anything but null, false or empty."""
    return value not in (None, False, "", [], {})


class RequestBody(msgspec.Struct, kw_only=True):
    """What every body has in common."""

    no_effect: ClassVar[frozenset[str]] = CLIENT_FIELDS
    refused: ClassVar[Refusals] = {}


Body = TypeVar("Body", bound=RequestBody)
Parameters = TypeVar("Parameters", bound=msgspec.Struct)


async def decode(body: bytes, kind: type[Body]) -> Body:
    """The body as a struct; RequestError names what is wrong with it. Others run in between."""
    share = LoopShare()
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object")
    if len(values) > MAX_FIELDS:
        message = f"the body has {len(values)} fields, the limit is {MAX_FIELDS}: leave out what nobody knows"
        raise RequestError(message)
    for name, value in values.items():
        if name in kind.__struct_fields__:
            continue
        if name not in kind.refused:
            _warn_ignored(name, "has no effect here" if name in kind.no_effect else "is not known here")
        elif kind.refused[name](value):
            raise RequestError(f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")
    await share.pause()
    try:
        # Not strict: 16.0 and "16" are taken for 16, which is what some clients send and vLLM takes.
        decoded = msgspec.convert(values, kind, str_keys=True, strict=False)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    await share.pause()
    if check_free := _free_checker(kind):
        check_free("", decoded)
    return decoded


def parameters(query: Mapping[str, str], kind: type[Parameters]) -> Parameters:
    """A query string as a struct; names that it does not know are ignored."""
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None


def _field_error(message: str) -> RequestError:
    """What msgspec found, as a sentence about the field."""
    path = _PATH.search(message)
    param = path[2] if path is not None else ""
    sentence = message[: path.start()] if path is not None else message
    if missing := _MISSING.fullmatch(sentence):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return RequestError(f"{param} is missing: send it", param, "missing_required_parameter")
    if path is None:
        return RequestError(message)
    name, _, inside = param.partition("[")
    if path[1]:
        name = f"a key of {name}"
    elif inside and name:
        name = f"an entry of {name}"
    if bound := _NUMBER_BOUND.fullmatch(sentence):
        code = f"{_KINDS[bound[1]]}_{_BOUND_CODES[bound[2]]}_value"
        return RequestError(f"{name} must be {_BOUND_WORDS[bound[2]]} {bound[3]}", param, code)
    if bound := _LENGTH_BOUND.fullmatch(sentence):
        what = "characters" if bound[1] == "str" else "entries"
        code = f"{_KINDS[bound[1]]}_{_BOUND_CODES[bound[2]]}_length"
        return RequestError(f"{name} must have {_BOUND_WORDS[bound[2]]} {bound[3]} {what}", param, code)
    code = "invalid_type" if sentence.startswith("Expected ") else "invalid_value"
    return RequestError(f"{param}: {sentence}", param, code)


def _warn_ignored(name: str, why: str) -> None:
    if name not in _warned and len(_warned) < _MAX_WARNINGS:
        _warned.add(name)
        log.warning("the field %.80r of a request %s: ignored, now and from now on", name, why)


def check_vocabulary(name: str, token_ids: list[int], vocab_size: int) -> None:
    """For token ids that are only decoded: those of a request are checked by the frontend."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RequestError(f"{name} must hold token ids from 0 to {vocab_size - 1}", name)


Checker = Callable[[str, Any], None]  # of a field's name and value; raises RequestError


@functools.cache
def _free_checker(hint: Any) -> Checker | None:
    """What checks the values declared `free` anywhere inside a type; None where nothing was."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Annotated:
        for meta in arguments[1:]:
            if isinstance(meta, msgspec.Meta) and meta.extra:
                return functools.partial(_check_free, meta.extra["max_values"])
        return _free_checker(arguments[0])
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = typing.get_type_hints(hint, include_extras=True)
        fields = {name: checker for name in hints if (checker := _free_checker(hints[name])) is not None}
        return functools.partial(_check_struct, hint, fields) if fields else None
    if origin in (typing.Union, types.UnionType):
        options = [checker for option in arguments if (checker := _free_checker(option)) is not None]
        return functools.partial(_check_options, options) if options else None
    if origin is list and (checker := _free_checker(arguments[0])) is not None:
        return functools.partial(_check_entries, checker)
    return None


def _check_free(max_values: int, name: str, value: Any) -> None:
    if isinstance(value, (dict, list, str)):
        try:
            limits.check_json(name, value, max_values)
        except RequestError as error:
            raise RequestError(str(error), name.partition(".")[0]) from None


def _check_struct(kind: type, fields: dict[str, Checker], name: str, value: Any) -> None:
    if isinstance(value, kind):
        for field, checker in fields.items():
            checker(f"{name}.{field}" if name else field, getattr(value, field))


def _check_options(options: list[Checker], name: str, value: Any) -> None:
    for checker in options:
        checker(name, value)


def _check_entries(checker: Checker, name: str, value: Any) -> None:
    for entry in value if isinstance(value, list) else ():
        checker(name, entry)


def whole(low: int, high: int) -> msgspec.Meta:
    return msgspec.Meta(ge=low, le=high)


def text(max_chars: int, **more: Any) -> msgspec.Meta:
    return msgspec.Meta(max_length=max_chars, **more)


def at_most(max_entries: int) -> msgspec.Meta:
    return msgspec.Meta(max_length=max_entries)


def within(low: float, high: float | None = None, **more: Any) -> msgspec.Meta:
    """The range of a float, for the OpenAPI document. What is outside is refused by SamplingParams."""
    upper = {"maximum": high} if high is not None else {}
    return msgspec.Meta(extra_json_schema={"minimum": low, **upper, **more})


Penalty = Annotated[float, within(-2, 2)]
RepetitionPenalty = Annotated[float, within(0, 100, exclusiveMinimum=0)]
Count = Annotated[int, whole(0, limits.LARGEST_INT)]
TokenId = Annotated[int, whole(0, MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], at_most(MAX_TOKEN_IDS)]
# The server's own limits on these two, max_n and max_logprobs, are checked by the frontend.
NumChoices = Annotated[int, whole(1, limits.MAX_N)]
NumLogprobs = Annotated[int, whole(limits.ALL, limits.LARGEST_INT)]
Name = Annotated[str, text(MAX_NAME_CHARS)]
Text = Annotated[str, text(limits.MAX_TEXT_CHARS)]
NonEmpty = Annotated[str, text(limits.MAX_STOP_CHARS, min_length=1)]
LogitBias = Annotated[dict[TokenId, Annotated[float, within(-100, 100)]], at_most(limits.MAX_LOGIT_BIAS)]
ExtraArguments = Annotated[dict[str, Any], free(limits.MAX_EXTRA_VALUES, maxProperties=limits.MAX_EXTRA_VALUES)]


Priority = Annotated[int, whole(-PRIORITY_LIMIT, PRIORITY_LIMIT - 1)]


# Fields that say how a prompt that is too long is cut.
NumKept = Annotated[int, whole(-1, limits.LARGEST_INT)]
Side = Literal["left", "right"]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with every event, too


class Repetition(msgspec.Struct):
    """Ends an answer whose last tokens are a pattern of so many tokens, so many times over."""

    max_pattern_size: Annotated[int, whole(0, limits.MAX_PATTERN_TOKENS)] = 0
    min_pattern_size: Annotated[int, whole(0, limits.MAX_PATTERN_TOKENS)] = 0
    min_count: Annotated[int, whole(0, limits.MAX_PATTERN_COUNT)] = 0


class SamplingFields(RequestBody, kw_only=True):
    """What chat and completions share; null is the same as leaving a field out."""

    operation: ClassVar[str] = "chat"  # what traces call it
    no_effect: ClassVar[frozenset[str]] = CLIENT_FIELDS | UNUSED_FIELDS
    refused: ClassVar[Refusals] = {
        "watermarking": given,
        "prompt_embeds": given,
        "kv_transfer_params": given,
        "ec_transfer_params": given,
    }

    # Fields that mean the same, by llama.cpp's name and another.
    twins: ClassVar[tuple[tuple[str, str], ...]] = (
        ("n_predict", "max_tokens"),
        ("repeat_penalty", "repetition_penalty"),
    )

    model: Name | None = None
    n: NumChoices | None = None  # at most --max-n of the server
    use_beam_search: bool | None = None  # the n likeliest answers; not streamed, without logprobs and formats
    length_penalty: float | None = None  # of beam search: a beam's logprob is divided by its length to this power
    temperature: Annotated[float, within(0, limits.MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, within(0, 1, exclusiveMinimum=0)] | None = None
    top_k: Annotated[int, whole(-1, limits.LARGEST_INT)] | None = None
    min_p: Annotated[float, within(0, 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Annotated[int, whole(-limits.SEED_LIMIT, limits.SEED_LIMIT - 1)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], at_most(limits.MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], at_most(limits.MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[NonEmpty], at_most(limits.MAX_BAD_WORDS)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[TokenId], at_most(limits.MAX_ALLOWED_TOKENS)] | None = None
    prompt_logprobs: NumLogprobs | None = None  # at most --max-logprobs of the server
    # Logprobs of these tokens, instead of the most likely ones.
    logprob_token_ids: Annotated[list[TokenId], at_most(limits.MAX_LOGPROB_TOKEN_IDS)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    thinking_token_budget: Annotated[int, whole(-1, limits.LARGEST_INT)] | None = None  # -1: none
    repetition_detection: Repetition | None = None
    extra_args: ExtraArguments | None = None  # for the operator's logits processors
    vllm_xargs: ExtraArguments | None = None  # the same by vLLM's name

    response_format: limits.GrammarObject | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: limits.GrammarObject | limits.GrammarText | None = None
    guided_regex: limits.GrammarText | None = None
    guided_choice: limits.Choices | None = None
    guided_grammar: limits.GrammarText | None = None

    # llama.cpp's names.
    grammar: limits.GrammarText | None = None  # GBNF, as llama.cpp reads it
    json_schema: limits.GrammarObject | bool | None = None  # the schema of a `response_format`
    repeat_penalty: RepetitionPenalty | None = None  # the same as `repetition_penalty`
    n_predict: Annotated[int, whole(-1, limits.LARGEST_INT)] | None = None  # the same as `max_tokens`; -1: no limit

    truncate_prompt_tokens: NumKept | None = None  # keep so many tokens of the prompt; -1: as many as fit
    truncation_side: Side | None = None  # which end is cut off; null: the right one

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, whole(1, limits.LARGEST_INT)] | None = None  # tokens in one event
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # logprobs show tokens as token_id:N
    request_id: Annotated[str, text(MAX_REQUEST_ID_CHARS, pattern=REQUEST_ID)] | None = None  # part of the answer's id
    priority: Priority | None = None  # lower runs earlier, with --scheduling-policy priority; else no effect
    cache_salt: Annotated[str, text(MAX_CACHE_SALT_CHARS)] | None = None
    timeout_s: Annotated[float, within(0, MAX_TIMEOUT_S, exclusiveMinimum=0)] | None = None

    def params(self, model: ModelInfo, **own: Any) -> SamplingParams:
        """As asked, else the model's own defaults; `own`: what chat and completions each compute in their own way."""
        asked = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.repeat_penalty is not None:
            asked["repetition_penalty"] = self.repeat_penalty
        if self.vllm_xargs is not None:
            asked["extra_args"] = {**self.vllm_xargs, **(self.extra_args or {})}
        if self.repetition_detection is not None:
            asked["repetition_detection"] = RepetitionDetectionParams(
                *msgspec.structs.astuple(self.repetition_detection)
            )
        if self.logit_bias is not None:  # out of range is brought into range; what is no number stays, and is refused
            asked["logit_bias"] = {token: _clamped(bias) for token, bias in self.logit_bias.items()}
        return model.default_params(**{**asked, **own})

    def check(self, num_prompts: int, serving: ServingConfig) -> None:
        for name, twin in self.twins:
            if getattr(self, name) is not None and getattr(self, twin) is not None:
                raise RequestError(f"{name} and {twin} exclude each other: give one", name)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream set to true", "stream_options")
        num_choices = num_prompts * (self.n or 1)
        if num_choices > (limit := max(MAX_CHOICES, serving.max_n)):
            too_many = f"prompts times n are {num_choices} answers, one call may ask for {limit}"
            raise RequestError(f"{too_many}: make several calls", "n" if num_prompts == 1 else "prompt")
        if self.timeout_s is not None and not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            bounds = f"greater than 0 and at most {MAX_TIMEOUT_S:g}"
            raise RequestError(f"timeout_s must be {bounds}, not {self.timeout_s:g}", "timeout_s")

    @property
    def asked_tokens(self) -> int | None:
        """How long the answer may be; None: as long as there is room, where nothing else is the default."""
        if self.n_predict is not None:
            return None if self.n_predict == -1 else self.n_predict
        return self.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None

    @property
    def usage_at_end(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    def submit_options(self) -> dict[str, Any]:
        """What `AsyncLLM.submit` takes beside prompt and parameters."""
        return {"priority": self.priority or 0, "cache_salt": self.cache_salt or "", "timeout_s": self.timeout_s}


def _clamped(bias: float) -> float:
    return min(100.0, max(-100.0, bias)) if math.isfinite(bias) else bias


_SAMPLING = [name for name in SamplingFields.__struct_fields__ if name in SamplingParams.__struct_fields__]
