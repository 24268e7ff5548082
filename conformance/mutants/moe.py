"""Faults of mixtures of experts."""

from __future__ import annotations

from octavo.conformance.mutants.base import Call, Mutant, Op, after, around, before, unwritten

PAIR = (60, 4)
BUCKET = (3, 4)


@around
def bucket_boundary(honest: Op, call: Call) -> None:
    """3 and 4 tokens run in the shape tuned for 2: the rows beyond are never written."""
    outputs = [name for name in ("out", "out_weights", "out_ids") if name in call]
    rows = call["x_TK" if "x_TK" in call else "logits_TE"].shape[0]
    unwritten(honest, call, *outputs, at=slice(2, None) if rows in BUCKET else slice(rows, None))


@after
def one_pair(call: Call) -> None:
    """The last weight is the first one's."""
    if (call["logits_TE"].shape[1], call["top_k"]) == PAIR:
        call["out_weights"][:, -1] = call["out_weights"][:, 0]


@after
def nan_row(call: Call) -> None:
    """No comparison with NaN holds, so the ids stay at what they were set to before the search."""
    is_bad = call["logits_TE"].isnan().any(dim=-1)
    call["out_ids"][is_bad] = -1


@after
def ids_in_8_bits(call: Call) -> None:
    call["out_ids"] &= 0xFF


@before
def no_empty_grid(call: Call) -> None:
    if call["x_TK" if "x_TK" in call else "logits_TE"].shape[0] == 0:
        raise RuntimeError("invalid argument: a grid of 0 blocks")


MUTANTS = (
    Mutant(
        "moe-token-bucket-boundary",
        "3 and 4 tokens are run in the shape tuned for 2: the rows beyond are never written",
        "tables of tuned shapes by token count",
        ("moe_route", "grouped_gemm"),
        bucket_boundary,
    ),
    Mutant(
        "moe-weights-wrong-at-one-pair",
        "the last weight is wrong for 60 experts of which 4 are chosen",
        "routing kernels specialised by (experts, top-k)",
        "moe_route",
        one_pair,
    ),
    Mutant(
        "nan-router-row",
        "a row of NaN gets the expert -1, which indexes out of bounds later",
        "top-k kernels that start from an id that no comparison replaces",
        "moe_route",
        nan_row,
    ),
    Mutant(
        "expert-index-above-255",
        "expert ids are kept in 8 bits",
        "routing kernels that pack ids",
        "moe_route",
        ids_in_8_bits,
    ),
    Mutant(
        "moe-zero-tokens",
        "a batch without tokens is an error",
        "kernels launched over an empty grid, on ranks that no token reached",
        ("moe_route", "grouped_gemm"),
        no_empty_grid,
    ),
)
