"""Reads a SentencePiece tokenizer.model: what it says in the words of a GGUF file, from which a tokenizer is built.

Called by `tokenizer.py` alone, for folders without tokenizer.json. The file is a protocol buffer, of which a handful of
fields matter; every length is checked before it is used. Knows BPE models that leave text as it is, which is what
language models have; others are refused.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from quire.errors import BadModelFileError, UnsupportedModelError
from quire.frontend import gguf_tokenizer
from quire.frontend.gguf_tokenizer import NORMAL, SPACE, UNUSED, USER_DEFINED, GGUFVocabulary

_MAX_PIECES = 1 << 21
_BPE = 2
# Wire types of protocol buffers.
_VARINT, _EIGHT_BYTES, _COUNTED, _FOUR_BYTES = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10

Field = tuple[int, Any]  # its number; an int, or bytes


def build(raw: bytes, config: Mapping[str, Any]) -> GGUFVocabulary:
    """The tokenizer; `config` is tokenizer_config.json's. BadModelFileError says in a few words why there is none."""
    pieces: list[bytes] = []
    trainer: dict[int, Any] = {}
    rules: dict[int, Any] = {}
    for number, value in _fields(raw):
        if number == 1 and isinstance(value, bytes):
            pieces.append(value)
            if len(pieces) > _MAX_PIECES:
                raise BadModelFileError(f"it has over {_MAX_PIECES:,} pieces")
        elif number in (2, 3) and isinstance(value, bytes):
            (trainer if number == 2 else rules).update(_fields(value))
    if trainer.get(3, 1) != _BPE:
        raise UnsupportedModelError("it is no BPE model; transformers can save it as tokenizer.json")
    if rules.get(2) or not rules.get(5, 1):
        raise UnsupportedModelError("it rewrites text by a table; transformers can save it as tokenizer.json")
    vocabulary = gguf_tokenizer.build(_metadata(pieces, trainer, rules, config))
    _set_rules(vocabulary, rules, is_legacy=config.get("legacy") is not False)
    return vocabulary


def _metadata(
    pieces: list[bytes], trainer: Mapping[int, Any], rules: Mapping[int, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    tokens, scores, types = [], [], []
    for piece in pieces:
        values = dict(_fields(piece))
        tokens.append(_text(values.get(1)))
        scores.append(_number(values.get(2)))
        kind = values.get(3, NORMAL)
        # Runs of spaces that are listed as whole: text holds them as merges only.
        types.append(NORMAL if kind == USER_DEFINED and SPACE in tokens[-1] else kind)
    found: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": [kind if isinstance(kind, int) else UNUSED for kind in types],
        "unknown_token_id": _signed(trainer.get(40, 0)),
        "bos_token_id": _signed(trainer.get(41, 1)),
        "eos_token_id": _signed(trainer.get(42, 2)),
        "padding_token_id": _signed(trainer.get(43, -1)),
        "add_space_prefix": bool(rules.get(3, 1)),
        "add_bos_token": config.get("add_bos_token") is not False,
        "add_eos_token": config.get("add_eos_token") is True,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in found.items()}


def _set_rules(vocabulary: GGUFVocabulary, rules: Mapping[int, Any], is_legacy: bool) -> None:
    """What GGUF files have no fields for."""
    tokenizer = vocabulary.tokenizer
    trim: list[normalizers.Normalizer] = []
    if rules.get(4, 1):  # spaces in a row are one, and none is at the ends
        trim = [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if is_legacy or not rules.get(3, 1):
        tokenizer.normalizer = normalizers.Sequence([*trim, tokenizer.normalizer])
    else:  # as in transformers: a space before a text that has none, and not after each special token in it
        tokenizer.normalizer = normalizers.Sequence(trim)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)


def _fields(raw: bytes) -> Iterator[Field]:
    """The fields of one message, in order."""
    position = 0
    while position < len(raw):
        key, position = _varint(raw, position)
        kind = key & 7
        if kind == _VARINT:
            value, position = _varint(raw, position)
            yield key >> 3, value
            continue
        if kind == _COUNTED:
            num_bytes, position = _varint(raw, position)
        elif kind in (_FOUR_BYTES, _EIGHT_BYTES):
            num_bytes = 4 if kind == _FOUR_BYTES else 8
        else:
            raise BadModelFileError("it is no SentencePiece model")
        if num_bytes > len(raw) - position:
            raise BadModelFileError("it is cut off, or no SentencePiece model")
        yield key >> 3, raw[position : position + num_bytes]
        position += num_bytes


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    """A number in groups of seven bits, and where it ends."""
    value = 0
    for idx, byte in enumerate(raw[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 127) << 7 * idx
        if byte < 128:
            return value, position + idx + 1
    raise BadModelFileError("it is cut off, or no SentencePiece model")


def _text(value: Any) -> str:
    try:
        return value.decode()
    except (AttributeError, UnicodeDecodeError):
        raise BadModelFileError("a piece of it is no text") from None


def _number(value: Any) -> float:
    if value is None:
        return 0.0
    if not isinstance(value, bytes) or len(value) != 4:
        raise BadModelFileError("a score in it is no number")
    score = struct.unpack("<f", value)[0]
    return score if score == score else 0.0  # NaN has no place in an order


def _signed(value: Any) -> int:
    """-1, which stands for none, is written as the largest number there is."""
    return value if isinstance(value, int) and value < 1 << 31 else -1
