"""Multi-head latent attention (MLA): one small vector is cached per token; every head's keys and values follow from it.

Used by models. Two ways compute the same: `_absorbed` projects queries into the space of the cached vectors and never
makes keys and values; `_expanded` makes them, which takes fewer operations where a long prompt begins in this step.
Backends are in `layers/latent`.

Shape letters: T tokens of the step, H heads, D = P + R size of a query (P is not rotated, R is), V value size,
L latent size, X = L + R.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import UnsupportedModelError
from quire.kv.specs import CacheSpec, Latent
from quire.layers.attention import CacheLayer
from quire.layers.base import Layer, Runtime, frozen
from quire.layers.config import DecoderConfig
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope
from quire.ops.attention.cudnn import uncached_prefill_attention
from quire.quant.base import Part, Section, Split, Use

EPS = 1e-6  # of both inner norms, whatever the config says about other norms


@dataclass(frozen=True, kw_only=True)
class MLAConfig(DecoderConfig):
    q_lora_rank: int | None = 1536  # None: queries are not compressed
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int | None = 128  # None: heads share the hidden size

    @property
    def rotary_size(self) -> int:
        return self.qk_rope_head_dim


class UpProjection(Layer):
    """From latents to keys and values, [H * (P + V), L]. Its weight is kept as plain numbers, as parts of it are
    multiplied from either side."""

    weight: Tensor  # when loaded

    def __init__(self, latent_size: int, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.shape = num_heads * head_size, latent_size
        self.num_heads = num_heads

    def attach(self, runtime: Runtime, path: str) -> None:
        super().attach(runtime, path)
        heads = Split("outputs", (Section(self.shape[0], (self.num_heads,)),))
        self.keep([Part(path, self.shape, heads)], Use.NUMBERS)

    def loaded(self) -> None:
        self.weight = frozen(self.methods.pop().numbers())


class MLA(CacheLayer):
    num_kv_heads = 1

    def __init__(self, config: MLAConfig, rope: Rope) -> None:
        super().__init__()
        if config.attention_bias and config.q_lora_rank is None:
            raise UnsupportedModelError("attention_bias without q_lora_rank is not supported")
        hidden_size = config.hidden_size
        q_rank = config.q_lora_rank
        bias = config.attention_bias
        self.num_heads = config.num_attention_heads
        self.latent_size = config.kv_lora_rank
        self.nope_size = config.qk_nope_head_dim
        self.rope_size = config.qk_rope_head_dim
        self.value_size = config.v_head_dim or hidden_size // self.num_heads
        self.head_size = self.nope_size + self.rope_size
        self.rope = rope
        self.scale = softmax_scale(self.head_size, rope.scaling)
        q_size = self.num_heads * self.head_size
        by_head = (self.num_heads,)
        self.q_section = q_section = Section(q_size, by_head)
        # Queries (or what they are made of) and latents are one product. Down-projections are whole on every rank.
        q_part = "q_proj" if q_rank is None else "q_a_proj"
        self.qkv_a_proj = Linear(
            hidden_size,
            q_rank or q_size,
            self.latent_size + self.rope_size,
            bias=bias,
            parts=(q_part, "kv_a_proj_with_mqa"),
            sections=(q_section if q_rank is None else Section(q_rank), Section(self.latent_size + self.rope_size)),
        )
        self.q_a_layernorm = None if q_rank is None else RMSNorm(q_rank, EPS)
        self.q_b_proj = None if q_rank is None else Linear(q_rank, q_size, sections=(q_section,))
        self.kv_a_layernorm = RMSNorm(self.latent_size, EPS)
        self.kv_b_proj = UpProjection(self.latent_size, self.num_heads, self.nope_size + self.value_size)
        values = Section(self.num_heads * self.value_size, by_head)
        self.o_proj = Linear(values.size, hidden_size, bias=bias, split="inputs", sections=(values,))

    def cache_specs(self, dtype: str) -> dict[str, CacheSpec]:
        return {"latent": Latent(self.latent_size, self.rope_size, dtype)}

    def attach_cache(self, name: str, group_idx: int, parts: dict[str, Tensor]) -> None:
        self.group_idx, self.cache, self.scales = group_idx, parts["latent"], parts.get("scales")

    def attach(self, runtime: Runtime, path: str) -> None:
        super().attach(runtime, path)
        self.num_heads = self.q_section.width(self.group.rank, self.group.size) // self.head_size
        sizes = {"latent_size": self.latent_size, "rope_size": self.rope_size, "block_size": runtime.block_size}
        backend = runtime.choose("latent attention", **sizes, cache_dtype=runtime.cache_dtype)
        self.backend_class = backend.BACKEND

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        num_tokens = x_TD.shape[0]
        q_TX, kv_TX = self.qkv_a_proj(x_TD).split(self.qkv_a_proj.out_features, 1)
        q_norm, q_up = self.q_a_layernorm, self.q_b_proj
        if q_norm is not None and q_up is not None:  # queries are compressed
            q_TX = q_up(q_norm(q_TX)[0])
        q_THD = q_TX.view(num_tokens, self.num_heads, self.head_size)
        slots_T = self.context.slots_T[self.group_idx]
        tables = self.context.tables[self.group_idx]
        self.backend.norm_rope_and_write(
            q_THD[..., self.nope_size :],
            kv_TX,
            self.kv_a_layernorm.weight,
            EPS,
            self.rope.cos_sin,
            positions_T,
            self.cache,
            slots_T,
            self.rope.interleaved,
            scales=self.scales,
        )
        out_THV = q_THD.new_empty(num_tokens, self.num_heads, self.value_size)
        if tables.work != ():  # else all rows are uncached prefills
            self._absorbed(q_THD, out_THV)
        for first, count in tables.uncached_prefills:
            span = slice(first, first + count)
            self._expanded(q_THD[span], kv_TX[span], out_THV[span])
        return self.o_proj(out_THV.view(num_tokens, -1))

    def _absorbed(self, q_THD: Tensor, out_THV: Tensor) -> None:
        """Attention over the cache. The output of rows that the tables' work leaves out is undefined."""
        up_HXL = self.kv_b_proj.weight.view(self.num_heads, -1, self.latent_size)
        k_up_HPL, v_up_HVL = up_HXL.split((self.nope_size, self.value_size), 1)
        q_THP, q_THR = q_THD.split((self.nope_size, self.rope_size), 2)
        q_THL = self.backend.head_linear(q_THP, k_up_HPL)
        tables = self.context.tables[self.group_idx]
        o_THL = self.backend.latent_attention(q_THL, q_THR, self.cache, tables, scale=self.scale, scales=self.scales)
        self.backend.head_linear(o_THL, v_up_HVL.mT, out_THV)

    def _expanded(self, q_THD: Tensor, kv_TX: Tensor, out_THV: Tensor) -> None:
        """Attention of one row that begins in this step, over its own tokens."""
        c_TL, k_TR = kv_TX.split((self.latent_size, self.rope_size), 1)
        kv_THX = functional.linear(c_TL, self.kv_b_proj.weight).unflatten(1, (self.num_heads, -1))
        k_THP, v_THV = kv_THX.split((self.nope_size, self.value_size), 2)
        k_THD = torch.cat((k_THP, k_TR[:, None].expand(-1, self.num_heads, -1)), 2)
        uncached_prefill_attention(q_THD, k_THD, v_THV, ((0, len(q_THD)),), out_THV, scale=self.scale)


def softmax_scale(head_size: int, scaling: dict[str, Any]) -> float:
    """RoPE scalings may ask for larger scores (`mscale_all_dim`): here, and not as larger cosines and sines."""
    factor = scaling.get("factor") or 1.0
    mscale = scaling.get("mscale_all_dim") or 0.0
    magnitude = 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
    return head_size**-0.5 * magnitude**2
