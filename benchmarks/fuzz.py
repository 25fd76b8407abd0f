"""Hostile clients and hostile files: raw HTTP, JSON, grammars and model folders, and a judge after each batch of them.

    python benchmarks/fuzz.py --seconds 3600 [--seed N] [--only http,json,grammars,folders] [--json] [--replay FILE]

Cases come from hypothesis with a fixed seed, so a run can be repeated. Those for a server are played in small
batches; after each batch the server must be as it was: it answers, /ready is honest, /admin/check has no complaint,
nothing unforeseen is in the log, no request is left, memory and file descriptors are back, the engine is the same
process, and a bystander's stream has the right tokens and none of them late. On a finding the cases of the batch are
played again one by one, each on a fresh server. Exit status 1 if anything was found; a finding is a line of JSON on
standard output, and `--replay` plays the cases of such lines again.
"""

import argparse
import ast
import contextlib
import dataclasses
import http.client
import json
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis.strategies import SearchStrategy  # noqa: E402

from benchmarks import fuzz_folders, fuzz_grammars, fuzz_http, fuzz_json  # noqa: E402
from benchmarks.server_process import QUIRE, ServerProcess, memory_bytes, num_files  # noqa: E402

KINDS = ["http", "json", "grammars", "folders"]
SLICE_S = 150.0  # of one kind, with a server of its own
AT_ONCE = 4
KEY = "k1"  # also written in the raw HTTP cases
ADMIN_KEY = "fuzz-admin-key"
WATCHER = ("127.0.0.2", 0)  # the watchers' address: the attackers use up the limits of theirs

LATE_S = 2.0  # how late the bystander's next token may be, beyond its pace, and how long /live may take
FIRST_S = 15.0  # how long the bystander's first token may take: it may have to wait in line
BACK_S = 10.0  # how long requests, memory and file descriptors may take to come back
# How much more there may be than at the start.
MORE_BYTES = {"api": 150 << 20, "core": 150 << 20}
MORE_FILES = 32

ECHO = "--executor echo:50 --max-model-len 4096 --num-gpu-blocks-override 16384".split()  # few blocks are soon checked
REAL = ["smollm2", *"--dtype float32 --max-model-len 512 --max-num-seqs 8 --kv-cache-memory-bytes 64M".split()]
REAL += ["--num-threads", "1"]
SHAPES = [
    {"guided_json": {"type": "object"}},
    {"guided_grammar": 'root ::= "x"'},
    {"guided_grammar": 'start: "x"'},
    {"guided_regex": "x"},
]
GRAMMAR_CACHE = 512 << 20  # what the engine may keep of compiled grammars

UNFORESEEN = re.compile(r"^(?:Traceback .*|\d\d:\d\d:\d\d [EC] .*|Fatal Python error.*|Segmentation fault.*)$", re.M)


@dataclass
class Limits:
    """How patient the judge is."""

    late_s: float = LATE_S
    first_s: float = FIRST_S
    back_s: float = BACK_S
    more_bytes: dict[str, int] = field(default_factory=lambda: dict(MORE_BYTES))


# -- watching ----------------------------------------------------------------------------------------------------------


class Watcher(ABC):
    """A thread that does something over and over and writes down what was wrong."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.ending.set()
        self.thread.join(30)

    def take_findings(self) -> list[str]:
        """What was wrong since the last call."""
        found, self.wrong = self.wrong, []
        return found

    def _run(self) -> None:
        while not self.ending.is_set():
            self.turn()

    @abstractmethod
    def turn(self) -> None:
        """Looks once."""


class Metronome(Watcher):
    """Measures how late this process itself is, which is not the server's fault."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[float, float]] = []  # when, by how much

    def turn(self) -> None:
        before = time.monotonic()
        time.sleep(0.02)
        now = time.monotonic()
        if (late := now - before - 0.02) > 0.05:
            self.late = [*self.late[-200:], (now, late)]

    def between(self, start: float, end: float) -> float:
        return sum(late for when, late in self.late if start <= when <= end + 0.1)


class Prober(Watcher):
    """Asks /live all the time."""

    def __init__(self, port: int, limits: Limits, metronome: Metronome) -> None:
        super().__init__()
        self.port = port
        self.limits = limits
        self.metronome = metronome

    def turn(self) -> None:
        started = time.monotonic()
        try:
            status, _ = ask(self.port, "GET", "/live", timeout_s=4 * self.limits.late_s)
            problem = "" if status == 200 else f"/live answers {status}"
        except OSError as error:
            problem = f"/live does not answer: {type(error).__name__}"
        seconds = time.monotonic() - started
        if seconds - self.metronome.between(started, started + seconds) > self.limits.late_s:
            problem = problem or f"/live took {seconds:.1f} s"
        if problem and not self.ending.is_set():
            self.wrong.append(problem)
        self.ending.wait(0.2)


class Bystander(Watcher):
    """One long stream after the other, with nothing odd about it."""

    def __init__(
        self, port: int, limits: Limits, metronome: Metronome, num_tokens: int, expected: list[int] | None
    ) -> None:
        super().__init__()
        self.port = port
        self.limits = limits
        self.metronome = metronome
        self.body = {
            "prompt": PROMPT,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        self.expected = expected  # None: what the first stream gives
        self.num_streams = 0
        self.running = False

    def turn(self) -> None:
        tokens: list[int] = []
        started = last = time.monotonic()
        pace_s = 0.0
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=self.limits.first_s, source_address=WATCHER
        )
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        try:
            self.running = True
            connection.request("POST", "/v1/completions", json.dumps(self.body), headers)
            response = connection.getresponse()
            if response.status == 503:  # the line is full, as it may be
                self.ending.wait(0.2)
                return
            if response.status != 200:
                self._tell(f"a bystander's request was answered {response.status}: {response.read(300)!r}")
                return
            while (line := response.readline()) and not self.ending.is_set():
                if not line.startswith(b"data: {"):
                    if line.startswith(b"data: [DONE]"):
                        break
                    continue
                now = time.monotonic()
                allowed = self.limits.first_s if not tokens else pace_s + self.limits.late_s
                if now - last - self.metronome.between(last, now) > allowed:
                    self._tell(f"a bystander's {'token' if tokens else 'first token'} was late by {now - last:.1f} s")
                event = json.loads(line[6:])
                if "error" in event:
                    self._tell(f"a bystander's stream broke: {event['error']['message']}")
                    return
                tokens += event["choices"][0].get("token_ids", []) if event["choices"] else []
                last = now
                pace_s = (last - started) / len(tokens) if tokens else 0.0
            else:
                if not self.ending.is_set():
                    self._tell("a bystander's stream ended without [DONE]")
                return
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self._tell(f"a bystander's stream broke: {type(error).__name__}")
            self.ending.wait(0.2)
            return
        finally:
            self.running = False
            connection.close()
        self.num_streams += 1
        self.expected = self.expected or tokens
        if tokens != self.expected:
            self._tell("a bystander's stream has other tokens than before")

    def _tell(self, problem: str) -> None:
        if not self.ending.is_set():
            self.wrong.append(problem)


PROMPT = [1000 + idx for idx in range(40)]


def ask(
    port: int, method: str, path: str, body: Any = None, key: str = ADMIN_KEY, timeout_s: float = 10.0
) -> tuple[int, bytes]:
    """One request of somebody who means no harm; OSError when there is no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s, source_address=WATCHER)
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except http.client.HTTPException as error:
        raise ConnectionError(str(error)) from None
    finally:
        connection.close()


class Target:
    """A server under attack and those who watch it: `with Target(command) as target: …; target.trouble()`."""

    def __init__(
        self, command: list[str], limits: Limits, num_tokens: int = 400, expected: list[int] | None = None
    ) -> None:
        self.limits = limits
        self.server = ServerProcess([*command, "--api-key", KEY, "--admin-api-key", ADMIN_KEY], "/ready")
        self.metronome = Metronome()
        self.prober = Prober(self.server.port, limits, self.metronome)
        self.bystander = Bystander(self.server.port, limits, self.metronome, num_tokens, expected)
        self.watchers = [self.metronome, self.prober, self.bystander]
        self.log_read = 0

    def __enter__(self) -> "Target":
        self.server.__enter__()
        self.core_pid = self._core()
        for watcher in self.watchers:
            watcher.start()
        self.usual: dict[str, float] = {}
        return self

    def __exit__(self, *exception: object) -> None:
        for watcher in self.watchers:
            watcher.ending.set()
        self.server.__exit__()
        for watcher in self.watchers:
            watcher.stop()

    @property
    def port(self) -> int:
        return self.server.port

    def _core(self) -> int | None:
        try:
            return self.server.core_pid
        except ValueError:  # none, or two that take turns
            return None

    def settle(self) -> None:
        """From here on memory and file descriptors may grow by so much and no more."""
        for shape in SHAPES:  # the first answer of a shape loads what makes them
            with contextlib.suppress(OSError):
                ask(self.port, "POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 1, **shape}, KEY, 30.0)
        self._come_back(self._left)
        self.usual = self._size()

    def trouble(self) -> list[str]:
        """All that is wrong now or was since the last call."""
        found = [*self.prober.take_findings(), *self.bystander.take_findings()]
        found += self._honest()
        if left := self._come_back(self._left):
            found.append(left)
        if self.core_pid is not None and self._core() != self.core_pid:
            found.append("the engine is another process than before")
        if self.usual and (grown := self._come_back(self._grown)):
            found.append(grown)
        if self.server.process.poll() is not None:  # all else follows from it
            found = [f"the server ended with exit code {self.server.process.returncode}"]
        return [*found, *self._logged(), *self.prober.take_findings(), *self.bystander.take_findings()]

    def _honest(self) -> list[str]:
        """What is wrong with /ready, which must say whether requests are answered, and with the engine's books."""
        found = []
        try:
            ready, said = ask(self.port, "GET", "/ready")
            body = {"prompt": PROMPT[:4], "max_tokens": 2, "ignore_eos": True}
            status, content = ask(self.port, "POST", "/v1/completions", body, KEY, self.limits.first_s)
            if ready != 200:
                found.append(f"/ready answers {ready}: {said[:200]!r}")
            elif status != 200:
                found.append(f"/ready says yes and a completion is answered {status}: {content[:200]!r}")
            status, content = ask(self.port, "GET", "/admin/check", timeout_s=self.limits.first_s)
            if status != 200 or json.loads(content).get("problem") != "":
                found.append(f"/admin/check: {content[:300]!r}")
        except (OSError, ValueError) as error:
            found.append(f"a plain request was not answered: {type(error).__name__}")
        return found

    def _left(self) -> str:
        """Requests nobody waits for."""
        try:
            text = ask(self.port, "GET", "/metrics")[1].decode()
        except OSError as error:
            return f"/metrics does not answer: {type(error).__name__}"
        counts = re.findall(r"^quire:num_requests_(?:running|waiting){.*} (\S+)$", text, re.M)
        num_left = sum(map(float, counts)) - 1  # one is the bystander's
        return f"{num_left:g} requests nobody waits for are still there" if num_left > 0 else ""

    def _size(self) -> dict[str, float]:
        core = self._core() or self.server.pid
        return {
            "memory of the api process": memory_bytes(self.server.pid),
            "memory of the core": memory_bytes(core),
            "files of the api process": num_files(self.server.pid),
            "files of the core": num_files(core),
        }

    def _grown(self) -> str:
        try:
            now = self._size()
        except (OSError, KeyError):  # a process that ended has no files, one nobody waited for no memory
            return ""
        for name, value in now.items():
            grown = value - self.usual[name]
            if "memory" in name:
                allowed = self.limits.more_bytes["core" if "core" in name else "api"]
                shown = f"{grown / 2**20:.0f} MB"
            else:
                allowed = MORE_FILES
                shown = f"{grown:.0f}"
            if grown > allowed:
                return f"{name} grew by {shown}"
        return ""

    def _come_back(self, problem: Callable[[], Any]) -> Any:
        """What is still wrong after a while."""
        deadline = time.monotonic() + self.limits.back_s
        while (found := problem()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _logged(self) -> list[str]:
        text = Path(self.server.log.name).read_text(errors="replace")
        new, self.log_read = text[self.log_read :], len(text)
        found = UNFORESEEN.findall(new)
        if any(line.startswith("Traceback") for line in found):
            ends = [line for line in new.splitlines() if re.match(r"\w[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
            found = [line for line in found if not line.startswith("Traceback")]
            found.append(f"a traceback in the log: {' / '.join(ends[-2:]) or 'of unknown end'}")
        return [f"the log: {line[:300]}" for line in found]

    def end(self) -> list[str]:
        """Stops it as an operator would."""
        for watcher in (self.bystander, self.prober):
            watcher.stop()
        status = self.server.stop(40)
        found = [] if status == 0 else [f"the server's exit status is {status} when it is told to stop"]
        return found + self._logged() + self.server.leftovers()


# -- cases -------------------------------------------------------------------------------------------------------------


def make_cases(strategy: SearchStrategy, number: int, count: int = 8) -> list[Any]:
    """So many cases; the same for the same number."""
    found: list[Any] = []
    wanted = count + 1  # hypothesis begins with the simplest of all, every time

    @seed(number)
    @settings(
        max_examples=wanted,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case: Any) -> None:
        found.append(case)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collect()
    return found[1:wanted] or found


@dataclass
class Kind:
    """One kind of case: how it is made, played and what was wrong with the answer (empty: nothing)."""

    name: str
    start: Callable[[Limits], contextlib.AbstractContextManager]  # the server, or a sound model folder
    strategy: Callable[[Any], SearchStrategy]
    play: Callable[[Any, Any], str]
    batch: int  # cases between two looks at the server


def echo_server(limits: Limits) -> Target:
    cycle = [PROMPT[idx % len(PROMPT)] for idx in range(400)]
    return Target([*QUIRE, *ECHO], limits, 400, cycle)


def real_server(limits: Limits) -> Target:
    more_bytes = limits.more_bytes | {"core": limits.more_bytes["core"] + GRAMMAR_CACHE}
    return Target([*QUIRE, *REAL], dataclasses.replace(limits, more_bytes=more_bytes), 100)


@contextlib.contextmanager
def sound_folder(limits: Limits) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as parent:
        yield fuzz_folders.make_folder(Path(parent) / "sound")


def document(target: Target) -> dict[str, Any]:
    return json.loads(ask(target.port, "GET", "/openapi.json")[1])


def play_http(target: Target, case: Any) -> str:
    return fuzz_http.check_answers(fuzz_http.play(("127.0.0.1", target.port), case, 3.0))


def play_json(target: Target, case: Any) -> str:
    return fuzz_json.judge(fuzz_json.play(target.port, KEY, case))


def play_grammar(target: Target, case: Any) -> str:
    answer = fuzz_json.play(target.port, KEY, case, 40.0)
    if not answer.complete:
        return f"a grammar was not answered within {answer.seconds:.0f} s"
    return fuzz_json.judge(answer)


def play_folder(folder: Path, case: Any) -> str:
    return fuzz_folders.play(case, folder)


ALL = [
    Kind("http", echo_server, lambda target: fuzz_http.raw_cases(), play_http, 32),
    Kind("json", echo_server, lambda target: fuzz_json.json_cases(document(target)), play_json, 16),
    Kind("grammars", real_server, lambda target: fuzz_grammars.grammar_cases(), play_grammar, 8),
    Kind("folders", sound_folder, lambda folder: fuzz_folders.folder_cases(), play_folder, 2),
]


# -- running -----------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    cases: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    # (kind, what was wrong without numbers) -> the first of them
    findings: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def add(self, kind: str, what: str, cases: list[Any]) -> bool:
        """Whether this is new."""
        key = kind, plain(what)
        if key in self.findings:
            self.findings[key]["times"] += 1
            return False
        self.findings[key] = {"kind": kind, "what": what, "times": 1, "cases": [repr(case) for case in cases]}
        print(json.dumps(self.findings[key]), flush=True)
        return True

    def table(self) -> str:
        lines = [f"{'kind':<10} {'cases':>7} {'seconds':>8} {'findings':>9}"]
        for kind in self.cases:
            found = sum(1 for name, _ in self.findings if name == kind)
            lines.append(f"{kind:<10} {self.cases[kind]:>7} {self.seconds[kind]:>8.0f} {found:>9}")
        for finding in self.findings.values():
            lines.append(f"{finding['times']} × {finding['kind']}: {finding['what']}")
        return "\n".join(lines)


def plain(what: str) -> str:
    """What findings of the same cause have in common."""
    return re.sub(r"[0-9a-f]{16,}|\d+(\.\d+)?|'[^']*'", "#", what)[:200]


def fuzz(kind: Kind, seconds: float, number: int, report: Report, limits: Limits | None = None) -> None:
    """Cases of one kind for so many seconds, counted from when the server is up."""
    limits = limits or Limits()
    while seconds > 0:
        with kind.start(limits) as target:
            seconds, number = _fuzz(kind, target, seconds, number, report)


def _fuzz(kind: Kind, target: Any, seconds: float, number: int, report: Report) -> tuple[float, int]:
    """Until the time is up or a finding asks for a fresh server; (seconds left, number of the next batch)."""
    started = time.monotonic()
    strategy = kind.strategy(target)
    watched = isinstance(target, Target)
    used = 0.0
    while used < seconds:
        number += 1
        cases = make_cases(strategy, number, kind.batch)
        wrong = play_batch(kind, target, cases)
        report.cases[kind.name] += len(cases)
        for case, what in zip(cases, wrong):
            if what:
                report.add(kind.name, what, [case])
        if watched and not target.usual:
            target.settle()  # after the first requests, whose growth stays
        if watched and (trouble := target.trouble()):
            report_all(kind, target, report, cases, trouble)
            break
        used = time.monotonic() - started
    else:
        if watched:
            report_all(kind, target, report, [], target.end())
    used = time.monotonic() - started
    report.seconds[kind.name] += used
    return seconds - used, number


def play_batch(kind: Kind, target: Any, cases: list[Any]) -> list[str]:
    threads = ThreadPoolExecutor(AT_ONCE if isinstance(target, Target) else 2)
    try:
        return list(threads.map(lambda case: play_one(kind, target, case), cases))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # when interrupted, nobody waits for the rest


def play_one(kind: Kind, target: Any, case: Any) -> str:
    try:
        return kind.play(target, case)
    except OSError:
        return ""  # no connection: whether others get one is seen by those who watch


def report_all(kind: Kind, target: Target, report: Report, cases: list[Any], trouble: list[str]) -> None:
    known = [what for what in trouble if (kind.name, plain(what)) in report.findings]
    new = [what for what in trouble if what not in known]
    for what in known:
        report.add(kind.name, what, [])
    guilty = find_guilty(kind, cases, {plain(what) for what in new}) if new and len(cases) > 1 else cases
    for what in new:
        report.add(kind.name, what, guilty)


def find_guilty(kind: Kind, cases: list[Any], wanted: set[str]) -> list[Any]:
    """The first case that alone does what the batch did; all of them when none does."""
    for case in cases:
        with kind.start(Limits(back_s=3.0)) as target:
            target.settle()
            play_one(kind, target, case)
            if wanted & {plain(what) for what in target.trouble()}:
                return [case]
    return cases


def replay(path: Path, report: Report) -> None:
    """Plays the cases of findings again, each finding on a fresh server."""
    kinds = {kind.name: kind for kind in ALL}
    for line in path.read_text().splitlines():
        finding = json.loads(line)
        kind = kinds[finding["kind"]]
        cases = [ast.literal_eval(case) for case in finding["cases"]]
        with kind.start(Limits()) as target:
            if isinstance(target, Target):
                target.settle()
            for case, what in zip(cases, play_batch(kind, target, cases)):
                report.cases[kind.name] += 1
                if what:
                    report.add(kind.name, what, [case])
            if isinstance(target, Target):
                for what in target.trouble():
                    report.add(kind.name, what, cases)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of cases, with commas between")
    parser.add_argument("--json", action="store_true", help="the whole report as JSON at the end, instead of a table")
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="play the cases of findings again: lines this program printed"
    )
    args = parser.parse_args()
    report = Report()
    kinds = [kind for kind in ALL if kind.name in args.only.split(",")]
    num_rounds = max(1, round(args.seconds / SLICE_S / len(kinds)))
    try:
        if args.replay:
            replay(args.replay, report)
        for round_idx in range(0 if args.replay else num_rounds):
            for kind in kinds:
                fuzz(kind, args.seconds / num_rounds / len(kinds), args.seed * 10**9 + round_idx * 10**6, report)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    except Exception:  # the fuzzer's own fault: what it found so far is told all the same
        traceback.print_exc()
        report.add("fuzzer", "it failed itself: see above", [])
    if args.json:
        findings = list(report.findings.values())
        print(json.dumps({"cases": report.cases, "seconds": report.seconds, "findings": findings}))
    else:
        print(report.table(), file=sys.stderr)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
