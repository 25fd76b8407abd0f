"""Layers that read another layer's cache: what they cost, and that they do not write to it. Numbers are compared in
test_parity.py."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.kv.groups import form_layout
from quire.kv.specs import Full, Sliding
from quire.layers.attention import Attention, StepContext
from quire.layers.attention.base import Limits
from quire.layers.attention.native import Native
from quire.layers.attention.reference import Reference
from quire.models import gemma4
from quire.ops.attention.reference import AttentionTables
from quire.ops.blocks.reference import copy_blocks
from quire.worker.build import empty
from quire.worker.kv_cache import KVMemory, kv_specs
from quire.worker.runner import group_backends
from tests.models.oracle import OPTIONS, PROMPTS, assert_greedy, oracle

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
CPU = torch.device("cpu")


def answer(folder, **options):
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        return llm.generate([PROMPTS[3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_only_layers_with_a_cache_of_their_own_take_blocks():
    model = empty(gemma4.TINY, "float32")
    specs = kv_specs(model, torch.float32)
    sliding, full = Sliding(2, 16, "float32", window=24), Full(2, 32, "float32")
    assert specs == {f"model.layers.{i}.self_attn.attn:kv": spec for i, spec in enumerate((sliding, sliding, full))}
    alone = empty({**gemma4.TINY, "num_kv_shared_layers": 0}, "float32")
    bytes_shared = sum(spec.bytes_per_token for spec in specs.values())
    bytes_alone = sum(spec.bytes_per_token for spec in kv_specs(alone, torch.float32).values())
    assert bytes_alone == 2 * bytes_shared


def test_a_layer_that_shares_gets_its_owners_cache_group_and_backend():
    model = empty(gemma4.TINY, "float32")
    layers = [layer.self_attn.attn for layer in model.model.layers]
    for layer in layers:
        layer.backend_class = Native
    layout = form_layout(kv_specs(model, torch.float32), 16, num_blocks=4)
    KVMemory(layout, CPU, copy_blocks).attach(model)
    group_backends(model, layout.groups, Limits(num_rows=2, max_tokens=8, max_len=64, hidden_like=torch.empty(0)))
    for layer_idx, owner_idx in {3: 1, 4: 1, 5: 2}.items():
        layer, owner = layers[layer_idx], layers[owner_idx]
        assert layer.cache is owner.cache
        assert layer.group_idx == owner.group_idx
        assert layer.backend is owner.backend


@pytest.mark.parametrize("backend", [Reference, Native], ids=["reference", "native"])
def test_a_layer_that_shares_rotates_its_queries_and_writes_nothing(backend):
    """What it attends to is what a layer that wrote the same keys and values attends to."""
    torch.manual_seed(0)
    q_TX, kv_TX, positions_T = torch.randn(5, 4 * 16), torch.randn(5, 2 * 2 * 16), torch.arange(5)
    rope = gemma4.Rope(16, 10_000.0, None, 64)
    rope.materialize(64, CPU)
    tables = AttentionTables(
        query_starts=torch.tensor([0, 5], dtype=torch.int32),
        context_lens=torch.tensor([5], dtype=torch.int32),
        block_table=torch.ones(1, 1, dtype=torch.int32),
        block_size=16,
        max_query_len=5,
    )
    owner, sharing = Attention(4, 2, 16, rope), Attention(4, 2, 16, rope, shares="owner")
    for layer in (owner, sharing):
        layer.backend, layer.group_idx = backend, 0
        layer.context = StepContext([tables], [16 + positions_T])
    owner.cache = sharing.cache = torch.zeros(2, 2, 16, 2, 16)
    expected = owner(torch.cat((q_TX, kv_TX), 1), positions_T)
    before = owner.cache.clone()
    torch.testing.assert_close(sharing(q_TX.clone(), positions_T), expected)
    assert torch.equal(owner.cache, before) and before.any()


def test_kernels_of_gpus_share_a_cache_too(tmp_path):
    layer_types = ["sliding_attention", "full_attention", "full_attention"]
    changes = {"num_hidden_layers": 3, "layer_types": layer_types, "num_kv_shared_layers": 1}
    model = oracle({**gemma4.TINY, **changes}, tmp_path)
    options = {"interpret_triton": True, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32}
    with LLM(str(tmp_path), **{**OPTIONS, **options}) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        assert_greedy(model, PROMPTS[1], llm.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs[0].token_ids)


def test_compiled_kernels_take_blocks_padded_to_another_groups_size(tmp_path):
    model = oracle({**gemma4.TINY, "head_dim": 32, "global_head_dim": 48}, tmp_path)  # 512 and 768 bytes per token
    with LLM(str(tmp_path), **OPTIONS) as llm:
        layers = [layer.self_attn.attn for layer in llm.client.engine.executor.worker.runner.model.model.layers]
        assert [layer.cache.is_contiguous() for layer in layers] == [False, False, True] * 2
        assert all(isinstance(layer.backend, Native) for layer in layers)
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False)):
            assert_greedy(model, prompt, output.outputs[0].token_ids)


def test_keys_and_values_of_layers_that_share_are_known_and_not_needed(tmp_path):
    model = oracle(gemma4.TINY, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for part in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{part}.weight"] = tensors[f"model.layers.1.self_attn.{part}.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_greedy(model, PROMPTS[3], answer(tmp_path))


def test_sizes_of_heads_may_be_said_by_type_of_layer_as_first_published(tmp_path):
    model = oracle(gemma4.TINY, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("per_layer_config")
    (tmp_path / "config.json").write_text(json.dumps({**config, "global_head_dim": 32}))
    assert_greedy(model, PROMPTS[3], answer(tmp_path))
