"""The sampler of GPUs chooses what its torch twin chooses, except where float32 cannot tell scores or masses apart.

Without a GPU the kernels run in Triton's interpreter, which needs some 50 ms for each program: there rows are few and
short.
"""

import pytest
import torch
from tests.sampling.on_cpu import sample, sampling_rows
from torch import Tensor

from quire.ops.sampling import gumbel
from quire.ops.sampling import reference as twin
from quire.ops.sampling import triton as sampling
from quire.ops.sampling.penalties import penalize
from quire.params import SamplingParams
from quire.sampling.rows import FLOATS, INTS

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
VOCAB = 151_936 if ON_GPU else 2_503  # the latter is a prime
HALF = torch.bfloat16 if ON_GPU else torch.float16
MAX_LEN = 60
DEFAULTS = {"temperature": 0.8, "top_p": 1.0, "repetition_penalty": 1.0, "prompt_len": 7}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: one to three programs share a row, and loop over up to three tiles."""
    if not ON_GPU:
        monkeypatch.setattr(sampling, "NUM_PROGRAMS", 12)


class Step:
    """A step whose sample i has the parameters `asked[i]`.

    Its row of the persistent batch has another number; some rows are free.
    """

    def __init__(self, logits_SV: Tensor, asked: list[dict], seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        num_rows = len(asked) + 3
        self.logits = logits_SV.to(DEVICE)
        rows = torch.randperm(num_rows, generator=random)[: len(asked)]
        seeds = torch.randint(2**40, (len(asked),), generator=random).tolist()
        drawn = [{"seed": seed, "choice_idx": row} for seed, row in zip(seeds, rows.tolist(), strict=True)]
        full = [DEFAULTS | own | params for own, params in zip(drawn, asked, strict=True)]
        floats = torch.zeros(num_rows, len(FLOATS))
        ints = torch.zeros(num_rows, len(INTS), dtype=torch.int64)
        floats[rows] = torch.tensor([values_of(FLOATS, params) for params in full], dtype=torch.float32)
        ints[rows] = torch.tensor([values_of(INTS, params) for params in full])
        columns = *floats.to(DEVICE).unbind(1), *ints.to(DEVICE).unbind(1)
        table = dict(zip((*FLOATS, *INTS), columns, strict=True))
        self.columns = twin.SamplerColumns(**{name: table[name] for name in twin.SamplerColumns._fields})
        self.rows = rows.int().to(DEVICE)
        self.positions = torch.randint(10, MAX_LEN, (len(asked),), generator=random).int().to(DEVICE)
        few = torch.randint(VOCAB, (40,), generator=random)  # so that tokens repeat
        self.tokens = few[torch.randint(40, (num_rows, MAX_LEN), generator=random)].int().to(DEVICE)

    def run(self, module=sampling, scratch: sampling.Scratch | None = None, **flags: bool) -> tuple[Tensor, Tensor]:
        """(chosen ids, histories), with outputs that are wrong before; the step itself stays as it was."""
        out_S, tokens = torch.full_like(self.rows, -77), self.tokens.clone()
        scratch = scratch or sampling.Scratch(*self.logits.shape, DEVICE)
        stages = {"random": False, "restricted": False, "penalized": False} | flags
        given = self.logits, self.rows, self.positions, self.columns, tokens, out_S
        before = self.logits.clone()
        module.sample(*given, **stages, scratch=scratch)
        assert torch.equal(self.logits.nan_to_num(nan=3e38), before.nan_to_num(nan=3e38))
        assert not scratch.arrived.any()
        return out_S, tokens

    def check(self, **flags: bool) -> Tensor:
        """Runs kernels and twin, asserts that they agree, and returns the ids."""
        (ids_S, tokens), (twin_ids_S, _) = self.run(**flags), self.run(twin, **flags)
        expected = self.tokens.clone()
        for row, position, token_id in zip(self.rows.tolist(), self.positions.tolist(), ids_S.tolist(), strict=True):
            if row >= 0 and position < MAX_LEN:
                expected[row, position] = token_id
        assert torch.equal(tokens, expected)
        for i in (ids_S != twin_ids_S).nonzero()[:, 0].tolist():
            assert flags.get("random"), "only draws may differ"
            self._check_close(i, int(ids_S[i]), **flags)
        return ids_S

    def _check_close(
        self, i: int, token_id: int, random: bool, restricted: bool = False, penalized: bool = False
    ) -> None:
        """The token may be kept, within float32's rounding, and no token that certainly is kept has a better score."""
        row, position = self.rows[i : i + 1].long(), self.positions[i : i + 1].long()
        columns = twin.SamplerColumns(*(column[row] for column in self.columns))
        logits = self.logits[i : i + 1].float().nan_to_num(nan=-torch.inf, posinf=twin.VERY_LARGE, neginf=-torch.inf)
        if penalized:
            logits = twin.penalties(logits, self.tokens[row], position, columns)
        scaled = logits / columns.temperature[:, None]
        key = gumbel.row_key(columns.seed, position, columns.choice_idx)
        words = gumbel.token_words(VOCAB, scaled.device)
        score = gumbel._score(scaled, words[: scaled.shape[1]], key)
        is_surely_kept = is_maybe_kept = scaled > -torch.inf
        if restricted:
            is_surely_kept, is_maybe_kept = (twin.kept(scaled, columns, extra) for extra in (-1e-5, 1e-5))
        best = score.masked_fill(~is_surely_kept, -torch.inf).max()
        assert is_maybe_kept[0, token_id] and score[0, token_id] >= best - 4e-7 * max(1.0, abs(best))


def values_of(names: tuple[str, ...], params: dict) -> list:
    return [params.get(name, 0) for name in names]


def logits_of(num_rows: int, seed: int = 0, vocab_size: int = VOCAB, scale: float = 3.0) -> Tensor:
    padded = scale * torch.randn(num_rows, vocab_size + 16, generator=torch.Generator().manual_seed(seed))
    return padded[:, :vocab_size]  # strided


def fit(ids: Tensor, probabilities: Tensor) -> float:
    """The p-value of the chi-square test: how likely draws at least this far from their probabilities are."""
    expected = probabilities.double() * len(ids)
    chi_square = ((torch.bincount(ids.cpu(), minlength=len(expected)) - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), chi_square / 2))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_greedy_rows_take_the_lowest_of_the_largest(dtype: torch.dtype) -> None:
    logits = logits_of(6).to(dtype)
    logits[0, [100, 1500, VOCAB - 1]] = 90.0
    logits[1, 5:] = torch.nan
    logits[2, [7, 2000]] = torch.inf
    logits[3] = -torch.inf
    logits[4] = torch.nan
    logits[5] = -torch.rand(VOCAB).to(dtype)
    logits[5, 3], logits[5, 2] = 0.0, -0.0
    step = Step(logits, [{"temperature": 0.0}] * 6)
    ids = step.check().tolist()
    assert ids[0] == 100 and ids[2] == 7 and ids[3] == ids[4] == 0 and ids[5] == 2


def test_the_last_token_of_a_row_can_be_chosen_and_padding_gets_none() -> None:
    logits = logits_of(3)
    logits[:, -1] = 50.0
    step = Step(logits, [{"temperature": 0.0}] * 3)
    step.rows[1] = -1
    step.positions[2] = MAX_LEN  # no place left: it is only returned
    assert step.check().tolist() == [VOCAB - 1, -1, VOCAB - 1]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_draws_are_the_twins_beside_greedy_rows(dtype: torch.dtype) -> None:
    logits = logits_of(8).to(dtype)
    logits[1, ::3] = torch.nan
    logits[2, 9] = torch.inf
    logits[3] = -torch.inf
    logits[4] = logits[4].round()
    asked = [{}, {}, {}, {}, {"temperature": 1.0}, {"temperature": 1e-6}, {"temperature": 20.0}, {"temperature": 0.01}]
    assert Step(logits, asked).check(random=True)[2] == 9


def test_a_row_that_several_programs_share_is_chosen_as_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(logits_of(2, seed=1), [{}, {"temperature": 0.0}])
    shared = step.check(random=True)
    monkeypatch.setattr(sampling, "choose_config", lambda num_rows, vocab_size: (256 * 2**ON_GPU, 10**4, 2))
    assert torch.equal(shared, step.check(random=True))


RESTRICTED = {
    "top_k": [
        {"top_k": 1, "temperature": 1.0},
        {"top_k": 20, "temperature": 0.6},
        {"top_k": 39, "temperature": 5.0},
        {"top_k": 700, "temperature": 20.0},
        {"top_k": VOCAB, "temperature": 1.0},
    ],
    "top_p": [
        {"top_p": 1e-6, "temperature": 1.0},
        {"top_p": 0.3, "temperature": 1.0},
        {"top_p": 0.95, "temperature": 0.6},
        {"top_p": 0.9, "temperature": 30.0},
        {"top_p": 0.9999, "temperature": 5.0},
    ],
    "all": [
        {"min_p": 0.05, "temperature": 3.0},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.5, "temperature": 8.0},
        {"top_k": 100, "top_p": 0.9, "min_p": 0.001, "temperature": 2.0},
        {"top_p": 0.8, "min_p": 0.01, "temperature": 4.0},
    ],
}


@pytest.mark.parametrize("kind", RESTRICTED)
def test_restricted_draws_are_the_twins(kind: str) -> None:
    Step(logits_of(5, seed=2), RESTRICTED[kind]).check(random=True, restricted=True)


def test_restricted_draws_among_equals_and_broken_logits() -> None:
    logits = logits_of(7, seed=3).to(HALF)
    logits[:3] = logits[:3].round()
    logits[2, ::5], logits[2, 1::5] = torch.nan, -torch.inf
    logits[3, [2, 1700]] = torch.inf
    logits[4] = -torch.inf
    logits[5, 3:] = -torch.inf  # fewer than top_k
    asked = [{"top_p": 0.7, "temperature": 3.0}, {"top_k": 30, "temperature": 3.0}, {"top_k": 50, "top_p": 0.9}]
    asked += [{"top_k": 5}, {"top_p": 0.5}, {"top_k": 50}, {"temperature": 0.0, "top_p": 0.1}]
    ids = Step(logits, asked).check(random=True, restricted=True)
    assert ids[3] in (2, 1700) and ids[4] == 0 and ids[5] < 3


def test_the_last_token_that_is_kept_can_win_and_the_next_cannot() -> None:
    logits = logits_of(1, seed=9).repeat(4, 1)
    same = {"temperature": 20.0, "seed": 1, "choice_idx": 1}
    free = Step(logits, [same] * 4)
    free.positions.fill_(20)
    winner = int(free.run(twin, random=True)[0][0])
    likelier = logits[0] > logits[0, winner]
    rank = int(likelier.sum())
    mass = float((logits[0] / 20.0).double().softmax(0)[likelier].sum())
    limits = {"top_k": rank + 1}, {"top_k": rank}, {"top_p": mass * 1.0001}, {"top_p": mass * 0.9999}
    step = Step(logits, [same | limit for limit in limits])
    step.positions.fill_(20)
    assert (step.check(random=True, restricted=True) == winner).tolist() == [True, False, True, False]


def test_of_equal_tokens_top_p_keeps_the_lower_ids() -> None:
    num_rows, vocab_size = (2000 if ON_GPU else 5), 640
    ids = Step(torch.zeros(num_rows, vocab_size), [{"top_p": 0.1}] * num_rows).check(random=True, restricted=True)
    assert ids.max() < 64 and len(ids.unique()) > 2


def test_penalties_count_the_history_on_the_device() -> None:
    asked = [
        {"temperature": 0.0, "repetition_penalty": 1.7},
        {"temperature": 0.0, "frequency_penalty": -0.9},
        {"temperature": 0.0, "presence_penalty": -2.0, "frequency_penalty": 0.3},
        {"repetition_penalty": 0.1, "prompt_len": MAX_LEN},
        {"presence_penalty": 2.0, "top_k": 40, "top_p": 0.9, "temperature": 3.0},
        {},
    ]
    step = Step(logits_of(6, seed=4, scale=1.0).to(HALF), asked)
    step.tokens[:, 0], step.tokens[:, 3] = -1, VOCAB  # not in the vocabulary: ignored
    bare, _ = step.run(twin, random=True, restricted=True)
    assert not torch.equal(step.check(random=True, restricted=True, penalized=True), bare)


def test_penalized_logits_are_the_twins_to_the_last_bit() -> None:
    names = "repetition_penalty", "presence_penalty", "frequency_penalty"
    penalties = (1.7, 0, 0), (1, 0.7, -0.3), (0.3, -2, 1.1)
    step = Step(logits_of(3, seed=5), [dict(zip(names, values, strict=True)) for values in penalties])
    edited_SV = torch.full((3, VOCAB), torch.nan, device=DEVICE)
    penalize(step.logits, step.rows, step.positions, step.columns, step.tokens, edited_SV)
    rows = step.rows.long()
    columns = twin.SamplerColumns(*(column[rows] for column in step.columns))
    assert torch.equal(edited_SV, twin.penalties(step.logits, step.tokens[rows], step.positions, columns))


def test_a_row_in_which_everything_is_forbidden_takes_its_raw_argmax() -> None:
    logits = torch.full((3, VOCAB), -torch.inf)
    logits[:, [50, 300]] = torch.tensor([-3e38, -2e38])
    asked = [{"repetition_penalty": 10.0, "temperature": 0.0}, {"repetition_penalty": 10.0}]
    step = Step(logits, [*asked, {"repetition_penalty": 10.0, "top_p": 0.5}])
    step.tokens[:, 1], step.tokens[:, 2] = 50, 300
    assert step.check(random=True, restricted=True, penalized=True).tolist() == [300, 300, 300]


def test_other_rows_do_not_change_a_choice() -> None:
    asked = [{}, {"top_p": 0.9, "temperature": 5.0}, {"top_k": 20, "presence_penalty": 1.0}]
    flags = {"random": True, "restricted": True, "penalized": True}
    step = Step(logits_of(3, seed=6), asked)
    scratch = sampling.Scratch(3, VOCAB, DEVICE)
    together = step.run(scratch=scratch, **flags)[0]
    for i in range(3):
        alone = Step(step.logits[i : i + 1], [{}])
        alone.rows, alone.positions, alone.tokens = step.rows[i : i + 1], step.positions[i : i + 1], step.tokens
        alone.columns = step.columns
        assert alone.run(scratch=scratch, **flags)[0].item() == together[i]


def test_a_launch_can_be_repeated_and_on_a_gpu_captured() -> None:
    step = Step(logits_of(2, seed=7), [{}, {"temperature": 0.0}])
    scratch = sampling.Scratch(2, VOCAB, DEVICE)
    expected, _ = step.run(scratch=scratch, random=True)
    out_S, tokens = torch.full_like(step.rows, -77), step.tokens.clone()

    def launch() -> None:
        given = step.logits, step.rows, step.positions, step.columns, tokens, out_S
        sampling.sample(*given, random=True, restricted=False, penalized=False, scratch=scratch)

    if ON_GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        out_S.fill_(-77)
        graph.replay()
    else:
        launch()
    assert torch.equal(out_S, expected)


def test_draws_follow_the_softmax() -> None:
    num_draws, probabilities = (20_000 if ON_GPU else 20), torch.tensor([0.5, 0.3, 0.2])
    step = Step(probabilities.log().expand(num_draws, 3).contiguous(), [{"temperature": 1.0}] * num_draws)
    ids, _ = step.run(random=True)
    assert fit(ids, probabilities) > 1e-3


def test_the_twin_follows_the_softmax_in_20_000_draws() -> None:
    probabilities = torch.softmax(torch.randn(30, generator=torch.Generator().manual_seed(0)), 0)
    step = Step(probabilities.log().expand(20_000, 30), [{"temperature": 1.0}] * 20_000)
    ids, _ = step.run(twin, random=True)
    assert fit(ids, probabilities) > 1e-3


def test_the_twin_chooses_what_the_sampler_chooses() -> None:
    asked = [params for kind in RESTRICTED.values() for params in kind]
    asked += [
        {},
        {"temperature": 0.0},
        {"repetition_penalty": 1.5, "top_k": 9},
        {"presence_penalty": 1.0, "temperature": 0.0},
        {"frequency_penalty": -0.5, "prompt_len": 20},
    ]
    logits = logits_of(len(asked), seed=8, vocab_size=2503, scale=1.0).contiguous()
    logits[:, 5], logits[0, 6], logits[1] = torch.nan, torch.inf, -torch.inf
    tokens = torch.randint(2503, (len(asked), MAX_LEN), generator=torch.Generator().manual_seed(8)).int()
    batch, rows = sampling_rows(len(asked), 2503), torch.arange(len(asked))
    for row, params in enumerate(asked):
        params = DEFAULTS | params
        prompt_len = params.pop("prompt_len")
        batch.set(row, SamplingParams(**params), seed=row * 7, choice_idx=row, prompt_len=prompt_len)
    positions = torch.arange(30, 30 + len(asked))
    expected = sample(logits.clone(), rows.tolist(), batch, tokens.clone(), positions).token_ids

    out = rows.int()
    twin.sample(logits, rows.int(), positions, batch.columns, tokens, out, random=True, restricted=True, penalized=True)
    assert out.tolist() == expected.tolist()


def test_scratch_of_another_size_is_refused() -> None:
    step = Step(logits_of(2), [{}] * 2)
    for shape in ((1, VOCAB), (2, VOCAB - 1)):
        with pytest.raises(ValueError, match="scratch"):
            step.run(scratch=sampling.Scratch(*shape, DEVICE))
