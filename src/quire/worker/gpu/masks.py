"""Where grammar masks are written so that the device can fetch them: pinned memory, in turns, because a fetch may still be under way.

Owned by the runner.
"""

import numpy as np
import torch
from torch import Tensor

from quire.ops.transfer import to_device
from quire.step import Masks


class MaskStaging:
    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.num_rows, self.device = num_rows, device
        self.turns: list[Tensor] = []  # made when the first mask comes
        self.turn = 0

    def memory(self, num_rows: int, num_words: int) -> memoryview | None:
        """For a step's masks. Those of the step before the last have arrived: its tokens were waited for."""
        if self.device.type != "cuda":
            return None
        if not self.turns:
            self.turns = [torch.empty(self.num_rows, num_words, dtype=torch.int32, pin_memory=True) for _ in range(3)]
        self.turn = (self.turn + 1) % len(self.turns)
        return memoryview(self.turns[self.turn][:num_rows].numpy()).cast("B")

    def to_device(self, masks: Masks) -> Tensor:
        words = np.frombuffer(masks.words, np.int32).reshape(len(masks.places), -1)
        for pinned in self.turns:
            if words.ctypes.data == pinned.data_ptr():
                return pinned[: len(words)].to(self.device, non_blocking=True)
        return to_device(words, self.device)
