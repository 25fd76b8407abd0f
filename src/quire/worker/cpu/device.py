"""A CPU, as the worker and its runner see it: kernels, recordings, memory. Host and device share one memory.

`gpu/device.py` has the same names; `worker/device.py` says what they are.
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
from quire.ops.step.reference import correct_starts, place_samples
from quire.ops.vocab.cpu import mask_logits
from quire.sampling.sampler import SampleMasks
from quire.step import Masks
from quire.utils.memory import available_bytes
from quire.worker.cpu.graphs import Recordings

__all__ = [
    "MaskStaging",
    "Recordings",
    "Scratch",
    "accept",
    "capacity",
    "copy_blocks",
    "correct_starts",
    "gather_rows",
    "known_lengths",
    "kv_memory_bytes",
    "mask_logits",
    "open",
    "place_samples",
    "place_slots",
    "place_tokens",
    "release",
    "sample",
    "scatter_segments",
]

# Other programs need the machine's memory too: by default KV blocks take no more than this.
MAX_KV_BYTES = 4 << 30

scatter_segments = None


def open(device: torch.device, idx: int = 0) -> None:
    pass


def capacity(what: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def kv_memory_bytes(config: EngineConfig, make_runner: Callable[[], object] | None = None) -> int:
    """Bytes that KV blocks of one worker may take; can be asked before anything is loaded."""
    whole = min(MAX_KV_BYTES, int(available_bytes() * config.cache.gpu_memory_utilization))
    return whole // (config.parallel.num_workers * config.parallel.num_engines)


def release() -> None:
    """Gives back memory that was reserved for weights."""
    huge_pages.forget()


def known_lengths(lengths: torch.Tensor) -> np.ndarray:
    """The lengths of all rows: the steps before have run, so the host knows them."""
    return lengths.numpy()


class MaskStaging:
    """The grammars' masks of a step."""

    masks: SampleMasks  # exists once a step has any

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        pass

    def memory(self, num_rows: int, num_words: int, is_new: bool) -> None:
        return None

    def bring(self, masks: Masks) -> None:
        words = np.frombuffer(masks.words, np.int32).reshape(len(masks.places), -1)
        self.masks = SampleMasks(torch.tensor(masks.places), torch.tensor(words))

    def of(self, num_samples: int) -> SampleMasks:
        return self.masks
