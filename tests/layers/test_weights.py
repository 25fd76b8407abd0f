"""Changes to a checkpoint's tensors: rows in another order, also of quantized weights."""

import pytest
import torch

from quire.errors import UnsupportedModelError
from quire.layers.weights import CheckpointTensor, order_q_k_v, plain

SIZES = (4, 2, 8)  # heads, KV heads, head size: 64 rows


def test_rows_of_a_fused_projection_are_put_in_order():
    # Each KV head has its two queries, its key and its value together.
    heads = torch.tensor([0, 1, 4, 6, 2, 3, 5, 7]).repeat_interleave(8).float()
    for tensor in (plain(heads), plain(heads[:, None].expand(-1, 16).contiguous())):
        found = order_q_k_v("query_key_value.weight", tensor, *SIZES).read().values()
        assert torch.equal(found.view(64, -1)[:, 0], torch.arange(8).repeat_interleave(8).float())


def test_one_scale_of_all_rows_stays():
    scale = plain(torch.tensor([0.5]))
    assert order_q_k_v("query_key_value.weight_scale", scale, *SIZES) is scale


def test_what_is_not_kept_row_by_row_is_refused():
    qweight = CheckpointTensor.of("I32", torch.zeros(8 * 64 * 4, dtype=torch.uint8), (8, 64))
    with pytest.raises(UnsupportedModelError, match="h.0.query_key_value.qweight: heads .* row by row"):
        order_q_k_v("h.0.query_key_value.qweight", qweight, *SIZES)
