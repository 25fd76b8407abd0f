"""Copies between host and device during which the host does not wait.

Pinned memory comes from torch's own cache, which reuses a buffer only when the copy that used it is done.
`torch.tensor` on a GPU, or a list as an index, would instead wait for all work that is queued on the device.
"""

import numpy as np
import torch
from torch import Tensor

UPLOAD_BYTES = 32 << 20


def to_device(values: np.ndarray, device: torch.device, out: Tensor | None = None) -> Tensor:
    """A copy of `values` on the device, or in `out`. On a GPU it is queued behind the work already launched."""
    if device.type != "cuda":
        host = torch.from_numpy(values)
        return host if out is None else out.copy_(host)
    pinned = torch.empty(values.shape, dtype=torch.from_numpy(values[:0]).dtype, pin_memory=True)
    pinned.numpy()[...] = values
    return pinned.to(device, non_blocking=True) if out is None else out.copy_(pinned, non_blocking=True)


def on_device(values: list, device: torch.device, dtype: type = np.int64) -> Tensor:
    """`torch.tensor(values)` for lists, int64 by default."""
    return to_device(np.array(values, dtype), device)


class Upload:
    """Large arrays of bytes to a GPU: all threads fill one of two pinned buffers while the other is being copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers = [torch.empty(UPLOAD_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.sent = [torch.cuda.Event() for _ in self.buffers]
        self.turn = 0

    def __call__(self, raw: Tensor) -> Tensor:
        out = torch.empty_like(raw, device=self.device)
        for source, target in zip(raw.split(UPLOAD_BYTES), out.split(UPLOAD_BYTES)):
            self.turn = 1 - self.turn
            self.sent[self.turn].synchronize()
            buffer = self.buffers[self.turn][: len(source)]
            target.copy_(buffer.copy_(source), non_blocking=True)
            self.sent[self.turn].record()
        return out


class ToHost:
    """Tensors on their way to the host; `wait` returns them once they have arrived."""

    def __init__(self, *tensors: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        if not tensors or not tensors[0].is_cuda:
            self.tensors = tuple(t.clone() for t in tensors)  # the next step overwrites the originals
            return
        self.tensors = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
        for target, source in zip(self.tensors, tensors):
            target.copy_(source, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()

    def wait(self) -> tuple[Tensor, ...]:
        if self.event is not None:
            self.event.synchronize()
        return self.tensors
