"""A row may have several samples in one step: each sees the history before its own position, on all kernels."""

import pytest
import torch
from tests.sampling.on_cpu import sampling_rows
from torch import Tensor

from quire.ops.mask import reference as reference_mask
from quire.ops.sampling import cpu, reference
from quire.ops.vocab import cpu as cpu_vocab
from quire.params import SamplingParams
from quire.sampling.custom import LogitsProcessor
from quire.sampling.sampler import SampleLogprobs, SampleMasks, Sampler

VOCAB = 2_503
MAX_LEN = 40
PROMPT_LEN = 6
BEST, SECOND, THIRD = 1100, 70, 2400  # tokens of the largest logits, in this order


def kernels(device: str) -> tuple:
    if device == "triton":
        mask = pytest.importorskip("quire.ops.mask.triton")
        triton = pytest.importorskip("quire.ops.sampling.triton")
        if torch.cuda.is_available():
            pytest.skip("the tensors of this test are on the CPU: tests/worker/test_gpu.py runs the sampler on a GPU")
        return triton.sample, mask.mask_logits, triton.Scratch(16, VOCAB, "cpu")
    if device == "cpu":
        return cpu.sample, cpu_vocab.mask_logits, None
    return reference.sample, reference_mask.mask_logits, None


@pytest.fixture(params=["reference", "cpu", "triton"])
def device(request) -> str:
    return request.param


class Step:
    def __init__(self, device: str, num_rows: int = 3) -> None:
        self.sample, self.mask_logits, self.scratch = kernels(device)
        self.batch = sampling_rows(num_rows, VOCAB)
        self.int_type = torch.int32 if device == "triton" else torch.int64
        # No history has any of the three unless a test puts it there.
        self.tokens = torch.randint(10, 20, (num_rows, MAX_LEN), generator=torch.Generator().manual_seed(0)).int()

    def set(self, row: int, bad_words: list[list[int]] = [], stop_ids: list[int] = [], **params) -> None:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": None} | params)
        self.batch.set(row, params, seed=5 + row, prompt_len=PROMPT_LEN, bad_word_ids=bad_words, stop_ids=stop_ids)

    def run(
        self, places: list[tuple[int, int]], logits: Tensor | None = None, masks: SampleMasks | None = None
    ) -> tuple[list[int], SampleLogprobs | None]:
        """Ids for samples (row, position), all with the same logits unless told otherwise."""
        rows, positions = zip(*places)
        logits = likely().repeat(len(rows), 1) if logits is None else logits.clone()
        out = torch.full((len(rows),), -77, dtype=torch.int32)
        sampler = Sampler(self.sample, self.mask_logits, self.batch, self.tokens, self.scratch)
        given = torch.tensor(rows, dtype=self.int_type), torch.tensor(positions, dtype=self.int_type)
        logprobs = sampler.sample(logits, rows, *given, out, masks)
        for row, position, token_id in zip(rows, positions, out.tolist()):
            assert self.tokens[row, position] == token_id
        return out.tolist(), logprobs


def likely() -> Tensor:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, [BEST, SECOND, THIRD]] = torch.tensor([12.0, 11.0, 10.0])
    return logits


def test_penalties_count_the_history_before_each_position(device):
    step = Step(device)
    step.set(0, repetition_penalty=4.0)
    step.set(1, presence_penalty=2.0)
    step.tokens[0, 12], step.tokens[0, 13] = SECOND, BEST
    step.tokens[1, 2], step.tokens[1, 12] = SECOND, BEST  # place 2 is in the prompt, which presence does not count
    ids, _ = step.run([(0, 12), (1, 12), (0, 13), (1, 13), (0, 14)])
    # The second sample of row 0 sees SECOND at place 12, as it was, and not the BEST that the first sample puts there.
    assert ids == [BEST, BEST, BEST, SECOND, THIRD]


def test_bad_words_are_forbidden_where_the_history_begins_them(device):
    step = Step(device)
    step.set(2, bad_words=[[30, BEST], [30, 31, SECOND]])
    step.tokens[2, 10], step.tokens[2, 11] = 30, 31
    ids, _ = step.run([(2, 10), (2, 11), (2, 12)])
    assert ids == [BEST, SECOND, BEST]


def test_a_stop_token_is_forbidden_before_the_least_number_of_tokens(device):
    step = Step(device)
    step.set(1, min_tokens=3, stop_ids=[BEST])
    ids, _ = step.run([(1, PROMPT_LEN + n) for n in (4, 3, 2, 1)])
    assert ids == [BEST, BEST, SECOND, SECOND]


class Lengths(LogitsProcessor):
    """The token after a history of n tokens is n."""

    def wants(self, row, params, prompt_token_ids):
        return True

    def apply(self, logits, rows, tokens, lengths):
        assert len(logits) == len(rows) == len(lengths)
        logits.scatter_(1, lengths[:, None], 100.0)


def test_an_operators_processor_is_told_the_length_of_each_samples_history(device):
    step = Step(device)
    step.set(0)
    step.set(1)
    step.batch.custom = [(Lengths(VOCAB, torch.device("cpu")), {1})]
    ids, _ = step.run([(1, 20), (0, 21), (1, 22), (1, 21)])
    assert ids == [20, BEST, 22, 21]


def test_masks_logprobs_and_noise_are_a_samples_own(device):
    step = Step(device)
    step.set(0, temperature=3.0, top_k=40, logprobs=2)
    step.set(1, temperature=3.0)
    step.set(2, temperature=0.0, allowed_token_ids=[SECOND, THIRD])
    words = torch.full((2, -(-VOCAB // 32)), 0, dtype=torch.int32)
    words[0, THIRD // 32], words[1, SECOND // 32] = 1 << THIRD % 32, 1 << SECOND % 32
    places = [(0, 9), (1, 9), (0, 10), (1, 10), (2, 9), (0, 11), (0, 12)]
    masks = SampleMasks(torch.tensor([6, 3]), words)
    logits = 4 * torch.randn(len(places), VOCAB, generator=torch.Generator().manual_seed(2))
    raw = logits.log_softmax(-1)
    ids, logprobs = step.run(places, logits, masks)
    assert ids[6] == THIRD and ids[3] == SECOND and ids[4] in (SECOND, THIRD)
    assert logprobs.places == [0, 2, 5, 6] and logprobs.num_top == [2, 2, 2, 2]
    expected = raw[logprobs.places, [ids[i] for i in logprobs.places]]
    torch.testing.assert_close(logprobs.tokens.logprobs, expected, atol=1e-5, rtol=1e-5)
    for i, place in enumerate(places):  # the same alone
        if i not in (3, 6):
            assert step.run([place], logits[i : i + 1])[0] == [ids[i]]


@pytest.mark.parametrize("seed", range(4))
def test_all_kernels_choose_the_same_for_any_samples_of_any_rows(seed):
    random = torch.Generator().manual_seed(seed)
    kinds = [
        {"repetition_penalty": 1.6, "presence_penalty": -0.5},
        {"temperature": 0.9, "frequency_penalty": 0.7, "min_tokens": 9, "stop_ids": list(range(10, 14))},
        {"temperature": 1.5, "top_p": 0.8, "presence_penalty": 1.0, "bad_words": [[i, i + 1] for i in range(10, 19)]},
        {"temperature": 2.0, "top_k": 30, "logit_bias": {11: 3.0, 12: -3.0}},
    ]
    places = [(row, position) for row in range(4) for position in range(PROMPT_LEN, MAX_LEN)]
    places = [places[i] for i in torch.randperm(len(places), generator=random)[:8]]
    logits = torch.randn(len(places), VOCAB, generator=random)
    logits[:, 10:20] += 3.0
    chosen = []
    for device in ("reference", "cpu", "triton"):
        step = Step(device, num_rows=4)
        for row, kind in enumerate(kinds):
            step.set(row, **kind)
        chosen.append((step.run(places, logits)[0], step.tokens.tolist()))
    assert chosen[0] == chosen[1] == chosen[2]
