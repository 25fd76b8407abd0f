"""Groups of ranks: processes that share a model's layers, and what they exchange in a step.

Layers call the group of their runtime; the worker makes it. A subclass is a way to exchange (one file each). Every rank
calls in the same order, with tensors of the same shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


class Group:
    """The only rank of its group: there is nobody to exchange with."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, added in the order of ranks: the same bits everywhere. `x` may be overwritten."""
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """What ranks have, side by side along the last dimension; `widths`: how much of it each has."""
        return x


class Link:
    """Between a stage of a pipeline and the next one. One end sends, the other receives, in the same order."""

    def send(self, x: Tensor) -> None:
        """May return before the other end has received it; `x` may be overwritten then."""
        raise NotImplementedError

    def receive(self, x: Tensor) -> None:
        """Waits for what was sent, which has the shape and type of `x`, and writes it there."""
        raise NotImplementedError


@dataclass(frozen=True)
class Ranks:
    """A worker's place among all."""

    group: Group = Group()  # that divides the layers of this worker's stage
    stage: int = 0  # of a pipeline: each has a range of the layers
    num_stages: int = 1
    before: Link | None = None  # from the stage before
    after: Link | None = None  # to the next stage
    device_idx: int = 0  # of this worker's GPU, among those that its process sees

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


ALONE = Ranks()
