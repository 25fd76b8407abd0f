"""Checkpoints of every published quantization hold the numbers that the library which defines it reads from them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quire import LLM
from quire.config import quantization_file
from quire.errors import BadModelFileError, UnsupportedModelError
from quire.layers.base import Layer
from quire.quant.base import CODES, PLAIN, Choice, Joined, Method, Part, Quantized, RawTensor, Section, Split, Use
from quire.quant.kept.numbers import Numbers
from quire.quant.kept.packed import PackedForms
from quire.quant.plain.dense import Dense
from quire.registry import load
from tests.models.oracle import OPTIONS
from tests.quant.published import CASES, write

PATH = "model.layers.0.mlp.down_proj"
DATA = Path(__file__).parents[1] / "data/quantized"
NEEDS = {"ct": "compressed_tensors", "bnb": "bitsandbytes", "modelopt": "modelopt"}


def methods(model: torch.nn.Module) -> list[Method]:
    found: list[Method] = []
    for layer in model.modules():
        if isinstance(layer, Layer):
            for method in layer.methods:
                found.extend(method.methods if isinstance(method, Joined) else [method])
    return found


def numbers_by_path(llm: LLM) -> dict[str, torch.Tensor]:
    """The weight of every part, by its path."""
    found = {}
    for method in methods(llm.client.engine.executor.worker.model):
        rows = [part.num_rows for part in method.parts]
        found |= {part.path: values for part, values in zip(method.parts, method.numbers().split(rows))}
    return found


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_the_library_reads(name, tmp_path):
    pytest.importorskip(NEEDS.get(name.split()[0], "torch"))
    published = CASES[name]()
    with LLM(str(write(published, tmp_path)), **OPTIONS) as llm:
        found = numbers_by_path(llm)
    assert published.values.keys() <= found.keys()
    # The library multiplies int8 by a scale and then by 1 / 127, a form by both at once.
    rtol = 2e-7 if name == "bnb int8" else 0.0
    for path, expected in published.values.items():
        torch.testing.assert_close(found[path], expected, rtol=rtol, atol=0.0, msg=path)


FIXTURES = sorted(path.stem for path in DATA.glob("*.safetensors"))


def fixture(name: str) -> tuple[dict, dict[str, RawTensor], torch.Tensor]:
    """Its config, the tensors of its layer by the ends of their names, and the weight that the library reads."""
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        settings = json.loads(file.metadata()["quantization_config"])
        tensors = {key.removeprefix(PATH): file.get_tensor(key) for key in file.keys()}
    expected = tensors.pop("expected") if "expected" in tensors else tensors.pop(".expected")
    return settings, {end: raw(tensor) for end, tensor in tensors.items()}, expected


def raw(tensor: torch.Tensor) -> RawTensor:
    if tensor.dtype == torch.float8_e8m0fnu:
        tensor = tensor.view(torch.uint8)
    names = {dtype: name for name, dtype in (PLAIN | CODES).items() if name != "F8_E8M0"}
    data = tensor.contiguous().flatten().view(torch.uint8)
    return RawTensor(names[tensor.dtype], data, tuple(tensor.shape))


def loaded(name: str, kind: type[Quantized], dtype: torch.dtype) -> tuple[Quantized, torch.Tensor]:
    settings, tensors, expected = fixture(name)
    find = load("quire.quant", quantization_file(settings["quant_method"])).quantization(settings)
    make = find(PATH, Choice(Use.PRODUCT, Dense, kind))
    method = make([Part(PATH, tuple(expected.shape))], dtype, torch.device("cpu"))
    for weight in method.weights():
        end = weight.name.removeprefix(PATH)
        assert weight.optional or (weight.shape == tensors[end].shape and tensors[end].type_name in weight.types)
        if end in tensors:
            weight.load(tensors.pop(end))
    assert not tensors
    return method, expected


@pytest.mark.parametrize("name", FIXTURES)
def test_whole_numbers_are_those_that_gptqmodel_and_auto_round_read(name):
    method, expected = loaded(name, Numbers, torch.float32)
    assert torch.equal(method.numbers().half(), expected)


@pytest.mark.parametrize("name", FIXTURES)
def test_whole_numbers_stay_packed_for_the_kernels_of_cpus(name):
    method, expected = loaded(name, PackedForms, torch.bfloat16)
    assert torch.equal(method.numbers(), expected.bfloat16()) or torch.allclose(
        method.numbers().float(), expected.float(), rtol=2**-8, atol=0
    )
    bits = [piece.bits for piece in method.pieces]
    assert bits == [8 if "8bit" in name else 4]
    x = torch.randn(3, expected.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    y = x.float() @ expected.float().T
    torch.testing.assert_close(method.apply(x, None).float(), y, rtol=0.02, atol=0.02 * y.abs().max().item())


def test_patterns_of_dynamic_mean_what_gptqmodel_says():
    found = json.loads((DATA / "dynamic.json").read_text())
    find = load("quire.quant", "gptq").quantization(found["quantization_config"])
    for path, answer in found["answers"].items():
        make = find(path, Choice(Use.PRODUCT, Dense, Numbers))
        if answer is False:
            assert make is Dense, path
        else:
            assert make.reader.bits == answer.get("bits", found["quantization_config"]["bits"]), path


def slice_of(tensor: RawTensor, pieces: list[tuple[slice, ...]]) -> RawTensor:
    (piece,) = pieces
    values = tensor.values()[piece].contiguous()
    return RawTensor(tensor.type_name, values.flatten().view(torch.uint8), tuple(values.shape))


def numbers_of(settings: dict, part: Part, tensors: dict[str, RawTensor], rank: int, num_ranks: int) -> torch.Tensor:
    """What a rank keeps of a weight, of which it loads its pieces of every tensor."""
    find = load("quire.quant", quantization_file(settings["quant_method"])).quantization(settings)
    make = find(part.path, Choice(Use.PRODUCT, Dense, Numbers))
    n, k = part.shape
    own = (n // num_ranks, k) if part.split.axis == "outputs" else (n, k // num_ranks)
    whole, method = (
        make([part._replace(shape=shape)], torch.float32, torch.device("cpu")) for shape in (part.shape, own)
    )
    for declared, weight in zip(whole.weights(), method.weights(), strict=True):
        end = weight.name.removeprefix(part.path)
        if end in tensors:
            weight.load(slice_of(tensors[end], declared.pieces(rank, num_ranks)))
    return method.numbers()


def one_layer(name: str) -> tuple[dict, dict[str, RawTensor], torch.Tensor]:
    """As `fixture`, from a checkpoint that a library writes."""
    pytest.importorskip(NEEDS.get(name.split()[0], "torch"))
    published = CASES[name]()
    if OTHER not in published.values or "quantization_config" not in published.config:
        pytest.skip("this layer is plain, or hf_quant_config.json describes it")
    own = {key.removeprefix(OTHER): raw(value) for key, value in published.tensors.items() if key.startswith(OTHER)}
    return published.config["quantization_config"], own, published.values[OTHER]


OTHER = "model.layers.0.self_attn.o_proj"  # has two blocks of 128 inputs
# Inputs cannot be divided if their groups are not neighbours, or if rows follow each other in blocks.
UNDIVIDED = {"gptq_act_order", "ct w4a16 ordered by group"} | {name for name in CASES if "bnb" in name}
UNDIVIDED -= {"bnb int8"}


@pytest.mark.parametrize("axis", ["outputs", "inputs"])
@pytest.mark.parametrize("name", [*FIXTURES, *CASES])
def test_slices_of_two_ranks_are_slices_of_the_whole(name, axis):
    settings, tensors, expected = (fixture if name in FIXTURES else one_layer)(name)
    size = expected.shape[0 if axis == "outputs" else 1]
    path = PATH if name in FIXTURES else OTHER
    part = Part(path, tuple(expected.shape), Split(axis, (Section(size, (2,)),)))
    if axis == "inputs" and name in UNDIVIDED:
        with pytest.raises((BadModelFileError, UnsupportedModelError)):
            numbers_of(settings, part, tensors, 0, 2)
        return
    found = torch.cat([numbers_of(settings, part, tensors, rank, 2) for rank in range(2)], int(axis == "inputs"))
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", sorted(UNDIVIDED))
def test_weights_whose_inputs_cannot_be_divided_are_refused_with_the_size_that_would_do(name):
    settings, _, expected = (fixture if name in FIXTURES else one_layer)(name)
    find = load("quire.quant", quantization_file(settings["quant_method"])).quantization(settings)
    make = find(OTHER, Choice(Use.PRODUCT, Dense, Numbers))
    for axis, size in zip(("outputs", "inputs"), expected.shape):
        part = Part(OTHER, tuple(expected.shape), Split(axis, (Section(size, (2,)),)), num_ranks=2)
        method = make([part], torch.float32, torch.device("cpu"))
        if axis == "outputs":
            assert list(method.weights())
            continue
        with pytest.raises(UnsupportedModelError, match=rf"size 2 would cut .*{OTHER}: its .*: 1 would do"):
            list(method.weights())
