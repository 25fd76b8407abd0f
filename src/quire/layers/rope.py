"""Rotary position embedding (RoPE): a table of cosines and sines by position, for each kind of scaling.

A model makes one Rope per type of layer; its table is computed when it is attached (`materialize`). Each scaling is a
pure function of the config, listed in SCALINGS by its name in config.json.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.layers.base import Layer, Runtime


class Rope(Layer):
    """`cos_sin` [positions, rotary_dim] float32: cosines, then sines, of each pair's angle."""

    cos_sin: Tensor

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        scaling: dict[str, Any] | None,
        max_positions: int,
        interleaved: bool = False,
    ) -> None:
        """`max_positions`: the trained context length (config.json's max_position_embeddings). `interleaved`: a pair
        that is rotated together is two neighbouring elements, not one element of each half of the head."""
        super().__init__()
        self.rotary_dim = rotary_dim
        self.theta = theta
        self.max_positions = max_positions
        self.interleaved = interleaved
        self.scaling = scaling or {"rope_type": "default"}
        rope_type = self.scaling.get("rope_type")
        if rope_type not in SCALINGS:
            raise UnsupportedModelError(f"RoPE scaling {rope_type!r} is not supported: {', '.join(SCALINGS)} are")

    def attach(self, runtime: Runtime, path: str) -> None:
        super().attach(runtime, path)
        self.materialize(runtime.max_len, runtime.device)

    def materialize(self, num_positions: int, device: torch.device) -> None:
        positions = torch.arange(num_positions, dtype=torch.int64)
        try:
            angles, magnitude = SCALINGS[self.scaling["rope_type"]](self, positions)
        except KeyError as error:
            raise UnsupportedModelError(
                f"rope_scaling lacks {error.args[0]!r}: the model's config.json is incomplete"
            ) from None
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModelError(f"rope_scaling makes no sense: {str(error).splitlines()[0]:.200}") from None
        table = torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), 1)
        self.register_buffer("cos_sin", table.to(torch.float32).to(device), persistent=False)

    @staticmethod
    def none() -> "Rope":
        """One that rotates nothing, for layers without positions."""
        return Rope(16, 1.0, {"rope_type": "none"}, 0)

    def inverse_frequencies(self) -> Tensor:
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim
        return 1.0 / (self.theta**exponents)


# Each scaling returns (angles [positions, rotary_dim / 2], factor on cosines and sines).
Scaling = Callable[[Rope, Tensor], tuple[Tensor, float]]


def _outer(positions: Tensor, frequencies: Tensor) -> Tensor:
    return positions.float()[:, None] * frequencies[None, :]


def _default(rope: Rope, positions: Tensor) -> tuple[Tensor, float]:
    return _outer(positions, rope.inverse_frequencies()), 1.0


def _none(rope: Rope, positions: Tensor) -> tuple[Tensor, float]:
    return torch.zeros(len(positions), rope.rotary_dim // 2), 1.0


def _linear(rope: Rope, positions: Tensor) -> tuple[Tensor, float]:
    return _outer(positions, rope.inverse_frequencies() / rope.scaling["factor"]), 1.0


def _dynamic(rope: Rope, positions: Tensor) -> tuple[Tensor, float]:
    """NTK scaling that grows with the length of the context. Each token is rotated as if it were the last one, so the
    table depends on the position alone; it equals what the original computes when it generates token by token."""
    factor = rope.scaling["factor"]
    dim = rope.rotary_dim
    trained = rope.scaling.get("original_max_position_embeddings") or rope.max_positions
    lengths = (positions + 1).clamp(min=trained).double()
    thetas = rope.theta * ((factor * lengths / trained) - (factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).double() / dim
    frequencies = 1.0 / thetas[:, None] ** exponents[None, :]
    return positions.float()[:, None] * frequencies.float(), 1.0


def _llama3(rope: Rope, positions: Tensor) -> tuple[Tensor, float]:
    """Low frequencies are divided by the factor, high ones kept, those between blended."""
    scaling, frequencies = rope.scaling, rope.inverse_frequencies()
    trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = 2 * math.pi / frequencies
    blend = (trained / waves - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(waves > trained / low, frequencies / factor, frequencies)
    between = (waves >= trained / high) & (waves <= trained / low)
    return _outer(positions, torch.where(between, blended, stretched)), 1.0


def _yarn(rope: Rope, positions: Tensor) -> tuple[Tensor, float]:
    """Pairs that turn often within the trained length keep their frequency, slow ones are divided by the factor;
    between them is a ramp."""
    scaling, dim = rope.scaling, rope.rotary_dim
    trained = scaling.get("original_max_position_embeddings") or rope.max_positions
    factor = scaling["factor"]

    def pair_with_turns(num_turns: float) -> float:
        """Which pair (as a fraction) turns so many times within the trained length."""
        return dim * math.log(trained / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = pair_with_turns(scaling.get("beta_fast") or 32)
    high = pair_with_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = rope.inverse_frequencies()
    return _outer(positions, frequencies / factor * ramp + frequencies * (1 - ramp)), _yarn_magnitude(scaling, factor)


def _yarn_magnitude(scaling: dict[str, Any], factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def _longrope(rope: Rope, positions: Tensor) -> tuple[Tensor, float]:
    """A divisor per pair, from one of two lists: that for long contexts if the engine accepts any longer than trained.
    (The original switches when a context grows past that length, and keeps what it has cached with the other list.)"""
    scaling = rope.scaling
    trained = scaling.get("original_max_position_embeddings") or rope.max_positions
    list_name = "long_factor" if len(positions) > trained else "short_factor"
    factors = torch.tensor(scaling[list_name])
    if len(factors) != rope.rotary_dim // 2:
        raise ValueError(f"it has {len(factors)} factors for {rope.rotary_dim // 2} pairs")
    factor = scaling.get("factor") or rope.max_positions / trained
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return _outer(positions, rope.inverse_frequencies() / factors), magnitude


def _proportional(rope: Rope, positions: Tensor) -> tuple[Tensor, float]:
    """Only the first pairs are rotated, a share of all, with the frequencies they would have if all were."""
    frequencies = rope.inverse_frequencies() / rope.scaling.get("factor", 1.0)
    num_rotated = int(rope.scaling.get("partial_rotary_factor", 1.0) * rope.rotary_dim // 2)
    frequencies[num_rotated:] = 0
    return _outer(positions, frequencies), 1.0


def _gguf_factors(rope: Rope, positions: Tensor) -> tuple[Tensor, float]:
    """GGUF files carry llama3 scaling as one divisor per pair."""
    return _outer(positions, rope.inverse_frequencies() / torch.tensor(rope.scaling["factors"])), 1.0


SCALINGS: dict[str, Scaling] = {
    "default": _default,
    "none": _none,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "gguf_factors": _gguf_factors,
}
