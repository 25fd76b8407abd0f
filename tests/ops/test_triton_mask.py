"""The kernel of grammar masks against its twin."""

import pytest
import torch

from quire.ops.mask import triton as mask
from quire.ops.mask.reference import mask_logits
from quire.ops.vocab import cpu as vocab

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab_size", [50, 4096, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_named_rows_lose_the_tokens_whose_bit_is_zero(vocab_size, dtype):
    logits = torch.randn(5, vocab_size, dtype=dtype, device=DEVICE)
    places = torch.tensor([4, 1, -1, 2], device=DEVICE)  # -1 is padding
    words = torch.randint(-(2**31), 2**31, (4, -(-vocab_size // 32)), device=DEVICE).int()
    expected = logits.clone()
    mask_logits(expected, places, words)
    mask.mask_logits(logits, places, words)
    assert torch.equal(logits, expected)
    assert torch.equal(logits.isinf().any(1).cpu(), torch.tensor([False, True, True, False, True]))


def test_the_twin_reads_bits_as_integers_do():
    logits = torch.zeros(1, 70)
    words = torch.tensor([[0b101, -(2**31), 1 << 5]], dtype=torch.int32)
    mask_logits(logits, torch.tensor([0]), words)
    assert (logits[0] == 0).nonzero().flatten().tolist() == [0, 2, 63, 69]


@pytest.mark.parametrize("vocab_size", [31, 32, 50, 9001])
def test_the_compiled_mask_is_the_twins(vocab_size):
    logits = torch.randn(6, vocab_size)
    places = torch.tensor([5, 0, 3])
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32))).int()
    words[:, ::3], words[:, 1::3] = 0, -1
    expected = logits.clone()
    mask_logits(expected, places, words)
    vocab.mask_logits(logits, places, words)
    assert torch.equal(logits, expected)
