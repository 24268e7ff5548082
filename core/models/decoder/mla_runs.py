"""Which requests of a step attend over keys and values made anew from their latents, and which over the latents.

    requests of a step   | decoding, chunks behind the first | fresh ... | chunk | fresh |
    runs                 | absorbed                          | plain     | absorbed | plain |

A fresh request has no keys but the step's own. Making its keys and values costs what absorbing its queries and results
would, and then a pair of query and key costs P + R + V multiplications in place of C + R + C: plain is never dearer.
One that has keys in the cache would have to make all of those again, and stays absorbed. Letters as in mla.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch

from octavo.core.backend.kv import AttentionMetadata
from octavo.core.backend.ops import StepPlan


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring requests of a step that attend in the same way.

    Attributes:
        tokens: their rows.
        query_start_loc: [B + 1] int32, counted from the run's first row.
        plan: for attention over the latents; None for fresh requests.
    """

    tokens: slice
    query_start_loc: torch.Tensor
    plan: StepPlan | None


def runs_of(plan: StepPlan, num_tokens: int, make_plan: Callable[[AttentionMetadata], StepPlan]) -> Iterator[Run]:
    """A step's runs in order; a single one, over the step's own plan, where nobody is fresh.

    Args:
        num_tokens: rows of the step, padding included.
        make_plan: the device's, for a part of the step.
    """
    meta = plan.meta
    if not meta.num_fresh:
        yield Run(slice(0, num_tokens), meta.query_start_loc, plan)
        return
    starts, lengths = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    counts = [stop - start for start, stop in pairwise(starts)]
    is_fresh = [count > 1 and count == length for count, length in zip(counts, lengths, strict=True)]
    for fresh, group in groupby(range(len(counts)), key=is_fresh.__getitem__):
        members = [*group]
        first, stop = members[0], members[-1] + 1
        tokens = slice(starts[first], starts[stop])
        query_start_loc = meta.query_start_loc[first : stop + 1] - starts[first]
        if fresh:
            yield Run(tokens, query_start_loc, None)
            continue
        part = replace(
            meta,
            num_requests=stop - first,
            num_tokens=tokens.stop - tokens.start,
            max_query_len=max(counts[first:stop]),
            max_seq_len=max(lengths[first:stop]),
            query_start_loc=query_start_loc,
            seq_lens=meta.seq_lens[first:stop],
            block_table=meta.block_table[first:stop],
            slot_mapping=meta.slot_mapping[tokens],
            num_fresh=0,
        )
        yield Run(tokens, query_start_loc, make_plan(part))
