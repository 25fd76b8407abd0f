"""The few environment variables Quire reads, each a function; the only module that touches `os.environ`.

Called by whoever needs the value, at the moment it is needed, so that tests can set them.
"""

import os
from pathlib import Path

from quire.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
_LOG_FORMAT = "QUIRE_LOG_FORMAT"  # set by a server for its processes
API_KEYS = ("QUIRE_API_KEY", "VLLM_API_KEY")  # the first that is set counts


def cache_dir() -> Path:
    """QUIRE_CACHE: where fetched models and compiled kernels are kept."""
    return Path(os.environ.get("QUIRE_CACHE") or Path.home() / ".cache" / "quire").expanduser()


def log_level(default: str = "warning") -> str:
    """QUIRE_LOG_LEVEL: debug, info, warning or error; in capitals."""
    level = (os.environ.get("QUIRE_LOG_LEVEL") or default).lower()
    if level not in LOG_LEVELS:
        raise ConfigError(f"QUIRE_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, not {level!r:.40}")
    return level.upper()


def set_log_level(level: str) -> None:
    """As if QUIRE_LOG_LEVEL had been given: for the processes that this one starts."""
    os.environ["QUIRE_LOG_LEVEL"] = level


def set_log_format(log_format: str) -> None:
    """Of the processes that this one starts."""
    os.environ[_LOG_FORMAT] = log_format


def logs_json() -> bool:
    """Whether the process that started this one wants lines of JSON."""
    return os.environ.get(_LOG_FORMAT) == "json"


def api_key() -> tuple[str, str] | None:
    """(name of the variable, key): QUIRE_API_KEY, else VLLM_API_KEY; None where both are empty or not set."""
    found = [(name, os.environ[name]) for name in API_KEYS if os.environ.get(name)]
    return found[0] if found else None


def num_threads() -> int:
    """OMP_NUM_THREADS, of which the first number counts; 0: not said."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def otlp_protocol() -> str:
    """OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, else OTEL_EXPORTER_OTLP_PROTOCOL: how spans travel; empty: not said."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def client_key() -> str | None:
    """The key that `quire chat` sends to a server: of the server's variables, else OPENAI_API_KEY."""
    found = api_key()
    return found[1] if found else os.environ.get("OPENAI_API_KEY") or None


def keep_nccl_local() -> None:
    """Unless NCCL_SOCKET_IFNAME names another interface, NCCL's sockets of this process are on the loopback one."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def name_nccl_interface(name: str) -> None:
    """The same for ranks on several machines: unless NCCL_SOCKET_IFNAME names one, NCCL uses this interface."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def ray_address() -> str:
    """RAY_ADDRESS: of the Ray cluster that --distributed-executor-backend ray uses; empty: not said."""
    return os.environ.get("RAY_ADDRESS", "")


def set_up_ray(token: str) -> dict[str, str | None]:
    """Of Ray's processes that are started from now on: they take and show this token, and workers have the priority of
    any other process, which Ray would lower. Returns what `restore` needs.
    """
    told = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_worker_niceness": "0"}
    before = {name: os.environ.get(name) for name in told}
    os.environ |= told
    return before


def restore(variables: dict[str, str | None]) -> None:
    """Sets them; None: it was not set."""
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def vllm_variables() -> list[str]:
    """Names of vLLM's variables that are set and mean nothing here."""
    return sorted(name for name in os.environ if name.startswith("VLLM_") and name not in API_KEYS)


def native_kernels_allowed() -> bool:
    """QUIRE_NATIVE=0 turns the compiled CPU kernels off; their torch twins run instead."""
    return os.environ.get("QUIRE_NATIVE", "1") != "0"


def compiler() -> str | None:
    """CXX: the C++ compiler for the CPU kernels, else the first one found on PATH."""
    return os.environ.get("CXX")
