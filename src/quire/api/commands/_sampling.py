"""The sampling flags that `chat` and `generate` share."""

from dataclasses import dataclass, fields
from typing import Any

from quire.config import knob
from quire.frontend.model import ModelInfo
from quire.params import SamplingParams

CHAT_TEMPERATURE = 0.4  # for models that bring no default: small ones ramble at 1


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen"""

    temperature: float | None = knob(
        None, "0 always takes the likeliest token (default: the model's, else 0.4 in a chat and 1 for plain text)"
    )
    top_p: float | None = knob(None, "choose among the likeliest tokens that together have this probability")
    top_k: int | None = knob(None, "choose among this many tokens; 0: all")
    min_p: float | None = knob(None, "choose among tokens at least this likely, relative to the likeliest")
    repetition_penalty: float | None = knob(None, "above 1: tokens seen before become less likely")
    max_tokens: int | None = knob(None, "longest answer, in tokens (default: the command's own)")
    stop: list[str] = knob([], "end the answer at any of these texts")
    ignore_eos: bool = knob(False, "go on past the model's end-of-text token")

    def __post_init__(self) -> None:
        SamplingParams(**self._given())  # wrong values are refused before a model is loaded

    def params(self, model: ModelInfo, max_tokens: int | None, seed: int | None, chat: bool) -> SamplingParams:
        """What was typed, else the model's own defaults, else this command's."""
        defaults: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed}
        if chat and "temperature" not in model.sampling_defaults:
            defaults["temperature"] = CHAT_TEMPERATURE
        return model.default_params(**{**defaults, **self._given()})

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, [])}
