"""Answers as Anthropic's events: the beginning of a message, of each block, what is added to it, and their ends.

Used by `messages.py`. As in `sse.py`, an event is made of bytes that were encoded before and the JSON of the new text.
"""

from typing import Any

from quire.api.server.anthropic.blocks import Blocks, Kind, Piece, Shown, message_usage, signature, stop_of
from quire.api.server.chat import Conversation
from quire.api.server.reading import call_id, deltas_of
from quire.api.server.sse import Events, to_json
from quire.frontend.requests import ChoiceUpdate

_AFTER = b"}}\n\n"
_DELTAS: dict[Kind, bytes] = {  # from the type of a delta to its text
    "text": b'"text_delta","text":',
    "thinking": b'"thinking_delta","thinking":',
    "tool_use": b'"input_json_delta","partial_json":',
}


def event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json({"type": name, **fields}))


def _before(idx: int, delta: bytes) -> bytes:
    """An event that adds to block `idx`, up to what it adds."""
    return b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":' % idx + delta


class MessageEvents(Events):
    """The one answer to a conversation."""

    def __init__(
        self, chat: Conversation, head: dict[str, Any], thinking: Shown, max_tokens: int, max_model_len: int
    ) -> None:
        """`head`: what a message begins with. `max_tokens`: as asked for."""
        super().__init__([chat.stream], 1)
        self.chat = chat
        self.head = head
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        self.parser = chat.reading.parser()
        self.is_plain = chat.reading.is_plain
        self.blocks = Blocks(thinking)
        self.begun = False
        self.open: Kind | None = None  # the block under way
        self.idx = -1  # of it
        self.before = b""
        self.last: ChoiceUpdate | None = None

    def encode(self, updates: list[ChoiceUpdate]) -> bytes:
        events: list[bytes] = []
        if not self.begun:
            self.begun = True
            events.append(self._start())
        if self.chat.num_thinking is not None:
            self.chat.num_thinking()  # now and not at the end, when it would take long
        for update in updates:
            if self.is_plain and self.open == "text":
                if update.text:
                    events += self.before, to_json(update.text), _AFTER
            else:
                for delta in deltas_of(self.parser, update):
                    for piece in self.blocks.take(delta):
                        self._write(piece, events)
            if update.finish_reason is not None:
                self.last = update
        return b"".join(events)

    def end(self) -> bytes:
        events = [] if self.begun else [self._start()]
        for piece in self.blocks.end():
            self._write(piece, events)
        self._close(events)
        reason, said = (self.last.finish_reason, self.last.stop_reason) if self.last is not None else (None, None)
        stop = stop_of(self.chat, self.blocks, reason, said, self.max_tokens, self.max_model_len)
        delta = {"stop_reason": stop.reason, "stop_sequence": stop.sequence}
        events.append(event("message_delta", delta=delta, usage=message_usage(self.chat)))
        events.append(event("message_stop"))
        return b"".join(events)

    def failed(self, error: bytes) -> bytes:
        return b"event: error\ndata: " + error + b"\n\n"

    def _start(self) -> bytes:
        rest: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(self.chat),
        }
        return event("message_start", message={**self.head, **rest})

    def _write(self, piece: Piece, events: list[bytes]) -> None:
        if piece.begins:
            self._close(events)
            self._open(piece, events)
        if piece.text:
            events += self.before, to_json(piece.text), _AFTER

    def _open(self, piece: Piece, events: list[bytes]) -> None:
        self.idx += 1
        self.open = piece.kind
        self.before = _before(self.idx, _DELTAS[piece.kind])
        block: dict[str, Any] = {"type": piece.kind, "text": ""}
        if piece.kind == "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif piece.kind == "tool_use":
            block = {"type": "tool_use", "id": call_id("toolu_"), "name": piece.name, "input": {}}
        events.append(event("content_block_start", index=self.idx, content_block=block))
        if self.idx == 0:
            events.append(event("ping"))

    def _close(self, events: list[bytes]) -> None:
        if self.open is None:
            return
        if self.open == "thinking":
            events += _before(self.idx, b'"signature_delta","signature":'), to_json(signature()), _AFTER
        events.append(event("content_block_stop", index=self.idx))
        self.open = None
