"""From what a user sends to a request the core can run: text becomes ids, limits of the model are checked, seeds are drawn.

Called by the ways in. After this a request can no longer be wrong, only slow.
"""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.errors import RequestError, TooLongError
from quire.frontend.model import Model
from quire.frontend.requests import RequestState
from quire.messages import AddRequest, Constraint
from quire.params import SamplingParams, StructuredOutputs
from quire.structured.spec import GrammarSpec, check

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, {"prompt": …} or {"prompt_token_ids": …}

MAX_CACHE_SALT_CHARS = 256
PRIORITY_LIMIT = 2**31
PLAUSIBLE_TOKEN_CHARS = 8  # of ordinary text


class InputProcessor:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.seeds = random.Random(model.config.model.seed)

    def request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0, cache_salt: str = "", thinks: bool = False
    ) -> RequestState:
        """A checked request with the messages that start it; RequestError says what is wrong.

        `thinks`: the answer may begin with thinking, which a grammar leaves alone."""
        params.verify()
        if isinstance(prompt, Mapping):
            cache_salt = prompt.get("cache_salt") or cache_salt
        text, token_ids = self.tokenize(prompt)
        self._check(token_ids, params, priority, cache_salt)
        room = self.model.max_model_len - len(token_ids)
        constraint = self._constraint(params, token_ids, thinks)
        complete = msgspec.structs.replace(params, max_tokens=min(params.max_tokens or room, room), structured_outputs=None)
        if complete.min_tokens > complete.max_tokens:
            complete.min_tokens = complete.max_tokens
        seed = params.seed if params.seed is not None else self.seeds.getrandbits(63)
        bad_words = self._bad_word_ids(params.bad_words)
        messages = [
            AddRequest(
                request_id, choice_idx, token_ids, self._for_choice(complete, choice_idx), seed, self.model.eos_ids,
                bad_words=bad_words, priority=priority, cache_salt=cache_salt, constraint=constraint,
            )
            for choice_idx in range(params.n)
        ]  # fmt: skip
        return RequestState(request_id, text, token_ids, complete, messages, self.model.tokenizer)

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of a prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                prompt = prompt["prompt_token_ids"]
            elif "prompt" in prompt:
                prompt = prompt["prompt"]
            else:
                raise RequestError('a prompt given as a dict needs "prompt" or "prompt_token_ids"')
        if isinstance(prompt, str):
            if "\0" in prompt:
                raise RequestError("the prompt holds a null character: remove it")
            tokenizer = self.model.need_tokenizer("a text prompt")
            if len(prompt) > PLAUSIBLE_TOKEN_CHARS * (limit := self.model.max_model_len):
                fewest = len(prompt) // tokenizer.longest_token_chars
                if fewest >= limit:  # known without the time it takes to tokenize it
                    raise TooLongError(_too_long(f"at least {fewest:,}", limit))
            return prompt, tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
        return None, list(prompt)

    def _check(self, token_ids: list[int], params: SamplingParams, priority: int, cache_salt: str) -> None:
        limit, vocab_size = self.model.max_model_len, self.model.vocab_size
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        if len(token_ids) >= limit:
            raise TooLongError(_too_long(f"{len(token_ids):,}", limit))
        _in_vocabulary("the prompt", token_ids, vocab_size)
        _in_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
        _in_vocabulary("logit_bias", params.logit_bias, vocab_size)
        _in_vocabulary("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
        if not isinstance(priority, int) or isinstance(priority, bool) or not -PRIORITY_LIMIT <= priority < PRIORITY_LIMIT:
            raise RequestError("priority must be a whole number of 32 bits")
        if not isinstance(cache_salt, str) or len(cache_salt) > MAX_CACHE_SALT_CHARS:
            raise RequestError(f"cache_salt must be text of at most {MAX_CACHE_SALT_CHARS} characters")

    def _constraint(self, params: SamplingParams, token_ids: list[int], thinks: bool) -> Constraint | None:
        budget, grammar = params.thinking_token_budget, None
        if params.structured_outputs is not None:
            grammar = grammar_spec(params.structured_outputs)
            if params.min_tokens:
                raise RequestError("min_tokens cannot be combined with structured output, whose grammar says when it ends: leave it out")
            if not self.model.eos_ids:
                raise RequestError("structured output needs a token that ends an answer, and this model names none")
        thinking = self.model.thinking(token_ids, budget) if thinks or budget is not None else None
        if budget is not None and thinking is None:
            raise RequestError("thinking_token_budget is for models that think, which this one is not known to: see --reasoning-parser")
        if grammar is None and budget is None:
            return None
        _ = self.model.vocabulary  # made here, where it may take its time
        return Constraint(grammar, thinking)

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

    @staticmethod
    def _for_choice(params: SamplingParams, choice_idx: int) -> SamplingParams:
        """Prompt logprobs are the same for every choice: only the first computes them."""
        return params if choice_idx == 0 else msgspec.structs.replace(params, prompt_logprobs=None)


def grammar_spec(asked: StructuredOutputs) -> GrammarSpec:
    """Checked as far as that can be done without compiling it."""
    kind = asked.kind()
    value = {"type": "object"} if kind == "json_object" else getattr(asked, kind)
    is_text = kind in ("regex", "grammar") or (kind != "choice" and isinstance(value, str))
    try:
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        text.encode()
    except (ValueError, TypeError, RecursionError, AttributeError):  # ValueError: also lone surrogates
        raise RequestError(f"the {kind} of structured_outputs is no valid text or JSON") from None
    spec = GrammarSpec("json" if kind == "json_object" else kind, text)
    check(spec)
    return spec


def _too_long(num_tokens: str, limit: int) -> str:
    return f"the prompt has {num_tokens} tokens and the limit is {limit:,} for prompt and answer together: shorten it or raise --max-model-len"


def _in_vocabulary(what: str, token_ids: Any, vocab_size: int) -> None:
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise RequestError(f"{what} must hold token ids, not {token_id!r:.40}")
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{what} holds token id {token_id}, the vocabulary has 0 to {vocab_size - 1}")
