"""What the frontend knows of a model: its files, config, tokenizer, template and sampling defaults.

Opened once by each way in, before an engine is started; no torch, no weights.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from quire import env, registry
from quire.checkpoint.find import KNOWN_MODELS, ModelFiles, find
from quire.checkpoint.hf_config import read_config, read_generation_config
from quire.config import EngineConfig
from quire.config.resolve import DraftFiles, Machine, resolve
from quire.errors import ConfigError, RequestError
from quire.frontend import reasoning, tools
from quire.frontend.chat import ChatTemplate, check_template_arguments
from quire.frontend.stop import StopStrings
from quire.frontend.tokenizer import MAX_TEMPLATE_BYTES, Tokenizer
from quire.messages import Thinking, Vocabulary
from quire.params import SamplingParams
from quire.utils.devices import gpus
from quire.utils.files import read_file

log = logging.getLogger(__name__)

MAX_PADDING_TOKENS = 1024  # that a model's vocabulary may have more than another's with the same tokens
MARKER_TOKENS = 32  # more than any mark that opens thinking has, with the white space after it

# generation_config.json's names that mean the same here
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass
class ModelInfo:
    config: EngineConfig  # resolved: what the engine is started with
    hf_config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer: Tokenizer | None  # None with --skip-tokenizer-init
    template: ChatTemplate
    name: str = ""  # as it was asked for; of a path its last part

    @classmethod
    def open(cls, config: EngineConfig, serving: bool = False) -> "ModelInfo":
        options = config.model
        files = find(options.model, revision=options.revision, download_dir=options.download_dir)
        hf_config = read_config(files)
        here = machine()
        draft_files = _draft_files(config)
        draft = None
        if draft_files is not None:
            draft = DraftFiles(str(draft_files.path), draft_files.kind, read_config(draft_files))
        resolved = resolve(config, str(files.path), files.kind, hf_config, here, serving, draft)
        if here.gpu_problem and config.device.device == "auto":
            log.warning("computing on the CPU: %s", here.gpu_problem)
        _check_format("--tool-call-parser", tools, config.structured.tool_call_parser)
        _check_format("--reasoning-parser", reasoning, config.structured.reasoning_parser)
        tokenizer: Tokenizer | None = None
        template = ChatTemplate(None)
        if not options.skip_tokenizer_init:
            tokenizer = Tokenizer.from_path(options.tokenizer) if options.tokenizer else Tokenizer.from_files(files)
            template = ChatTemplate.of(
                tokenizer, _template_source(options.chat_template), options.chat_template_content_format
            )
            if options.chat_template_content_format != "auto" and template.source and not template.shows_content:
                log.warning(
                    "the chat template does not take messages in the form --chat-template-content-format asks for"
                )
        if draft_files is not None and draft is not None:
            _check_draft_tokens(tokenizer, hf_config, draft_files, draft)
        info = cls(resolved, hf_config, read_generation_config(files), tokenizer, template, _shown_name(files.name))
        info.check_defaults()
        return info

    def check_defaults(self) -> None:
        """ConfigError where no request could be served, whatever it asks for."""
        try:
            check_template_arguments(self.config.model.default_chat_template_kwargs)
        except RequestError as error:
            raise ConfigError(f"--default-chat-template-kwargs: {error}") from None
        if not self.config.model.override_generation_config:
            return
        try:
            self.default_params(max_tokens=self.max_answer_tokens(None))
        except RequestError as error:
            raise ConfigError(f"--override-generation-config: {error}") from None

    def prepare(self) -> None:
        """Makes now what the first request would make, while others wait."""
        _ = self.tool_format, self.reasoning_format
        if self.tokenizer is not None:
            self.tokenizer.prepare()

    @property
    def vocab_size(self) -> int:
        return self.hf_config["vocab_size"]

    @property
    def max_model_len(self) -> int:
        limit = self.config.model.max_model_len
        if limit is None:
            raise ValueError("the config is not resolved: it has no max_model_len")
        return limit

    @cached_property
    def eos_ids(self) -> list[int]:
        found = set(self.tokenizer.eos_token_ids) if self.tokenizer else set()
        for source in (self.generation, self.hf_config):
            named = source.get("eos_token_id")
            found.update(named if isinstance(named, list) else [named])
        return sorted(idx for idx in found if isinstance(idx, int) and 0 <= idx < self.vocab_size)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """For grammars; takes a moment with a large one."""
        tokenizer = self.need_tokenizer("a grammar")
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(min(tokenizer.vocab_size, self.vocab_size))]
        return Vocabulary(tokens, sorted(tokenizer.special_ids), self.eos_ids, self.vocab_size)

    @cached_property
    def tool_format(self) -> ModuleType | None:
        """How the model writes tool calls, a file of `tools/`; None: not at all."""
        return self._format(tools, self.config.structured.tool_call_parser)

    @cached_property
    def reasoning_format(self) -> ModuleType | None:
        """How the model's thinking is told from its answer, a file of `reasoning/`; None: it does not think."""
        return self._format(reasoning, self.config.structured.reasoning_parser)

    def _format(self, package: ModuleType, name: str) -> ModuleType | None:
        if name == "auto":
            name = package.choose(self.template.source, str(self.hf_config.get("model_type", ""))) or "none"
        return registry.load(package.__name__, name) if name != "none" else None

    def thinking(self, token_ids: Sequence[int], budget: int | None = None) -> Thinking | None:
        """Where thinking begins and ends after this prompt; None where the model does none."""
        marks_thinking = self.reasoning_format is not None and self.reasoning_format.END
        if not marks_thinking or self.tokenizer is None:
            return None
        return Thinking(self.thinking_is_open(token_ids), *self._thinking_ids, budget)

    def thinking_is_open(self, token_ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the beginning of thinking."""
        if self.reasoning_format is None:
            return False
        tokenizer = self.need_tokenizer("thinking")
        end = tokenizer.decode(token_ids[-MARKER_TOKENS:], skip_special_tokens=False)
        return reasoning.is_open(self.reasoning_format, end)

    @cached_property
    def special_spellings(self) -> StopStrings:
        return StopStrings(self.need_tokenizer("a special token").special_spellings())

    @cached_property
    def _thinking_ids(self) -> tuple[list[int], list[int]]:
        """The tokens that open thinking, and those that close it."""
        if self.reasoning_format is None:
            return [], []
        tokenizer = self.need_tokenizer("thinking")
        start, end = self.reasoning_format.START, self.reasoning_format.END
        start_ids = tokenizer.encode(start, add_special_tokens=False) if start else []
        end_ids = tokenizer.encode(end, add_special_tokens=False) if end else []
        # A model that was trained on the mark has a token for its beginning. In another model the first token may be a
        # mere bracket, which must not be taken for the beginning of thinking.
        has_own_token = bool(start_ids) and start_ids[0] in tokenizer.added_ids
        return start_ids if has_own_token else [], end_ids

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What the model's generation_config.json says about sampling, and what the operator says instead."""
        usable = self.generation if self.config.model.generation_config == "auto" else {}
        usable = {**usable, **self.config.model.override_generation_config}
        return {name: usable[name] for name in _DEFAULTS if usable.get(name) is not None}

    def max_answer_tokens(self, asked: int | None) -> int | None:
        """The longest answer to a client who asks for so many tokens; None: as long as the context allows."""
        limit = self.config.model.override_generation_config.get("max_new_tokens")
        return asked if limit is None else limit if asked is None else min(asked, limit)

    def default_params(self, **changes: Any) -> SamplingParams:
        """The model's own sampling defaults, else OpenAI's."""
        return SamplingParams(**{**self.sampling_defaults, **changes})

    def need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and skip_tokenizer_init is set: give token ids, or leave it out"
            )
        return self.tokenizer


def _draft_files(config: EngineConfig) -> ModelFiles | None:
    """Those of the model that guesses, if one does."""
    speculation = config.speculative.speculation
    if speculation is None or not speculation.model:
        return None
    options = config.model
    return find(speculation.model, revision=options.revision, download_dir=options.download_dir)


def _check_draft_tokens(
    tokenizer: Tokenizer | None, hf_config: dict[str, Any], draft_files: ModelFiles, draft: DraftFiles
) -> None:
    """Both models' tokens are compared, where both have a tokenizer; else how many there are, but for padding."""
    names = ("tokenizer.json", "tokenizer.model")
    has_tokenizer = draft.kind == "gguf" or any((draft_files.path / name).exists() for name in names)
    ours, theirs = hf_config["vocab_size"], draft.hf_config["vocab_size"]
    if tokenizer is not None and has_tokenizer:
        _check_same_tokens(tokenizer, Tokenizer.from_files(draft_files))
    elif abs(ours - theirs) > MAX_PADDING_TOKENS:
        raise ConfigError(f"the draft model has another vocabulary: {theirs:,} tokens, not {ours:,}")


def _check_same_tokens(tokenizer: Tokenizer, draft: Tokenizer) -> None:
    """Tokens of one model must mean the same in the other. Either may have more of them, for padding."""
    for token_id in range(min(tokenizer.vocab_size, draft.vocab_size)):
        ours, theirs = tokenizer.token_bytes(token_id), draft.token_bytes(token_id)
        if ours != theirs:
            raise ConfigError(
                f"the draft model has another vocabulary: its token {token_id} is {theirs!r:.40}, not {ours!r:.40}"
            )


def _check_format(flag: str, package: ModuleType, name: str) -> None:
    known = ["auto", "none", *registry.names(package.__name__)]
    if name not in known and "." not in name:  # a dotted path names a module from elsewhere
        raise ConfigError(f"there is no {flag} {name!r:.80}: choose from {', '.join(known)}")


def _shown_name(typed: str) -> str:
    """A model's name for clients, who are told no paths. A hub id looks like a path, but nothing lies there."""
    path = Path(typed).expanduser()
    is_path = path.is_absolute() or path.exists() or typed.startswith(".")
    if not is_path or typed in KNOWN_MODELS:
        return typed
    return path.name if path.name not in ("", "..") else path.resolve().name


def machine() -> Machine:
    """The one this process runs on."""
    found = gpus()
    num_cores = len(os.sched_getaffinity(0))
    return Machine(num_cores, found.count, found.problem, found.is_broken, env.num_threads())


def _template_source(option: str | None) -> str | None:
    """A template itself, or a file with one; what looks like neither is an error."""
    if option is None or "{" in option:
        return option
    try:
        return read_file(Path(option).expanduser(), MAX_TEMPLATE_BYTES).decode()
    # RuntimeError: the path names a home folder that does not exist. ValueError: bad UTF-8, or a null character.
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not the path of a UTF-8 text"
        raise ConfigError(f"the chat template {option!r:.200} cannot be read: {why}") from None
