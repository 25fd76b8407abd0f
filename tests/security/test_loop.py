"""No request, however heavy, keeps the API's event loop from turning: every piece of work on it costs little CPU time.

Each case is sent to a server under `tests/loop_watch.py`, which says what the loop did. Nothing here is an `assert`.
"""

import asyncio
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvloop
from benchmarks.server_process import ServerProcess

from quire.config.server import ServerConfig
from tests import loop_watch
from tests.security.conftest import check

BODY = ServerConfig().max_body_bytes - 4096
VALUES = ServerConfig().max_json_values - 64
CONTEXT = 8192
TRIES = 3
SETTLE_S = 0.1  # for what the server still does about answers or connections
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
WORDS = "one two three four five six seven eight nine ten eleven twelve "
TEXT = WORDS * (CONTEXT // 12 - 8)  # a token a word, near the limit
IDS = [1000 + idx % 5000 for idx in range(CONTEXT - 200)]
LONG_TEXT = (WORDS * (BODY // len(WORDS)))[:BODY]
HELLO = [{"role": "user", "content": "Hello"}]
STRINGS = {"properties": {f"x{idx}": {"type": "string"} for idx in range(20)}}
SCHEMA = {
    "type": "object",
    "properties": {f"field_{idx}": {"type": "string", "description": WORDS * 3} for idx in range(20)},
}


def asks(path: str, **body: Any) -> tuple[str, bytes]:
    return path, msgspec.json.encode(body)


def filled(path: str, before: bytes, piece: bytes, after: bytes, count: int = BODY) -> list[tuple[str, bytes]]:
    """A body of one piece over and over, as large as bodies may be, or with so many of it."""
    return [(path, before + piece * min(count, (BODY - len(before) - len(after)) // len(piece)) + after)]


def members(count: int) -> bytes:
    """Of an object: numbered names, each with a 1."""
    return b",".join(b'"%d":1' % idx for idx in range(count))


def many(path: str, before: bytes, piece: bytes, after: bytes) -> list[tuple[str, bytes]]:
    """As many of it as a body may have values, by the server's way of counting."""
    values = piece.count(b",") + piece.count(b"[") + piece.count(b"{") + 8 * piece.count(b":")
    return filled(path, before, piece, after, VALUES // max(1, values))


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"tool_{idx}", "parameters": SCHEMA}} for idx in range(count)]


# What is sent, made when its turn comes; several are sent at once.
CASES: dict[str, Callable[[], list[tuple[str, bytes]]]] = {
    # -- long prompts
    "text near the context": lambda: [asks(COMPLETIONS, prompt=TEXT, max_tokens=16)],
    "ids near the context": lambda: [asks(COMPLETIONS, prompt=IDS, max_tokens=16)],
    "ids near the context, echoed": lambda: [
        asks(COMPLETIONS, prompt=IDS, max_tokens=16, echo=True, return_token_ids=True)
    ],
    "256 short prompts": lambda: [asks(COMPLETIONS, prompt=["Hello"] * 256, max_tokens=16)],
    "256 texts, streamed": lambda: [asks(COMPLETIONS, prompt=[WORDS * 8] * 256, max_tokens=64, stream=True)],
    "256 prompts near the context, as ids": lambda: [asks(COMPLETIONS, prompt=[IDS] * 256, max_tokens=4)],
    "256 prompts near the context, as text": lambda: [asks(COMPLETIONS, prompt=[TEXT] * 256, max_tokens=4)],
    "64 long requests at once": lambda: [asks(COMPLETIONS, prompt=TEXT, max_tokens=8)] * 64,
    "64 long requests as ids at once": lambda: [asks(COMPLETIONS, prompt=IDS, max_tokens=8)] * 64,
    "4096 messages": lambda: [asks(CHAT, messages=[{"role": "user", "content": "x"}] * 4096, max_tokens=4)],
    "a message near the context": lambda: [asks(CHAT, messages=[{"role": "user", "content": TEXT}], max_tokens=4)],
    # -- many answers
    "n 128": lambda: [asks(COMPLETIONS, prompt="Hello", n=128, max_tokens=64)],
    "n 128, streamed": lambda: [asks(COMPLETIONS, prompt="Hello", n=128, max_tokens=64, stream=True)],
    "n 128, near the context": lambda: [asks(COMPLETIONS, prompt=IDS, n=128, max_tokens=16)],
    "n 128, near the context, with its ids": lambda: [
        asks(COMPLETIONS, prompt=IDS, n=128, max_tokens=16, return_token_ids=True)
    ],
    "n 128, near the context, echoed, streamed": lambda: [
        asks(COMPLETIONS, prompt=IDS, n=128, max_tokens=16, echo=True, return_token_ids=True, stream=True)
    ],
    "one long answer": lambda: [asks(COMPLETIONS, prompt="Hello there", max_tokens=8000)],
    "one long answer with stop strings": lambda: [
        asks(COMPLETIONS, prompt="Hello there", max_tokens=8000, stop=["x" * 1000 + str(idx) for idx in range(32)])
    ],
    "n 128 long answers": lambda: [asks(COMPLETIONS, prompt="Hello there", n=128, max_tokens=2000)],
    # -- logprobs
    "logprobs 64": lambda: [asks(COMPLETIONS, prompt="Hello there", logprobs=64, max_tokens=2000)],
    "logprobs 64, streamed": lambda: [
        asks(COMPLETIONS, prompt="Hello there", logprobs=64, max_tokens=500, stream=True)
    ],
    "logprobs 64, n 128": lambda: [asks(COMPLETIONS, prompt="Hello there", logprobs=64, n=128, max_tokens=64)],
    "logprobs 64, n 128, streamed": lambda: [
        asks(COMPLETIONS, prompt="Hello there", logprobs=64, n=128, max_tokens=64, stream=True)
    ],
    "chat logprobs 64": lambda: [
        asks(CHAT, messages=HELLO, logprobs=True, top_logprobs=64, max_tokens=2000, ignore_eos=True)
    ],
    "chat logprobs 64, n 128, streamed": lambda: [
        asks(CHAT, messages=HELLO, logprobs=True, top_logprobs=64, n=128, max_tokens=32, stream=True, ignore_eos=True)
    ],
    "prompt_logprobs 64": lambda: [asks(COMPLETIONS, prompt=IDS, prompt_logprobs=64, max_tokens=1)],
    "prompt_logprobs 64, n 128": lambda: [asks(COMPLETIONS, prompt=IDS[:500], prompt_logprobs=64, n=128, max_tokens=1)],
    "chat prompt_logprobs 64": lambda: [
        asks(CHAT, messages=[{"role": "user", "content": TEXT}], prompt_logprobs=64, max_tokens=1)
    ],
    "echo and logprobs 64": lambda: [asks(COMPLETIONS, prompt=IDS, echo=True, logprobs=64, max_tokens=1)],
    "echo and logprobs 64, streamed, n 16": lambda: [
        asks(COMPLETIONS, prompt=IDS[:4000], echo=True, logprobs=64, max_tokens=1, stream=True, n=16)
    ],
    # -- fields at their limits
    "1024 logit_bias, n 128": lambda: [
        asks(COMPLETIONS, prompt="Hello", n=128, max_tokens=4, logit_bias={str(idx): 1.0 for idx in range(1024)})
    ],
    "256 bad_words, n 128": lambda: [
        asks(COMPLETIONS, prompt="Hello", n=128, max_tokens=4, bad_words=[f"{WORDS * 10} {idx}" for idx in range(256)])
    ],
    "all allowed_token_ids": lambda: [
        asks(COMPLETIONS, prompt="Hello", max_tokens=4, allowed_token_ids=list(range(49152)))
    ],
    "300,000 allowed_token_ids, n 128": lambda: [
        asks(COMPLETIONS, prompt="Hello", n=128, max_tokens=4, allowed_token_ids=[7] * 300_000)
    ],
    "many tools": lambda: [asks(CHAT, messages=HELLO, tools=tools(6), max_tokens=4)],
    "512 tools": lambda: [asks(CHAT, messages=HELLO, tools=tools(512), max_tokens=4)],
    "512 tools, one must be called": lambda: [
        asks(CHAT, messages=HELLO, tools=tools(512), tool_choice="required", max_tokens=4)
    ],
    "extra_args of a megabyte": lambda: [
        asks(COMPLETIONS, prompt="Hello", max_tokens=4, extra_args={"x": [1.5] * 250_000})
    ],
    "chat_template_kwargs of a megabyte": lambda: [
        asks(CHAT, messages=HELLO, max_tokens=4, chat_template_kwargs={"x": [1.5] * 250_000})
    ],
    "a large JSON schema": lambda: [asks(COMPLETIONS, prompt="Hello", max_tokens=4, guided_json=STRINGS)],
    "10,000 choices": lambda: [
        asks(COMPLETIONS, prompt="Hello", max_tokens=4, guided_choice=[f"word {idx}" for idx in range(10_000)])
    ],
    "as much text as a body holds": lambda: [asks(COMPLETIONS, prompt=LONG_TEXT)],
    "as much text as a body holds, to tokenize": lambda: [asks(TOKENIZE, prompt=LONG_TEXT)],
    "as much text as a body holds, in a message": lambda: [
        asks(CHAT, messages=[{"role": "user", "content": LONG_TEXT[: BODY - 200]}])
    ],
    "eight such bodies": lambda: [asks(COMPLETIONS, prompt=LONG_TEXT)] * 8,
    "as many unknown fields as a body may have": lambda: [
        (COMPLETIONS, b'{"prompt":"x","max_tokens":1,' + members(VALUES // 9) + b"}")
    ],
    "as many entries of logit_bias as a body may have": lambda: [
        (COMPLETIONS, b'{"prompt":"x","logit_bias":{' + members(VALUES // 9) + b"}}")
    ],
    "as many extra_args as a body may have": lambda: [
        (COMPLETIONS, b'{"prompt":"x","extra_args":{' + members(VALUES // 9) + b"}}")
    ],
    # -- tokens
    "a megabyte to tokenize, with spellings": lambda: [
        asks(TOKENIZE, prompt=LONG_TEXT[: 1 << 20], return_token_strs=True)
    ],
    "64 kB to tokenize, with spellings": lambda: [asks(TOKENIZE, prompt=LONG_TEXT[: 1 << 16], return_token_strs=True)],
    "messages to tokenize": lambda: [
        asks(TOKENIZE, messages=[{"role": "user", "content": "x"}] * 4096, return_token_strs=True)
    ],
    "200,000 ids to detokenize": lambda: [asks(DETOKENIZE, tokens=[1000] * 200_000)],
    "ids of a context to detokenize": lambda: [asks(DETOKENIZE, tokens=IDS)],
}


USER = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,'
PROMPT = b'{"prompt":"x","max_tokens":1,'
# A body that is one piece over and over: (path, before, piece, after).
FILLED: dict[str, tuple[str, bytes, bytes, bytes]] = {
    "small messages": (CHAT, b'{"messages":[{}', b',{"role":"user","content":""}', b"]}"),
    "content parts": (
        CHAT,
        b'{"messages":[{"role":"user","content":[{"type":"text","text":"x"}',
        b',{"type":"text","text":"x"}',
        b"]}]}",
    ),
    "escapes": (COMPLETIONS, b'{"prompt":"', rb"\u00e9", b'"}'),
    "quotes": (COMPLETIONS, b'{"prompt":"', rb"\"[", b'"}'),
    "quotes and backslashes": (COMPLETIONS, b'{"prompt":"', rb"\\\"[{", b'"}'),
    "brackets in a text": (COMPLETIONS, b'{"prompt":"', b"[", b'"}'),
    "open brackets": (COMPLETIONS, b"", b"[", b""),
    "commas": (COMPLETIONS, b"", b",", b""),
    "spaces": (COMPLETIONS, b"{", b" ", b"}"),
    "ids": (COMPLETIONS, b'{"prompt":[1', b",1", b"]}"),
    "ids to detokenize": (DETOKENIZE, b'{"tokens":[1', b",1", b"]}"),
    "floats": (COMPLETIONS, b'{"prompt":[1', b",1.5", b"]}"),
    "empty texts": (COMPLETIONS, b'{"prompt":[""', b',""', b"]}"),
    "empty lists": (COMPLETIONS, b'{"prompt":[[]', b",[]", b"]}"),
    "empty maps": (COMPLETIONS, PROMPT + b'"extra_args":{"x":[{}', b",{}", b"]}}"),
    "one field again and again": (COMPLETIONS, PROMPT + b'"n":1', b',"n":1', b"}"),
    "stop strings": (COMPLETIONS, PROMPT + b'"stop":["x"', b',"x"', b"]}"),
    "metadata": (COMPLETIONS, PROMPT + b'"metadata":[1', b",1", b"]}"),
    "tools": (CHAT, USER + b'"tools":[{}', b",{}", b"]}"),
    "a tool's schema": (
        CHAT,
        USER + b'"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[1',
        b",1",
        b"]}}}]}",
    ),
    "a schema": (COMPLETIONS, PROMPT + b'"guided_json":{"enum":[1', b",1", b"]}}"),
    "choices": (COMPLETIONS, PROMPT + b'"guided_choice":["x"', b',"x"', b"]}"),
    "chat_template_kwargs": (CHAT, USER + b'"chat_template_kwargs":{"x":[1', b",1", b"]}}"),
    "half a body": (COMPLETIONS, b'{"prompt":[1', b",1", b""),
    "digits": (COMPLETIONS, PROMPT + b'"n":1', b"1", b"}"),
    "bytes that are no text": (COMPLETIONS, b'{"prompt":"', b"\xff", b'"}'),
}
for _name, _parts in FILLED.items():
    CASES |= {
        f"a body full of {_name}": partial(filled, *_parts),
        f"as many {_name} as a body may have": partial(many, *_parts),
    }


class Watched(ServerProcess):
    """A server under the watch."""

    def __init__(self, record: Path, *flags: str) -> None:
        self.record = record
        command = ["env", f"LOOP_WATCH={record}", sys.executable, "-m", "tests.loop_watch", "serve", *flags]
        super().__init__(command, "/ready")

    def play(self, requests: list[tuple[str, bytes]], timeout_s: float = 60.0) -> list[int]:
        """Sends all at once and reads the answers to their ends; the statuses."""
        limits = httpx.Limits(max_connections=None)
        headers = {"content-type": "application/json"}
        with (
            httpx.Client(base_url=self.url, timeout=timeout_s, limits=limits, headers=headers) as client,
            ThreadPoolExecutor(len(requests)) as threads,
        ):
            posted = [threads.submit(client.post, path, content=body) for path, body in requests]
            statuses = [answer.result().status_code for answer in posted]
            time.sleep(SETTLE_S)
            self.answered_s = time.time()  # from here on connections are closed, which costs the kernel's time
        time.sleep(SETTLE_S)
        return statuses

    def pieces(self, since_s: float) -> list[loop_watch.Piece]:
        """From then until the last answer, longest first."""
        return [piece for piece in loop_watch.read(self.record, since_s) if piece.at_s <= self.answered_s]


@pytest.fixture(scope="module")
def watched(smollm2, tmp_path_factory) -> Iterator[Watched]:
    flags = ["--executor", "tests.echo_logprobs", "--no-access-log", "--max-model-len", str(CONTEXT)]
    with Watched(tmp_path_factory.mktemp("watch") / "pieces.jsonl", *flags) as server:
        server.play([asks(CHAT, messages=HELLO, tools=tools(1), max_tokens=1)])  # what is made once
        yield server


@pytest.mark.parametrize("name", CASES)
def test_no_request_keeps_the_loop_from_turning(watched, name) -> None:
    requests = CASES[name]()

    def play() -> None:
        statuses = watched.play(requests)
        check(all(status in (200, 400, 413, 422) for status in statuses), statuses)

    check_pieces(watched, play)


def test_a_dead_core_with_many_long_requests(watched) -> None:
    """All of them are sent again to the next one, piece by piece."""

    def play() -> None:
        with ThreadPoolExecutor(1) as threads:
            request = asks(COMPLETIONS, prompt=IDS, max_tokens=190, ignore_eos=True)
            playing = threads.submit(watched.play, [request] * 200)
            time.sleep(1.5)
            os.kill(watched.core_pid, signal.SIGKILL)
            check(set(playing.result()) == {200}, "not all were answered")

    check_pieces(watched, play)


def slowness() -> float:
    """How many times as long this machine takes now as those the limit was set on, but 1 at least."""
    took_s = []
    for _ in range(3):
        started = time.thread_time()
        total = 0
        for number in range(200_000):
            total += number
        took_s.append(time.thread_time() - started)
    return max(1.0, min(took_s) / 0.010)


def check_pieces(watched: Watched, play: Callable[[], None]) -> None:
    """What a request costs, it costs every time: a piece that is long once and not again was the machine's."""
    found = []
    for _ in range(TRIES):
        slower = slowness()
        since_s = time.time()
        play()
        pieces = watched.pieces(since_s)
        if not pieces or pieces[0].cost_s <= loop_watch.LIMIT_S * max(slower, slowness()):
            return
        found.append(str(pieces[0]))
    check(False, f"the loop stood still for {found}")


# -- the watch itself --------------------------------------------------------------------------------------------------


def watched_pieces(path: Path, work: Callable[[], Any], in_thread: bool) -> list[loop_watch.Piece]:
    """What a watch says of a loop on which, or beside which, some work is done."""

    async def main() -> None:
        loop_watch.Watch(asyncio.get_running_loop(), path)
        await asyncio.sleep(0.05)
        await asyncio.to_thread(work) if in_thread else work()
        await asyncio.sleep(0.05)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    return loop_watch.read(path)


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_work_on_the_loop_is_seen_and_named(tmp_path) -> None:
    longest = watched_pieces(tmp_path / "pieces", lambda: spin(0.4), in_thread=False)[0]
    check(0.39 < longest.cost_s < 0.6, longest)
    check(any("spin" in frame for frame in longest.stack), longest)


def test_a_thread_that_keeps_the_interpreter_lock_is_seen(tmp_path) -> None:
    numbers = list(range(3_000_000, 0, -1)) + list(range(3_000_000))
    longest = watched_pieces(tmp_path / "pieces", lambda: sorted(numbers, key=None) and None, in_thread=True)[0]
    check(longest.cost_s > 0.025 and longest.others_s > longest.loop_s, longest)


def test_a_thread_that_computes_without_the_lock_is_not(tmp_path) -> None:
    data = b"x" * (64 << 20)
    pieces = watched_pieces(tmp_path / "pieces", lambda: hashlib.sha256(data).digest(), in_thread=True)
    check(not pieces or pieces[0].cost_s < loop_watch.LIMIT_S, pieces[:1])


def test_a_loop_that_only_waits_has_no_pieces(tmp_path) -> None:
    pieces = watched_pieces(tmp_path / "pieces", lambda: time.sleep(0.4), in_thread=False)
    check(not pieces or pieces[0].cost_s < 0.1, pieces[:1])
