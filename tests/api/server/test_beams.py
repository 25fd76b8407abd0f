"""Beam search over HTTP: the likeliest answers, best first, within the limits of any other call."""

import httpx
import pytest

from tests.serving import until

SEA = "The sea is"
BEAMS = {"prompt": SEA, "use_beam_search": True, "max_tokens": 5, "ignore_eos": True}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def post(smol, path: str = "/v1/completions", **body) -> httpx.Response:
    return httpx.post(smol.url + path, json=body, timeout=60)


def logprob(smol, token_ids: list[int], num_prompt_tokens: int) -> float:
    """Of what comes after the prompt, by the model itself."""
    asked = {"prompt": token_ids, "max_tokens": 0, "echo": True, "logprobs": 0}
    found = post(smol, **asked).json()["choices"][0]["logprobs"]["token_logprobs"]
    return sum(found[num_prompt_tokens:])


def test_the_likeliest_answers_come_best_first(smol):
    answer = post(smol, **BEAMS, n=4, return_token_ids=True).json()
    prompt = answer["choices"][0]["prompt_token_ids"]
    found = [logprob(smol, prompt + choice["token_ids"], len(prompt)) for choice in answer["choices"]]
    assert len({choice["text"] for choice in answer["choices"]}) == 4 and found == sorted(found, reverse=True)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["prompt_tokens"] == len(prompt) and answer["usage"]["completion_tokens"] == 20
    greedy = post(smol, prompt=SEA, max_tokens=5, temperature=0, ignore_eos=True, return_token_ids=True).json()
    assert found[0] >= logprob(smol, prompt + greedy["choices"][0]["token_ids"], len(prompt)) - 1e-3


def test_several_prompts_have_beams_of_their_own(smol):
    both = post(smol, **BEAMS | {"prompt": [SEA, "Paris is"]}, n=2, stop=["."]).json()
    alone = post(smol, **BEAMS | {"prompt": "Paris is"}, n=2, stop=["."]).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in both["choices"][2:]] == [choice["text"] for choice in alone["choices"]]
    assert all("." not in choice["text"] for choice in both["choices"])


def test_a_chat_has_beams_too(smol):
    options = {"messages": QUESTION, "max_tokens": 12, "n": 2, "length_penalty": 0.5}
    choices = post(smol, "/v1/chat/completions", use_beam_search=True, **options).json()["choices"]
    assert len(choices) == 2 and "Paris" in choices[0]["message"]["content"]
    assert choices[0]["message"] != choices[1]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True}, "stream"),
        ({"logprobs": 1}, "logprobs"),
        ({"guided_regex": "a+"}, "use_beam_search"),
        ({"n": 33}, "n"),
        ({"length_penalty": "nan"}, "length_penalty"),
    ],
)
def test_what_beams_cannot_have_is_refused(smol, body, param):
    answer = post(smol, **BEAMS | body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_the_time_limit_is_that_of_the_whole_search(smol):
    answer = post(smol, **BEAMS | {"max_tokens": 400}, n=8, timeout_s=0.3)
    assert answer.status_code == 408 and answer.json()["error"]["code"] == "deadline_exceeded"


def test_a_client_that_leaves_ends_the_search(smol):
    with pytest.raises(httpx.TimeoutException):
        httpx.post(smol.url + "/v1/completions", json=BEAMS | {"max_tokens": 400, "n": 8}, timeout=0.3)
    until(lambda: not smol.llm.cores.live, 5, "an idle engine")
