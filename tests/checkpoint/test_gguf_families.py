"""GGUF files of every family, made by llama.cpp's own converter from tiny random models, compared with transformers."""

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams, env, registry
from tests.frontend.conftest import SDIST, _download
from tests.models.oracle import OPTIONS, PROMPTS, TOLERANCE, logprobs, oracle

FUSED = "q, k and v in one"  # which the converter does if told to
# model file -> case -> what differs from its TINY. A GGUF file cannot hold all that a config.json can: where TINY has
# such a thing (a window in some layers of Qwen, sizes of heads in Granite, other patterns than a family's own), it is
# changed back here.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "permuted": {},
        FUSED: {"attention_bias": True},
        "biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "llama3": {
            "max_position_embeddings": 512,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    },
    "smollm3": {"every fourth layer without positions": {"no_rope_layer_interval": 4}},
    "granite": {"multipliers": {"head_dim": 16}},
    "qwen2": {"biased": {"use_sliding_window": False}},
    "qwen3": {"normed heads": {"use_sliding_window": False}},
    "gemma2": {"soft caps": {"query_pre_attn_scalar": 32}},
    "gemma3": {"two ropes": {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None}},
    "phi": {"part rotates": {"intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 16}},
    "phi3": {"longrope": {}, "plain": {"rope_scaling": None, "sliding_window": None, "tie_word_embeddings": True}},
    "olmo2": {"post-norms": {}},
    "olmo3": {"windows and yarn": {}},
    "glm": {"glm4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "rms_norm_eps": 1e-5}},
    "cohere2": {"windows rotate": {}},
    "starcoder2": {"layer norms": {"sliding_window": None}},
    "gpt2": {"learned positions": {"n_inner": None}},
    "gpt_neox": {"parallel": {}, "sequential": {"use_parallel_residual": False}},
    "falcon": {
        "two norms": {"ffn_hidden_size": None},
        "one norm": {"ffn_hidden_size": None, "num_ln_in_parallel_attn": 1},
        "one KV head": {
            "ffn_hidden_size": None,
            "new_decoder_architecture": False,
            "multi_query": True,
            "num_kv_heads": 1,
        },
    },
    "mixtral": {"permuted": {"sliding_window": None}},
    "qwen2_moe": {"a gated shared expert": {"use_sliding_window": False, "mlp_only_layers": None}},
    "qwen3_moe": {"normed heads": {"mlp_only_layers": None}},
    "olmoe": {"all heads normed": {"clip_qkv": None}},
    "glm4_moe": {"groups, and a layer that predicts further": {"num_nextn_predict_layers": 1}},
    "minimax_m2": {"sigmoid": {}},
    "ernie4_5_moe": {"dense before": {"moe_layer_end_index": 3}},
}
ALL = [(name, case) for name, cases in CASES.items() for case in cases]
# What the converter reads and transformers no longer says.
FORGOTTEN = {"cohere2": {"rotary_pct": 1.0}, "gpt2": {"n_ctx": 256}, "gpt_neox": {"rotary_pct": 0.25}}
CONVERT = """
import json, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import gguf
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
load = ModelBase.load_hparams
ModelBase.load_hparams = staticmethod(lambda folder, is_mistral_format: load(folder, is_mistral_format) | forgotten)
for folder in map(Path, sys.argv[2:]):
    forgotten = json.loads((folder / "forgotten.json").read_text())
    model = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
    model.set_vocab = lambda self: None  # random models have no words
    model(folder, gguf.LlamaFileType.ALL_F32, folder / "model.gguf", fuse_qkv=forgotten["fuse_qkv"]).write()
"""


@pytest.fixture(scope="session")
def converter() -> Path:
    """The folder of llama.cpp's converter, as the sdist of llama-cpp-python has it; fetched once per machine."""
    folder = env.cache_dir() / "testdata" / f"{SDIST.replace('==', '-')}-converter"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            with tarfile.open(_download(Path(work))) as archive:
                folders = (("conversion",), ("gguf-py",))
                wanted = [member for member in archive if Path(member.name).parts[3:4] in folders]
                archive.extractall(work, wanted, filter="data")
            (root,) = Path(work).glob("*/vendor/llama.cpp")
            try:
                root.rename(folder)
            except OSError:  # another run was faster
                assert folder.is_dir()
    return folder


def fields(name: str, case: str) -> dict[str, Any]:
    changed = {**registry.load("quire.models", name).TINY, **CASES[name][case]}
    return {key: value for key, value in changed.items() if value is not None or key == "sliding_window"}


@pytest.fixture(scope="session")
def converted(
    converter: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[torch.nn.Module, Path]]:
    """Every case's oracle and GGUF file: all in one go, for the converter takes seconds to start."""
    made = {}
    for name, case in ALL:
        folder = tmp_path_factory.mktemp(name)
        made[name, case] = oracle(fields(name, case), folder), folder
        (folder / "forgotten.json").write_text(json.dumps({**FORGOTTEN.get(name, {}), "fuse_qkv": case == FUSED}))
        words = {"model": {"vocab": {str(token): token for token in range(256)}}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(words))
    folders = [str(folder) for _, folder in made.values()]
    result = subprocess.run(
        [sys.executable, "-c", CONVERT, str(converter), *folders], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return made


@pytest.mark.parametrize(("name", "case"), ALL)
def test_a_converted_model_equals_transformers(name, case, converted):
    model, folder = converted[name, case]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    with LLM(str(folder / "model.gguf"), **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs):
        tokens = prompt + output.outputs[0].token_ids
        truth = logprobs(model, tokens)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        entries = [*(output.prompt_logprobs or [None])[1:], *output.outputs[0].logprobs]
        ours = torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens[1:])])
        assert (ours - truth).abs().max() < TOLERANCE
