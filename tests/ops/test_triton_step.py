"""How a step begins, in Triton, against its plain twin."""

import pytest
import torch

from quire.ops.step import cpu as cpu_step
from quire.ops.step import reference as twin
from quire.ops.step import triton as step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_segments_land_where_they_are_sent_and_nowhere_else():
    words = torch.randint(-9, 9, (2000,), dtype=torch.int32, device=DEVICE)
    payload = torch.randint(100, 999, (700,), dtype=torch.int32, device=DEVICE)
    segments = torch.tensor([[5, 0, 1], [1300, 1, 600], [100, 601, 99]], device=DEVICE)
    expected = words.clone()
    twin.scatter_segments(expected, segments, payload, 600)
    step.scatter_segments(words, segments, payload, 600)
    assert torch.equal(words, expected)


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [5, 1, 300, 0]])
def test_tokens_and_slots_are_found_and_padding_has_none(counts):
    rows, starts = ints(2, 0, 3, -1), ints(7, 30, 0, 0)
    counts = counts[:3] + [4 if counts[3] == 0 else 1]  # the last row is padding
    query_starts = ints(0, *torch.tensor(counts).cumsum(0).tolist())
    total, longest = sum(counts), max(counts)
    tokens = torch.randint(0, 999, (5, 400), dtype=torch.int32, device=DEVICE)
    table = torch.randint(0, 99, (5, 25), dtype=torch.int32, device=DEVICE)
    results = []
    for ops in (step, twin):
        token_ids = torch.full((total,), -7, dtype=torch.int32, device=DEVICE)
        positions, slots = (torch.full((total,), -7, device=DEVICE) for _ in range(2))
        ops.place_tokens(rows, starts, query_starts, tokens, token_ids, positions, longest)
        ops.place_slots(rows, starts, query_starts, table, 16, slots, longest)
        results.append((token_ids, positions, slots))
    for actual, expected in zip(*results):
        assert torch.equal(actual, expected)


def test_starts_behind_a_rows_last_token_are_corrected():
    rows, query_starts = ints(2, 0, 3, -1), ints(0, 4, 5, 305, 309)
    lengths = torch.stack((ints(31, 9, 7, 500), ints(0, 0, 0, 0)), 1)[:, 0]  # as in the batch, not contiguous
    results = []
    for ops in (step, twin):
        starts, context_lens, shifts = ints(9, 30, 0, 0), ints(13, 31, 300, 0), ints(-7, -7, -7, -7)
        ops.correct_starts(rows, starts, query_starts, ints(0, 0, 0, 0), lengths, context_lens, shifts)
        results.append((starts.tolist(), context_lens.tolist(), shifts.tolist()))
    assert results[0] == results[1] == ([6, 30, 0, 0], [10, 31, 300, 0], [0, -7, 3, 0])


def test_drafts_that_are_rows_of_their_own_stay_behind_the_last_token():
    """Row 2 has 7 tokens where 9 were expected, row 1 as many as were expected."""
    rows, query_starts, places = ints(2, 2, 2, 1, 1, -1), ints(0, 1, 2, 3, 4, 5, 6), ints(0, 1, 2, 0, 1, 0)
    lengths = torch.stack((ints(31, 9, 7, 500), ints(0, 0, 0, 0)), 1)[:, 0]
    for ops in (step, twin):
        starts, context_lens, shifts = ints(8, 9, 10, 8, 9, 0), ints(9, 10, 11, 9, 10, 0), ints(-7, -7, -7, -7)
        ops.correct_starts(rows, starts, query_starts, places, lengths, context_lens, shifts)
        assert starts.tolist() == [6, 7, 8, 8, 9, 0]
        assert context_lens.tolist() == [7, 8, 9, 9, 10, 0]
        assert shifts.tolist() == [-7, 0, 2, -7]


def test_samples_go_behind_the_tokens_that_choose_them():
    positions, found = torch.arange(100, 130, device=DEVICE), ints(0, 0, 0)
    step.place_samples(ints(3, 4, 29), positions, found)
    assert found.tolist() == [104, 105, 130]


@pytest.mark.parametrize("ops", [step, twin, cpu_step], ids=["triton", "twin", "cpu"])
def test_drafts_count_up_to_the_first_that_was_not_chosen(ops):
    if ops is cpu_step and DEVICE != "cpu":
        pytest.skip("runs on a CPU")
    # Row 5 verifies three drafts, of which the second is wrong; row 1 none; row 0 two, both right; row 4 two, the first
    # wrong.
    token_ids = ints(70, 11, 12, 13, 71, 72, 21, 22, 73, 31, 32)
    sample_at, first_samples = ints(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10), ints(0, 4, 5, 8, 11)
    sample_rows = ints(5, 5, 5, 5, 1, 0, 0, 0, 4, 4, 4)
    sample_positions = ints(20, 21, 22, 23, 8, 30, 31, 32, 40, 41, 42)
    chosen = ints(11, 99, 13, 98, 97, 21, 22, 96, 95, 32, 94)
    lengths, num_accepted = torch.zeros(6, 3, dtype=torch.int32, device=DEVICE)[:, 1], ints(-1, -1, -1, -1)
    ops.accept(first_samples, sample_at, sample_rows, sample_positions, chosen, token_ids, lengths, num_accepted)
    assert num_accepted.tolist() == [1, 0, 2, 0]
    assert lengths.tolist() == [33, 9, 0, 0, 41, 22]
