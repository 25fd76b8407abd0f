"""The real model, which crashes at the marked prompts of tests/poison.py."""

from quire.executor.inproc import PRELOAD, InprocExecutor  # noqa: F401
from quire.step import StepPlan
from tests.poison import obey


class PoisonReal(InprocExecutor):
    def forward(self, plan: StepPlan) -> None:
        obey(plan)
        super().forward(plan)


EXECUTOR = PoisonReal
