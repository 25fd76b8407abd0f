"""The attention layer: norms heads if asked, rotates them, writes new keys and values into the cache, attends.

Used by models. It says what it caches (`cache_specs`); the worker gives it its cache and its group.

Shape letters: T tokens of the step, H query heads, K key/value heads, D head size.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from quire.kv.specs import CacheSpec, Full, Sliding
from quire.layers.attention.base import AttentionBackend
from quire.layers.base import Layer, Runtime, frozen, head_sections
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope
from quire.ops.attention import cudnn
from quire.ops.elementwise.reference import rope
from quire.quant.base import Split

CENTERED_POSITIONS = 8192  # the first ones: over which the mean of a rotated bias is taken


class CacheLayer(Layer, ABC):
    """A layer with a cache: it says what it caches of each token, and reads the tables of its group."""

    backend_class: type[AttentionBackend]  # how to compute, set by `attach`
    # Set by the worker: which group's tables to read, where the cache is, the group's backend.
    group_idx: int
    cache: Tensor
    scales: Tensor | None = None  # of a cache that holds codes
    backend: AttentionBackend
    # Backends are chosen, and divide their work, by these.
    num_heads: int
    num_kv_heads: int
    head_size: int
    latent_size: int  # only latent attention has one
    value_size: int | None = None  # None: the keys'
    window: int = 0
    # Path of the layer, with the same spec, whose cache this one reads; None: it has its own.
    shares: str | None = None

    @property
    def is_plain(self) -> bool:
        """Within a prompt it is ordinary causal attention, which kernels of other libraries can compute."""
        return True

    @abstractmethod
    def cache_specs(self, dtype: str) -> dict[str, CacheSpec]:
        """What it caches, by name, if values are stored as `dtype` (torch's name of it)."""

    @abstractmethod
    def attach_cache(self, name: str, group_idx: int, parts: dict[str, Tensor]) -> None:
        """Sets the memory of one of its caches: of each part, [num_blocks, entries of a block, *shape of an entry]."""

    def detach_cache(self) -> None:
        """Forgets what the worker set: the memory of caches and of the backend, which weights may outlive."""
        del self.cache, self.backend
        self.scales = None


class Attention(CacheLayer):
    """`rope` None: no positions. `softcap`: scores are squashed by tanh to stay below it. `sinks`: a learned logit per
    head takes part in the softmax. `shares`: see CacheLayer; such a layer has queries only."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        rope: Rope | None,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        shares: str | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.rope = rope or Rope.none()
        self.scale = head_size**-0.5 if scale is None else scale
        self.window = window or 0
        self.softcap = softcap or 0.0
        self.sinks = frozen(torch.empty(num_heads)) if sinks else None
        self.sections = head_sections(num_heads, num_kv_heads, 1)
        self.splits = {"sinks": Split("outputs", self.sections[:1])}
        self.shares = shares
        # Of "keys" and "values" in a float8 cache, where the checkpoint has them.
        self.own_scales: dict[str, float] = {}
        self.key_center_KD: Tensor | None = None  # see `center_keys`

    @property
    def is_plain(self) -> bool:
        return not (self.window or self.softcap or self.shares) and self.sinks is None

    def attach(self, runtime: Runtime, path: str) -> None:
        super().attach(runtime, path)
        self.num_heads, self.num_kv_heads = (
            section.width(self.group.rank, self.group.size) for section in self.sections
        )
        backend = runtime.choose(
            "attention", head_size=self.head_size, block_size=runtime.block_size, cache_dtype=runtime.cache_dtype
        )
        self.backend_class = backend.BACKEND
        if self.window >= runtime.max_len:
            self.window = 0  # no context is longer than the window

    @property
    def fixed_scales(self) -> tuple[float, float] | None:
        """Of all cached keys and values; None: each token and head has its own."""
        return (self.own_scales["keys"], self.own_scales["values"]) if len(self.own_scales) == 2 else None

    def cache_specs(self, dtype: str) -> dict[str, CacheSpec]:
        if self.window:
            return {"kv": Sliding(self.num_kv_heads, self.head_size, dtype, self.window)}
        return {"kv": Full(self.num_kv_heads, self.head_size, dtype)}

    def attach_cache(self, name: str, group_idx: int, parts: dict[str, Tensor]) -> None:
        self.group_idx = group_idx
        keys = parts["keys"]  # in each block, values follow keys, and their scales follow in the same order
        num_blocks, size, num_heads, _ = keys.shape
        shape = num_blocks, 2, *keys.shape[1:]
        self.cache = keys.as_strided(shape, (keys.stride(0), keys[0].numel(), *keys.stride()[1:]))
        if (scales := parts.get("scales")) is not None:
            strides = scales.stride(0), size * num_heads, num_heads, 1
            self.scales = scales.as_strided((num_blocks, 2, size, num_heads), strides)

    def center_keys(self, bias_KD: Tensor) -> None:
        """Has keys rounded without what their bias adds to all of them, often far larger than the rest.

        Attention stays the same if all keys move by one vector, as long as scores are only compared with each other.
        The vector is the mean of the rotated bias over positions: pairs that turn slowly are where such biases are.
        """
        is_coded = self.runtime.cache_dtype != self.runtime.dtype
        if is_coded and self.fixed_scales is None and self.sinks is None and not self.softcap:
            positions = torch.arange(min(CENTERED_POSITIONS, self.runtime.max_len), device=bias_KD.device)
            turned = bias_KD.float().expand(len(positions), -1, -1).clone()
            rope(turned[:, :0], turned, self.rope.cos_sin, positions, self.rope.interleaved)
            self.key_center_KD = turned.mean(0)

    def forward(
        self, qkv_TX: Tensor, positions_T: Tensor, q_norm: RMSNorm | None = None, k_norm: RMSNorm | None = None
    ) -> Tensor:
        """`qkv_TX`: q, k and v of each token side by side; returns [T, H * D]. Norms are over each head: of q and of k
        (if the layer has k), or of neither."""
        heads = qkv_TX.view(qkv_TX.shape[0], -1, self.head_size)
        # A layer that reads another's cache has no k and v: queries are rotated, and nothing is written.
        num_written = self.num_kv_heads if self.shares is None else 0
        q_THD, k_TKD, v_TKD = heads.split((self.num_heads, num_written, num_written), 1)
        norms: dict[str, Tensor | float | None] = {}
        if q_norm is not None:
            k_norm_D = None if k_norm is None else k_norm.weight
            norms = {"q_norm_D": q_norm.weight, "k_norm_D": k_norm_D, "eps": q_norm.eps}
        slots_T = self.context.slots_T[self.group_idx]
        tables = self.context.tables[self.group_idx]
        self.backend.rope_and_write(
            q_THD,
            k_TKD,
            v_TKD,
            self.rope.cos_sin,
            positions_T,
            self.cache,
            slots_T,
            self.rope.interleaved,
            scales=self.scales,
            fixed_scales=self.fixed_scales,
            key_center_KD=self.key_center_KD,
            **norms,
        )
        out = self.backend.paged_attention(
            q_THD,
            self.cache,
            tables,
            scale=self.scale,
            window=self.window,
            sinks_H=self.sinks,
            softcap=self.softcap,
            scales=self.scales,
        )
        if tables.uncached_prefills:
            cudnn.uncached_prefill_attention(q_THD, k_TKD, v_TKD, tables.uncached_prefills, out, scale=self.scale)
        return out.view(qkv_TX.shape[0], self.num_heads * self.head_size)
