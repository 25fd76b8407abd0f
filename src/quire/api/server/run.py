"""Runs the server: opens the port, starts the engine, answers, drains and leaves nothing behind.

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
HANDSHAKE_S = 10  # time a client has for the TLS handshake
LAST_BYTES_S = 5  # time finished answers have to reach their readers, when stopping
BACKLOG = 2048
OTHER_FILES = 1024  # that the process may open beside its connections
GC_THRESHOLD = 50_000  # requests make many objects and few cycles


def serve(engine: EngineConfig, serving: ServingConfig, server: ServerConfig) -> int:
    """Serves until told to stop; the exit code."""
    started = time.monotonic()
    logs.setup(server.log_format)
    for sentence in server.open_doors():
        logs.log.warning("%s", sentence)
    names = server.served_model_name or [engine.model.model]
    allow_open_files(server.max_connections + OTHER_FILES)
    with listen(server.host, server.port) as sock:  # first of all, so that a port in use is reported at once

        def announce(num_kv_tokens: int) -> None:
            scheme = "https" if server.ssl_certfile else "http"
            host, port = sock.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            elapsed_s = time.monotonic() - started
            logs.announce(
                f"Quire is serving {', '.join(names)} on {scheme}://{shown}:{port} ({elapsed_s:.1f} s), "
                f"with room for {num_kv_tokens:,} tokens"
            )

        async def main() -> int:
            llm = await AsyncLLM.open(engine, serving)
            guard = Guard(build_app(llm, names), policy_of, server)
            http = Http(_http_config(guard, server), Connections(server))
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
            announce(llm.supervisor.num_kv_tokens if llm.supervisor is not None else 0)
            await unless(stop.asked, watch(llm))
            timeout_s = llm.serving.shutdown_timeout
            logs.log.info("stopping: running requests get %g s to finish, a second signal ends them", timeout_s)
            await unless(stop.asked_again, llm.drain(timeout_s))
    finally:
        http.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await web
        await llm.close()
    return stop.exit_code


async def watch(llm: AsyncLLM) -> None:
    """Writes a line every few seconds while the engine is busy; raises what made it give up."""
    status = logs.StatusLine(llm.metrics)
    last = time.monotonic()
    while llm.failure is None:
        await asyncio.sleep(WATCH_S)
        if (seconds := time.monotonic() - last) >= STATUS_S:
            status.write(seconds)
            last += seconds
    raise llm.failure


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Does the work, unless the event comes first, which cancels it; returns whether it was done."""
    waiting = asyncio.create_task(event.wait())
    doing = asyncio.create_task(work)
    await asyncio.wait((waiting, doing), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if doing.done():
        doing.result()
        return True
    doing.cancel()
    await asyncio.wait((doing,))
    return False


class StopSignals:
    """SIGTERM or SIGINT asks to stop; a second one stops without waiting for running requests."""

    def __init__(self, http: "Http") -> None:
        self.http = http
        self.asked = asyncio.Event()
        self.asked_again = asyncio.Event()
        self.exit_code = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._came, number)

    def _came(self, number: int) -> None:
        if self.asked.is_set():
            self.asked_again.set()
            self.exit_code = 128 + number  # as a shell reports it, because requests were cut off
            self.http.should_exit = self.http.force_exit = True
        self.asked.set()


class Http(uvicorn.Server):
    """Uvicorn's server without its signal handling, which ends a drained process by the signal, not with status 0."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers on these sockets. Uvicorn's own method allows a minute for a TLS handshake."""
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"backlog": BACKLOG}
        if self.config.ssl:
            options |= {"ssl": self.config.ssl, "ssl_handshake_timeout": HANDSHAKE_S}
        self.servers = [await loop.create_server(self._connection, sock=sock, **options) for sock in sockets or ()]
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
        is_missing = error.filename or error.errno == errno.ENOENT
        reason = error.strerror if is_missing else "they are no certificate and key that fit"
        raise ConfigError(f"--ssl-certfile and --ssl-keyfile cannot be used: {reason}") from None
    return config


def listen(host: str, port: int) -> socket.socket:
    """The open port; ConfigError says why it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} of {host} is in use: stop what listens there, or choose another with --port"
        elif error.errno == errno.EACCES:
            reason = f"port {port} needs more rights than this user has: choose one above 1023 with --port"
        else:
            reason = f"cannot listen on {host}: it is no address of this machine"
        raise ConfigError(reason) from None


def allow_open_files(needed: int) -> None:
    """Every connection is an open file, and most systems let a process have 1,024 until it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < needed:
        text = "this process may open %d files, and needs up to %d: raise `ulimit -n`, or lower --max-connections"
        logs.log.warning(text, most, needed)
