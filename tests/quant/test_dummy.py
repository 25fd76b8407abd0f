"""`--load-format dummy`: random codes and scales in every form that a config or `--quantization` names."""

import json
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.api.cli import run
from quire.checkpoint.find import find
from quire.checkpoint.gguf import BLOCK
from quire.checkpoint.hf_config import read_config
from quire.config import EngineConfig
from quire.config.resolve import Machine, resolve
from quire.errors import BadModelFileError
from quire.models import deepseek_v3, ernie4_5_moe, gpt_oss, minimax_m2, qwen3_moe
from quire.quant.base import Method, Quantized, say_once
from quire.quant.kept import packed as kept_packed
from quire.worker.build import build
from quire.worker.describe import describe
from quire.worker.dummy import dummy_tensors
from quire.worker.load import load_weights
from quire.worker.worker import weight_bytes
from tests.models.oracle import OPTIONS, PROMPTS
from tests.quant.published.common import SIZES
from tests.quant.test_published import methods

STD = 0.02
PARAMS = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
TWINS = {
    "qwen3-8b-fp8-block": "qwen3-8b", "qwen3-8b-awq": "qwen3-8b", "qwen3-30b-a3b-fp8-block": "qwen3-30b-a3b",
    "gpt-oss-20b-mxfp4": "gpt-oss-20b", "qwen3-8b-q4_k_m": "qwen3-8b",
}  # fmt: skip
DYNAMIC = {"num_bits": 8, "dynamic": True}


def compressed(form: str, weights: dict, activations: dict | None = None) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}, "ignore": ["lm_head"]}


def whole(quant_method: str, bits: int = 4, group_size: int = 128, **others: object) -> dict:
    return {"quant_method": quant_method, "bits": bits, "group_size": group_size, **others}


def packed(bits: int, **others: object) -> dict:
    return compressed("pack-quantized", {"num_bits": bits, "strategy": "group", "group_size": 128, **others})


# quantization_config, and the bits of a number with its share of scales.
FORMS = {
    "fp8 in blocks": ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, 8),
    "fp8, static": ({"quant_method": "fp8", "activation_scheme": "static"}, 8),
    "fp8 as vLLM has it": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": []}, 8),
    "gptq": (whole("gptq"), 4.16),
    "gptq, 8 bits in an order": (whole("gptq", 8, 64, desc_act=True), 8.4),
    "gptq v2, 2 bits": (whole("gptq", 2, -1, checkpoint_format="gptq_v2"), 2.1),
    "awq": (whole("awq", version="gemm"), 4.16),
    "auto-round": (whole("auto-round"), 4.16),
    "auto-round as awq": (whole("auto-round", packing_format="auto_round:auto_awq"), 4.16),
    "bitsandbytes nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 4.5),
    "bitsandbytes fp4, nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        4.2,
    ),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8.1),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
    "compressed fp8": (
        compressed("float-quantized", {**DYNAMIC, "type": "float", "strategy": "channel"}, DYNAMIC),
        8.1,
    ),
    "compressed fp8, static": (
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, {"dynamic": False}),
        8,
    ),
    "compressed int8": (compressed("int-quantized", {**DYNAMIC, "strategy": "channel"}, DYNAMIC), 8.1),
    "compressed, packed": (packed(4), 4.13),
    "compressed, packed with zero points, in an order": (packed(4, symmetric=False, actorder="group"), 4.2),
    "compressed nvfp4": (compressed("nvfp4-pack-quantized", {}), 4.5),
    "compressed mxfp4": (compressed("mxfp4-pack-quantized", {}), 4.25),
}


def folder(path: Path, fields: dict, **others: object) -> str:
    (path / "config.json").write_text(json.dumps({**fields, **others}))
    return str(path)


def check(path: str, **options: object) -> int:
    """Runs a model; every quantized weight has the usual spread. Returns how many there are."""
    with LLM(path, load_format="dummy", **OPTIONS, **options) as llm:
        kept = [method for method in methods(model_of(llm)) if isinstance(method, Quantized)]
        spreads = [(method.numbers().std().item(), method.numbers().mean().item()) for method in kept]
        found = llm.generate([PROMPTS[3]], PARAMS, use_tqdm=False)[0].prompt_logprobs
    assert all(0.6 < std / STD < 1.6 and abs(mean) < 0.05 * STD for std, mean in spreads), spreads
    logprobs = torch.tensor([entry[token].logprob for entry, token in zip(found[1:], PROMPTS[3][1:])])
    assert logprobs.isfinite().all() and logprobs.unique().numel() > 1
    return len(kept)


def model_of(llm: LLM) -> torch.nn.Module:
    return llm.client.engine.executor.worker.model


@pytest.mark.parametrize("name", FORMS)
def test_codes_and_scales_of_every_form_are_weights_of_the_usual_spread(name, tmp_path):
    settings, _ = FORMS[name]
    assert check(folder(tmp_path, SIZES, quantization_config=settings)) >= 8


@pytest.mark.parametrize("type_name", sorted(set(BLOCK) - {"F32", "F16", "BF16"}))
def test_blocks_of_every_type_are_weights_of_the_usual_spread(type_name, tmp_path):
    types = {r".*\.down_proj": "Q8_0", "lm_head": "F16", "model": type_name}
    assert check(folder(tmp_path, SIZES, quantization_config={"quant_method": "gguf", "types": types})) >= 8


def test_types_that_are_none_are_refused(tmp_path):
    path = folder(tmp_path, SIZES, quantization_config={"quant_method": "gguf", "types": {"model": "Q9_K"}})
    with pytest.raises(BadModelFileError, match="gives types as something else"):
        LLM(path, load_format="dummy", **OPTIONS)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "mxfp4"])
def test_plain_dummies_are_rounded_as_the_option_says(name, tmp_path):
    with_head = name in ("int8", "int4")
    assert check(folder(tmp_path, SIZES), quantization=name) == 8 + with_head


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        (gpt_oss.TINY, {"quant_method": "mxfp4"}),
        (qwen3_moe.TINY, FORMS["fp8 in blocks"][0]),
        (qwen3_moe.TINY, whole("awq", group_size=16, version="gemm")),
    ],
)
def test_experts_are_drawn_in_their_form_too(fields, settings, tmp_path):
    path = folder(tmp_path, fields, quantization_config=settings)
    _, kept, _ = loaded(path)
    experts = [method for method in kept if ".experts." in method.parts[0].path]
    assert experts and all(isinstance(method, Quantized) for method in experts)
    for method in experts:
        assert 0.6 < method.numbers().float().std().item() / STD < 1.6
    check(path)


def resolved(path: str, **options: object) -> EngineConfig:
    asked = EngineConfig.from_kwargs(device="cpu", load_format="dummy", max_model_len=64, **options)
    return resolve(asked, path, "hf", read_config(find(path)), Machine(num_cores=1))


def loaded(path: str, **options: object) -> tuple[torch.nn.Module, list[Method], EngineConfig]:
    """A model with dummy weights, the methods that keep them, and its config, without an engine."""
    config = resolved(path, **options)
    model = build(config, read_config(find(path)))
    kept = methods(model)  # experts may let go of theirs
    load_weights(model, dummy_tensors(model, 0, torch.device("cpu")))
    return model, kept, config


@pytest.mark.parametrize("family", [gpt_oss, deepseek_v3, ernie4_5_moe, minimax_m2])
def test_biases_of_routers_are_zero_and_others_are_not(family, tmp_path):
    model, *_ = loaded(folder(tmp_path, family.TINY))
    biases = {name: value for name, value in model.named_parameters() if "bias" in name and ".mlp.experts." not in name}
    routers = {name for name in biases if name.endswith(("gate.bias", "correction_bias"))}
    assert routers
    for name, value in biases.items():
        assert (value == 0).all() if name in routers else value.any(), name


@pytest.mark.parametrize("name", FORMS)
def test_what_is_said_of_a_gpus_weights_is_what_they_take(name, tmp_path):
    """Kept packed for the kernels of GPUs, which torch packs on a CPU too."""
    settings, bits = FORMS[name]
    model, _, config = loaded(folder(tmp_path, SIZES, quantization_config=settings), interpret_triton=True)
    facts = describe(config)
    rows = {row["kind"]: row for row in facts["weights"]}
    assert set(rows) == {"attention", "MLP", "embedding", "head", "norms and others"}
    assert rows["MLP"]["bits"] == pytest.approx(bits, abs=0.1)
    assert rows["MLP"]["method"] == config.model.quantization and rows["embedding"]["method"] == "bfloat16"
    taken = weight_bytes(model)
    assert facts["weight_bytes"] == sum(row["bytes"] for row in facts["weights"])
    takes_more = bits < 4 or "nvfp4" in name  # two bits take four there, scales in float8 become float32
    assert facts["weight_bytes"] == pytest.approx(taken, rel=0.35 if takes_more else 0.06)


@pytest.mark.parametrize("type_name", ["Q2_K", "Q3_K", "Q4_K", "Q5_0", "Q6_K", "Q8_0", "IQ4_XS"])
def test_info_tells_what_types_of_gguf_files_take_on_gpus(tmp_path, type_name):
    """Some are wider in the words that GPUs read than in a file."""
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 512}
    types = {"quant_method": "gguf", "types": {"model": type_name, "lm_head": type_name}}
    model, _, config = loaded(folder(tmp_path, sizes, quantization_config=types), interpret_triton=True)
    assert describe(config)["weight_bytes"] == pytest.approx(weight_bytes(model), rel=0.01)


def test_what_has_no_kernel_on_a_cpu_becomes_plain_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_packed, "why_not", lambda device, dtype: None)
    found = {}
    for name in ("awq", "fp8 in blocks"):
        *_, config = loaded(folder(tmp_path, SIZES, quantization_config=FORMS[name][0]))
        found[name] = next(row["method"] for row in describe(config)["weights"] if row["kind"] == "MLP")
    assert found == {"awq": "awq", "fp8 in blocks": "fp8 as bfloat16"}


@pytest.mark.parametrize(
    ("name", "said"),
    [("fp8 in blocks", "no kernels for weights of 8-bit floats"), ("modelopt nvfp4", "wants inputs rounded to 4 bits")],
)
def test_what_is_done_otherwise_is_said_once(tmp_path, monkeypatch, caplog, name, said):
    monkeypatch.setattr(kept_packed, "why_not", lambda device, dtype: None)
    say_once.cache_clear()
    for _ in range(2):
        loaded(folder(tmp_path, SIZES, quantization_config=FORMS[name][0]))
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize("name", TWINS)
def test_shapes_of_the_benchmarks_are_quantized_as_published(name, tmp_path):
    """All that their plain twins have, the same but for the quantization of their linear layers or experts."""
    config = json.loads((SHAPES / name / "config.json").read_text())
    plain = json.loads((SHAPES / TWINS[name] / "config.json").read_text())
    method = config.pop("quantization_config")["quant_method"]
    assert config == plain
    facts = describe(resolved(str(SHAPES / name)))
    quantized = {row["kind"] for row in facts["weights"] if row["method"].startswith(method)}
    expected = {"mxfp4": {"experts"}, "gguf": {"attention", "MLP", "embedding", "head"}}
    assert quantized == expected.get(method, {"attention", "experts" if "a3b" in name else "MLP"})


def test_info_shows_what_each_kind_of_layer_takes(tmp_path, capsys):
    path = folder(tmp_path, gpt_oss.TINY, quantization_config={"quant_method": "mxfp4"})
    argv = ["info", path, "--load-format", "dummy", "--device", "cpu"]
    assert run([*argv, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    kinds = {row["kind"]: row for row in facts["weights"]}
    assert list(kinds) == ["attention", "experts", "embedding", "head", "norms and others"]
    assert kinds["experts"]["method"].startswith("mxfp4") and kinds["attention"]["method"] == "bfloat16"
    assert kinds["embedding"] == {"kind": "embedding", "method": "bfloat16", "bits": 16.0, "bytes": 2 * 256 * 64}
    assert run(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["experts", "mxfp4"] for line in lines)
