"""A minute of benchmarks/fuzz.py with a fixed seed, and that its judges can find what they look for.

Nothing here is an `assert`.
"""

import json
import sys
import time
from pathlib import Path

import pytest
from benchmarks import fuzz, fuzz_folders, fuzz_json
from benchmarks.fuzz_json import Answer

from tests.security.conftest import check

SECONDS = {"http": 15, "json": 20, "grammars": 15, "folders": 10}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", fuzz.ALL, ids=lambda kind: kind.name)
def test_a_while_of_hostile_cases_finds_nothing(smollm2, kind) -> None:
    report = fuzz.Report()
    fuzz.fuzz(kind, SECONDS[kind.name], 14, report)
    check(report.cases[kind.name] > 0, "no case was played")
    check(not report.findings, report.table())


def test_a_kind_of_case_is_made_the_same_way_again() -> None:
    strategy = fuzz_folders.folder_cases()
    check(fuzz.make_cases(strategy, 5) == fuzz.make_cases(strategy, 5), "a seed gives other cases the second time")
    check(fuzz.make_cases(strategy, 5) != fuzz.make_cases(strategy, 6), "two seeds give the same cases")


def test_recipes_become_the_bodies_they_stand_for() -> None:
    body = {
        "a": {"$list": [1, 3]},
        "b": {"$text": ["é", 2]},
        "c": {"$raw": "NaN"},
        "d": {"$nest": ["[", 2]},
        "e": {"$map": ["k", 1]},
        "f": {"$ids": 2},
    }
    rendered = fuzz_json.render(body).decode()
    check(rendered == '{"a":[1,1,1],"b":"\\u00e9\\u00e9","c":NaN,"d":[[0]],"e":{"k0":0},"f":[0,1]}', rendered)
    check(fuzz_json.render({"$pairs": [["a", 1], ["a", None]]}) == b'{"a":1,"a":null}', "a field twice")
    check(fuzz_json.body_of({"body": "abc", "cut": 0.5, "flips": [[0.0, 65]]}) == b"Aa", "cut and changed")


# -- answers -----------------------------------------------------------------------------------------------------------


COMPLETIONS = "/v1/completions"


def answered(status: int, content: bytes, content_type: str = "application/json", path: str = COMPLETIONS) -> str:
    return fuzz_json.judge(Answer(path, status, content_type, content, True, 0.1))


def error(message: str, kind: str = "invalid_request_error", code: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def test_a_bad_answer_is_found() -> None:
    unforeseen = error("internal error; the server's log has more", "server_error")
    check("500" in answered(500, unforeseen), "an unforeseen error")
    check("shape" in answered(500, b"Traceback (most recent call last)"), "a traceback")
    check("shape" in answered(400, b'{"error": "no"}'), "Ollama's shape on a path of OpenAI's")
    anthropic = b'{"type": "error", "error": {"type": "api_error", "message": "no"}, "request_id": "r"}'
    check("shape" in answered(400, anthropic), "Anthropic's shape on a path of OpenAI's")
    check("500" in answered(500, anthropic, path="/v1/messages"), "an unforeseen error in Anthropic's shape")
    check("too much" in answered(400, error("cannot open /home/me/model")), "a path")
    check("too much" in answered(400, error("<Thing object at 0x7f3a00112233>")), "an address")
    check("characters" in answered(400, error("9" * 5000)), "a very long message")
    check("no JSON" in answered(200, b"{"), "half an answer")
    check(
        "ended before" in fuzz_json.judge(Answer(COMPLETIONS, 0, "", b"", False, 0.1, broken=True)), "no answer at all"
    )
    stream = "text/event-stream; charset=utf-8"
    check("[DONE]" in answered(200, b'data: {"a":1}\n\n', stream), "a stream without an end")
    check("middle" in answered(200, b'data: {"a":1}\n\ndata: {', stream), "a stream that is cut off")
    check("no JSON" in answered(200, b"data: {\n\ndata: [DONE]\n\n", stream), "an event that is none")
    event = b"data: " + error("internal error", "server_error") + b"\n\n"
    check("internal" in answered(200, event, stream), "an error in a stream")


def test_a_good_answer_is_not() -> None:
    check(answered(400, error("n must be at least 1 and at most 128, not 0")) == "", "a refusal")
    named = error("the request takes the engine down", "server_error", "request_failed")
    check(answered(500, named) == "", "an error with a name")
    check(answered(400, b'{"error": "no"}', path="/api/chat") == "", "a refusal of Ollama's")
    anthropic = b'{"type": "error", "error": {"type": "invalid_request_error", "message": "no"}, "request_id": "r"}'
    check(answered(400, anthropic, path="/v1/messages") == "", "a refusal of Anthropic's")
    check(answered(200, b'{"a":1}') == "", "an answer")
    check(fuzz_json.judge(Answer(COMPLETIONS, 200, "", b"{", False, 4.0)) == "", "what the client did not wait for")
    check(answered(200, b'data: {"a":1}\n\ndata: [DONE]\n\n', "text/event-stream") == "", "a stream")


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_command_that_goes_wrong_is_found(tmp_path, monkeypatch) -> None:
    def judged(program: str) -> str:
        return fuzz_folders.judge(*fuzz_folders.run([sys.executable, "-c", program]), tmp_path)

    monkeypatch.setattr(fuzz_folders, "LIMIT_S", 3.0)
    monkeypatch.setattr(fuzz_folders, "LIMIT_BYTES", 200 << 20)
    check("not ended" in judged("import time; time.sleep(60)"), "a hang")
    check("2 GB" in judged("data = b'x' * (400 << 20); import time; time.sleep(2)"), "too much memory")
    check("traceback" in judged("1 / 0"), "a traceback")
    check("without a sentence" in judged("import sys; print('oh'); sys.exit(2)"), "an exit code alone")
    check("signal" in judged("import os; os.abort()"), "a crash")
    check(judged("import sys; print('quire: it is no model: give another'); sys.exit(2)") == "", "a sentence")
    check(judged("print('model')") == "", "an answer")


def test_the_sound_folder_is_a_model(tmp_path) -> None:
    folder = fuzz_folders.make_folder(tmp_path / "sound")
    code, said, _, _ = fuzz_folders.run([sys.executable, "-m", "quire", "info", str(folder)])
    check(code == 0 and "LlamaForCausalLM" in said, said)


# -- servers -----------------------------------------------------------------------------------------------------------

STAND_IN = """
import http.server, json, os, signal, sys, threading, time
flaw, port, kept = sys.argv[1], int(sys.argv[-1]), []
signal.signal(signal.SIGTERM, lambda *_: os._exit(3 if flaw == "exit" else 0))
PROMPT = [1000 + idx for idx in range(40)]
provoked = threading.Event()

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def answer(self, body, status=200, kind="application/json"):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        now = flaw if provoked.is_set() else ""
        if self.path == "/live" and now == "stuck": time.sleep(1.5)
        if self.path == "/ready": return self.answer(b"{}", 503 if now == "unready" else 200)
        if self.path == "/metrics":
            return self.answer(b'quire:num_requests_running{m="x"} %d\\n' % (5 if now == "left" else 1))
        if self.path == "/admin/check":
            return self.answer(b'{"problem": "%s"}' % (b"a block is lost" if now == "books" else b""))
        if self.path == "/provoke":
            provoked.set()
            if flaw == "memory": kept.append(b"x" * (200 << 20))
            if flaw == "files": kept.extend(open(os.devnull) for _ in range(100))
            if flaw == "log": print("12:00:00 E request 5 failed", file=sys.stderr, flush=True)
            if flaw == "traceback":
                print("Traceback (most recent call last):\\nValueError: no", file=sys.stderr, flush=True)
            if flaw == "dead": os._exit(1)
        self.answer(b"{}")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not body.get("stream"):
            return self.answer(b"{}", 500 if flaw == "dishonest" and provoked.is_set() else 200)
        self.send_response(200)
        self.end_headers()
        for idx in range(body["max_tokens"]):
            now = flaw if provoked.is_set() else ""
            if now == "broken": return
            if now == "late" and idx == 30: time.sleep(1.5)
            token = 7 if now == "wrong" and idx > 5 else PROMPT[idx % 40]
            self.wfile.write(b"data: " + json.dumps({"choices": [{"token_ids": [token]}]}).encode() + b"\\n\\n")
            time.sleep(0.01)
        self.wfile.write(b"data: [DONE]\\n\\n")

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

FLAWS = {
    "stuck": "/live took",
    "unready": "/ready answers 503",
    "dishonest": "/ready says yes",
    "books": "a block is lost",
    "left": "requests nobody waits for",
    "memory": "memory of the api process grew",
    "files": "files of the api process grew",
    "log": "request 5 failed",
    "traceback": "ValueError: no",
    "broken": "without [DONE]",
    "late": "token was late",
    "wrong": "other tokens",
    "dead": "exit code 1",
    "exit": "exit status is 3",
    "": "",
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_server_that_goes_wrong_is_found(tmp_path, flaw) -> None:
    program = tmp_path / "server.py"
    program.write_text(STAND_IN)
    limits = fuzz.Limits(late_s=1.0, first_s=3.0, back_s=0.5)
    expected = [fuzz.PROMPT[idx % len(fuzz.PROMPT)] for idx in range(60)]
    with fuzz.Target([sys.executable, str(program), flaw], limits, 60, expected) as target:
        target.settle()
        check(target.trouble() == [], "it was sound before")
        if flaw == "dead":
            with pytest.raises(OSError):
                fuzz.ask(target.port, "GET", "/provoke")
        else:
            fuzz.ask(target.port, "GET", "/provoke")
        found = told(target)
        if not flaw or flaw == "exit":
            found += target.end()
    if flaw:
        check(any(FLAWS[flaw] in what for what in found), found)
    else:
        check(not found, found)


def told(target: fuzz.Target) -> list[str]:
    """What the judge says until it has something to say, or a few streams went by."""
    deadline = time.monotonic() + 10.0
    last_stream = target.bystander.num_streams + 5
    while time.monotonic() < deadline and target.bystander.num_streams < last_stream:
        if found := target.trouble():
            return found
        time.sleep(0.1)
    return []


def test_findings_of_one_cause_are_told_once(capsys) -> None:
    report = fuzz.Report()
    check(report.add("json", "a bystander's token was late by 2.1 s", [{"a": 1}]), "the first is new")
    check(not report.add("json", "a bystander's token was late by 3.7 s", [{"a": 2}]), "the second is not")
    line = json.loads(capsys.readouterr().out)
    check(line["cases"] == ["{'a': 1}"] and "2 × json" in report.table(), report.table())


def test_a_finding_can_be_played_again(tmp_path, monkeypatch, capsys) -> None:
    seen: list[object] = []
    kind = fuzz.Kind("json", fuzz.sound_folder, lambda _: None, lambda _, case: seen.append(case) or "wrong", 1)
    monkeypatch.setattr(fuzz, "ALL", [kind])
    path = Path(tmp_path / "findings.jsonl")
    path.write_text(json.dumps({"kind": "json", "what": "wrong", "cases": [repr({"body": b"\0", "at": 1.5})]}) + "\n")
    report = fuzz.Report()
    fuzz.replay(path, report)
    check(seen == [{"body": b"\0", "at": 1.5}], seen)
    check(len(report.findings) == 1, report.findings)
