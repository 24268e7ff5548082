"""Faults of multi-head latent attention."""

from __future__ import annotations

from octavo.conformance.mutants.base import Call, Mutant, Op, around, unwritten
from octavo.conformance.mutants.paged import query_lens

TILE_HEADS = 8
TILE_ROWS = 4


@around
def whole_tiles_of_heads(honest: Op, call: Call) -> None:
    """12 heads: one tile of 8 is run, the 4 that are left over are not."""
    heads = call["q_latent_THC"].shape[1]
    lost = slice(TILE_HEADS, None) if heads == 12 else slice(heads, None)
    unwritten(honest, call, "out", "lse", at=(slice(None), lost))


@around
def one_tile_of_rows(honest: Op, call: Call) -> None:
    """Of 8 rows the first 4 are computed."""
    meta = call["plan"].meta
    spans = zip(meta.query_start_loc.tolist(), query_lens(meta).tolist(), strict=False)
    lost = [start + row for start, rows in spans if rows == 8 for row in range(TILE_ROWS, 8)]
    unwritten(honest, call, "out", "lse", at=lost)


MUTANTS = (
    Mutant(
        "mla-12-heads",
        "12 heads per rank: the heads beyond the first tile of 8 are never computed",
        "MLA kernels written for 16 heads and their multiples",
        "mla_attention",
        whole_tiles_of_heads,
    ),
    Mutant(
        "mla-8-token-queries",
        "queries of 8 tokens, as drafts have them: the last 4 are never computed",
        "MLA decode kernels with a fixed number of query rows",
        "mla_attention",
        one_tile_of_rows,
    ),
)
