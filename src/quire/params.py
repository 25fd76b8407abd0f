"""SamplingParams: how the tokens of one request are chosen, with vLLM's field names.

Built by users and the server's protocol code, carried in messages, read by core, frontend and sampler.
Must not know anything about models: limits that depend on one (vocabulary, context) are checked by the frontend.
"""

import enum
import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from quire.errors import RequestError

# Bounds on what one request may cost, checked before anything is allocated for it. Servers have lower ones for n and
# logprobs: max_n and max_logprobs of `config/serving.py`.
MAX_N = 16_384
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PATTERN_TOKENS = 1024  # of repetition_detection
MAX_PATTERN_COUNT = 1024
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 256
MAX_BAD_WORDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 16_384
MAX_EXTRA_VALUES = 1024  # numbers, texts, lists and objects in extra_args
MAX_TEXT_CHARS = 16 << 20  # of any text a request carries
MAX_GRAMMAR_CHARS = 131_072  # of a schema, pattern or grammar
MAX_BLANKS_CHARS = 256  # of a pattern of blanks
MAX_GRAMMAR_VALUES = 32_768  # names and values in a schema
MAX_GRAMMAR_CHOICES = 10_000
MIN_TEMPERATURE = 1e-5  # anything below samples greedily: dividing by it would overflow
MAX_TEMPERATURE = 100.0
SEED_LIMIT = 2**63
LARGEST_INT = 2**63 - 1  # what messages and tensors hold
ALL = -1  # of logprobs and prompt_logprobs: those of the whole vocabulary

Converted = TypeVar("Converted", bound=msgspec.Struct)

_CONTAINERS = frozenset((dict, list, tuple))


def free(max_values: int, **schema: Any) -> msgspec.Meta:
    """Declares JSON of any shape with at most `max_values` names and values; `check_json` enforces the limit."""
    return msgspec.Meta(extra={"max_values": max_values}, extra_json_schema={"x-max-values": max_values, **schema})


GrammarText = Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARS)]
BlanksText = Annotated[str, msgspec.Meta(max_length=MAX_BLANKS_CHARS)]
GrammarObject = Annotated[dict[str, Any], free(MAX_GRAMMAR_VALUES, maxProperties=MAX_GRAMMAR_VALUES)]
Choices = Annotated[list[GrammarText], msgspec.Meta(max_length=MAX_GRAMMAR_CHOICES)]


class RequestOutputKind(enum.Enum):
    """What each of the outputs holds that `AsyncLLM.generate` gives."""

    CUMULATIVE = 0  # all there is so far
    DELTA = 1  # what is new since the output before
    FINAL_ONLY = 2  # everything, once: there is one output


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Ends an answer whose last tokens are a pattern `min_count` times over. A max_pattern_size of 0: never."""

    max_pattern_size: int = 0  # tokens
    min_pattern_size: int = 0  # 0: the same as 1
    min_count: int = 0

    def __post_init__(self) -> None:
        name = "repetition_detection"
        _whole(name, self.max_pattern_size, 0, MAX_PATTERN_TOKENS, "max_pattern_size")
        _whole(name, self.min_pattern_size, 0, self.max_pattern_size, "min_pattern_size")
        _whole(name, self.min_count, 2 if self.max_pattern_size else 0, MAX_PATTERN_COUNT, "min_count")

    def found(self, token_ids: Sequence[int], num_output_tokens: int) -> bool:
        """Whether `token_ids` end with a repeated pattern; only the last `num_output_tokens` are looked at."""
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            if size * self.min_count > num_output_tokens:
                return False
            if token_ids[-1 - size] != token_ids[-1]:
                continue
            pattern = token_ids[-size:]
            if all(token_ids[-size * nth : -size * (nth - 1)] == pattern for nth in range(2, self.min_count + 1)):
                return True
        return False


SHAPES = ("json", "json_object", "regex", "choice", "grammar", "gbnf", "structural_tag")


class StructuredOutputs(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an answer must look like: exactly one of the SHAPES is set; the other fields say more about it."""

    json: GrammarObject | bool | GrammarText | None = None  # a JSON schema, or its text
    json_object: bool | None = None  # any JSON object
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None  # EBNF as xgrammar reads it, or Lark
    gbnf: GrammarText | None = None  # a grammar as llama.cpp reads it
    structural_tag: GrammarObject | GrammarText | None = None  # xgrammar's format: text with tagged parts
    disable_any_whitespace: bool = False  # JSON without blanks between its parts
    disable_additional_properties: bool = False  # objects of a schema have the properties it lists, and no others
    whitespace_pattern: BlanksText | None = None  # a regular expression for the blanks between the parts of JSON

    def __post_init__(self) -> None:
        if self.whitespace_pattern and self.disable_any_whitespace:
            raise RequestError(
                "whitespace_pattern and disable_any_whitespace exclude each other: give one", "structured_outputs"
            )

    def kind(self) -> str:
        """The name of the shape that is set; RequestError unless it is exactly one."""
        given = [name for name in SHAPES if getattr(self, name) not in (None, False)]
        if self.json is False:
            given.append("json")
        if len(given) != 1:
            names = ", ".join(SHAPES)
            raise RequestError(
                f"structured_outputs must hold exactly one of {names}, not {len(given)}", "structured_outputs"
            )
        return given[0]


StructuredOutputsParams = StructuredOutputs  # vLLM's name


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, dict=False):
    """Parameters of one request. `None` means "the model's default, else OpenAI's"."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: list[str] = []
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None  # -1: of the whole vocabulary
    prompt_logprobs: int | None = None  # likewise
    logprob_token_ids: list[int] | None = None  # logprobs of these tokens, instead of the most likely ones
    flat_logprobs: bool = False  # logprobs as a FlatLogprobs
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None  # tokens of thinking after which it is closed; -1: no limit
    repetition_detection: RepetitionDetectionParams | None = None
    skip_reading_prefix_cache: bool | None = None  # compute all of the prompt
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # a stream's reader gets so many tokens at once, but for the first and the last
    extra_args: dict[str, Any] = {}  # for the operator's logits processors

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.bad_words = list(self.bad_words or [])
        self.logit_bias = dict(self.logit_bias or {})
        self.top_k = 0 if self.top_k in (-1, None) else self.top_k
        if self.extra_args is None:
            self.extra_args = {}
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.logprob_token_ids is not None:
            self.logprob_token_ids = list(dict.fromkeys(self.logprob_token_ids))
        self.structured_outputs = _converted("structured_outputs", self.structured_outputs, StructuredOutputs)
        self.repetition_detection = _converted(
            "repetition_detection", self.repetition_detection, RepetitionDetectionParams
        )
        self.verify()

    @staticmethod
    def from_optional(**fields: Any) -> "SamplingParams":
        """With None for the default of any field; logit_bias may name tokens by text, and is brought into range."""
        asked = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        if "logit_bias" in asked:
            bias = asked["logit_bias"]
            try:
                asked["logit_bias"] = {int(token): min(100.0, max(-100.0, value)) for token, value in bias.items()}
            except (AttributeError, TypeError, ValueError):
                raise RequestError("logit_bias must map token ids to numbers", "logit_bias") from None
        return SamplingParams(**asked)

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    def verify(self) -> None:
        """Raises RequestError for the first value out of range."""
        self._floats()
        _whole("n", self.n, 1, MAX_N)
        _whole("top_k", self.top_k, 0, LARGEST_INT)
        _whole("min_tokens", self.min_tokens, 0, LARGEST_INT)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, LARGEST_INT)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), ALL, LARGEST_INT)
        if self.stream_interval is not None:
            _whole("stream_interval", self.stream_interval, 1, LARGEST_INT)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind must be a RequestOutputKind, not {shown(self.output_kind)}", "output_kind")
        if not isinstance(self.extra_args, dict):
            raise RequestError(f"extra_args must be an object, not {shown(self.extra_args)}", "extra_args")
        check_json("extra_args", self.extra_args, MAX_EXTRA_VALUES)
        if self.thinking_token_budget is not None:
            _whole("thinking_token_budget", self.thinking_token_budget, 0, LARGEST_INT)
        if self.seed is not None:
            _whole("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        self._lists()

    def _floats(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, MAX_TEMPERATURE),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.0, 100.0),
        ):
            value = getattr(self, name)
            if not _is_finite(value):
                raise RequestError(f"{name} must be a finite number, not {shown(value)}", name)
            if not low <= value <= high:
                raise RequestError(f"{name} must be between {low:g} and {high:g}, not {value:g}", name)
        if self.top_p == 0.0:
            raise RequestError("top_p must be greater than 0", "top_p")
        if self.repetition_penalty == 0.0:
            raise RequestError("repetition_penalty must be greater than 0", "repetition_penalty")

    def _lists(self) -> None:
        _strings("stop", self.stop, MAX_STOP_STRINGS)
        _strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        if self.logprob_token_ids is not None:
            self._named_logprobs(self.logprob_token_ids)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids instead", "stop")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries, the limit is {MAX_LOGIT_BIAS}", "logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias", token_id, 0, LARGEST_INT, "a token id of logit_bias")
            if not _is_finite(bias) or not -100.0 <= bias <= 100.0:
                raise RequestError(f"logit_bias values must be between -100 and 100, not {shown(bias)}", "logit_bias")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids must not be empty; leave it out to allow every token", "allowed_token_ids"
                )
            _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS)

    def _named_logprobs(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise RequestError("logprob_token_ids must not be empty; leave it out", "logprob_token_ids")
        _token_ids("logprob_token_ids", token_ids, MAX_LOGPROB_TOKEN_IDS)
        if self.logprobs not in (None, len(token_ids)):
            raise RequestError(
                f"logprobs must be left out where logprob_token_ids is given, or be {len(token_ids)}, the number of "
                f"tokens in it, not {self.logprobs}",
                "logprobs",
            )


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """Of `LLM.beam_search`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # of no effect: beams are compared by the model's own probabilities
    length_penalty: float = 1.0  # a beam's logprob is divided by its length to this power
    include_stop_str_in_output: bool = False  # of no effect: the token that ends a beam is one of its tokens
    skip_special_tokens: bool = True  # of a beam's text

    def __post_init__(self) -> None:
        _whole("beam_width", self.beam_width, 1, MAX_N)
        _whole("max_tokens", self.max_tokens, 1, LARGEST_INT)
        for name in ("temperature", "length_penalty"):
            if not _is_finite(getattr(self, name)):
                raise RequestError(f"{name} must be a finite number, not {shown(getattr(self, name))}", name)


def _converted(name: str, value: Any, kind: type[Converted]) -> Converted | None:
    """A value that may be given as a dict, as the struct it stands for."""
    if value is None or isinstance(value, kind):
        return value
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{name}: {error}", name) from None


def check_json(name: str, value: Any, max_values: int) -> None:
    """RequestError unless this is JSON of at most `max_values` values, with numbers and texts that messages can hold.

    Looks at no more than `max_values` values, whatever it is given."""
    values = [value]
    num_values = 1
    while values:
        value = values.pop()
        kind = type(value)
        if kind is str:
            _text(name, value)
        elif kind in _CONTAINERS:
            num_values += 2 * len(value) if kind is dict else len(value)
            if num_values > max_values:
                raise RequestError(f"{name} holds more than {max_values} values, which is the limit", name)
            values += value
            if kind is dict:
                if set(map(type, value)) - {str}:
                    raise RequestError(f"{name} must be JSON: the keys of an object must be text", name)
                values += value.values()
        elif kind is int:
            if not -LARGEST_INT <= value <= LARGEST_INT:
                raise RequestError(f"{name} holds a whole number of more than 64 bits", name)
        elif kind is float:
            if not math.isfinite(value):
                raise RequestError(f"{name} holds a number that is not finite", name)
        elif kind is not bool and value is not None:
            raise RequestError(f"{name} must be JSON, which {kind.__name__} is not", name)


def _text(name: str, value: str) -> None:
    if len(value) > MAX_TEXT_CHARS:
        raise RequestError(f"{name} holds a text of {len(value)} characters, the limit is {MAX_TEXT_CHARS}", name)
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds a lone surrogate (half of a UTF-16 pair)", name) from None


def _token_ids(name: str, values: Sequence[Any], limit: int) -> None:
    if len(values) > limit:
        raise RequestError(f"{name} has {len(values)} entries, the limit is {limit}", name)
    if not values:
        return
    all_ints = set(map(type, values)) == {int}
    if not all_ints or not 0 <= min(values) <= max(values) <= LARGEST_INT:
        for token_id in values:  # slower, and says which
            _whole(name, token_id, 0, LARGEST_INT)


def _is_finite(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _whole(name: str, value: object, low: int, high: int, what: str | None = None) -> None:
    """`what`: how the message calls the value, where it is not the field itself."""
    what = what or name
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{what} must be a whole number, not {shown(value)}", name)
    if not low <= value <= high:
        raise RequestError(f"{what} must be at least {low} and at most {high}, not {shown(value)}", name)


def shown(value: object) -> str:
    """A value as an error message shows it, cut short; Python refuses to print numbers of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a huge number"
    return f"{value!r:.40}"


def _strings(name: str, values: list[Any], limit: int) -> None:
    if len(values) > limit:
        raise RequestError(f"{name} has {len(values)} entries, the limit is {limit}", name)
    for value in values:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{name} must hold non-empty strings, not {shown(value)}", name)
        if len(value) > MAX_STOP_CHARS:
            raise RequestError(f"an entry of {name} has {len(value)} characters, the limit is {MAX_STOP_CHARS}", name)
        _text(name, value)
