"""What the server logs: one line per request, and one of engine status while it is busy, for people or as JSON.

Called by `guard.py` and `run.py`. Prompts are logged only with --log-requests, keys and query strings never: of an
error only the first words, without what they quote.
"""

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire import env
from quire.api.server.errors import ErrorDetail
from quire.metrics.serving import ServingMetrics
from quire.utils.json_lines import JsonFormatter

if TYPE_CHECKING:
    from quire.api.server.generation import Usage
    from quire.api.server.limits import Allowance
    from quire.api.server.tracing import Trace

log = logging.getLogger("quire.server")

MAX_SHOWN_CHARS = 2000  # of a request's body, with --log-requests
MAX_PATH_CHARS = 200
MAX_REASON_CHARS = 120

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")  # what a message repeats of what was sent


@dataclass(slots=True)
class CallRecord:
    """What is known of one HTTP request. The guard makes it, endpoints add to it, and its line in the log shows it."""

    request_id: str  # shown to the client, who may have chosen it
    method: str = ""
    path: str = ""
    client: str = ""  # address
    owner: str = ""  # a digest of the key it came with
    label: str = ""  # the key's, in the key file
    limits: "Allowance | None" = None  # what it may take of its key's tokens, where these are limited
    status: int = 0
    seconds: float = 0.0
    body: bytes | None = None  # where requests are to be logged
    usage: "Callable[[], Usage] | None" = None  # counts the tokens of its streams, where it has any
    reason: str = ""  # why it failed
    trace: "Trace | None" = None  # where calls are traced

    def failed(self, error: ErrorDetail, hint: str = "") -> None:
        """Why it got no answer. `hint`: the flag that could change that."""
        words = _QUOTED.sub("…", error.message.partition(": ")[0])
        reason = f"{error.code}: {words}" if error.code else words
        self.reason = _printable(reason, MAX_REASON_CHARS) + (f" ({hint})" if hint else "")


def setup(log_format: str, level: str | None = None) -> None:
    """Sends every logger's lines to stderr in this format, as do the processes that this one starts.

    `level`: the least that is shown, by them too. None: what QUIRE_LOG_LEVEL says, else "info" for the server's own
    lines and "warning" for all others.
    """
    env.set_log_format(log_format)
    if level is not None:
        env.set_log_level(level)
    handler = logging.StreamHandler(sys.stderr)
    human = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if log_format == "json" else human)
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger().setLevel(env.log_level())
    log.setLevel(env.log_level("info"))
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it would warn of every malformed request


def announce(text: str) -> None:
    """Tells whoever started the server that it is ready: on standard output, or in the log where that is JSON."""
    handlers = logging.getLogger().handlers
    if handlers and isinstance(handlers[0].formatter, JsonFormatter):
        log.info("%s", text)
    else:
        print(text, flush=True)


def write(message: str, fields: dict[str, Any], level: int = logging.INFO) -> None:
    log.log(level, "%s", message, extra={"fields": fields})


def write_call(call: CallRecord) -> None:
    """Writes the line of a request that is over."""
    fields: dict[str, Any] = {
        "request_id": call.request_id,
        "method": call.method,
        "path": _printable(call.path, MAX_PATH_CHARS),
        "status": call.status,
        "ms": round(call.seconds * 1000, 1),
    }
    message = "{status} {method} {path} {ms:g} ms".format_map(fields)
    if call.usage is not None:
        usage = call.usage()
        fields |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        message += f" {usage.prompt_tokens}+{usage.completion_tokens} tokens"
    message += f" {call.request_id}"
    if call.client:
        fields["client"] = call.client
        message += f" from {call.client}"
    if call.label:
        fields["key"] = call.label
        message += f" as {call.label}"
    if call.reason:
        fields["reason"] = call.reason
        message += f": {call.reason}"
    if call.body is not None:
        text = call.body[: 4 * MAX_SHOWN_CHARS + 4].decode("utf-8", "replace")
        fields["body"] = _printable(text, MAX_SHOWN_CHARS)
        message += " " + fields["body"]
    write(message, fields)


def _printable(text: str, limit: int) -> str:
    """Text as one line, whatever a client sent, so that nobody can forge a line of the log."""
    cut = text[:limit]
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)
    return shown + "…" if len(text) > limit else shown


class StatusLine:
    """Logs what the engine did since the last line, from the counters that /metrics shows."""

    def __init__(self, metrics: ServingMetrics) -> None:
        self.metrics = metrics
        _, self.before = metrics.totals()

    def write(self, seconds: float) -> None:
        """Writes the line for the last `seconds`; nothing while the engine had nothing to do."""
        gauges, counters = self.metrics.totals()
        gained = {name: counters[name] - self.before[name] for name in counters}
        self.before = counters
        num_requests = gauges["num_requests_running"] + gauges["num_requests_waiting"]
        if not num_requests and not gained["generation_tokens"]:
            return
        fields = {
            "running": int(gauges["num_requests_running"]),
            "waiting": int(gauges["num_requests_waiting"]),
            "kv_usage": round(gauges["kv_cache_usage_perc"], 3),
            "prefix_hits": round(gained["prefix_cache_hits"] / max(1, gained["prefix_cache_queries"]), 3),
            "prompt_tok_s": round(gained["prompt_tokens"] / seconds, 1),
            "out_tok_s": round(gained["generation_tokens"] / seconds, 1),
        }
        message = (
            "engine: {running} running, {waiting} waiting, KV {kv_usage:.0%}, prefix hits {prefix_hits:.0%}, "
            "{prompt_tok_s:.0f} prompt + {out_tok_s:.0f} output tokens/s"
        )
        if gained["spec_decode_num_draft_tokens"]:
            share = gained["spec_decode_num_accepted_tokens"] / gained["spec_decode_num_draft_tokens"]
            fields["drafts_accepted"] = round(share, 3)
            message += ", drafts accepted {drafts_accepted:.0%}"
        write(message.format_map(fields), fields)
