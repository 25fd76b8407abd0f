"""/tokenize and /detokenize, against the tokenizer's own library; and what machines ask: versions, health, metrics."""

import httpx
import pytest

import quire

TEXT = "Grüße, 世界! 🦆 def f(x): return x"


def post(server, path: str, **body) -> httpx.Response:
    return httpx.post(server.url + path, json=body)


@pytest.fixture(scope="module")
def backend(with_bos):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(with_bos)


def test_text_becomes_the_ids_the_library_gives(echo, backend):
    answer = post(echo, "/tokenize", prompt=TEXT).json()
    assert answer["tokens"] == backend.encode(TEXT).ids and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 2048 and answer["token_strs"] is None
    plain = post(echo, "/tokenize", prompt=TEXT, add_special_tokens=False, return_token_strs=True).json()
    assert plain["tokens"] == backend.encode(TEXT, add_special_tokens=False).ids == answer["tokens"][1:]
    assert plain["token_strs"] == backend.encode(TEXT, add_special_tokens=False).tokens


def test_ids_become_the_text_they_came_from(echo):
    for words in (TEXT, "<|im_start|>user\nhi<|im_end|>", ""):
        ids = post(echo, "/tokenize", prompt=words, add_special_tokens=False).json()["tokens"]
        assert post(echo, "/detokenize", tokens=ids).json() == {"prompt": words}


def test_messages_are_rendered_by_the_template(echo):
    messages = [{"role": "user", "content": "hi"}]
    ids = post(echo, "/tokenize", messages=messages, chat_template_kwargs={"style": "calm "}).json()["tokens"]
    assert post(echo, "/detokenize", tokens=ids).json()["prompt"] == "calm user: hi\n"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": [], "chat_template": "{{ 1 }}"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": "abc"}),
    ],
    ids=str,
)
def test_what_cannot_be_tokenized_is_refused(echo, path, body):
    assert post(echo, path, **body).status_code == 400


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_other_models_are_not_found(echo, path):
    assert post(echo, path, prompt="a", tokens=[1], model="other").json()["error"]["code"] == "model_not_found"


def test_probes_and_version_answer(echo):
    for path in ("/live", "/ready", "/health"):
        assert httpx.get(echo.url + path).json() == {"status": "ok"}
        assert httpx.head(echo.url + path).status_code == 200
    assert httpx.get(echo.url + "/version").json() == {"version": quire.__version__}


def test_metrics_count_what_was_served(echo):
    def tokens() -> float:
        lines = httpx.get(echo.url + "/metrics").text.splitlines()
        counts = [line for line in lines if line.startswith("quire:generation_tokens_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in counts)

    before = tokens()
    post(echo, "/v1/completions", prompt="a b c", max_tokens=7, ignore_eos=True)
    assert tokens() == before + 7
