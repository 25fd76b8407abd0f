"""Requests that took an engine down are refused when they come again, for a while, and not without bounds."""

import pytest

from quire.errors import PoisonError
from quire.frontend import convicted
from quire.frontend.convicted import MAX_CONVICTED, REFUSED_FOR_S, Convicted
from quire.frontend.requests import RequestState
from quire.messages import AddRequest
from quire.params import SamplingParams


def request(*token_ids: int, request_id: str = "r") -> RequestState:
    params = SamplingParams()
    message = AddRequest(request_id, list(token_ids), params, seed=0)
    return RequestState(request_id, None, list(token_ids), params, message, None)


def test_the_same_request_is_refused_for_ten_minutes(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(convicted.time, "monotonic", lambda: now[0])
    record = Convicted()
    record.add(request(1, 2, 3))
    record.check(request(1, 2, 4))
    with pytest.raises(PoisonError, match="refused for ten minutes"):
        record.check(request(1, 2, 3, request_id="another"))
    assert len(record) == 1
    now[0] += REFUSED_FOR_S
    record.check(request(1, 2, 3))
    assert len(record) == 0


def test_the_oldest_are_forgotten_first():
    record = Convicted()
    for idx in range(MAX_CONVICTED + 1):
        record.add(request(idx))
    assert len(record) == MAX_CONVICTED
    record.check(request(0))
    with pytest.raises(PoisonError):
        record.check(request(1))
