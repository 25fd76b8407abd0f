"""Requests that were found guilty of a core's crash (`blame.py`): refused for ten minutes, by all cores of a server."""

import time

from quire.errors import PoisonError
from quire.frontend.requests import RequestState

REFUSED_FOR_S = 600.0
MAX_CONVICTED = 1024


class Convicted:
    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}  # fingerprint -> when it may come again, by time.monotonic(); oldest first

    def __len__(self) -> int:
        self._release()
        return len(self._until)

    def add(self, request: RequestState) -> None:
        fingerprint = request.fingerprint()
        self._until.pop(fingerprint, None)  # a twin of it may have been convicted before
        while len(self._until) >= MAX_CONVICTED:
            del self._until[next(iter(self._until))]
        self._until[fingerprint] = time.monotonic() + REFUSED_FOR_S

    def check(self, request: RequestState) -> None:
        """PoisonError: the request is one of them."""
        self._release()
        if self._until and request.fingerprint() in self._until:
            raise PoisonError("this request made the engine fail a short while ago and is refused for ten minutes")

    def _release(self) -> None:
        now = time.monotonic()
        for fingerprint in [fingerprint for fingerprint, until in self._until.items() if until <= now]:
            del self._until[fingerprint]
