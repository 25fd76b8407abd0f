"""Checkpoints of every published quantization hold the numbers that the library which defines it reads from them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quire import LLM
from quire.config import quantization_file
from quire.layers.base import Layer
from quire.quant.base import Choice, Joined, Method, Part, Quantized, RawTensor, Use
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
    names = {torch.int32: "I32", torch.float16: "F16"}
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
