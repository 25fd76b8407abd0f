"""A Ray cluster as its driver sees it: joining one, or starting one on this machine, and finding devices in it.

Used by `ray.py`. Every way in which this can fail is one sentence (ClusterError). Knows Ray and machines, not workers.
"""

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from quire import env
from quire.errors import ClusterError
from quire.ranks import RankNode

log = logging.getLogger(__name__)

REACH_S = 5.0  # for the head of a cluster to answer
PLACE_S = 25.0  # for devices that others give back, and for Ray to notice that a machine is gone: some 15 s
TICK_S = 0.5
ANSWER_S = 3.0
FOLDERS, PREFIX = "/tmp", "quire-ray-"  # paths of sockets must be short
OBJECT_STORE_BYTES = 128 << 20  # of a cluster of our own: messages are small

# Ray's processes die with the thread that started them: this one lives as long as the process.
_parent = ThreadPoolExecutor(1, thread_name_prefix="parent of Ray")


def import_ray() -> ModuleType:
    try:
        import ray
    except ImportError:
        raise ClusterError(
            "Ray is not installed: pip install 'quire[ray]', or leave out --distributed-executor-backend ray"
        ) from None
    return ray


@dataclass
class Cluster:
    """The one that this process is connected to."""

    ray: ModuleType
    device: str  # CPU or GPU, as Ray calls them
    is_ours: bool = False  # to leave
    folder: str = ""  # of a cluster that is ours to stop
    before: dict[str, str | None] = field(default_factory=dict)  # the environment, before that had a token
    group: Any = None  # the devices that Ray keeps for us
    bundles: list[int] = field(default_factory=list)  # of these, by rank
    managers: dict[str, tuple[str, int]] = field(default_factory=dict)  # where Ray listens, by machine

    def place(self, size: int, num_stages: int) -> list[RankNode]:
        """Has a device for each rank: those of a stage on one machine, if any machine has so many."""
        count = size * num_stages
        nodes = self._nodes()
        if sum(nodes.values()) < count:
            raise self._shortage(count, nodes)
        if any(num_devices >= size for num_devices in nodes.values()):
            bundles = [{self.device: size}] * num_stages
            of_ranks = [rank // size for rank in range(count)]
        else:
            bundles = [{self.device: 1}] * count
            of_ranks = list(range(count))
        util = self.ray.util
        self.group = util.placement_group(bundles, strategy="PACK")
        self._wait_for_group(count)
        places: dict[int, str] = util.placement_group_table(self.group)["bundles_to_node_id"]
        if len(bundles) == count:  # neighbours in a stage on one machine, as far as possible
            of_ranks = sorted(of_ranks, key=lambda bundle: (places[bundle], bundle))
        self.bundles = of_ranks
        self.managers = {
            node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in self.ray.nodes()
        }
        return [RankNode(places[bundle], self.managers[places[bundle]][0]) for bundle in of_ranks]

    def _wait_for_group(self, count: int) -> None:
        deadline = time.monotonic() + PLACE_S
        while not self.group.wait(TICK_S):
            nodes = self._nodes()
            if sum(nodes.values()) < count or time.monotonic() > deadline:
                raise self._shortage(count, nodes)

    def _nodes(self) -> dict[str, int]:
        """How many devices each machine has that is there."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        return {node["NodeManagerAddress"]: int(node["Resources"].get(self.device, 0)) for node in alive}

    def is_there(self, node_id: str) -> bool:
        """Whether Ray still answers on this machine. That a machine is gone is known to the cluster much later."""
        try:
            socket.create_connection(self.managers[node_id], ANSWER_S).close()
        except OSError:
            return False
        return True

    def _shortage(self, count: int, nodes: dict[str, int]) -> ClusterError:
        free = int(self.ray.available_resources().get(self.device, 0))
        where = ", ".join(f"{num_devices} at {address}" for address, num_devices in sorted(nodes.items()))
        return ClusterError(
            f"{count} workers need a {self.device} each, and the Ray cluster has {sum(nodes.values())}, of which "
            f"{free} are free ({where or 'no machine'}): add machines, or lower --tensor-parallel-size or "
            "--pipeline-parallel-size"
        )

    def actor(self, kind: type, rank: int) -> Any:
        """A worker of this class on the rank's device. It runs one call after the other, and dies with this process."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[rank])
        on_gpu = self.device == "GPU"
        options: dict[str, Any] = {"num_cpus": 0 if on_gpu else 1, "num_gpus": 1 if on_gpu else 0}
        made = self.ray.remote(kind).options(
            **options, max_restarts=0, max_task_retries=0, max_concurrency=1, scheduling_strategy=strategy
        )
        return made.remote()

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            if self.group is not None:
                self.ray.util.remove_placement_group(self.group)
        self.group = None
        if self.is_ours:
            self.is_ours = False
            with contextlib.suppress(Exception):
                _parent.submit(self.ray.shutdown).result()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""
            env.restore(self.before)
            _read_environment()


def join(address: str | None, device: str, num_devices: int) -> Cluster:
    """The cluster that the program is in already, the one at `address` or RAY_ADDRESS, or a fresh one of our own."""
    ray = import_ray()
    kind = "CPU" if device == "cpu" else "GPU"
    if ray.is_initialized():
        return Cluster(ray, kind)
    address = address or env.ray_address()
    logging.getLogger("ray").setLevel(logging.ERROR)
    if not address or address == "local":
        return _start(ray, kind, num_devices)
    _check_reachable(address)
    with _said_shortly(address):
        _show_token(address)
        _init(ray, address=address)
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    if not is_token_auth_enabled():
        log.warning(
            "this Ray cluster asks nobody for a token: whoever reaches its ports can run code on all its machines; "
            "set RAY_AUTH_MODE=token"
        )
    return Cluster(ray, kind, is_ours=True)


def _start(ray: ModuleType, kind: str, num_devices: int) -> Cluster:
    """On this machine, for us alone: on the loopback interface, with a token that nobody else has."""
    cluster = Cluster(ray, kind, folder=_folder())
    cluster.before = env.set_up_ray(secrets.token_hex(32))
    _read_environment()
    devices = {"num_cpus": num_devices, "num_gpus": 0} if kind == "CPU" else {"num_cpus": 1}
    options = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "_temp_dir": cluster.folder}
    try:
        with _said_shortly("this machine"), _on_loopback():
            _init(ray, address="local", _node_ip_address="127.0.0.1", **devices, **options)
    except BaseException:
        cluster.close()
        raise
    cluster.is_ours = True
    return cluster


def _folder() -> str:
    """For Ray's sockets and logs: only this user may enter. Those of processes that were killed are removed."""
    for left in Path(FOLDERS).glob(f"{PREFIX}*"):
        pid = left.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and left.stat().st_uid == os.geteuid() and not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=FOLDERS)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Else Ray would take the loopback address for another that other machines reach."""
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _init(ray: ModuleType, **options: Any) -> None:
    """Workers find modules where this program does, also those that are not installed."""
    installed = sys.prefix, sys.base_prefix
    own = [path for path in sys.path if path and not path.startswith(installed)]
    job = ray.job_config.JobConfig(_py_driver_sys_path=own)
    _parent.submit(lambda: ray.init(configure_logging=False, job_config=job, **options)).result()


def _read_environment() -> None:
    """Ray has read it when it was imported, and reads it again."""
    raylet = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _show_token(address: str) -> None:
    """AuthenticationError: it is not the cluster's. `ray.init` would try for long, and not say why it failed."""
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    if address != "auto":
        importlib.import_module("ray._raylet").GcsClient(address=address)


def _check_reachable(address: str) -> None:
    """Ray itself would try for a minute."""
    if "://" in address:
        raise ClusterError(f"--ray-address {address:.80} is not host:port: give the port of the head, such as 6379")
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except ValueError:
        raise ClusterError(f"--ray-address {address:.80} is not host:port, such as 10.0.0.1:6379") from None
    except OSError as error:
        why = error.strerror or error
        raise ClusterError(
            f"no Ray cluster answers at {address:.80} ({why}): start one there with ray start --head, or correct "
            "--ray-address or RAY_ADDRESS"
        ) from None
    from ray._private.services import find_node_ids

    if not find_node_ids():
        raise ClusterError(f"this machine is not part of the Ray cluster: run ray start --address={address:.80} on it")


@contextlib.contextmanager
def _said_shortly(where: str) -> Iterator[None]:
    """What Ray raises, as one sentence."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except Exception as error:
        log.debug("Ray failed", exc_info=error)
        text = " ".join(str(error).split())
        if isinstance(error, AuthenticationError) or "authenticat" in text.lower():
            said = (
                f"the Ray cluster at {where:.80} refused our token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH to the token with which it was started"
            )
        elif "ersion mismatch" in text:
            said = f"the Ray cluster at {where:.80} runs other versions: {text:.300}"
        else:
            said = f"the Ray cluster at {where:.80} cannot be joined: {text:.300}"
        raise ClusterError(said) from None
