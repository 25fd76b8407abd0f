"""The contract between core and workers, whatever lies between them: a call, a pipe or a network.

Implemented by the files of this folder, used by `core/`. Steps are launched in order and their results come in order;
a launch does not wait for the step to finish.

A file has EXECUTOR, the class, and may have `prepare(num_workers)`: what can be done before a model is known. A core
process that stands by has called it.
"""

from abc import ABC, abstractmethod
from typing import Protocol

from quire.config import EngineConfig
from quire.kv.specs import CacheSpec, KVLayout
from quire.step import Masks, StepPlan, StepResult


class PendingStep(Protocol):
    def result(self) -> StepResult:
        """Waits for the step; raises what the worker raised."""
        ...


class Executor(ABC):
    """Starts workers and speaks to them as one."""

    @property
    def num_drafts(self) -> int:
        """How many tokens the workers' drafter guesses after each one they choose; known once they are loaded."""
        return 0

    @property
    def num_ahead(self) -> int:
        """For how many tokens after those of a step rows need blocks, so that the drafter can guess."""
        return 0

    @property
    def draft_cost(self) -> float:
        """How long the drafter takes to guess a token, in steps."""
        return 0.0

    @property
    def num_graphs(self) -> int:
        """Recordings of steps, on a worker, that are replayed; known once it is allocated."""
        return 0

    @abstractmethod
    def __init__(self, config: EngineConfig) -> None:
        """Loads the model; `config` is resolved."""

    @abstractmethod
    def kv_specs(self) -> dict[str, CacheSpec]:
        """What layers cache, in order, by "path of the layer:name of the cache"."""

    @abstractmethod
    def num_blocks(self, layout: KVLayout) -> list[int]:
        """How many blocks of each pool there is memory for, now that the weights are in."""

    @abstractmethod
    def allocate(self, layout: KVLayout) -> None:
        """Makes the KV tensors and whatever else a step needs."""

    @abstractmethod
    def forward(self, plan: StepPlan) -> None:
        """Launches the forward pass of a step."""

    @abstractmethod
    def sample(self, plan: StepPlan, masks: Masks | None = None) -> PendingStep:
        """Launches the choice of tokens for the step whose forward was launched last; `masks` limit it."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Both launches of a step that needs nothing between them."""
        self.forward(plan)
        return self.sample(plan)

    def mask_memory(self, num_rows: int, num_words: int, is_new: bool) -> memoryview | None:
        """Memory for the next step's masks, from which they reach the device fastest; None: any will do.

        `is_new`: it must not be memory that was given before.
        """
        return None

    def check(self) -> None:
        """Raises if the workers cannot be used any more. Called now and then while there is nothing to do."""
        return

    def sleep(self, keep_weights: bool) -> None:
        """Gives the device's memory back; no step is in flight. `keep_weights`: in the host's memory, if that helps."""
        return

    def wake_up(self) -> None:
        """Takes the memory again: weights as they were, an empty cache."""
        return

    @abstractmethod
    def close(self) -> None:
        """Stops the workers and frees what they hold."""
