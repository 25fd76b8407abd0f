"""A request that is over is freed at once. In a reference cycle it would stay, with all its tokens, until the garbage
collector runs."""

import gc

import openai
import pytest

from quire.api.server.guard import Reply
from quire.frontend.requests import RequestState
from tests.serving import until


def whole(client: openai.OpenAI) -> None:
    client.completions.create(model="smol", prompt="one two three", max_tokens=4)


def stream(client: openai.OpenAI) -> None:
    for _ in client.completions.create(model="smol", prompt="one two three", max_tokens=4, stream=True):
        pass


def leave(client: openai.OpenAI) -> None:
    with client.completions.create(model="smol", prompt="one two three", max_tokens=500, stream=True) as events:
        next(iter(events))


def deadline(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as failed:
        client.completions.create(model="smol", prompt="one two three", max_tokens=500, extra_body={"timeout_s": 0.05})
    assert failed.value.status_code == 408


def mistake(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="smol", prompt="one " * 5000, max_tokens=4)


def no_room(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="smol", prompt="one two three", max_tokens=1 << 20)


def chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "one two three"}]
    client.chat.completions.create(model="smol", messages=messages, max_tokens=4)


ASKS = [whole, stream, leave, deadline, mistake, no_room, chat]


@pytest.mark.parametrize("ask", ASKS)
def test_no_reply_is_left_for_the_garbage_collector(echo, ask):
    """An exception that its own traceback refers to would keep all that the call had."""
    gc.collect()
    gc.disable()
    try:
        with echo.client() as client:
            for _ in range(3):
                ask(client)
        until(lambda: not any(type(thing) is Reply for thing in gc.get_objects()), 2, "no reply in memory")
    finally:
        gc.enable()


@pytest.mark.parametrize("ask", ASKS)
def test_a_request_leaves_nothing_for_the_garbage_collector(echo, ask):
    gc.collect()
    gc.disable()
    try:
        with echo.client() as client:  # an open connection knows its last request
            for _ in range(3):
                ask(client)
        until(lambda: not any(type(thing) is RequestState for thing in gc.get_objects()), 2, "no request in memory")
    finally:
        gc.enable()
