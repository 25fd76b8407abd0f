"""What programs written for vLLM do with an LLM: names, arguments and outputs as they know them."""

import dataclasses
import functools
import math

import pytest
from tqdm import tqdm

from quire import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from quire.api.commands._sampling import SamplingOptions
from quire.errors import RequestError
from quire.metrics.reader import Counter, Gauge, Histogram, Vector
from quire.outputs import FlatLogprobs

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TINY = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 32 << 20,
    "num_threads": 1,
    "max_model_len": 128,
}
HELLO = [{"role": "user", "content": "Hello"}]
# ChatML that ends a prompt with the beginning of thinking.
THINKING = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    with LLM(str(tiny_llama), **TINY) as llm:
        yield llm


@pytest.fixture(scope="module")
def smol(smollm2):
    with LLM("smollm2", max_model_len=1024) as llm:
        yield llm


def greedy(**fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **fields)


def answer(llm: LLM, prompt, params=GREEDY):
    return llm.generate(prompt, params, use_tqdm=False)[0]


# -- starting ----------------------------------------------------------------------------------------------------------


def test_engine_args_make_an_llm_either_way(tiny_llama):
    args = EngineArgs(str(tiny_llama), **TINY)
    for make in (lambda: LLM(**dataclasses.asdict(args)), lambda: LLM.from_engine_args(args)):
        with make() as llm:
            assert llm.llm_engine.model_config.max_model_len == 128
            assert llm.model_config.hf_config.vocab_size == llm.model_config.get_vocab_size() == 256
            assert (llm.model_config.model, llm.model_config.dtype) == (str(tiny_llama), "float32")


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_prompts_may_be_typed_dicts(smol):
    text = answer(smol, TextPrompt(prompt="The sea is"))
    same = answer(smol, TokensPrompt(prompt_token_ids=text.prompt_token_ids, prompt="The sea is"))
    assert same.prompt == text.prompt == "The sea is"
    assert same.outputs[0].text == text.outputs[0].text


def test_the_prompt_of_a_chat_is_its_rendered_text(smol):
    output = smol.chat(HELLO, GREEDY, use_tqdm=False)[0]
    tokenizer = smol.get_tokenizer()
    assert output.prompt == tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert output.prompt_token_ids == tokenizer.encode(output.prompt, add_special_tokens=False)


def test_a_chat_takes_a_template_and_its_arguments(smol):
    template = "{{ greeting }} {{ messages[0].content }}{% if tools %} {{ tools[0].name }}{% endif %}"
    options = {"chat_template_kwargs": {"greeting": "Well,"}, "tools": [{"name": "hammer"}]}
    output = smol.chat(HELLO, GREEDY, use_tqdm=False, chat_template=template, **options)[0]
    assert output.prompt == "Well, Hello hammer"
    continued = [*HELLO, {"role": "assistant", "content": "The sea"}]
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    assert smol.chat(continued, GREEDY, False, chat_template_content_format="string", **flags)[0].prompt.endswith(
        "The sea"
    )
    parts = "{{ messages[0].content | tojson }}"
    output = smol.chat(HELLO, GREEDY, False, chat_template=parts, chat_template_content_format="openai")[0]
    assert output.prompt == '[{"type": "text", "text": "Hello"}]'
    with pytest.raises(RequestError, match="must be auto, string or openai"):
        smol.chat(HELLO, GREEDY, chat_template_content_format="parts")


def test_one_priority_is_for_all_prompts_and_bars_can_be_made_by_the_caller(tiny):
    bar = functools.partial(tqdm, leave=False)
    assert len(tiny.generate([[1], [2]], GREEDY, use_tqdm=bar, priority=3)) == 2


def test_adapters_are_refused_in_a_sentence(tiny):
    with pytest.raises(RequestError, match="LoRA"):
        tiny.generate([1, 2], GREEDY, use_tqdm=False, lora_request=object())


# -- running -----------------------------------------------------------------------------------------------------------


def test_enqueued_requests_run_when_somebody_waits_for_them(tiny):
    ids = tiny.enqueue([[1, 2], [3, 4]], GREEDY) + tiny.enqueue([5, 6], greedy(logprobs=1), priority=1)
    assert not tiny.client.engine.has_work
    outputs = tiny.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert outputs[0].outputs[0].token_ids == answer(tiny, [1, 2]).outputs[0].token_ids
    assert tiny.wait_for_completion(use_tqdm=False) == []


def test_the_prefix_cache_can_be_reset_between_requests(smol):
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    answer(smol, prompt)
    assert answer(smol, prompt).num_cached_tokens > 0
    assert answer(smol, prompt, greedy(skip_reading_prefix_cache=True)).num_cached_tokens == 0
    assert smol.reset_prefix_cache() is True
    smol.client.engine.kv.check()
    assert answer(smol, prompt).num_cached_tokens == 0


def test_the_prefix_cache_of_a_running_request_is_reset_only_if_told_so(smol):
    whole = answer(smol, "The sea is", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)).outputs[0].text
    stream = smol.stream("The sea is", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    next(stream)
    assert smol.reset_prefix_cache() is False
    assert smol.reset_prefix_cache(reset_running_requests=True) is True
    smol.client.engine.kv.check()
    assert [output.outputs[0].text for output in stream][-1] == whole


def test_what_would_send_code_is_refused_with_the_reason(tiny):
    for refused in (tiny.collective_rpc, tiny.apply_model):
        with pytest.raises(RequestError, match="no function can be sent"):
            refused(print)
    for refused in (tiny.start_profile, tiny.stop_profile):
        with pytest.raises(RequestError, match="torch.profiler"):
            refused()


def test_get_metrics_counts_what_was_done(tiny_llama):
    with LLM(str(tiny_llama), **TINY) as llm:
        llm.generate([[1, 2, 3], [4, 5]], GREEDY, use_tqdm=False)
        found = {metric.name.removeprefix("quire:"): metric for metric in llm.get_metrics()}
        for name, value in {"prompt_tokens": 5, "generation_tokens": 16}.items():
            assert isinstance(found[name], Counter) and found[name].value == value
        assert isinstance(found["num_requests_running"], Gauge)
        assert isinstance(found["spec_decode_num_accepted_tokens_per_pos"], Vector)
        lengths = found["request_generation_tokens"]
        assert isinstance(lengths, Histogram)
        assert (lengths.count, lengths.sum, lengths.buckets["+Inf"]) == (2, 16, 2)
        assert found["engine_step_seconds"].count == found["iteration_tokens_total"].count == 8
        ended = [metric for metric in llm.get_metrics() if metric.name == "quire:request_success"]
        assert {metric.labels["finished_reason"]: metric.value for metric in ended}["length"] == 2


def test_a_stream_gives_deltas_where_they_are_asked_for(smol):
    texts = [output.outputs[0].text for output in smol.stream("The sea is", GREEDY)]
    deltas = list(smol.stream("The sea is", greedy(output_kind=RequestOutputKind.DELTA)))
    assert "".join(output.outputs[0].text for output in deltas) == texts[-1]
    assert all(len(output.outputs[0].token_ids) == 1 for output in deltas)


# -- parameters --------------------------------------------------------------------------------------------------------


def test_logprobs_of_the_whole_vocabulary(tiny):
    output = answer(tiny, [1, 2, 3], greedy(logprobs=-1, prompt_logprobs=-1))
    for entry in [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]:
        assert sorted(entry) == list(range(256))
        assert math.isclose(sum(math.exp(each.logprob) for each in entry.values()), 1.0, rel_tol=1e-4)
        assert sorted(each.rank for each in entry.values()) == list(range(1, 257))
    with pytest.raises(RequestError, match="logprobs must be at most 256"):
        answer(tiny, [1, 2, 3], greedy(logprobs=257))


def test_logprobs_of_named_tokens_are_those_of_the_whole_vocabulary(tiny):
    whole = answer(tiny, [1, 2, 3], greedy(logprobs=-1)).outputs[0]
    prompts = [[1, 2, 3]] * 3
    params = [greedy(logprob_token_ids=[9, 200, 9]), greedy(logprobs=3), greedy(logprobs=2, logprob_token_ids=[7, 8])]
    named, likeliest, two = (output.outputs[0] for output in tiny.generate(prompts, params, use_tqdm=False))
    assert named.token_ids == likeliest.token_ids == whole.token_ids
    for token, entry, everything in zip(named.token_ids, named.logprobs, whole.logprobs):
        assert set(entry) == {9, 200, token}
        for token_id, each in entry.items():
            assert each.logprob == pytest.approx(everything[token_id].logprob, abs=1e-5)
        assert entry[token].rank == 1 and {entry[9].rank, entry[200].rank} <= {None, 1}
    assert all(set(entry) == {7, 8, token} for token, entry in zip(two.token_ids, two.logprobs))
    for entry, everything in zip(likeliest.logprobs, whole.logprobs):
        assert list(entry) == [token for token, each in everything.items() if each.rank <= 3]


def test_flat_logprobs_read_like_the_others(tiny):
    plain = answer(tiny, [1, 2, 3], greedy(logprobs=2, prompt_logprobs=1))
    flat = answer(tiny, [1, 2, 3], greedy(logprobs=2, prompt_logprobs=1, flat_logprobs=True))
    logprobs = flat.outputs[0].logprobs
    assert isinstance(logprobs, FlatLogprobs) and isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert list(logprobs) == plain.outputs[0].logprobs and list(logprobs[2:4]) == plain.outputs[0].logprobs[2:4]
    assert len(logprobs.token_ids) == len(logprobs.logprobs) == logprobs.end_indices[-1]
    assert [entry or None for entry in flat.prompt_logprobs] == plain.prompt_logprobs


def test_a_repeated_pattern_ends_the_answer(tiny):
    fields = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "allowed_token_ids": [7]}
    detection = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 4}
    output = answer(tiny, [1, 2], SamplingParams(**fields, repetition_detection=detection)).outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (
        [7] * 8,
        "repetition",
        "repetition_detected",
    )
    assert (
        len(answer(tiny, [7] * 20, SamplingParams(**fields, repetition_detection=detection)).outputs[0].token_ids) == 8
    )


def test_more_answers_than_a_server_gives(tiny):
    output = answer(tiny, [1, 2, 3], SamplingParams(n=300, max_tokens=1, seed=1))
    assert [choice.index for choice in output.outputs] == list(range(300))


def test_blanks_and_more_properties_can_be_forbidden(smol):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
    question = [{"role": "user", "content": 'Write {"a": 5, "b": 6} as JSON.'}]
    compact = StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=True)
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=compact)
    text = smol.chat(question, params, use_tqdm=False)[0].outputs[0].text
    assert text.startswith('{"a":') and text.endswith("}") and " " not in text and "b" not in text
    params.structured_outputs = StructuredOutputsParams(json=schema, whitespace_pattern=" {3}")
    assert smol.chat(question, params, use_tqdm=False)[0].outputs[0].text.startswith('{   "a":   ')


def test_thinking_is_left_alone_by_the_shape_of_the_answer(smollm2):
    options = {"max_model_len": 512, "chat_template": THINKING, "reasoning_parser": "think"}
    shape = StructuredOutputsParams(choice=["yes", "no"])
    fields = {"temperature": 0, "max_tokens": 40, "structured_outputs": shape}
    with LLM("smollm2", **options) as llm:
        question = [{"role": "user", "content": "Is the sea wet?"}]
        prompt = llm.get_tokenizer().apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        params = SamplingParams(**fields, thinking_token_budget=10)
        for output in (llm.chat(question, params, use_tqdm=False)[0], answer(llm, prompt, params)):
            thoughts, _, said = output.outputs[0].text.partition("</think>")
            assert thoughts.strip() and said.strip() in ("yes", "no")
        plain = llm.chat(question, SamplingParams(**fields), use_tqdm=False)[0].outputs[0].text
        assert plain.strip() not in ("yes", "no")


# -- beam search -------------------------------------------------------------------------------------------------------


def test_beam_search_finds_the_likeliest_sequences(tiny):
    """Beams as wide as the vocabulary leave nothing out for two tokens: all pairs can be counted."""
    width = 256
    (output,) = tiny.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=width, max_tokens=2, ignore_eos=True))
    whole = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True)
    first = answer(tiny, [1, 2, 3], whole).outputs[0].logprobs[0]
    seconds = tiny.generate([[1, 2, 3, token] for token in range(256)], whole, use_tqdm=False)
    totals = {
        (token, then): first[token].logprob + entry.logprob
        for token, output_ in enumerate(seconds)
        for then, entry in output_.outputs[0].logprobs[0].items()
    }
    best = sorted(totals, key=totals.get, reverse=True)[:20]
    found = [tuple(sequence.tokens[3:]) for sequence in output.sequences[:20]]
    assert [totals[pair] for pair in found] == pytest.approx([totals[pair] for pair in best], abs=1e-4)
    assert output.sequences[0].cum_logprob == pytest.approx(totals[best[0]], abs=1e-4)
    assert len(output.sequences) == width and {each.finish_reason for each in output.sequences} == {"length"}


def test_a_beam_that_ends_is_kept_and_the_best_come_first(smol):
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    outputs = smol.beam_search(["The capital of France is", {"prompt": "Hello"}], params, concurrency_limit=1)
    for output in outputs:
        totals = [each.cum_logprob / len(each.tokens) for each in output.sequences]
        assert len(output.sequences) == 3 and totals == sorted(totals, reverse=True)
    assert "Paris" in outputs[0].sequences[0].text
    greedy_text = answer(smol, "The capital of France is", SamplingParams(temperature=0, max_tokens=6)).outputs[0]
    one = smol.beam_search("The capital of France is", BeamSearchParams(beam_width=1, max_tokens=6))[0].sequences[0]
    assert one.tokens[-6:] == greedy_text.token_ids


def test_a_chat_in_the_terminal_samples_as_a_server_does(smol):
    assert SamplingOptions().params(smol.model, None, None) == smol.model.default_params(max_tokens=None)
