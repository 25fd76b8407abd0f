"""Token ids to text, one at a time: each call gives the text that has become certain, and no character is ever split.

One `Detokenizer` per choice, fed by the frontend as tokens arrive; a new one fed with the tokens already emitted is in
the same state. Must not know requests or stop strings. The time per token does not depend on how many came before.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

if TYPE_CHECKING:
    from quire.frontend.tokenizer import Tokenizer

_BAD = "\ufffd"
_EACH_BYTE = "quire.replace_each_byte"
_BYTE_TOKEN = re.compile("<0x([0-9a-fA-F]{2})>")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return _BAD * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class Pieces(dict[int, bytes]):
    """Token id -> bytes, filled when asked, for vocabularies whose text is the tokens' bytes put together: nearly all.

    Two families: byte-level BPE, whose tokens write bytes as printable characters, and SentencePiece, whose tokens are
    text with ▁ for a space and <0xHH> for a byte on its own.
    """

    def __init__(self, backend: Backend, byte_level: bool, num_stripped: int) -> None:
        self._backend = backend
        self._byte_level = byte_level
        self.num_stripped = num_stripped  # spaces taken off the front of a text
        # `tokenizers` writes one U+FFFD per bad byte for <0xHH> tokens, and one per bad run for byte-level text. (It
        # also replaces good bytes next to bad <0xHH> ones; a stream has shown those by then, so we keep them.)
        self.errors = "replace" if byte_level else _EACH_BYTE

    @classmethod
    def of(cls, backend: Backend) -> "Pieces | None":
        """None where the decoder does more than put bytes together."""
        if backend.decoder is None:
            return None
        state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        kinds = [step["type"] for step in steps]
        if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
            return cls(backend, byte_level=True, num_stripped=0)
        if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
            return None
        if steps[0]["pattern"] != {"String": "▁"} or steps[0]["content"] != " ":
            return None
        if len(steps) == 3:
            return cls(backend, byte_level=False, num_stripped=0)
        strip = steps[3]
        if strip["content"] != " " or strip["stop"] != 0:
            return None
        return cls(backend, byte_level=False, num_stripped=strip["start"])

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._bytes(self._backend.id_to_token(token_id))
        return piece

    def _bytes(self, token: str | None) -> bytes:
        if token is None:  # a padding row of the model's vocabulary
            return b""
        if self._byte_level:
            try:
                return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
            except KeyError:  # an added token, written as it is
                return token.encode()
        if byte_token := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte_token[1])
        return token.replace("▁", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's way to write bytes: Latin-1 where it is printable, else the next character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + idx): byte for idx, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


class Detokenizer:
    """The text of one growing list of tokens.

    `prompt_ids` are the tokens before the first one fed: they give no text, but a continuation keeps the leading space
    that the beginning of a text loses. Without them the deltas add up to `Tokenizer.decode` of all tokens.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        if tokenizer.pieces is not None:
            has_context = any(token_id not in self._skipped for token_id in prompt_ids)
            self._text: _ByteText | _WindowText = _ByteText(tokenizer.pieces, has_context)
        else:
            unspaced_ids = frozenset() if spaces_between_special_tokens else tokenizer.added_ids
            last_ids = prompt_ids[-_WindowText.CONTEXT * 2 :]
            context = [token_id for token_id in last_ids if token_id not in self._skipped]
            self._text = _WindowText(tokenizer.backend, context, unspaced_ids)

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text these tokens made certain; what may still change stays inside."""
        skipped, step = self._skipped, self._text.step
        return "".join([step(token_id) for token_id in token_ids if token_id not in skipped])

    def feed_one(self, token_id: int) -> str:
        """As `feed`: what a stream does for every token."""
        return "" if token_id in self._skipped else self._text.step(token_id)

    def flush(self) -> str:
        """The rest, at the end of the tokens: bytes that never became a character come out as U+FFFD."""
        return self._text.flush()


class _ByteText:
    """Bytes of tokens through an incremental UTF-8 decoder."""

    def __init__(self, pieces: Pieces, has_context: bool) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")(pieces.errors).decode
        self._to_strip = 0 if has_context else pieces.num_stripped

    def step(self, token_id: int) -> str:
        text = self._decode(self._pieces[token_id])
        return self._strip(text) if self._to_strip else text

    def flush(self) -> str:
        return self._strip(self._decode(b"", True))

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(" "):
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text


class _WindowText:
    """Any decoder: decode the last few tokens with and without the new ones; the difference is new text."""

    CONTEXT = 6  # tokens kept before the new ones: what a decoder may look back at
    MAX_HELD = 8  # tokens without a whole character: one has at most 4 bytes, so these are simply bad bytes

    def __init__(self, backend: Backend, context: list[int], unspaced_ids: frozenset[int]) -> None:
        self._backend = backend
        self._context = context[-self.CONTEXT :]
        self._context_text = self._decode(self._context)
        self._held: list[int] = []
        self._unspaced_ids = unspaced_ids
        self._last_id = -1

    def step(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        if text.endswith(_BAD) and len(self._held) < self.MAX_HELD:
            return ""
        delta = self._release(text)
        if {token_id, self._last_id} <= self._unspaced_ids:
            delta = delta.lstrip(" ")
        self._last_id = token_id
        return delta

    def flush(self) -> str:
        return self._release(self._decode(self._context + self._held))

    def _release(self, text: str) -> str:
        delta = text[len(self._context_text) :]
        self._context = (self._context + self._held)[-self.CONTEXT :]
        self._context_text = self._decode(self._context)
        self._held = []
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False) if token_ids else ""
