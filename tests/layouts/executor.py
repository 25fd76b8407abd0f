"""One set of processes per layout, for all models of a test run: `--executor tests.layouts.executor`.

Starting a process takes seconds, most of them for importing torch; a tiny model is built in a tenth of one.
"""

from quire.config import EngineConfig
from quire.executor.multiproc import MultiprocExecutor
from quire.ranks import Facts
from tests.layouts.process import Reload

_started: "dict[tuple[int, int], ReusedExecutor]" = {}


class ReusedExecutor(MultiprocExecutor):
    process_module = "tests.layouts.process"

    def take(self, config: EngineConfig) -> "ReusedExecutor":
        self.config = config
        try:
            self._send(Reload(config))
            self.facts = self._replies(Facts)
        except BaseException:
            self.end()
            raise
        return self

    def close(self) -> None:
        """Kept for the next model, unless something went wrong."""
        if self.problem:
            self.end()

    def end(self) -> None:
        _started.pop(_layout(self.config), None)
        super().close()


def _layout(config: EngineConfig) -> tuple[int, int]:
    return config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size


def EXECUTOR(config: EngineConfig) -> ReusedExecutor:
    layout = _layout(config)
    if layout in _started:
        return _started[layout].take(config)
    _started[layout] = ReusedExecutor(config)
    return _started[layout]


def end_all() -> None:
    for executor in list(_started.values()):
        executor.end()
