"""What operators ask for: /server_info, /reset_prefix_cache, /pause, /resume, /is_paused, /abort_requests, /sleep, …

Called by `app.py`, with the operator's key only. Shows no keys, environment or paths, which the engine's options may
hold: of a path its last part.
"""

import dataclasses
from pathlib import PurePath
from typing import Annotated, Any, Literal

import msgspec

from quire import __version__
from quire.api.server.calls import Answer, Call, Service
from quire.api.server.fields import Name, RequestBody, at_most, decode, parameters, whole
from quire.errors import OverloadedError
from quire.frontend.stream import Stream

MAX_IDS = 16_384  # in one call


class ServerInfo(msgspec.Struct):
    version: str
    model: str
    served_names: list[str]
    engine_config: dict[str, dict[str, Any]]  # the options by group, "auto" replaced by what was chosen
    serving_config: dict[str, Any]


class Reset(msgspec.Struct):
    success: bool


class ResetParameters(msgspec.Struct, kw_only=True):
    reset_running_requests: bool = False
    reset_external: bool = False  # has no effect: there is no other cache


class PauseParameters(msgspec.Struct, kw_only=True):
    """abort: running requests end now; wait: the answer comes when they have ended; keep: they stop until /resume."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True  # forget cached prompts when nothing runs any more; not with keep


class SleepParameters(msgspec.Struct, kw_only=True):
    """Level 1 keeps weights in the host's memory, 2 forgets them. Running requests end, are waited for, or wait."""

    level: Annotated[int, whole(1, 2)] = 1
    mode: Literal["abort", "wait", "keep"] = "abort"


class Sleeping(msgspec.Struct):
    is_sleeping: bool


class Status(msgspec.Struct):
    status: str


class Paused(msgspec.Struct):
    is_paused: bool


class AbortRequest(RequestBody, kw_only=True):
    """Ids as clients know them: of answers, or X-Request-Id. None: all requests."""

    request_ids: Annotated[list[Name], at_most(MAX_IDS)] | None = None


class Aborted(msgspec.Struct):
    aborted: int  # requests
    status: Literal["aborted"] = "aborted"


async def server_info(call: Call) -> Answer:
    service = call.service
    model = service.llm.model
    engine = {group.name: _shown(getattr(model.config, group.name)) for group in dataclasses.fields(model.config)}
    engine["model"]["model"] = model.name
    info = ServerInfo(__version__, model.name, _names(service), engine, _shown(service.llm.serving))
    return Answer.json(info)


def _names(service: Service) -> list[str]:
    """What clients call the model: a name may be the path that was typed."""
    return [_without_folders(name) if PurePath(name).is_absolute() else name for name in service.names]


def _shown(options: Any) -> dict[str, Any]:
    """Options without paths. A template may be a file or a text: it is left out."""
    shown = {field.name: _without_paths(getattr(options, field.name)) for field in dataclasses.fields(options)}
    return {name: value for name, value in shown.items() if name not in ("chat_template", "download_dir")}


def _without_paths(value: Any) -> Any:
    if isinstance(value, str):
        return _without_folders(value)
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    return [_without_paths(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _without_folders(text: str) -> str:
    return PurePath(text.replace("\\", "/")).name if "/" in text or "\\" in text else text


async def reset_prefix_cache(call: Call) -> Answer:
    asked = parameters(call.query, ResetParameters)
    return Answer.json(Reset(await call.service.llm.reset_prefix_cache(asked.reset_running_requests)))


async def pause(call: Call) -> Answer:
    asked = parameters(call.query, PauseParameters)
    await call.service.llm.pause_generation(mode=asked.mode, clear_cache=asked.clear_cache)
    return Answer.json(Status("paused"))


async def resume(call: Call) -> Answer:
    await call.service.llm.resume_generation()
    return Answer.json(Status("resumed"))


async def is_paused(call: Call) -> Answer:
    return Answer.json(Paused(await call.service.llm.is_paused()))


async def sleep(call: Call) -> Answer:
    asked = parameters(call.query, SleepParameters)
    await call.service.llm.sleep(asked.level, asked.mode)
    return Answer.json(Sleeping(True))


async def wake_up(call: Call) -> Answer:
    await call.service.llm.wake_up()
    return Answer.json(Sleeping(False))


async def is_sleeping(call: Call) -> Answer:
    return Answer.json(Sleeping(await call.service.llm.is_sleeping()))


async def abort_requests(call: Call) -> Answer:
    body = await decode(call.body, AbortRequest)
    cores = call.service.llm.cores
    if cores is None:
        raise OverloadedError("the engine is starting: try again in a moment")
    found = list(cores.live.values())
    if body.request_ids:
        asked = {name.removeprefix("chatcmpl-").removeprefix("cmpl-") for name in body.request_ids}
        found = [stream for stream in found if _client_id(stream) in asked]
    for stream in found:
        stream.abort()
    return Answer.json(Aborted(len(found)))


def _client_id(stream: Stream) -> str:
    """The id that `Call.core_id` was made of."""
    return stream.request.request_id.rsplit("-", 2)[0]
