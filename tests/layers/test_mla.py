"""Multi-head latent attention against transformers' own, in float32: each family's kind, and every way that tokens
reach the cache."""

import dataclasses
import importlib

import pytest
import torch
import transformers
from torch import Tensor, nn

from quire.kv.specs import Latent
from quire.layers.latent.reference import LatentReference
from quire.layers.latent.triton import LatentTriton
from quire.layers.mla import MLA, MLAConfig
from quire.ops.attention.reference import AttentionTables
from tests.attached import filled

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "max_position_embeddings": 256,
    "num_hidden_layers": 1,
    "vocab_size": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "original_max_position_embeddings": 32,
}
# A family's name, what it changes, and whether neighbouring elements rotate together.
KINDS = {
    "deepseek v3": ("DeepseekV3", {"rope_parameters": YARN}, True),
    "deepseek v3, biased": ("DeepseekV3", {"attention_bias": True}, True),
    "deepseek v3, halves rotate": ("DeepseekV3", {"rope_interleave": False}, False),
    "deepseek v2": ("DeepseekV2", {"rope_parameters": YARN}, True),
    "deepseek v2, queries not compressed": ("DeepseekV2", {"q_lora_rank": None}, True),
    "minicpm 3": ("MiniCPM3", {}, False),
}
NUM_TOKENS, BLOCK_SIZE = 50, 16
# Tokens of each step, and whether a prompt that begins in it is marked as an uncached prefill.
STEPS = {
    "whole": ([50], False),
    "whole, expanded": ([50], True),
    "chunks": ([20, 1, 17, 12], False),
    "token by token": ([46, 1, 1, 1, 1], True),
}


def theirs(name: str, changes: dict) -> tuple[nn.Module, nn.Module, object]:
    """(attention, rotary embedding, config), with random, non-degenerate weights."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    modeling = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    torch.manual_seed(0)
    attention = getattr(modeling, f"{name}Attention")(config, 0).eval()
    for parameter in attention.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1)
    return attention, getattr(modeling, f"{name}RotaryEmbedding")(config), config


def ours(attention: nn.Module, hf_config, interleaved: bool) -> MLA:
    names = {field.name for field in dataclasses.fields(MLAConfig)} - {"rope_scaling", "rope_parameters"}
    values = {name: getattr(hf_config, name) for name in names if hasattr(hf_config, name)}
    config = MLAConfig(**values, rope_scaling=dict(hf_config.rope_parameters))
    layer = filled(MLA(config, config.rope(interleaved=interleaved)), attention.state_dict())
    layer.group_idx = 0
    return layer


def attend(layer: MLA, x_TD: Tensor, counts: list[int], fresh: bool, unused: int = 3) -> Tensor:
    """The layer's output over steps of one row, in scrambled blocks and with padding tokens that are not written."""
    table = torch.tensor([[3, 1, 4, 0]], dtype=torch.int32)
    layer.cache = torch.full((5, BLOCK_SIZE, layer.latent_size + layer.rope_size), torch.nan)
    outputs = []
    start = 0
    for count in counts:
        end = start + count
        positions = torch.cat((torch.arange(start, end), torch.zeros(unused, dtype=torch.int64)))
        slots = table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        slots[count:] = -1
        query_starts = torch.tensor([0, count], dtype=torch.int32)
        context_lens = torch.tensor([end], dtype=torch.int32)
        tables = AttentionTables(query_starts, context_lens, table, BLOCK_SIZE, count)
        if fresh and start == 0:
            tables = dataclasses.replace(tables, work=(), uncached_prefills=((0, count),))
        layer.context.tables[:] = [tables]
        layer.context.slots_T[:] = [slots]
        padded_TD = torch.cat((x_TD[start:end], torch.ones(unused, x_TD.shape[1])))
        with torch.inference_mode():
            outputs.append(layer(padded_TD, positions)[:count])
        start = end
    return torch.cat(outputs)


@pytest.mark.filterwarnings("ignore:invalid value")  # padding tokens are whatever memory holds
@pytest.mark.parametrize("backend", [LatentReference, LatentTriton], ids=["reference", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_computes_what_transformers_computes(kind: str, backend) -> None:
    name, changes, interleaved = KINDS[kind]
    attention, rotary, config = theirs(name, changes)
    layer = ours(attention, config, interleaved)
    layer.backend = backend
    x_TD = torch.randn(NUM_TOKENS, config.hidden_size)
    mask = torch.full((NUM_TOKENS, NUM_TOKENS), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        angles = rotary(x_TD, torch.arange(NUM_TOKENS)[None])
        expected = attention(hidden_states=x_TD[None], attention_mask=mask, position_embeddings=angles)[0][0]
    for counts, fresh in STEPS.values() if backend is LatentReference else [STEPS["chunks"]]:
        torch.testing.assert_close(attend(layer, x_TD, counts, fresh), expected, rtol=0, atol=1e-4)


def test_a_step_of_fresh_and_other_rows_computes_both() -> None:
    """A prompt that begins and a row that goes on give what each gives alone."""
    attention, _, config = theirs("DeepseekV3", {})
    layer = ours(attention, config, True)
    layer.backend = LatentReference
    x_TD, other_TD = torch.randn(2, 30, config.hidden_size)
    alone = attend(layer, x_TD, [30], False)
    other = attend(layer, other_TD, [30], False)
    attend(layer, x_TD, [29], False)  # in blocks 3 and 1; then its last token next to the other prompt, in 4 and 0
    positions = torch.cat((torch.tensor([29]), torch.arange(30)))
    slots = torch.tensor([3, 1])[positions // 16] * 16 + positions % 16
    slots[1:] = torch.tensor([4, 0])[positions[1:] // 16] * 16 + positions[1:] % 16
    table = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
    starts, lens = torch.tensor([0, 1, 31], dtype=torch.int32), torch.tensor([30, 30], dtype=torch.int32)
    layer.context.tables[:] = [AttentionTables(starts, lens, table, 16, 30, uncached_prefills=((1, 30),))]
    layer.context.slots_T[:] = [slots]
    with torch.inference_mode():
        out = layer(torch.cat((x_TD[29:], other_TD)), positions)
    torch.testing.assert_close(out[:1], alone[29:], rtol=0, atol=1e-5)
    torch.testing.assert_close(out[1:], other, rtol=0, atol=1e-5)


def test_at_published_sizes_576_values_are_kept_of_a_token() -> None:
    sizes = transformers.DeepseekV3Config()
    config = MLAConfig(
        hidden_size=sizes.hidden_size,
        num_hidden_layers=61,
        num_attention_heads=sizes.num_attention_heads,
        vocab_size=sizes.vocab_size,
        intermediate_size=sizes.intermediate_size,
    )
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert getattr(config, name) == getattr(sizes, name)
    with torch.device("meta"):
        layer = MLA(config, config.rope(interleaved=True))
    (spec,) = layer.cache_specs("bfloat16").values()
    assert spec == Latent(512, 64, "bfloat16") and spec.bytes_per_token == 1152
    bytes_of_keys_and_values = 2 * config.num_attention_heads * config.v_head_dim * 2
    assert bytes_of_keys_and_values / spec.bytes_per_token > 56
