"""Which experts a token goes to, in Triton, in two launches for every rule; twin: `ops/routing/reference.py`.

Called by the Triton expert backend. Knows routers only. Whatever the logits are, also NaN, ids name experts that exist.
A router's product is small and would keep few multiprocessors busy: its sum is cut into parts, by its length alone,
which the second launch adds up.

Shape letters: T tokens, D hidden size, E experts, K experts of a token, G groups, P parts of a sum; in the kernels J
inputs at a time, X places for experts (groups times experts of a group, each rounded up to a power of two), S = K
rounded up likewise.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import options, pdl, wait_turn
from quire.ops.routing.reference import Routing

__all__ = ["Routing", "route", "router_logits"]

INFINITY = tl.constexpr(float("inf"))
MAX_FEW_TOKENS = 1024


def router_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """As the twin; x may have any stride along T.

    Of many tokens the parts are added up here, in the order in which `route` adds up those of few tokens.
    """
    (T, D), E = x_TD.shape, len(weight_ED)
    part = 256 if D <= 4096 else 1024
    num_parts = triton.cdiv(D, part)
    few = T <= MAX_FEW_TOKENS
    block_t, block_e, block_j, num_stages = router_tile(T, part, x_TD.dtype)
    logits_PTE = torch.empty(num_parts if few else 1, T, E, dtype=torch.float32, device=x_TD.device)
    if T:
        _logits_kernel[triton.cdiv(T, block_t), len(logits_PTE), triton.cdiv(E, block_e)](
            logits_PTE,
            x_TD,
            weight_ED,
            bias_E,
            T,
            x_TD.stride(0),
            D=D,
            E=E,
            PART=part,
            NUM_PARTS=1 if few else num_parts,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
            BLOCK_J=block_j,
            PDL=pdl(x_TD),
            num_warps=4,
            num_stages=num_stages,
            **options(pdl(x_TD)),
        )
    return logits_PTE


def router_tile(num_tokens: int, part: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(tokens, experts, inputs at a time, stages) of a program."""
    num_stages = 2 if dtype == torch.float32 else 4
    if num_tokens > MAX_FEW_TOKENS:
        return 64, 128, 64, num_stages
    num_experts = 32 if num_tokens <= 16 else 64
    num_inputs = 256 if part == 256 else 64
    return 16, num_experts, num_inputs, num_stages


@triton.jit
def _logits_kernel(
    logits_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    T,
    x_stride,
    D: tl.constexpr,
    E: tl.constexpr,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has NUM_PARTS parts of BLOCK_E logits of BLOCK_T tokens.

    If its weights are a single tile, they are loaded before the tokens have been computed.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_part = tl.program_id(1) * NUM_PARTS
    t_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e_E = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    x_T1 = x_ptr + tl.minimum(t_T, T - 1).to(tl.int64)[:, None] * x_stride
    weight_E1 = weight_ptr + tl.minimum(e_E, E - 1)[:, None] * D
    j_1J = first_part * PART + tl.arange(0, BLOCK_J)[None, :]
    bias_1E = tl.zeros((1, BLOCK_E), tl.float32)
    if bias_ptr is not None:
        bias_1E += tl.where(first_part == 0, tl.load(bias_ptr + e_E, e_E < E, 0.0).to(tl.float32), 0.0)[None, :]
    total_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32) + bias_1E
    if NUM_PARTS == 1 and PART == BLOCK_J:
        weight_EJ = tl.load(weight_E1 + j_1J, j_1J < D, 0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        x_TJ = tl.load(x_T1 + j_1J, j_1J < D, 0.0)
        total_TE += tl.dot(x_TJ, tl.trans(weight_EJ), input_precision="ieee")
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        for _ in range(NUM_PARTS):
            part_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
            for _ in range(0, PART, BLOCK_J):
                x_TJ = tl.load(x_T1 + j_1J, j_1J < D, 0.0)
                weight_EJ = tl.load(weight_E1 + j_1J, j_1J < D, 0.0)
                part_TE = tl.dot(x_TJ, tl.trans(weight_EJ), part_TE, input_precision="ieee")
                j_1J += BLOCK_J
            total_TE += part_TE
    to_T1 = logits_ptr + (tl.program_id(1).to(tl.int64) * T + t_T[:, None]) * E
    tl.store(to_T1 + e_E[None, :], total_TE, (t_T < T)[:, None] & (e_E < E)[None, :])


def route(logits: Tensor, routing: Routing, correction_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the twin."""
    logits_PTE = logits if logits.dim() == 3 else logits[None]
    num_parts, num_tokens, num_experts = logits_PTE.shape
    top_k = routing.num_experts_per_token
    weights_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    group_size = num_experts // routing.num_groups
    num_places = triton.next_power_of_2(routing.num_groups) * triton.next_power_of_2(group_size)
    dependent = pdl(logits)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            weights_TK,
            ids_TK,
            logits_PTE,
            correction_bias_E,
            routing.scale,
            logits_PTE.stride(0),
            logits_PTE.stride(1),
            NUM_PARTS=num_parts,
            TOP_K=top_k,
            SIGMOID=routing.score == "sigmoid",
            RENORMALIZE=routing.renormalize,
            NUM_GROUPS=routing.num_groups,
            GROUP_SIZE=group_size,
            KEPT=routing.num_groups_kept,
            SUMMED=routing.group_score_size,
            PDL=dependent,
            num_warps=1 if num_places <= 256 else 2,
            **options(dependent),
        )
    return weights_TK, ids_TK


@triton.jit
def _route_kernel(
    weights_ptr,
    ids_ptr,
    logits_ptr,
    bias_ptr,
    scale,
    part_stride,
    logits_stride,
    NUM_PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    SUMMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has one token."""
    G: tl.constexpr = triton.next_power_of_2(NUM_GROUPS)
    PLACES: tl.constexpr = triton.next_power_of_2(GROUP_SIZE)  # of a group
    S: tl.constexpr = triton.next_power_of_2(TOP_K)
    token = tl.program_id(0).to(tl.int64)
    place_X = tl.arange(0, G * PLACES)
    inside_X = (place_X // PLACES < NUM_GROUPS) & (place_X % PLACES < GROUP_SIZE)
    expert_X = place_X // PLACES * GROUP_SIZE + place_X % PLACES
    wait_turn(PDL)
    logits_ptr += token * logits_stride
    logits_X = tl.zeros((G * PLACES,), tl.float32)
    for part in tl.static_range(NUM_PARTS):
        logits_X += tl.load(logits_ptr + part * part_stride + expert_X, inside_X, 0.0).to(tl.float32)
    logits_X = tl.where(inside_X, logits_X, -INFINITY)
    if SIGMOID:
        scores_X = 1.0 / (1.0 + tl.exp(-logits_X))
    else:
        scores_X = tl.exp(logits_X - tl.max(logits_X, 0))
        scores_X = scores_X / tl.sum(scores_X, 0)
    choice_X = scores_X
    if bias_ptr is not None:
        choice_X += tl.load(bias_ptr + expert_X, inside_X, 0.0).to(tl.float32)
    # NaN must never be the best: then argmax could give any place, also one without an expert.
    choice_X = tl.where(inside_X & (choice_X == choice_X), choice_X, -INFINITY)
    if NUM_GROUPS > 1:
        choice_X = _in_best_groups(choice_X, G, PLACES, KEPT, SUMMED)

    s_S = tl.arange(0, S)
    weights_S, ids_S = tl.zeros((S,), tl.float32), tl.zeros((S,), tl.int32)
    for s in tl.static_range(TOP_K):
        best = tl.argmax(choice_X, 0, tie_break_left=True)
        weight = tl.sum(tl.where(place_X == best, scores_X, 0.0), 0)
        weights_S = tl.where(s_S == s, weight, weights_S)
        ids_S = tl.where(s_S == s, best // PLACES * GROUP_SIZE + best % PLACES, ids_S)
        choice_X = tl.where(place_X == best, -INFINITY, choice_X)
    if RENORMALIZE:
        weights_S /= tl.sum(weights_S, 0) + 1e-20
    tl.store(weights_ptr + token * TOP_K + s_S, weights_S * scale, s_S < TOP_K)
    tl.store(ids_ptr + token * TOP_K + s_S, ids_S, s_S < TOP_K)


@triton.jit
def _in_best_groups(choice_X, G: tl.constexpr, PLACES: tl.constexpr, KEPT: tl.constexpr, SUMMED: tl.constexpr):
    """Minus infinity for experts outside the best groups.

    Empty places hold it already, so empty groups are the worst.
    """
    choice_GX = tl.reshape(choice_X, (G, PLACES))
    rest_GX = choice_GX
    best_G = tl.zeros((G,), tl.float32)
    for _ in tl.static_range(SUMMED):
        best_G += tl.max(rest_GX, 1)
        first_G = tl.argmax(rest_GX, 1, tie_break_left=True)
        rest_GX = tl.where(tl.arange(0, PLACES)[None, :] == first_G[:, None], -INFINITY, rest_GX)
    g_G = tl.arange(0, G)
    kept_G = tl.zeros((G,), tl.int32)
    for _ in tl.static_range(KEPT):
        best = tl.argmax(best_G, 0, tie_break_left=True)
        kept_G = tl.where(g_G == best, 1, kept_G)
        best_G = tl.where(g_G == best, -INFINITY, best_G)
    return tl.reshape(tl.where(kept_G[:, None] != 0, choice_GX, -INFINITY), (G * PLACES,))
