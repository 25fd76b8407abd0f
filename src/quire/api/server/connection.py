"""One HTTP connection: uvicorn's httptools protocol, with the two bounds it lacks on the head of a request, bytes and time.

Made by uvicorn for every connection that `run.py`'s server accepts. Bodies are bounded in `guard.py`, which also answers heads that
are complete but too large; here only those end that would never be complete.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # request line and headers
HEAD_TIMEOUT_S = 30.0

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Connection(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head_bytes = 0  # of a head that is not complete yet
        self.head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.head_timer is not None:  # in a head still
            self.head_bytes += len(data)
            if self.head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_is_over()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_over()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves the timer, and us with it, when the client reset the connection

    def _expect_head(self) -> None:
        self.head_bytes = 0
        self.head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_is_over(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
