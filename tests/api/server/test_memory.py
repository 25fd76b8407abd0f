"""A request that is over is freed at once. In a reference cycle it would stay, with all its tokens, until the garbage
collector runs."""

import gc

import openai
import pytest

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


@pytest.mark.parametrize("ask", [whole, stream, leave, deadline, mistake])
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
