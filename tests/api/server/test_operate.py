"""Endpoints beside the protocol: for machines, for SageMaker, for whoever debugs prompts, and for operators."""

import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

import quire
from quire.config.server import ServerConfig
from tests.api.server.conftest import Server, serving
from tests.serving import until

KEY = {"authorization": "Bearer root"}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONG = {"prompt": "a b c", "max_tokens": 1000, "ignore_eos": True}


@pytest.fixture(scope="module")
def operated(smollm2) -> Iterator[Server]:
    """Repeats its prompts, 100 tokens a second; with a key for its operator."""
    options = {"executor": "echo:100", "max_model_len": 2048, "chat_template": "{{ messages[0].content }}"}
    with serving(str(smollm2), ServerConfig(admin_api_key="root"), **options) as server:
        yield server


def admin(server: Server, method: str, path: str, **options) -> dict:
    answer = httpx.request(method, server.url + path, headers=KEY, timeout=30, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


class Asking:
    """A call on a thread."""

    def __init__(self, server: Server, **body) -> None:
        self.answer: httpx.Response | None = None
        self.url = server.url + "/v1/completions"
        self.body = {**LONG, **body}
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.answer = httpx.post(self.url, json=self.body, timeout=60)

    def result(self) -> dict:
        self.thread.join(60)
        assert self.answer is not None
        return self.answer.json()


def load(server: Server) -> int:
    return httpx.get(server.url + "/load").json()["server_load"]


# -- for everybody -----------------------------------------------------------------------------------------------------


def test_ping_is_health(operated):
    for method in ("GET", "POST"):
        assert httpx.request(method, operated.url + "/ping").json() == {"status": "ok"}


def test_load_counts_requests_under_way(operated):
    assert load(operated) == 0
    asking = [Asking(operated, max_tokens=100) for _ in range(3)]
    until(lambda: load(operated) == 3)
    for each in asking:
        each.result()
    until(lambda: load(operated) == 0)


def test_the_tokenizer_tells_of_itself(operated):
    info = httpx.get(operated.url + "/tokenizer_info").json()
    assert info["tokenizer_class"] and info["eos_token"] == "<|im_end|>" and info["model_max_length"] == 2048
    assert info["added_tokens_decoder"]["2"] == {"content": "<|im_end|>", "special": True}
    assert info["chat_template"] == "{{ messages[0].content }}"


def test_a_model_from_a_path_is_called_by_its_last_part(operated, smol, smollm2):
    (card, _) = httpx.get(operated.url + "/v1/models").json()["data"]
    assert card["root"] == smollm2.name and card["max_model_len"] == 2048
    assert httpx.get(smol.url + "/v1/models").json()["data"][0]["root"] == "smollm2"


@pytest.mark.parametrize("stream", [False, True])
def test_invocations_go_where_their_keys_say(operated, stream):
    def invoke(**body) -> httpx.Response:
        return httpx.post(operated.url + "/invocations", json={"max_tokens": 3, "stream": stream, **body}, timeout=30)

    def kind(answer: httpx.Response) -> str:
        text = answer.text.removeprefix("data: ").partition("\n")[0]
        return json.loads(text)["object"]

    assert kind(invoke(messages=QUESTION)) == ("chat.completion.chunk" if stream else "chat.completion")
    assert kind(invoke(prompt="a b c")) == "text_completion"
    assert invoke(input="a").json()["error"]["code"] == "missing_required_parameter"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"7", b'{"messages": 5}', b'{"prompt": {}}'])
def test_invocations_of_nothing_are_refused(operated, body):
    answer = httpx.post(operated.url + "/invocations", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_a_rendered_chat_is_the_prompt_that_would_run(smol):
    body = {"messages": QUESTION, "max_tokens": 5, "temperature": 0.5, "cache_salt": "s", "priority": 3}
    rendered = httpx.post(smol.url + "/v1/chat/completions/render", json=body).json()
    answer = httpx.post(smol.url + "/v1/chat/completions", json={**body, "return_token_ids": True}, timeout=60).json()
    assert rendered["token_ids"] == answer["prompt_token_ids"]
    assert rendered["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n") and "France" in rendered["prompt"]
    assert rendered["sampling_params"]["max_tokens"] == 5 and rendered["sampling_params"]["temperature"] == 0.5
    assert (rendered["cache_salt"], rendered["priority"], rendered["stream"]) == ("s", 3, False)


def test_rendered_completions_are_one_each(smol):
    rendered = httpx.post(smol.url + "/v1/completions/render", json={"prompt": ["a b", [5, 6, 7]]}).json()
    assert rendered[0]["prompt"] == "a b" and rendered[1]["token_ids"] == [5, 6, 7]
    assert len({each["request_id"] for each in rendered}) == 2


# -- for operators -----------------------------------------------------------------------------------------------------

ADMIN = ["GET /server_info", "POST /reset_prefix_cache", "POST /pause", "POST /resume", "GET /is_paused"]


ADMIN += ["POST /sleep", "POST /wake_up", "GET /is_sleeping"]


@pytest.mark.parametrize("endpoint", [*ADMIN, "POST /abort_requests"])
def test_operators_paths_need_the_operators_key(operated, smol, endpoint):
    method, path = endpoint.split()
    assert httpx.request(method, operated.url + path).status_code == 401
    assert httpx.request(method, smol.url + path).status_code == 403
    assert not httpx.get(operated.url + "/is_paused", headers=KEY).json()["is_paused"]


def test_the_options_are_shown_without_paths_and_keys(operated, smollm2):
    info = admin(operated, "GET", "/server_info")
    assert info["version"] == quire.__version__ and info["model"] == smollm2.name
    assert info["engine_config"]["cache"]["block_size"] == 16 and info["serving_config"]["max_n"] == 128
    told = json.dumps(info)
    assert str(smollm2.parent) not in told and "root" not in told and "/" not in told


def test_requests_wait_while_the_server_is_paused(operated):
    running = Asking(operated, max_tokens=60)
    until(lambda: load(operated) == 1)
    time.sleep(0.1)
    assert admin(operated, "POST", "/pause", params={"mode": "keep"}) == {"status": "paused"}
    assert admin(operated, "GET", "/is_paused") == {"is_paused": True}
    waiting = Asking(operated, max_tokens=5)
    time.sleep(0.8)  # longer than either of them takes
    assert waiting.thread.is_alive() and running.thread.is_alive() and load(operated) == 2
    assert admin(operated, "POST", "/resume") == {"status": "resumed"}
    assert waiting.result()["usage"]["completion_tokens"] == 5
    answer = running.result()  # nothing of it is lost or comes twice
    assert answer["usage"]["completion_tokens"] == 60
    assert answer["choices"][0]["text"] == Asking(operated, max_tokens=60).result()["choices"][0]["text"]
    assert admin(operated, "GET", "/is_paused") == {"is_paused": False}


def test_pausing_can_end_what_runs_or_wait_for_it(operated):
    running = Asking(operated)
    until(lambda: load(operated) == 1)
    time.sleep(0.1)
    admin(operated, "POST", "/pause")
    assert running.result()["choices"][0]["finish_reason"] == "abort"
    admin(operated, "POST", "/resume")
    running = Asking(operated, max_tokens=50)
    until(lambda: load(operated) == 1)
    time.sleep(0.1)
    admin(operated, "POST", "/pause?mode=wait")
    assert load(operated) == 0 and running.result()["usage"]["completion_tokens"] == 50
    admin(operated, "POST", "/resume")


def test_a_request_that_was_kept_can_be_ended_or_waited_for(operated):
    running = Asking(operated, max_tokens=60)
    until(lambda: load(operated) == 1)
    admin(operated, "POST", "/pause?mode=keep")
    admin(operated, "POST", "/pause?mode=wait")
    assert load(operated) == 0 and running.result()["usage"]["completion_tokens"] == 60
    admin(operated, "POST", "/resume")
    running = Asking(operated)
    until(lambda: load(operated) == 1)
    admin(operated, "POST", "/pause?mode=keep")
    admin(operated, "POST", "/abort_requests", json={})
    assert running.result()["choices"][0]["finish_reason"] == "abort"
    admin(operated, "POST", "/resume")


def test_a_kept_request_survives_the_core(operated):
    running = Asking(operated, max_tokens=60)
    until(lambda: load(operated) == 1)
    admin(operated, "POST", "/pause?mode=keep")
    deaths = operated.llm.num_restarts
    operated.llm.cores.supervisors[0].core.kill()
    until(lambda: operated.llm.num_restarts > deaths and operated.llm.health() is None)
    time.sleep(0.3)
    assert running.thread.is_alive()
    admin(operated, "POST", "/resume")
    assert running.result()["usage"]["completion_tokens"] == 60


def test_a_request_that_waits_while_paused_can_run_out_of_time(operated):
    admin(operated, "POST", "/pause?mode=keep")
    assert Asking(operated, timeout_s=0.2).result()["error"]["code"] == "deadline_exceeded"
    admin(operated, "POST", "/resume")


def test_a_sleeping_server_turns_requests_away_and_wakes_up(operated):
    running = Asking(operated)
    until(lambda: load(operated) == 1)
    assert admin(operated, "POST", "/sleep", params={"level": 2}) == {"is_sleeping": True}
    assert running.result()["choices"][0]["finish_reason"] == "abort"
    answer = httpx.post(operated.url + "/v1/completions", json={"prompt": [5, 6, 7]})
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert httpx.get(operated.url + "/live").status_code == 200
    assert httpx.get(operated.url + "/ready").status_code == 503
    assert admin(operated, "GET", "/is_sleeping") == {"is_sleeping": True}
    assert admin(operated, "POST", "/wake_up?tags=weights") == {"is_sleeping": False}
    assert Asking(operated, max_tokens=5).result()["usage"]["completion_tokens"] == 5
    assert httpx.get(operated.url + "/ready").status_code == 200


def test_an_unknown_level_of_sleep_is_refused(operated):
    answer = httpx.post(operated.url + "/sleep?level=7", headers=KEY)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "level"
    assert not admin(operated, "GET", "/is_sleeping")["is_sleeping"]


def test_an_unknown_way_to_pause_is_refused(operated):
    answer = httpx.post(operated.url + "/pause?mode=never", headers=KEY)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "mode"
    assert not admin(operated, "GET", "/is_paused")["is_paused"]


@pytest.mark.parametrize("name", ["mine", "cmpl-mine"])
def test_requests_are_ended_by_their_ids(operated, name):
    mine, other = Asking(operated, request_id="mine"), Asking(operated, request_id="mine-too", max_tokens=80)
    until(lambda: load(operated) == 2)
    body = {"request_ids": [name, "nobody"]}
    assert admin(operated, "POST", "/abort_requests", json=body) == {"status": "aborted", "aborted": 1}
    assert mine.result()["choices"][0]["finish_reason"] == "abort"
    assert other.result()["usage"]["completion_tokens"] == 80


def test_all_requests_are_ended_when_none_is_named(operated):
    asking = [Asking(operated), Asking(operated)]
    until(lambda: load(operated) == 2)
    assert admin(operated, "POST", "/abort_requests", json={})["aborted"] == 2
    assert [each.result()["choices"][0]["finish_reason"] for each in asking] == ["abort", "abort"]


def test_cached_prompts_are_forgotten(smollm2):
    options = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "num_threads": 1}
    with serving("smollm2", ServerConfig(admin_api_key="root"), **options) as server:

        def cached() -> int:
            body = {"prompt": "One two three four five. " * 12, "max_tokens": 1}
            answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached() == 0 < cached()
        assert admin(server, "POST", "/reset_prefix_cache") == {"success": True}
        assert cached() == 0 < cached()
        admin(server, "POST", "/pause")
        admin(server, "POST", "/resume")
        assert cached() == 0
