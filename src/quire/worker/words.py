"""Arrays of 32-bit words with named parts, which the host writes and a step's kernels read, at fixed addresses.

Used by the persistent batch and by a step's inputs. On a CPU, host and device share memory and nothing is copied.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.ops.transfer import to_device

ALIGNMENT_WORDS = 4  # 16 bytes: kernels are compiled for aligned parts


class Words:
    """One int32 array; `host` and `device` have its parts by name."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        sizes = [math.prod(shape) for shape in shapes.values()]
        padded = [-(-size // ALIGNMENT_WORDS) * ALIGNMENT_WORDS for size in sizes]
        self.starts = dict(zip(shapes, np.cumsum([0, *padded[:-1]]).tolist()))
        self.host_words = np.zeros(sum(padded), np.int32)
        on_host = torch.from_numpy(self.host_words)
        self.words = on_host if device.type == "cpu" else torch.zeros_like(on_host, device=device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for (name, shape), size in zip(shapes.items(), sizes):
            part = slice(self.starts[name], self.starts[name] + size)
            self.host[name] = self.host_words[part].reshape(shape)
            self.device[name] = self.words[part].view(shape)

    def send(self) -> None:
        """Copies all of it, in the order of the device's work."""
        if self.words.device.type != "cpu":
            to_device(self.host_words, self.words.device, self.words)


class RowWords:
    """Parts [rows, width] of one int32 array on the device, which the host changes piece by piece.

    A step's changes need one copy and one kernel, however many there are.
    """

    def __init__(
        self, num_rows: int, widths: dict[str, int], device: torch.device, scatter_segments: Callable[..., None] | None
    ) -> None:
        """`scatter_segments`: as in `ops/step/reference.py`; None: the host writes to the array directly."""
        sizes = [num_rows * width for width in widths.values()]
        self.widths = widths
        self.starts = dict(zip(widths, np.cumsum([0, *sizes[:-1]]).tolist()))
        self.words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.parts: dict[str, Tensor] = {}
        for (name, width), part in zip(widths.items(), self.words.split(sizes)):
            self.parts[name] = part.view(num_rows, width)
        self.scatter_segments = scatter_segments
        self.host_words = self.words.numpy() if scatter_segments is None else None
        self.changes: list[tuple[int, np.ndarray]] = []  # (first word, values) that are not sent yet

    def put(self, name: str, row: int, at: int, values: np.ndarray) -> None:
        """Writes `values` into a part's row, from column `at` on; the device sees them after `send`."""
        start = self.starts[name] + row * self.widths[name] + at
        if self.host_words is not None:
            self.host_words[start : start + len(values)] = values
        else:
            self.changes.append((start, values))

    def send(self) -> None:
        if not self.changes or self.scatter_segments is None:
            return
        starts, pieces = zip(*self.changes)
        self.changes.clear()
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        segments = np.stack((np.array(starts, np.int64), np.cumsum(lengths) - lengths, lengths), 1)
        message = to_device(np.concatenate((segments.view(np.int32).ravel(), *pieces)), self.words.device)
        head, payload = message[: 2 * segments.size], message[2 * segments.size :]
        self.scatter_segments(self.words, head.view(torch.int64).view(-1, 3), payload, int(lengths.max()))
