"""How grammar masks reach the device: from pinned memory into buffers at fixed addresses.

Owned by the runner. Several pinned buffers are used in turn, because the device may still be reading the last one.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from quire.ops.transfer import to_device
from quire.sampling.sampler import SampleMasks
from quire.step import Masks

NO_SAMPLE = -1


class MaskStaging:
    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.num_words = -(-vocab_size // 32)
        self.device = device
        self.pinned: list[Tensor] = []  # made when the first mask comes: many engines never see one
        self.turn = 0  # which of `pinned` was given out last

    @functools.cached_property
    def buffers(self) -> SampleMasks:
        """Where masks lie on the device: the step's in order, the places after them NO_SAMPLE."""
        places = torch.full((self.num_rows,), NO_SAMPLE, dtype=torch.int32, device=self.device)
        words = torch.zeros(self.num_rows, self.num_words, dtype=torch.int32, device=self.device)
        return SampleMasks(places, words)

    def memory(self, num_rows: int, num_words: int, is_new: bool) -> memoryview | None:
        """Memory for a step's masks. What was given two steps ago is free again: that step has been waited for."""
        if self.device.type != "cuda":
            return None
        if is_new or not self.pinned:
            # A thread that still writes to the old memory also holds it, so it is not used for anything else.
            self.pinned = [torch.empty(self.num_rows, num_words, dtype=torch.int32, pin_memory=True) for _ in range(3)]
        self.turn = (self.turn + 1) % len(self.pinned)
        return self.pinned[self.turn][:num_rows].numpy().data.cast("B")

    def bring(self, masks: Masks) -> None:
        """Copies into `buffers`, in the order of the device's work."""
        places = np.full(self.num_rows, NO_SAMPLE, np.int32)
        places[: len(masks.places)] = masks.places
        to_device(places, self.device, out=self.buffers.places_M)
        words = np.frombuffer(masks.words, np.int32).reshape(len(masks.places), -1)
        target = self.buffers.words_MW[: len(words)]
        address = words.ctypes.data
        pinned = next((memory[: len(words)] for memory in self.pinned if memory.data_ptr() == address), None)
        if pinned is not None:
            target.copy_(pinned, non_blocking=True)
        else:
            to_device(words, self.device, out=target)

    def of(self, num_samples: int) -> SampleMasks:
        return SampleMasks(self.buffers.places_M[:num_samples], self.buffers.words_MW)
