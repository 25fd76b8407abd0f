"""/live, /ready, /health, /ping, /version, /metrics, /load, /admin/check: what machines ask about the server.

Called by `app.py`. `/live` says the process is up; `/ready`, `/health` and `/ping` that the engine makes progress;
`/admin/check` has the core verify its bookkeeping, which takes as long as a step or two.
"""

import msgspec

from quire import __version__
from quire.api.server.calls import Answer, Call
from quire.api.server.errors import ErrorDetail, Problem


class Alive(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    server_load: int  # requests that run or wait


class CheckResult(msgspec.Struct):
    problem: str  # empty: none


async def live(call: Call) -> Answer:
    return Answer.json(Alive("ok"))


async def ready(call: Call) -> Answer:
    trouble = call.service.llm.health()
    if trouble is not None:
        detail = ErrorDetail(trouble, "server_error", code="not_ready")
        return Answer.error(Problem(503, detail, [(b"retry-after", b"1")]))
    return Answer.json(Alive("ok"))


async def version(call: Call) -> Answer:
    return Answer.json(Version(__version__))


async def load(call: Call) -> Answer:
    cores = call.service.llm.cores
    return Answer.json(Load(cores.num_live if cores is not None else 0))


async def metrics(call: Call) -> Answer:
    body, content_type = call.service.llm.metrics.render()
    return Answer(body, content_type=content_type.encode())


async def check(call: Call) -> Answer:
    return Answer.json(CheckResult(await call.service.llm.check()))
