"""Makes the files in quantized/: one linear layer each, as the libraries that quantize publish it.

A small Llama with random weights is quantized and saved by the library, and of what it saved a file keeps
the tensors of one layer under their own names, the `quantization_config` of config.json as metadata, and the
weight [outputs, inputs] that the library itself makes of them when it loads them, as `<layer>.expected` in float16.
`dynamic.json` holds gptqmodel's per-module overrides and what the library answers for some module names.

Made once, in an environment apart with Python 3.11.7, torch 2.13.0+cpu, transformers 5.22.2, gptqmodel 7.7.0
and auto-round 0.16.1 (the last two installed with --no-deps, as gptqmodel asks for a newer torch), by

    GPTQMODEL_CPU_WORKERS=2 HF_HUB_OFFLINE=1 python tests/data/make_quantized.py

`python tests/data/make_quantized.py --check` needs torch and safetensors only: it reads the files again, and compares
what the formulas below make of them with what the library made. The scale times the difference of two integers is
exact in float32, and rounded once to float16 it is the library's weight, bit for bit.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

HERE = Path(__file__).parent / "quantized"
LAYER = "model.layers.0.mlp.down_proj"
OUTPUTS, INPUTS, GROUP, VOCABULARY = 64, 128, 32, 128

GPTQ = {
    "gptq": {"bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "format": "gptq"},
    "gptq_asymmetric": {"bits": 4, "group_size": GROUP, "sym": False, "desc_act": False, "format": "gptq"},
    "gptq_v2_asymmetric": {"bits": 4, "group_size": GROUP, "sym": False, "desc_act": False, "format": "gptq_v2"},
    "gptq_act_order": {"bits": 4, "group_size": GROUP, "sym": True, "desc_act": True, "format": "gptq"},
    "gptq_8bit": {"bits": 8, "group_size": -1, "sym": True, "act_group_aware": False, "format": "gptq"},
    "awq": {"bits": 4, "group_size": GROUP, "sym": False, "quant_method": "awq", "format": "gemm"},
}
AUTO_ROUND = {
    "auto_round_gptq": ("auto_round:auto_gptq", {"bits": 4, "group_size": GROUP, "sym": True}),
    "auto_round_awq": ("auto_round:auto_awq", {"bits": 4, "group_size": GROUP, "sym": False}),
}
DYNAMIC = {  # the example of gptqmodel's README, and a pattern that matches at the start only
    r"+:.*\.18\..*gate.*": {"bits": 4, "group_size": 32},
    r".*\.19\..*gate.*": {"bits": 8, "group_size": 64},
    r"-:.*\.20\..*gate.*": {},
    r"-:.*down.*": {},
    r"model\.layers\.7": {"sym": False},
}
MODULES = [
    "model.layers.18.mlp.gate_proj",
    "model.layers.19.mlp.gate_proj",
    "model.layers.20.mlp.gate_proj",
    "model.layers.20.mlp.up_proj",
    "model.layers.3.mlp.down_proj",
    "model.layers.118.mlp.gate_proj",
    "model.layers.7.self_attn.q_proj",
    "model.layers.70.self_attn.q_proj",
    "model.layers.7.mlp.down_proj",
    "language_model.model.layers.7.self_attn.q_proj",
]


def tiny_model(path: Path) -> None:
    """A Llama of one layer, with groups all above and all below zero: zero points of 0 and of the maximum."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=OUTPUTS,
        intermediate_size=INPUTS,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.float16)
    weight = model.get_submodule(LAYER).weight.data
    weight[3:12, :GROUP] = weight[3:12, :GROUP].abs()
    weight[20:30, GROUP : 2 * GROUP] = -weight[20:30, GROUP : 2 * GROUP].abs()
    model.save_pretrained(path)
    words = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(path)


def calibration() -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(4, VOCABULARY, (64, 64), generator=generator).tolist()
    return [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]


def keep(name: str, saved: Path, expected: torch.Tensor, made_by: str) -> None:
    """Writes the fixture: what the library saved of the layer, and what it makes of it."""
    tensors = {}
    for file in sorted(saved.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {key: opened.get_tensor(key) for key in opened.keys() if key.startswith(LAYER + ".")}
    config = json.loads((saved / "config.json").read_text())["quantization_config"]
    for key in ("offload_to_disk_path", "uri"):  # a path of the machine, and an address
        config.get("meta", {}).pop(key, None)
    tensors[LAYER + ".expected"] = expected.to(torch.float16).contiguous()
    HERE.mkdir(exist_ok=True)
    metadata = {"format": "pt", "made_by": made_by, "quantization_config": json.dumps(config, sort_keys=True)}
    save_file(tensors, HERE / f"{name}.safetensors", metadata)
    (HERE / f"{name}.safetensors").chmod(0o644)


def with_gptqmodel(name: str, options: dict, base: Path, saved: Path) -> None:
    import gptqmodel
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(offload_to_disk=False, **options)
    model = GPTQModel.load(str(base), config, device="cpu", dtype=torch.float16)
    model.quantize(calibration(), batch_size=4)
    model.save(str(saved))
    backend = BACKEND.AWQ_TORCH if name == "awq" else BACKEND.GPTQ_TORCH
    loaded = GPTQModel.load(str(saved), device="cpu", backend=backend, dtype=torch.float16)
    layer = loaded.model.get_submodule(LAYER)
    with torch.inference_mode():
        expected = layer(torch.eye(INPUTS, dtype=torch.float16)).T  # exact: each sum has one term
    keep(name, saved, expected, f"gptqmodel {gptqmodel.__version__}, {type(layer).__name__}")


def with_auto_round(name: str, packing: str, options: dict, base: Path, saved: Path) -> None:
    import auto_round
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16)
    data = [torch.tensor([row["input_ids"]]) for row in calibration()]
    rounder = auto_round.AutoRound(
        model,
        AutoTokenizer.from_pretrained(base),
        dataset=data,
        iters=2,
        nsamples=len(data),
        seqlen=64,
        device_map="cpu",
        **options,
    )
    rounder.quantize_and_save(str(saved), format=packing)
    saved = next(iter(saved.rglob("config.json"))).parent
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float16)
    layer = loaded.get_submodule(LAYER)
    with torch.inference_mode():
        expected = layer(torch.eye(INPUTS, dtype=torch.float16)).T
    keep(name, saved, expected, f"auto-round {auto_round.__version__}, {type(layer).__name__}")


def dynamic() -> None:
    """What gptqmodel answers for a module: false is not quantized, {} the defaults, else what it overrides.

    It writes the patterns with "-:" first, and takes the first that matches at the start of the name.
    """
    import gptqmodel

    config = gptqmodel.QuantizeConfig(bits=4, group_size=128, dynamic=DYNAMIC)
    written = {key: value for key, value in config.to_dict().items() if key != "meta"}
    answers = {module: config.dynamic_get(module, default={}) for module in MODULES}
    made_by = f"gptqmodel {gptqmodel.__version__}"
    text = json.dumps({"made_by": made_by, "quantization_config": written, "answers": answers}, indent=1)
    (HERE / "dynamic.json").write_text(text + "\n")


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The fields of int32 words, the lowest bits first, as a new last axis."""
    return (words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & ((1 << bits) - 1)


def gptq_weight(tensors: dict, bits: int, v1: bool) -> torch.Tensor:
    """Words along the inputs in qweight, along the outputs in qzeros; v1 stores zero points less one."""
    zeros = tensors["qzeros"]
    if v1:  # on whole words: a zero point of 0 was stored by borrowing from the next, and the carry gives it back
        zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))
    codes = unpacked(tensors["qweight"], bits).permute(0, 2, 1).flatten(0, 1)  # [inputs, outputs]
    zeros = unpacked(zeros, bits).flatten(1)  # [groups, outputs]
    group = tensors.get("g_idx")
    if group is None:
        group = torch.arange(len(codes)) // (len(codes) // len(zeros))
    return (tensors["scales"].float()[group] * (codes - zeros[group])).T


def awq_weight(tensors: dict, bits: int) -> torch.Tensor:
    """Words along the outputs in both, the eight of a word in the order 0 2 4 6 1 3 5 7; zero points as they are."""
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # where in the word output i lies
    codes = unpacked(tensors["qweight"], bits)[..., order].flatten(1)
    zeros = unpacked(tensors["qzeros"], bits)[..., order].flatten(1)
    size = len(codes) // len(zeros)
    codes = codes - zeros.repeat_interleave(size, 0)
    return (tensors["scales"].float().repeat_interleave(size, 0) * codes).T


def check() -> None:
    for file in sorted(HERE.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors = {key.removeprefix(LAYER + "."): opened.get_tensor(key) for key in opened.keys()}
            config = json.loads(opened.metadata()["quantization_config"])
        packing = config.get("packing_format", config["quant_method"])
        if "awq" in packing:
            weight = awq_weight(tensors, config["bits"])
        else:
            v1 = config.get("checkpoint_format") != "gptq_v2" and packing not in ("auto_round", "auto_round:gptqmodel")
            weight = gptq_weight(tensors, config["bits"], v1)
        assert torch.equal(weight.to(torch.float16), tensors["expected"]), file.name
        print(file.name, "holds")


def main() -> None:
    wanted = [argument for argument in sys.argv[1:] if not argument.startswith("-")] or [*GPTQ, *AUTO_ROUND]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        tiny_model(base)
        for name in wanted:
            saved = Path(folder) / name
            if name in GPTQ:
                with_gptqmodel(name, GPTQ[name], base, saved)
            else:
                with_auto_round(name, *AUTO_ROUND[name], base, saved)
    if any(name in GPTQ for name in wanted):
        dynamic()


if __name__ == "__main__":
    if "--check" not in sys.argv:
        main()
    check()
