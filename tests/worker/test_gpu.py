"""The runner and kernels of GPUs give the same tokens as the CPU's: on a GPU if there is one, else interpreted."""

import contextlib
import json
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.errors import ConfigError
from quire.layers.attention import flash_attn, flashinfer
from quire.models.qwen3 import TINY
from quire.ops.attention import cudnn
from quire.worker.choose import Chooser
from quire.worker.gpu.graphs import Graphs, fit, ladder
from tests.core.harness import ToyTier
from tests.layers import test_flash_attn, test_flashinfer

HAS_GPU = torch.cuda.is_available()
DEVICE = {"device": "cuda"} if HAS_GPU else {"device": "cpu", "interpret_triton": True}
OPTIONS = {
    "load_format": "auto",
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 32,
}
PROMPTS = [[5, 6, 7, 8, 9], list(range(20, 60)), [3], list(range(20, 60))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2, use_sliding_window=False)


def tiny(folder, **changes):
    """Random weights at a tiny shape."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = {**TINY, **changes}
    fields = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    net = Qwen3ForCausalLM(Qwen3Config(**fields)).float()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    net.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answers(model, params, prompts=PROMPTS, **options):
    with LLM(str(model), **{**OPTIONS, **options}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        preemptions = llm.client.engine.stats().num_preemptions
    return [output.outputs[0] for output in outputs], preemptions, outputs


def ids(choices):
    return [choice.token_ids for choice in choices]


MIXED = [
    SamplingParams(temperature=t, seed=i, max_tokens=5 + i, ignore_eos=True) for i, t in enumerate((0, 0.8, 0, 0.5))
]


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_equal_the_cpus_with_chunked_prompts_and_prefix_hits(model, depth):
    expected, _, _ = answers(model, MIXED, device="cpu")
    found, _, _ = answers(model, MIXED, **DEVICE, pipeline_depth=depth)
    assert ids(found) == ids(expected)


@pytest.mark.parametrize("device", [{"device": "cpu"}, DEVICE], ids=["cpu", "gpu"])
def test_blocks_pushed_out_of_the_pool_come_back_with_their_numbers(model, device):
    prompt = list(range(20, 53))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    others = [[100 + i] * 40 for i in range(2)]
    tier = ToyTier(100)
    small = {"num_gpu_blocks_override": 5, "max_num_seqs": 1, "max_model_len": 48}
    with LLM(str(model), **{**OPTIONS, **device, **small}) as llm:
        llm.client.engine = Engine(llm.client.engine.config, tier=tier)
        first, *_, again = llm.generate([prompt, *others, prompt], params, use_tqdm=False)
    assert again.num_cached_tokens == 32 and tier.num_found > 0
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    (expected,), _, _ = answers(model, params, [prompt], device="cpu", enable_prefix_caching=False)
    assert first.outputs[0].token_ids == expected.token_ids


def test_prompts_that_skip_the_cache_give_the_same_tokens(model, monkeypatch):
    monkeypatch.setattr(cudnn, "MIN_TOKENS", 16)
    monkeypatch.setattr(cudnn, "STEP", 1)
    monkeypatch.setattr(cudnn, "supports", lambda like, head_size, value_size: True)
    called = []
    run = cudnn.uncached_prefill_attention

    def noted(*args, **options):
        called.append(args[3])
        return run(*args, **options)

    monkeypatch.setattr(cudnn, "uncached_prefill_attention", noted)
    monkeypatch.setattr(cudnn, "sdpa_kernel", lambda backend: contextlib.nullcontext())  # cuDNN itself takes no float32
    expected, _, _ = answers(model, MIXED, device="cpu")
    found, _, _ = answers(model, MIXED, **DEVICE, enable_prefix_caching=False)
    assert ids(found) == ids(expected)
    assert called


def test_groups_of_one_kind_share_what_is_planned_of_a_step(tmp_path):
    windows = dict(use_sliding_window=True, sliding_window=16, max_window_layers=1)
    folder = tiny(tmp_path, num_hidden_layers=4, layer_types=["full_attention"] + ["sliding_attention"] * 3, **windows)
    prompts = [[5, 6, 7], list(range(20, 42))]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    expected, _, _ = answers(folder, params, prompts, device="cpu", num_gpu_blocks_override=64)
    with LLM(str(folder), **{**OPTIONS, **DEVICE, "num_gpu_blocks_override": 64}) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        backends = llm.client.engine.executor.worker.runner.inputs.backends
        assert [backend.twin for backend in backends] == [None, None, backends[1], backends[1]]
    assert ids(output.outputs[0] for output in found) == ids(expected)


def test_tokens_equal_the_cpus_when_requests_are_preempted(model):
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=14, ignore_eos=True) for i in range(4)]
    expected, _, _ = answers(model, params, device="cpu")
    found, preemptions, _ = answers(model, params, **DEVICE, num_gpu_blocks_override=7, enable_prefix_caching=False)
    assert ids(found) == ids(expected)
    assert preemptions


SPECIAL = [
    dict(temperature=0, logprobs=3, prompt_logprobs=2),
    dict(temperature=1.0, top_k=5, logit_bias={7: 3.0}),
    dict(temperature=0, repetition_penalty=1.4, presence_penalty=0.5, min_tokens=3, stop_token_ids=[9]),
    dict(temperature=0.7, top_p=0.8, min_p=0.02, allowed_token_ids=list(range(30, 90))),
    dict(temperature=1.0, top_p=1e-50),  # 0 in float32
]


def test_everything_a_request_can_ask_of_sampling_is_as_on_the_cpu(model):
    params = [SamplingParams(**kind, seed=i, max_tokens=5, ignore_eos=True) for i, kind in enumerate(SPECIAL)]
    prompts = [*PROMPTS, [8, 9]]
    expected, _, expected_outputs = answers(model, params, prompts, device="cpu")
    found, _, found_outputs = answers(model, params, prompts, **DEVICE)
    assert ids(found) == ids(expected)
    assert_same_logprobs(found[0].logprobs, expected[0].logprobs)
    assert_same_logprobs(found_outputs[0].prompt_logprobs, expected_outputs[0].prompt_logprobs)


def assert_same_logprobs(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert list(ours) == list(theirs)
            for token_id, entry in ours.items():
                assert entry.logprob == pytest.approx(theirs[token_id].logprob, abs=1e-3)


def test_a_ladder_ends_at_the_largest_and_pads_little():
    sizes = ladder(256, smallest=1, step=4, largest_step=16)
    assert sizes[0] == 1 and sizes[-1] == 256
    assert all(fit(sizes, n) - n <= max(3, n // 4) for n in range(1, 257))
    assert ladder(100, smallest=64, step=64, largest_step=512) == [64, 100]


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_a_triton_backend_without_a_gpu_is_refused(model):
    options = "device='cpu', attention_backend='triton', skip_tokenizer_init=True"
    program = f"from quire import LLM; LLM({str(model)!r}, {options})"
    env = {"TRITON_INTERPRET": "0", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.returncode and "needs an NVIDIA GPU" in done.stderr


@pytest.mark.parametrize("name", ["flash_attn_interface", "flashinfer"])
def test_tokens_equal_the_cpus_with_the_librarys_attention(model, name, monkeypatch):
    """The library is replaced by the stand-ins of its backend's tests, in float32 and without graphs."""
    library = ModuleType(name)
    library.flash_attn_with_kvcache = test_flash_attn.flash_attn_with_kvcache
    library.BatchPrefillWithPagedKVCacheWrapper = test_flashinfer.BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, name, library)
    backend = flashinfer if name == "flashinfer" else flash_attn
    monkeypatch.setattr(backend, "why_not", lambda *args, **needs: None)
    monkeypatch.setattr(backend.BACKEND, "is_recordable", False)
    flash_attn._library.cache_clear()
    backend_name = backend.__name__.rsplit(".", 1)[1]
    expected, _, _ = answers(model, MIXED, device="cpu")
    found, _, _ = answers(model, MIXED, **DEVICE, attention_backend=backend_name, pipeline_depth=2)
    assert ids(found) == ids(expected)
    flash_attn._library.cache_clear()


@pytest.mark.parametrize("name", ["native", "reference"])
def test_a_cpus_attention_backend_is_refused_on_a_gpu(name):
    config = EngineConfig.from_kwargs(device="cuda", dtype="bfloat16", attention_backend=name)
    with pytest.raises(ConfigError, match=f"{name} is for the CPU"):
        Chooser(config)("attention", head_size=128, block_size=16)


def test_a_graph_that_cannot_be_recorded_between_steps_is_done_without(caplog):
    graphs = Graphs(lambda key: None, torch.device("cpu"))
    graphs.to_record = ["large", "small"]

    def fail(key):
        raise RuntimeError("CUDA out of memory\nand much more")

    graphs.capture = fail
    graphs.record_next()
    assert graphs.to_record == []
    assert "slower: CUDA out of memory" in caplog.text and "much more" not in caplog.text
