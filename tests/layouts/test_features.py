"""What an engine can do, it can do with its model divided over processes: the answers are those of one process."""

import json
from itertools import takewhile

import pytest

from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire.models.gpt_oss import TINY as GPT_OSS
from quire.models.llama import TINY as LLAMA
from quire.models.qwen3_moe import TINY as QWEN3_MOE
from quire.params import StructuredOutputs
from tests.layouts.executor import end_all
from tests.models.test_fallback import CASES as FALLBACK
from tests.quant.published.common import SIZES
from tests.quant.test_dummy import FORMS

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
IN_BFLOAT16 = 0.01  # how much logprobs may differ
SHARED = list(range(20, 60))
PROMPTS = [[5, 6, 7, 8, 9], [*SHARED, 3], [3], [*SHARED, 4], [7, 8, 9] * 8]
SEEDED = SamplingParams(temperature=0.9, top_k=40, seed=5, n=2, repetition_penalty=1.1, max_tokens=24, ignore_eos=True)


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 32, "ignore_eos": True, **fields})


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


def answers(params: SamplingParams | list[SamplingParams], prompts: list[list[int]] = PROMPTS, **options) -> list:
    llm = LLM(**{**OPTIONS, **options})
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.client.engine.stats()
        llm.client.engine.kv.check()
    finally:
        llm.close()
    found = [(output.prompt_token_ids, [choice.token_ids for choice in output.outputs]) for output in outputs]
    return [found, stats, outputs]


def divided(layout: str, **options) -> dict:
    return {**options, **LAYOUTS[layout], "executor": "tests.layouts.executor"}


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
def test_answers_are_those_of_one_process(params, options, llama):
    expected, stats, _ = answers(params, **llama, **options)
    for layout in LAYOUTS:
        found, found_stats, _ = answers(params, **divided(layout, **llama, **options))
        assert found == expected, layout
        if "num_gpu_blocks_override" in options:
            assert stats.num_preemptions and found_stats.num_preemptions, layout


def test_prefixes_are_found_and_change_no_answer(llama):
    def found(**options) -> tuple[list, int]:
        with LLM(**{**OPTIONS, **options}) as llm:
            outputs = [llm.generate(prompt, greedy(), use_tqdm=False)[0] for prompt in PROMPTS]
            return [output.outputs[0].token_ids for output in outputs], llm.client.engine.stats().prefix_hits

    expected = found(**llama)
    assert expected[1] == len(SHARED) // 16 * 16
    for layout in LAYOUTS:
        assert found(**divided(layout, **llama)) == expected, layout


def test_logprobs_of_prompts_and_answers_are_those_of_one_process(llama):
    params = greedy(logprobs=3, prompt_logprobs=2)
    _, _, expected = answers(params, **llama)
    for layout in LAYOUTS:
        _, _, found = answers(params, **divided(layout, **llama))
        for one, other in zip(found, expected, strict=True):
            compare(one.prompt_logprobs[1:], other.prompt_logprobs[1:])
            compare(one.outputs[0].logprobs, other.outputs[0].logprobs)


def compare(found: list[dict], expected: list[dict]) -> None:
    """Logprobs by token, of each position."""
    for entry, wanted in zip(found, expected, strict=True):
        values = {token: each.logprob for token, each in entry.items()}
        assert values == pytest.approx({token: each.logprob for token, each in wanted.items()}, abs=1e-4)


# Every packed weight can be cut into two.
WIDE = {**SIZES, "intermediate_size": 512, "head_dim": 128}
GGUF = {"quant_method": "gguf"}
# Of config.json; how weights are rounded while they are loaded.
FORMS_IN_BFLOAT16 = {
    "Q4_K": ({**WIDE, "quantization_config": {**GGUF, "types": {"model": "Q4_K"}}}, "auto"),
    "Q8_0": ({**WIDE, "quantization_config": {**GGUF, "types": {"model": "Q8_0"}}}, "auto"),
    **{name: ({**WIDE, "quantization_config": FORMS[name][0]}, "auto") for name in ("awq", "gptq", "fp8 in blocks")},
    "int8": (WIDE, "int8"),
    "int4": (WIDE, "int4"),
    "parts of 48 inputs": (LLAMA, "auto"),
    "parts of 48 inputs, int8": (LLAMA, "int8"),
    "experts of 24 inputs": ({**QWEN3_MOE, "moe_intermediate_size": 48}, "auto"),
    "experts of 24 inputs in one tensor": ({**GPT_OSS, "intermediate_size": 48}, "auto"),
}


@pytest.mark.parametrize("form", FORMS_IN_BFLOAT16)
def test_weights_of_every_form_are_divided_in_bfloat16_too(form, tmp_path):
    """Sums are rounded in another order: tokens are the same up to the first that two tokens are about as good for."""
    fields, quantization = FORMS_IN_BFLOAT16[form]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    options = {"model": str(tmp_path), "skip_tokenizer_init": True, "dtype": "auto", "quantization": quantization}
    prompts = [[token % fields["vocab_size"] for token in prompt] for prompt in PROMPTS]
    params = greedy(logprobs=2, prompt_logprobs=0, max_tokens=12)
    _, _, expected = answers(params, prompts, **options)
    stable = [list(takewhile(is_clear, output.outputs[0].logprobs)) for output in expected]
    assert any(stable)
    for layout in LAYOUTS:
        _, _, found = answers(params, prompts, **divided(layout, **options))
        for one, other, clear in zip(found, expected, stable, strict=True):
            chosen = [each.outputs[0].token_ids[: len(clear)] for each in (one, other)]
            assert chosen[0] == chosen[1], layout
            given = [logprobs_of(each, len(clear)) for each in (one, other)]
            assert given[0] == pytest.approx(given[1], abs=IN_BFLOAT16), layout


def is_clear(entry: dict, tolerance: float = IN_BFLOAT16) -> bool:
    """No other token was about as good as the best."""
    first, second = sorted((each.logprob for each in entry.values()), reverse=True)[:2]
    return first - second > 2 * tolerance


def logprobs_of(output, count: int) -> list[float]:
    """Of the prompt's tokens, and of so many that were chosen."""
    choice = output.outputs[0]
    of_prompt = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:])]
    return of_prompt + [entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids[:count])]


@pytest.mark.parametrize("layout, method", [("tp 2", "ngram"), ("tp 2", "suffix"), ("pp 2", "suffix")])
def test_guessed_tokens_change_no_answer(layout, method, llama):
    settings = {"method": method, "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 9, 3]]}
    params = greedy(allowed_token_ids=[7, 8, 9])  # so that there is something to guess
    expected, _, _ = answers(params, **llama)
    found, stats, _ = answers(params, **divided(layout, **llama, speculative_config=settings))
    assert found == expected
    assert stats.num_drafts > 0


def test_guessed_tokens_follow_a_grammar_too(llama):
    """Ranks guess, the core must know what: it makes a mask for each place."""
    settings = {"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 9, 3]]}
    params = greedy(structured_outputs=StructuredOutputs(regex=r"(yes|no)( (yes|no)){9,200}"), max_tokens=64)
    expected, _, _ = answers(params, **llama)
    found, stats, _ = answers(params, **divided("tp 2", **llama), speculative_config=settings)
    assert found == expected
    assert sum(stats.accepted_drafts) > 30


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


def test_real_weights_of_a_gguf_file_are_divided(smollm2):
    """Nine heads, three KV heads: six and three over two ranks."""
    options = {"model": str(smollm2), "load_format": "auto", "max_model_len": 256}
    expected, _, _ = answers(greedy(max_tokens=16), **options)
    for layout in LAYOUTS:
        found, _, _ = answers(greedy(max_tokens=16), **divided(layout, **options))
        assert found == expected, layout


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


@pytest.mark.parametrize("options", LAYOUTS.values())
def test_a_family_without_a_file_of_its_own_is_not_divided(options, tmp_path):
    architecture, fields = next(iter(FALLBACK.items()))
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": [architecture]}))
    with pytest.raises(QuireError, match=f"{architecture} has no file of its own here"):
        LLM(**OPTIONS, model=str(tmp_path), skip_tokenizer_init=True, **options)
