"""Options of an engine that serves many clients from a process of its own: queue, deadlines, supervision.

Read by `frontend/` (AsyncLLM and the code it uses). Options of HTTP itself are in `server.py`.
"""

from dataclasses import dataclass

from quire.config.fields import check, knob


@dataclass(frozen=True)
class ServingConfig:
    """Staying alive"""

    max_queued_requests: int = knob(2048, "requests that may be running or waiting; more are answered 503", low=1)
    watchdog_s: float = knob(
        20.0, "seconds without progress after which the engine is replaced (longer where steps are)", low=0.1
    )
    request_timeout_s: float | None = knob(
        None, "longest a request may take, in seconds (default: no limit)", low=0.001
    )
    max_n: int = knob(128, "answers that a request may ask for at once", low=1, high=16384)
    max_logprobs: int = knob(
        64, "logprobs of each token that a request may ask for; -1: of the whole vocabulary", low=-1
    )
    standby: bool = knob(
        True, "keep a second process ready to take over from a dead engine in less time (about 250 MB)"
    )
    startup_timeout_s: float = knob(600.0, "seconds the engine may take to load", low=1)
    shutdown_timeout: float = knob(
        30.0, "seconds running requests get to finish when the server is told to stop", low=0
    )

    def __post_init__(self) -> None:
        check(self)
