"""Forward passes in which every row has one token: the calls of compiled kernels are replayed from a tape.

Used by the runner. Everything that varies is in buffers at fixed addresses; one tape, recorded when the engine starts,
serves any number of rows. A pass that also computes something with torch is not recorded, and neither is sampling.
"""

import logging
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from quire.errors import EngineError
from quire.layers.attention.base import StepShape
from quire.ops.cpu.tape import Recording, Tape
from quire.worker.inputs import SampleShape, decode_shape

if TYPE_CHECKING:
    from quire.worker.runner import Runner

log = logging.getLogger(__name__)

MAX_ROWS = 256
RECORDED_ROWS = 2
MAX_SHOWN = 5  # operations that the log names


class Recordings:
    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        self.max_rows = min(MAX_ROWS, runner.limits.num_samples, runner.limits.max_tokens)
        self.tape: Tape | None = None
        self.computed_by_torch: set[str] = set()  # what keeps a pass from being recorded

    def get_ready(self) -> None:
        """Records a pass whose rows read token 0 of block 0, which no request uses, and write nothing."""
        if self.max_rows < RECORDED_ROWS:
            return
        shape = decode_shape(RECORDED_ROWS)
        inputs = self.runner.inputs
        inputs.host["context_lens"][:RECORDED_ROWS] = 1
        inputs.host["query_starts"][: RECORDED_ROWS + 1] = np.arange(RECORDED_ROWS + 1)
        self.runner.run_model(shape)  # some methods allocate at first use what they keep
        with Recording() as recording:
            hidden_TD = self.runner.run_model(shape)
        self.tape = recording.tape(hidden_TD, self.max_rows)
        self.computed_by_torch = recording.computed
        if self.tape is None:
            names = ", ".join(sorted(self.computed_by_torch)[:MAX_SHOWN])
            reason = f"torch computes {names}" if names else "the sizes of buffers do not follow the number of rows"
            log.info("decode steps cannot be recorded, and take longer for that: %s", reason)

    def find(self, exact: StepShape) -> StepShape | None:
        is_playable = exact.decode and exact.num_rows <= self.max_rows
        return exact if is_playable and self.tape is not None else None

    def forward(self, shape: StepShape) -> Tensor:
        if self.tape is None:
            raise EngineError("a step is to be replayed that was not recorded: this is a bug in the runner")
        self.runner.begin(shape)
        hidden_TD = self.tape.play(shape.num_rows)
        self.runner.end(hidden_TD, shape)
        return hidden_TD

    def sample(self, exact: SampleShape) -> bool:
        return False

    @property
    def num_recorded(self) -> int:
        return 0 if self.tape is None else 1

    def record_next(self) -> None:
        pass
