"""The sampling flags that `chat`, `run` and `generate` share."""

from dataclasses import dataclass, fields
from typing import Any

from quire.config import knob
from quire.frontend.model import ModelInfo
from quire.params import SamplingParams


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen"""

    temperature: float | None = knob(
        None, "0 always takes the likeliest token (default: the model's, else 1, as of a server)"
    )
    top_p: float | None = knob(None, "choose among the likeliest tokens that together have this probability")
    top_k: int | None = knob(None, "choose among this many tokens; 0: all")
    min_p: float | None = knob(None, "choose among tokens at least this likely, relative to the likeliest")
    repetition_penalty: float | None = knob(None, "above 1: tokens seen before become less likely")
    max_tokens: int | None = knob(None, "longest answer, in tokens (default: the command's own)")
    stop: list[str] = knob([], "end the answer at any of these texts")
    ignore_eos: bool = knob(False, "go on past the model's end-of-text token")

    def __post_init__(self) -> None:
        SamplingParams(**self.given())  # wrong values are refused before a model is loaded

    def params(self, model: ModelInfo, max_tokens: int | None, seed: int | None) -> SamplingParams:
        """What was typed, else the model's own defaults, else what a server takes."""
        return model.default_params(**{"max_tokens": max_tokens, "seed": seed, **self.given()})

    def given(self) -> dict[str, Any]:
        """What was typed, by the names that requests have as well."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, []) and value is not False}
