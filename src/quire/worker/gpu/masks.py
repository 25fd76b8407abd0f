"""How grammar masks reach the device: from pinned memory, in turns, because a fetch may still be under way, into buffers that stay.

Owned by the runner.
"""

import numpy as np
import torch
from torch import Tensor

from quire.ops.transfer import to_device
from quire.sampling.sampler import SampleMasks
from quire.step import Masks

NOBODY = -1


class MaskStaging:
    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows, self.num_words, self.device = num_rows, -(-vocab_size // 32), device
        self.turns: list[Tensor] = []  # made when the first mask comes, as all of it is: most never need one
        self.turn = 0
        self.places: Tensor | None = None  # of the step's masks, in order; the rest are nobody's
        self.words: Tensor | None = None

    def memory(self, num_rows: int, num_words: int, is_new: bool) -> memoryview | None:
        """For a step's masks. Those of the step before the last have arrived: its tokens were waited for."""
        if self.device.type != "cuda":
            return None
        if (
            is_new or not self.turns
        ):  # whoever may still write to the old ones holds them, so their memory is nobody else's
            self.turns = [torch.empty(self.num_rows, num_words, dtype=torch.int32, pin_memory=True) for _ in range(3)]
        self.turn = (self.turn + 1) % len(self.turns)
        return memoryview(self.turns[self.turn][:num_rows].numpy()).cast("B")

    def bring(self, masks: Masks) -> None:
        """Into `places` and `words`, in the order of the device's work."""
        if self.places is None:
            self.places = torch.full((self.num_rows,), NOBODY, dtype=torch.int32, device=self.device)
            self.words = torch.zeros(self.num_rows, self.num_words, dtype=torch.int32, device=self.device)
        places = np.full(self.num_rows, NOBODY, np.int32)
        places[: len(masks.places)] = masks.places
        to_device(places, self.device, out=self.places)
        words = np.frombuffer(masks.words, np.int32).reshape(len(masks.places), -1)
        pinned = next((turn[: len(words)] for turn in self.turns if words.ctypes.data == turn.data_ptr()), None)
        if pinned is not None:
            self.words[: len(words)].copy_(pinned, non_blocking=True)
        else:
            to_device(words, self.device, out=self.words[: len(words)])

    def of(self, num_samples: int) -> SampleMasks:
        """What was brought, for that many samples."""
        return SampleMasks(self.places[:num_samples], self.words)

    def none(self) -> SampleMasks:
        """A mask that is nobody's."""
        nobody = torch.full((1,), NOBODY, dtype=torch.int32, device=self.device)
        return SampleMasks(nobody, nobody.expand(self.num_words)[None])
