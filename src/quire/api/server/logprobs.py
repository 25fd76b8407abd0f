"""Log-probabilities in the two shapes of the OpenAI protocol and in vLLM's for prompts.

Used by `chat.py` and `completions.py`. A token that is part of a character shows as U+FFFD; chat also gives its bytes.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.frontend.detokenize import Detokenizer
from quire.frontend.tokenizer import Tokenizer
from quire.params import SamplingParams
from quire.step import TokenLogprobs

LOWEST = -9999.0  # JSON has no infinity; OpenAI's stand-in for it


def token_bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    return tokenizer.token_bytes(token_id) if tokenizer is not None else b"token_id:%d" % token_id


def _encoded(value: Any) -> Any:
    """The JSON of one position, encoded now: encoding thousands in one call would hold up all other requests."""
    return msgspec.Raw(msgspec.json.encode(value))


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    return token_bytes(tokenizer, token_id).decode("utf-8", "replace")


# -- chat --------------------------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None, as_ids: bool = False) -> ChatLogprobs:
    """`as_ids`: tokens are shown as token_id:N."""
    return ChatLogprobs([_encoded(_chat_logprob(entry, tokenizer, as_ids)) for entry in entries])


def _chat_logprob(entry: TokenLogprobs, tokenizer: Tokenizer | None, as_ids: bool) -> ChatLogprob:
    def shown(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        spelling = token_bytes(tokenizer, token_id)
        token = token_text(None, token_id) if as_ids else spelling.decode("utf-8", "replace")
        return token, max(logprob, LOWEST), list(spelling)

    top = [TopLogprob(*shown(token_id, logprob)) for token_id, logprob in zip(entry.top_ids, entry.top_logprobs)]
    return ChatLogprob(*shown(entry.token_id, entry.logprob), top)


# -- completions -------------------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    """Columns, one entry per token; `text_offset` counts characters from the beginning of the choice's text."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionLogprobsWriter:
    """Turns the tokens of one choice into columns, in pieces where the answer is streamed."""

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        as_ids: bool = False,
    ) -> None:
        """`as_ids`: tokens are shown as token_id:N."""
        self.num_top = params.logprobs or 0
        self.tokenizer = tokenizer
        self.shown = None if as_ids else tokenizer
        self.prompt_ids = prompt_ids
        self.offset = 0
        self.detokenizer = None
        if tokenizer is not None:
            self.detokenizer = Detokenizer(
                tokenizer,
                prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )

    def write(self, entries: Sequence[TokenLogprobs], columns: CompletionLogprobs | None = None) -> CompletionLogprobs:
        columns = columns if columns is not None else CompletionLogprobs()
        for entry in entries:
            self._add(columns, entry.token_id, entry)
            if self.detokenizer is not None:
                self.offset += len(self.detokenizer.feed((entry.token_id,)))
        return columns

    def echo(self, text: str, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Columns of the prompt, which is `text`; its first token has no probability."""
        columns = CompletionLogprobs()
        tokenizer = self.tokenizer
        detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        for token_id, entry in zip(self.prompt_ids, [None, *entries]):
            self._add(columns, token_id, entry)
            if tokenizer is None or detokenizer is None:
                continue
            self.offset += len(detokenizer.feed((token_id,)))
            spelling = token_text(tokenizer, token_id) if tokenizer.is_special(token_id) else ""
            if text.startswith(spelling, self.offset):  # special tokens may be spelled out, or added by the tokenizer
                self.offset += len(spelling)
        return columns

    def _add(self, columns: CompletionLogprobs, token_id: int, entry: TokenLogprobs | None) -> None:
        columns.text_offset.append(self.offset)
        columns.tokens.append(token_text(self.shown, token_id))
        columns.token_logprobs.append(max(entry.logprob, LOWEST) if entry is not None else None)
        columns.top_logprobs.append(self._top(entry) if entry is not None else None)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the token itself, by their text."""
        if not self.num_top:
            return {}
        top: dict[str, float] = {}
        for token_id, logprob in zip(entry.top_ids[: self.num_top], entry.top_logprobs):
            top.setdefault(token_text(self.shown, token_id), max(logprob, LOWEST))
        top.setdefault(token_text(self.shown, entry.token_id), max(entry.logprob, LOWEST))
        return _encoded(top)


# -- prompts, as vLLM shows them ---------------------------------------------------------------------------------------


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


def prompt_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> PromptLogprobs:
    shown: PromptLogprobs = [None]  # nothing comes before the first token
    for entry in entries:
        ranks = range(1, len(entry.top_ids) + 1)
        candidates = [
            (entry.token_id, entry.logprob, entry.rank),
            *zip(entry.top_ids, entry.top_logprobs, ranks),
        ]
        by_id: dict[int, PromptLogprob] = {}
        for token_id, logprob, rank in candidates:
            by_id.setdefault(token_id, PromptLogprob(max(logprob, LOWEST), rank, token_text(tokenizer, token_id)))
        shown.append(_encoded(by_id))
    return shown
