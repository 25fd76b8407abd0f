"""Operators' own logits processors: the interface, and how `--logits-processors package.module:Class` is loaded.

Called by the worker and the sampler. A request can only bring data for them (`extra_args`), never code.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.params import SamplingParams


class LogitsProcessor(ABC):
    """Changes the logits of the rows that want it, after grammars and before penalties, temperature and choice.

    A request keeps its row until it ends or is preempted; after that another request may get the row.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

    @abstractmethod
    def wants(self, row: int, params: SamplingParams, prompt_token_ids: Sequence[int]) -> bool:
        """Called when a request takes the row: whether its logits are to be processed.

        `params.extra_args` is the data that the request has for processors.
        """

    @abstractmethod
    def apply(self, logits: Tensor, rows: Sequence[int], tokens: Tensor, lengths: Tensor) -> None:
        """In place: `logits[i]` (float32) are those of row `rows[i]` after the history `tokens[rows[i], :lengths[i]]`.

        A row may occur several times, with histories of different lengths.
        On a GPU nothing may wait for the device: no `.item()`, no tensors made from lists.
        """


def load(paths: Sequence[str], vocab_size: int, device: torch.device) -> list[LogitsProcessor]:
    return [_class(path)(vocab_size, device) for path in paths]


def _class(path: str) -> type[LogitsProcessor]:
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the logits processor {path!r} cannot be loaded ({error}): write package.module:Class"
        ) from None
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise ConfigError(f"the logits processor {path!r} is no subclass of quire.LogitsProcessor")
    return found
