"""Checkpoints on the hub are older than the transformers we compare with: other names, other fields in config.json,
tensors that are not needed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import UnsupportedModelError
from quire.models import falcon, gpt2, gpt_neox
from tests.models.oracle import OPTIONS, PROMPTS, assert_greedy, oracle

MASK = torch.ones(1, 1, 256, 256, dtype=torch.uint8).tril()


def rewrite(folder: Path, rename: Callable[[str], str], extra: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(path).items()} | extra, path, {"format": "pt"})


def answers(folder: Path) -> list[int]:
    with LLM(str(folder), **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        return llm.generate([PROMPTS[3]], params, use_tqdm=False)[0].outputs[0].token_ids


def test_gpt2_as_first_published_is_a_decoder_without_prefix_and_with_masks(tmp_path):
    model = oracle(gpt2.TINY, tmp_path)
    masks = {f"h.{i}.attn.bias": MASK.clone() for i in range(3)} | {"h.0.attn.masked_bias": torch.tensor(-1e4)}
    rewrite(tmp_path, lambda name: name.removeprefix("transformer."), masks)
    assert_greedy(model, PROMPTS[3], answers(tmp_path))


def test_gpt_neox_as_first_published_has_its_own_words_for_rope_and_masks(tmp_path):
    model = oracle({**gpt_neox.TINY, "rotary_pct": 0.5, "rotary_emb_base": 500.0}, tmp_path)
    masks = {f"gpt_neox.layers.{i}.attention.bias": MASK.clone() for i in range(3)}
    masks["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    rewrite(tmp_path, str, masks)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rotary_pct": 0.5, "rotary_emb_base": 500}))
    assert_greedy(model, PROMPTS[3], answers(tmp_path))


def test_gpt_neox_may_name_its_head_as_others_do(tmp_path):
    model = oracle(gpt_neox.TINY, tmp_path)
    rewrite(tmp_path, lambda name: name.replace("embed_out.", "lm_head."), {})
    assert_greedy(model, PROMPTS[3], answers(tmp_path))


def test_falcon_may_hold_the_tied_head_as_well(tmp_path):
    model = oracle(falcon.TINY, tmp_path)
    rewrite(tmp_path, str, {"lm_head.weight": model.lm_head.weight.detach().clone()})
    assert_greedy(model, PROMPTS[3], answers(tmp_path))


def test_falcon_with_alibi_is_refused(tmp_path):
    oracle({**falcon.TINY, "alibi": True}, tmp_path)
    with pytest.raises(UnsupportedModelError, match="use one with rotary positions"):
        answers(tmp_path)
