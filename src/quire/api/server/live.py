"""/v1/engine/live: what the engine does, as server-sent events (docs/live.md).

Called by `app.py`. What is shown is `live_feed.py`'s; here it is sent, until the client leaves or the server stops.
"""

import asyncio
from typing import Annotated

import msgspec

from quire.api.server.calls import Answer, Call, Receive, Send
from quire.api.server.fields import parameters, whole
from quire.api.server.live_feed import Watcher
from quire.api.server.sse import HEADERS


class LiveParameters(msgspec.Struct, kw_only=True):
    engine: Annotated[int, whole(0, 1023)] = 0  # which of them, where the server has several


class LiveStream:
    """An answer that goes on."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    async def __call__(self, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(self._until_left(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await send({"type": "http.response.body", "body": b": hello\n\n", "more_body": True})
            async for event in self.watcher:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            leaving.cancel()
            self.watcher.leave()

    async def _until_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.watcher.end()


async def live_engine(call: Call) -> "Answer | LiveStream":
    if call.record.method == "HEAD":
        return Answer(b"", content_type=b"text/event-stream; charset=utf-8")
    asked = parameters(call.query, LiveParameters)
    return LiveStream(call.service.live.join(asked.engine))
