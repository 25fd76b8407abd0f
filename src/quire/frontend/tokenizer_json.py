"""Reads a tokenizer.json that a stranger may have written: `tokenizers` itself believes everything in it.

Called by `tokenizer.py` alone, when a model is opened. Refused before or right after parsing: files with too many
entries, rules that lengthen text without bound, and tokenizers that fail or take too long on a short text.
"""

import base64
import math
import threading
from typing import Any

import msgspec
from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as Backend

from quire.errors import BadModelFileError

_MAX_ENTRIES = 1 << 23  # five times the most we know; the parser takes up to a hundred bytes for each
_MAX_RULES_BYTES = 1 << 22  # of each part but the vocabulary
_MAX_GROWTH = 1024  # characters that rules make of one; real ones make up to about thirty
_MAX_SPECIAL_TOKENS = 1024  # put around one text
_MAX_WORD_CHARS = 1000
_PROBE_S = 3.0
# What text is made of, and long runs of it, which make a bad regular expression try every way to cut them.
_SAMPLES = "aA0 _.-\n\té中▁🙂"
_WORDS = "The quick brown fox, (1234.5) ¿qué? 漢字 «ok» http://a.b/c?d=e\r\n\r\n"
_PROBE = "".join(sample * 32 + "!" for sample in _SAMPLES) + _WORDS * 4


class _Model(msgspec.Struct):
    max_input_chars_per_word: Any = None  # of a WordPiece model, which takes their square of time


class _Parts(msgspec.Struct):
    model: _Model
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


def load(raw: bytes) -> Backend:
    """The tokenizer; BadModelFileError says in a few words why it is none."""
    if raw.count(b",") > _MAX_ENTRIES:
        raise BadModelFileError(f"it has over {_MAX_ENTRIES:,} entries")
    try:
        parts = msgspec.json.decode(raw, type=_Parts)
        if isinstance(longest := parts.model.max_input_chars_per_word, int) and longest > _MAX_WORD_CHARS:
            raise BadModelFileError(f"its words may have {longest} characters, the limit is {_MAX_WORD_CHARS}")
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            part = getattr(parts, name)
            if len(part) > _MAX_RULES_BYTES:
                raise BadModelFileError(f"its {name} is larger than {_MAX_RULES_BYTES >> 20} MiB")
            _check_rules(msgspec.json.decode(part))
        backend = Backend.from_buffer(raw)
        backend.no_truncation()  # some files cut or pad every text to the length of some training run
        backend.no_padding()
    except BadModelFileError:
        raise
    except BaseException as error:  # `tokenizers` raises plain Exception for everything, and panics
        if isinstance(error, Exception) or is_panic(error):
            raise BadModelFileError(f"{error!s:.200}") from None
        raise
    _check_in_time(backend, parts)
    return backend


def is_panic(error: BaseException) -> bool:
    """Where Rust code gives up, such as a regular expression that needs too many tries: no Exception, unnamed."""
    return type(error).__name__ == "PanicException"


def _check_rules(part: Any) -> None:
    """What takes memory as soon as it is parsed or used once."""
    for step in _steps(part):
        if step.get("type") == "Precompiled":
            _replacements(step["precompiled_charsmap"])
        if step.get("type") == "TemplateProcessing":  # names special tokens, also many times; each stands for its ids
            sizes = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
            used = [piece["SpecialToken"]["id"] for piece in step["single"] if "SpecialToken" in piece]
            if sum(sizes.get(name, 0) for name in used) > _MAX_SPECIAL_TOKENS:
                raise BadModelFileError(f"it puts over {_MAX_SPECIAL_TOKENS} special tokens around each text")


def _check_in_time(backend: Backend, parts: _Parts) -> None:
    """In a thread that is left behind when it takes too long: compiled code cannot be interrupted."""
    found: list[BaseException] = []

    def probe() -> None:
        try:
            for name in ("normalizer", "pre_tokenizer", "decoder"):
                if math.prod(map(_growth, _steps(msgspec.json.decode(getattr(parts, name))))) > _MAX_GROWTH:
                    raise BadModelFileError(f"its {name} makes over {_MAX_GROWTH} characters of one")
            backend.encode_batch_fast([_PROBE])  # the batch call lets other threads run meanwhile
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=probe, daemon=True, name="tokenizer-probe")
    thread.start()
    thread.join(_PROBE_S)
    if thread.is_alive():
        raise BadModelFileError(f"it takes over {_PROBE_S:.0f} s for a text of {len(_PROBE)} characters")
    for error in found:
        if isinstance(error, BadModelFileError):
            raise error
        raise BadModelFileError(f"it fails on plain text: {error!s:.200}") from None


def _steps(rule: Any) -> list[dict[str, Any]]:
    """The rules of a part in order, with sequences in sequences laid flat."""
    if not isinstance(rule, dict):
        return []
    if rule.get("type") != "Sequence":
        return [rule]
    inner = next((value for value in rule.values() if isinstance(value, list)), [])
    return [step for part in inner for step in _steps(part)]


def _replacements(encoded: str) -> list[bytes]:
    """What characters become by a precompiled table: a trie after its length, then these, each up to a null byte."""
    table = base64.b64decode(encoded)
    start = 4 + int.from_bytes(table[:4], "little")
    if start > len(table):
        raise BadModelFileError("a table in its normalizer is cut off")
    return table[start:].split(b"\0")


def _growth(step: dict[str, Any]) -> float:
    """How many characters a rule makes of one, at most."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return max(1.0, len(new) / len(old)) if old else 1.0 + len(new)
        case {"type": "Replace", "pattern": {"Regex": str(old)}, "content": str(new)}:
            marked = normalizers.Replace(Regex(old), "\ue000").normalize_str(_PROBE)
            matches_nothing = len(marked) > len(_PROBE)  # and so between any two characters
            return 1.0 + len(new) if matches_nothing else max(1.0, len(new))
        case {"type": "Prepend", "prepend": str(prefix)}:
            return 1.0 + len(prefix)
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            return max(map(len, _replacements(encoded)))
        case {"type": "ByteLevel"}:
            return 4.0
    return 1.0
