"""Runs the server: opens the port, starts the engine, answers, drains and leaves nothing behind.

Called by `quire serve`. Owns the process: signals, the event loop, the exit code. Knows no endpoint and no protocol.
"""

import asyncio
import contextlib
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
from quire.api.server.app import TRACED, build_app, errors_of, only_metrics, template_of
from quire.api.server.connection import Connections
from quire.api.server.guard import App, Guard
from quire.api.server.keys import Keys, Policy, with_environment
from quire.api.server.sockets import BACKLOG, listen, listen_unix
from quire.api.server.tls import Certificates
from quire.api.server.tracing import Tracer, open_tracer
from quire.config import CacheConfig, EngineConfig, ServingConfig
from quire.config.server import ServerConfig
from quire.frontend.async_llm import AsyncLLM
from quire.metrics.serving import ServingMetrics

WATCH_S = 0.5
STATUS_S = 5.0
REFRESH_S = 1.0
HANDSHAKE_S = 10  # time a client has for the TLS handshake
LAST_BYTES_S = 5  # time finished answers have to reach their readers, when stopping
OTHER_FILES = 1024  # that the process may open beside its connections
GC_THRESHOLD = 50_000  # requests make many objects and few cycles


def serve(engine: EngineConfig, serving: ServingConfig, server: ServerConfig) -> int:
    """Serves until told to stop; the exit code."""
    started = time.monotonic()
    logs.setup(server.log_format, server.log_level)
    server = with_environment(server)
    for sentence in server.open_doors():
        logs.log.warning("%s", sentence)
    names = server.served_model_name or [engine.model.model]
    allow_open_files(server.max_connections + OTHER_FILES)
    tracer = open_tracer(server, TRACED)
    with contextlib.ExitStack() as stack:  # first of all, so that a port in use is reported at once
        sock = stack.enter_context(listen_unix(server.uds) if server.uds else listen(server.host, server.port))
        metrics_sock: socket.socket | None = None
        if server.metrics_port is not None:
            metrics_sock = stack.enter_context(listen(server.metrics_host, server.metrics_port, "--metrics-port"))
        if tracer is not None:
            stack.callback(tracer.close)

        def announce(num_kv_tokens: int) -> None:
            elapsed_s = time.monotonic() - started
            logs.announce(
                f"Quire is serving {', '.join(names)} on {_shown_address(server, sock)} ({elapsed_s:.1f} s), "
                f"with room for {num_kv_tokens:,} tokens"
            )

        async def main() -> int:
            llm = await AsyncLLM.open(engine, serving)
            llm.metrics.model_name, llm.metrics.prefix = names[0], server.metrics_prefix
            app = build_app(llm, names, server.ui)
            web = Web(tracer)
            web.add(app, app.policy_of, server, sock, llm.metrics)
            if metrics_sock is not None:
                plain = ServerConfig(  # neither keys nor TLS
                    host=server.metrics_host, allowed_hosts=server.allowed_hosts, access_log=server.access_log
                )
                web.add(only_metrics(app), lambda method, path: "open", plain, metrics_sock, llm.metrics)
            return await live(llm, web, announce)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())


def _shown_address(server: ServerConfig, sock: socket.socket) -> str:
    if server.uds:
        return f"unix:{server.uds}"
    scheme = "https" if server.ssl_certfile else "http"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Web:
    """All that listens, and what is read again when its files change."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.tracer = tracer
        self.servers: list[tuple[Http, socket.socket]] = []
        self.refreshed: list[Keys | Certificates] = []

    def add(
        self,
        app: App,
        policy_of: Callable[[str, str], Policy | None],
        config: ServerConfig,
        sock: socket.socket,
        metrics: ServingMetrics,
    ) -> None:
        def count(method: str, path: str, status: int) -> None:
            metrics.http_request(method, template_of(path), status)

        guard = Guard(app, policy_of, config, count, errors_of, self.tracer)
        certificates = Certificates(config) if config.ssl_certfile else None
        self.servers.append((Http(_http_config(guard, certificates), Connections(config)), sock))
        self.refreshed.append(guard.keys)
        if certificates is not None and config.enable_ssl_refresh:
            self.refreshed.append(certificates)

    async def serve(self) -> None:
        refreshing = asyncio.create_task(self._refresh())
        try:
            await asyncio.gather(*(http.serve(sockets=[sock]) for http, sock in self.servers))
        finally:
            refreshing.cancel()

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            for files in self.refreshed:
                try:
                    await files.refresh()
                except Exception:  # what goes wrong with one file must not keep others from being read
                    logs.log.exception("files could not be read again")

    def stop(self, at_once: bool = False) -> None:
        for http, _ in self.servers:
            http.should_exit = True
            http.force_exit = http.force_exit or at_once


async def live(llm: AsyncLLM, web: Web, announce: Callable[[int], None]) -> int:
    """Answers from the start (`/live` while the model loads), until a signal or the end of the engine."""
    stop = StopSignals(web)
    answering = asyncio.create_task(web.serve())
    answering.add_done_callback(lambda _: stop.asked.set())
    try:
        if await unless(stop.asked, llm.start()):
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD)
            announce(tell_of_caches(llm))
            await unless(stop.asked, watch(llm))
            timeout_s = llm.serving.shutdown_timeout
            logs.log.info("stopping: running requests get %g s to finish, a second signal ends them", timeout_s)
            await unless(stop.asked_again, llm.drain(timeout_s))
    finally:
        web.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await answering
        await llm.close()
    return stop.exit_code


def tell_of_caches(llm: AsyncLLM) -> int:
    """Puts into the metrics how KV caches were set up; how many tokens fit into all of them."""
    supervisors = llm.cores.supervisors if llm.cores is not None else []
    for metrics, supervisor in zip(llm.metrics.engines, supervisors):
        metrics.cache_info = cache_info(llm.model.config.cache, supervisor.num_kv_tokens)
    return sum(supervisor.num_kv_tokens for supervisor in supervisors)


def cache_info(cache: CacheConfig, num_tokens: int) -> dict[str, str]:
    """What metrics tell of the KV cache, by vLLM's names."""
    block_size = cache.block_size or 1
    told = {
        "block_size": block_size,
        "cache_dtype": cache.kv_cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "num_gpu_blocks": num_tokens // block_size,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
    }
    return {name: str(value) for name, value in told.items()}


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

    def __init__(self, web: "Web") -> None:
        self.web = web
        self.asked = asyncio.Event()
        self.asked_again = asyncio.Event()
        self.exit_code = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._came, number)

    def _came(self, number: int) -> None:
        if self.asked.is_set():
            self.asked_again.set()
            self.exit_code = 128 + number  # as a shell reports it, because requests were cut off
            self.web.stop(at_once=True)
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
        self.servers = []
        options: dict[str, Any] = {"backlog": BACKLOG}
        if self.config.ssl:
            options |= {"ssl": self.config.ssl, "ssl_handshake_timeout": HANDSHAKE_S}
        for sock in sockets or ():
            create = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
            self.servers.append(await create(self._connection, sock=sock, **options))
        self.started = True

    def _connection(self) -> asyncio.Protocol:
        return self.connections.new(config=self.config, server_state=self.server_state, app_state={})

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn, ten times a second."""
        self.connections.sweep(time.monotonic())
        return await super().on_tick(counter)


def _http_config(app: Guard, certificates: Certificates | None = None) -> uvicorn.Config:
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
    )
    config.load()
    config.ssl = certificates.context if certificates is not None else None
    return config


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
