"""Each processor equals the one of transformers, on random logits; presence and frequency equal their formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling.on_cpu import sampling_rows
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire.ops.mask.reference import mask_logits
from quire.ops.sampling import cpu as native
from quire.params import SamplingParams
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import edit_sparsely

VOCAB = 3000  # wide enough for blocks and for every width of candidates
ROWS = 4


def random_logits(seed: int, scale: float = 3.0, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((ROWS,), value, dtype=dtype)


def restricted(logits: Tensor, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """What `restrict` leaves, as logits over the whole vocabulary."""
    result = torch.full_like(logits, -torch.inf)
    num_rows = 0
    for group in native.restrict(logits, column(min_p), column(top_k, torch.int64), column(top_p)):
        result[group.rows] = result[group.rows].scatter(1, group.ids, group.logits)
        num_rows += len(group.rows)
    assert num_rows == len(logits)
    return result


def edit(logits: Tensor, batch: SamplingRows, tokens: Tensor, lengths: Tensor) -> None:
    """All that comes before the argmax, in place."""
    rows = torch.arange(ROWS)
    edit_sparsely(logits, range(ROWS), rows, lengths, batch, tokens)
    native.penalize(logits, rows, lengths, batch.columns, tokens)


def edited(logits: Tensor, history: Tensor, prompt_len: int, **given) -> Tensor:
    """The logits after everything that `SamplingParams(**given)` does before the argmax."""
    outside = {name: given.pop(name) for name in ("bad_word_ids", "stop_ids") if name in given}
    batch = sampling_rows(ROWS, logits.shape[1])
    for row in range(ROWS):
        batch.set(row, SamplingParams(**given, max_tokens=None), seed=0, prompt_len=prompt_len, **outside)
    logits = logits.clone()
    edit(logits, batch, history.int(), torch.full((ROWS,), history.shape[1]))
    return logits


def random_history(seed: int, length: int, vocab_size: int = VOCAB) -> Tensor:
    return torch.randint(vocab_size, (ROWS, length), generator=torch.Generator().manual_seed(seed))


seeds = st.integers(0, 10_000)
scales = st.sampled_from([0.5, 3.0, 12.0])
# 5,003 is not a multiple of a block; 50 is less than the smallest number of candidates looked at.
vocab_sizes = st.sampled_from([50, 3000, 5003])


@given(seeds, st.floats(0.05, 5.0))
@settings(max_examples=20, deadline=None)
def test_temperature_equals_transformers(seed, temperature):
    logits = random_logits(seed)
    expected = TemperatureLogitsWarper(temperature)(None, logits.clone())
    native.divide_by_temperature(logits, column(temperature))
    torch.testing.assert_close(logits, expected)


@given(seeds, scales, vocab_sizes, st.integers(1, 3500))
@settings(max_examples=40, deadline=None)
def test_top_k_equals_transformers(seed, scale, vocab_size, top_k):
    logits = random_logits(seed, scale, vocab_size)
    assert torch.equal(restricted(logits, top_k=top_k), TopKLogitsWarper(top_k)(None, logits))


@given(seeds, st.integers(1, 300))
@settings(max_examples=20, deadline=None)
def test_top_k_keeps_the_equals_of_the_last_token_as_transformers_does(seed, top_k):
    logits = random_logits(seed).round()
    assert torch.equal(restricted(logits, top_k=top_k), TopKLogitsWarper(top_k)(None, logits))


@given(seeds, scales, vocab_sizes, st.floats(0.01, 0.999))
@settings(max_examples=40, deadline=None)
def test_top_p_equals_transformers(seed, scale, vocab_size, top_p):
    logits = random_logits(seed, scale, vocab_size)
    assert_same_but_at_the_border(restricted(logits, top_p=top_p), TopPLogitsWarper(top_p)(None, logits), logits)


@given(seeds, st.floats(0.01, 0.999))
@settings(max_examples=30, deadline=None)
def test_top_p_keeps_as_many_of_equal_tokens_as_transformers_does_and_those_of_the_lowest_ids(seed, top_p):
    logits = (random_logits(seed) / 2).round() * 2
    ours, theirs = restricted(logits, top_p=top_p), TopPLogitsWarper(top_p)(None, logits)
    assert (ours.isfinite().sum(-1) - theirs.isfinite().sum(-1)).abs().max() <= 1  # float32 masses: see below
    for row, kept in zip(logits, ours.isfinite(), strict=True):
        assert kept[row > row[kept].amin()].all()
        equals = kept[row == row[kept].amin()]
        assert equals[: equals.sum()].all()


def assert_same_but_at_the_border(ours: Tensor, theirs: Tensor, logits: Tensor) -> None:
    """transformers sums probabilities in float32: over thousands of tokens the border may be off by a mass of 1e-5."""
    differ = ours != theirs
    assert (logits.double().softmax(-1) * differ).sum(-1).max() < 2e-5
    largest_that_differs = torch.maximum(ours, theirs).masked_fill(~differ, -torch.inf).amax(-1)
    least_kept_by_both = ours.masked_fill(differ | ours.isinf(), torch.inf).amin(-1)
    assert (largest_that_differs < least_kept_by_both).all()


def test_top_p_keeps_one_token_and_all_tokens_at_its_ends():
    logits = random_logits(0)
    assert (restricted(logits, top_p=1e-6).isfinite().sum(-1) == 1).all()
    assert torch.equal(restricted(logits, top_p=1.0), logits)


@given(seeds, scales, vocab_sizes, st.floats(1e-4, 1.0))
@settings(max_examples=40, deadline=None)
def test_min_p_equals_transformers(seed, scale, vocab_size, min_p):
    logits = random_logits(seed, scale, vocab_size)
    assert torch.equal(restricted(logits, min_p=min_p), MinPLogitsWarper(min_p)(None, logits))


@given(seeds, scales, st.floats(1e-4, 0.5), st.integers(1, 400), st.floats(0.05, 0.999))
@settings(max_examples=40, deadline=None)
def test_min_p_then_top_k_then_top_p_equal_transformers_in_this_order(seed, scale, min_p, top_k, top_p):
    logits = random_logits(seed, scale)
    expected = MinPLogitsWarper(min_p)(None, logits)
    expected = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, expected))
    assert_same_but_at_the_border(restricted(logits, min_p, top_k, top_p), expected, logits)


@given(seeds, st.floats(0.2, 3.0), st.integers(1, 80))
@settings(max_examples=20, deadline=None)
def test_repetition_penalty_equals_transformers(seed, penalty, length):
    logits, history = random_logits(seed), random_history(seed, length, 60)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits)
    ours = edited(logits, history, prompt_len=length // 2, repetition_penalty=penalty)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@given(seeds, st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 40), st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_presence_and_frequency_count_the_output_alone(seed, presence, frequency, num_output, prompt_len):
    logits, history = random_logits(seed), random_history(seed, prompt_len + num_output, 30)
    count = torch.stack([torch.bincount(row[prompt_len:], minlength=VOCAB) for row in history])
    expected = logits - count * frequency - (count > 0) * presence
    ours = edited(logits, history, prompt_len, presence_penalty=presence, frequency_penalty=frequency)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-5)


def test_penalties_of_rows_with_different_lengths_do_not_touch_each_other():
    logits, history = random_logits(1), random_history(1, 50, 20)
    lengths, prompts = torch.tensor([50, 3, 17, 30]), [10, 3, 2, 30]
    batch = sampling_rows(ROWS, VOCAB)
    for row in range(ROWS):
        params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
        batch.set(row, SamplingParams() if row == 2 else params, seed=0, prompt_len=prompts[row])
    ours = logits.clone()
    edit(ours, batch, history.int(), lengths)
    assert torch.equal(ours[2], logits[2])
    for row in (0, 1, 3):
        seen = history[row : row + 1, : lengths[row]]
        expected = RepetitionPenaltyLogitsProcessor(1.3)(seen, logits[row : row + 1])[0]
        count = torch.bincount(seen[0, prompts[row] :], minlength=VOCAB)
        torch.testing.assert_close(ours[row], expected - 0.4 * count - 0.2 * (count > 0), rtol=1e-6, atol=1e-6)


@given(seeds, st.dictionaries(st.integers(1, VOCAB - 1), st.floats(-100, 100, width=32), min_size=1, max_size=20))
@settings(max_examples=20, deadline=None)
def test_logit_bias_equals_transformers(seed, bias):
    logits, history = random_logits(seed), random_history(seed, 5)
    expected = SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()])(history, logits)
    torch.testing.assert_close(edited(logits, history, 3, logit_bias=bias), expected)


words = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=8)


@given(seeds, words, st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_bad_words_equal_transformers(seed, bad_word_ids, length):
    logits, history = random_logits(seed), random_history(seed, length, 5)
    expected = NoBadWordsLogitsProcessor(bad_word_ids)(history, logits)
    assert torch.equal(edited(logits, history, 1, bad_word_ids=bad_word_ids), expected)


@pytest.mark.parametrize("num_output", [0, 1, 4, 5, 6])
def test_min_tokens_equals_transformers(num_output):
    logits, history = random_logits(2), random_history(2, 7 + num_output)
    expected = MinNewTokensLengthLogitsProcessor(7, 5, eos_token_id=[3, 8])(history, logits)
    assert torch.equal(edited(logits, history, 7, min_tokens=5, stop_ids=[8, 3, 3]), expected)


def test_allowed_token_ids_equal_suppressing_all_others():
    logits, history = random_logits(3), random_history(3, 5)
    others = [i for i in range(VOCAB) if i not in (5, 17, 2999)]
    expected = SuppressTokensLogitsProcessor(others)(history, logits)
    assert torch.equal(edited(logits, history, 3, allowed_token_ids=[5, 2999, 17, 17]), expected)


@pytest.mark.parametrize("vocab_size", [50, 3000, 5003])
def test_a_packed_mask_forbids_the_tokens_whose_bit_is_zero(vocab_size):
    logits = random_logits(4, vocab_size=vocab_size)
    allowed = random_logits(5, vocab_size=vocab_size) > 0
    packed = torch.zeros(ROWS, -(-vocab_size // 32), dtype=torch.int64)
    for row, token_id in allowed.nonzero().tolist():
        packed[row, token_id // 32] |= 1 << (token_id % 32)
    expected = logits.masked_fill(~allowed, -torch.inf)
    mask_logits(logits, torch.arange(ROWS), packed.int())
    assert torch.equal(logits, expected)


def test_token_ids_outside_of_the_vocabulary_change_nothing():
    logits, history = random_logits(6), random_history(6, 5)
    given = {
        "logit_bias": {VOCAB: 5.0, 10**9: 1.0},
        "min_tokens": 9,
        "stop_ids": [VOCAB + 1],
        "bad_word_ids": [[1, VOCAB]],
    }
    assert torch.equal(edited(logits, history, 3, **given), logits)
