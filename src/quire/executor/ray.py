"""Workers on the machines of a Ray cluster, one per device: `--distributed-executor-backend ray`.

Ray finds the machines and starts an actor for each worker (`_actor.py`), which then runs until it dies: that is how its
death is known. Commands and replies pass through an encrypted channel of ours, not through Ray, where calling two
actors takes a millisecond. Knows Ray and the channel, not what is said to workers.
"""

import logging
import secrets
import signal
import time
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

import msgspec

from quire import env
from quire.errors import ClusterError, QuireError, WorkerDied
from quire.executor import _cluster
from quire.executor._actor import RankActor, digests, versions
from quire.executor._remote import RemoteExecutor
from quire.ranks import Failure, NodeSetup, Offer
from quire.utils.channel import ChannelServer
from quire.utils.network import reachable_from

log = logging.getLogger(__name__)

TICK_S = 1.0  # how often a death is looked for while other workers still compute
GRACE_S = 3.0  # for the death of a worker to be known that made another fail
SILENCE_S = 10.0  # after which machines are asked whether they can be reached: Ray takes a minute to say so
START_S = 60.0  # for an actor's process to start
OPEN_S = 120.0  # for it to import torch


def prepare(num_workers: int) -> None:
    with suppress(QuireError):  # that it is not installed is said later
        _cluster.import_ray()


class RayExecutor(RemoteExecutor):
    def _start(self) -> None:
        self.closing = ExitStack()
        parallel, device = self.config.parallel, self.config.device.device
        self.cluster = _cluster.join(parallel.ray_address, device, parallel.num_workers)
        self.closing.callback(self.cluster.close)
        self.ray = self.cluster.ray
        self.nodes = self.cluster.place(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self.actors = [self.cluster.actor(RankActor, rank) for rank in range(parallel.num_workers)]
        self.closing.callback(self._kill)
        self._check_versions()
        self._check_models()
        self.channel = ChannelServer(reachable_from([node.address for node in self.nodes]), parallel.num_workers)
        self.closing.callback(self.channel.close)
        offers = self._offers()
        self.runs = [actor.run.remote(offers) for actor in self.actors]  # the end of each
        self.heard_at = time.monotonic()

    def _name(self, rank: int) -> str:
        return f"{super()._name(rank)} at {self.nodes[rank].address}"

    def _check_versions(self) -> None:
        ours = versions()
        for rank, theirs in enumerate(self._answers([actor.versions.remote() for actor in self.actors], START_S)):
            wrong = [
                f"{name} {theirs.get(name)} instead of {own}" for name, own in ours.items() if theirs.get(name) != own
            ]
            if wrong:
                raise ClusterError(
                    f"the machine {self.nodes[rank].address} has {' and '.join(wrong)}: install the same everywhere"
                )

    def _check_models(self) -> None:
        """Every machine reads its own copy, under the same path."""
        speculation = self.config.speculative.speculation
        models = [self.config.model.model, *([speculation.model] if speculation and speculation.model else [])]
        ours = digests(models)
        asked = list({node.node_id: rank for rank, node in enumerate(self.nodes)}.values())
        found = self._answers([self.actors[rank].digests.remote(models) for rank in asked], OPEN_S, asked)
        for rank, theirs in zip(asked, found):
            for model, own, other in zip(models, ours, theirs, strict=True):
                if own != other:
                    what = "has other files than this one under" if other else "has no model under"
                    raise ClusterError(
                        f"the machine {self.nodes[rank].address} {what} {model}: copy the model to the same path on "
                        "all machines"
                    )

    def _offers(self) -> bytes:
        """Has every rank open what others need of it."""
        prefix, level = secrets.token_hex(16), env.log_level()
        calls = []
        for rank, actor in enumerate(self.actors):
            setup = NodeSetup(
                config=self.config,
                rank=rank,
                nodes=self.nodes,
                channel=self.channel.ends[rank],
                prefix=prefix,
                log_level=level,
            )
            calls.append(actor.open.remote(self.encode(setup)))
        offers = []
        for data in self._answers(calls, OPEN_S):
            offer = msgspec.msgpack.decode(data, type=Offer | Failure)
            if isinstance(offer, Failure):
                raise offer.error()
            offers.append(offer)
        return self.encode(offers)

    def _answers(self, calls: list[Any], timeout_s: float, ranks: list[int] | None = None) -> list[Any]:
        """What each of these calls gave, before there are commands."""
        found = []
        for rank, call in zip(ranks or range(len(calls)), calls):
            try:
                found.append(self.ray.get(call, timeout=timeout_s))
            except Exception as error:
                self._cannot_start(rank, error)
        return found

    def _cannot_start(self, rank: int, error: Exception) -> NoReturn:
        address, text = self.nodes[rank].address, " ".join(str(error).split())
        log.debug("worker %d cannot start", rank, exc_info=error)
        if "No module named 'quire'" in text:
            raise ClusterError(f"the machine {address} has no Quire: install the same version on all machines")
        if isinstance(error, self.ray.exceptions.GetTimeoutError):
            raise ClusterError(f"worker {rank} did not start on the machine {address} in time: see Ray's logs there")
        raise ClusterError(f"worker {rank} cannot start on the machine {address}: {text:.300}")

    def check(self) -> None:
        self._look_for_deaths()

    def close(self) -> None:
        self.closing.close()

    def _kill(self) -> None:
        for actor in self.actors:
            with suppress(Exception):  # it may be dead
                self.ray.kill(actor)

    # -- speaking to workers ---------------------------------------------------------------------------------------

    def _post(self, command: bytes) -> None:
        try:
            self.channel.send(command)
        except ConnectionError:
            self._look_for_deaths(GRACE_S)
            self._break(WorkerDied("a worker cannot be reached any more"))

    def _take_in(self) -> None:
        received = self.channel.receive(TICK_S)
        if received:
            self.heard_at = time.monotonic()
        else:
            self._look_for_deaths()
            self._look_for_lost_machines()
        for rank, data in received:
            self._taken(rank, data)

    def _break(self, error: QuireError) -> NoReturn:
        """Whoever exchanged with a rank that died has failed, too, and may say so before that is known."""
        if isinstance(error, WorkerDied):
            self._look_for_deaths(GRACE_S)
        super()._break(error)

    def _look_for_deaths(self, timeout_s: float = 0) -> None:
        """Those that failed have said so, and ended in peace."""
        ended, _ = self.ray.wait(self.runs, num_returns=len(self.runs), timeout=timeout_s)
        for run in ended:
            try:
                self.ray.get(run)
            except self.ray.exceptions.RayError as error:
                super()._break(self._death(self.runs.index(run), error))

    def _look_for_lost_machines(self) -> None:
        """Where nobody has said anything for long: their links may be down. A long load is silent, too."""
        if time.monotonic() - self.heard_at < SILENCE_S:
            return
        self.heard_at = time.monotonic()
        for node_id, rank in {node.node_id: rank for rank, node in enumerate(self.nodes)}.items():
            if not self.cluster.is_there(node_id):
                super()._break(self._loss(rank))

    def _death(self, rank: int, error: Exception) -> WorkerDied:
        node = self.nodes[rank]
        log.debug("worker %d died", rank, exc_info=error)
        if not self.cluster.is_there(node.node_id):
            return self._loss(rank)
        return WorkerDied(f"worker {rank} on the machine {node.address} died: its log, or the system's, may have more")

    def _loss(self, rank: int) -> WorkerDied:
        """Which is nobody's fault."""
        return WorkerDied(f"worker {rank} died with its machine {self.nodes[rank].address}", signal.SIGKILL)


EXECUTOR = RayExecutor
