"""A model that crashes at the marked prompts of tests/poison.py, and takes no more than so many steps per second.

`--executor tests.poison_real:20`: twenty; without a number, as many as it can.
"""

import time

from quire.config import EngineConfig
from quire.executor.inproc import InprocExecutor, prepare  # noqa: F401
from quire.step import StepPlan
from tests.poison import obey


class PoisonReal(InprocExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        steps_per_s = config.parallel.executor.partition(":")[2]
        self.step_s = 1 / float(steps_per_s) if steps_per_s else 0.0

    def forward(self, plan: StepPlan) -> None:
        obey(plan)
        time.sleep(self.step_s)
        super().forward(plan)


EXECUTOR = PoisonReal
