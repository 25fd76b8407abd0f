"""LLM as its users see it: forms of prompts, order, fields, stops, seeds, errors, interruption."""

import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from quire import LLM, SamplingParams
from quire.errors import (
    BadModelFileError,
    CapacityError,
    ConfigError,
    ModelNotFoundError,
    QuireError,
    RequestError,
    UnsupportedModelError,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TINY = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 32 << 20,
    "num_threads": 1,
    "max_model_len": 128,
}


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    with LLM(str(tiny_llama), **TINY) as llm:
        yield llm


@pytest.fixture(scope="module")
def smol(smollm2):
    with LLM("smollm2", max_model_len=1024) as llm:
        yield llm


def ids(output, choice=0):
    return output.outputs[choice].token_ids


# -- prompts and outputs -----------------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts(tiny):
    prompts = [[i, i + 1, i + 2] for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (7 * i) % 11, ignore_eos=True) for i in range(20)]
    outputs = tiny.generate(prompts, params, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(ids(o)) for o in outputs] == [p.max_tokens for p in params]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_a_prompt_is_text_ids_or_a_dict(smol):
    as_text = smol.generate("Hello there", GREEDY, use_tqdm=False)[0]
    token_ids = as_text.prompt_token_ids
    for same in ({"prompt": "Hello there"}, token_ids, {"prompt_token_ids": token_ids}, tuple(token_ids)):
        assert ids(smol.generate(same, GREEDY, use_tqdm=False)[0]) == ids(as_text)
    assert as_text.prompt == "Hello there"


def test_no_prompts_give_no_outputs(tiny):
    assert tiny.generate([], GREEDY, use_tqdm=False) == []


def test_metrics_tell_when_things_happened(tiny):
    before = time.time(), time.monotonic()
    metrics = tiny.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].metrics
    assert before[0] <= metrics.arrival_time <= time.time()
    assert before[1] <= metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts
    assert metrics.first_token_ts < metrics.last_token_ts <= metrics.finished_ts <= time.monotonic()
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts
    assert metrics.num_generation_tokens == 8


def test_the_progress_bar_shows_tokens_per_second(tiny, capsys):
    tiny.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=40, ignore_eos=True))
    assert "tok/s" in capsys.readouterr().err


def test_a_chat_uses_the_models_template(smol):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    output = smol.chat(question, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0].outputs[0]
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
    assert not output.text.endswith("<|im_end|>")
    two = smol.chat([[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Bye"}]], GREEDY, use_tqdm=False)
    assert len(two) == 2


def test_a_stream_grows_to_what_generate_gives(smol):
    texts = [o.outputs[0].text for o in smol.stream("The sea is", GREEDY)]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))
    assert texts[-1] == smol.generate("The sea is", GREEDY, use_tqdm=False)[0].outputs[0].text


def test_nothing_else_can_be_asked_in_the_middle_of_a_stream(smol):
    whole = [o.outputs[0].text for o in smol.stream("The sea is", GREEDY)][-1]
    stream = smol.stream("The sea is", GREEDY)
    next(stream)
    with pytest.raises(RequestError, match="in the middle of a stream"):
        smol.generate("The sky is", GREEDY, use_tqdm=False)
    assert [o.outputs[0].text for o in stream][-1] == whole
    assert smol.generate("The sea is", GREEDY, use_tqdm=False)[0].outputs[0].text == whole


def test_a_stream_that_is_left_frees_its_request(smol):
    stream = smol.stream("The sea is", SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    assert not smol.client.engine.has_work


# -- parameters --------------------------------------------------------------------------------------------------------


def test_n_answers_differ_and_are_repeatable(tiny):
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    first, second = (tiny.generate([5, 6, 7], params, use_tqdm=False)[0] for _ in range(2))
    assert [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 4
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]


def test_requests_without_a_seed_differ_but_an_engine_repeats_itself(tiny_llama):
    def run():
        with LLM(str(tiny_llama), **TINY, seed=11) as llm:
            outputs = llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
            return [ids(output) for output in outputs]

    first, second = run(), run()
    assert first == second
    assert first[0] != first[1]


def test_a_stop_string_ends_the_text_before_it(smol):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    whole = smol.generate("Count: one, two, three,", params, use_tqdm=False)[0].outputs[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=[stop])
    cut = smol.generate("Count: one, two, three,", params, use_tqdm=False)[0].outputs[0]
    assert cut.text == whole[: whole.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert not smol.client.engine.has_work


def test_a_stop_token_is_reported_and_is_no_text(smol):
    whole = smol.generate("The sea is", GREEDY, use_tqdm=False)[0].outputs[0]
    stop = whole.token_ids[4]
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[stop])
    cut = smol.generate("The sea is", params, use_tqdm=False)[0].outputs[0]
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == smol.get_tokenizer().decode(cut.token_ids[:-1])


def test_logprobs_hold_the_chosen_token_and_the_likeliest(tiny):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True, logprobs=3)
    output = tiny.generate([1, 2, 3], params, use_tqdm=False)[0].outputs[0]
    assert len(output.logprobs) == 6
    for token, entry in zip(output.token_ids, output.logprobs):
        assert 3 <= len(entry) <= 4 and token in entry
        assert all(math.isfinite(each.logprob) and each.logprob <= 0 for each in entry.values())
        assert min(each.rank for each in entry.values()) == 1
    chosen = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen))


def test_prompt_logprobs_start_with_none_and_cover_the_prompt(tiny):
    output = tiny.generate([1, 2, 3, 4], SamplingParams(max_tokens=1, prompt_logprobs=2, n=2), use_tqdm=False)[0]
    assert output.prompt_logprobs[0] is None
    assert [token in entry for token, entry in zip([2, 3, 4], output.prompt_logprobs[1:])] == [True] * 3


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({"allowed_token_ids": [7, 9]}, lambda t: set(t) <= {7, 9}),
        ({"logit_bias": {42: 100.0}}, lambda t: set(t) == {42}),
        ({"repetition_penalty": 50.0}, lambda t: len(set(t)) == len(t)),
        ({"presence_penalty": 2.0, "frequency_penalty": 2.0, "allowed_token_ids": [1, 2]}, lambda t: {1, 2} == set(t)),
    ],
)
def test_parameters_have_their_effect(tiny, changes, holds):
    plain = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    changed = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, **changes)
    assert not holds(ids(tiny.generate([3, 1, 4], plain, use_tqdm=False)[0]))
    assert holds(ids(tiny.generate([3, 1, 4], changed, use_tqdm=False)[0]))


def test_min_tokens_forbids_what_would_end_the_answer(tiny):
    stop = ids(tiny.generate([3, 1, 4], GREEDY, use_tqdm=False)[0])[1]
    short = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[stop])
    assert len(ids(tiny.generate([3, 1, 4], short, use_tqdm=False)[0])) == 2
    longer = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[stop], min_tokens=5)
    answer = ids(tiny.generate([3, 1, 4], longer, use_tqdm=False)[0])
    assert len(answer) > 5 and stop not in answer[:5]


def test_bad_words_do_not_occur(smol):
    plain = smol.generate("The capital of France is", GREEDY, use_tqdm=False)[0].outputs[0].text
    assert "Paris" in plain
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, bad_words=["Paris"])
    assert "Paris" not in smol.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].text


def test_sampling_defaults_come_from_generation_config(tiny_llama, tmp_path):
    import json
    import shutil

    shutil.copytree(tiny_llama, tmp_path / "m")
    defaults = {"temperature": 0.3, "top_k": 7, "eos_token_id": [3, 5]}
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps(defaults))
    with LLM(str(tmp_path / "m"), **TINY) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k) == (0.3, 7)
        assert llm.model.eos_ids == [2, 3, 5]
    with LLM(str(tmp_path / "m"), **TINY, generation_config="none") as llm:
        assert llm.get_default_sampling_params().temperature == 1.0


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], None),
        ([[]], "empty"),
        ([999], "0 to 255"),
        ([-1], "0 to 255"),
        ([1.5], "token ids|text"),
        ([True], "token ids"),
        (list(range(128)), "maximum context length is 128"),
        ({"text": 1}, "prompt_token_ids"),
        ("text", "needs a tokenizer"),
        ([b"x"], "text"),
        ({"prompt_token_ids": [1], "cache_salt": "x" * 300}, "cache_salt"),
    ],
)
def test_bad_prompts_are_refused_in_a_sentence(tiny, prompt, message):
    if message is None:
        assert tiny.generate(prompt, GREEDY, use_tqdm=False) == []
        return
    with pytest.raises(RequestError, match=message):
        tiny.generate(prompt, GREEDY, use_tqdm=False)
    assert not tiny.client.engine.has_work


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2.0},
        {"n": 0},
        {"n": 10**6},
        {"max_tokens": 0},
        {"min_tokens": 5, "max_tokens": 4},
        {"logprobs": -2},
        {"prompt_logprobs": 2**70},
        {"seed": 2**80},
        {"stop": [""]},
        {"stop": ["x"] * 1000},
        {"stop": ["x"], "detokenize": False},
        {"logit_bias": {1: math.nan}},
        {"allowed_token_ids": []},
        {"presence_penalty": 3.0},
        {"repetition_penalty": 0.0},
        {"bad_words": [3]},
        {"stop_token_ids": [-1]},
        {"temperature": "hot"},
        {"n": True},
    ],
)
def test_bad_parameters_are_refused(fields):
    with pytest.raises(RequestError):
        SamplingParams(**fields)


def test_parameters_outside_the_vocabulary_are_refused(tiny):
    for fields in (
        {"stop_token_ids": [256]},
        {"logit_bias": {256: 1.0}},
        {"allowed_token_ids": [1, 300]},
        {"logprob_token_ids": [256]},
    ):
        with pytest.raises(RequestError, match="vocabulary"):
            tiny.generate([1, 2], SamplingParams(**fields), use_tqdm=False)


def test_one_bad_prompt_starts_none(tiny):
    with pytest.raises(RequestError):
        tiny.generate([[1, 2], [999]], GREEDY, use_tqdm=False)
    assert not tiny.client.engine.has_work


def test_a_mismatch_of_prompts_and_parameters_is_refused(tiny):
    with pytest.raises(RequestError, match="2 prompts"):
        tiny.generate([[1], [2]], [GREEDY] * 3, use_tqdm=False)


def test_too_little_memory_says_what_to_change(tiny_llama):
    with pytest.raises(CapacityError, match="--max-model-len to"):
        LLM(str(tiny_llama), **{**TINY, "kv_cache_memory_bytes": 100_000})


def test_unknown_models_and_options_are_refused(tiny_llama, tmp_path):
    with pytest.raises(ModelNotFoundError):
        LLM("no-such-model")
    with pytest.raises(ConfigError, match="did you mean"):
        LLM(str(tiny_llama), max_num_seq=3)
    with pytest.raises(ConfigError, match="choose from"):
        LLM(str(tiny_llama), **TINY, attention_backend="psychic")


def test_damaged_folders_are_refused(tiny_llama, tmp_path):
    import json
    import shutil

    def damaged(change):
        folder = tmp_path / str(time.monotonic_ns())
        shutil.copytree(tiny_llama, folder)
        change(folder)
        with pytest.raises(QuireError) as caught:
            LLM(str(folder), **TINY)
        return caught.value

    def edit(**fields):
        def change(folder):
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, **fields}))

        return change

    unknown = damaged(edit(architectures=["FancyForCausalLM"]))
    assert isinstance(unknown, UnsupportedModelError) and "quire models" in str(unknown)
    assert isinstance(damaged(edit(hidden_size=128)), BadModelFileError)
    assert isinstance(damaged(edit(num_hidden_layers=4)), BadModelFileError)
    assert isinstance(damaged(edit(num_hidden_layers=2)), BadModelFileError)
    assert isinstance(damaged(edit(quantization_config={"quant_method": "quark"})), UnsupportedModelError)
    assert isinstance(damaged(edit(quantization_config={"quant_method": "awq"})), BadModelFileError)
    truncated = damaged(lambda f: os.truncate(f / "model.safetensors", 5000))
    assert isinstance(truncated, BadModelFileError)


def test_a_closed_llm_says_so(tiny_llama):
    llm = LLM(str(tiny_llama), **TINY)
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        llm.generate([1], GREEDY, use_tqdm=False)


# -- interruption ------------------------------------------------------------------------------------------------------


def test_ctrl_c_stops_between_steps_and_the_engine_stays_usable(tiny):
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            tiny.generate([[1, 2, 3]] * 16, params, use_tqdm=False)
    assert not tiny.client.engine.has_work
    assert len(ids(tiny.generate([1, 2, 3], GREEDY, use_tqdm=False)[0])) == 8
    tiny.client.engine.kv.check()


def test_loading_grows_memory_by_little_more_than_what_stays(smollm2):
    """Peak anonymous memory while loading, against what is resident afterwards."""
    program = """
import re, threading, sys
from quire.config import EngineConfig
from quire.frontend.model import ModelInfo
import torch, quire.worker.worker as w
def status(key): return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
model = ModelInfo.open(EngineConfig.from_kwargs(dtype=sys.argv[1], max_model_len=512))
__import__("quire.ops.packed_linear.cpu", fromlist=["x"]).supported()  # compiled before memory is counted
before, peak, done = status("RssAnon"), 0, threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, status("RssAnon")); done.wait(0.002)
thread = threading.Thread(target=watch); thread.start()
worker = w.Worker(model.config)
done.set(); thread.join()
print(peak - before, status("RssAnon") - before, worker.weight_bytes)
"""
    for dtype in ("auto", "float32"):
        run = subprocess.run([sys.executable, "-c", program, dtype], capture_output=True, text=True, check=True)
        peak, after, weights = map(int, run.stdout.split())
        assert peak < 1.15 * after, f"{dtype}: {run.stdout}"
        # Beside weights: modules imported on the way, the persistent batch, the cache's first blocks.
        assert after < weights + 48 * 2**20, f"{dtype}: {run.stdout}"
