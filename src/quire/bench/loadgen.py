"""Load on a server that speaks OpenAI's protocol or Anthropic's, and what its clients see: streams, times, errors.

Called by `quire bench serve` and the serving benchmarks; `python -m quire.bench.loadgen` is one of its client
processes, which gets a Load on standard input and answers with Reports on standard output, as lines of JSON. Knows
nothing of Quire's insides.
"""

import asyncio
import contextlib
import random
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from quire.bench.http_client import Failure, HttpClient, HttpReply, MessageReply, StreamedReply
from quire.bench.summary import summary
from quire.errors import ConfigError, QuireError

MODULE = "quire.bench.loadgen"
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "messages": "/v1/messages"}
PROGRESS_S = 0.2

# Common enough to be one token each in almost every vocabulary; `measured_words` makes sure.
WORDS = tuple(
    """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
    you were all her she there would their we him been has when who will no more if out so up said what its about than
    into them can only other time new some could these two may first then do any like my now over such our man me even
    most made after also did many off before must well back through years much where your way down should because long
    each just state those people too how little world good still see men work life day get here old between both under
    three never know same last another while might great year since against go came right used take states himself few
    house use place during high without again home around small however found part school general once upon say every
    fact number until always away water hand head money night room side point almost enough course second city given
    early white local least light become better large power case public group order system music story market door
    young field paper table river north south east west king law book cost food game
""".split()
)


class Load(msgspec.Struct, frozen=True):
    """What to send, and how fast."""

    base_url: str
    model: str
    num_prompts: int
    input_len: int  # tokens where the server tokenizes for us, else words
    output_len: int
    concurrency: int | None = None  # requests in flight at most
    request_rate: float | None = None  # Poisson arrivals per second; None: each client waits for its answer first
    endpoint: Literal["chat", "completions", "messages"] = "completions"
    api_key: str | None = None
    ignore_eos: bool = False
    seed: int = 0
    timeout_s: float = 600.0
    words: tuple[str, ...] = WORDS
    num_words: int = 0  # per prompt
    first: int = 0  # of `num_prompts` this process sends those numbered first, first + stride, …
    stride: int = 1

    def body(self, idx: int, **changes: Any) -> bytes:
        """Request number `idx`: the same whichever process sends it."""
        text = prompt_text(self.words, self.num_words, random.Random(f"{self.seed} {idx}"))
        options: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.output_len,
            "temperature": 0,
            "stream": True,
        }
        if self.endpoint != "messages":  # Anthropic's protocol has no such fields
            options["stream_options"] = {"include_usage": True}
            if self.ignore_eos:
                options["ignore_eos"] = True
        return msgspec.json.encode(self.prompt(text) | options | changes)

    def prompt(self, text: str) -> dict[str, Any]:
        """The fields of a request's body that hold its text."""
        if self.endpoint != "completions":
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}

    def reply(self) -> StreamedReply:
        return MessageReply() if self.endpoint == "messages" else StreamedReply()


class Shot(msgspec.Struct, array_like=True):
    """What one request's client saw. Times are `time.monotonic()`, which all processes of a machine share."""

    sent_s: float  # when it was due, even if the client sent it later
    end_s: float
    first_s: float | None = None  # first text
    last_s: float | None = None
    num_events: int = 0  # that carried text
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    gaps_us: list[int] = []  # between events
    error: str | None = None  # its kind


class Report(msgspec.Struct):
    """From a client process to its parent."""

    ready: bool = False
    num_done: int = 0
    shots: list[Shot] | None = None  # at the end
    cpu_s: float = 0.0
    wall_s: float = 0.0


# ---------------------------------------------------------------- prompts


def prompt_text(words: Sequence[str], num_words: int, rng: random.Random) -> str:
    return " ".join(rng.choices(words, k=num_words))


async def measured_words(client: HttpClient, load: Load) -> Load:
    """The load with words of one token each, as many as make `input_len`; unchanged where the server cannot count."""

    async def count_tokens(text: str) -> int | None:
        body = msgspec.json.encode({"model": load.model} | load.prompt(text))
        reply = await client.post("/tokenize", body, HttpReply())
        return msgspec.json.decode(reply.content).get("count") if reply.status == 200 else None

    async def one_token_words(words: Sequence[str]) -> Sequence[str]:
        """Those of one token: all when their tokens add up, else those of each half."""
        if await count_tokens(" ".join(words)) == num_around + len(words):
            return words
        middle = len(words) // 2
        if not middle:
            return []
        return [*await one_token_words(words[:middle]), *await one_token_words(words[middle:])]

    words: Sequence[str] = []
    num_around = 0  # tokens of the template and the start of a text
    with contextlib.suppress(Failure, msgspec.DecodeError, TypeError, AttributeError):
        count = await count_tokens(WORDS[0])
        if count is not None:
            num_around = count - 1
            words = await one_token_words(WORDS)
    if len(words) < 2:
        return msgspec.structs.replace(load, num_words=load.input_len)
    if num_around >= load.input_len:
        raise ConfigError(f"the chat template alone has {num_around} tokens: raise --input-len above that")
    return msgspec.structs.replace(load, words=tuple(words), num_words=load.input_len - num_around)


# ---------------------------------------------------------------- one client process


async def shoot(client: HttpClient, load: Load, idx: int, due_s: float) -> Shot:
    """Sends request `idx` and watches its answer."""
    answer = load.reply()
    error: str | None = None
    try:
        async with asyncio.timeout(load.timeout_s):
            await client.post(PATHS[load.endpoint], load.body(idx), answer)
        answer.check()
        if load.ignore_eos and answer.usage.completion_tokens not in (0, load.output_len):
            raise Failure("wrong length")
    except TimeoutError:
        error = "timeout"
    except Failure as failure:
        error = failure.kind
    times_s = answer.times_s
    return Shot(
        sent_s=due_s,
        end_s=time.monotonic(),
        first_s=times_s[0] if times_s else None,
        last_s=times_s[-1] if times_s else None,
        num_events=len(times_s),
        num_input_tokens=answer.usage.prompt_tokens,
        num_output_tokens=answer.usage.completion_tokens or len(times_s),
        gaps_us=[round((later - earlier) * 1e6) for earlier, later in zip(times_s, times_s[1:])],
        error=error,
    )


async def closed_loop(client: HttpClient, load: Load, shots: list[Shot]) -> None:
    """Every client sends its next request when its last one is answered."""
    numbers = iter(range(load.first, load.num_prompts, load.stride))

    async def one_client() -> None:
        for idx in numbers:
            shots.append(await shoot(client, load, idx, time.monotonic()))

    await asyncio.gather(*(one_client() for _ in range(load.concurrency or 1)))


async def poisson_arrivals(client: HttpClient, load: Load, requests_per_s: float, shots: list[Shot]) -> None:
    """Requests arrive at random times, however busy the server is. Those over `concurrency` wait, which counts as
    part of their time."""
    rng = random.Random(f"{load.seed} arrivals {load.first}")
    due_s = time.monotonic()
    slots = asyncio.Semaphore(load.concurrency) if load.concurrency else contextlib.nullcontext()

    async def one_request(idx: int, due_s: float) -> None:
        async with slots:
            shots.append(await shoot(client, load, idx, due_s))

    async with asyncio.TaskGroup() as tasks:
        for idx in range(load.first, load.num_prompts, load.stride):
            due_s += rng.expovariate(requests_per_s)
            await asyncio.sleep(due_s - time.monotonic())
            tasks.create_task(one_request(idx, due_s))


async def client_process() -> None:
    load = msgspec.json.decode(sys.stdin.buffer.readline(), type=Load)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a connection per stream
    _send_report(Report(ready=True))
    if not sys.stdin.buffer.readline():  # "go" when all processes are up; nothing when the parent is gone
        return
    shots: list[Shot] = []
    started_s = time.monotonic()
    started_cpu_s = time.process_time()
    async with HttpClient(load.base_url, load.api_key) as client:
        if load.request_rate is None:
            work = asyncio.ensure_future(closed_loop(client, load, shots))
        else:
            work = asyncio.ensure_future(poisson_arrivals(client, load, load.request_rate / load.stride, shots))
        while not work.done():
            await asyncio.wait([work], timeout=PROGRESS_S)
            _send_report(Report(num_done=len(shots)))
        work.result()
    cpu_s = time.process_time() - started_cpu_s
    wall_s = time.monotonic() - started_s
    _send_report(Report(num_done=len(shots), shots=shots, cpu_s=cpu_s, wall_s=wall_s))


def _send_report(report: Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


# ---------------------------------------------------------------- the parent


async def measure(
    load: Load, num_processes: int = 1, progress: Callable[[int], None] = lambda num_done: None
) -> dict[str, Any]:
    """Runs a load from `num_processes` client processes and returns its figures (`summary`).

    An empty model name becomes the first that the server lists. `progress` is called with the number of requests that
    are done: first with 0, right before the first request is sent.
    """
    async with HttpClient(load.base_url, load.api_key) as client:
        try:
            load = await prepared(client, load)
        except Failure as failure:
            raise ConfigError(f"the server at {load.base_url} cannot be measured: {failure}") from failure
    num_processes = max(1, min(num_processes, load.num_prompts, load.concurrency or load.num_prompts))
    async with contextlib.AsyncExitStack() as stack:
        parts = _parts(load, num_processes)
        processes = [await stack.enter_async_context(_client_process(part)) for part in parts]
        for process in processes:
            await process.read_report()  # ready
        progress(0)
        for process in processes:
            process.stdin.write(b"go\n")
        num_done = [0] * num_processes
        reports = await asyncio.gather(
            *(_follow(process, idx, num_done, progress) for idx, process in enumerate(processes))
        )
    return summary(load, reports)


async def prepared(client: HttpClient, load: Load) -> Load:
    """The load with a model's name and measured words; Failure when the server does not take such a request."""
    if not load.model:
        reply = await client.get("/v1/models")
        if reply.status != 200:
            raise Failure(f"http {reply.status}", reply.message())
        load = msgspec.structs.replace(load, model=msgspec.json.decode(reply.content)["data"][0]["id"])
    load = await measured_words(client, load)
    trial = load.reply()
    await client.post(PATHS[load.endpoint], load.body(-1, max_tokens=1), trial)
    trial.check()
    return load


def _parts(load: Load, num_processes: int) -> list[Load]:
    """The load of each process: every n-th request, and its share of the clients."""
    parts = []
    for idx in range(num_processes):
        share = load.concurrency
        if share is not None:
            share = share // num_processes + (idx < share % num_processes)
        parts.append(msgspec.structs.replace(load, first=idx, stride=num_processes, concurrency=share))
    return parts


class _ClientProcess(NamedTuple):
    process: asyncio.subprocess.Process
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    async def read_report(self) -> Report:
        line = await self.stdout.readline()
        if not line:
            raise QuireError("a client process of the load generator ended early: see its messages above")
        return msgspec.json.decode(line, type=Report)


@contextlib.asynccontextmanager
async def _client_process(load: Load) -> AsyncIterator[_ClientProcess]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", MODULE, stdin=pipe, stdout=pipe, limit=1 << 30)
    try:
        if process.stdin is None or process.stdout is None:
            raise QuireError("a client process of the load generator has no pipes")
        process.stdin.write(msgspec.json.encode(load) + b"\n")
        yield _ClientProcess(process, process.stdin, process.stdout)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _follow(process: _ClientProcess, idx: int, num_done: list[int], progress: Callable[[int], None]) -> Report:
    """Reads the reports of process `idx` and returns the last; `num_done` holds the count of every process."""
    while True:
        report = await process.read_report()
        num_done[idx] = report.num_done
        progress(sum(num_done))
        if report.shots is not None:
            await process.process.wait()
            return report


# ---------------------------------------------------------------- figures


if __name__ == "__main__":
    import uvloop

    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        uvloop.run(client_process())
