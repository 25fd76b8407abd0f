"""Draws follow the softmax, depend on nothing but their own row, and one broken row harms no other."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare
from tests.sampling.on_cpu import Sampled, sample, sampling_rows
from torch import Tensor

from quire.ops.sampling import gumbel
from quire.ops.vocab import reference as vocab
from quire.params import SamplingParams
from quire.sampling.logprobs import token_logprobs
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import SampleMasks

NUM_DRAWS = 100_000
DRAWS_PER_STEP = 5_000
SMALL_VOCAB = 50
VOCAB = 5003  # not a multiple of a block
KINDS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(top_k=10),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.05),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def run(logits: Tensor, params: list[SamplingParams], seeds=None, positions=None, **given) -> Sampled:
    """Samples one row per entry of `params`, with empty histories."""
    batch = sampling_rows(len(params), logits.shape[1])
    for row, param in enumerate(params):
        batch.set(row, param, seed=seeds[row] if seeds else row, prompt_len=1)
    tokens = torch.zeros(len(params), 1, dtype=torch.int32)
    positions = torch.tensor(positions) if positions else torch.ones(len(params), dtype=torch.int64)
    return sample(logits.clone(), range(len(params)), batch, tokens, positions, **given)


@functools.cache
def equal_rows(kind: str, vocab_size: int) -> SamplingRows:
    batch = sampling_rows(DRAWS_PER_STEP, vocab_size)
    for row in range(DRAWS_PER_STEP):
        batch.set(row, KINDS[kind], seed=0, prompt_len=1)
    return batch


def draws(logits: Tensor, kind: str, varying: str, num_draws: int = NUM_DRAWS) -> Tensor:
    """Tokens drawn from one row of logits by as many seeds, positions or choices."""
    batch = equal_rows(kind, len(logits))
    tokens = torch.zeros(DRAWS_PER_STEP, 1, dtype=torch.int32)
    drawn = []
    for start in range(0, num_draws, DRAWS_PER_STEP):
        counter = torch.arange(start, start + DRAWS_PER_STEP)
        batch.columns.seed.copy_(counter if varying == "seed" else torch.tensor(7))
        batch.columns.choice_idx.copy_(counter if varying == "choice" else torch.tensor(3))
        positions = counter if varying == "position" else torch.full_like(counter, 5)
        repeated = logits.repeat(DRAWS_PER_STEP, 1)
        drawn.append(sample(repeated, range(DRAWS_PER_STEP), batch, tokens, positions).token_ids)
    return torch.cat(drawn)


def assert_follows(drawn: Tensor, probabilities: Tensor) -> None:
    """Chi-square; tokens expected less than 5 times are taken together, impossible ones must not occur."""
    observed = torch.bincount(drawn, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(drawn)
    assert observed[expected == 0].sum() == 0
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    likely = expected > 0
    assert chisquare(observed[likely], expected[likely] / expected.sum() * observed.sum()).pvalue > 1e-4


def kept_softmax(logits: Tensor, kept: Tensor) -> Tensor:
    return logits.masked_fill(~kept, -torch.inf).softmax(-1)


def expected_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """By sorting, in float64: one restriction at a time."""
    scaled = logits.double() / params.temperature
    probabilities = scaled.softmax(-1)
    order = probabilities.argsort(descending=True)
    before = torch.zeros_like(probabilities)
    before[order] = probabilities[order].cumsum(-1) - probabilities[order]
    kept = torch.ones_like(probabilities, dtype=torch.bool)
    if params.top_k:
        kept &= scaled >= scaled[order[params.top_k - 1]]
    kept &= before < params.top_p
    kept &= probabilities >= params.min_p * probabilities.max()
    return kept_softmax(scaled, kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("varying", ["seed", "position", "choice"])
def test_100_000_draws_pass_a_chi_square_test(kind, varying):
    logits = random_logits(SMALL_VOCAB, seed=1)
    assert_follows(draws(logits, kind, varying), expected_probabilities(logits, KINDS[kind]))


@pytest.mark.parametrize("varying", ["seed", "position", "choice"])
def test_draws_from_a_large_vocabulary_pass_a_chi_square_test(varying):
    # Zipf's law, as words have it; by way of blocks and bounds.
    ranks = 1 + torch.randperm(2048, generator=torch.Generator().manual_seed(2)).float()
    logits = -1.1 * ranks.log()
    assert_follows(draws(logits, "plain", varying, 40_000), logits.double().softmax(-1))


def assert_independent(first: Tensor, second: Tensor) -> None:
    table = torch.zeros(8, 8).index_put_((first, second), torch.ones(()), accumulate=True)
    assert chi2_contingency(table.numpy()).pvalue > 1e-4


def test_neighbouring_seeds_positions_and_choices_are_independent_also_of_each_other():
    drawn = [draws(torch.zeros(8), "plain", varying) for varying in ("seed", "position", "choice")]
    for tokens, distance in itertools.product(drawn, (1, 2, 64, 1024)):
        assert_independent(tokens[:-distance], tokens[distance:])
    for first, second in itertools.combinations(drawn, 2):
        assert_independent(first, second)


def test_noise_of_neighbouring_tokens_is_uncorrelated_and_exponential():
    key = gumbel.row_key(torch.arange(40), torch.arange(40) // 7, torch.zeros(40, dtype=torch.int64))
    noise = -gumbel._score(torch.zeros(40, 30_000), gumbel.token_words(30_000, torch.device("cpu")), key)
    exponential = noise.exp().double()  # score = -log E
    assert abs(exponential.mean() - 1) < 5e-3 and abs(exponential.var() - 1) < 2e-2
    for one, other in ((exponential[:, 1:], exponential[:, :-1]), (exponential[1:], exponential[:-1])):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 4e-3
    share = (exponential < 1e-4).double().mean() / 1e-4  # the small ones, which win, are as rare as they should be
    assert 0.8 < share < 1.2


def test_the_hash_is_what_its_definition_says():
    def mix64(z):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            z = (z ^ (z >> shift)) * factor % 2**64
        return z

    def mix32(t):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            t = (t ^ (t >> shift)) * factor % 2**32
        return t

    def hashed(seed, choice, position, token_id):
        key = mix64(mix64((seed + 0x9E3779B97F4A7C15) % 2**64) ^ (choice << 32 | position))
        h = (mix32(token_id) ^ key % 2**32) * (key >> 32 | 1) % 2**32
        h = h - 2**32 if h >> 31 else h
        h = (h ^ (h >> 15)) * 0x846CA68B % 2**32
        return h - 2**32 if h >> 31 else h

    for seed, choice, position in [(0, 0, 0), (-1, 5, 2**31 - 1), (2**63 - 1, 127, 77), (-(2**63), 0, 8191)]:
        key = gumbel.row_key(*(torch.tensor([word]) for word in (seed, position, choice)))
        ours = gumbel._hash(gumbel.token_words(200_000, torch.device("cpu")), key)[0]
        for token_id in (0, 1, 2, 49_151, 199_999):
            assert ours[token_id] == hashed(seed, choice, position, token_id)


@given(st.integers(0, 1000), st.sampled_from([0.0, 1.0, 4.0, 100.0, 1e6]), st.sampled_from([1024, VOCAB]))
@settings(max_examples=40, deadline=None)
def test_opening_few_blocks_finds_the_largest_score_of_all(seed, scale, vocab_size):
    logits = random_logits(6, vocab_size, seed=seed, scale=scale)
    logits[1, 10:] = logits[2, :-1] = -torch.inf
    key = [torch.arange(6) + seed, torch.full((6,), 3), torch.zeros(6, dtype=torch.int64)]
    words = gumbel.token_words(vocab_size, logits.device)
    expected = gumbel._score(logits, words, gumbel.row_key(*key)).argmax(-1)
    assert torch.equal(gumbel._argmax_score(logits, words, gumbel.row_key(*key)), expected)
    assert torch.equal(gumbel.gumbel_argmax(logits, *key), expected)
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed)).expand(6, -1)
    assert torch.equal(gumbel.gumbel_argmax(logits.gather(1, order), *key, order), expected)


@given(
    st.integers(0, 1000),
    st.sampled_from([64, 1000, 4096, VOCAB]),
    st.integers(1, 40),
    st.sampled_from([0.0, 1.0, 50.0]),
)
@settings(max_examples=60, deadline=None)
def test_block_reductions_equal_torch_with_the_lowest_id_of_equals_first(seed, vocab_size, k, scale):
    x = random_logits(5, vocab_size, seed=seed, scale=scale).round()
    values, ids = x.sort(dim=-1, descending=True, stable=True)
    top, top_ids = vocab.row_topk(x, k)
    assert torch.equal(top, values[:, :k]) and torch.equal(top_ids, ids[:, :k])
    largest, largest_ids = vocab.row_argmax(x)
    assert torch.equal(largest, values[:, 0]) and torch.equal(largest_ids, ids[:, 0])
    torch.testing.assert_close(largest + vocab.row_sum_exp(x, largest).log().float(), x.logsumexp(-1))
    assert torch.equal(vocab.row_count_above(x, x[:, 0]), (x > x[:, :1]).sum(-1))


MIXED = [
    SamplingParams(temperature=0),
    *KINDS.values(),
    SamplingParams(temperature=1.5, top_p=0.99),
    SamplingParams(temperature=0.3, top_k=300, top_p=0.9, min_p=0.01),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.1),
    SamplingParams(logit_bias={3: 5.0}, bad_words=["x"], temperature=0),
    SamplingParams(allowed_token_ids=[5, 6, 900], logprobs=3),
    SamplingParams(min_tokens=8, top_k=4),
]


def fill(batch: SamplingRows, row: int, i: int) -> None:
    """Puts request number i of `MIXED` into a row."""
    batch.set(
        row,
        MIXED[i % len(MIXED)],
        seed=100 + i,
        choice_idx=i % 3,
        prompt_len=4,
        bad_word_ids=[[i, i + 1], [9]],
        stop_ids=[2],
    )


def test_a_request_gives_the_same_token_alone_in_a_batch_of_64_and_in_any_row():
    vocab_size = 32_003  # wide enough that 64 rows and one row take different ways through the noise
    logits = random_logits(64, vocab_size, seed=3)
    history = torch.randint(vocab_size, (64, 30), generator=torch.Generator().manual_seed(4))
    lengths = torch.arange(64) % 20 + 5
    together = sampling_rows(64, vocab_size)
    for i in range(64):
        fill(together, i, i)
    expected = sample(logits.clone(), range(64), together, history.int(), lengths).token_ids

    order = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    shuffled = sampling_rows(64, vocab_size)
    for row, i in enumerate(order.tolist()):
        fill(shuffled, row, i)
    ours = sample(logits[order], range(64), shuffled, history[order].int(), lengths[order]).token_ids
    assert torch.equal(ours, expected[order])

    for i in range(64):
        row = (7 * i) % 5
        alone = sampling_rows(5, vocab_size)
        fill(alone, row, i)
        tokens = torch.zeros(5, 30, dtype=torch.int32)
        tokens[row] = history[i].int()
        output = sample(logits[i : i + 1].clone(), [row], alone, tokens, lengths[i : i + 1])
        assert output.token_ids == expected[i]


def test_a_recycled_row_carries_nothing_of_its_former_owner():
    used, fresh = sampling_rows(3, VOCAB), sampling_rows(3, VOCAB)
    for i in range(3 * len(MIXED)):
        fill(used, 1, i)
    for batch in (used, fresh):
        batch.set(1, SamplingParams(temperature=0), seed=1, prompt_len=4)
    for name, value in vars(fresh).items():
        if name == "columns":
            assert all(map(torch.equal, used.columns, value))
        elif name != "table":  # its columns are compared
            assert torch.equal(vars(used)[name], value) if isinstance(value, Tensor) else vars(used)[name] == value
    logits = random_logits(1, VOCAB)
    tokens = torch.full((3, 8), 9, dtype=torch.int32)
    output = sample(logits.clone(), [1], used, tokens, torch.tensor([8]))
    assert output.token_ids == logits.argmax() and output.logprobs is None


def test_a_packed_mask_limits_greedy_and_random_rows():
    mask = torch.zeros(3, -(-VOCAB // 32), dtype=torch.int32)
    mask[:, 40] = -(2**31) | 5  # tokens 1280, 1282 and 1311
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.9)]
    logits = random_logits(3, VOCAB)
    drawn = run(logits, params, masks=SampleMasks(torch.arange(len(mask)), mask)).token_ids.tolist()
    assert set(drawn) <= {1280, 1282, 1311}
    assert drawn[0] == max((1280, 1282, 1311), key=logits[0].__getitem__)


def test_broken_rows_harm_no_other_and_still_give_a_token():
    params = [SamplingParams(temperature=t, top_p=p) for t in (0, 0.8) for p in (1.0, 0.9)] * 4
    logits = random_logits(16, VOCAB, seed=6)
    whole = run(logits, params, seeds=[1] * 16).token_ids
    broken = logits.clone()
    broken[0:4] = torch.nan
    broken[4:8] = -torch.inf
    broken[8:12, ::2] = torch.nan
    broken[8:12, 70] = torch.inf
    ours = run(broken, params, seeds=[1] * 16).token_ids
    assert torch.equal(ours[12:], whole[12:])
    assert (ours[0:8] == 0).all()  # nothing to choose from
    assert (ours[8:12] == 70).all()


def test_nan_counts_as_forbidden():
    logits = random_logits(4, VOCAB, seed=7)
    logits[:, 1::2] = torch.nan
    params = [SamplingParams(temperature=t, top_k=k) for t in (0, 1.0) for k in (0, 5)]
    assert (run(logits, params).token_ids % 2 == 0).all()


def test_where_everything_is_forbidden_the_argmax_of_the_raw_logits_is_taken():
    logits = random_logits(3, VOCAB, seed=8)
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5)]
    masks = SampleMasks(torch.arange(3), torch.zeros(3, -(-VOCAB // 32), dtype=torch.int32))
    assert torch.equal(run(logits, params, masks=masks).token_ids, logits.argmax(-1))


def test_greedy_rows_take_bfloat16_and_give_the_lowest_id_of_equals():
    logits = random_logits(4, VOCAB, seed=9).bfloat16()
    logits[:, [4000, 77, 1234]] = 50.0
    assert (run(logits, [SamplingParams(temperature=0)] * 4).token_ids == 77).all()


def test_logits_may_be_a_slice_of_a_padded_vocabulary_and_a_step_may_be_empty():
    params = [*KINDS.values(), SamplingParams(repetition_penalty=2.0)]
    padded = random_logits(len(params), VOCAB + 61, seed=12)
    expected = run(padded[:, :VOCAB].contiguous(), params).token_ids
    batch = sampling_rows(len(params), VOCAB)
    for row, param in enumerate(params):
        batch.set(row, param, seed=row, prompt_len=1)
    tokens = torch.zeros(len(params), 1, dtype=torch.int32)
    lengths = torch.ones(len(params), dtype=torch.int64)
    ours = sample(padded[:, :VOCAB], range(len(params)), batch, tokens, lengths).token_ids
    assert torch.equal(ours, expected)
    assert len(sample(padded[:0, :VOCAB], [], batch, tokens, lengths[:0]).token_ids) == 0


def test_logprobs_come_from_the_raw_logits_for_the_rows_that_asked():
    logits = random_logits(4, VOCAB, seed=10)
    params = [
        SamplingParams(temperature=0, logprobs=2, logit_bias={5: 100.0}),
        SamplingParams(),
        SamplingParams(temperature=0.5, logprobs=4, top_p=0.9),
        SamplingParams(logprobs=0),
    ]
    output = run(logits, params)
    raw = logits.log_softmax(-1)
    assert output.token_ids[0] == 5
    assert output.logprobs.places == [0, 2, 3] and output.logprobs.num_top == [2, 4, 0]
    chosen = raw[[0, 2, 3], output.token_ids[[0, 2, 3]]]
    torch.testing.assert_close(output.logprobs.tokens.logprobs, chosen)
    assert torch.equal(output.logprobs.tokens.ranks, (raw[[0, 2, 3]] > chosen[:, None]).sum(-1) + 1)
    expected = raw[[0, 2, 3]].topk(4)
    assert torch.equal(output.logprobs.tokens.top_ids, expected.indices)
    torch.testing.assert_close(output.logprobs.tokens.top_logprobs, expected.values)


def test_logprobs_of_named_tokens_stand_beside_those_of_the_likeliest():
    logits = random_logits(3, VOCAB, seed=12)
    params = [
        SamplingParams(temperature=0, logprob_token_ids=[7, 3, 900]),
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(temperature=0, logprob_token_ids=[1]),
    ]
    output = run(logits, params)
    raw = logits.log_softmax(-1)
    assert output.logprobs.num_top == [3, 2, 1]
    columns = output.logprobs.tokens
    assert columns.top_ids[0].tolist() == [7, 3, 900] and columns.top_ids[2, 0] == 1
    assert torch.equal(columns.top_ids[1, :2], raw[1].topk(2).indices)
    torch.testing.assert_close(columns.top_logprobs, raw.gather(1, columns.top_ids))


def test_prompt_logprobs_are_the_same_in_chunks():
    logits, targets = random_logits(500, VOCAB, seed=11), torch.arange(500) * 10
    ours = token_logprobs(logits, targets, 5)  # in chunks of 209 tokens
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(ours.logprobs, expected[torch.arange(500), targets])
    torch.testing.assert_close(ours.top_logprobs, expected.topk(5).values)
    assert torch.equal(ours.ranks[:3], token_logprobs(logits[:3], targets[:3], 0).ranks)


def test_a_top_p_too_small_for_float32_keeps_the_most_likely_token():
    logits = random_logits(3, VOCAB)
    batch = sampling_rows(3, VOCAB)
    for row, top_p in enumerate((1e-50, 1e-300, 1e-9)):
        batch.set(row, SamplingParams(top_p=top_p), seed=row, prompt_len=1)
    tokens, lengths = torch.zeros(3, 8, dtype=torch.int32), torch.ones(3, dtype=torch.int64)
    assert torch.equal(sample(logits.clone(), [0, 1, 2], batch, tokens, lengths).token_ids, logits.argmax(-1))
