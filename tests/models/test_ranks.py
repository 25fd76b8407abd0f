"""What each rank of a parallel group would load of a checkpoint: together everything, and little of it twice."""

import json
from pathlib import Path

import pytest
import torch

from quire.checkpoint.find import find
from quire.checkpoint.hf_config import read_config
from quire.errors import UnsupportedModelError
from quire.layers.base import Layer, head_sections
from quire.layers.linear import Linear
from quire.layers.mla import MLA
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, Router
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.self_attention import SelfAttention
from quire.models import gemma4, qwen2_moe
from quire.quant.base import Section, Split, Weight, even
from quire.worker.build import empty
from quire.worker.dummy import dummy_tensors
from quire.worker.load import load_weights
from tests.attached import attached
from tests.models.oracle import all_cases

RANKS = 2
CASES = all_cases()


def built(fields: dict, folder: Path) -> torch.nn.Module:
    (folder / "config.json").write_text(json.dumps(fields))  # so that it is read as any other
    return attached(empty(read_config(find(str(folder))), "float32"))


def copies(weight: Weight, num_ranks: int = RANKS) -> torch.Tensor:
    """How many ranks take each number of the whole."""
    counts = torch.zeros(weight.shape, dtype=torch.int32)
    for rank in range(num_ranks):
        for piece in weight.pieces(rank, num_ranks):
            counts[piece] += 1
    return counts


def routers(model) -> set[Layer]:
    """Layers whose weights decide which experts are chosen, or how much an expert counts."""
    found = {m for m in model.modules() if isinstance(m, (Router, gemma4.Gemma4Router, MoE))}
    found |= {m.proj for m in model.modules() if isinstance(m, gemma4.Gemma4Router)}
    return found | {m.shared_expert_gate for m in model.modules() if isinstance(m, qwen2_moe.GatedShareMoE)}


def may_be_whole(layer: Layer, weight: Weight, model) -> bool:
    is_norm = isinstance(layer, (RMSNorm, LayerNorm))
    is_late_bias = isinstance(layer, Linear) and layer.split == "inputs" and weight.name.endswith(".bias")
    is_late_bias = is_late_bias or weight.name.endswith("down_proj_bias")  # of experts
    down_projections = [m.qkv_a_proj for m in model.modules() if isinstance(m, MLA)]
    is_down = any(layer is projection for projection in down_projections) and "_a_proj" in weight.name
    is_layer_input = any(name in weight.name for name in ("per_layer_", "inputs.projection"))  # of Gemma 4
    is_scalar = isinstance(layer, gemma4.Gemma4Layer) and weight.shape == (1,)
    is_router = layer in routers(model)
    return any((is_norm, is_late_bias, is_down, is_layer_input, is_scalar, is_router))


def key_value_rows(model) -> dict[Layer, int]:
    """Of projections with fewer KV heads than ranks: from which row on ranks share them."""
    found = {}
    for module in model.modules():
        if isinstance(module, (SelfAttention, gemma4.Gemma4Attention)) and module.attn.num_kv_heads < RANKS:
            found[module.qkv_proj] = module.qkv_proj.out_features[0]
            if module.k_norm is not None:
                found[module.k_norm] = 0
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_take_everything_and_twice_only_what_is_small(name, tmp_path):
    model = built(CASES[name], tmp_path)
    shared = key_value_rows(model)
    for layer in (m for m in model.modules() if isinstance(m, Layer)):
        for weight in layer.weights():
            counts = copies(weight)
            assert counts.min() >= 1, weight.name
            if may_be_whole(layer, weight, model):
                continue
            if layer in shared:
                is_k_or_v = "k_proj" in weight.name or "v_proj" in weight.name
                counts = counts[: 0 if is_k_or_v else shared[layer]]
            assert (counts == 1).all(), weight.name


@pytest.mark.parametrize("name", CASES)
def test_everything_that_a_model_has_is_declared(name, tmp_path):
    model = built(CASES[name], tmp_path)
    load_weights(model, dummy_tensors(model, 0, torch.device("cpu")))
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_what_a_rank_computes_is_what_its_next_layer_takes(name, tmp_path):
    """Queries of the heads that its output projection reads, gates and ups of the same columns of down."""
    model = built(CASES[name], tmp_path)
    for module in model.modules():
        if isinstance(module, (SelfAttention, gemma4.Gemma4Attention)):
            outputs, inputs = module.qkv_proj.parts()[0].split, module.o_proj.parts()[0].split
            pairs = [(outputs, inputs, module.o_proj.in_features)]
        elif isinstance(module, GatedMLP):
            down = module.down_proj
            inputs, sections = down.parts()[0].split, module.gate_up_proj.sections
            pairs = [(Split("outputs", (section,)), inputs, down.in_features) for section in sections]
        else:
            continue
        for outputs, inputs, size in pairs:
            assert (outputs.axis, inputs.axis) == ("outputs", "inputs")
            for rank in range(RANKS):
                whole = sum(section.size for section in outputs.sections)
                assert outputs.slices(whole, rank, RANKS)[0] == inputs.slices(size, rank, RANKS)[0]


def test_queries_stay_with_the_heads_they_read():
    """SmolLM2's nine heads and three KV heads over two ranks, and eight heads with two KV heads over four."""
    q, kv = head_sections(9, 3, 64)
    q_slices = [Split("outputs", (q,)).slices(q.size, rank, 2) for rank in range(2)]
    kv_slices = [Split("outputs", (kv,)).slices(kv.size, rank, 2) for rank in range(2)]
    assert q_slices == [[slice(0, 3 * 64)], [slice(3 * 64, 9 * 64)]]
    assert kv_slices == [[slice(0, 64)], [slice(64, 3 * 64)]]
    q, kv = head_sections(8, 2, 1)
    assert [q.share(rank, 4)[:2] for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [kv.share(rank, 4)[:2] for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [1, 2, 3, 7])
def test_however_heads_are_divided_each_query_head_is_with_one_rank_and_its_kv_head(num_kv_heads, group_size):
    num_heads = num_kv_heads * group_size
    q, kv = head_sections(num_heads, num_kv_heads, 1)
    for num_ranks in range(1, num_heads + 1):
        try:
            shares = [(q.share(rank, num_ranks), kv.share(rank, num_ranks)) for rank in range(num_ranks)]
        except UnsupportedModelError:
            assert num_ranks > num_kv_heads and num_ranks % num_kv_heads  # some KV head has more ranks than queries
            continue
        owners = []
        for (first, end, count), (first_kv, end_kv, _) in shares:
            heads = range(first * num_heads // count, end * num_heads // count)
            assert heads and {head // group_size for head in heads} == set(range(first_kv, end_kv))
            owners += heads
        assert sorted(owners) == list(range(num_heads))


def test_widths_divide_about_evenly_in_the_largest_blocks_that_do():
    assert [even(1536).share(rank, 4)[:2] for rank in range(2)] == [(0, 3), (3, 6)]  # of 12 blocks of 128
    assert [even(1536).width(rank, 5) for rank in range(5)] == [256, 320, 320, 320, 320]
    assert [even(99).width(rank, 2) for rank in range(2)] == [49, 50]
    with pytest.raises(UnsupportedModelError, match="2 heads, columns or rows to divide"):
        even(2).share(0, 3)


def test_packed_tensors_divide_in_whole_packs_only():
    half = Split("inputs", (Section(96, (96,)),))
    assert half.slices(96 // 32, 0, 3) == [slice(0, 1)]
    with pytest.raises(UnsupportedModelError, match="do not divide over 2 ranks"):
        half.slices(96 // 32, 0, 2)


@pytest.mark.parametrize("name", CASES)
def test_the_path_a_method_is_found_by_is_the_checkpoints(name, tmp_path):
    """Renamed as its tensors are, it is the module's path again."""
    model = built(CASES[name], tmp_path)
    for layer in (m for m in model.modules() if isinstance(m, Linear)):
        for part in layer.parts():
            name = f"{model.checkpoint_path(part.path)}.weight"
            for theirs, ours in model.renames:
                name = name.replace(theirs, ours)
            assert name == f"{part.path}.weight"
