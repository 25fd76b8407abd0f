"""A CPU, as the worker and its runner see it: kernels, recordings, memory. Host and device are one, so nothing travels.

`gpu/device.py` has the same names, and those for what only happens there.
"""

import contextlib
from collections.abc import Callable

import numpy as np
import torch

from quire.config import EngineConfig
from quire.ops.blocks.reference import copy_blocks
from quire.ops.elementwise.reference import gather_rows
from quire.ops.packed_linear.cpu import huge_pages
from quire.ops.sampling.cpu import Scratch, sample
from quire.ops.step.cpu import accept, place_slots, place_tokens
from quire.ops.vocab.cpu import mask_logits
from quire.sampling.sampler import SampleMasks
from quire.step import Masks
from quire.utils.memory import available_bytes
from quire.worker.cpu.graphs import Recordings

__all__ = [
    "MaskStaging", "Recordings", "Scratch", "accept", "capacity", "copy_blocks", "gather_rows", "known_lengths",
    "kv_memory_bytes", "mask_logits", "open", "place_slots", "place_tokens", "release", "sample", "scatter_segments",
]  # fmt: skip

# Memory is shared with everything else on the machine, so a share of it is taken only up to here unless asked.
MAX_KV_BYTES = 4 << 30

scatter_segments = None


def open(device: torch.device) -> None:
    pass


def capacity(what: str) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def kv_memory_bytes(config: EngineConfig, make_runner: Callable[[], object] | None = None) -> int:
    """What may be given to KV blocks, also before anything is loaded."""
    return min(MAX_KV_BYTES, int(available_bytes() * config.cache.gpu_memory_utilization))


def release() -> None:
    """Gives memory back that weights were to be put into."""
    huge_pages.forget()


def known_lengths(lengths: torch.Tensor) -> np.ndarray:
    """Those of all rows: steps before have run."""
    return lengths.numpy()


class MaskStaging:
    """Grammars' masks of a step."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.masks: SampleMasks | None = None

    def memory(self, num_rows: int, num_words: int, is_new: bool) -> None:
        return None

    def bring(self, masks: Masks) -> None:
        words = np.frombuffer(masks.words, np.int32).reshape(len(masks.places), -1)
        self.masks = SampleMasks(torch.tensor(masks.places), torch.tensor(words))

    def of(self, num_samples: int) -> SampleMasks:
        return self.masks
