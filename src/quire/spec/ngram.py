"""Prompt lookup: when the last tokens of a text occurred in it before, what followed then is guessed again.

For text that repeats or edits what the prompt has. Needs no model; runs on the device, since only that knows a row's
last tokens.
"""

from torch import Tensor

from quire.config.speculation import Speculation
from quire.spec.base import NoDrafter


class Drafter(NoDrafter):
    def __init__(self, speculation: Speculation, on_triton: bool) -> None:
        self.num_drafts = speculation.num_tokens
        self.sizes = speculation.lookup_min, speculation.lookup_max
        if on_triton:
            from quire.ops.lookup.triton import repeat_continuations
        else:
            from quire.ops.lookup.reference import repeat_continuations
        self.repeat_continuations = repeat_continuations

    def draft(self, rows_R: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor:
        return self.repeat_continuations(rows_R, lengths, tokens, *self.sizes, self.num_drafts)
