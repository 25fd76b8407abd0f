"""What an engine can do, it can do with its model divided over processes: the answers are those of one process."""

import json

import pytest

from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire.models.llama import TINY as LLAMA
from quire.models.qwen3_moe import TINY as QWEN3_MOE
from quire.params import StructuredOutputs
from tests.layouts.executor import end_all

pytestmark = pytest.mark.xdist_group("layouts")

LAYOUTS = {"tp 2": {"tensor_parallel_size": 2}, "pp 2": {"pipeline_parallel_size": 2}}
OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "load_format": "dummy",
    "num_gpu_blocks_override": 64,
    "num_threads": 1,
    "max_model_len": 192,
    "max_num_seqs": 4,
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["n", "b"]}
SHARED = list(range(20, 60))
PROMPTS = [[5, 6, 7, 8, 9], [*SHARED, 3], [3], [*SHARED, 4], [7, 8, 9] * 8]
SEEDED = SamplingParams(temperature=0.9, top_k=40, seed=5, n=2, repetition_penalty=1.1, max_tokens=24, ignore_eos=True)


def greedy(**fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, **fields)


@pytest.fixture(scope="module", autouse=True)
def processes():
    yield
    end_all()


@pytest.fixture(scope="module")
def llama(tmp_path_factory, smollm2) -> dict:
    """A random Llama that knows the default model's tokens."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(
        json.dumps(LLAMA | {"vocab_size": 49152, "max_position_embeddings": 2048, "intermediate_size": 128})
    )
    return {"model": str(folder), "tokenizer": str(smollm2)}


def answers(params: SamplingParams | list[SamplingParams], **options) -> list:
    llm = LLM(**{**OPTIONS, **options})
    try:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        stats = llm.client.engine.stats()
        llm.client.engine.kv.check()
    finally:
        llm.close()
    found = [(output.prompt_token_ids, [choice.token_ids for choice in output.outputs]) for output in outputs]
    return [found, stats, outputs]


def divided(layout: str, **options) -> dict:
    return {**options, **LAYOUTS[layout], "executor": "tests.layouts.executor"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "params, options",
    [
        (SEEDED, {}),
        (greedy(), {"max_num_batched_tokens": 7}),
        (greedy(), {"num_gpu_blocks_override": 14, "enable_prefix_caching": False}),
        (greedy(), {"kv_cache_dtype": "int8"}),
        (greedy(), {"kv_cache_dtype": "fp8"}),
        (greedy(), {"quantization": "mxfp4"}),
        (greedy(structured_outputs=StructuredOutputs(json=SCHEMA)), {}),
        (greedy(bad_words=[" the"], logit_bias={7: 2.0}, min_tokens=4), {}),
    ],
    ids=["seeds", "chunks", "preemption", "int8 cache", "fp8 cache", "mxfp4 weights", "a schema", "edits"],
)
def test_answers_are_those_of_one_process(layout, params, options, llama):
    expected, stats, _ = answers(params, **llama, **options)
    found, found_stats, _ = answers(params, **divided(layout, **llama, **options))
    assert found == expected
    if "num_gpu_blocks_override" in options:
        assert stats.num_preemptions and found_stats.num_preemptions


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_of_prompts_and_answers_are_those_of_one_process(layout, llama):
    params = greedy(logprobs=3, prompt_logprobs=2)
    _, _, expected = answers(params, **llama)
    _, _, found = answers(params, **divided(layout, **llama))
    for one, other in zip(found, expected):
        for entry, wanted in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:]):
            assert {key: value.logprob for key, value in entry.items()} == pytest.approx(
                {key: value.logprob for key, value in wanted.items()}, abs=1e-4
            )


@pytest.mark.parametrize("layout, method", [("tp 2", "ngram"), ("tp 2", "suffix"), ("pp 2", "suffix")])
def test_guessed_tokens_change_no_answer(layout, method, llama):
    settings = {"method": method, "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 9, 3]]}
    params = greedy(allowed_token_ids=[7, 8, 9])  # so that there is something to guess
    expected, _, _ = answers(params, **llama)
    found, stats, _ = answers(params, **divided(layout, **llama, speculative_config=settings))
    assert found == expected
    assert stats.num_drafts > 0


def test_a_pipeline_cannot_guess_in_a_worker(llama):
    with pytest.raises(QuireError, match="use the method suffix"):
        LLM(**OPTIONS, **llama, **LAYOUTS["pp 2"], speculative_config={"method": "ngram"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_sleeps_and_wakes_up(layout, llama):
    llm = LLM(**OPTIONS, **divided(layout, **llama))
    before = llm.generate(PROMPTS[0], greedy(), use_tqdm=False)[0].outputs[0].token_ids
    llm.sleep(level=1)
    llm.wake_up()
    assert llm.generate(PROMPTS[0], greedy(), use_tqdm=False)[0].outputs[0].token_ids == before
    llm.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_weights_of_a_gguf_file_are_divided(layout, smollm2):
    """Nine heads, three KV heads: six and three over two ranks."""
    options = {"model": str(smollm2), "load_format": "auto", "max_model_len": 256}
    expected, _, _ = answers(greedy(), **options)
    found, _, _ = answers(greedy(), **divided(layout, **options))
    assert found == expected


def test_experts_stay_whole_if_asked(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    options = {"model": str(tmp_path), "skip_tokenizer_init": True}
    expected, _, _ = answers(greedy(), **options)
    found, _, _ = answers(greedy(), **divided("tp 2", **options, enable_expert_parallel=True))
    assert found == expected


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"tensor_parallel_size": 5}, "--tensor-parallel-size 5 is too many for this model"),
        ({"pipeline_parallel_size": 9}, "--pipeline-parallel-size can be at most"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"tensor_parallel_size": 2, "executor": "uni"}, "2 workers need processes of their own"),
    ],
)
def test_what_cannot_be_divided_is_said_in_a_sentence(options, sentence, llama):
    with pytest.raises(QuireError, match=sentence):
        LLM(**OPTIONS, **llama, **options)
