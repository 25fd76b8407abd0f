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

from quire import registry
from quire.checkpoint.find import find
from quire.checkpoint.hf_config import read_config, read_generation_config
from quire.config import EngineConfig
from quire.config.resolve import Machine, resolve
from quire.errors import ConfigError, RequestError
from quire.frontend import reasoning, tools
from quire.frontend.chat import ChatTemplate
from quire.frontend.stop import StopStrings
from quire.frontend.tokenizer import MAX_TEMPLATE_BYTES, Tokenizer
from quire.messages import Thinking, Vocabulary
from quire.params import SamplingParams
from quire.utils.devices import gpus
from quire.utils.files import read_file

log = logging.getLogger(__name__)

MARKER_TOKENS = 32  # more than open any thinking, with the white space after

# generation_config.json's names that mean the same here
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass
class ModelInfo:
    config: EngineConfig  # resolved: what the engine is started with
    hf_config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer: Tokenizer | None  # None with --skip-tokenizer-init
    template: ChatTemplate | None

    @classmethod
    def open(cls, config: EngineConfig, serving: bool = False) -> "ModelInfo":
        options = config.model
        files = find(options.model, revision=options.revision, download_dir=options.download_dir)
        hf_config = read_config(files)
        here = machine()
        resolved = resolve(config, str(files.path), files.kind, hf_config, here, serving)
        if here.gpu_problem and config.device.device == "auto":
            log.warning("computing on the CPU: %s", here.gpu_problem)
        _check_format("--tool-call-parser", tools, config.structured.tool_call_parser)
        _check_format("--reasoning-parser", reasoning, config.structured.reasoning_parser)
        tokenizer = template = None
        if not options.skip_tokenizer_init:
            tokenizer = Tokenizer.from_path(options.tokenizer) if options.tokenizer else Tokenizer.from_files(files)
            template = ChatTemplate.of(tokenizer, _template_source(options.chat_template))
        return cls(resolved, hf_config, read_generation_config(files), tokenizer, template)

    def prepare(self) -> None:
        """Makes what requests would make at first use, and then hold others up."""
        _ = self.tool_format, self.reasoning_format
        if self.tokenizer is not None:
            self.tokenizer.prepare()

    @property
    def vocab_size(self) -> int:
        return self.hf_config["vocab_size"]

    @property
    def max_model_len(self) -> int:
        return self.config.model.max_model_len

    @cached_property
    def eos_ids(self) -> list[int]:
        found = set(self.tokenizer.eos_token_ids) if self.tokenizer else set()
        for source in (self.generation, self.hf_config):
            ids = source.get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        return sorted(i for i in found if isinstance(i, int) and 0 <= i < self.vocab_size)

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
            source = self.template.source if self.template is not None else None
            name = package.choose(source, str(self.hf_config.get("model_type", ""))) or "none"
        return registry.load(package.__name__, name) if name != "none" else None

    def thinking(self, token_ids: Sequence[int], budget: int | None = None) -> Thinking | None:
        """Where thinking begins and ends after this prompt; None where the model does none."""
        if self.reasoning_format is None or self.tokenizer is None or not self.reasoning_format.END:
            return None
        return Thinking(self.thinking_is_open(token_ids), *self._thinking_ids, budget)

    def thinking_is_open(self, token_ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the beginning of thinking."""
        end = self.tokenizer.decode(token_ids[-MARKER_TOKENS:], skip_special_tokens=False)
        return reasoning.is_open(self.reasoning_format, end)

    @cached_property
    def special_spellings(self) -> StopStrings:
        return StopStrings(sorted(filter(None, map(self.tokenizer.backend.id_to_token, self.tokenizer.special_ids))))

    @cached_property
    def _thinking_ids(self) -> tuple[list[int], list[int]]:
        """What opens and closes it, in tokens."""
        start_ids, end_ids = (
            self.tokenizer.encode(marker, add_special_tokens=False) if marker else []
            for marker in (self.reasoning_format.START, self.reasoning_format.END)
        )
        # A marker that a model was trained on begins with a token of its own; else a bracket would be taken for the beginning of a thought.
        return start_ids if start_ids and start_ids[0] in self.tokenizer.added_ids else [], end_ids

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What the model's generation_config.json says about sampling."""
        usable = self.generation if self.config.model.generation_config == "auto" else {}
        return {name: usable[name] for name in _DEFAULTS if usable.get(name) is not None}

    def default_params(self, **changes: Any) -> SamplingParams:
        """The model's own sampling defaults, else OpenAI's."""
        return SamplingParams(**{**self.sampling_defaults, **changes})

    def need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and skip_tokenizer_init is set: give token ids, or leave it out"
            )
        return self.tokenizer


def _check_format(flag: str, package: ModuleType, name: str) -> None:
    known = ["auto", "none", *registry.names(package.__name__)]
    if name not in known and "." not in name:  # a dotted path names a module from elsewhere
        raise ConfigError(f"there is no {flag} {name!r:.80}: choose from {', '.join(known)}")


def machine() -> Machine:
    """The one this process runs on."""
    return Machine(len(os.sched_getaffinity(0)), *gpus())


def _template_source(option: str | None) -> str | None:
    """A template itself, or a file with one; what looks like neither is an error."""
    if option is None or "{" in option:
        return option
    try:
        return read_file(Path(option).expanduser(), MAX_TEMPLATE_BYTES).decode()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: no such home; ValueError: bad UTF-8, a null character
        why = getattr(error, "strerror", None) or "it is not the path of a UTF-8 text"
        raise ConfigError(f"the chat template {option!r:.200} cannot be read: {why}") from None
