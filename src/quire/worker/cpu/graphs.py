"""Steps in which every row gets one token, played from a tape instead of walked through in Python.

Used by the runner. Everything that varies lies in fixed buffers; one tape, recorded when the engine starts, serves any number of
rows. A pass in which plain torch computes something is not recorded, and neither is sampling.
"""

import logging
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from quire.layers.attention.base import StepShape
from quire.ops.cpu.tape import Recording, Tape
from quire.worker.inputs import SampleShape, decode_shape

if TYPE_CHECKING:
    from quire.worker.runner import Runner

log = logging.getLogger(__name__)

MAX_ROWS = 256
RECORDED_ROWS = 2


class Recordings:
    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        self.max_rows = min(MAX_ROWS, runner.limits.num_rows, runner.limits.max_tokens)
        self.tape: Tape | None = None

    def get_ready(self) -> None:
        """Records with rows that look at token 0 of block 0, which is nobody's, and write nowhere."""
        if self.max_rows < RECORDED_ROWS:
            return
        shape, inputs = decode_shape(RECORDED_ROWS), self.runner.inputs
        inputs.host["context_lens"][:RECORDED_ROWS] = 1
        inputs.host["query_starts"][: RECORDED_ROWS + 1] = np.arange(RECORDED_ROWS + 1)
        self.runner.run_model(shape)  # methods make at first use what they keep
        with Recording() as recording:
            hidden_TD = self.runner.run_model(shape)
        self.tape = recording.tape(hidden_TD, self.max_rows)
        if self.tape is None:
            log.debug("steps cannot be recorded: torch computes a part of them")

    def find(self, exact: StepShape) -> StepShape | None:
        """The shape of a recording that does for such a step."""
        return exact if self.tape is not None and exact.decode and exact.num_rows <= self.max_rows else None

    def forward(self, shape: StepShape) -> Tensor:
        self.runner.place(shape)
        hidden_TD = self.tape.play(shape.num_rows)
        self.runner.keep(hidden_TD, shape)
        return hidden_TD

    def find_sampling(self, exact: SampleShape) -> None:
        return None

    def record_next(self) -> None:
        pass
