"""`quire bench serve` against a server we did not write: what it sends, and that its figures are the server's own."""

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter

import msgspec
import numpy
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from quire.api.cli import run
from quire.bench.http_client import Failure, HttpClient, HttpReply, StreamedReply
from quire.bench.loadgen import Load
from quire.bench.summary import percentile, spread

FIRST_S, GAP_S = 0.05, 0.02


class Peer:
    """An OpenAI-shaped server on a thread: paced tokens, one event each, and a memory of all it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.arrivals_s: list[float] = []
        self.num_now = self.most_at_once = self.num_cut = 0
        self.can_tokenize = True
        self.fail: dict[int, str] = {}  # n-th generation: what goes wrong
        routes = [
            Route("/v1/models", lambda r: JSONResponse({"object": "list", "data": [{"id": "peer-model"}]})),
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/v1/chat/completions", self.generate, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    def num_tokens(self, body: dict) -> int:
        """Words of up to five letters are a token, longer ones two; a chat's template has seven."""
        text, around = (body["messages"][0]["content"], 7) if "messages" in body else (body["prompt"], 1)
        return around + sum(1 if len(word) <= 5 else 2 for word in text.split())

    async def tokenize(self, request: Request) -> JSONResponse:
        if not self.can_tokenize:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"count": self.num_tokens(await request.json()), "tokens": []})

    async def generate(self, request: Request):
        body, nth = await request.json(), len(self.bodies)
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.arrivals_s.append(time.monotonic())
        if self.fail.get(nth) == "refuse":
            return JSONResponse({"error": {"message": "no such thing", "code": 400}}, 400)
        return StreamingResponse(self.events(body, self.fail.get(nth)), media_type="text/event-stream")

    async def events(self, body: dict, fault: str | None):
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        num_tokens, is_chat = body["max_tokens"], "messages" in body
        ended = False
        try:
            if is_chat:
                yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            await asyncio.sleep(FIRST_S)
            for idx in range(num_tokens):
                if idx:
                    await asyncio.sleep(GAP_S)
                if fault == "cut" and idx == 2:
                    raise RuntimeError("the peer stumbles")
                if fault == "error":
                    yield event({"error": {"message": "poisoned"}})
                text = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
                yield event({"choices": [{"index": 0, **text}]})
            usage = {"prompt_tokens": self.num_tokens(body), "completion_tokens": num_tokens}
            yield event({"choices": [], "usage": usage})
            ended = True
            yield "data: [DONE]\n\n"
        finally:
            self.num_now -= 1
            self.num_cut += not ended


def event(content: dict) -> str:
    return f"data: {json.dumps(content)}\n\n"


@pytest.fixture
def peer():
    peer = Peer()
    with serving(peer.app) as url:
        peer.url = url
        yield peer


@contextlib.contextmanager
def serving(app):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


def bench(capsys, *argv: str, code: int = 0) -> dict:
    assert run(["bench", "serve", "--json", *argv]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_the_names_of_vllm_bench_serve_mean_the_same(peer, capsys):
    host, port = peer.url.removeprefix("http://").split(":")
    where = f"--backend openai-chat --host {host} --port {port} --endpoint /v1/chat/completions"
    load = "--dataset-name random --random-input-len 20 --random-output-len 6 --max-concurrency 2 --num-prompts 4"
    result = bench(capsys, *where.split(), *load.split())
    assert result["num_errors"] == 0 and peer.most_at_once == 2
    assert all("messages" in body and body["max_tokens"] == 6 for body in peer.bodies[1:])


def test_a_closed_loop_measures_what_the_server_does(peer, capsys):
    lengths = "--concurrency 4 --num-prompts 12 --input-len 20 --output-len 6"
    options = "--num-client-processes 2 --ignore-eos --api-key secret --seed 3"
    result = bench(capsys, "--base-url", peer.url, *lengths.split(), *options.split())
    bodies = peer.bodies[1:]  # the first is the trial
    assert len(bodies) == 12 and peer.most_at_once == 4
    assert all(peer.num_tokens(body) == 20 for body in bodies) and len({body["prompt"] for body in bodies}) == 12
    options = {"model": "peer-model", "max_tokens": 6, "ignore_eos": True, "stream": True}
    assert all(options.items() <= body.items() for body in bodies)
    assert set(peer.keys) == {"Bearer secret"}
    assert result["model"] == "peer-model" and result["workload"] == "http-4-12-20-6"
    assert (result["num_requests"], result["num_errors"], result["errors"]) == (12, 0, {})
    assert (result["num_input_tokens"], result["num_output_tokens"], result["num_events"]) == (240, 72, 72)
    assert FIRST_S * 1e3 <= result["ttft_ms"]["p50"] < 5 * FIRST_S * 1e3
    assert GAP_S * 1e3 <= result["tpot_ms"]["p50"] + 1 < 3 * GAP_S * 1e3
    assert result["itl_ms"]["mean"] == pytest.approx(result["tpot_ms"]["mean"], rel=0.01)
    assert result["e2e_ms"]["p50"] == pytest.approx(result["ttft_ms"]["p50"] + 5 * result["itl_ms"]["p50"], rel=0.3)
    assert result["out_tok_s"] == pytest.approx(72 / result["duration_s"], rel=0.01)
    assert result["num_client_processes"] == 2 and 0 < result["client_cpu_share"] < 1


def test_poisson_arrivals_do_not_wait_for_answers(peer, capsys):
    flags = "--request-rate 100 --num-prompts 40 --input-len 4 --output-len 20"
    result = bench(capsys, "--base-url", peer.url, *flags.split())
    waits_s = numpy.diff(peer.arrivals_s[1:])
    assert 0.005 < waits_s.mean() < 0.02  # 100 per second, whatever an answer takes (0.4 s)
    assert waits_s.std() > 0.3 * waits_s.mean()  # at random, not by the clock
    assert peer.most_at_once > 10 and result["num_errors"] == 0


def test_a_chat_is_as_long_as_asked_for_with_its_template(peer, capsys):
    flags = "--endpoint chat --num-prompts 2 --input-len 30 --output-len 3 --model named --request-rate inf"
    result = bench(capsys, "--base-url", peer.url + "/v1/", *flags.split())
    assert all(peer.num_tokens(body) == 30 and body["model"] == "named" for body in peer.bodies)
    assert not any("ignore_eos" in body for body in peer.bodies)
    assert result["num_events"] == 6  # the opening event with the role carries no text
    assert peer.most_at_once == 1


def test_without_tokenize_prompts_are_counted_in_words(peer, capsys):
    peer.can_tokenize = False
    bench(capsys, "--base-url", peer.url, "--num-prompts", "2", "--input-len", "30", "--output-len", "1")
    assert all(len(body["prompt"].split()) == 30 for body in peer.bodies)


def test_failures_are_counted_by_kind_and_the_rest_is_measured(peer, capsys):
    peer.fail = {1: "refuse", 2: "cut", 3: "error"}
    flags = "--num-prompts 6 --input-len 4 --output-len 4"
    result = bench(capsys, "--base-url", peer.url, *flags.split(), code=1)
    assert result["errors"] == {"http 400": 1, "disconnected": 1, "error event": 1}
    assert result["num_errors"] == 3 and result["num_output_tokens"] == 12


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--base-url", "http://127.0.0.1:9"], "no server answers"),
        (["--base-url", "localhost:8000"], "http://127.0.0.1:8000"),
        (["--base-url", "http://x:port"], "http://127.0.0.1:8000"),
        (["--num-prompts", "0"], "at least 1"),
        (["--request-rate", "-1"], "at least"),
    ],
)
def test_mistakes_are_one_line(argv, words, capsys):
    assert run(["bench", "serve", *argv]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error and "quire: " in error


def test_a_server_that_refuses_is_quoted(peer, capsys):
    peer.fail = {0: "refuse"}
    assert run(["bench", "serve", "--json", "--base-url", peer.url]) == 2
    assert "no such thing" in capsys.readouterr().err


def test_leaving_a_stream_early_cuts_the_connection(peer):
    async def leave() -> StreamedReply:
        answer = StreamedReply()
        load = Load(peer.url, "m", 1, 4, 1000, num_words=4)
        async with HttpClient(peer.url) as client:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.15):
                    await client.post("/v1/completions", load.body(0), answer)
            assert not client.idle
        return answer

    answer = asyncio.run(leave())
    assert 1 <= len(answer.texts) < 20
    deadline_s = time.monotonic() + 5
    while not peer.num_cut and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert peer.num_cut == 1


def test_a_connection_is_used_again(peer):
    async def twice() -> int:
        async with HttpClient(peer.url) as client:
            connections = set()
            for _ in range(3):
                await client.get("/v1/models")
                connections.add(client.idle[0])
            return len(connections)

    assert asyncio.run(twice()) == 1


@given(st.integers(0, 2**32), st.sampled_from(["\n\n", "\r\n\r\n"]))
def test_events_are_read_however_they_are_cut(seed, separator):
    texts = ["a", "é", "data: ", "\n\n", "😀"]
    events = [json.dumps({"choices": [{"text": text}]}, ensure_ascii=False) for text in texts]
    lines = [": a comment", *(f"data: {each}" for each in events), "data: [DONE]", ""]
    raw = separator.join(lines).encode()
    rng = random.Random(seed)
    answer = StreamedReply()
    answer.status = 200
    while raw:
        size = rng.randint(1, 40)
        answer.feed(raw[:size], 1.0)
        raw = raw[size:]
    answer.check()
    assert answer.texts == texts


def test_a_stream_without_its_end_is_a_failure():
    answer = StreamedReply()
    answer.status = 200
    answer.feed(b'data: {"choices":[{"text":"a"}]}\n\n', 1.0)
    with pytest.raises(Failure, match="DONE"):
        answer.check()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.sampled_from([50, 90, 99]))
def test_percentiles_are_numpys(values, percent):
    assert percentile(sorted(values), percent) == pytest.approx(numpy.percentile(values, percent), rel=1e-9, abs=1e-6)
    assert spread(values)["mean"] == pytest.approx(numpy.mean(values), rel=1e-6, abs=1e-3)


def test_request_bodies_do_not_depend_on_who_sends_them():
    load = Load("http://x", "m", 10, 8, 8, num_words=8, seed=1)
    other = msgspec.structs.replace(load, first=1, stride=2)
    assert load.body(5) == other.body(5) and load.body(5) != load.body(6)
    assert Counter(load.body(i) for i in range(10)).most_common(1)[0][1] == 1


def test_error_messages_are_read_in_any_shape():
    for content, words in (
        (b'{"error":{"message":"too long"}}', "too long"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b"<html>", "<html>"),
    ):
        reply = HttpReply()
        reply.feed(content, 0.0)
        assert words in reply.message()
