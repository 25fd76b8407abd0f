"""The cores of a server, each with a supervisor that keeps it running, and which of them takes a request.

Used by AsyncLLM, also where there is one core. A request stays with its supervisor for life: when a core dies, its
requests go on in the next core of the same supervisor, and the other cores never notice. What a request that was found
guilty of a crash has taken down, it takes down everywhere: all refuse it. Knows requests, not text or protocols.
"""

import asyncio
from asyncio.subprocess import Process
from collections import ChainMap
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from quire.config import EngineConfig, ServingConfig
from quire.errors import QuireError, RequestError
from quire.frontend.convicted import Convicted
from quire.frontend.requests import RequestState
from quire.frontend.routing import Load, choose
from quire.frontend.stream import Stream
from quire.frontend.supervisor import Supervisor
from quire.frontend.suspension import Mode, State
from quire.kv.prefix import prefix_digests
from quire.messages import EngineStats, Question, Sleep, Vocabulary
from quire.metrics.serving import ServingMetrics


class Cores:
    def __init__(
        self,
        config: EngineConfig,
        serving: ServingConfig,
        metrics: ServingMetrics,
        vocabulary: Callable[[], Vocabulary],
        processes: Sequence[Process] = (),
    ) -> None:
        """`processes`: those that were started ahead, for the first cores."""
        convicted = Convicted()
        spares = [*processes, *[None] * config.parallel.num_engines]
        self.supervisors = [
            Supervisor(config.replace(data_parallel_index=idx), serving, engine, vocabulary, convicted, spare)
            for idx, (engine, spare) in enumerate(zip(metrics.engines, spares))
        ]
        # All live requests; to be read only.
        self.live: Mapping[str, Stream] = ChainMap(*(supervisor.live for supervisor in self.supervisors))

    # -- living --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when all cores take requests; raises what kept the first of them from that."""
        starts = [asyncio.create_task(supervisor.start()) for supervisor in self.supervisors]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await self.close()
            await asyncio.gather(*starts, return_exceptions=True)
            raise

    async def close(self) -> None:
        await asyncio.gather(*(supervisor.close() for supervisor in self.supervisors))

    def kill(self) -> None:
        """As `close`, at once: for callers that cannot wait."""
        for supervisor in self.supervisors:
            supervisor.kill()

    @property
    def lasting(self) -> list[Supervisor]:
        """Those that have not given up for good; all of them if none is left."""
        return [supervisor for supervisor in self.supervisors if supervisor.failure is None] or self.supervisors

    @property
    def failure(self) -> QuireError | None:
        """Why there is no core and will be none: as long as one is left, it serves."""
        return self.lasting[0].failure

    def health(self) -> str | None:
        """None while any core makes progress: it takes the requests."""
        problems = [supervisor.health() for supervisor in self.lasting]
        return None if None in problems else problems[0]

    @property
    def state(self) -> State:
        return next((state for each in self.lasting if (state := each.suspension.state) != "awake"), "awake")

    @property
    def paused(self) -> bool:
        return any(supervisor.suspension.is_paused for supervisor in self.supervisors)

    @property
    def num_live(self) -> int:
        return sum(len(supervisor.live) for supervisor in self.supervisors)

    @property
    def num_restarts(self) -> int:
        return sum(supervisor.num_restarts for supervisor in self.supervisors)

    @property
    def num_kv_tokens(self) -> int:
        """That fit into all caches together."""
        return sum(supervisor.num_kv_tokens for supervisor in self.supervisors)

    @property
    def stats(self) -> EngineStats:
        return _added_up([supervisor.stats for supervisor in self.supervisors])

    async def ask(self, question: Question) -> str:
        """The problems of the cores' answers; empty if there is none."""
        asked = self.lasting
        problems = await asyncio.gather(*(supervisor.ask(question) for supervisor in asked))
        if len(self.supervisors) == 1:
            return problems[0]
        return "; ".join(f"{supervisor.name}: {problem}" for supervisor, problem in zip(asked, problems) if problem)

    async def sleep(self, question: Sleep, mode: Mode) -> None:
        """As `Suspension.sleep`, of all cores."""
        await _all(supervisor.suspension.sleep(question, mode) for supervisor in self.lasting)

    async def wake_up(self) -> None:
        await _all(supervisor.suspension.wake_up() for supervisor in self.lasting)

    async def pause(self, mode: Mode) -> None:
        await _all(supervisor.suspension.pause(mode) for supervisor in self.lasting)

    async def resume(self) -> None:
        await _all(supervisor.suspension.resume() for supervisor in self.lasting)

    # -- requests ------------------------------------------------------------------------------------------------

    def prefix(self, request: RequestState) -> list[int]:
        """Digests of the blocks of its prompt that cores may have cached; may be called from any thread.

        Empty where nobody chooses by them."""
        block_size = self.supervisors[0].load.prefix_block
        params = request.params
        if not block_size or params.skip_reading_prefix_cache or params.prompt_logprobs is not None:
            return []
        return prefix_digests(request.prompt_token_ids, request.message.cache_salt, block_size)

    def add(self, request: RequestState, prefix: Sequence[int], expires_at: float | None = None) -> Stream:
        """Starts a request on one of the cores. Whatever is raised here, nothing of it stays.

        `prefix`: as the method of that name says. `expires_at`: by the loop's clock."""
        if self.failure is not None:
            raise self.failure
        if any(request.request_id in supervisor.live for supervisor in self.supervisors):
            raise RequestError(f"there is a request {request.request_id!r:.100} already: choose another request_id")
        lasting = self.lasting
        if len(lasting) == 1:
            supervisor, num_known = lasting[0], 0
        else:
            loads = [_load(supervisor, prefix) for supervisor in lasting]
            chosen = choose(loads)
            supervisor, num_known = lasting[chosen], loads[chosen].num_cached
        stream = Stream(request, supervisor.abort, prefix)
        supervisor.add(stream, len(request.prompt_token_ids) - num_known)
        if expires_at is not None:
            stream.expire_at(expires_at, supervisor.expire)
        return stream


def _load(supervisor: Supervisor, prefix: Sequence[int]) -> Load:
    return Load(
        supervisor.takes_requests,
        supervisor.num_to_compute,
        len(supervisor.live),
        supervisor.load.num_cached(prefix),
        len(supervisor.load.known),
    )


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Does all of it, then raises what went wrong first, if anything did."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _added_up(stats: Sequence[EngineStats]) -> EngineStats:
    """Of several cores; the share of KV blocks in use is their mean."""
    if len(stats) == 1:
        return stats[0]
    total = EngineStats()
    for name in EngineStats.__struct_fields__:
        if name != "accepted_drafts":
            setattr(total, name, sum(getattr(each, name) for each in stats))
    total.kv_usage /= len(stats)
    total.accepted_drafts = [sum(places) for places in zip_longest(*(s.accepted_drafts for s in stats), fillvalue=0)]
    return total
