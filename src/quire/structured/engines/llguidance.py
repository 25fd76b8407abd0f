"""The llguidance engine. The library reads JSON schemas (it refuses what it does not know), patterns and Lark grammars.

Used by `compiler.py`. Grammars compile lazily, so their cost shows while matching: the library's own limits bound it,
and a matcher that hits one allows no further token.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy

from quire.errors import RequestError
from quire.messages import Vocabulary
from quire.structured.engines.base import Grammar, GrammarEngine, Matcher
from quire.structured.grammars.gbnf import gbnf_grammar
from quire.structured.grammars.json_grammar import blanks_of
from quire.structured.spec import GrammarSpec, is_lark

# How many of a grammar's alternatives may be open at one place. Accepting a token holds Python's lock, for 0.1 s at
# that size.
MAX_ROW = 1000
_BLANKS = r"( |\n[ \t]{0,16})?"  # as in our own grammars: their number is bounded


class LLGuidance(GrammarEngine):
    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self.vocabulary = vocabulary
        tokenizer = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=vocabulary.size, eos_token=vocabulary.stop_ids)

    @staticmethod
    def lower(spec: GrammarSpec, blanks: str | None = None) -> GrammarSpec:
        import llguidance

        make = llguidance.LLMatcher
        if spec.kind == "json":
            schema = json.loads(spec.text)
            if not isinstance(schema, dict):
                raise RequestError("the llguidance engine takes schemas that are objects: write {} for true.")
            if "x-guidance" in schema:
                raise RequestError("x-guidance is not supported: remove it.")
            if blanks and not blanks_of(blanks).nullable:
                raise RequestError("with the llguidance engine a whitespace_pattern must match nothing, too: add a ?.")
            options: Any = {"whitespace_flexible": False} if blanks == "" else {"whitespace_pattern": blanks or _BLANKS}
            return GrammarSpec(spec.kind, make.grammar_from_json_schema(spec.text, overrides=options))
        if spec.kind == "regex":
            return GrammarSpec(spec.kind, make.grammar_from_regex(spec.text))
        if spec.kind == "choice":
            choices = " | ".join(json.dumps(choice) for choice in dict.fromkeys(json.loads(spec.text)))
            return GrammarSpec(spec.kind, make.grammar_from_lark(f"start: {choices}"))
        if spec.kind == "grammar" and is_lark(spec.text):
            return GrammarSpec(spec.kind, make.grammar_from_lark(spec.text))
        if spec.kind in ("grammar", "gbnf"):
            return GrammarSpec(spec.kind, make.grammar_from_lark(_as_lark(gbnf_grammar(spec.text))))
        raise RequestError(f"{spec.kind} needs the xgrammar engine.")

    def compile_lowered(self, spec: GrammarSpec) -> Grammar:
        import llguidance

        limits = llguidance.LLParserLimits(max_items_in_row=MAX_ROW)
        matcher = llguidance.LLMatcher(self._tokenizer, spec.text, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(f"the {spec.kind} cannot be compiled: {_sentence(matcher.get_error())}.")
        if matcher.get_grammar_warnings():
            raise RequestError(
                f"the {spec.kind} would not be honoured: {_sentence(matcher.get_grammar_warnings()[0])}."
            )
        return _Grammar(matcher, self.vocabulary, len(spec.text))


class _Tokens:
    """The vocabulary as the library wants it: one entry for each logit, none empty."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [token or b"\xff" for token in vocabulary.tokens]  # 0xff is in no text
        self.tokens += [b"\xff"] * (vocabulary.size - len(self.tokens))
        padding = range(len(vocabulary.tokens), vocabulary.size)
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.stop_ids, *padding})
        self.eos_token_id = vocabulary.stop_ids[0]
        hidden = set(self.special_token_ids)
        self._ids = {token: token_id for token_id, token in enumerate(self.tokens) if token_id not in hidden}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """The text as tokens, always the longest that fits.

        The library asks this only for texts that must follow, and then allows no other tokenization of them.
        """
        data = text.encode() if isinstance(text, str) else text
        token_ids: list[int] = []
        start = 0
        while start < len(data):
            lengths = range(min(self._longest, len(data) - start), 0, -1)
            length = next((length for length in lengths if data[start : start + length] in self._ids), 0)
            if length:
                token_ids.append(self._ids[data[start : start + length]])
            start += max(length, 1)
        return token_ids


class _Grammar(Grammar):
    def __init__(self, matcher: Any, vocabulary: Vocabulary, num_chars: int) -> None:
        self._initial = matcher  # never advanced: copied for each request
        self._vocabulary = vocabulary
        self.num_bytes = 64 * num_chars  # an estimate: the library does not tell

    def _matcher(self) -> Matcher:
        return _Matcher(self._initial.deep_copy(), self._vocabulary)


class _Matcher(Matcher):
    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._matcher = matcher
        self._ended = False
        self._stop_ids = frozenset(vocabulary.stop_ids)

    def _accept(self, token_id: int) -> bool:
        if self._ended:
            return False
        if token_id in self._stop_ids:  # the library is not told: it could not roll back a stop token
            self._ended = self.is_complete
            return self._ended
        return self._matcher.try_consume_tokens([token_id]) == 1

    def rollback(self, count: int) -> None:
        if count and self._ended:
            self._ended = False
            count -= 1
        if count and not self._matcher.rollback(count):
            raise ValueError("more tokens are to be taken back than were accepted")

    def _fill(self, mask: numpy.ndarray) -> None:
        if self._matcher.is_error():
            mask[:] = 0
        else:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    @classmethod
    def fill_all(cls, matchers: Sequence[Matcher], masks: numpy.ndarray, rows: Sequence[int]) -> None:
        sound = []
        for matcher, row in zip(matchers, rows):
            if matcher._matcher.is_error():
                masks[row] = 0
            else:
                sound.append((matcher._matcher, row))
        if sound:
            _executor().unsafe_compute_mask_ptr(sound, masks.ctypes.data, masks.shape[1] * 4, masks.shape[0])

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def terminated(self) -> bool:
        return self._ended


@cache
def _executor() -> Any:
    import llguidance

    return llguidance.LLExecutor()


_PIECE = re.compile(r'"((?:[^"\\]|\\.)*)"|\[((?:[^\]\\]|\\.)*)\]|::=')
_CHARACTER = re.compile(r"\\u([0-9a-f]{4})|\\U([0-9a-f]{8})|(.)")


def _as_lark(gbnf: str) -> str:
    """Rules as `gbnf.py` writes them, in Lark. The library's own converter fails for many lists of characters."""

    def piece(found: re.Match[str]) -> str:
        if found[1] is not None:
            return json.dumps(_CHARACTER.sub(lambda each: chr(_point(each)), found[1]), ensure_ascii=False)
        if found[2] is not None:
            return "/[" + _CHARACTER.sub(lambda each: each[0] if each[0] == "-" else _escaped(each), found[2]) + "]/"
        return ":"

    return _PIECE.sub(piece, gbnf.replace("root ::=", "start ::=", 1))


def _point(character: re.Match[str]) -> int:
    digits = character[1] or character[2]
    return int(digits, 16) if digits else ord(character[3])


def _escaped(character: re.Match[str]) -> str:
    return f"\\u{{{_point(character):x}}}"


def _sentence(message: str) -> str:
    """The line that says why; the others show the place in the grammar."""
    lines = [line.strip() for line in message.strip().splitlines()] or ["unknown reason"]
    why = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return why[:200].rstrip(".")
