"""Where the end of a text occurred before: both kernels against the rule, written out."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.lookup import reference, triton

HAS_GPU = torch.cuda.is_available()
MAX_LEN = 48
UNUSED = 7777


def expected(text: list[int], smallest: int, largest: int, num_drafts: int) -> list[int]:
    """The longest end that occurred before, its latest place, and what followed there, going on with the copy."""
    for size in range(min(largest, len(text) - 1), smallest - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                copied = list(text)
                for i in range(min(num_drafts, MAX_LEN - len(text))):
                    copied.append(copied[start + size + i])
                return copied[len(text) :]
    return []


def check(kernel, texts: list[list[int]], smallest: int, largest: int, num_drafts: int, device: str = "cpu") -> None:
    tokens = torch.full((len(texts) + 1, MAX_LEN), UNUSED, dtype=torch.int32)
    lengths = torch.zeros(len(texts) + 1, 3, dtype=torch.int32)  # as in the batch, not one after the other
    rows = list(range(len(texts), 0, -1))  # row 0 is not asked for
    for row, text in zip(rows, texts):
        tokens[row, : len(text)] = torch.tensor(text)
        lengths[row, 0] = len(text)
    before, tokens, lengths = tokens.clone(), tokens.to(device), lengths.to(device)
    found = kernel(torch.tensor(rows, device=device), lengths[:, 0], tokens, smallest, largest, num_drafts)
    for count, row, text in zip(found.tolist(), rows, texts):
        drafts = expected(text, smallest, largest, num_drafts)
        assert count == len(drafts)
        end = len(text) + count
        assert tokens[row, :end].tolist() == text + drafts
        assert tokens[row, end:].cpu().equal(before[row, end:])
    assert tokens[0].cpu().equal(before[0])


texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=MAX_LEN), min_size=1, max_size=4)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


@settings(max_examples=300, deadline=None)
@given(texts, sizes, st.integers(1, 9))
def test_the_twin_follows_the_rule(texts, sizes, num_drafts):
    check(reference.repeat_continuations, texts, *sizes, num_drafts)


@pytest.mark.parametrize("seed", range(200 if HAS_GPU else 6))
def test_the_kernel_follows_the_rule(seed, monkeypatch):
    monkeypatch.setattr(triton, "BLOCK", 16)
    source = random.Random(seed)
    texts = [source.choices(range(4), k=source.randrange(1, MAX_LEN + 1)) for _ in range(3)]
    smallest = source.randrange(1, 4)
    largest = source.randrange(smallest, 6)
    device = "cuda" if HAS_GPU else "cpu"
    check(triton.repeat_continuations, texts, smallest, largest, source.randrange(1, 10), device)


def test_a_text_that_repeats_itself_goes_on_so():
    assert expected([1, 2, 3, 1, 2, 3, 1, 2], 2, 3, 7) == [3, 1, 2, 3, 1, 2, 3]
