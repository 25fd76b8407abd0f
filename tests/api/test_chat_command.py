"""`quire chat --base-url` against a real server of ours, and against servers that misbehave."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quire.api.cli import run
from quire.api.commands import _talk
from quire.errors import EngineError, RequestError
from tests.api.server.conftest import serving


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Repeats prompts."""
    with serving("smollm2", executor="echo") as server:
        yield server.url


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    waiting = iter(lines)

    def read(prompt: str = "") -> str:
        line = next(waiting, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)


def test_a_chat_with_a_server_goes_back_and_forth(server, monkeypatch, capsys):
    typed(monkeypatch, "Hello there", "And again", "/reset", "/exit")
    argv = [
        "chat",
        "--base-url",
        server,
        "--max-tokens",
        "60",
        "--temperature",
        "0",
        "--seed",
        "1",
        "--system",
        "Be brief.",
        "--ignore-eos",
    ]
    assert run(argv) == 0
    out, err = capsys.readouterr()
    assert "Talking to smol." in err
    assert "Be brief" in out and "Hello there" in out and "(forgotten)" in out


def test_the_model_is_named_by_either_way_and_the_address_with_or_without_its_version(server, monkeypatch, capsys):
    for argv in (["smol-alias", "--url", f"{server}/v1"], ["--model", "smol-alias", "--base-url", f"{server}/v1/"]):
        typed(monkeypatch, "Hello", "/bye")
        assert run(["chat", *argv, "--max-tokens", "4"]) == 0
        assert "Talking to smol-alias" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_a_sentence_and_the_chat_goes_on(server, monkeypatch, capsys):
    typed(monkeypatch, "Hello", "/exit")
    assert run(["chat", "nothing", "--base-url", server]) == 0
    assert "(the server answers 404: " in capsys.readouterr().out


def test_engine_flags_mean_nothing_to_a_server(capsys):
    assert run(["chat", "--base-url", "http://127.0.0.1:9", "--max-model-len", "99"]) == 2
    assert "there is no flag --max-model-len" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x/v1", "http://", "http://x:99999/v1", "http://x/v1?a=b"])
def test_what_is_no_address_is_told(url, capsys):
    assert run(["chat", "--base-url", url]) == 2
    assert "is no server's address" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_sentence(capsys):
    assert run(["chat", "--base-url", "http://127.0.0.1:9"]) == 5
    err = capsys.readouterr().err
    assert "no server answers at 127.0.0.1" in err and "Traceback" not in err


class Foreign:
    """A server of few words: answers every request with `body`, and remembers what it was sent."""

    def __init__(self) -> None:
        self.status, self.body, self.headers = 200, b"", {}
        self.seen: list[tuple[dict[str, str], dict]] = []
        foreign = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                foreign.seen.append((dict(self.headers), json.loads(raw or b"{}")))
                self.send_response(foreign.status)
                for name, value in foreign.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(foreign.body)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def chat(self, *argv: str) -> int:
        return run(["chat", "theirs", "--base-url", self.url, *argv])


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    foreign = Foreign()
    yield foreign
    foreign.server.shutdown()
    foreign.server.server_close()


def event(**delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_only_what_was_typed_is_sent_and_thinking_is_not_remembered(foreign, monkeypatch, capsys):
    foreign.body = event(reasoning="Hm.") + event(content="Yes") + event(content=".") + DONE
    typed(monkeypatch, "Is it?", "Really?")
    assert foreign.chat("--max-tokens", "9") == 0
    assert capsys.readouterr().out.split() == ["Yes.", "Yes."]
    (_, first), (_, second) = foreign.seen
    assert first == {
        "model": "theirs",
        "messages": [{"role": "user", "content": "Is it?"}],
        "stream": True,
        "max_tokens": 9,
    }
    assert [message["content"] for message in second["messages"]] == ["Is it?", "Yes.", "Really?"]


@pytest.mark.parametrize(
    ("argv", "variables", "key"),
    [
        ([], {}, None),
        ([], {"OPENAI_API_KEY": "open"}, "open"),
        ([], {"OPENAI_API_KEY": "open", "VLLM_API_KEY": "vllm"}, "vllm"),
        (["--api-key", "flag"], {"QUIRE_API_KEY": "quire"}, "flag"),
    ],
)
def test_the_key_comes_from_a_flag_or_the_environment(argv, variables, key, foreign, monkeypatch):
    for name in ("QUIRE_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    foreign.body = event(content="x") + DONE
    typed(monkeypatch, "Hi")
    assert foreign.chat(*argv) == 0
    assert foreign.seen[0][0].get("Authorization") == (f"Bearer {key}" if key else None)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, b'{"error": {"message": "no key"}}', "the server wants a key: give --api-key"),
        (500, b"<html>\x1b[2J</html>", "the server answers 500: <html>"),
        (302, b"", "the server answers 302"),
        (200, b"data: nonsense\n\n", "events that are not OpenAI's"),
        (200, b'data: {"choices": 7}\n\n', "events that are not OpenAI's"),
        (200, event(content="half"), "broke the answer off"),
        (200, b'data: {"error": {"message": "too hot"}}\n\n', "ends the answer: too hot"),
        (200, b"data: " + b"x" * (3 << 20), "events that are not OpenAI's"),
    ],
)
def test_a_server_that_misbehaves_is_a_sentence(status, body, says, foreign, monkeypatch, capsys):
    foreign.status, foreign.body = status, body
    foreign.headers = {"Location": "http://127.0.0.1:9/"} if status == 302 else {}
    typed(monkeypatch, "Hi")
    assert foreign.chat("--api-key", "secret") == 0
    out = capsys.readouterr().out
    assert says in out and "\x1b" not in out and len(foreign.seen) == 1


def test_an_answer_cannot_talk_to_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    printer = _talk.Printer()
    printer("a\x1b]0;title\x07b\r\x9bc\n", False, 1)
    assert capsys.readouterr().out == "a]0;titlebc\n"


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(monkeypatch, capsys):
    asked = []

    def answer(messages, show):
        asked.append(messages)
        show("half", False, 1)
        if len(asked) == 1:
            raise KeyboardInterrupt

    typed(monkeypatch, "one", "two")
    _talk.converse(answer, [])
    assert "half [stopped]" in capsys.readouterr().out
    assert [message["content"] for message in asked[1]] == ["one", "half", "two"]


@pytest.mark.parametrize("error", [RequestError("too long"), EngineError("gone")])
def test_a_turn_without_an_answer_is_forgotten(error, monkeypatch, capsys):
    asked = []

    def answer(messages, show):
        asked.append(messages)
        if len(asked) == 1:
            raise error

    typed(monkeypatch, "one", "two")
    _talk.converse(answer, [])
    assert str(error) in capsys.readouterr().out and len(asked[1]) == 1
