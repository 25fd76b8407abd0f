"""Executors that crash when they meet a marked prompt: what a bug in a kernel looks like from outside.

Used as `--executor tests.poison` (an echo model) or `tests.poison_real` (the real one), in a core process of its own.
"""

import os
import signal
import time

from quire.executor.echo import EchoExecutor
from quire.step import StepPlan

# Token ids with which no ordinary prompt of the tests begins.
RAISE = (11, 11, 1)
EXIT = (11, 11, 2)
HANG = (11, 11, 3)
CRASH = (11, 11, 4)
POISONS = {"raise": RAISE, "exit": EXIT, "hang": HANG, "crash": CRASH}


def obey(plan: StepPlan) -> None:
    for start in plan.new_rows:
        mark = tuple(start.token_ids[:3])
        if mark == RAISE:
            raise RuntimeError("poisoned")
        if mark == EXIT:
            os._exit(3)
        if mark == HANG:
            time.sleep(3600)
        if mark == CRASH:
            os.kill(os.getpid(), signal.SIGSEGV)


class PoisonEcho(EchoExecutor):
    def forward(self, plan: StepPlan) -> None:
        obey(plan)
        super().forward(plan)


EXECUTOR = PoisonEcho
