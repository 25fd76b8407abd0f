"""What a model's layers keep of a long context, in blocks."""

import json

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import CapacityError
from quire.kv.groups import form_layout
from quire.kv.specs import Latent
from quire.models import deepseek_v2, gemma3
from quire.worker.build import empty
from quire.worker.kv_cache import kv_specs
from tests.models.oracle import OPTIONS, assert_greedy, oracle

LENGTH, CHUNK = 190, 16


def test_layers_with_a_window_keep_the_blocks_it_needs_and_no_more(tmp_path):
    """With exactly these blocks a long context is served correctly; if all layers kept everything it would not fit."""
    model = oracle(gemma3.TINY, tmp_path)
    layout = form_layout(kv_specs(empty(gemma3.TINY, "float32"), torch.float32), 16)
    assert any(group.spec.window for group in layout.groups)
    needed = [group.spec.most_blocks(LENGTH, CHUNK, group.block_size) for group in layout.groups]
    whole = -(-LENGTH // 16)
    assert all((count < whole // 2) == bool(group.spec.window) for group, count in zip(layout.groups, needed))
    options = {
        **OPTIONS,
        "max_model_len": LENGTH,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 1 + sum(needed),
    }
    prompt = [(11 * i * i + i) % 256 for i in range(150)]
    with LLM(str(tmp_path), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        answer = llm.generate([prompt], params, use_tqdm=False)[0]
    assert_greedy(model, prompt, answer.outputs[0].token_ids)
    config = json.loads((tmp_path / "config.json").read_text())
    full = {**config, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    (tmp_path / "config.json").write_text(json.dumps(full))
    with pytest.raises(CapacityError):
        LLM(str(tmp_path), **{**options, "num_gpu_blocks_override": whole})


def test_a_latent_cache_holds_576_values_of_a_token_at_the_published_sizes():
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    model = empty({**deepseek_v2.TINY, **sizes}, "bfloat16")
    specs = kv_specs(model, torch.bfloat16)
    assert set(specs.values()) == {Latent(512, 64, "bfloat16")} and len(specs) == deepseek_v2.TINY["num_hidden_layers"]
    assert {spec.bytes_per_token for spec in specs.values()} == {1152}
