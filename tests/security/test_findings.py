"""Holes that were found in this server by attacking it, each as a test named after it, and the classes they belong to.

What was found in raw HTTP, grammars and model folders is in test_raw_http.py, test_grammars.py and test_folders.py.
"""

import asyncio
import concurrent.futures
import json
import logging
import os
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
import msgspec
import pytest

from quire import SamplingParams
from quire.api.server.app import ENDPOINTS, App
from quire.api.server.calls import Service
from quire.api.server.fields import decode
from quire.api.server.openapi import build
from quire.config import ServingConfig
from quire.config.server import ServerConfig
from quire.errors import InternalError, RequestError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.requests import RequestState
from quire.messages import AddRequest, Check, Constraint
from quire.structured.spec import GrammarSpec
from tests.poison import EXIT
from tests.security.conftest import check, refused
from tests.serving import ROOT, ServerProcess, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
HUGE = 18_446_744_073_709_551_616  # one more than 64 bits hold


@pytest.fixture(scope="module")
def small(smollm2):
    """Room for eight requests; repeats its prompts; crashes at marked ones."""
    flags = ["--executor", "tests.poison", "--max-queued-requests", "8", "--max-model-len", "8192", "--watchdog-s", "3"]
    with ServerProcess(*flags, "--api-key", "k1", "--api-key", "k2", "--admin-api-key", "a1") as process:
        process.client.headers["authorization"] = "Bearer k1"
        yield process


def is_well(server: ServerProcess) -> None:
    """It answers, its books are in order, and nothing unforeseen is in its log."""
    check(server.get("/ready").status_code == 200, "not ready")
    answer = server.post(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 2})
    check(answer.status_code == 200, answer.text)
    books = server.get("/admin/check", headers={"authorization": "Bearer a1"})
    check(books.json() == {"problem": ""}, books.text)
    check("Traceback" not in server.log(), server.log()[-3000:])


# == The findings ======================================================================================================


def test_1_a_number_no_message_can_hold_takes_no_place_and_ends_nothing(small):
    for _ in range(10):
        error = refused(small.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "extra_args": {"x": HUGE}}), 400)
        check(error["param"] == "extra_args", error)
    is_well(small)
    killed = small.core_pid()
    os.kill(killed, signal.SIGKILL)
    # The server may call itself ready until it has noticed.
    until(lambda: small.core_pid() != killed and small.get("/ready").status_code == 200, 20, "a new engine")
    is_well(small)


def test_3_a_request_that_ends_the_engine_blocks_nobody_else(small):
    def ask(key: str, **fields: Any) -> httpx.Response:
        body = {"prompt": list(EXIT), "max_tokens": 5, "temperature": 0, **fields}
        return httpx.post(small.url + COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)

    # Each differs from one before in one thing alone. They end it too, so each is found guilty for itself.
    for key, fields in (
        ("k1", {"cache_salt": "mine", "guided_regex": "[ab]+"}),
        ("k1", {"cache_salt": "mine"}),
        ("k1", {"cache_salt": "yours"}),
        ("k2", {"cache_salt": "yours"}),
        ("k2", {"cache_salt": "yours", "max_tokens": 6}),
    ):
        refused(ask(key, **fields), 500, says="makes the engine fail")
        refused(ask(key, **fields), 500, says="refused")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_8_large_texts_to_tokenize_are_refused_before_the_work_and_hold_nobody_up(small, path):
    text = "a b " * (3 << 20 >> 2)
    bodies = {"/tokenize": {"prompt": text, "return_token_strs": True}, "/detokenize": {"tokens": [5] * 200_000}}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        started = time.monotonic()
        hostile = [pool.submit(small.post, path, bodies[path]) for _ in range(3)]
        slowest = 0.0
        while not all(future.done() for future in hostile):
            asked = time.monotonic()
            check(small.get("/live").status_code == 200)
            slowest = max(slowest, time.monotonic() - asked)
            time.sleep(0.01)
        for future in hostile:
            refused(future.result(), 400)
    check(time.monotonic() - started < 5, "the work was done first")
    check(slowest < 0.5, f"/live took {slowest:.1f} s")


def test_9_counts_are_bounded_as_values_are(small):
    many = {"prompt": "a", "n": 128, "max_tokens": 4, "allowed_token_ids": [i % 40_000 for i in range(16_385)]}
    error = refused(small.post(COMPLETIONS, many), 400, says="16384")
    check(error["param"] == "allowed_token_ids", error)
    started = time.monotonic()
    check(small.post(COMPLETIONS, {**many, "allowed_token_ids": list(range(16_384))}).status_code == 200)
    check(time.monotonic() - started < 3, "as many as are allowed cost too much")


def test_9_what_choices_have_in_common_is_sent_once(small):
    async def scenario() -> tuple[int, int]:
        async with AsyncLLM("smollm2", executor="echo") as llm:
            sent = []
            send = llm.cores.supervisors[0].core.send_encoded
            llm.cores.supervisors[0].core.send_encoded = lambda data: sent.append(len(data)) or send(data)
            params = SamplingParams(max_tokens=2, ignore_eos=True, allowed_token_ids=list(range(10_000)))
            for n in (1, 128):
                params.n = n
                await (await llm.submit([5] * 1000, params)).wait()
            return sent[0], sent[-1]

    one, many = asyncio.run(scenario())
    check(many < 1.2 * one, f"{many} bytes for 128 choices, {one} for one")


def test_11_a_count_too_long_to_print_is_refused(small):
    content = b'{"prompt": [%s], "n": %s}' % (b",".join([b'"a"'] * 256), b"9" * 4300)
    refused(small.client.post(COMPLETIONS, content=content, headers=JSON), 400, says="n must be at most 16384")
    is_well(small)


def test_an_error_does_not_repeat_all_that_was_sent(small):
    body = {"messages": [{"role": "user", "content": "a"}], "tool_choice": "x" * 32_000}
    refused(small.post(CHAT, body), 400, says="tool_choice")  # which also looks at the length


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--allowed-origins", "--logits-processors"])
def test_13_no_flag_takes_the_model_for_its_own(flag):
    code = (
        "from quire.api.cli import parser; import sys\n"
        "args = parser(sys.argv[1:]).parse_args(sys.argv[1:]); print(vars(args)['name'], vars(args)[sys.argv[-1]])"
    )
    field = flag[2:].replace("-", "_")
    command = [sys.executable, "-c", code, "serve", flag, "https://one", "org/name", field]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    check(done.returncode != 0 and "unrecognized" in done.stderr, done.stderr)  # the field's name is one word too many
    code = code.replace("vars(args)[sys.argv[-1]]", f"vars(args)[{field!r}]")
    command = [sys.executable, "-c", code, "serve", flag, "https://one", "org/name"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    check(done.stdout.strip() == "org/name ['https://one']", done.stdout + done.stderr)


def test_13_a_word_too_many_is_told(smollm2):
    command = [sys.executable, "-m", "quire", "serve", "--served-model-name", "one", "smollm2", "two", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    check(
        done.returncode == 2 and "give it again for another" in done.stderr and "Traceback" not in done.stderr,
        done.stderr,
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"admin_api_key": "a1"}, "--api-key"),
        ({"host": "0.0.0.0"}, "0.0.0.0"),
        ({"host": "::"}, "--api-key"),
        ({"host": "0.0.0.0", "admin_api_key": "a1"}, "0.0.0.0"),
        ({}, ""),
        ({"host": "127.0.0.2"}, ""),
        ({"host": "localhost"}, ""),
        ({"host": "::1"}, ""),
        ({"host": "0.0.0.0", "api_key": ["k"]}, ""),
        ({"admin_api_key": "a1", "api_key_file": "keys"}, ""),
    ],
)
def test_14_an_open_door_is_told(options, says):
    told = ServerConfig(**options).open_doors()
    check(bool(told) == bool(says) and says in " ".join(told), told)


def test_14_an_open_door_is_in_the_log(smollm2):
    with ServerProcess("--executor", "echo", "--admin-api-key", "a1") as server:
        check("--admin-api-key is for operators" in server.log(), server.log())


# == What fails between taking a request in and the core's answer ======================================================


def run_llm(scenario, executor: str = "echo", **options: Any) -> Any:
    async def main() -> Any:
        serving = ServingConfig(max_queued_requests=4, watchdog_s=5)
        async with AsyncLLM("smollm2", executor=executor, serving=serving, **options) as llm:
            return await asyncio.wait_for(scenario(llm), 100)

    return asyncio.run(main())


PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


async def works(llm: AsyncLLM) -> None:
    for _ in range(5):  # more than there are places
        state = await (await llm.submit([1, 2, 3], PARAMS)).wait()
        check(len(state.choices[0].token_ids) == 20, "an ordinary request fails")
    check(not llm.cores.live, f"{len(llm.cores.live)} places are taken for ever")
    check(await llm.check() == "", "the core's books are not in order")


pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


class Unsendable:
    """Nothing that a message could hold."""


def test_a_request_that_cannot_be_encoded_gives_its_place_back(smollm2):
    async def scenario(llm: AsyncLLM) -> None:
        for _ in range(10):
            request = llm.inputs.request("x", [1, 2, 3], PARAMS)
            request.message.cache_salt = Unsendable()
            original = llm.inputs.request
            llm.inputs.request = lambda *args, made=request: made
            with pytest.raises(TypeError):
                await llm.submit([1, 2, 3], PARAMS)
            llm.inputs.request = original
        await works(llm)

    run_llm(scenario)


def test_a_request_that_cannot_be_sent_again_fails_alone(smollm2, caplog):
    async def scenario(llm: AsyncLLM) -> None:
        good = await llm.submit([1, 2, 3], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
        bad = await llm.submit([4, 5, 6], SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True))
        bad.request.message.cache_salt = Unsendable()
        await anext(good)
        llm.cores.supervisors[0].core.kill()
        with pytest.raises(InternalError):
            await bad.wait()
        check(len((await good.wait()).choices[0].token_ids) == 100, "another's stream broke")
        await works(llm)
        check(llm.num_restarts == 1, "restarts loop")

    run_llm(scenario, "echo:50")
    check(sum("others go on" in record.message for record in caplog.records) == 1, "not one line in the log")


def test_a_message_that_the_core_cannot_decode_is_that_requests_fault_alone(smollm2):
    async def scenario(llm: AsyncLLM) -> None:
        other = await llm.submit([1, 2, 3], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
        send = llm.cores.supervisors[0].core.send_encoded
        for spoil in (
            lambda fields: [*fields[:2], "no ids", *fields[3:]],
            lambda fields: [*fields[:3], {"n": -1}, *fields[4:]],
            lambda fields: fields[:3],
        ):
            llm.cores.supervisors[0].core.send_encoded = lambda data, spoil=spoil: send(pack(spoil(unpack(data))))
            stream = await llm.submit([4, 5, 6], PARAMS)
            llm.cores.supervisors[0].core.send_encoded = send
            with pytest.raises(InternalError):
                await asyncio.wait_for(stream.wait(), 10)
        check(len((await other.wait()).choices[0].token_ids) == 60, "another's stream broke")
        await works(llm)
        check(llm.num_restarts == 0, "the core crashed")

    run_llm(scenario, "echo:50")


def test_a_request_that_the_core_cannot_take_in_leaves_no_choice_behind(smollm2):
    from tests.core.harness import Core

    core = Core()
    core.add("a", [1, 2, 3], max_tokens=3)
    original = core.engine.scheduler.add

    def fail_at_the_third(request) -> None:
        if request.request_id == "b" and request.choice_idx == 2:
            raise RuntimeError("no more")
        original(request)

    core.engine.scheduler.add = fail_at_the_third
    core.add("b", [4, 5, 6], n=4, max_tokens=3)
    for choice_idx in range(4):
        del core.sent["b", choice_idx]
    core.run()
    check(core.reasons["b", 0] == "error" and not core.tokens["b", 0], core.reasons)
    core.assert_all_as_expected()
    core.assert_nothing_is_held()


def test_a_delta_that_cannot_be_taken_in_fails_its_request_alone(smollm2, caplog):
    async def scenario(llm: AsyncLLM) -> None:
        good = await llm.submit([1, 2, 3], PARAMS)
        bad = await llm.submit([4, 5, 6], SamplingParams(max_tokens=4000, ignore_eos=True))
        bad.request.add_delta = lambda delta: 1 / 0
        with pytest.raises(InternalError):
            await bad.wait()
        check(len((await good.wait()).choices[0].token_ids) == 20, "another's stream broke")
        await works(llm)
        check(llm.num_restarts == 0, "the core was replaced for nothing")

    run_llm(scenario, "echo:50")
    check(any("others go on" in record.message for record in caplog.records), "nothing in the log")


@pytest.mark.parametrize("task", ["_apply_outputs", "_send", "_answer"])
def test_no_task_of_the_supervisor_ends_unnoticed(smollm2, caplog, task):
    """Each attendant of a core is made to fail once, with something nobody foresaw; streams go on all the same."""

    async def scenario(llm: AsyncLLM) -> None:
        supervisor = llm.cores.supervisors[0]
        stream = await llm.submit([1, 2, 3], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
        await anext(stream)
        original = getattr(supervisor, task)

        def fails_once(*args: Any) -> Any:
            setattr(supervisor, task, original)
            raise KeyError("nobody foresaw this")

        setattr(supervisor, task, fails_once)
        if task == "_answer":
            supervisor._asked.append(asyncio.get_running_loop().create_future())
            supervisor.core.send(Check())
        if task == "_send":
            supervisor.core.kill()
            with pytest.raises(InternalError):
                await stream.wait()
        else:
            check(len((await stream.wait()).choices[0].token_ids) == 60, "the stream broke")
        check(llm.num_restarts == 1, f"{llm.num_restarts} restarts")
        await works(llm)

    run_llm(scenario, "echo:50")
    check(any(record.levelno >= logging.ERROR for record in caplog.records), "nothing in the log")


def test_a_supervisor_that_cannot_mend_itself_ends_with_a_message(smollm2):
    async def scenario(llm: AsyncLLM) -> None:
        stream = await llm.submit([1, 2, 3], SamplingParams(max_tokens=4000, ignore_eos=True))
        llm.cores.supervisors[0]._after_core_exit = lambda *args: 1 / 0
        llm.cores.supervisors[0].core.kill()
        with pytest.raises(Exception, match="supervisor failed"):
            await stream.wait()
        check(llm.failure is not None and llm.health() is not None, "nobody is told")

    run_llm(scenario, "echo:50")


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, "chat.Reading"), (CHAT, "chat.usage"), (COMPLETIONS, "completions._Prompt")]
)
def test_whatever_fails_while_an_answer_is_written_ends_its_requests(smollm2, monkeypatch, path, name, streamed):
    """The handler breaks after the engine has begun: nothing runs on, and there is one answer."""
    monkeypatch.setattr(f"quire.api.server.{name}", lambda *args, **options: 1 / 0)

    async def scenario(llm: AsyncLLM) -> list[dict[str, Any]]:
        endpoint = next(endpoint for endpoint in ENDPOINTS if endpoint.path == path)
        sent: list[dict[str, Any]] = []
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 10, "stream": streamed}
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.sleep(3600)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        app = App(Service(llm, ["smollm2"], {}))
        await app._answer(endpoint, "", {"type": "http"}, receive, send)
        check(not llm.cores.live, "its request runs on")
        await works(llm)
        return sent

    sent = run_llm(scenario)
    statuses = [message["status"] for message in sent if message["type"] == "http.response.start"]
    if name == "chat.usage" and streamed:
        check(statuses == [200], "streams do not count that way")
    else:
        check(statuses == [500], statuses)


# == Bounds, declared once a field =====================================================================================


def unbounded(
    schema: dict[str, Any], schemas: dict[str, Any], path: str, seen: frozenset[str] = frozenset()
) -> list[str]:
    """Where in a JSON schema a text, number, list or map has no bound."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return [] if name in seen else unbounded(schemas[name], schemas, f"{path}<{name}>", seen | {name})
    if "x-max-values" in schema and "maxItems" not in schema:
        return [] if "maxProperties" in schema else [path]
    found = []
    for option in schema.get("anyOf", []):
        found += unbounded(option, schemas, path, seen)
    match schema.get("type"):
        case "string" if not {"maxLength", "enum", "const", "pattern"} & schema.keys():
            found.append(path)
        case "integer" if not {"minimum", "maximum"} <= schema.keys():
            found.append(path)
        case "array":
            found += [path] if "maxItems" not in schema else []
            found += unbounded(schema.get("items", {}), schemas, path + "[]", seen)
        case "object":
            for name, inner in schema.get("properties", {}).items():
                found += unbounded(inner, schemas, f"{path}.{name}", seen)
            values = schema.get("additionalProperties")
            if "properties" in schema:
                pass
            elif "maxProperties" not in schema or values is None:
                found.append(path)
            else:
                found += unbounded(values, schemas, path, seen)
        case None if "anyOf" not in schema and not {"enum", "const"} & schema.keys():
            found.append(path)  # anything at all
    return found


def test_every_field_of_every_request_is_bounded():
    document = build(ENDPOINTS)
    schemas = document["components"]["schemas"]
    found = []
    num_bodies = 0
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if "requestBody" in operation:
                num_bodies += 1
                found += unbounded(operation["requestBody"]["content"]["application/json"]["schema"], schemas, path)
            for parameter in operation.get("parameters", []):
                found += unbounded(parameter["schema"], schemas, f"{path}?{parameter['name']}")
    check(num_bodies >= 4, "no bodies were looked at")
    check(not found, f"without bounds: {found}")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": {"enum": [1]}},
        {"type": "object"},
        {},
    ],
)
def test_a_field_without_bounds_would_be_found(schema):
    check(unbounded({"type": "object", "properties": {"a": {"anyOf": [schema, {"type": "null"}]}}}, {}, "") == [".a"])


FREE = {
    "extra_args": (COMPLETIONS, {"prompt": "a"}, 1024),
    "vllm_xargs": (COMPLETIONS, {"prompt": "a"}, 1024),
    "chat_template_kwargs": (CHAT, {"messages": [{"role": "user", "content": "a"}]}, 4096),
    "response_format": (COMPLETIONS, {"prompt": "a"}, 32_768),
    "guided_json": (COMPLETIONS, {"prompt": "a"}, 32_768),
}


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize(
    "hostile",
    [HUGE, -HUGE, 10**50, "\ud800", [0] * 40_000, {f"k{i}": {} for i in range(20_000)}],
    ids=lambda value: str(value)[:12],
)
def test_free_json_is_bounded_in_count_and_size(name, hostile):
    path, body, limit = FREE[name]
    kind = next(endpoint.body for endpoint in ENDPOINTS if endpoint.path == path)
    content = json.dumps({**body, name: {"type": "object", "x": [{"y": hostile}]}}).encode()
    with pytest.raises(RequestError) as caught:
        asyncio.run(decode(content, kind))
    check(len(str(caught.value)) < 200, caught.value)


@pytest.mark.parametrize("where", ["tools", "structured_outputs", "messages"])
def test_free_json_inside_lists_and_structs_is_bounded_too(where):
    inner = {"type": "object", "x": HUGE}
    user = {"role": "user", "content": "a"}
    bodies = {
        "tools": {"messages": [user], "tools": [{"type": "function", "function": {"name": "f", "parameters": inner}}]},
        "structured_outputs": {"messages": [user], "structured_outputs": {"json": inner}},
        "messages": {"messages": [user, {"role": "tool", "content": "a", "x": [[[HUGE]]]}]},
    }
    kind = next(endpoint.body for endpoint in ENDPOINTS if endpoint.path == CHAT)
    with pytest.raises(RequestError, match="64 bits"):
        asyncio.run(decode(json.dumps(bodies[where]).encode(), kind))


def test_what_a_request_may_cost_on_its_way_to_the_core_is_bounded(smollm2, monkeypatch):
    monkeypatch.setattr("quire.frontend.supervisor.MAX_REQUEST_BYTES", 5000)

    async def scenario(llm: AsyncLLM) -> None:
        for _ in range(6):
            with pytest.raises(RequestError, match="5,000"):
                await llm.submit([1000] * 4000, PARAMS)
        await works(llm)

    run_llm(scenario)


HEAVY = {
    "many empty lists": b"[" + b"[]," * 200_000 + b"[]]",
    "many members": b"{" + b",".join(b'"%d":1' % i for i in range(40_000)) + b"}",
    "many numbers": b"[" + b"1," * 270_000 + b"1]",
    "long numbers": b"[" + b"9" * 4000 + b",1" * 9000 + b"]",
}


@pytest.mark.parametrize("name", HEAVY)
def test_bodies_that_take_long_to_decode_are_refused_before(small, name):
    body = b'{"prompt": "a", "x": %s}' % HEAVY[name]
    refused(small.client.post(COMPLETIONS, content=body, headers=JSON), 400)


def test_bodies_are_bounded_in_total_and_per_address(smollm2):
    with ServerProcess("--executor", "echo:5", "--max-held-bytes", "100k", "--max-model-len", "8192") as server:

        def status(max_tokens: int) -> int:
            body = {"prompt": "a " * 2000, "max_tokens": max_tokens, "ignore_eos": True, "user": "u" * 30_000}
            return httpx.post(server.url + COMPLETIONS, json=body, timeout=60).status_code

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            statuses = sorted(pool.map(status, [20] * 4))
        check(statuses[0] == 200 and statuses[-1] == 503, statuses)  # two do not fit into half of it
        check(status(1) == 200, "not given back")


# == A conviction names exactly what was run ===========================================================================


def state(seed: int = 1, request_id: str = "a", params: SamplingParams = PARAMS, **fields: Any) -> RequestState:
    message = AddRequest(request_id, [1, 2, 3], params, seed, **fields)
    return RequestState(request_id, None, [1, 2, 3], params, message, None)


def test_a_fingerprint_covers_every_field_that_is_run_and_no_other():
    same = [{}, {"request_id": "b"}, {"seed": 2}, {"priority": 3}, {"choices": {0: [5]}}]
    check(len({state(**fields).fingerprint() for fields in same}) == 1, "what does not matter changes it")
    others = {
        "prompt_token_ids": None,  # below
        "params": {"params": SamplingParams(max_tokens=21)},
        "eos_ids": {"eos_ids": [1]},
        "bad_words": {"bad_words": [[1]]},
        "cache_salt": {"cache_salt": "x"},
        "constraint": {"constraint": Constraint(GrammarSpec("regex", "a"))},
        "wants_vector": {"wants_vector": True},
        "prediction": {"prediction": [1]},
        "owner": {"owner": "k"},
    }
    known = {"request_id", "seed", "priority", "choices", *others}
    check(set(AddRequest.__struct_fields__) == known, "is a new field part of what is run? say so here")
    found = [state(**fields).fingerprint() for fields in others.values() if fields is not None]
    different = state()
    different.message.prompt_token_ids = [1, 2, 4]
    found += [different.fingerprint(), state().fingerprint()]
    check(len(set(found)) == len(found) == len(others) + 1, "two that differ look the same")
