"""How a model's caches become groups and pools: few groups, little memory unused."""

import pytest

from quire.kv.groups import MAX_GROUPS, check_capacity, form_layout, num_blocks_for, with_blocks
from quire.kv.manager import KVManager
from quire.kv.pool import NULL_BLOCK
from quire.kv.specs import CacheSpec, EntryPart, Full, KVLayout, Sliding, State

HEADS = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


def hybrid(num_sliding: int, num_full: int, window: int) -> dict[str, CacheSpec]:
    sliding = {f"sliding{i}:kv": Sliding(**HEADS, window=window) for i in range(num_sliding)}
    return {**sliding, **{f"full{i}:kv": Full(**HEADS) for i in range(num_full)}}


def num_groups(specs: dict[str, CacheSpec]) -> int:
    return len(form_layout(specs, 16).groups)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        pytest.param(hybrid(0, 36, 0), 1, id="equal layers"),
        pytest.param(hybrid(12, 12, 128), 2, id="gpt-oss"),
        pytest.param(hybrid(21, 21, 4096), 2, id="gemma 2"),
        pytest.param(hybrid(24, 8, 4096), 4, id="olmo 3"),
        pytest.param(hybrid(22, 4, 512), 7, id="gemma 3 of 1b"),
        pytest.param(hybrid(52, 10, 1024), 7, id="gemma 3 of 27b"),
    ],
)
def test_models_get_few_groups(specs, expected):
    assert num_groups(specs) == expected


@pytest.mark.parametrize(
    "other",
    [
        Full(4, 64, "bfloat16"),
        Full(4, 128, "bfloat16"),
        Full(8, 128, "uint8"),
        Sliding(**HEADS, window=512),
        Sliding(**HEADS, window=4096),
    ],
    ids=lambda spec: f"{spec.kind} {spec.entry_bytes}",
)
@pytest.mark.parametrize("num_layers", [28, 32, 36, 48])
def test_one_layer_of_another_kind_does_not_scatter_the_rest(num_layers, other):
    specs = {f"layer{i}:kv": Full(**HEADS) for i in range(num_layers)}
    assert num_groups({**specs, "other:kv": other}) <= 10


def test_groups_are_never_more_than_a_step_can_bear():
    specs = {f"layer{i}:kv": Full(1 + i % 7, 64 + 16 * (i % 3), "bfloat16") for i in range(80)}
    assert num_groups(specs) <= max(MAX_GROUPS, len(set(specs.values())))


# -- DeepSeek V4 Flash -------------------------------------------------------------------------------------------------

COMPRESS_RATIOS = [0, 0] + [4, 128] * 20 + [4]
VECTOR = (
    EntryPart("nope", "float8_e4m3fn", (448,)),
    EntryPart("rope", "bfloat16", (64,)),
    EntryPart("scales", "float8_e8m0fnu", (8,)),
)
INDEX = (EntryPart("keys", "float8_e4m3fn", (128,)), EntryPart("scale", "float32", (1,)))


def tail(num_tokens: int, width: int) -> CacheSpec:
    """What a compressor must remember of its last tokens: projections and gates, in float32."""
    return State((EntryPart("tail", "float32", (num_tokens, width)),), every=256)


def deepseek_v4_flash() -> dict[str, CacheSpec]:
    specs = {}
    for layer_idx, ratio in enumerate(COMPRESS_RATIOS):
        specs[f"{layer_idx}:window"] = CacheSpec("sliding", VECTOR, window=128)
        if ratio:
            specs[f"{layer_idx}:compressed"] = CacheSpec("full", VECTOR, tokens_per_entry=ratio)
            specs[f"{layer_idx}:tail"] = tail(8, 2 * 2 * 512) if ratio == 4 else tail(128, 2 * 512)
        if ratio == 4:
            specs[f"{layer_idx}:index"] = CacheSpec("full", INDEX, tokens_per_entry=4)
            specs[f"{layer_idx}:index_tail"] = tail(8, 2 * 2 * 128)
    return specs


def held_bytes(layout: KVLayout, num_tokens: int) -> list[int]:
    """Bytes of each pool that one request holds after computing `num_tokens` tokens in steps of 8,192."""
    layout = with_blocks(layout, num_blocks_for(layout, 64 << 30, num_rows=4))
    check_capacity(layout, num_tokens, 8_192)
    kv = KVManager(layout)
    blocks = kv.open(list(range(num_tokens)), "")
    kv.enter(blocks, 0)
    for end in [*range(8_192, num_tokens, 8_192), num_tokens]:
        assert kv.grow(blocks, end) is not None
        kv.advance(blocks, end, None)
    kv.check()
    held = [0] * len(layout.pools)
    for group, table in zip(layout.groups, blocks.tables):
        held[group.pool_idx] += sum(block != NULL_BLOCK for block in table) * layout.pools[group.pool_idx].block_bytes
    return held


def readable_bytes(specs: dict[str, CacheSpec], num_tokens: int) -> int:
    """Bytes of the entries that a query after `num_tokens` tokens reads, its own not counted."""
    total = 0
    for spec in specs.values():
        num_seen = min(num_tokens, spec.window - 1) if spec.window else num_tokens
        total += num_seen // spec.tokens_per_entry * spec.entry_bytes
    return total


def test_the_caches_of_deepseek_v4_share_one_pool():
    specs = deepseek_v4_flash()
    layout = form_layout(specs, 16)
    shared = {name: spec for name, spec in specs.items() if not spec.is_state}
    assert sum(spec.bytes_per_token for spec in shared.values() if not spec.window) == pytest.approx(3850, abs=1)
    assert len(layout.groups) <= 20
    shared_groups = [group for group in layout.groups if not group.spec.is_state]
    assert {group.pool_idx for group in shared_groups} == {0}
    assert all(group.pool_idx > 0 for group in layout.groups if group.spec.is_state)
    assert min(group.block_size // group.spec.tokens_per_entry for group in shared_groups) >= 16
    state_bytes = sum(spec.entry_bytes for spec in specs.values() if spec.is_state)
    for num_tokens, most in ((100_000, 1.05), (1_000, 1.20)):
        held, *states = held_bytes(layout, num_tokens)
        ratio = held / readable_bytes(shared, num_tokens)
        print(f"{num_tokens} tokens, {len(layout.groups)} groups: {ratio:.3f}; states {sum(states) / state_bytes:.2f}")
        assert ratio <= most
        assert sum(states) <= 2 * state_bytes
