"""Which experts a token goes to, in plain torch: the rule as data, and the oracle of `ops/routing/triton.py`.

Called by the expert backends and by tests. Knows routers only; nothing of experts' weights.

Shape letters: T tokens, D hidden size, E experts, K experts of a token, G groups, P parts of a sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Routing:
    """How logits become experts and weights. A softmax over the chosen alone is the softmax over all, renormalized."""

    num_experts_per_token: int
    score: str = "softmax"  # or "sigmoid"
    renormalize: bool = False  # the weights of a token add up to one, before the scale
    scale: float = 1.0
    num_groups: int = 1
    num_groups_kept: int = 1  # experts of other groups are not chosen
    group_score_size: int = 1  # a group's score is the sum of the scores of so many of its best experts


def router_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """A router's logits, in parts that add up, [P, T, E].

    In float32 throughout: after rounding, experts that are nearly equal could come out in any order.
    """
    return functional.linear(x_TD.float(), weight_ED.float(), None if bias_E is None else bias_E.float())[None]


def route(logits: Tensor, routing: Routing, correction_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weights_TK float32, expert_ids_TK int32), best first; of equals the first expert.

    The bias counts in the choice of experts, not in their weights. Logits are [T, E], or parts of a sum [P, T, E].
    """
    wide_TE = logits.float() if logits.dim() == 2 else logits.sum(0)
    scores_TE = wide_TE.softmax(-1) if routing.score == "softmax" else wide_TE.sigmoid()
    choice_TE = scores_TE if correction_bias_E is None else scores_TE + correction_bias_E
    if routing.num_groups > 1:
        choice_TE = _in_best_groups(choice_TE, routing)
    # A stable sort, because top-k may take any of equals, and bfloat16 logits often are equal.
    ids_TK = choice_TE.argsort(dim=-1, descending=True, stable=True)[:, : routing.num_experts_per_token]
    weights_TK = scores_TE.gather(1, ids_TK)
    if routing.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * routing.scale, ids_TK.int()


def _in_best_groups(choice_TE: Tensor, routing: Routing) -> Tensor:
    """Minus infinity for experts outside the best groups."""
    choice_TGX = choice_TE.unflatten(1, (routing.num_groups, -1))
    best_TG = choice_TGX.topk(routing.group_score_size, -1).values.sum(-1)
    kept_TG = best_TG.argsort(dim=-1, descending=True, stable=True)[:, : routing.num_groups_kept]
    dropped_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, kept_TG, False)
    return choice_TGX.masked_fill(dropped_TG[..., None], -torch.inf).flatten(1)
