"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file, which holds a vocabulary but only names its rules.

Called by `tokenizer.py` alone. Knows the tokenizer kinds of GGUF; must not know the file's container, chat templates or
requests.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.errors import BadModelFileError, QuireError, UnsupportedModelError

# tokenizer.ggml.token_type
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6

# Limits, because for some vocabularies every way to cut every token in two is tried. Real ones have about a tenth.
_MAX_TOKEN_CHARS = 1 << 12
_MAX_VOCABULARY_CHARS = 1 << 24

SPACE = "▁"  # how SentencePiece vocabularies write a space

# GGUF files carry no generation_config.json, and many name only one of the tokens that end a turn.
_TURN_ENDS = frozenset(
    """
    <|im_end|> <|eot_id|> <|eom_id|> <|end|> <|endoftext|> <|end_of_text|> <end_of_turn>
    <turn|> <|return|> <|call|> <｜end▁of▁sentence｜> <EOT> [EOT] <end_of_utterance>
    """.split()
)


@dataclass(frozen=True)
class _Rule:
    """How byte-level text is cut into words before merging: each pattern cuts what the one before it left."""

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is taken as it is, merges or not
    add_bos: bool = False  # where the file does not say


def _words(numbers: str, letters: str = r"\p{L}") -> str:
    """The pattern family GPT-4 began: contractions, words, numbers, punctuation, line ends, spaces."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}"
        rf"| ?[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased_words(numbers: str, *, contractions: str) -> str:
    """The pattern family GPT-4o began: like `_words`, and a word also ends where lower case turns into upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    head = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{head}{upper}*{lower}+{contractions}|{head}{upper}+{lower}*{contractions}|{numbers}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# DeepSeek LLM lists the letters that have case one by one, as of an old Unicode version. They are written as numbers
# because an editor that normalizes Unicode would turn some of them into others.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2 = _Rule((_GPT2_WORDS,))
_NEOX = _Rule((_GPT2_WORDS,), nfc=True)
_DIGITS = _Rule((r"\p{N}", _GPT2_WORDS))
_GPT4 = _Rule((_words(r"\p{N}{1,3}"),))
_LLAMA3 = replace(_GPT4, whole_words=True, add_bos=True)
_GLM4 = replace(_GPT4, whole_words=True)
_QWEN2 = _Rule((_words(r"\p{N}"),), nfc=True)
_GPT4O = _Rule((_cased_words(r"\p{N}{1,3}", contractions="(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),))
_FALCON_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_DEEPSEEK_LLM_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"

# tokenizer.ggml.pre -> rule
_RULES: dict[str, _Rule] = {
    # The tests compare these with llama.cpp's expected ids, which say nothing about NFC except that qwen35 has none.
    "gpt-2": _GPT2,
    "mpt": _NEOX,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": replace(_DIGITS, nfc=True),
    "falcon": _Rule((_FALCON_PUNCTUATION, _GPT2_WORDS, "[0-9]{3}")),
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    # Its tokenizer.json also composes characters (NFC); llama.cpp's expected ids, which we are held to, do not.
    "qwen35": _Rule((_words(r"\p{N}", letters=r"[\p{L}\p{M}]"),)),
    "deepseek-llm": _Rule(
        ("[\r\n]", rf"\s?[{_CASED_LETTERS}]+", _DEEPSEEK_LLM_PUNCTUATION, r"\s+$", _EAST_ASIAN, r"\p{N}+")
    ),
    "deepseek-coder": _Rule(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    # These were compared by hand with a tokenizer.json that has the rule: DBRX, GLM-4, DeepSeek-V3, for tekken
    # Nemotron's and for gpt-4o MiniMax's (which adds NFC).
    "dbrx": _GPT4,
    "glm4": _GLM4,
    "gpt-4o": _GPT4O,
    "tekken": _Rule((_cased_words(r"\p{N}", contractions=""),), whole_words=True, add_bos=True),
    "deepseek-v3": _Rule(
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"[!-/:-~&&[^A-Za-z]][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    # These follow llama.cpp, which says they are one of the above; we had no file to compare with.
    "smollm": _DIGITS,
    "phi-2": _GPT2,
    "olmo": _NEOX,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama4": _GPT4O,
    "chatglm-bpe": _GLM4,
    "deepseek-r1-qwen": _QWEN2,
    # Where a file names no rule, as those before April 2024 do, llama.cpp takes nearly Falcon's.
    "default": _Rule((_FALCON_PUNCTUATION.replace("`", ""), _GPT2_WORDS, r"\p{N}+", "[0-9]{3}")),
}


@dataclass(frozen=True)
class GGUFVocabulary:
    """A tokenizer and what else the file says about its tokens."""

    tokenizer: Tokenizer
    bos_token_id: int | None
    eos_token_id: int | None
    turn_end_ids: frozenset[int]  # every token that ends an answer, `eos_token_id` included
    prefix_ids: tuple[int, ...]  # put before a prompt
    suffix_ids: tuple[int, ...]  # put after a prompt
    special_tokens: dict[str, str]  # "bos_token" -> its spelling, for chat templates


def build(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """The tokenizer a GGUF file describes; `metadata` is the whole of its key-value pairs."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise BadModelFileError("this GGUF file holds no tokenizer: name one with --tokenizer.")
    if kind not in _BUILDERS:
        known = ", ".join(sorted(_BUILDERS))
        raise UnsupportedModelError(
            f"this GGUF file has a tokenizer of kind {kind!r:.40}, known are {known}: give another with --tokenizer."
        )
    fields = _Fields(metadata)
    try:
        tokenizer, add_bos = _BUILDERS[kind](fields)
    except QuireError:
        raise
    except Exception as error:  # merges that name no tokens and the like: `tokenizers` raises plain Exception
        raise BadModelFileError(f"the tokenizer in this GGUF file is damaged ({error}): use another file.") from None
    # Phi-3 drops the spaces and line ends after most of its special tokens; GGUF has no field to say so.
    is_phi3 = kind == "llama" and metadata.get("general.architecture") == "phi3"
    _add_special(tokenizer, fields, unstripped=("<unk>", "<s>", "<|endoftext|>") if is_phi3 else None)
    bos, eos = fields.token_id("bos"), fields.token_id("eos")
    named_tokens = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return GGUFVocabulary(
        tokenizer=tokenizer,
        bos_token_id=bos,
        eos_token_id=eos,
        turn_end_ids=_turn_ends(fields),
        prefix_ids=(bos,) if bos is not None and fields.flag("add_bos_token", add_bos) else (),
        suffix_ids=(eos,) if eos is not None and fields.flag("add_eos_token", False) else (),
        special_tokens={
            name: fields.tokens[idx] for name, key in named_tokens.items() if (idx := fields.token_id(key)) is not None
        },
    )


class _Fields:
    """The tokenizer's part of the metadata, with its types checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self.strings("tokens")
        self.vocab = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if not self.tokens or len(self.vocab) != len(self.tokens):
            raise BadModelFileError("the vocabulary of this GGUF file is empty or has a token twice: use another file.")
        lengths = list(map(len, self.tokens))
        if max(lengths) > _MAX_TOKEN_CHARS or sum(lengths) > _MAX_VOCABULARY_CHARS:
            raise BadModelFileError("the vocabulary of this GGUF file has absurdly long tokens: use another file.")
        types = self._array("token_type", int) or [NORMAL] * len(self.tokens)
        if len(types) != len(self.tokens):
            raise BadModelFileError("this GGUF file has not as many token types as tokens: use another file.")
        self._types = types

    def strings(self, name: str) -> list[str]:
        return self._array(name, str)

    def scores(self) -> list[float]:
        scores = self._array("scores", int | float)
        if len(scores) != len(self.tokens):
            raise BadModelFileError("this GGUF file has not as many token scores as tokens: use another file.")
        return scores

    def of_type(self, *types: int) -> Iterator[int]:
        return (idx for idx, kind in enumerate(self._types) if kind in types)

    def token_id(self, name: str) -> int | None:
        value = self._get(f"{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name)
        return default if value is None else bool(value)

    def pre(self) -> str:
        return str(self._get("pre") or "default")

    def _get(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def _array(self, name: str, kind: type | UnionType) -> list[Any]:
        values = self._get(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values[:1]):
            raise BadModelFileError(f"tokenizer.ggml.{name} does not hold what it should: use another GGUF file.")
        return values


def _turn_ends(fields: _Fields) -> frozenset[int]:
    """The tokens that end an answer: those the file names, and those known to be such in any file."""
    turn_ends = {idx for idx in fields.of_type(CONTROL) if fields.tokens[idx] in _TURN_ENDS}
    named_ends = [fields.token_id(name) for name in ("eos", "eot", "eom")]
    turn_ends.update(idx for idx in named_ends if idx is not None)
    if "<|return|>" in fields.vocab:  # harmony: <|end|> ends a message there, not the answer
        turn_ends.discard(fields.vocab.get("<|end|>", -1))
    return frozenset(turn_ends)


def _byte_level(fields: _Fields) -> tuple[Tokenizer, bool]:
    """gpt2: BPE over bytes that are written as printable characters."""
    name = fields.pre()
    rule = _RULES.get(name)
    if rule is None:
        raise UnsupportedModelError(
            f"this GGUF file cuts text by a rule {name!r:.40} that Quire does not know: give another with --tokenizer."
        )
    merges = [_pair(merge) for merge in fields.strings("merges")]
    tokenizer = Tokenizer(models.BPE(fields.vocab, merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ", 1)
    return left, right


def _sentencepiece(fields: _Fields) -> tuple[Tokenizer, bool]:
    """llama: SentencePiece's BPE, which merges the neighbours whose union has the best score."""
    return _text_bpe(fields, _merges_by_score(fields), add_space_prefix=fields.flag("add_space_prefix", True)), True


def _gemma4(fields: _Fields) -> tuple[Tokenizer, bool]:
    """gemma4: the same with listed merges; lines are merged one by one."""
    merges = [(merge[:cut], merge[cut + 1 :]) for merge in fields.strings("merges") if (cut := merge.find(" ", 1)) > 0]
    tokenizer = _text_bpe(fields, merges, add_space_prefix=fields.flag("add_space_prefix", False))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    return tokenizer, True


def _text_bpe(fields: _Fields, merges: list[tuple[str, str]], *, add_space_prefix: bool) -> Tokenizer:
    """BPE over characters, bytes only where a character is no token."""
    unknown_id = fields.token_id("unknown")
    unknown = fields.tokens[unknown_id] if unknown_id is not None else None
    tokenizer = Tokenizer(models.BPE(fields.vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if add_space_prefix else back)
    return tokenizer


def _merges_by_score(fields: _Fields) -> list[tuple[str, str]]:
    """Every way to make a token out of two, best score first; never a control token, which text must not add up to."""
    tokens, scores = fields.tokens, fields.scores()
    normal = {tokens[idx]: idx for idx in fields.of_type(NORMAL, UNUSED)}
    merges: list[tuple[str, str]] = []
    for token in sorted(normal, key=lambda token: -scores[normal[token]]):
        cuts = range(1, len(token))
        pairs = [(token[:cut], token[cut:]) for cut in cuts if token[:cut] in normal and token[cut:] in normal]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (normal[pair[0]], normal[pair[1]]))
        merges += pairs
    return merges


_Builder = Callable[[_Fields], tuple[Tokenizer, bool]]
_BUILDERS: dict[str, _Builder] = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}


def _add_special(tokenizer: Tokenizer, fields: _Fields, unstripped: tuple[str, ...] | None) -> None:
    """Control tokens are matched only where special tokens are parsed, user-defined ones always."""

    def added(*types: int) -> list[AddedToken]:
        tokens = [fields.tokens[idx] for idx in fields.of_type(*types)]
        return [
            AddedToken(token, normalized=False, rstrip=unstripped is not None and token not in unstripped)
            for token in tokens
        ]

    tokenizer.add_tokens(added(USER_DEFINED))
    tokenizer.add_special_tokens(added(CONTROL, UNKNOWN))
