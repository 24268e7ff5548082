"""Faults on the way to the experts and back."""

from __future__ import annotations

import itertools

import torch

from octavo.conformance.mutants.base import Call, Mutant, Op, after, around, before, unwritten


@after
def order_reversed(call: Call) -> None:
    """Within an expert the last pair comes first."""
    bounds = call["segment_start"].tolist()
    rows, places = call["out_rows"].clone(), call["out_places"].clone()
    for start, end in itertools.pairwise(bounds):
        call["out_rows"][start:end] = rows[start:end].flip(0)
        inside = (places >= start) & (places < end)
        call["out_places"][inside] = start + end - 1 - places[inside]


@before
def first_expert_ignored(call: Call) -> None:
    call["first_expert"] = 0


@around
def tail_unwritten(honest: Op, call: Call) -> None:
    """Rows that no pair fills keep what was there."""
    held = call["out_rows"].clone()
    honest(**call)
    used = int(call["segment_start"][-1])
    call["out_rows"][used:] = held[used:]


@before
def stray_counted(call: Call) -> None:
    """-1 counts as expert 0."""
    call["ids_TK"] = call["ids_TK"].clamp(min=0)


@around
def no_tokens(honest: Op, call: Call) -> None:
    """A grid of no blocks is left out, and with it the bounds."""
    is_empty = call["ids_TK"].numel() == 0
    unwritten(honest, call, "segment_start", at=slice(0 if is_empty else len(call["segment_start"]), None))


@around
def elsewhere_times_zero(honest: Op, call: Call) -> None:
    """What is elsewhere is read from row 0 and multiplied by its weight times 0."""
    is_gone = call["places_TK"] < 0
    weights = torch.where(is_gone, call["weights_TK"] * 0, call["weights_TK"])
    honest(**call | {"places_TK": call["places_TK"].clamp(min=0), "weights_TK": weights})


@before
def elsewhere_is_last(call: Call) -> None:
    """-1 counts from the end."""
    places = call["places_TK"]
    call["places_TK"] = torch.where(places < 0, call["y_RM"].shape[0] - 1, places)


@around
def residual_dropped(honest: Op, call: Call) -> None:
    honest(**call | {"residual": None})


@around
def sum_in_16_bits(honest: Op, call: Call) -> None:
    """The sum is kept in y's dtype from choice to choice."""
    if call["y_RM"].dtype != torch.bfloat16:
        honest(**call)
        return
    total = call["residual"]
    for k in range(call["places_TK"].shape[1]):
        one = {name: call[name][:, k : k + 1] for name in ("places_TK", "weights_TK")}
        part = torch.empty_like(call["out"])
        honest(**call | one | {"out": part, "residual": total})
        total = part
    call["out"].copy_(total)


MUTANTS = (
    Mutant(
        "permute-order-reversed",
        "within an expert pairs stand in reverse order",
        "sorts that are not stable, places taken by atomics",
        "moe_permute",
        order_reversed,
    ),
    Mutant(
        "permute-first-expert-ignored",
        "ids are taken for local ones",
        "kernels written for all experts on one device",
        "moe_permute",
        first_expert_ignored,
    ),
    Mutant(
        "permute-tail-unwritten",
        "rows that no pair fills are left as they were, and index anything",
        "kernels that write used rows alone",
        "moe_permute",
        tail_unwritten,
    ),
    Mutant(
        "permute-stray-counted",
        "an id of -1 counts as expert 0",
        "ids that are clamped to be safe to index",
        "moe_permute",
        stray_counted,
    ),
    Mutant(
        "permute-no-tokens",
        "without a token the segments' bounds are not written",
        "launches left out where the grid is empty",
        "moe_permute",
        no_tokens,
    ),
    Mutant(
        "combine-elsewhere-times-zero",
        "a choice that is elsewhere adds 0 times what its weight and row 0 hold",
        "sums that multiply by a mask",
        "moe_combine",
        elsewhere_times_zero,
    ),
    Mutant(
        "combine-elsewhere-is-last",
        "a choice that is elsewhere adds the last row",
        "tensor libraries in which negative indices count from the end",
        "moe_combine",
        elsewhere_is_last,
    ),
    Mutant(
        "combine-residual-dropped",
        "the residual is ignored",
        "fused sums chosen by a heuristic",
        "moe_combine",
        residual_dropped,
    ),
    Mutant(
        "combine-16-bit-sum",
        "the sum is rounded to bf16 after each choice",
        "experts that add to their output in turn",
        "moe_combine",
        sum_in_16_bits,
    ),
)
