"""For prompts that begin in a step, attention over the step's own keys equals attention over the cache."""

import torch

from quire.ops.attention import cudnn
from quire.ops.attention.reference import AttentionTables, paged_attention, write_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def test_fresh_rows_attend_as_over_the_cache_and_leave_others_alone():
    counts, H, K, D, size = [40, 3, 70], 6, 2, 64, 16
    total = sum(counts)
    qkv = torch.randn(total, H + 2 * K, D, device=DEVICE, dtype=DTYPE)
    q, k, v = qkv.split((H, K, K), 1)
    table = torch.arange(3 * 5, device=DEVICE, dtype=torch.int32).view(3, 5)
    cache = torch.zeros(15, 2, size, K, D, device=DEVICE, dtype=DTYPE)
    starts = [0, 40, 43, total]
    for row, count in enumerate(counts):
        slots = table[row].long().repeat_interleave(size)[:count] * size + torch.arange(count, device=DEVICE) % size
        write_kv(cache, k[starts[row] : starts[row + 1]], v[starts[row] : starts[row + 1]], slots)
    query_starts, context_lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts, counts))
    tables = AttentionTables(query_starts, context_lens, table, size, 70)
    expected = paged_attention(q, cache, tables, scale=0.3)
    out = torch.full((total, H, D), torch.nan, device=DEVICE, dtype=DTYPE)
    cudnn.uncached_prefill_attention(q, k, v, ((0, 40), (43, 70)), out, scale=0.3)
    assert out[40:43].isnan().all()
    out[40:43] = expected[40:43]
    tolerance = dict(atol=2e-2, rtol=1e-2) if DEVICE == "cuda" else dict(atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, expected, **tolerance)
