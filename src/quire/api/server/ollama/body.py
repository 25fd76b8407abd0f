"""Bodies of Ollama's protocol: what messages, options and formats may hold.

Decoded by `generate.py` and `models.py`, read by `translate.py`. Like all bodies they declare how much each field may
hold (`fields.py`).
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from quire import params as limits
from quire.api.server.fields import (
    MAX_MESSAGE_VALUES,
    MAX_MESSAGES,
    Name,
    NonEmpty,
    NumLogprobs,
    Penalty,
    Refusals,
    RepetitionPenalty,
    RequestBody,
    Text,
    at_most,
    given,
    whole,
    within,
)
from quire.api.server.shape import Tools
from quire.params import GrammarObject, free

Number = Annotated[int, whole(-limits.LARGEST_INT, limits.LARGEST_INT)]


class OllamaOptions(msgspec.Struct):
    """How tokens are chosen. What is not listed is ignored: it is about how Ollama loads models."""

    temperature: Annotated[float, within(0, limits.MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, within(0, 1, exclusiveMinimum=0)] | None = None
    top_k: Annotated[int, whole(-1, limits.LARGEST_INT)] | None = None
    min_p: Annotated[float, within(0, 1)] | None = None
    seed: Annotated[int, whole(-limits.SEED_LIMIT, limits.SEED_LIMIT - 1)] | None = None  # -1: another every time
    num_predict: Number | None = None  # tokens of the answer; 0 and less: as many as the context has room for
    stop: NonEmpty | Annotated[list[NonEmpty], at_most(limits.MAX_STOP_STRINGS)] | None = None
    repeat_penalty: RepetitionPenalty | None = None  # of all tokens so far, not of the last few
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_ctx: Number | None = None  # at most the server's context, which is never made smaller
    mirostat: Number | None = None  # 0, or refused
    tfs_z: float | None = None  # 1, or refused
    typical_p: float | None = None  # 1, or refused


class OllamaFields(RequestBody, kw_only=True):
    """What both have in common."""

    no_effect: ClassVar[frozenset[str]] = frozenset(("keep_alive", "truncate", "shift"))
    refused: ClassVar[Refusals] = {"template": given, "images": given}

    model: Name | None = None  # with or without :latest
    stream: bool | None = None  # null: true
    format: Literal["", "json"] | GrammarObject | None = None  # any JSON object, or one of this schema
    think: bool | Literal["low", "medium", "high"] | None = None  # null: as the model does by itself
    options: OllamaOptions | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None  # at most --max-logprobs of the server


class OllamaFunction(msgspec.Struct):
    name: Name
    arguments: Annotated[dict[str, Any], free(MAX_MESSAGE_VALUES, maxProperties=MAX_MESSAGE_VALUES)] = {}


class OllamaCall(msgspec.Struct):
    function: OllamaFunction
    id: Name | None = None


class OllamaMessage(msgspec.Struct):
    role: Name
    content: Text | None = None
    thinking: Text | None = None  # of an earlier answer
    tool_calls: Annotated[list[OllamaCall], at_most(MAX_MESSAGES)] | None = None
    tool_name: Name | None = None  # of the tool whose result this is
    tool_call_id: Name | None = None
    images: Annotated[list[Text], at_most(MAX_MESSAGES)] | None = None  # none, or refused


class OllamaChatRequest(OllamaFields, kw_only=True):
    """A conversation in Ollama's form. Without messages nothing is generated."""

    messages: Annotated[list[OllamaMessage], at_most(MAX_MESSAGES)] | None = None
    tools: Tools | None = None


class GenerateRequest(OllamaFields, kw_only=True):
    """A prompt in Ollama's form. Without one nothing is generated."""

    refused: ClassVar[Refusals] = {
        **OllamaFields.refused,
        "suffix": given,
        "context": given,
        "width": given,
        "height": given,
        "steps": given,
    }

    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None  # true: the prompt is given to the model as it is, without the template


class ShowRequest(RequestBody, kw_only=True):
    no_effect: ClassVar[frozenset[str]] = frozenset(("verbose",))

    model: Name | None = None
    name: Name | None = None  # older name of the same
