"""Copies between host and device that nobody waits for.

Pinned memory comes from torch's own cache, which gives a buffer out again only when the copy that used it is done.
"""

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: torch.device, out: Tensor | None = None) -> Tensor:
    """A copy of `values` on the device, or in `out`, in the order of the device's work."""
    if device.type != "cuda":
        host = torch.from_numpy(values)
        return host if out is None else out.copy_(host)
    pinned = torch.empty(values.shape, dtype=torch.from_numpy(values[:0]).dtype, pin_memory=True)
    pinned.numpy()[...] = values
    return pinned.to(device, non_blocking=True) if out is None else out.copy_(pinned, non_blocking=True)


class ToHost:
    """Tensors on their way to the host; `wait` gives them when they are there."""

    def __init__(self, *tensors: Tensor) -> None:
        self.event = None
        if not tensors or not tensors[0].is_cuda:
            self.tensors = tuple(t.clone() for t in tensors)  # the next step writes where they are
            return
        self.tensors = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
        for mine, theirs in zip(self.tensors, tensors):
            mine.copy_(theirs, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()

    def wait(self) -> tuple[Tensor, ...]:
        if self.event is not None:
            self.event.synchronize()
        return self.tensors
