"""Request bodies: from JSON to checked structs, and the fields that chat and completions have in common.

Used by every handler with a body. Fields nobody knows are ignored with one warning each; fields of the OpenAI protocol that would
change the answer and are not built are refused by name, so that nobody gets an answer to another question.
"""

import logging
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from quire import params as limits
from quire.api.server.errors import FieldError
from quire.frontend.inputs import MAX_CACHE_SALT_CHARS, PRIORITY_LIMIT
from quire.frontend.model import Model
from quire.params import SamplingParams, StructuredOutputs

log = logging.getLogger(__name__)

MAX_CHOICES = 256  # prompts × n of one call
MAX_MESSAGES = 4096

Body = TypeVar("Body", bound=msgspec.Struct)

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)`$")  # how msgspec ends a sentence about a field
_MAX_WARNINGS = 100  # names of unknown fields remembered: clients choose them
_warned: set[str] = set()

# Accepted and without effect: they say something about the client, or ask for what is always so.
NO_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction",
}  # fmt: skip

# name -> would this value change the answer?
Refusals = Mapping[str, Callable[[Any], bool]]


def given(value: Any) -> bool:
    """Anything but a way to say no."""
    return value not in (None, False, "", [], {})


REFUSED: Refusals = {
    "use_beam_search": given, "truncate_prompt_tokens": given, "prompt_embeds": given,
}  # fmt: skip


def decode(body: bytes, kind: type[Body], refused: Refusals = REFUSED) -> Body:
    """The body as a struct; FieldError names what is wrong with it."""
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError(None, f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise FieldError(None, "the body must be a JSON object")
    for name, value in values.items():
        if name in kind.__struct_fields__ or name in NO_EFFECT:
            continue
        if name not in refused:
            _warn_unknown(name)
        elif refused[name](value):
            raise FieldError(name, f"{name} is not supported by this server: leave it out")
    try:
        return msgspec.convert(values, kind, str_keys=True)
    except msgspec.ValidationError as error:
        message = str(error)
        path = _PATH.search(message)
        param = path[1] if path else None
        sentence = message[: path.start()] if path else message
        raise FieldError(param, f"{param}: {sentence}" if param else sentence) from None


def _warn_unknown(name: str) -> None:
    if name not in _warned and len(_warned) < _MAX_WARNINGS:
        _warned.add(name)
        log.warning("unknown field %.80r in a request: ignored, here and from now on", name)


def check_vocabulary(name: str, token_ids: list[int], vocab_size: int) -> None:
    """For ids that are decoded without being part of a request, which the frontend would check."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise FieldError(name, f"{name} must hold token ids from 0 to {vocab_size - 1}")


def within(low: float, high: float | None = None, **more: Any) -> msgspec.Meta:
    """A range for the OpenAPI document. What is outside is refused by SamplingParams, whose sentences people can use."""
    return msgspec.Meta(extra_json_schema={"minimum": low, **({"maximum": high} if high is not None else {}), **more})


Penalty = Annotated[float, within(-2, 2)]
Count = Annotated[int, within(0)]
TokenId = Annotated[int, within(0)]
TokenIds = list[TokenId]
NumLogprobs = Annotated[int, within(0, limits.MAX_LOGPROBS)]
NonEmpty = Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1, "maxLength": limits.MAX_STOP_CHARS})]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with every event, too


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and completions share; null is the same as leaving a field out."""

    model: str | None = None
    n: Annotated[int, within(1, limits.MAX_N)] | None = None
    temperature: Annotated[float, within(0, limits.MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, within(0, 1, exclusiveMinimum=0)] | None = None
    top_k: Annotated[int, within(-1)] | None = None
    min_p: Annotated[float, within(0, 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, within(0, 100, exclusiveMinimum=0)] | None = None
    seed: Annotated[int, within(-limits.SEED_LIMIT, limits.SEED_LIMIT - 1)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: NonEmpty | list[NonEmpty] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[NonEmpty] | None = None
    logit_bias: dict[int, Annotated[float, within(-100, 100)]] | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: NumLogprobs | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    thinking_token_budget: Count | None = None
    extra_args: dict[str, Any] | None = None  # for the operator's logits processors

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, within(-PRIORITY_LIMIT, PRIORITY_LIMIT - 1)] | None = None  # lower runs earlier
    cache_salt: Annotated[str, msgspec.Meta(extra_json_schema={"maxLength": MAX_CACHE_SALT_CHARS})] | None = None
    timeout_s: Annotated[float, within(0, exclusiveMinimum=0)] | None = None

    def params(self, model: Model, **own: Any) -> SamplingParams:
        """As asked, else the model's own defaults; `own` are the protocol's fields."""
        asked = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return model.default_params(**{**asked, **own})

    def check(self, num_prompts: int) -> None:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options needs stream set to true")
        num_choices = num_prompts * (self.n or 1)
        if num_choices > MAX_CHOICES:
            param = "n" if num_prompts == 1 else "prompt"
            raise FieldError(param, f"prompts times n are {num_choices} answers, one call may ask for {MAX_CHOICES}: make several calls")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise FieldError("timeout_s", f"timeout_s must be greater than 0, not {self.timeout_s:g}")

    @property
    def usage_at_end(self) -> bool:
        return bool(self.stream_options is not None and self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        return bool(self.usage_at_end and self.stream_options.continuous_usage_stats)

    def submit_options(self) -> dict[str, Any]:
        """What `AsyncLLM.submit` takes beside prompt and parameters."""
        return {"priority": self.priority or 0, "cache_salt": self.cache_salt or "", "timeout_s": self.timeout_s}


_SAMPLING = [name for name in SamplingFields.__struct_fields__ if name in SamplingParams.__struct_fields__]
