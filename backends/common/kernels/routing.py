"""The choice of experts: scores, groups and the top k of each row, in registers.

    logits [T, E] ──► scores ──► choice = scores + bias ──► groups out of the best: -inf ──► k times the best left

    program = ROWS tokens x all experts, as [ROWS, GROUPS, SIZE]: expert e lies at group e // size, place e % size, both
    sides up to powers of two; without groups there is one

Ties go to the lowest id everywhere. The unbiased score of each chosen expert is its weight.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.numeric import cast

_NOTHING = tl.constexpr(1 << 30)


@triton.jit
def _best(values, ids, is_left):
    """Along axis 1: the largest value that is left, and the lowest id that has it; [ROWS, 1] each."""
    top = tl.max(tl.where(is_left, values, float("-inf")), axis=1, keep_dims=True)
    return top, tl.min(tl.where(is_left & (values == top), ids, _NOTHING), axis=1, keep_dims=True)


@triton.jit
def _group_values(choice, is_expert, BEST: tl.constexpr):
    """What each group counts, [ROWS, GROUPS]: its best expert, or the sum of its best two."""
    values = tl.where(is_expert, choice, float("-inf"))
    first = tl.max(values, axis=2)
    if BEST == 2:
        places = tl.arange(0, choice.shape[2])[None, None, :]
        at = tl.min(tl.where(values == first[:, :, None], places, _NOTHING), axis=2)
        second = tl.max(tl.where(places == at[:, :, None], float("-inf"), values), axis=2)
        first += second
    return first


@triton.jit
def _limited(choice, is_expert, num_groups, top_groups, BEST: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """choice, -inf for the experts outside each row's best groups."""
    values = _group_values(choice, is_expert, BEST)
    groups = tl.arange(0, GROUPS)[None, :]
    is_left = (groups < num_groups) & (values == values)
    is_chosen = tl.zeros((ROWS, GROUPS), tl.int32)
    for _ in range(top_groups):
        _, at = _best(values, groups, is_left)
        is_chosen = tl.where(groups == at, 1, is_chosen)
        is_left = is_left & (groups != at)
    return tl.where(is_chosen[:, :, None] > 0, choice, float("-inf"))


@triton.jit
def moe_route(
    logits, bias, out_weights, out_ids,
    num_rows, num_groups, group_size, top_groups, top_k, scale,
    logits_stride, weights_stride, ids_stride,
    IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, BEST: tl.constexpr, RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """ids of the top_k experts of each row, highest first, and their weights."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows[:, None] < num_rows
    groups, places = tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    ids = (groups * group_size + places)[None, :, :]
    is_expert = ((groups < num_groups) & (places < group_size))[None, :, :] & row_mask[:, :, None]
    at = rows.to(tl.int64)[:, None, None] * logits_stride + ids
    x = tl.load(logits + at, is_expert, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        scores = tl.exp(x - tl.max(tl.max(x, axis=2), axis=1)[:, None, None])
        scores = scores / tl.sum(tl.sum(scores, axis=2), axis=1)[:, None, None]
    # NaN logits, and what softmax makes NaN of: an infinite one, or a row of nothing but -inf.
    is_bad = tl.max(tl.max((is_expert & (scores != scores)).to(tl.int32), axis=2), axis=1)[:, None] > 0
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + ids, is_expert, other=0.0).to(tl.float32)
    if GROUPS > 1:
        choice = _limited(choice, is_expert, num_groups, top_groups, BEST, ROWS, GROUPS)

    choice = tl.reshape(choice, (ROWS, GROUPS * SIZE))
    scores = tl.reshape(scores, (ROWS, GROUPS * SIZE))
    ids = tl.reshape(tl.broadcast_to(ids, (ROWS, GROUPS, SIZE)), (ROWS, GROUPS * SIZE))
    is_left = tl.reshape(is_expert, (ROWS, GROUPS * SIZE))
    slots = tl.arange(0, CHOICES)[None, :]
    weights = tl.zeros((ROWS, CHOICES), tl.float32)
    chosen = tl.broadcast_to(slots, (ROWS, CHOICES))
    for k in range(top_k):
        _, best = _best(choice, ids, is_left)
        weight = tl.sum(tl.where(ids == best, scores, 0.0), axis=1, keep_dims=True)
        weights = tl.where(slots == k, weight, weights)
        chosen = tl.where((slots == k) & (is_bad == 0), best, chosen)
        is_left = is_left & (ids != best)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, axis=1, keep_dims=True)
    weights = tl.where(is_bad, float("nan"), weights * scale)
    mask = row_mask & (slots < top_k)
    wide = rows.to(tl.int64)[:, None]
    tl.store(out_weights + wide * weights_stride + slots, cast(weights, out_weights.dtype.element_ty), mask)
    tl.store(out_ids + wide * ids_stride + slots, chosen.to(out_ids.dtype.element_ty), mask)
