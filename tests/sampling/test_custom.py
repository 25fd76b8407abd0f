"""Operators' own logits processors: loaded by name, asked once per request, applied to those who want them."""

import pytest
import torch

from quire import LLM, LogitsProcessor, SamplingParams
from quire.errors import ConfigError
from quire.sampling.custom import load

HERE = "tests.sampling.test_custom"


class After(LogitsProcessor):
    """Each token is the one before it plus one; `extra_args["first"]` says where that begins."""

    def __init__(self, vocab_size, device):
        super().__init__(vocab_size, device)
        self.first = torch.zeros(1000, dtype=torch.int64, device=device)

    def wants(self, row, params, prompt_token_ids):
        if "first" not in params.extra_args:
            return False
        self.first[row] = params.extra_args["first"] + len(prompt_token_ids)
        return True

    def apply(self, logits, rows, tokens, lengths):
        rows = torch.tensor(rows)
        wanted = (self.first[rows] + lengths) % self.vocab_size
        logits.scatter_(1, wanted[:, None], 1e9)


@pytest.fixture(scope="module", params=["native", "triton"])
def llm(request, tiny_llama):
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "device": "cpu"}
    options["interpret_triton"] = request.param == "triton"
    with LLM(str(tiny_llama), logits_processors=[f"{HERE}:After"], **options) as llm:
        yield llm


def test_only_the_rows_that_want_it_are_processed(llm):
    prompt, greedy = [5, 6, 7], dict(temperature=0, max_tokens=5)
    plain = llm.generate(prompt, SamplingParams(**greedy), use_tqdm=False)[0].outputs[0].token_ids
    params = [
        SamplingParams(**greedy, extra_args={"first": 10}),
        SamplingParams(**greedy),
        SamplingParams(**greedy, extra_args={"first": 90}),
    ]
    outputs = [o.outputs[0].token_ids for o in llm.generate([prompt] * 3, params, use_tqdm=False)]
    assert outputs == [[16, 17, 18, 19, 20], plain, [96, 97, 98, 99, 100]]


def test_a_row_forgets_the_processor_of_whoever_had_it_before(llm):
    prompt, greedy = [5, 6, 7], dict(temperature=0, max_tokens=5)
    plain = llm.generate(prompt, SamplingParams(**greedy), use_tqdm=False)[0].outputs[0].token_ids
    llm.generate(prompt, SamplingParams(**greedy, extra_args={"first": 10}), use_tqdm=False)
    assert llm.generate(prompt, SamplingParams(**greedy), use_tqdm=False)[0].outputs[0].token_ids == plain


@pytest.mark.parametrize("path", ["nowhere.to.be:Found", "math:sqrt", "math", "quire.params:SamplingParams", ":X"])
def test_what_is_no_processor_is_refused_with_its_name(path):
    with pytest.raises(ConfigError, match=path.partition(":")[0] or "processor"):
        load([path], 100, torch.device("cpu"))
