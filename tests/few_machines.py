"""An echo model whose cluster is too small now and then: `--executor tests.few_machines:PATH`, while PATH exists."""

from pathlib import Path

from quire.errors import ClusterError
from quire.executor.echo import EchoExecutor


class FewMachines(EchoExecutor):
    def __init__(self, config) -> None:
        path = Path(config.parallel.executor.partition(":")[2])
        if path.exists():
            path.write_text(path.read_text() + "x")  # one more attempt
            raise ClusterError("2 workers need a CPU each, and the Ray cluster has 1 (1 at 10.0.0.1)")
        super().__init__(config.replace(distributed_executor_backend="echo:50"))


EXECUTOR = FewMachines
