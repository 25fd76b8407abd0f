"""Drafts on real runners: the tokens are those without drafts, and fewer steps are taken."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from quire import LLM, SamplingParams
from quire.core.engine import Engine
from quire.errors import ConfigError
from quire.executor.inproc import InprocExecutor
from quire.messages import AddRequest, StepOutputs
from quire.models import deepseek_v2
from quire.models.qwen3 import TINY
from quire.spec import ngram
from tests.long import long_but
from tests.worker.drafting import BigramDrafter
from tests.worker.test_gpu import DEVICE, HAS_GPU, OPTIONS, PROMPTS, model, tiny
from tests.worker.test_rounded_cache import saved

__all__ = ["model"]

PENALTIES = {"presence_penalty": 0.5, "repetition_penalty": 1.2}
EDITS = {"min_tokens": 20, "logit_bias": {5: 2.0}, "allowed_token_ids": list(range(3, 250))}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=30, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.7, seed=2, max_tokens=35, ignore_eos=True, **PENALTIES),
    SamplingParams(temperature=0, max_tokens=50, **EDITS),
]


def with_drafts(model, texts, prompts, params, **options):
    """The outputs, how many steps gave tokens, and how many requests were preempted."""
    with LLM(str(model), **{**OPTIONS, **options}) as llm:
        config = llm.client.engine.config
        executor = InprocExecutor(config)
        executor.worker.drafter = BigramDrafter(texts, TINY["vocab_size"], config.device.device)
        llm.client.engine = engine = Engine(config, executor)
        steps = []
        take_step = engine.step

        def step() -> StepOutputs:
            steps.append(take_step())
            return steps[-1]

        engine.step = step
        outputs = llm.generate(prompts, params, use_tqdm=False)
        engine.kv.check()
    return outputs, sum(bool(step_outputs.deltas) for step_outputs in steps), engine.stats().num_preemptions


def compared(model, prompts, params, **options):
    """With drafts and without: the tokens are the same."""
    with LLM(str(model), **{**OPTIONS, **options}) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    texts = [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, expected)]
    found, num_steps, num_preemptions = with_drafts(model, texts, prompts, params, **options)
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in expected]
    return expected, found, num_steps, num_preemptions


@pytest.mark.parametrize("blocks", [32, 9], ids=["room", "preemption"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("device", [{"device": "cpu"}, DEVICE] if HAS_GPU else [{"device": "cpu"}], ids=str)
def test_tokens_and_logprobs_are_those_without_drafts(model, device, depth, blocks):
    options = {**device, "pipeline_depth": depth, "num_gpu_blocks_override": blocks}
    expected, found, num_steps, num_preemptions = compared(model, PROMPTS, PARAMS, **options)
    for theirs, ours in zip(expected[1].outputs[0].logprobs, found[1].outputs[0].logprobs, strict=True):
        assert {token: entry.logprob for token, entry in ours.items()} == pytest.approx(
            {token: entry.logprob for token, entry in theirs.items()}, abs=1e-4
        )
    if blocks == 32:
        assert num_steps < 40  # of 50 and more
    else:
        assert num_preemptions > 0


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_vector_is_the_last_tokens_hidden_state(model, num_drafts):
    """As the model has it by itself, beside rows that decode, with and without drafts."""
    import torch
    from transformers import AutoModelForCausalLM

    prompts = {"a": PROMPTS[1], "b": [9, 8, 7], "c": PROMPTS[0]}
    with LLM(str(model), **OPTIONS, device="cpu") as llm:
        executor = InprocExecutor(llm.client.engine.config)
        executor.worker.drafter = BigramDrafter([[1, 2, 3]], TINY["vocab_size"], "cpu", num_drafts)
        engine = Engine(llm.client.engine.config, executor)
    for name, prompt in prompts.items():
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        engine.handle(AddRequest(name, prompt, params, 0, wants_vector=name != "c"))
    vectors, answer = {}, []
    while engine.has_work:
        for delta in engine.step().deltas:
            answer += delta.token_ids
            if delta.vector:
                vectors[delta.request_id] = delta.vector
    assert set(vectors) == {"a", "b"} and len(answer) == 6
    net = AutoModelForCausalLM.from_pretrained(model).float().eval()
    for name, vector in vectors.items():
        with torch.no_grad():
            expected = net.model(torch.tensor([prompts[name]])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(vector), expected, rtol=1e-4, atol=1e-4)


def test_kernels_of_gpus_verify_drafts_too(model):
    """Two short answers, because Triton's interpreter is slow; at depth 2 the host does not know how long rows are."""
    params = [SamplingParams(temperature=t, seed=1, max_tokens=9, ignore_eos=True) for t in (0, 0.9)]
    _, _, num_steps, _ = compared(model, PROMPTS[:2], params, **DEVICE, pipeline_depth=2)
    assert num_steps < 9


EVERY_STEP = {"num_speculative_tokens_per_batch_size": [[1, 9, 3]]}  # whatever drafts are worth
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def drafts_of(model, prompts, params, method=None, predicts=False, priority=None, **options):
    """The tokens are those without speculation; returns what was drafted.

    With `predicts` requests come with their answers, every tenth token of which is wrong.
    """
    options, how = {**OPTIONS, **options}, {"priority": priority, "use_tqdm": False}
    with LLM(str(model), **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, **how)]
    predictions = iter([[token + (i % 10 == 4) for i, token in enumerate(answer)] for answer in expected])
    with LLM(str(model), **options, speculative_config=method) as llm:
        if predicts:
            send = llm.client.send
            llm.client.send = lambda message: send(msgspec.structs.replace(message, prediction=next(predictions)))
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, **how)]
        engine = llm.client.engine
        engine.kv.check()
        stats = engine.stats()
    assert found == expected
    return stats


def looked_up(model, params, **options):
    prompts = [PROMPTS[0] * 2, PROMPTS[1], [5, 6, 7, 8] * 6, PROMPTS[0]]
    return drafts_of(model, [prompt[-40:] for prompt in prompts][: len(params)], params, NGRAM, **options)


@pytest.mark.parametrize("blocks", [32, 9], ids=["room", "preemption"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("device", [{"device": "cpu"}, DEVICE] if HAS_GPU else [{"device": "cpu"}], ids=str)
def test_prompt_lookup_changes_no_token(model, device, depth, blocks):
    stats = looked_up(model, PARAMS, **device, pipeline_depth=depth, num_gpu_blocks_override=blocks)
    assert stats.num_drafts > 0 and sum(stats.accepted_drafts) > 0
    assert stats.num_draft_tokens <= 3 * stats.num_drafts
    assert (stats.num_preemptions > 0) == (blocks == 9)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8", "pipeline_depth": 2},
        {"scheduling_policy": "priority", "priority": [3, 1, 2, 0], "max_num_seqs": 2},
    ],
    ids=["int8 cache", "fp8 cache", "priorities"],
)
def test_drafts_change_no_token_beside_other_options(model, options, method):
    settings = NGRAM if method == "ngram" else {"method": "suffix", "num_speculative_tokens": 3}
    prompts = [PROMPTS[0] * 4, PROMPTS[1], [5, 6, 7, 8] * 6, PROMPTS[0] * 2]
    stats = drafts_of(model, prompts, PARAMS, settings | EVERY_STEP, device="cpu", **options)
    assert 0 < sum(stats.accepted_drafts) < stats.num_draft_tokens


@pytest.mark.parametrize("kind", ["windows", "latents"])
@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_change_no_token_with_other_caches(tmp_path, kind, depth):
    """A window keeps the tokens that a row needs when its drafts are refused."""
    if kind == "windows":
        folder = tiny(tmp_path, num_hidden_layers=2, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    else:
        folder = saved(tmp_path, dict(deepseek_v2.TINY), "DeepseekV2ForCausalLM")
    prompts, options = [PROMPTS[0] * 4, PROMPTS[1], [5, 6, 7, 8] * 6], {"num_gpu_blocks_override": 64}
    params = [SamplingParams(temperature=t, seed=1, max_tokens=40, ignore_eos=True) for t in (0, 0.7, 0)]
    stats = drafts_of(folder, prompts, params, NGRAM | EVERY_STEP, device="cpu", pipeline_depth=depth, **options)
    assert 0 < sum(stats.accepted_drafts) < stats.num_draft_tokens


def test_kernels_of_gpus_verify_drafts_in_an_8_bit_cache(model):
    """One short answer, because Triton's interpreter is slow."""
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)]
    options = {**DEVICE, "pipeline_depth": 2, "kv_cache_dtype": "fp8"}
    assert drafts_of(model, [[5, 6, 7, 8] * 3], params, NGRAM | EVERY_STEP, **options).num_drafts > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_answers_end_at_stop_strings_and_avoid_bad_words_as_without_drafts(served_llama, smollm2, method):
    settings = NGRAM if method == "ngram" else {"method": "suffix", "num_speculative_tokens": 3}
    common = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "max_model_len": 256}
    common |= {"tokenizer": str(smollm2), "kv_cache_memory_bytes": 16 << 20}
    prompts = ["one two three one two three one", "yes no yes no yes no", "again and again and again"]
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(served_llama[0], **common) as llm:
        free = [output.outputs[0] for output in llm.generate(prompts, greedy, use_tqdm=False)]
        stop = free[0].text[-9:-6]
        word = llm.get_tokenizer().decode([free[1].token_ids[30]])
        params = [
            SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=[stop]),
            SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, bad_words=[word]),
            SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=60, ignore_eos=True),
        ]
        expected = llm.generate(prompts, params, use_tqdm=False)
    assert expected[0].outputs[0].stop_reason == stop
    assert expected[1].outputs[0].token_ids != free[1].token_ids
    with LLM(served_llama[0], **common, speculative_config=settings | EVERY_STEP) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        assert sum(llm.client.engine.stats().accepted_drafts) > 0
    for ours, theirs in zip(found, expected, strict=True):
        for mine, its in zip(ours.outputs, theirs.outputs, strict=True):
            assert (mine.token_ids, mine.text, mine.stop_reason) == (its.token_ids, its.text, its.stop_reason)


def test_nothing_is_looked_up_in_full_steps(model, monkeypatch):
    """Where no draft would be verified; and looking up begins again when there is room."""
    asked = []
    draft = ngram.Drafter.draft

    def counted(self, rows_R, lengths, tokens):
        asked.append(len(rows_R))
        return draft(self, rows_R, lengths, tokens)

    monkeypatch.setattr(ngram.Drafter, "draft", counted)
    table = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 9, 0]]}
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (10, 30)]
    options = {**OPTIONS, "device": "cpu", "speculative_config": NGRAM | table}
    with LLM(str(model), **options) as llm:
        llm.generate([[5, 6, 7, 8] * 3] * 2, params, use_tqdm=False)
        assert llm.client.engine.stats().num_drafts > 0
    assert set(asked) == {1} and len(asked) <= 20


def test_kernels_of_gpus_look_up_too(model):
    params = [SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)] * 2
    stats = looked_up(model, params, **DEVICE, pipeline_depth=2)
    assert stats.num_drafts > 0


SYNTHETIC = {"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "synthetic"}
ONE_BY_ONE = {"device": "cpu", "pipeline_depth": 1}


@pytest.mark.parametrize("device", long_but([ONE_BY_ONE, DEVICE | {"pipeline_depth": 2}], ONE_BY_ONE), ids=str)
def test_drafts_count_as_right_by_chance(model, device):
    """As often as was asked for, in each place."""
    is_fast = "interpret_triton" not in device
    tokens, bound = (240, 0.1) if is_fast else (60, 0.25)
    rates = [0.8, 0.64, 0.512, 0.4096]
    table = {"num_speculative_tokens_per_batch_size": [[1, 9, 4]]}
    settings = SYNTHETIC | table | {"synthetic_acceptance_rates": rates}
    options = {**OPTIONS, **device, "load_format": "dummy", "max_model_len": 256, "speculative_config": settings}
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with LLM(str(model), **{**options, "num_gpu_blocks_override": 200}) as llm:
        outputs = llm.generate([[5, 6, 7]] * 2, params, use_tqdm=False)
        stats = llm.client.engine.stats()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [tokens] * 2
    assert [accepted / stats.num_drafts for accepted in stats.accepted_drafts] == pytest.approx(rates, abs=bound)


def test_only_random_weights_take_chances(model):
    settings = SYNTHETIC | {"synthetic_acceptance_length": 3}
    with pytest.raises(ConfigError, match="needs --load-format dummy"):
        LLM(str(model), **{**OPTIONS, "device": "cpu"}, speculative_config=settings)


def test_nothing_is_guessed_beside_an_operators_own_processor(model):
    processor = "tests.sampling.test_custom:After"
    options = {**OPTIONS, "device": "cpu", "logits_processors": [processor], "speculative_config": NGRAM}
    with LLM(str(model), **options) as llm:
        llm.generate([[5, 6, 7, 8] * 6], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
        assert llm.client.engine.stats().num_drafts == 0


@pytest.fixture(scope="module")
def perturbed(model, tmp_path_factory):
    """A copy of the model that mostly agrees with it."""
    folder = tmp_path_factory.mktemp("perturbed")
    tensors = load_file(model / "model.safetensors")
    torch.manual_seed(1)
    for name, values in tensors.items():
        tensors[name] = values + 0.02 * values.std() * torch.randn_like(values)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((model / "config.json").read_text())
    return folder


def drafted(model, draft, params, **options):
    # With a table, since a draft model as large as the model is not worth its time.
    table = {"num_speculative_tokens_per_batch_size": [[1, 99, 3]]}
    method = {"method": "draft_model", "model": str(draft), **table}
    return drafts_of(model, PROMPTS[: len(params)], params, method, **options)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("device", [{"device": "cpu"}, DEVICE] if HAS_GPU else [{"device": "cpu"}], ids=str)
def test_a_model_that_drafts_for_itself_is_always_right(model, device, depth):
    """At any temperature, because both draw with the same noise."""
    params = [SamplingParams(temperature=t, seed=3, max_tokens=40, ignore_eos=True) for t in (0, 0.8, 1.5)]
    stats = drafted(model, model, params, **device, pipeline_depth=depth)
    assert sum(stats.accepted_drafts) == stats.num_draft_tokens > 40


@pytest.mark.parametrize("blocks", [64, 12], ids=["room", "preemption"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("device", [{"device": "cpu"}, DEVICE] if HAS_GPU else [{"device": "cpu"}], ids=str)
def test_a_draft_model_changes_no_token(model, perturbed, device, depth, blocks):
    stats = drafted(model, perturbed, PARAMS, **device, pipeline_depth=depth, num_gpu_blocks_override=blocks)
    print(stats.accepted_drafts, stats.num_draft_tokens)
    assert 0.2 * stats.num_draft_tokens < sum(stats.accepted_drafts) < 0.95 * stats.num_draft_tokens
    assert (stats.num_preemptions > 0) == (blocks == 12)


def test_kernels_of_gpus_run_draft_models(model):
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 2
    stats = drafted(model, model, params, **DEVICE, pipeline_depth=2)
    assert sum(stats.accepted_drafts) == stats.num_draft_tokens > 4


def test_a_draft_model_reads_what_it_did_not_guess_for(model):
    """In full steps nothing is guessed; when there is room again, its guesses are right at once."""
    table = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 9, 0]]}
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (12, 40)]
    method = {"method": "draft_model", "model": str(model), **table}
    with LLM(str(model), **{**OPTIONS, "device": "cpu"}, speculative_config=method) as llm:
        llm.generate(PROMPTS[:2], params, use_tqdm=False)
        stats = llm.client.engine.stats()
    assert sum(stats.accepted_drafts) == stats.num_draft_tokens > 10


def test_a_draft_model_must_be_as_long_and_speak_the_same_tokens(model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    with pytest.raises(ConfigError, match="the draft model has 32 positions, and max_model_len is"):
        LLM(str(model), **OPTIONS, speculative_config={"method": "draft_model", "model": str(tmp_path)})


def test_a_draft_model_of_another_vocabulary_is_refused(served_llama, smollm2, tmp_path):
    """By its tokenizer, or if it has none, by how many tokens it knows; a few more or less are padding."""
    config = json.loads((Path(served_llama[0]) / "config.json").read_text())
    common = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "tokenizer": str(smollm2)}
    common |= {"max_model_len": 64, "kv_cache_memory_bytes": 16 << 20}

    def opened(vocab_size: int) -> LLM:
        (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
        return LLM(
            served_llama[0],
            **common,
            speculative_config={"method": "draft_model", "model": str(tmp_path), **EVERY_STEP},
        )

    with pytest.raises(ConfigError, match="has another vocabulary: 32,000 tokens, not 49,152"):
        opened(32000)
    with opened(49152 + 64) as llm:
        llm.generate(["one two three"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert llm.client.engine.stats().num_drafts > 0
    other = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    other.decoder = ByteLevel()
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="has another vocabulary: its token 0 is"):
        opened(49152)


def predicted(model, params, **options):
    return drafts_of(model, PROMPTS[: len(params)], params, predicts=True, **options)


@pytest.mark.parametrize("blocks", [32, 9], ids=["room", "preemption"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("device", [{"device": "cpu"}, DEVICE] if HAS_GPU else [{"device": "cpu"}], ids=str)
def test_predictions_change_no_token(model, device, depth, blocks):
    """Penalties, logprobs and forbidden tokens count the drafts before each place."""
    stats = predicted(model, PARAMS, **device, pipeline_depth=depth, num_gpu_blocks_override=blocks)
    assert 0.3 * stats.num_draft_tokens < sum(stats.accepted_drafts) < stats.num_draft_tokens
    assert (stats.num_preemptions > 0) == (blocks == 9)


def test_one_request_at_a_time_may_be_predicted(model):
    params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)] * 2
    assert sum(predicted(model, params, device="cpu", max_num_seqs=1).accepted_drafts) > 20


def test_kernels_of_gpus_verify_predictions(model):
    params = [SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)] * 2
    assert sum(predicted(model, params, **DEVICE, pipeline_depth=2).accepted_drafts) > 4


def test_nothing_is_predicted_beside_an_operators_own_processor(model):
    params = [SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)]
    stats = predicted(model, params, device="cpu", logits_processors=["tests.sampling.test_custom:After"])
    assert stats.num_drafts == 0
