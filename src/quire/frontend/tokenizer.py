"""Text to token ids and back, on Hugging Face's `tokenizers` alone: no transformers, no torch.

Made once per model by the frontend and shared by all threads; nothing but memos changes after construction. Must not
know requests, chat messages or generation settings.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire.checkpoint.find import ModelFiles
from quire.checkpoint.gguf import GGUFFile
from quire.errors import (
    BadModelFileError,
    ModelNotFoundError,
    RequestError,
    TooLongError,
    UnsupportedModelError,
)
from quire.frontend import gguf_tokenizer, sentencepiece_tokenizer, tokenizer_json
from quire.frontend.detokenize import Detokenizer, Pieces
from quire.frontend.gguf_tokenizer import GGUFVocabulary
from quire.utils.files import is_there, read_file

MAX_TEMPLATE_BYTES = 1 << 20  # thirty times the longest we know
_MAX_TOKENIZER_BYTES = 1 << 27  # four times the largest we know
_MAX_JSON_BYTES = 1 << 24
_PLAUSIBLE_TOKEN_CHARS = 8  # of ordinary text
_TOKEN_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
_ID = re.compile("[0-9]{1,9}")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A vocabulary with its rules, its special tokens and its chat template."""

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] | None = None,
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()  # some files cut or pad every text to the length of some training run
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})  # "bos_token" -> its spelling
        self.chat_template = chat_template
        self._prefix_ids, self._suffix_ids = list(prefix_ids), list(suffix_ids)
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.bos_token_id = self._named_id("bos_token")
        eos = self._named_id("eos_token")
        self.eos_token_ids = frozenset(eos_token_ids) if eos_token_ids is not None else frozenset({eos} - {None})
        self.pieces = Pieces.of(backend)  # None where the decoder is of another kind
        self._words: dict[int, str] = {}  # what `word` has found

    @classmethod
    def from_files(cls, files: ModelFiles) -> "Tokenizer":
        return cls.from_gguf(files.gguf.metadata) if files.kind == "gguf" else cls.from_path(files.path)

    @classmethod
    def from_path(cls, path: Path | str) -> "Tokenizer":
        """From a folder with tokenizer.json or tokenizer.model, one of these by itself, or a GGUF file."""
        path = Path(path).expanduser()
        if path.is_dir():
            is_new = is_there(path / "tokenizer.json") or not is_there(path / "tokenizer.model")
            return cls._from_folder(path, path / ("tokenizer.json" if is_new else "tokenizer.model"))
        if path.suffix in (".json", ".model"):
            return cls._from_folder(path.parent, path)
        with GGUFFile(path) as file:
            return cls.from_gguf(file.metadata)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From the key-value pairs of a GGUF file."""
        chat_template = metadata.get("tokenizer.chat_template")
        template = chat_template if isinstance(chat_template, str) else None
        return cls._from_vocabulary(gguf_tokenizer.build(metadata), {}, template)

    @classmethod
    def _from_vocabulary(
        cls, vocabulary: GGUFVocabulary, special_tokens: Mapping[str, str], template: str | None
    ) -> "Tokenizer":
        return cls(
            vocabulary.tokenizer,
            special_tokens={**vocabulary.special_tokens, **special_tokens},
            eos_token_ids=sorted(vocabulary.turn_end_ids),
            prefix_ids=vocabulary.prefix_ids,
            suffix_ids=vocabulary.suffix_ids,
            chat_template=template,
        )

    @classmethod
    def _from_folder(cls, folder: Path, tokenizer_file: Path) -> "Tokenizer":
        if not is_there(tokenizer_file):
            raise ModelNotFoundError(
                f"{folder.name} holds neither tokenizer.json nor tokenizer.model: name a tokenizer with --tokenizer."
            )
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        special_tokens = {name: spelling for name in _NAMED_TOKENS if (spelling := _spelling(config.get(name)))}
        try:
            raw = read_file(tokenizer_file, _MAX_TOKENIZER_BYTES)
            if tokenizer_file.suffix == ".model":
                vocabulary = sentencepiece_tokenizer.build(raw, config)
                backend = vocabulary.tokenizer
            else:
                vocabulary, backend = None, tokenizer_json.load(raw)
        except (OSError, BadModelFileError, UnsupportedModelError) as error:
            why = getattr(error, "strerror", None) or error
            kind = UnsupportedModelError if isinstance(error, UnsupportedModelError) else BadModelFileError
            raise kind(
                f"{tokenizer_file.name} of {folder.name} cannot be used ({why}): name another with --tokenizer."
            ) from None
        _add_missing_tokens(backend, config.get("added_tokens_decoder"))
        template = _chat_template(folder, config)
        if vocabulary is None:
            return cls(backend, special_tokens=special_tokens, chat_template=template)
        _add_missing_tokens(backend, _numbered(_read_json(folder / "added_tokens.json"), special_tokens))
        return cls._from_vocabulary(vocabulary, special_tokens, template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt or of a rendered template: spellings of special tokens become those tokens."""
        ids = _encode(self.backend, text, add_special_tokens)
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    def check_fits(self, text: str, max_tokens: int) -> None:
        """TooLongError for a text that has that many tokens by its characters alone: it need not be tokenized."""
        if len(text) > _PLAUSIBLE_TOKEN_CHARS * max_tokens:
            fewest = len(text) // self.longest_token_chars
            if fewest >= max_tokens:
                raise too_long(fewest, max_tokens, at_least=True)

    def encode_as_text(self, text: str) -> list[int]:
        """Ids of text that nobody vouches for: spellings of special tokens stay text, nothing is added."""
        return _encode(self._text_backend, text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self.pieces is None:
            return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.feed(token_ids) + detokenizer.flush()

    def word(self, token_id: int) -> str:
        """The text of one token by itself; remembered, since logprobs name the same tokens again and again."""
        found = self._words.get(token_id)
        if found is None:
            found = self._words[token_id] = self.decode([token_id], skip_special_tokens=False)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text, for logprobs and the like; special tokens give their spelling."""
        if self.pieces is not None:
            return self.pieces[token_id]
        return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def token_id(self, spelling: str) -> int | None:
        return self.backend.token_to_id(spelling)

    def prepare(self) -> None:
        """Makes now what long texts and chats need, and what takes a while with a large vocabulary."""
        _ = self.longest_token_chars, self.special_pattern, self._text_backend

    @cached_property
    def longest_token_chars(self) -> int:
        """No text has fewer tokens than its characters divided by this."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def special_spellings(self) -> list[str]:
        return sorted(filter(None, map(self.backend.id_to_token, self.special_ids)))

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Finds special tokens in text as `encode` does: the first, and the longest of those that begin there."""
        longest_first = sorted(self.special_spellings(), key=lambda spelling: (-len(spelling), spelling))
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def _text_backend(self) -> Backend:
        """A second backend on the same model: the switch belongs to the object, and others may be using the first."""
        backend = Backend(self.backend.model)
        if self.backend.normalizer is not None:
            backend.normalizer = self.backend.normalizer
        if self.backend.pre_tokenizer is not None:
            backend.pre_tokenizer = self.backend.pre_tokenizer
        in_id_order = [token for _, token in sorted(self.backend.get_added_tokens_decoder().items())]
        backend.add_tokens(in_id_order)
        backend.encode_special_tokens = True
        return backend

    def _named_id(self, name: str) -> int | None:
        spelling = self.special_tokens.get(name)
        return self.backend.token_to_id(spelling) if spelling else None


def too_long(
    num_prompt_tokens: int,
    limit: int,
    num_answer_tokens: int = 1,
    at_least: bool = False,
    param: str | None = None,
) -> TooLongError:
    """In OpenAI's words, by which clients know that another model may do. `at_least`: the prompt may have more."""
    total = f"{'at least ' if at_least else ''}{num_prompt_tokens + num_answer_tokens}"
    error = TooLongError(
        f"This model's maximum context length is {limit} tokens. However, you requested {total} tokens "
        f"({num_prompt_tokens} in the prompt, {num_answer_tokens} in the completion). "
        "Please reduce the length of the prompt or the completion.",
        param,
    )
    error.num_prompt_tokens, error.limit = num_prompt_tokens, limit
    return error


_LONG_CHARS = 512


def _encode(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    try:
        if len(text) > _LONG_CHARS:  # the batch call lets other threads run meanwhile, the plain one does not
            return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    except TypeError:
        raise RequestError("the text must be a string without lone surrogates (half of a UTF-16 pair).") from None
    except BaseException as error:
        if tokenizer_json.is_panic(error):
            raise RequestError("this model's tokenizer gives up on this text: send another.") from None
        raise


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if not is_there(path):
            return {}
        value = json.loads(read_file(path, _MAX_JSON_BYTES))
    except OSError as error:
        raise BadModelFileError(
            f"{path.name} of {path.parent.name} cannot be read ({error.strerror}): fetch it again."
        ) from None
    except (ValueError, RecursionError):
        raise BadModelFileError(f"{path.name} of {path.parent.name} is not readable JSON: fetch it again.") from None
    if not isinstance(value, dict):
        raise BadModelFileError(f"{path.name} of {path.parent.name} is not a JSON object: fetch it again.")
    return value


def _spelling(token: Any) -> str | None:
    """Files write a token as a string or as an object with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_missing_tokens(backend: Backend, listed: Any) -> None:
    """Adds tokens that only tokenizer_config.json lists; one that would get another id than listed is left out."""
    if not isinstance(listed, dict):
        return
    tokens = {key: token for key, token in listed.items() if _ID.fullmatch(key) and isinstance(token, dict)}
    numbered = [(int(key), token) for key, token in tokens.items() if _spelling(token)]
    next_id = backend.get_vocab_size(with_added_tokens=True)
    missing: dict[str, AddedToken] = {}
    for token_id, token in sorted(numbered, key=lambda item: item[0]):
        spelling = token["content"]
        is_missing = spelling not in missing and backend.token_to_id(spelling) is None
        if token_id == next_id and is_missing:
            missing[spelling] = AddedToken(spelling, **{flag: bool(token.get(flag)) for flag in _TOKEN_FLAGS})
            next_id += 1
    backend.add_tokens(list(missing.values()))  # at once: each call goes through all there are


def _numbered(added: Mapping[str, Any], special_tokens: Mapping[str, str]) -> dict[str, Any]:
    """added_tokens.json, which has ids by spelling, in the form of tokenizer_config.json."""
    return {
        str(token_id): {"content": spelling, "special": spelling in special_tokens.values(), "normalized": False}
        for spelling, token_id in added.items()
        if type(token_id) is int
    }


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own comes first; a list of named templates has one called default."""
    path = folder / "chat_template.jinja"
    try:
        if is_there(path):
            return read_file(path, MAX_TEMPLATE_BYTES).decode()
    except OSError as error:
        raise BadModelFileError(
            f"{path.name} of {folder.name} cannot be read ({error.strerror}): fetch it again."
        ) from None
    except ValueError:
        raise BadModelFileError(f"{path.name} of {folder.name} is not readable text: fetch it again.") from None
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
