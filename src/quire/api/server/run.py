"""The server's life: opens the port, starts the engine, answers, drains and leaves nothing behind.

Called by `quire serve`. Owns the process: signals, the event loop, the exit code. Knows no endpoint and no protocol.
"""

import asyncio
import contextlib
import errno
import gc
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
import uvloop

from quire.api.server import logs
from quire.api.server.app import build_app, policy_of
from quire.api.server.connection import Connections
from quire.api.server.guard import Guard
from quire.config import EngineConfig, ServingConfig
from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.frontend.async_llm import AsyncLLM

WATCH_S = 0.5
STATUS_S = 5.0
HANDSHAKE_S = 10  # for a TLS client to say hello
LAST_BYTES_S = 5  # for finished answers to reach their readers, when stopping
BACKLOG = 2048
OTHER_FILES = 1024  # that the process may open beside its connections
GC_THRESHOLD = 50_000  # requests make many objects and hardly a cycle


def serve(engine: EngineConfig, serving: ServingConfig, server: ServerConfig) -> int:
    """Serves until told to stop; the exit code."""
    started = time.monotonic()
    logs.setup(server.log_format)
    for sentence in server.open_doors():
        logs.log.warning("%s", sentence)
    names = server.served_model_name or [engine.model.model]
    allow_open_files(server.max_connections + OTHER_FILES)
    with listen(server.host, server.port) as sock:  # first of all, so that a port in use is told at once

        def announce(num_kv_tokens: int) -> None:
            scheme, (host, port) = "https" if server.ssl_certfile else "http", sock.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            logs.announce(
                f"Quire is serving {', '.join(names)} on {scheme}://{shown}:{port} ({time.monotonic() - started:.1f} s), "
                f"with room for {num_kv_tokens:,} tokens"
            )

        async def main() -> int:
            llm = await AsyncLLM.open(engine, serving)
            http = Http(_http_config(Guard(build_app(llm, names), policy_of, server), server), Connections(server))
            return await live(llm, http, sock, announce)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())


async def live(llm: AsyncLLM, http: "Http", sock: socket.socket, announce: Callable[[int], None]) -> int:
    """Answers from the start (`/live` while the model loads), until a signal or the end of the engine."""
    stop = StopSignals(http)
    web = asyncio.create_task(http.serve(sockets=[sock]))
    web.add_done_callback(lambda _: stop.asked.set())
    try:
        if await unless(stop.asked, llm.start()):
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD)
            announce(llm.supervisor.num_kv_tokens)
            await unless(stop.asked, watch(llm))
            logs.log.info(
                "stopping: running requests get %g s to finish, a second signal ends them", llm.serving.shutdown_timeout
            )
            await unless(stop.asked_again, llm.drain(llm.serving.shutdown_timeout))
    finally:
        http.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await web
        await llm.close()
    return stop.exit_code


async def watch(llm: AsyncLLM) -> None:
    """Writes a line every few seconds while the engine is busy; raises what made it give up."""
    status, last = logs.StatusLine(llm.metrics), time.monotonic()
    while llm.failure is None:
        await asyncio.sleep(WATCH_S)
        if (seconds := time.monotonic() - last) >= STATUS_S:
            status.write(seconds)
            last += seconds
    raise llm.failure


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Does the work, unless the event comes first, which cancels it; whether it was done."""
    waiting, doing = asyncio.create_task(event.wait()), asyncio.create_task(work)
    await asyncio.wait((waiting, doing), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if doing.done():
        doing.result()
        return True
    doing.cancel()
    await asyncio.wait((doing,))
    return False


class StopSignals:
    """SIGTERM or SIGINT asks to stop; the second one does not wait for anybody."""

    def __init__(self, http: "Http") -> None:
        self.http = http
        self.asked, self.asked_again = asyncio.Event(), asyncio.Event()
        self.exit_code = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._came, number)

    def _came(self, number: int) -> None:
        if self.asked.is_set():
            self.asked_again.set()
            self.exit_code = 128 + number  # as a shell would report it: requests were cut off
            self.http.should_exit = self.http.force_exit = True
        self.asked.set()


class Http(uvicorn.Server):
    """uvicorn's server, which leaves the signals to us: its own way ends a drained process by the signal, not with 0."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket]) -> None:
        """Answers on these sockets. Uvicorn's own way lets a TLS client take a minute to say hello."""
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"backlog": BACKLOG}
        if self.config.ssl:
            options |= {"ssl": self.config.ssl, "ssl_handshake_timeout": HANDSHAKE_S}
        self.servers = [await loop.create_server(self._connection, sock=sock, **options) for sock in sockets]
        self.started = True

    def _connection(self) -> asyncio.Protocol:
        return self.connections.new(config=self.config, server_state=self.server_state, app_state={})

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn, ten times a second."""
        self.connections.sweep(time.monotonic())
        return await super().on_tick(counter)


def _http_config(app: Guard, server: ServerConfig) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=LAST_BYTES_S,
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile,
    )
    try:
        config.load()
    except OSError as error:
        reason = (
            error.strerror
            if error.filename or error.errno == errno.ENOENT
            else "they are no certificate and key that fit"
        )
        raise ConfigError(f"--ssl-certfile and --ssl-keyfile cannot be used: {reason}") from None
    return config


def listen(host: str, port: int) -> socket.socket:
    """The open port; ConfigError says why it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use: stop what listens there, or choose another with --port"
            ) from None
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"port {port} needs more rights than this user has: choose one above 1023 with --port"
            ) from None
        raise ConfigError(f"cannot listen on {host}: it is no address of this machine") from None


def allow_open_files(needed: int) -> None:
    """Every connection is an open file, and most systems let a process have 1,024 until it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < needed:
            text = "this process may open %d files, and needs up to %d: raise `ulimit -n`, or lower --max-connections"
            logs.log.warning(text, most, needed)
