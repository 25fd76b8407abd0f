"""Every model file, divided over processes: the same tokens as in one process, and logprobs within the tolerance.

`benchmarks/ranks_exact.py` does the same for all variants and combinations.
"""

import pytest

from quire import LLM, SamplingParams, registry
from quire.checkpoint.find import find
from quire.checkpoint.hf_config import read_config
from quire.config import EngineConfig
from quire.distributed.base import Group, Ranks
from quire.errors import UnsupportedModelError
from quire.worker.build import build, stage_layers
from tests.layouts.executor import end_all
from tests.models.oracle import TOLERANCE, oracle

pytestmark = pytest.mark.xdist_group("layouts")

TINY = registry.literals("quire.models", "TINY")
LAYOUTS = {
    "tp 2": {"tensor_parallel_size": 2},
    "tp 3": {"tensor_parallel_size": 3},
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 2, pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp 2, whole experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
# Prompts of all lengths, in chunks; the last finds a prefix in the cache.
OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 64,
    "num_threads": 1,
    "max_model_len": 192,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
}
LENGTHS = (1, 17, 60)
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=0)
AGAIN = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", autouse=True)
def processes():
    yield
    end_all()


def prompts(vocab_size: int) -> list[list[int]]:
    found = [[(7 * idx + place * place) % vocab_size for place in range(count)] for idx, count in enumerate(LENGTHS)]
    return [*found, found[-1][:40] + [5, 6]]


def answers(model: str, vocab_size: int, **options) -> tuple[list, list]:
    llm = LLM(model, **OPTIONS, **options)
    try:
        found = llm.generate(prompts(vocab_size), GREEDY, use_tqdm=False)
        found += llm.generate(prompts(vocab_size)[-1:], AGAIN, use_tqdm=False)  # now from the cache
        llm.client.engine.kv.check()
    finally:
        llm.close()
    tokens = [output.outputs[0].token_ids for output in found]
    logprobs = [[entry[token].logprob for entry, token in zip(o.outputs[0].logprobs, t)] for o, t in zip(found, tokens)]
    return tokens, logprobs


def refusal(folder: str, options: dict) -> str | None:
    """Why the model cannot be divided so; None: it can."""
    size, num_stages = options.get("tensor_parallel_size", 1), options.get("pipeline_parallel_size", 1)
    group = Group()
    group.size = size
    config = EngineConfig.from_kwargs(
        model=folder, dtype="float32", device="cpu", quantization="none", max_model_len=192, block_size=16, **options
    )
    try:
        for group.rank in range(size):
            model = build(config, read_config(find(folder)), ranks=Ranks(group))
        stage_layers(model, num_stages)
    except UnsupportedModelError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", TINY)
def test_a_model_in_every_layout_says_what_it_says_in_one_process(name, tmp_path):
    oracle(TINY[name], tmp_path)
    folder, vocab_size = str(tmp_path), TINY[name]["vocab_size"]
    tokens, logprobs = answers(folder, vocab_size)
    has_experts = any("experts" in key for key in TINY[name])
    for layout, options in LAYOUTS.items():
        if "experts" in layout and not has_experts:
            continue
        if why := refusal(folder, options):
            assert layout == "tp 3", why
            assert "--tensor-parallel-size 3 is too many for this model" in why
            continue
        found, found_logprobs = answers(folder, vocab_size, **options, executor="tests.layouts.executor")
        assert found == tokens, layout
        errors = [abs(a - b) for xs, ys in zip(found_logprobs, logprobs) for a, b in zip(xs, ys)]
        assert max(errors) < TOLERANCE, layout
