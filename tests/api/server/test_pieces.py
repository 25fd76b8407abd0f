"""Large answers in pieces: put together they are what one call would have written."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType

from quire.api.server import calls, sse
from quire.api.server.calls import Answer, json_pieces, send_body
from quire.api.server.sse import in_parts
from quire.frontend.requests import ChoiceUpdate
from quire.step import TokenLogprobs


class Inner(msgspec.Struct):
    ids: list[int]
    left_out: str | UnsetType = UNSET
    texts: list[str] | None = None


class Outer(msgspec.Struct, rename="camel"):
    two_words: str
    inners: list[Inner] = []
    one: Inner | None = None


class Empty(msgspec.Struct):
    left_out: str | UnsetType = UNSET


inners = st.builds(
    Inner,
    st.lists(st.integers(-5, 2**40), max_size=9),
    st.just(UNSET) | st.text(),
    st.none() | st.lists(st.text(), max_size=9),
)
outers = st.builds(Outer, st.text(), st.lists(inners, max_size=4), st.none() | inners)


@given(st.one_of(outers, inners, st.just(Empty()), st.lists(outers, max_size=3)))
def test_pieces_are_the_json_of_the_whole(value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "PIECE_ENTRIES", 2)
        assert b"".join(json_pieces(value)) == msgspec.json.encode(value)


def sent(answer) -> list[dict]:
    messages = []

    async def send(message: dict) -> None:
        messages.append(message)

    asyncio.run(answer(send))
    return messages


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 35])
def test_a_body_is_sent_in_pieces_and_its_end_is_told_once(monkeypatch, size):
    monkeypatch.setattr(calls, "PIECE_BYTES", 10)
    body = bytes(range(size))
    messages = sent(lambda send: send_body(send, body, more=False))
    assert b"".join(message["body"] for message in messages) == body
    assert [message["more_body"] for message in messages] == [True] * (len(messages) - 1) + [False]
    assert max(len(message["body"]) for message in messages) <= 10


def test_a_large_answer_has_the_length_it_says(monkeypatch):
    monkeypatch.setattr(calls, "PIECE_BYTES", 100)
    value = Outer("x", [Inner(list(range(200)))])
    head, *parts = sent(lambda send: Answer.large_json(value)(None, send))
    body = b"".join(part["body"] for part in parts)
    assert body == msgspec.json.encode(value) and len(parts) > 5
    assert dict(head["headers"])[b"content-length"] == b"%d" % len(body)


@given(st.integers(0, 100), st.booleans())
def test_tokens_with_logprobs_are_written_a_few_at_a_time(num_tokens, ends):
    entries = [TokenLogprobs(idx, -1.0, 1, [], []) for idx in range(num_tokens)]
    update = ChoiceUpdate(3, "text", list(range(num_tokens)), entries, "stop" if ends else None, 7 if ends else None)
    parts = list(in_parts([update]))
    assert "".join(part.text for part in parts) == "text"
    assert [token_id for part in parts for token_id in part.token_ids] == update.token_ids
    assert [entry for part in parts for entry in part.logprobs] == entries
    assert all(len(part.logprobs) <= sse.PART_TOKENS and part.index == 3 for part in parts)
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [update.finish_reason]
