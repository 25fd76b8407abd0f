"""Turns what a user sends into a request the core can run: tokenizes text, checks the model's limits, draws seeds.

Called by the ways in. After this a request can no longer be wrong, only slow.
"""

import contextlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import msgspec

from quire.config import ServingConfig
from quire.errors import RequestError
from quire.frontend.model import ModelInfo
from quire.frontend.requests import RequestState
from quire.frontend.tokenizer import too_long
from quire.messages import AddRequest, Constraint
from quire.params import ALL, SamplingParams, StructuredOutputs, shown
from quire.structured.spec import GrammarSpec, check

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, {"prompt": …} or {"prompt_token_ids": …}

MAX_CACHE_SALT_CHARS = 256
PRIORITY_LIMIT = 2**31
MAX_LOGPROB_ENTRIES = 1 << 19  # of a server's request: choices times tokens times (logprobs and the token itself)


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]  # only prompts with the same one share cached blocks


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]  # the text that they are, for the output alone
    cache_salt: NotRequired[str]


class InputProcessor:
    def __init__(self, model: ModelInfo, limits: ServingConfig | None = None) -> None:
        """`limits`: of what one request may ask for, where answers are sent to others; None: whatever it wants."""
        self.model = model
        self.limits = limits
        self.seeds = random.Random(model.config.model.seed)

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
        thinks: bool = False,
        owner: str = "",
        wants_vector: bool = False,
        prediction: str = "",
    ) -> RequestState:
        """A checked request with the message that starts it; RequestError says what is wrong.

        `thinks`: the answer may begin with thinking, to which a grammar does not apply. `owner`: a digest of the
        sender's API key. `wants_vector`: see AddRequest. `prediction`: a text that the answer may be like.
        """
        params.verify()
        if isinstance(prompt, Mapping):
            cache_salt = prompt.get("cache_salt") or cache_salt
        text, token_ids = self.tokenize(prompt)
        self._check(token_ids, params, priority, cache_salt)
        constraint = self._constraint(params, token_ids, thinks)
        params = self._with_logprobs(params)
        max_tokens = self._max_tokens(params, len(token_ids))
        complete = msgspec.structs.replace(params, max_tokens=max_tokens, structured_outputs=None)
        message = AddRequest(
            request_id,
            token_ids,
            complete,
            seed=params.seed if params.seed is not None else self.seeds.getrandbits(63),
            choices={choice_idx: [] for choice_idx in range(params.n)},
            eos_ids=self.model.eos_ids,
            bad_words=self._bad_word_ids(params.bad_words),
            priority=priority,
            cache_salt=cache_salt,
            constraint=constraint,
            wants_vector=wants_vector,
            prediction=self._prediction(prediction),
            owner=owner,
        )
        return RequestState(request_id, text, token_ids, complete, message, self.model.tokenizer)

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of a prompt in any of its forms."""
        given: Any = prompt
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                given = prompt["prompt_token_ids"]
            elif "prompt" in prompt:
                given = prompt["prompt"]
            else:
                raise RequestError('a prompt given as a dict needs "prompt" or "prompt_token_ids"')
        if isinstance(given, str):
            return given, self.encode(given)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
        if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
            raise RequestError(f"a prompt is text or a list of token ids, not {type(given).__name__}")
        return text if isinstance(text, str) else None, list(given)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; one with so many characters that it cannot fit is refused before it is tokenized."""
        tokenizer = self.model.need_tokenizer("a text")
        tokenizer.check_fits(text, self.model.max_model_len)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check(self, token_ids: list[int], params: SamplingParams, priority: int, cache_salt: str) -> None:
        limit, vocab_size = self.model.max_model_len, self.model.vocab_size
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        if len(token_ids) >= limit:
            raise too_long(len(token_ids), limit)
        _in_vocabulary("prompt", token_ids, vocab_size)
        _in_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
        _in_vocabulary("logit_bias", params.logit_bias, vocab_size)
        _in_vocabulary("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
        _in_vocabulary("logprob_token_ids", params.logprob_token_ids or (), vocab_size)
        is_whole = isinstance(priority, int) and not isinstance(priority, bool)
        if not is_whole or not -PRIORITY_LIMIT <= priority < PRIORITY_LIMIT:
            raise RequestError("priority must be a whole number of 32 bits", "priority")
        if not isinstance(cache_salt, str) or len(cache_salt) > MAX_CACHE_SALT_CHARS:
            raise RequestError(f"cache_salt must be text of at most {MAX_CACHE_SALT_CHARS} characters", "cache_salt")

    def _constraint(self, params: SamplingParams, token_ids: list[int], thinks: bool) -> Constraint | None:
        budget = params.thinking_token_budget
        grammar: GrammarSpec | None = None
        if params.structured_outputs is not None:
            grammar = grammar_spec(params.structured_outputs)
            if params.min_tokens:
                raise RequestError(
                    "min_tokens cannot be combined with structured output, whose grammar says when it ends: "
                    "leave it out",
                    "min_tokens",
                )
            if not self.model.eos_ids:
                raise RequestError("structured output needs a token that ends an answer, and this model names none")
        thinking = self.model.thinking(token_ids, budget) if thinks or budget is not None else None
        if budget is not None and thinking is None:
            raise RequestError(
                "thinking_token_budget is for models that think, and this one is not known to: leave it out",
                "thinking_token_budget",
                hint="--reasoning-parser",
            )
        if grammar is None and budget is None:
            return None
        _ = self.model.vocabulary  # made here, where it may take its time
        return Constraint(grammar, thinking)

    def _with_logprobs(self, params: SamplingParams) -> SamplingParams:
        """With the number of logprobs that is meant; RequestError if it is above the limit."""
        vocab_size = self.model.vocab_size
        limit = vocab_size
        if self.limits is not None:
            if params.n > self.limits.max_n:
                raise RequestError(f"n must be at most {self.limits.max_n}, not {params.n}", "n")
            limit = vocab_size if self.limits.max_logprobs == ALL else min(self.limits.max_logprobs, vocab_size)
        changes = {}
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            count = vocab_size if asked == ALL else asked
            if count is not None and count > limit:
                raise RequestError(f"{name} must be at most {limit}, not {shown(count)}", name)
            if count != asked:
                changes[name] = count
        if params.logprob_token_ids is not None:
            changes["logprobs"] = len(params.logprob_token_ids)
        return msgspec.structs.replace(params, **changes) if changes else params

    def _prediction(self, text: str) -> list[int]:
        if not text:
            return []
        tokenizer = self.model.need_tokenizer("a prediction")
        limit = self.model.max_model_len
        with contextlib.suppress(RequestError):
            tokenizer.check_fits(text, limit)
            token_ids = tokenizer.encode_as_text(text)
            if len(token_ids) <= limit:
                return token_ids
        raise RequestError(f"the prediction is longer than the context of {limit:,} tokens: shorten it", "prediction")

    def _bad_word_ids(self, words: list[str]) -> list[list[int]]:
        """Each word as it is spelled at the start of a text and after a space."""
        found: list[list[int]] = []
        for word in words:
            tokenizer = self.model.need_tokenizer("bad_words")
            for spelling in (word, " " + word.lstrip()):
                ids = tokenizer.encode_as_text(spelling)
                if ids and ids not in found:
                    found.append(ids)
        return found

    def _max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        """What the context leaves room for, or less where that was asked for.

        The number of logprobs has a limit: an answer for which no length was asked ends before it has too many.
        """
        room = self.model.max_model_len - num_prompt_tokens
        limit = MAX_LOGPROB_ENTRIES
        if self.limits is None:
            return min(params.max_tokens or room, room)
        of_prompt = 0 if params.prompt_logprobs is None else params.n * num_prompt_tokens * (params.prompt_logprobs + 1)
        per_token = 0 if params.logprobs is None else params.n * (params.logprobs + 1)
        asked = min(params.max_tokens or 1, room)
        num_logprobs = of_prompt + per_token * asked
        if num_logprobs > limit:
            raise RequestError(
                f"this asks for {num_logprobs:,} logprobs, and the limit is {limit:,}: "
                "lower max_tokens, n, logprobs or prompt_logprobs"
            )
        if params.max_tokens is not None:
            return asked
        return min(room, (limit - of_prompt) // per_token) if per_token else room


def grammar_spec(asked: StructuredOutputs) -> GrammarSpec:
    """Checked as far as that can be done without compiling it."""
    kind = asked.kind()
    value: Any = {"type": "object"} if kind == "json_object" else getattr(asked, kind)
    try:
        if asked.disable_additional_properties and kind == "json":
            value = _closed(json.loads(value) if isinstance(value, str) else value)
        is_text = kind in ("regex", "grammar", "gbnf") or (kind != "choice" and isinstance(value, str))
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        text.encode()
    except (ValueError, TypeError, RecursionError, AttributeError):  # ValueError: also lone surrogates
        raise RequestError(f"the {kind} of structured_outputs is no valid text or JSON", "structured_outputs") from None
    blanks = "" if asked.disable_any_whitespace else asked.whitespace_pattern
    spec = GrammarSpec("json" if kind == "json_object" else kind, text, blanks)
    check(spec)
    return spec


# Keywords of a JSON schema that hold schemas by names of the user's own, and those that hold values.
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")


def _closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those it lists, unless it says itself which others there may be."""
    if isinstance(schema, list):
        return [_closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for name, inner in schema.items():
        if name in _NAMED_SCHEMAS and isinstance(inner, dict):
            closed[name] = {key: _closed(value) for key, value in inner.items()}
        else:
            closed[name] = inner if name in _VALUES else _closed(inner)
    if "properties" in closed and not closed.keys() & {"additionalProperties", "patternProperties"}:
        closed["additionalProperties"] = False
    return closed


def _in_vocabulary(name: str, token_ids: Any, vocab_size: int) -> None:
    are_ids = set(map(type, token_ids)) == {int} and 0 <= min(token_ids) and max(token_ids) < vocab_size
    if are_ids:
        return
    for token_id in token_ids:  # slower, and says which one is wrong
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise RequestError(f"{name} must hold token ids, not {shown(token_id)}", name)
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name} holds token id {shown(token_id)}, the vocabulary has 0 to {vocab_size - 1}", name
            )
