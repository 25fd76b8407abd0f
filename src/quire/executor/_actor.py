"""The worker that Ray runs on a machine of the cluster: how it begins.

Placed by `ray.py`. Ray finds this class by its name, in the Quire that the machine has; what it does is in
`worker/remote.py`, reached by dotted path. What can be asked before versions are known to be the same takes and gives
plain strings.
"""

import importlib
import platform
from importlib.metadata import PackageNotFoundError, version

from quire.checkpoint.digest import model_digest

WORKER = "quire.worker.remote"


def versions() -> dict[str, str]:
    """Of what must be the same everywhere."""
    from quire import __version__

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"Quire": __version__, "torch": torch.partition("+")[0], "Python": platform.python_version()}


def digests(models: list[str]) -> list[str]:
    """Of each of these models; empty: it is not there."""
    found = []
    for model in models:
        try:
            found.append(model_digest(model))
        except OSError:
            found.append("")
    return found


class RankActor:
    def versions(self) -> dict[str, str]:
        return versions()

    def digests(self, models: list[str]) -> list[str]:
        return digests(models)

    def open(self, setup: bytes) -> bytes:
        self.rank = importlib.import_module(WORKER).RemoteRank(setup)
        return self.rank.open()

    def run(self, offers: bytes) -> None:
        """Until it fails, or is killed."""
        self.rank.run(offers)
