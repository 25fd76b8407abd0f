"""Worker processes that crash at the marked prompts of tests/poison.py: what a bug in one rank's kernel looks like.

`--executor tests.poison_ranks:1`: rank 1 does; without a number, rank 0. `tests.poison_ranks:1,20`: it also takes no
more than twenty steps a second.
"""

import sys
import time

from quire.executor import _processes
from quire.executor.multiproc import MultiprocExecutor
from quire.ranks import Command, Forward, Reply
from quire.worker.process import RankProcess, main
from tests.poison import obey

MODULE = "tests.poison_ranks"


class PoisonRank(RankProcess):
    def carry_out(self, command: Command) -> Reply | None:
        poisoned, _, steps_per_s = self.setup.config.parallel.executor.partition(":")[2].partition(",")
        if isinstance(command, Forward) and self.setup.rank == int(poisoned or 0):
            obey(command.plan)
            time.sleep(1 / float(steps_per_s) if steps_per_s else 0.0)
        return super().carry_out(command)


class PoisonRanks(MultiprocExecutor):
    process_module = MODULE


def prepare(num_workers: int) -> None:
    _processes.start_spares(MODULE, num_workers)


EXECUTOR = PoisonRanks

if __name__ == "__main__":
    sys.exit(main(PoisonRank))
