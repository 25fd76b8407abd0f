"""Workers on the machines of a Ray cluster, one per device: `--distributed-executor-backend ray`.

Each is an actor (`_actor.py`). A command is a call of every actor with the same bytes; calls queue up there, so steps
are in flight as with rings, and replies are taken in call by call. Wherever they are waited for, so is the death of a
worker or its machine. Knows Ray, not what is said to workers.
"""

import contextlib
import logging
import secrets
import signal
from collections import deque
from typing import Any, NoReturn

import msgspec

from quire import env
from quire.errors import ClusterError, QuireError, WorkerDied
from quire.executor import _cluster
from quire.executor._actor import RankActor, digests, versions
from quire.executor._cluster import Cluster
from quire.executor._remote import RemoteExecutor
from quire.ranks import Failure, NodeSetup, Offer

log = logging.getLogger(__name__)

TICK_S = 1.0  # how often a death is looked for while other workers still compute
GRACE_S = 3.0  # for the death of a worker to be known that made another fail
START_S = 60.0  # for an actor's process to start
OPEN_S = 120.0  # for it to import torch


def prepare(num_workers: int) -> None:
    with contextlib.suppress(QuireError):  # that it is not installed is said later
        _cluster.import_ray()


class RayExecutor(RemoteExecutor):
    def _start(self) -> None:
        self.cluster: Cluster | None = None
        self.actors: list[Any] = []
        self.calls: deque[list[Any]] = deque()  # the results to come of each call, by rank
        parallel, device = self.config.parallel, self.config.device.device
        self.cluster = _cluster.join(parallel.ray_address, device, parallel.num_workers)
        self.ray = self.cluster.ray
        self.nodes = self.cluster.place(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self.actors = [self.cluster.actor(RankActor, rank) for rank in range(parallel.num_workers)]
        self._check_versions()
        self._check_models()
        offers = self._offers()
        self.calls.append([actor.join.remote(offers) for actor in self.actors])
        for rank, node in enumerate(self.nodes):
            log.info("%s is at %s", self._name(rank), node.address)

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
            setup = NodeSetup(config=self.config, rank=rank, nodes=self.nodes, prefix=prefix, log_level=level)
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
        """Asks whether all are there, and takes in what was answered to the question before."""
        if self.calls:
            self._take_in(timeout_s=0)
        if not self.calls:
            self._post(b"")

    def close(self) -> None:
        if self.cluster is None:
            return
        for actor in self.actors:
            with contextlib.suppress(Exception):
                self.ray.kill(actor)
        self.actors = []
        self.calls.clear()
        self.cluster.close()
        self.cluster = None

    # -- speaking to workers ---------------------------------------------------------------------------------------

    def _post(self, command: bytes) -> None:
        self.calls.append([actor.obey.remote(command) for actor in self.actors])

    def _take_in(self, timeout_s: float = TICK_S) -> None:
        """The answers to the oldest call, if all ranks have given theirs; raises if one is dead or has failed."""
        calls = self.calls[0]
        try:
            answers = self.ray.get(calls, timeout=timeout_s)
        except self.ray.exceptions.GetTimeoutError:
            if timeout_s:  # somebody may wait for one that is dead
                self._look_for_failures(calls)
            return
        except self.ray.exceptions.RayError:
            self._look_for_failures(calls)
            raise
        self.calls.popleft()
        for rank, data in enumerate(answers):
            if data:
                self._taken(rank, data)

    def _look_for_failures(self, calls: list[Any]) -> None:
        """Deaths first: whoever exchanged with a rank that died has failed, too, and may say so before."""
        problem = self._dead(calls, 0)
        if problem is None and isinstance(problem := self._complaint(calls), WorkerDied):
            problem = self._dead(calls, GRACE_S) or problem
        if problem is not None:
            self._break(problem)

    def _dead(self, calls: list[Any], timeout_s: float) -> QuireError | None:
        """The first rank that will never answer."""
        ready, _ = self.ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        for call in ready:
            try:
                self.ray.get(call)
            except self.ray.exceptions.RayError as error:
                return self._death(calls.index(call), error)
        return None

    def _complaint(self, calls: list[Any]) -> QuireError | None:
        """What a rank said that failed."""
        ready, _ = self.ray.wait(calls, num_returns=len(calls), timeout=0)
        try:
            replies = [self.decode(data) for data in self.ray.get(ready) if data]
        except self.ray.exceptions.RayError:  # it has just died: the next look finds it
            return None
        return next((reply.error() for reply in replies if isinstance(reply, Failure)), None)

    def _death(self, rank: int, error: Exception) -> WorkerDied:
        node_id, address = self.nodes[rank].node_id, self.nodes[rank].address
        log.debug("worker %d died", rank, exc_info=error)
        if self.cluster is not None and not self.cluster.is_there(node_id):
            # Which is nobody's fault.
            return WorkerDied(f"worker {rank} died with its machine {address}", signal.SIGKILL)
        return WorkerDied(f"worker {rank} on the machine {address} died: its log, or the system's, may have more")


EXECUTOR = RayExecutor
