"""Experts that a checkpoint holds as MXFP4, against transformers' reading of the same files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from quire import LLM, SamplingParams
from quire.errors import BadModelFileError, UnsupportedModelError
from quire.models import gpt_oss, llama
from tests.models.oracle import OPTIONS, PROMPTS, TOLERANCE, logprobs, oracle


def pack_experts(folder: Path) -> None:
    """Every code occurs, and scales around one half: gates and ups are large enough to be clamped."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(2)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = experts, rows, columns // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(124, 128, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, path, {"format": "pt"})
    say_quantized(folder, "mxfp4")


def say_quantized(folder: Path, method: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))


def test_experts_in_mxfp4_are_what_transformers_makes_of_them(tmp_path):
    oracle(gpt_oss.TINY, tmp_path)
    pack_experts(tmp_path)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=Mxfp4Config(dequantize=True), **options)
    truth = logprobs(model.float().eval(), PROMPTS[3])
    with LLM(str(tmp_path), **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        found = llm.generate([PROMPTS[3]], params, use_tqdm=False)[0].prompt_logprobs
    for place, token in enumerate(PROMPTS[3][1:]):
        assert abs(found[place + 1][token].logprob - truth[place, token]) < TOLERANCE


def test_blocks_without_scales_are_an_incomplete_checkpoint(tmp_path):
    oracle(gpt_oss.TINY, tmp_path)
    pack_experts(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadModelFileError, match=r"lacks model\.layers\.1\.mlp\.experts\.down_proj"):
        LLM(str(tmp_path), **OPTIONS)


def test_a_quantization_that_has_no_file_is_refused(tmp_path):
    oracle(llama.TINY, tmp_path)
    say_quantized(tmp_path, "mxfp-5")
    with pytest.raises(UnsupportedModelError, match="quantized with 'mxfp-5'"):
        LLM(str(tmp_path), **OPTIONS)
