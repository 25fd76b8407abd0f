"""Keys and values in 8 bits: the same tokens on all devices and however a prompt is computed, since all that attention
reads is rounded first."""

import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.config.resolve import Machine, resolve
from quire.errors import BadModelFileError, ConfigError
from quire.layers.attention import Attention, flash_attn, flashinfer, triton
from quire.messages import Abort, AddRequest
from quire.models import deepseek_v2, gemma4, qwen2
from quire.ops.attention import cudnn, triton_codes
from quire.worker.kv_cache import cache_layers
from tests.ops.codes import one_step_apart
from tests.worker.test_gpu import DEVICE, HAS_GPU, MIXED, OPTIONS, PROMPTS, answers, ids, tiny

CACHES = ("int8", "fp8")
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
CPU = {"device": "cpu"}
# With blocks as on CPUs. Interpreted, kernels take long: they do not run all of this.
DEVICES = [CPU] + [{**DEVICE, "block_size": 16}] * HAS_GPU


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2, use_sliding_window=False)


@pytest.fixture(scope="module")
def expected(model):
    return {name: ids(answers(model, MIXED, device="cpu", kv_cache_dtype=name)[0]) for name in ("auto", *CACHES)}


@pytest.mark.parametrize("name", CACHES)
def test_tokens_are_the_same_with_all_kernels(model, expected, name):
    found, _, _ = answers(model, MIXED, device="cpu", attention_backend="reference", kv_cache_dtype=name)
    assert ids(found) == expected[name]
    found, _, _ = answers(model, PARAMS, PROMPTS[:2], **DEVICE, kv_cache_dtype=name)
    assert ids(found) == ids(answers(model, PARAMS, PROMPTS[:2], device="cpu", kv_cache_dtype=name)[0])


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", CACHES)
def test_tokens_do_not_depend_on_how_prompts_are_computed(model, expected, name, device):
    options = {**device, "kv_cache_dtype": name}
    for how in ({"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 96}, {"enable_prefix_caching": False}):
        assert ids(answers(model, MIXED, **options, **how)[0]) == expected[name]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", CACHES)
def test_a_preempted_request_goes_on_with_the_same_tokens(model, name, device):
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=14, ignore_eos=True) for i in range(4)]
    options = {**device, "kv_cache_dtype": name, "enable_prefix_caching": False}
    found, preemptions, _ = answers(model, params, **options, num_gpu_blocks_override=7)
    assert ids(found) == ids(answers(model, params, **options)[0]) and preemptions


@pytest.mark.parametrize("name", CACHES)
def test_a_prompt_that_finds_its_beginning_goes_on_as_one_that_does_not(model, name):
    prompt = list(range(20, 60))
    options = {**OPTIONS, "device": "cpu", "kv_cache_dtype": name}
    with LLM(str(model), **options) as llm:
        first, again = (llm.generate([prompt], PARAMS, use_tqdm=False)[0] for _ in range(2))
    assert not first.num_cached_tokens and again.num_cached_tokens == 32
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


def codes_of(model, prompt, **options):
    """What all layers have cached after a prompt: (codes, scales) of each."""
    with LLM(str(model), **{**OPTIONS, **options}) as llm:
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        layers = cache_layers(llm.client.engine.executor.worker.model).values()
        return [(layer.cache.cpu().clone(), layer.scales.cpu().clone()) for layer in layers]


@pytest.mark.parametrize(("device", "name"), [(CPU, "int8"), (CPU, "fp8"), (DEVICE, "fp8")], ids=str)
def test_chunks_and_whole_prompts_write_the_same_codes(model, device, name, monkeypatch):
    if device is DEVICE:  # long prompts read their own keys and values instead of the cache
        monkeypatch.setattr(cudnn, "MIN_TOKENS", 16)
        monkeypatch.setattr(cudnn, "STEP", 1)
        monkeypatch.setattr(cudnn, "supports", lambda like, head_size, value_size: True)
        monkeypatch.setattr(cudnn, "uncached_prefill_attention", plain_attention)
    prompt, options = list(range(20, 64)), {**device, "kv_cache_dtype": name, "enable_prefix_caching": False}
    whole = codes_of(model, prompt, **options, max_num_batched_tokens=48)
    chunked = codes_of(model, prompt, **options, max_num_batched_tokens=17)
    num_differing = num_codes = 0
    for (cache, scales), (other_cache, other_scales) in zip(whole, chunked, strict=True):
        assert cache.any() and scales.any()
        torch.testing.assert_close(scales, other_scales, rtol=1e-5, atol=0)
        num_differing += one_step_apart(cache, other_cache)
        num_codes += 2 * len(prompt) * cache.shape[3] * cache.shape[4]
    print(f"{num_differing} of {num_codes} codes differ")
    assert num_differing <= 1e-4 * num_codes


def codes_after(engine, prompt, num_answered, disturb=lambda engine: None):
    """What all layers have cached of a prompt and the first tokens of its answer; `disturb` happens before the last."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.handle(AddRequest("a", prompt, params, 0))
    answer = []
    for count, happens in ((num_answered - 1, disturb), (num_answered, lambda engine: None)):
        while len(answer) < count:
            answer += [token for delta in engine.step().deltas for token in delta.token_ids]
        happens(engine)
    ((table,),) = (blocks.tables for blocks in engine.kv.live.values())
    layers = cache_layers(engine.executor.worker.model).values()
    found = [(layer.cache[table].cpu().clone(), layer.scales[table].cpu().clone()) for layer in layers]
    engine.handle(Abort("a"))
    engine.step()
    return answer, found


def forget_all(engine):
    """The request will compute all its tokens again."""
    engine.scheduler.preempt_all()
    engine.kv.forget_prefixes()


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", CACHES)
def test_hits_and_preempted_requests_have_the_same_codes(model, device, name):
    prompt, num_answered = list(range(20, 64)), 5
    num_tokens = len(prompt) + num_answered - 1
    with LLM(str(model), **{**OPTIONS, **device, "kv_cache_dtype": name, "pipeline_depth": 1}) as llm:
        engine = llm.client.engine
        answer, expected = codes_after(engine, prompt, num_answered)
        cases = [codes_after(engine, prompt, num_answered)]
        assert engine.stats().prefix_hits == 32
        engine.kv.forget_prefixes()
        cases.append(codes_after(engine, prompt, num_answered, forget_all))
        assert engine.stats().num_preemptions == 1
    for found_answer, found in cases:
        assert found_answer == answer
        for (cache, scales), (other_cache, other_scales) in zip(expected, found, strict=True):
            ours, theirs = (x.transpose(1, 2).flatten(0, 1)[:num_tokens] for x in (cache, other_cache))
            num_differing = one_step_apart(ours, theirs)
            print(f"{num_differing} of {ours.numel()} codes differ")
            assert num_differing <= 1e-4 * ours.numel()
            torch.testing.assert_close(scales.nan_to_num(), other_scales.nan_to_num(), rtol=1e-5, atol=0)


def plain_attention(q_THD, k_TKD, v_TKD, spans, out, *, scale):
    """As cuDNN's, in plain torch."""
    for first, count in spans:
        q, k, v = (x[first : first + count].transpose(0, 1)[None].float() for x in (q_THD, k_TKD, v_TKD))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out[first : first + count] = found[0].transpose(0, 1).to(out.dtype)


def saved(folder, config, class_name):
    """Random weights of a family's smallest config."""
    torch.manual_seed(0)
    fields = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    settings = transformers.AutoConfig.for_model(config["model_type"], **fields)
    net = getattr(transformers, class_name)(settings).float()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    net.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", [deepseek_v2, gemma4], ids=["latents", "windows and shared caches"])
def test_every_kind_of_cache_can_be_rounded(tmp_path, family):
    config = dict(family.TINY)
    folder = saved(tmp_path, config, config["architectures"][0])
    options = {"num_gpu_blocks_override": 64, "kv_cache_dtype": "fp8"}
    expected, _, _ = answers(folder, PARAMS, PROMPTS[:1], device="cpu", **options)
    found, _, _ = answers(folder, PARAMS, PROMPTS[:1], **DEVICE, **options)
    assert ids(found) == ids(expected)


def test_rounding_changes_little_but_something(model):
    """Logprobs of a prompt differ from those with a cache in float32, and not by much."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = list(range(20, 90))

    def logprobs(name):
        _, _, (output,) = answers(model, params, [prompt], device="cpu", kv_cache_dtype=name)
        return torch.tensor([entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:])])

    exact = logprobs("auto")
    for name, most in (("int8", 0.02), ("fp8", 0.1)):
        error = (logprobs(name) - exact).abs().mean()
        assert 1e-5 < error < most


def test_keys_with_large_biases_are_rounded_without_them(tmp_path, monkeypatch):
    """Qwen2.5 has such biases, in channels that turn slowly: all keys share them, so attention does not need them."""
    folder = saved(tmp_path, {**qwen2.TINY, "rope_theta": 1e6}, "Qwen2ForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("k_proj.bias")]:
        bias_KD = tensors[name].view(qwen2.TINY["num_key_value_heads"], 2, -1)
        bias_KD[..., -2:] += torch.tensor([-200.0, 300.0])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = list(range(20, 90))

    def error(name):
        plain, rounded = (
            answers(folder, params, [prompt], device="cpu", kv_cache_dtype=kind)[2][0].prompt_logprobs
            for kind in ("auto", name)
        )
        found = [(a[token].logprob, b[token].logprob) for a, b, token in zip(plain[1:], rounded[1:], prompt[1:])]
        return sum(abs(a - b) for a, b in found) / len(found)

    assert error("int8") < 0.01 and error("fp8") < 0.04
    monkeypatch.setattr(Attention, "center_keys", lambda self, bias_KD: None)
    assert error("int8") > 0.1 and error("fp8") > 0.08


def with_scales(model, folder, name, **scales):
    """The model with tensors added, as checkpoints made for a float8 cache have them."""
    tensors = load_file(model / "model.safetensors")
    for layer in range(2):
        tensors |= {f"model.layers.{layer}.self_attn.{name.format(part)}": torch.tensor(scales[part]) for part in "kv"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((model / "config.json").read_text())
    return folder


@pytest.mark.parametrize("name", ["{}_scale", "{0}_proj.{0}_scale"])
def test_scales_of_the_checkpoint_are_used(model, tmp_path, name):
    folder = with_scales(model, tmp_path, name, k=0.5, v=0.25)
    for _, scales in codes_of(folder, list(range(20, 40)), device="cpu", kv_cache_dtype="fp8"):
        keys, values = scales.unbind(1)
        assert set(keys.unique().tolist()) == {0.0, 0.5} and set(values.unique().tolist()) == {0.0, 0.25}
    for _, scales in codes_of(folder, list(range(20, 40)), device="cpu", kv_cache_dtype="int8"):
        assert len(scales.unique()) > 4


@pytest.mark.parametrize("wrong", [0.0, math.inf, -1.0])
def test_a_scale_that_is_none_is_refused_by_name(model, tmp_path, wrong):
    folder = with_scales(model, tmp_path, "{}_scale", k=0.5, v=wrong)
    with pytest.raises(BadModelFileError, match="self_attn.v_scale must be one positive number"):
        LLM(str(folder), **OPTIONS, device="cpu", kv_cache_dtype="fp8")


def settings_of(**settings):
    return {"quantization_config": {"quant_method": "compressed-tensors", **settings}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "bfloat16"),
        (settings_of(kv_cache_scheme={"num_bits": 8, "type": "float"}), "fp8"),
        (settings_of(kv_cache_scheme={"num_bits": 8, "type": "int"}), "bfloat16"),
        (settings_of(kv_cache_scheme=None), "bfloat16"),
        (settings_of(kv_cache_quant_algo="FP8"), "fp8"),
    ],
)
def test_auto_is_what_the_checkpoint_was_made_for(config, expected):
    resolved = resolve(EngineConfig.from_kwargs(), "model", "hf", config, Machine(num_cores=2))
    assert resolved.cache.kv_cache_dtype == expected
    given = EngineConfig.from_kwargs(kv_cache_dtype="int8_per_token_head")
    assert resolve(given, "model", "hf", config, Machine(num_cores=2)).cache.kv_cache_dtype == "int8"


@pytest.mark.parametrize("backend", [flash_attn, flashinfer])
def test_libraries_without_scales_say_that_they_cannot(backend, monkeypatch):
    monkeypatch.setattr(backend, "_library", lambda: (3, None))
    why = backend.why_not(torch.device("cuda"), torch.bfloat16, 128, 16, torch.int8)
    assert "leave out --kv-cache-dtype" in why


def test_a_card_without_float8_says_what_to_use(monkeypatch):
    monkeypatch.setattr(triton_codes, "capability", lambda: (8, 0))
    needs = torch.device("cuda"), torch.bfloat16, 128, 64
    assert "int8" in triton.why_not(*needs, torch.float8_e4m3fn)
    assert triton.why_not(*needs, torch.int8) is None


def test_other_types_are_refused_with_the_reason(model):
    for asked, reason in (("fp8_e5m2", "use fp8"), ("float16", "computes in float32")):
        with pytest.raises(ConfigError, match=reason):
            LLM(str(model), **OPTIONS, device="cpu", kv_cache_dtype=asked)
