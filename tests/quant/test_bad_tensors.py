"""Tensors of quantized checkpoints that contradict their config, or hold what is no number: refused by their names."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.checkpoint.find import find
from quire.checkpoint.hf_config import read_config
from quire.config import quantization_file
from quire.errors import BadModelFileError
from quire.quant.base import Choice, Part, Quantized, RawTensor, Section, Split, Use
from quire.quant.fp8 import Blocks
from quire.quant.gptq import Gptq, group_order
from quire.quant.kept.numbers import Numbers
from quire.quant.plain.dense import Dense
from quire.registry import load
from quire.worker.dummy import _drawn
from quire.worker.load import checkpoint_tensors
from tests.quant.published.common import SIZES
from tests.quant.test_dummy import FORMS, compressed, packed
from tests.quant.test_published import raw, slice_of

PATH = "model.layers.0.mlp.down_proj"
PART = Part(PATH, (256, 512))
STATE = ".weight.quant_state.bitsandbytes__fp4"


def method_of(settings: dict, part: Part = PART) -> Quantized:
    choose = load("quire.quant", quantization_file(settings["quant_method"])).quantization(settings)
    return choose(part.path, Choice(Use.PRODUCT, Dense, Numbers))([part], torch.float32, torch.device("cpu"))


def drawn(settings: dict) -> dict[str, RawTensor]:
    """The tensors of a weight, by the ends of their names; those that a checkpoint may lack are left out."""
    generator = torch.Generator().manual_seed(0)
    weights = [weight for weight in method_of(settings).weights() if not weight.optional]
    return {weight.name.removeprefix(PATH): _drawn(weight, generator).read() for weight in weights}


def load_all(settings: dict, tensors: dict[str, RawTensor]) -> Tensor:
    method = method_of(settings)
    for weight in method.weights():
        end = weight.name.removeprefix(PATH)
        assert weight.optional or end in tensors
        if end in tensors:
            weight.load(tensors[end])
    return method.numbers()


def with_code(code: int) -> Callable[[Tensor], Tensor]:
    """In the last place."""

    def change(values: Tensor) -> Tensor:
        codes = values.clone().view(torch.uint8)
        codes.view(-1)[-1] = code
        return codes.view(values.dtype)

    return change


def with_last(value: float) -> Callable[[Tensor], Tensor]:
    def change(values: Tensor) -> Tensor:
        values = values.clone()
        values.view(-1)[-1] = value
        return values

    return change


def with_state(**changes: object) -> Callable[[Tensor], Tensor]:
    def change(data: Tensor) -> Tensor:
        state = {**json.loads(bytes(data.tolist())), **changes}
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


BLOCK_FLOAT8 = FORMS["fp8 in blocks"][0]
STATIC = FORMS["fp8, static"][0]
STATIC_COMPRESSED = FORMS["compressed fp8, static"][0]
NESTED = FORMS["bitsandbytes fp4, nested"][0]
NAN, INF = math.nan, math.inf
CASES = [
    (BLOCK_FLOAT8, ".weight", with_code(0x7F), "not a number"),
    (BLOCK_FLOAT8, ".weight", with_code(0xFF), "not a number"),
    (STATIC, ".weight", with_code(0x7F), "not a number"),
    (FORMS["modelopt fp8"][0], ".weight", with_code(0xFF), "not a number"),
    (FORMS["compressed fp8"][0], ".weight", with_code(0x7F), "not a number"),
    (BLOCK_FLOAT8, ".weight_scale_inv", with_last(INF), "not a finite number"),
    (STATIC, ".activation_scale", with_last(0.0), "not above 0"),
    (STATIC, ".activation_scale", with_last(-1.0), "not above 0"),
    (STATIC, ".activation_scale", with_last(NAN), "not a finite number"),
    (STATIC_COMPRESSED, ".input_scale", with_last(0.0), "not above 0"),
    (FORMS["modelopt fp8"][0], ".input_scale", with_last(0.0), "not above 0"),
    (FORMS["compressed nvfp4"][0], ".weight_global_scale", with_last(0.0), "not above 0"),
    (FORMS["compressed nvfp4"][0], ".weight_scale", with_code(0x7F), "not a finite number"),
    (FORMS["compressed mxfp4"][0], ".weight_scale", with_last(255), "255, which is no power of two"),
    (FORMS["modelopt nvfp4"][0], ".weight_scale_2", with_last(NAN), "not a finite number"),
    (FORMS["compressed int8"][0], ".weight_scale", with_last(INF), "not a finite number"),
    (FORMS["compressed, packed"][0], ".weight_scale", with_last(NAN), "not a finite number"),
    (FORMS["gptq"][0], ".scales", with_last(INF), "not a finite number"),
    (FORMS["awq"][0], ".scales", with_last(NAN), "not a finite number"),
    (FORMS["bitsandbytes int8"][0], ".SCB", with_last(INF), "not a finite number"),
    (NESTED, ".weight.quant_map", with_last(NAN), "not a finite number"),
    (NESTED, ".weight.nested_quant_map", with_last(NAN), "not a finite number"),
    (NESTED, ".weight.nested_absmax", with_last(NAN), "not a finite number"),
    (FORMS["bitsandbytes nf4"][0], ".weight.absmax", with_last(INF), "not a finite number"),
    (NESTED, STATE, with_state(shape=[7, 512]), "256 x 512"),
    (NESTED, STATE, with_state(shape="x"), "256 x 512"),
    (NESTED, STATE, with_state(blocksize=128), "blocks of 64"),
    (NESTED, STATE, with_state(quant_type="nf4"), "in fp4"),
    (NESTED, STATE, with_state(nested_offset=True), "nested_offset"),
    (NESTED, STATE, with_state(nested_offset=10**400), "nested_offset"),
    (NESTED, STATE, with_state(nested_offset=NAN), "nested_offset"),
    (NESTED, STATE, with_state(nested_offset=None), "nested_offset"),
    (NESTED, STATE, lambda data: data[:0], "not a JSON object"),
]


@pytest.mark.parametrize(("settings", "end", "change", "says"), CASES)
def test_what_cannot_be_meant_is_refused_by_the_tensors_name(settings, end, change, says):
    tensors = drawn(settings)
    assert load_all(settings, tensors).isfinite().all()
    tensors[end] = raw(change(tensors[end].values()))
    with pytest.raises(BadModelFileError, match=f"{re.escape(PATH + end)} .*{re.escape(says)}"):
        load_all(settings, tensors)


def test_a_float8_weight_is_looked_at_everywhere():
    tensors = {".weight": torch.zeros(3000, 1024).to(torch.float8_e4m3fn), ".weight_scale_inv": torch.ones(24, 8)}
    part = Part("layer", (3000, 1024))
    assert Blocks((128, 128)).read(part, tensors).numbers().isfinite().all()
    for place in (0, 1 << 20, 3000 * 1024 - 1):
        codes = tensors[".weight"].clone()
        codes.view(torch.uint8).view(-1)[place] = 0x7F
        with pytest.raises(BadModelFileError, match=r"layer\.weight is not a number"):
            Blocks((128, 128)).read(part, {**tensors, ".weight": codes})


NEIGHBOURS = torch.arange(512) // 128
ORDERS = [
    (packed(4), ".weight_g_idx"),
    (packed(4, actorder="weight"), ".weight_g_idx"),
    (FORMS["gptq"][0], ".g_idx"),
]


@pytest.mark.parametrize(("settings", "end"), ORDERS)
def test_an_order_that_the_config_does_not_name_is_refused(settings, end):
    tensors = drawn(settings)
    numbers = load_all(settings, tensors)
    for groups in (NEIGHBOURS, torch.zeros(512), torch.full((512,), -1)):  # the last two say nothing
        assert torch.equal(load_all(settings, {**tensors, end: raw(groups.int())}), numbers)
    for groups in (NEIGHBOURS.flip(0), torch.arange(512) // 64, NEIGHBOURS.index_fill(0, torch.tensor([3]), 2)):
        with pytest.raises(BadModelFileError, match=f"{re.escape(PATH + end)} has inputs in another order"):
            load_all(settings, {**tensors, end: raw(groups.int())})


def test_a_rank_finds_its_inputs_in_order_too():
    part = PART._replace(split=Split("inputs", (Section(512, (2,)),)))
    own = method_of(packed(4), PART._replace(shape=(256, 256)))
    for whole, weight in zip(method_of(packed(4), part).weights(), own.weights(), strict=True):
        if weight.name.endswith("g_idx"):
            weight.load(slice_of(raw(NEIGHBOURS.int()), whole.pieces(1, 2)))


def test_an_order_that_is_none_is_refused():
    for end in (".g_idx", ".weight_g_idx"):
        for groups in ([0, 0, 0, 1], [0, 1, 2, 2], [-1, 0, 1, 1]):
            with pytest.raises(BadModelFileError, match=f"{PATH}{end} does not give each of 2 groups"):
                group_order(PART, {end: torch.tensor(groups, dtype=torch.int32)}, end, 2)
    settings = packed(4, actorder="group")
    tensors = drawn(settings)
    tensors[".weight_g_idx"] = raw(torch.zeros(512).int())
    with pytest.raises(BadModelFileError, match=rf"{PATH}\.weight_g_idx does not give each of 4 groups"):
        load_all(settings, tensors)


def test_groups_that_do_not_divide_the_inputs_are_refused():
    with pytest.raises(BadModelFileError, match="groups of 96 do not divide"):
        list(Gptq(4, 96, True, False).stored(PART))


def test_the_shape_that_a_packed_weight_says_must_be_its_own():
    tensors = drawn(packed(4))
    load_all(packed(4), {**tensors, ".weight_shape": raw(torch.tensor([256, 512]))})
    with pytest.raises(BadModelFileError, match=rf"{PATH}\.weight_shape is \[512, 256\]"):
        load_all(packed(4), {**tensors, ".weight_shape": raw(torch.tensor([512, 256]))})


def test_blocks_without_activations_do_not_round_inputs():
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    for activations, expected in ((None, None), (inputs, "float8 group")):
        settings = compressed("float-quantized", weights, activations)
        tensors = {end: tensor.values() for end, tensor in drawn(settings).items()}
        assert method_of(settings).reader.read(PART, tensors).rounds == expected


def test_a_tensor_without_bytes_is_read(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    save_file({"none": torch.zeros(0, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    ((name, tensor),) = checkpoint_tensors(find(str(tmp_path)), {})
    assert name == "none" and tensor.read().values().shape == (0,)


@pytest.mark.parametrize(("own", "others", "is_refused"), [("FP8", "NVFP4", True), ("FP8", "FP8", False)])
def test_two_configs_of_modelopt_must_not_contradict_each_other(own, others, is_refused, tmp_path):
    settings = {"quant_method": "modelopt", "quant_algo": own}
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "quantization_config": settings}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": others}}))
    save_file({"none": torch.zeros(1)}, tmp_path / "model.safetensors")
    if not is_refused:
        assert read_config(find(str(tmp_path)))["quantization_config"] == settings
        return
    with pytest.raises(BadModelFileError, match=r"config\.json .*FP8.*hf_quant_config\.json .*NVFP4"):
        read_config(find(str(tmp_path)))
