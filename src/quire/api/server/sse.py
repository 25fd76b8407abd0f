"""Answers as server-sent events: the hot path, run once per token and stream.

`Events` is how a protocol writes a stream, `ChoiceEvents` how OpenAI does: used by `chat.py` and `completions.py`,
which say how a choice is written. An event is made of bytes that are encoded once per request and the JSON of the new
text: nothing is encoded per token that could be encoded before.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from quire.api.server.calls import AbortOnDisconnect, Answer, Call, Receive, Send, send_body
from quire.api.server.errors import problem
from quire.api.server.generation import usage
from quire.frontend.async_llm import Stream
from quire.frontend.requests import ChoiceUpdate
from quire.utils.loop_share import LoopShare

PART_TOKENS = 32  # with logprobs, encoded in one event

# (fields of the choice, fields beside the choices) of the first event of a choice; None: it has none of its own.
Opening = tuple[dict[str, Any], dict[str, Any]] | None

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies: pass each event on at once
]
DONE = b"data: [DONE]\n\n"

to_json = msgspec.json.Encoder().encode


class Events(ABC):
    """Updates of all choices as the bytes of a protocol."""

    headers = HEADERS  # of the answer
    in_parts = False  # an update with many tokens takes long to encode: it is cut up, and others run in between

    def __init__(self, streams: Sequence[Stream], n: int) -> None:
        self.streams = streams
        self.n = n

    @abstractmethod
    def encode(self, updates: list[ChoiceUpdate]) -> bytes:
        """Called once per step and request: what this costs, every token costs."""

    @abstractmethod
    def end(self) -> bytes:
        """The last bytes."""

    @abstractmethod
    def failed(self, error: bytes) -> bytes:
        """The last bytes of a stream that broke. `error`: the JSON of it, as the endpoint writes errors."""

    @property
    def is_slow(self) -> bool:
        """Whether the next updates take so long to encode that a thread must do it."""
        return False


@dataclass(frozen=True, slots=True)
class EventFormat:
    """How chat and completions write events, each in its own way."""

    head: dict[str, Any]  # id, object, created, model, system_fingerprint
    before_text: bytes  # of a choice, from its index to its text
    after_text: bytes
    opening: Callable[[int], Opening]  # by the index of the choice
    can_open: Callable[[int], bool] = lambda idx: True  # whether everything in the first event of a choice is known
    slow_opening: bool = False  # whether the first event is so long that a thread must encode it
    logprobs: Callable[[ChoiceUpdate], Any] | None = None  # None: not asked for
    token_ids: bool = False
    usage_at_end: bool = False
    usage_always: bool = False
    num_thinking: Callable[[], int] | None = None  # tokens of thinking so far; None: the model does not think


class ChoiceEvents(Events):
    """OpenAI's events: each holds news of one choice."""

    def __init__(self, form: EventFormat, streams: Sequence[Stream], n: int) -> None:
        super().__init__(streams, n)
        self.form = form
        self.in_parts = form.logprobs is not None
        self.head = b"data: " + to_json(form.head)[:-1] + b',"choices":['
        count = len(streams) * n
        self.before = [self.head + b'{"index":%d,' % idx + form.before_text for idx in range(count)]
        self.after = form.after_text + b',"logprobs":null,"finish_reason":null}]' + self._usage_null() + b"}\n\n"
        self.plain = form.logprobs is None and not form.token_ids and not form.usage_always
        self.unopened = set(range(count))
        self.held: list[ChoiceUpdate] = []  # of choices whose opening is not known yet

    @property
    def is_slow(self) -> bool:
        return self.form.slow_opening and bool(self.unopened)

    def encode(self, updates: list[ChoiceUpdate]) -> bytes:
        events: list[bytes] = []
        if self.held:
            updates, self.held = self.held + updates, []
        for update in updates:
            idx = update.index
            if self.unopened and idx in self.unopened:
                if not self.form.can_open(idx):
                    self.held.append(update)
                    continue
                events.append(self._opening(idx))
            if self.plain and update.finish_reason is None:
                events += self.before[idx], to_json(update.text), self.after
            else:
                events.append(self._full(update))
        return b"".join(events)

    def failed(self, error: bytes) -> bytes:
        return b"data: " + error + b"\n\n" + DONE

    def end(self) -> bytes:
        if not self.form.usage_at_end:
            return DONE
        return self.head + b'],"usage":' + self._usage() + b"}\n\n" + DONE

    def _opening(self, idx: int) -> bytes:
        self.unopened.remove(idx)
        fields = self.form.opening(idx)
        if fields is None:
            return b""
        choice = {"index": idx, **fields[0], "finish_reason": None}
        beside = b"".join(b",%b:%b" % (to_json(name), to_json(value)) for name, value in fields[1].items())
        return self.head + to_json(choice) + b"]" + beside + self._usage_now() + b"}\n\n"

    def _full(self, update: ChoiceUpdate) -> bytes:
        """An event with more to say than text."""
        logprobs = self.form.logprobs(update) if self.form.logprobs is not None and update.token_ids else None
        parts = [self.before[update.index], to_json(update.text), self.form.after_text]
        parts += b',"logprobs":', to_json(logprobs)
        parts += b',"finish_reason":', to_json(update.finish_reason)
        if update.finish_reason is not None:
            parts += b',"stop_reason":', to_json(update.stop_reason)
        if self.form.token_ids:
            parts += b',"token_ids":', to_json(update.token_ids)
        return b"".join([*parts, b"}]", self._usage_now(), b"}\n\n"])

    def _usage_now(self) -> bytes:
        return b',"usage":' + self._usage() if self.form.usage_always else self._usage_null()

    def _usage(self) -> bytes:
        num_thinking = self.form.num_thinking() if self.form.num_thinking is not None else None
        return to_json(usage(self.streams, num_thinking=num_thinking))

    def _usage_null(self) -> bytes:
        """OpenAI sends a null with every event when a usage is to come at the end."""
        return b',"usage":null' if self.form.usage_at_end else b""


class EventStream:
    """An answer sent as events. Its head waits for the first token, so that an earlier failure has its own status."""

    def __init__(self, events: Events, call: Call) -> None:
        self.events = events
        self.request_id = call.request_id
        self.errors = call.errors
        self.record = call.record
        self.off_loop = call.service.llm.off_loop

    async def __call__(self, receive: Receive, send: Send) -> None:
        events = self.events
        begun = False
        share = LoopShare()
        async with AbortOnDisconnect(receive, events.streams):
            try:
                async for updates in merged(events.streams, events.n):
                    if not begun:
                        begun = True
                        await self._start(send)
                    if events.is_slow:
                        body = await self.off_loop(partial(events.encode, updates), len(updates))
                        await send_body(send, body, more=True)
                    elif not events.in_parts:
                        await send({"type": "http.response.body", "body": events.encode(updates), "more_body": True})
                    else:
                        for part in in_parts(updates):
                            await send({"type": "http.response.body", "body": events.encode([part]), "more_body": True})
                            await share.pause()
                last = events.end()
            except Exception as error:
                failed = problem(error, self.request_id)
                self.record.failed(failed.error)
                if not begun:
                    return await Answer.error(failed, self.errors, self.request_id)(receive, send)
                last = events.failed(self.errors.encode(failed, self.request_id))
        if not begun:
            await self._start(send)
        await send({"type": "http.response.body", "body": last})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.events.headers})


def in_parts(updates: list[ChoiceUpdate]) -> Iterator[ChoiceUpdate]:
    """Each update as several of at most PART_TOKENS tokens: a slow reader may have left many, and encoding all of their
    logprobs at once would take long."""
    for update in updates:
        num_tokens = len(update.logprobs)
        if num_tokens <= PART_TOKENS:
            yield update
            continue
        for start in range(0, num_tokens, PART_TOKENS):
            end = start + PART_TOKENS
            is_last = end >= num_tokens
            yield update._replace(
                text=update.text if start == 0 else "",
                token_ids=update.token_ids[start : None if is_last else end],
                logprobs=update.logprobs[start:end],
                finish_reason=update.finish_reason if is_last else None,
                stop_reason=update.stop_reason if is_last else None,
            )


def merged(streams: Sequence[Stream], n: int) -> AsyncIterator[list[ChoiceUpdate]]:
    """The updates of all streams as they come, with choices numbered across streams."""
    return aiter(streams[0]) if len(streams) == 1 else _merged(streams, n)


async def _merged(streams: Sequence[Stream], n: int) -> AsyncIterator[list[ChoiceUpdate]]:
    queue: asyncio.Queue[list[ChoiceUpdate] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: Stream, first_idx: int) -> None:
        try:
            async for updates in stream:
                await queue.put([update._replace(index=first_idx + update.index) for update in updates])
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    pumps = [asyncio.create_task(pump(stream, idx * n)) for idx, stream in enumerate(streams)]
    num_live = len(pumps)
    try:
        while num_live:
            updates = await queue.get()
            if updates is None:
                num_live -= 1
            elif isinstance(updates, Exception):
                raise updates
            else:
                yield updates
    finally:
        for task in pumps:
            task.cancel()
