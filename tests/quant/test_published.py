"""Checkpoints of every published quantization hold the numbers that the library which defines it reads from them.

So do layers give what its layers give, for any number of rows, and whole models what transformers gives.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from safetensors import safe_open

from quire import LLM, SamplingParams
from quire.config import quantization_file
from quire.errors import BadModelFileError, UnsupportedModelError
from quire.layers.base import Layer
from quire.quant.base import ANY, CODES, PLAIN, Choice, Joined, Method, Part, Quantized, RawTensor, Section, Split, Use
from quire.quant.kept.numbers import Numbers
from quire.quant.kept.packed import PackedForms
from quire.quant.kept.triton import Words
from quire.quant.plain.dense import Dense
from quire.registry import load
from tests.models import oracle
from tests.models.oracle import PROMPTS, TOLERANCE, logprobs
from tests.quant.published import CASES, SIZES, Published, write
from tests.quant.published.common import weights

PATH = "model.layers.0.mlp.down_proj"
DATA = Path(__file__).parents[1] / "data/quantized"
KEPT = Path(__file__).with_name("kept")
NEEDS = {"fp8": "compressed_tensors", "ct": "compressed_tensors", "bnb": "bitsandbytes", "modelopt": "modelopt"}
OPTIONS = {**oracle.OPTIONS, "device": "cpu"}
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"  # of kernels for GPUs


@functools.cache
def made(name: str) -> Published:
    """A case, made once by its library."""
    pytest.importorskip(NEEDS[name.split()[0]])
    return CASES[name]()


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


def prompt_logprobs(llm: LLM) -> torch.Tensor:
    """Of a prompt's tokens, but for the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    found = llm.generate([PROMPTS[3]], params, use_tqdm=False)[0].prompt_logprobs
    return torch.tensor([entry[token].logprob for entry, token in zip(found[1:], PROMPTS[3][1:])])


def logprobs_by_transformers(published: Published) -> torch.Tensor:
    """With the weights that the library reads."""
    fields = {name: value for name, value in published.config.items() if name in SIZES and name != "architectures"}
    config = transformers.AutoConfig.for_model(**fields | {"dtype": "float32"})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.load_state_dict(published.plain())
    return of_prompt(model)


def of_prompt(model: torch.nn.Module) -> torch.Tensor:
    return logprobs(model, PROMPTS[3])[:-1].gather(1, torch.tensor(PROMPTS[3][1:])[:, None])[:, 0]


@pytest.mark.parametrize("name", CASES)
def test_weights_and_logprobs_are_those_that_the_library_reads(name, tmp_path):
    published = made(name)
    with LLM(str(write(published, tmp_path)), kv_cache_dtype="float32", **OPTIONS) as llm:
        found, logprobs_found = numbers_by_path(llm), prompt_logprobs(llm)
    torch.testing.assert_close(logprobs_found, logprobs_by_transformers(published), rtol=0, atol=TOLERANCE)
    assert published.values.keys() <= found.keys()
    # Two scales are multiplied in another order: of int8 one is 1 / 127, of NVFP4 one is the whole tensor's.
    rtol = 2e-7 if name == "bnb int8" or "nvfp4" in name else 0.0
    for path, expected in published.values.items():
        torch.testing.assert_close(found[path], expected, rtol=rtol, atol=0.0, msg=path)


@pytest.mark.parametrize("device", ["cpu"] + ["cuda"] * HAS_GPU)
@pytest.mark.parametrize("name", ["fp8 blocks", "ct w4a16 asymmetric", "ct nvfp4", "bnb nf4", "modelopt fp8"])
def test_logprobs_in_16_bits_are_near_those_that_the_library_gives_in_32(name, device, tmp_path):
    """A case of every library. On average they differ by 0.017 on CPUs, by up to 0.11 on GPUs, which round inputs."""
    published = made(name)
    with LLM(str(write(published, tmp_path)), **OPTIONS | {"device": device, "dtype": "bfloat16"}) as llm:
        found = prompt_logprobs(llm)
    assert (found - logprobs_by_transformers(published)).abs().mean() < (0.04 if device == "cpu" else 0.12)


# Dequantized to bfloat16, which rounds weights except those of MXFP4. Found: at most 0.029.
LOADED = {"ct fp8 per channel": 0.06, "ct int8 per channel": 0.06, "ct w4a16 groups": 0.06, "ct mxfp4": TOLERANCE}


@pytest.mark.parametrize("name", LOADED)
def test_logprobs_are_those_of_the_same_folder_loaded_by_transformers(name, tmp_path):
    """It needs another package, accelerate, for checkpoints of other libraries."""
    folder = write(made(name), tmp_path)
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, **options)
    with LLM(str(folder), **OPTIONS) as llm:
        found = prompt_logprobs(llm)
    torch.testing.assert_close(found, of_prompt(model.float().eval()), rtol=0, atol=LOADED[name])


FIXTURES = sorted(path.stem for path in DATA.glob("*.safetensors"))


def fixture(name: str) -> tuple[dict, dict[str, RawTensor], torch.Tensor]:
    """Its config, the tensors of its layer by the ends of their names, and the weight that the library reads."""
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        settings = json.loads(file.metadata()["quantization_config"])
        tensors = {key.removeprefix(PATH): file.get_tensor(key) for key in file.keys()}
    expected = tensors.pop("expected") if "expected" in tensors else tensors.pop(".expected")
    return settings, {end: raw(tensor) for end, tensor in tensors.items()}, expected


def raw(tensor: torch.Tensor) -> RawTensor:
    names = {dtype: name for name, dtype in (PLAIN | CODES | {"F8_E8M0": torch.float8_e8m0fnu}).items()}
    data = tensor.contiguous().flatten().view(torch.uint8)
    return RawTensor(names[tensor.dtype], data, tuple(tensor.shape))


def loaded(name: str, kind: type[Quantized], dtype: torch.dtype) -> tuple[Quantized, torch.Tensor]:
    settings, tensors, expected = fixture(name)
    return build(settings, tensors, PATH, expected.shape, kind, dtype), expected


def build(
    settings: dict,
    tensors: dict[str, RawTensor],
    path: str,
    shape: tuple[int, ...],
    kind: type[Quantized],
    dtype: torch.dtype,
) -> Quantized:
    """A layer with its weight."""
    find = load("quire.quant", quantization_file(settings["quant_method"])).quantization(settings)
    make = find(path, Choice(Use.PRODUCT, Dense, kind, is_gpu=kind is Words))
    device = torch.device(DEVICE if kind is Words else "cpu")
    method = make([Part(path, tuple(shape))], dtype, device)
    given = dict(tensors)
    for weight in method.weights():
        end = weight.name.removeprefix(path)
        if end in given:
            tensor = given.pop(end)
            assert weight.shape in (tensor.shape, (ANY,)) and tensor.type_name in weight.types
            weight.load(replace(tensor, raw=tensor.raw.to(device)))
        else:
            assert weight.optional
    assert not given
    return method


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


# ---- outputs of layers ----

ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 64, 300)
FEW_ROWS = ROWS if HAS_GPU else (1, 17)  # interpreted; tests/ops/test_triton_packed.py has those between
# The largest error of an output, in units of the root of the sum of its squared products: a scale that is wrong by a
# factor 2 for 16 of 256 inputs changes it by 0.25 on average, and by more in some of the rows.
CPU_TOLERANCE = 0.015  # weights are rounded to bfloat16; found: 0.0083
GPU_TOLERANCE = 0.04  # weights, sums and outputs are cut to bfloat16; found: 0.024
# How inputs are rounded. With a scale of the inputs' own, a library's is another than ours: a row's largest number
# becomes 448 of float8, for us 256, and 127.5 of int8, for us 127. So two roundings differ. Found: 0.144 and 0.035.
ROUNDED_TOLERANCE = {"float8 token": 0.2, "float8 group": 0.2, "int8 token": 0.06}
ROUNDS = {
    **dict.fromkeys(
        ("fp8 blocks", "fp8 partial blocks", "fp8 blocks, scales in e8m0", "ct fp8 blocks"), "float8 group"
    ),
    **dict.fromkeys(("fp8 per tensor", "ct fp8 per tensor", "modelopt fp8"), "float8 static"),
    "ct fp8 per channel": "float8 token",
    "ct int8 per channel": "int8 token",
}
# Cases whose layers are like another's; only their configs or other layers are not.
ALIKE = {
    "fp8 blocks, powers of two in float32", "ct fp8 per tensor, unlike q k v", "ct fp8 per tensor, older config",
    "ct fp8 partial blocks", "ct w4a16 ordered, scales in order", "ct nvfp4 weights", "ct mxfp4 weights", "ct mixed",
    "modelopt fp8, only hf_quant_config.json", "modelopt fp8, cache in fp8",
    "modelopt nvfp4, attention of layer 1 plain",
}  # fmt: skip
KEYS = "model.layers.0.self_attn.k_proj"


class Given(NamedTuple):
    """A layer as published, and what its library computes."""

    settings: dict
    path: str
    tensors: dict[str, RawTensor]
    values: torch.Tensor  # the weight in float32
    outputs: Callable[[torch.Tensor], torch.Tensor]

    def built(self, kind: type[Quantized], dtype: torch.dtype) -> Quantized:
        return build(self.settings, self.tensors, self.path, self.values.shape, kind, dtype)


def given(name: str) -> Given:
    if name in FIXTURES:
        settings, tensors, expected = fixture(name)
        values = expected.float()
        return Given(settings, PATH, tensors, values, lambda x: x @ values.T)
    if (kept := KEPT / f"{name}.pt").exists():
        settings, path, plain, values, outputs = torch.load(kept)
        tensors = {end: raw(tensor) for end, tensor in plain.items()}
        return Given(json.loads(settings), path, tensors, values, lambda x: outputs[: len(x)])
    path = PATH if "partial" in name or "mixed" in name else KEYS
    settings, tensors, values = one_layer(name, path)
    return Given(settings, path, tensors, values, functools.partial(made(name).outputs, path))


def keep(name: str) -> None:
    """Writes what `given` returns, for machines that lack the library."""
    layer = given(name)
    with torch.no_grad():
        outputs = layer.outputs(inputs(max(ROWS), layer.values.shape[1]).float())
    tensors = {end: made(name).tensors[layer.path + end] for end in layer.tensors}
    KEPT.mkdir(exist_ok=True)
    torch.save((json.dumps(layer.settings), layer.path, tensors, layer.values, outputs), KEPT / f"{name}.pt")


def inputs(num_rows: int, k: int) -> torch.Tensor:
    """Rows of different sizes; the largest numbers are too large for the checkpoints' scales."""
    x = torch.randn(num_rows, k, generator=torch.Generator().manual_seed(0))
    return (x * 2.0 ** (torch.arange(num_rows) * 3 % 7 - 3)[:, None]).bfloat16()


def error(y: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> float:
    """The largest, of the root of the sum of an output's squared products."""
    sizes = (x.double().square() @ values.double().square().T).sqrt()
    return ((y.double() - expected.double()).abs() / sizes).max().item()


@pytest.mark.parametrize("name", [*FIXTURES, *CASES])
def test_outputs_on_cpus_are_inputs_times_the_librarys_weight(name):
    """There no inputs are rounded to 8 bits."""
    layer = given(name)
    method = layer.built(PackedForms, torch.bfloat16)
    x = inputs(max(ROWS), layer.values.shape[1])
    expected = x.float() @ layer.values.T
    for num_rows in ROWS:
        y = method.apply(x[:num_rows], None, torch.float32)
        assert error(y, expected[:num_rows], x[:num_rows], layer.values) < CPU_TOLERANCE, num_rows


@pytest.mark.parametrize("name", [*FIXTURES, *(name for name in CASES if name not in ALIKE)])
def test_outputs_of_the_kernels_of_gpus_are_those_of_the_librarys_layer(name):
    """In bfloat16, which Triton's interpreter cuts instead of rounding it."""
    layer = given(name)
    method = layer.built(Words, torch.bfloat16)
    rounds = method.pieces[0].rounds
    assert rounds == ROUNDS.get(name)
    x = inputs(max(FEW_ROWS), layer.values.shape[1])
    with torch.no_grad():
        expected = layer.outputs(x.float())
    for num_rows in FEW_ROWS:
        y = method.apply(x[:num_rows].to(DEVICE), None).cpu()
        tolerance = ROUNDED_TOLERANCE.get(rounds, GPU_TOLERANCE)
        assert error(y, expected[:num_rows], x[:num_rows], layer.values) < tolerance, num_rows


@pytest.mark.parametrize("k", [128, 256, 384])
def test_a_scale_that_is_wrong_for_a_few_inputs_is_seen(k):
    """Even by the largest of the tolerances."""
    x, values = inputs(max(FEW_ROWS), k).float(), torch.randn(64, k, generator=torch.Generator().manual_seed(1))
    wrong = values.clone()
    wrong[:, :16] *= 2
    assert error(x @ wrong.T, x @ values.T, x, values) > 2 * max(ROUNDED_TOLERANCE.values())


def fixture_model(name: str) -> Published:
    """A small model whose down projection is the fixture's."""
    settings, _, expected = fixture(name)
    plain = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up")]
    hidden, inner = expected.shape
    sizes = {**SIZES, "hidden_size": hidden, "intermediate_size": inner, "head_dim": 16, "num_hidden_layers": 1}
    config = sizes | {"quantization_config": settings | {"modules_to_not_convert": plain}}
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        own = {key: file.get_tensor(key) for key in file.keys() if not key.endswith("expected")}
    others = {key: value for key, value in weights(sizes, dtype=torch.float32).items() if PATH not in key}
    return Published(config, others | own, {PATH: expected.float()})


@pytest.mark.parametrize("name", FIXTURES)
def test_logprobs_are_those_of_the_weights_that_gptqmodel_and_auto_round_read(name, tmp_path):
    """They round weights to float16, which is what may differ."""
    published = fixture_model(name)
    with LLM(str(write(published, tmp_path)), **OPTIONS) as llm:
        found = prompt_logprobs(llm)
    torch.testing.assert_close(found, logprobs_by_transformers(published), rtol=0, atol=5e-4)


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
    method = make([part._replace(rank=rank, num_ranks=num_ranks)], torch.float32, torch.device("cpu"))
    for weight in method.weights():
        end = weight.name.removeprefix(part.path)
        if end in tensors:
            weight.load(slice_of(tensors[end], weight.pieces(rank, num_ranks)))
    return method.numbers()


CACHE_SCALES = (".k_scale", ".v_scale")
OTHER = "model.layers.0.self_attn.o_proj"  # has two blocks of 128 inputs


def one_layer(name: str, path: str = OTHER) -> tuple[dict, dict[str, RawTensor], torch.Tensor]:
    """As `fixture`, from a checkpoint that a library writes."""
    published = made(name)
    settings = published.config.get("quantization_config")
    if settings is None:
        settings = published.files["hf_quant_config.json"]["quantization"] | {"quant_method": "modelopt"}
    names = [name for name in published.tensors if name.startswith(path) and not name.endswith(CACHE_SCALES)]
    own = {name.removeprefix(path): raw(published.tensors[name]) for name in names}
    return settings, own, published.values[path]


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
