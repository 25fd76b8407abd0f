"""Everything the OpenAPI document describes, tried by schemathesis against real servers: answers must be as described.

    python benchmarks/schema_fuzz.py [--examples 200] [--servers keys,open,model] [--paths /v1/completions,/pause]

Three servers: one with keys, which is asked with the operator's; one without; one with a real model (SmolLM2). For
each operation requests that fit the document and requests that do not: no answer may have a status, a content type or
a body the document does not know, or be the server's own failure. Without a key nothing may be answered. A line per
operation; exit status 1 if anything was found.
"""

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import httpx  # noqa: E402
import schemathesis  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    ignored_auth,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from benchmarks.server_process import QUIRE, ServerProcess  # noqa: E402

KEY, ADMIN_KEY = "a-user", "an-operator"
# Few blocks are soon checked by /admin/check.
ECHO = "--executor echo --max-model-len 2048 --num-gpu-blocks-override 2048".split()
KEYS = ["--api-key", KEY, "--admin-api-key", ADMIN_KEY]
MODEL = "smollm2 --max-model-len 256 --max-num-seqs 4 --num-threads 1 --kv-cache-memory-bytes 64M".split()
SERVERS = {"keys": [*ECHO, *KEYS], "open": ECHO, "model": [*MODEL, *KEYS]}
ENDLESS = "/v1/engine/live"
UNDO = {"/pause": "/resume", "/sleep": "/wake_up"}
SHORT = {"max_tokens": 2, "min_tokens": 0}
TIMEOUT_S = 60.0
LAST_EVENTS = ("[DONE]", "message_stop", '"type":"error"')  # OpenAI's, and two of Anthropic's
SETTINGS = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], print_blob=False
)


def events_are_whole(context: Any, response: Any, case: Any) -> None:
    """A check of ours: the events of a stream are JSON, and the last one says that it is the last."""
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    if not any(end in "".join(lines[-1:]) for end in LAST_EVENTS):
        raise AssertionError(f"the stream ends with {lines[-1:]}")
    for line in lines:
        if line != "[DONE]":
            json.loads(line)


# Not among them: that what does not fit is refused. Fields and query parameters that nobody knows are ignored, and
# "16" is taken for 16, as by vLLM.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
    events_are_whole,
]


@dataclass
class Tried:
    """What came of one operation."""

    statuses: Counter[int] = field(default_factory=Counter)
    findings: dict[str, str] = field(default_factory=dict)  # what is wrong -> the first request that showed it


def try_operation(url: str, operation: Any, headers: Mapping[str, str], num_examples: int) -> Tried:
    """`operation`: of schemathesis. Half of the requests fit the document, the others do not."""
    tried = Tried()
    path = operation.path

    def try_case(case: Any) -> None:
        _try_case(case, url, headers, tried)
        if path in UNDO:
            httpx.post(url + UNDO[path], headers=headers, timeout=TIMEOUT_S)

    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        cases = operation.as_strategy(generation_mode=mode)
        if mode is GenerationMode.POSITIVE:
            cases = cases.map(_short)
        run = settings(SETTINGS, max_examples=max(1, num_examples // 2))(given(case=cases)(try_case))
        try:
            seed(20)(run)()
        except Unsatisfiable:  # there is nothing in such a request that could be wrong
            continue
    return tried


def _short(case: Any) -> Any:
    """A long answer is not a broken one."""
    body = case.body
    if isinstance(body, dict) and ("prompt" in body or "messages" in body):
        body |= SHORT
        if body.get("max_completion_tokens") is not None:
            body["max_completion_tokens"] = SHORT["max_tokens"]
        body.pop("model", None)
    return case


def _try_case(case: Any, url: str, headers: Mapping[str, str], tried: Tried) -> None:
    response = case.call(base_url=url, headers=dict(headers), timeout=TIMEOUT_S)
    tried.statuses[response.status_code] += 1
    try:
        checks = [*CHECKS, ignored_auth] if headers else CHECKS
        case.validate_response(response, checks=checks, headers=dict(headers))
    except (AssertionError, BaseExceptionGroup) as failed:
        for failure in getattr(failed, "exceptions", [failed]):
            what = f"{type(failure).__name__}, status {response.status_code}: {str(failure).strip()[:300]}"
            tried.findings.setdefault(what, case.as_curl_command()[:1000])


def operations(document: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    return [(method, path) for path, methods in document["paths"].items() for method in methods if path != ENDLESS]


def try_server(name: str, num_examples: int, paths: list[str]) -> int:
    """How many things were found."""
    num_found = 0
    headers = {"authorization": f"Bearer {ADMIN_KEY}"} if name != "open" else {}
    with ServerProcess([*QUIRE, *SERVERS[name]], "/ready") as server:
        document = httpx.get(server.url + "/openapi.json", headers=headers).json()
        schema = schemathesis.openapi.from_dict(document)
        for method, path in operations(document):
            if paths and path not in paths:
                continue
            started_s = time.monotonic()
            tried = try_operation(server.url, schema[path][method], headers, num_examples)
            statuses = ", ".join(f"{count} x {status}" for status, count in sorted(tried.statuses.items()))
            took_s = time.monotonic() - started_s
            print(f"{name:6} {method.upper():5} {path:32} {statuses:50} {took_s:6.1f} s", flush=True)
            for what, request in tried.findings.items():
                print(f"    FOUND {what}\n    {request}")
            num_found += len(tried.findings)
    return num_found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=200, help="requests per operation and server (%(default)s)")
    parser.add_argument("--servers", default=",".join(SERVERS), help="some of %(default)s, with commas between")
    parser.add_argument("--paths", default="", help="only these, with commas between")
    args = parser.parse_args()
    names = args.servers.split(",")
    if unknown := set(names) - set(SERVERS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(SERVERS)}")
    warnings.simplefilter("ignore")
    paths = [path for path in args.paths.split(",") if path]
    num_found = sum(try_server(name, args.examples, paths) for name in names)
    print(f"{num_found} things found")
    return 1 if num_found else 0


if __name__ == "__main__":
    sys.exit(main())
