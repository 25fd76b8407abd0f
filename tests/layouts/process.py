"""A worker process that builds model after model, for tests of many: `python -m tests.layouts.process`."""

import sys

import msgspec

from quire.config import EngineConfig
from quire.ranks import Command, RankSetup, Reply
from quire.worker.process import RankProcess, main
from quire.worker.worker import Worker


class Reload(msgspec.Struct, array_like=True, tag="reload"):
    """Asks for another model instead of the last; answered as at the start."""

    config: EngineConfig


class ReusedProcess(RankProcess):
    def __init__(self, setup: RankSetup) -> None:
        super().__init__(setup)
        self.decode = msgspec.msgpack.Decoder(Command | Reload).decode

    def carry_out(self, command: Command | Reload) -> Reply | None:
        if not isinstance(command, Reload):
            return super().carry_out(command)
        place = self.worker.ranks
        self.worker.close()
        self.worker = Worker(command.config, place)
        return self._facts()


if __name__ == "__main__":
    sys.exit(main(ReusedProcess))
