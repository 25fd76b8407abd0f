"""What begins a step, in Triton, against its plain twin."""

import pytest
import torch

from quire.ops import step
from quire.ops.ref import step as twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_segments_land_where_they_are_sent_and_nowhere_else():
    words = torch.randint(-9, 9, (2000,), dtype=torch.int32, device=DEVICE)
    payload = torch.randint(100, 999, (700,), dtype=torch.int32, device=DEVICE)
    segments = torch.tensor([[5, 0, 1], [1300, 1, 600], [100, 601, 99]], device=DEVICE)
    expected = words.clone()
    twin.scatter_segments(expected, segments, payload, 600)
    step.scatter_segments(words, segments, payload, 600)
    assert torch.equal(words, expected)


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [5, 1, 300, 0]])
def test_tokens_and_slots_are_found_and_padding_is_nobodys(counts):
    rows, starts = [2, 0, 3, -1], [7, 30, 0, 0]
    counts = counts[:3] + [4 if counts[3] == 0 else 1]  # the last row is padding
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=DEVICE)  # noqa: E731
    query_starts = ints([0, *torch.tensor(counts).cumsum(0).tolist()])
    total, longest = sum(counts), max(counts)
    tokens = torch.randint(0, 999, (5, 400), dtype=torch.int32, device=DEVICE)
    table = torch.randint(0, 99, (5, 25), dtype=torch.int32, device=DEVICE)
    results = []
    for ops in (step, twin):
        token_ids = torch.full((total,), -7, dtype=torch.int32, device=DEVICE)
        positions, slots = (torch.full((total,), -7, device=DEVICE) for _ in range(2))
        ops.place_tokens(ints(rows), ints(starts), query_starts, tokens, token_ids, positions, longest)
        ops.place_slots(ints(rows), ints(starts), query_starts, table, 16, slots, longest)
        results.append((token_ids, positions, slots))
    for mine, theirs in zip(*results):
        assert torch.equal(mine, theirs)
