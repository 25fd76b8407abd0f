"""Backends whose kernels read work lists (`ops/attention/work.py`): the host cuts rows into units, once per group.

The base of the Triton backends, for attention and for latent attention.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.layers.attention._layer import CacheLayer
from quire.layers.attention.base import AttentionBackend, HostStep, Limits, StepShape
from quire.ops.attention import cudnn
from quire.ops.attention.reference import AttentionTables
from quire.ops.attention.work import UNIT_WORDS, AttentionWork, WorkShape, max_split_units, max_units, plan_units
from quire.ops.launch import num_multiprocessors


class WorkList:
    """How one kind of row is cut into units, and the memory that its launches share."""

    def __init__(self, shape: WorkShape, window: int, max_tokens: int, max_rows: int, hidden_like: Tensor) -> None:
        num_programs = shape.tile.programs_per_multiprocessor * num_multiprocessors(hidden_like)
        self.geometry = {
            "tile_m": shape.tile.tile_m,
            "group_size": shape.group_size,
            "num_kv_heads": shape.num_kv_heads,
            "num_programs": num_programs,
        }
        self.window = window
        self.max_units = self.num_units(max_tokens, max_rows)
        num_split = max_split_units(self.max_units, num_kv_heads=shape.num_kv_heads, num_programs=num_programs)
        no_units = hidden_like.new_empty(0, dtype=torch.int32)
        self.room = AttentionWork.of(no_units, shape.tile, num_split, shape.num_kv_heads, shape.size)

    def num_units(self, num_tokens: int, num_rows: int) -> int:
        """The most units that a step of so many tokens in so many rows can have."""
        return max_units(num_tokens, num_rows, **self.geometry) if num_rows else 0

    def plan(self, step: HostStep, is_listed: np.ndarray) -> np.ndarray:
        """The units of the rows that `is_listed` selects."""
        return plan_units(
            step.firsts[is_listed],
            step.counts[is_listed],
            step.context_lens[is_listed],
            step.rows[is_listed],
            window=self.window,
            **self.geometry,
        )


class WorkListBackend(AttentionBackend):
    """Rows that decode and rows that compute prompts need different tiles: two lists, two launches."""

    works: dict[str, WorkList]

    def __init__(
        self, layers: Sequence[CacheLayer], block_size: int, limits: Limits, twin: "WorkListBackend | None" = None
    ) -> None:
        super().__init__(layers, block_size, limits, twin)
        layer = layers[0]
        hidden_like = limits.hidden_like
        if any(other.num_heads != layer.num_heads for other in layers):  # they would need different lists
            raise UnsupportedModelError(
                "layers with different numbers of query heads and equal KV caches are not supported on GPUs"
            )
        self.skips_cache = all(
            layer.is_plain and cudnn.supports(hidden_like, layer.head_size, layer.value_size) for layer in layers
        )
        if twin is not None:
            self.works = twin.works
            return
        decode = self.work_shape(layer, hidden_like.dtype, decode=True)
        prefill = self.work_shape(layer, hidden_like.dtype, decode=False)
        self.works = {
            "decode_units": WorkList(decode, layer.window, limits.num_samples, limits.num_samples, hidden_like),
            "prefill_units": WorkList(prefill, layer.window, limits.max_tokens, limits.num_rows, hidden_like),
        }

    @staticmethod
    @abstractmethod
    def work_shape(layer: CacheLayer, dtype: torch.dtype, *, decode: bool) -> WorkShape:
        """How the kernel cuts the work of such layers."""

    def fields(self) -> dict[str, tuple[int, ...]]:
        if self.twin is not None:
            return {}
        return {name: (work.max_units, UNIT_WORDS) for name, work in self.works.items()}

    def prepare(self, step: HostStep, shape: StepShape) -> None:
        if self.twin is not None:
            return  # the twin has planned
        is_decode = step.counts == 1
        is_prefill = ~is_decode
        if shape.uncached_prefills:
            is_prefill &= ~np.isin(step.firsts, [first for first, _ in shape.uncached_prefills])
        for (name, work), is_listed in zip(self.works.items(), (is_decode, is_prefill)):
            words = self.host[name]
            num_units = 0
            if is_listed.any():
                units = work.plan(step, is_listed)
                num_units = len(units)
                words[:num_units] = units
            words[num_units : self._num_units(name, shape)] = 0  # units without queries

    def tables(self, shape: StepShape) -> AttentionTables:
        launches = []
        words = (self.twin or self).device
        for name, work in self.works.items():
            if num_units := self._num_units(name, shape):
                launches.append(dataclasses.replace(work.room, units=words[name][:num_units]))
        rows_R = self.step.rows[: shape.num_rows]
        return self._tables(shape, self.step.block_table, rows=rows_R, work=tuple(launches), shifts=self.step.shifts)

    def _num_units(self, name: str, shape: StepShape) -> int:
        """The most units that a step of this shape can have."""
        if name == "decode_units":
            return self.works[name].num_units(shape.num_decodes, shape.num_decodes)
        return self.works[name].num_units(shape.num_tokens, shape.num_prefills)
