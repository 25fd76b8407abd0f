"""Options of the HTTP server: where it listens, who may call, what one request may cost, what is logged.

Read by `api/server`; the engine behind it has its own (`engine.py`, `serving.py`).
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from quire.config.fields import check, knob
from quire.errors import ConfigError

_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.\-\[\]:]+")
_HOST = re.compile(r"\*|[A-Za-z0-9_]([A-Za-z0-9_.\-]{0,251}[A-Za-z0-9_])?")
_KEY = re.compile(r"[\x21-\x7e]+")  # what a header can carry
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_COLLECTOR = re.compile(r"(https?|grpcs?)://[A-Za-z0-9.\-\[\]:]+(/[A-Za-z0-9._~/-]*)?")
_METRICS_PREFIX = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?")

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, repr=False)  # keys must not end up in a log
class ServerConfig:
    """The HTTP server"""

    host: str = knob("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines in")
    port: int = knob(8000, "port to listen on; 0 takes a free one", low=0, high=65535)
    uds: str | None = knob(None, "listen on a Unix socket, for this user alone, instead of on a port", metavar="PATH")
    root_path: str = knob("", "the path under which a proxy shows this server, as /llm", metavar="PATH")
    served_model_name: list[str] = knob([], "names clients may ask for (default: MODEL as typed)", metavar="NAME")
    api_key: list[str] = knob([], "clients must send one of these keys; can be given several times", metavar="KEY")
    api_key_file: str | None = knob(
        None,
        "a file with one such key per line, read again when it changes; label=NAME, rpm=N and tpm=N (requests and "
        "tokens a minute) may follow a key",
        metavar="FILE",
    )
    admin_api_key: str | None = knob(None, "the key that endpoints for operators need", metavar="KEY")
    ssl_certfile: str | None = knob(None, "certificate: with it the server speaks HTTPS", metavar="FILE")
    ssl_keyfile: str | None = knob(
        None, "the certificate's private key, where it is in a file of its own", metavar="FILE"
    )
    ssl_ca_certs: str | None = knob(
        None, "who may sign clients' certificates, where --ssl-cert-reqs asks for them", metavar="FILE"
    )
    ssl_cert_reqs: int = knob(0, "certificates of clients: 0 none, 1 checked if sent, 2 needed", low=0, high=2)
    enable_ssl_refresh: bool = knob(False, "read certificate and key again when their files change")
    allowed_origins: list[str] = knob(
        [], "web pages that may call from a browser, as https://host, or * (default: none)", metavar="ORIGIN"
    )
    allowed_hosts: list[str] = knob(
        [],
        "names that clients may reach this server by when it listens on a loopback address, beside localhost and IP "
        "addresses; needed behind a proxy that passes its own name on, or * for any",
        metavar="HOST",
    )
    ui: bool = knob(True, "serve a page for people at /: chat, and what the engine does")
    max_body_bytes: int = knob(4 << 20, "largest request body (default: 4M)", low=1)
    max_held_bytes: int = knob(
        1 << 30, "bodies of all requests under way together; half of it for one address (default: 1G)", low=1
    )
    max_json_depth: int = knob(64, "deepest nesting of lists and objects in a request", low=4, high=500)
    max_json_values: int = knob(
        262_144, "values in a request's JSON; a list counts as three, a member of an object as eight", low=1024
    )
    body_timeout_s: float = knob(60.0, "seconds a client may take to send a request", low=0.1)
    keep_alive_s: float = knob(75.0, "seconds an idle connection is kept; should be longer than a proxy's own", low=0.1)
    max_connections: int = knob(4096, "clients connected at a time; more are answered 503", low=1)
    max_connections_per_address: int | None = knob(None, "of these, from one address (default: three quarters)", low=1)
    max_idle_connections: int = knob(1024, "idle connections kept for longer than 5 s, half for one address", low=1)
    metrics_prefix: str = knob("quire:", "what the names of metrics begin with; vllm: for dashboards made for vLLM")
    metrics_port: int | None = knob(None, "serve /metrics there, and nothing else, without a key", low=0, high=65535)
    metrics_host: str = knob("127.0.0.1", "address that --metrics-port listens on")
    otlp_traces_endpoint: str | None = knob(
        None, "send traces to this OpenTelemetry collector, as http://host:4318 or grpc://host:4317", metavar="URL"
    )
    otlp_traces_content: bool = knob(False, "put prompts and answers into traces")
    log_level: LogLevel | None = knob(
        None, "least level that is logged (default: QUIRE_LOG_LEVEL, else info here and warning elsewhere)"
    )
    log_format: Literal["human", "json"] = knob("human", "lines for people, or one JSON object per line")
    access_log: bool = knob(True, "log a line per request")
    log_requests: bool = knob(False, "log what clients send, prompts included")

    def __post_init__(self) -> None:
        check(self)
        for name in ("served_model_name", "api_key", "allowed_origins", "allowed_hosts"):
            if not all(isinstance(value, str) and value for value in getattr(self, name)):
                raise ConfigError(f"{name} must hold non-empty texts")
        for key in self.api_key:
            check_key(key)
        if self.admin_api_key is not None:
            check_key(self.admin_api_key)
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{origin!r:.100} is no origin: write https://host or https://host:port, without a path, or *"
                )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"{host!r:.100} is no host name: write it without a port, as llm.example.org, or *")
        self._check_tls()
        if not _ROOT_PATH.fullmatch(self.root_path.rstrip("/")):
            raise ConfigError("--root-path must be a path such as /llm")
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError("--metrics-prefix must be letters, digits, _ and :, such as vllm:")
        self._check_traces()

    def _check_tls(self) -> None:
        given = {
            "--ssl-keyfile": self.ssl_keyfile,
            "--ssl-ca-certs": self.ssl_ca_certs,
            "--ssl-cert-reqs": self.ssl_cert_reqs,
            "--enable-ssl-refresh": self.enable_ssl_refresh,
        }
        for flag, value in given.items():
            if value and not self.ssl_certfile:
                raise ConfigError(f"{flag} needs --ssl-certfile")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs, which says whose certificates are good")

    def _check_traces(self) -> None:
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not _is_collector(endpoint):
            raise ConfigError("--otlp-traces-endpoint must be a URL such as http://127.0.0.1:4318 or grpc://host:4317")
        if self.otlp_traces_content and endpoint is None:
            raise ConfigError("--otlp-traces-content needs --otlp-traces-endpoint")

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it by its network: then pages of other sites may try to, in a browser."""
        return not self.uds and _is_loopback(self.host)

    def open_doors(self) -> list[str]:
        """Warnings for the log: what anybody who reaches the server may do, although it may not be meant so."""
        found = []
        if self.ssl_ca_certs and not self.ssl_cert_reqs:
            found.append("--ssl-ca-certs checks nobody without --ssl-cert-reqs: give 2 to ask clients for certificates")
        if self.metrics_port is not None and not _is_loopback(self.metrics_host):
            found.append(f"anybody who reaches {self.metrics_host} may read the metrics: see --metrics-host")
        if self.api_key or self.api_key_file:
            return found
        if self.admin_api_key:
            found.append(
                "--admin-api-key is for operators' paths alone, all others need no key: give --api-key for those"
            )
        if not self.uds and not _is_loopback(self.host):
            found.append(f"anybody who reaches {self.host} may use this server: give --api-key, or listen on 127.0.0.1")
        return found


def _is_collector(url: str) -> bool:
    """A key for a collector is no part of its URL, which process lists show: see OTEL_EXPORTER_OTLP_HEADERS."""
    try:
        return bool(_COLLECTOR.fullmatch(url)) and urlsplit(url).port != 0 and bool(urlsplit(url).hostname)
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_key(key: str) -> str:
    """The key itself, or ConfigError without repeating it."""
    if not _KEY.fullmatch(key):
        raise ConfigError("a key must be one or more visible ASCII characters without spaces")
    return key
