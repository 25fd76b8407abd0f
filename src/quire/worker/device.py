"""What the worker and its runner need of a device: the names that `cpu/device.py` and `gpu/device.py` both have.

The two are modules; `worker.py` chooses one and hands it to the runner. Only types are here.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.attention.base import StepShape
from quire.sampling.sampler import SampleMasks
from quire.step import Masks
from quire.worker.inputs import SampleShape

if TYPE_CHECKING:
    from quire.worker.runner import Runner


class DeviceMasks(Protocol):
    """Brings the grammars' masks of a step to the device."""

    def memory(self, num_rows: int, num_words: int, is_new: bool) -> memoryview | None:
        """As `Executor.mask_memory`."""

    def bring(self, masks: Masks) -> None:
        """Starts the copy; `masks.places` are indices of samples."""

    def of(self, num_samples: int) -> SampleMasks:
        """The masks that were brought last, for a step of `num_samples` samples."""


class DeviceRecordings(Protocol):
    """Steps that were recorded once and are replayed."""

    def get_ready(self) -> None:
        """Makes the recordings that are needed before the first request."""

    def find(self, exact: StepShape) -> StepShape | None:
        """The shape of a recording that a step of the shape `exact` fits into; None: there is none."""

    def forward(self, shape: StepShape) -> Tensor:
        """Replays the forward pass of that shape; returns hidden states as `Runner.compute` does."""

    def sample(self, exact: SampleShape) -> bool:
        """Samples by replaying a recording that `exact` fits into; False: there is none, and nothing is done."""

    @property
    def num_recorded(self) -> int:
        """How many there are."""

    def record_next(self) -> None:
        """Called between steps: may make one more recording."""


class Device(Protocol):
    # Kernels, as in the files of their names in `ops/`.
    accept: Callable[..., None]
    copy_blocks: Callable[..., None]
    correct_starts: Callable[..., None]
    gather_rows: Callable[..., Tensor]
    mask_logits: Callable[..., None]
    place_samples: Callable[..., None]
    place_slots: Callable[..., None]
    place_tokens: Callable[..., None]
    sample: Callable[..., None]

    @property
    def scatter_segments(self) -> Callable[..., None] | None:
        """None: host and device are the same memory."""

    @property
    def Scratch(self) -> Callable[[int, int, torch.device], object]:
        """(rows, vocabulary, device): memory for the use of `sample`."""

    @property
    def MaskStaging(self) -> Callable[[int, int, torch.device], DeviceMasks]:
        """(rows, vocabulary, device)."""

    @property
    def Recordings(self) -> "Callable[[Runner], DeviceRecordings]": ...

    def open(self, device: torch.device, idx: int = 0) -> None:
        """Prepares the device, number `idx` of several, for this process; raises if it cannot be used."""

    def capacity(self, what: str) -> AbstractContextManager[None]:
        """Running out of memory while doing `what` becomes an error for people."""

    def kv_memory_bytes(self, config: EngineConfig, make_runner: "Callable[[], Runner]") -> int:
        """Bytes that KV blocks may take."""

    def known_lengths(self, lengths: Tensor) -> np.ndarray | None:
        """The lengths of all rows, if the host can know them without waiting."""

    def release(self) -> None:
        """Gives unused memory back."""
