"""Copies of KV blocks in Triton against their torch twin; in Triton's interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

from quire.ops.blocks import reference as twin
from quire.ops.blocks import triton as blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (2, 16, 3, 64)
PAIRS = [(4, 0), (1, 6), (4, 3), (7, 2)]


def cache(
    num_blocks: int, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float16, padding: int = 0
) -> Tensor:
    """A cache of random bytes, NaNs among them, with `padding` elements between blocks."""
    size = torch.Size(shape).numel()
    memory = torch.randint(0, 256, (num_blocks, (size + padding) * dtype.itemsize), dtype=torch.uint8, device=DEVICE)
    return memory.view(dtype)[:, :size].unflatten(1, shape)


def pairs(*given: tuple[int, int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(given, dtype=dtype, device=DEVICE).view(-1, 2)


def same(a: Tensor, b: Tensor) -> bool:
    """To the bit."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def whole(cache: Tensor) -> Tensor:
    """All memory of a cache, with what lies between its blocks."""
    return cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))


def check(source: Tensor, target: Tensor, which: Tensor) -> None:
    memory, expected = whole(target).clone(), target.clone()
    twin.copy_blocks(expected if source is target else source, expected, which)
    assert not same(expected, target)
    memory[:, : expected[0].numel()] = expected.flatten(1)
    blocks.copy_blocks(source, target, which)
    assert same(whole(target), memory)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_blocks_of_any_dtype_are_copied_within_a_cache(dtype: torch.dtype, ids: torch.dtype) -> None:
    within = cache(8, dtype=dtype)
    check(within, within, pairs(*PAIRS, dtype=ids))


@pytest.mark.parametrize("padding", [0, 8, 24], ids=lambda n: f"{n} apart")
def test_blocks_go_to_another_cache_and_nothing_between_them_is_touched(padding: int) -> None:
    check(cache(8), cache(9, padding=padding), pairs(*PAIRS, (0, 8)))
    check(cache(8, padding=padding), cache(9), pairs(*PAIRS))


@pytest.mark.parametrize("shape", [(2, 16, 1, 8), (2, 16, 5, 80), (3, 8)], ids=str)
def test_a_block_may_have_any_size_in_words_of_16_bytes(shape: tuple[int, ...]) -> None:
    within = cache(8, shape)
    check(within, within, pairs(*PAIRS))


def test_negative_pairs_are_padding() -> None:
    within = cache(8)
    check(within, within, pairs((-1, -1), (4, 0), (-1, 3), (2, -1)))


def test_a_list_without_pairs_copies_nothing() -> None:
    within = cache(8)
    before = within.clone()
    blocks.copy_blocks(within, within, pairs())
    blocks.copy_blocks(within, within, pairs((-1, -1)))
    twin.copy_blocks(within, within, pairs())
    assert same(within, before)


def test_blocks_that_do_not_fit_are_refused() -> None:
    for source, target in (
        (cache(8), cache(8, (2, 16, 2, 64))),
        (cache(8), cache(8, dtype=torch.bfloat16)),
        (cache(8).transpose(1, 2), cache(8).transpose(1, 2)),
        (cache(8, (2, 3, 2)), cache(8, (2, 3, 2))),
        (cache(8, padding=4), cache(8)),
    ):
        with pytest.raises(ValueError, match="blocks"):
            blocks.copy_blocks(source, target, pairs((1, 2)))
