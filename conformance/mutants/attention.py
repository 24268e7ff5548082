"""Faults of attention: what is masked, how scores are formed, what reaches the output."""

from __future__ import annotations

import itertools
import math

import torch

from octavo.conformance.mutants.base import Call, Mutant, Op, after, around, before, nudge, unwritten
from octavo.conformance.mutants.paged import (
    SPLIT_KEYS,
    change_meta,
    own_blocks,
    query_lens,
    rows_of,
    seq_lens,
    table,
)

TILE_D = 64
FP16_MAX = 65504.0
FIRST_KEYS = 4096
PAGES_PER_STEP = 4


@around
def small_head(honest: Op, call: Call) -> None:
    """The loop over head_dim / 64 runs zero times."""
    if call["q_THD"].shape[-1] < TILE_D:
        call["out"] = torch.empty_like(call["out"])
    honest(**call)


@before
def block_32(call: Call) -> None:
    """Offsets from 17 on are taken modulo 16."""
    if call["kv"].spec.block_size == 32:
        for part in own_blocks(call):
            part[:, 17:] = part[:, 1:16].clone()


@before
def first_keys_only(call: Call) -> None:
    meta = call["plan"].meta
    lens = seq_lens(meta)
    change_meta(call, seq_lens=torch.minimum(lens, query_lens(meta).clamp(min=FIRST_KEYS)))


@before
def whole_steps_of_pages(call: Call) -> None:
    """Pages beyond the last whole step of the kernel's loop over the table are left out."""
    meta = call["plan"].meta
    width = meta.block_table.shape[1]
    if width % PAGES_PER_STEP:
        keys = width // PAGES_PER_STEP * PAGES_PER_STEP * meta.block_size
        change_meta(call, seq_lens=seq_lens(meta).clamp(max=keys))


@before
def first_block_zero(call: Call) -> None:
    """Keys of the window are looked up from entry 0 of the table instead of the window's first block."""
    meta, window = call["plan"].meta, call["window"]
    if window is None:
        return
    ids = table(meta)
    first_key = (seq_lens(meta) - query_lens(meta) - window + 1).clamp(min=0)
    for row, first in zip(ids, (first_key // meta.block_size).tolist(), strict=True):
        row[first:] = row[: len(row) - first].clone()
    change_meta(call, block_table=ids)


@before
def minus_one_literal(call: Call) -> None:
    """No window reaches the kernel as -1, and a row sees keys nearer than -1: none."""
    if call["window"] is None:
        call["window"] = -1


@before
def window_plus_one(call: Call) -> None:
    if call["window"] is not None:
        call["window"] += 1


@before
def empty_sequence(call: Call) -> None:
    """The loop over keys runs at least once; and a request without rows lends its table to the next one."""
    meta = call["plan"].meta
    lens, ids, rows = seq_lens(meta), table(meta), query_lens(meta)
    if not bool((lens == 0).any() | (rows == 0).any()):
        return
    for b in range(len(lens) - 1):
        if rows[b] == 0:
            lens[b + 1], ids[b + 1] = lens[b], ids[b]
    change_meta(call, seq_lens=lens.clamp(min=1), block_table=ids)


@before
def no_softcap(call: Call) -> None:
    call["softcap"] = None


@before
def no_sinks(call: Call) -> None:
    call["sinks_H"] = None


@before
def next_heads_sink(call: Call) -> None:
    """The sink is looked up by row and head together, modulo the number of heads."""
    starts = call["plan"].meta.query_start_loc if "plan" in call else call["query_start_loc"]
    if call["sinks_H"] is not None and int(starts.diff().max()) > 1:
        call["sinks_H"] = call["sinks_H"].roll(1)


@before
def no_alibi(call: Call) -> None:
    call["alibi_slopes_H"] = None


@around
def power_of_two_groups(honest: Op, call: Call) -> None:
    """A tile has the largest power of two of a group's heads: the others are never computed."""
    heads, kv_heads = call["q_THD"].shape[1], call["kv"].spec.num_kv_heads
    ratio = heads // kv_heads
    computed = 2 ** int(math.log2(ratio))
    lost = [h for h in range(heads) if h % ratio >= computed]
    unwritten(honest, call, "out", "lse", at=(slice(None), lost))


@before
def drop_last_token(call: Call) -> None:
    """The tail of the last split is cut one key short."""
    lens = seq_lens(call["plan"].meta)
    change_meta(call, seq_lens=lens - (lens > SPLIT_KEYS).to(lens.dtype))


@before
def read_stale_slot(call: Call) -> None:
    """The newest token's slot is read before it is written: it holds an older token's K and V."""
    meta = call["plan"].meta
    lens, width, size = seq_lens(meta).tolist(), meta.block_table.shape[1], meta.block_size
    if max(lens, default=0) <= SPLIT_KEYS:
        return
    for part in own_blocks(call):
        slots = part.view(torch.uint8).flatten(0, 1) if part.dtype.itemsize == 1 else part.flatten(0, 1)
        for b, length in enumerate(lens):
            if length > SPLIT_KEYS:
                slots[b * width * size + length - 1] = slots[b * width * size + length - 2]


@before
def skip_block(call: Call) -> None:
    """The last block but one is left out, as by a loop that advances twice."""
    meta = call["plan"].meta
    lens, ids = seq_lens(meta), table(meta)
    for b, length in enumerate(lens.tolist()):
        last = (length - 1) // meta.block_size
        if length > SPLIT_KEYS and last >= 2 and int(query_lens(meta)[b]) <= length - meta.block_size:
            ids[b, last - 1 : -1] = ids[b, last:].clone()
            lens[b] -= meta.block_size
    change_meta(call, seq_lens=lens, block_table=ids)


@after
def scale_output(call: Call) -> None:
    """Splits are merged with weights that add up to 1.01."""
    meta = call["plan"].meta
    rows = rows_of(meta, seq_lens(meta) > SPLIT_KEYS)
    call["out"][rows] = (call["out"][rows].float() * 1.01).to(call["out"].dtype)


@before
def top_left(call: Call) -> None:
    """Row r of several sees keys 0 … r, whatever the request's length."""
    meta = call["plan"].meta
    lens, rows = seq_lens(meta), query_lens(meta)
    if call["causal"]:
        change_meta(call, seq_lens=torch.where(rows > 1, torch.minimum(lens, rows), lens))


@around
def p_in_fp16(honest: Op, call: Call) -> None:
    """exp(score) without the maximum subtracted, held in fp16: inf / inf."""
    if call["q_THD"].dtype != torch.float16:
        honest(**call)
        return
    if call["lse"] is None:
        call["lse"] = torch.empty(call["q_THD"].shape[:2])
    honest(**call)
    call["out"][call["lse"] > math.log(FP16_MAX)] = math.nan


def atomics(honest: Op) -> Op:
    """Splits are added up by atomics: the order, and with it the rounding, is another one each time."""
    calls = itertools.count()

    @after
    def add(call: Call) -> None:
        if call["plan"].meta.max_seq_len > SPLIT_KEYS:
            nudge(call["out"], next(calls))

    return add(honest)


@after
def lse_base_2(call: Call) -> None:
    """What kernels that use exp2 have at hand."""
    if call["lse"] is not None:
        call["lse"].div_(math.log(2))


@around
def lse_without_sinks(honest: Op, call: Call) -> None:
    honest(**call)
    if call["lse"] is not None and call["sinks_H"] is not None:
        honest(**call | {"sinks_H": None, "out": torch.empty_like(call["out"])})


@after
def nan_of_empty_part(call: Call) -> None:
    """A part's weight is exp(-inf - max) = 0, and its values are multiplied by it."""
    for part in ("a", "b"):
        is_empty = call[f"lse_{part}"] == -math.inf
        is_lost = is_empty[..., None] & call[f"out_{part}"].isnan()
        call["out"][is_lost] = math.nan


PAGED, BOTH = "paged_attention", ("paged_attention", "attention")

MUTANTS = (
    Mutant(
        "small-head-uninitialised",
        "heads narrower than the kernel's step over head_dim: the loop runs zero times and nothing is written",
        "attention kernels that divide head_dim by a fixed tile",
        PAGED,
        small_head,
    ),
    Mutant(
        "block-32-after-17-tokens",
        "blocks of 32 tokens: tokens from the 18th of a block on are read from the wrong offset",
        "paged kernels written for blocks of 16",
        PAGED,
        block_32,
    ),
    Mutant(
        "only-first-4096-keys",
        "of a longer context only the first 4,096 keys are read",
        "kernels whose page or score buffer has a fixed size",
        PAGED,
        first_keys_only,
    ),
    Mutant(
        "table-width-not-multiple",
        "a block table whose width is no multiple of the pages read per step: the pages left over are dropped",
        "pipelined paged kernels that load several table entries at once",
        PAGED,
        whole_steps_of_pages,
    ),
    Mutant(
        "window-first-block-zero",
        "under a window keys are looked up from the first table entry instead of the window's first block",
        "paged kernels to which a sliding window was added",
        PAGED,
        first_block_zero,
    ),
    Mutant(
        "window-minus-one-literal",
        "the host's 'no window', -1, is taken for a width, and every key is hidden",
        "kernels with another sentinel than their callers",
        PAGED,
        minus_one_literal,
    ),
    Mutant(
        "window-off-by-one",
        "a window of w shows w tokens before the query's own",
        "libraries that count the window without the query's own token",
        BOTH,
        window_plus_one,
    ),
    Mutant(
        "zero-length-sequence",
        "a sequence of length zero reads key 0 all the same, and one without rows lends its table to the next",
        "kernels that find a row's request by a search in query_start_loc, or loop before they test",
        PAGED,
        empty_sequence,
    ),
    Mutant(
        "softcap-dropped",
        "the softcap is ignored",
        "kernel variants compiled without the argument",
        BOTH,
        no_softcap,
    ),
    Mutant(
        "sink-dropped",
        "attention sinks do not join the denominator",
        "back ends that accept the argument and do not use it",
        BOTH,
        no_sinks,
    ),
    Mutant(
        "sink-wrong-head",
        "sinks are looked up by the wrong head when a query has more than one row",
        "decode kernels reused for drafts and prefill",
        BOTH,
        next_heads_sink,
    ),
    Mutant(
        "alibi-ignored",
        "ALiBi slopes are ignored",
        "back ends that accept the argument and do not use it",
        PAGED,
        no_alibi,
    ),
    Mutant(
        "gqa-not-power-of-two",
        "query heads per KV head that are no power of two: the heads beyond the largest one are never computed",
        "decode kernels that tile the heads of a group",
        PAGED,
        power_of_two_groups,
    ),
    Mutant(
        "last-token-dropped",
        "the newest key of a context longer than one split is not seen",
        "split-KV kernels with a wrong last bound",
        PAGED,
        drop_last_token,
    ),
    Mutant(
        "stale-slot",
        "the newest token's slot is read before it is written",
        "fused cache write and attention without a barrier between",
        PAGED,
        read_stale_slot,
    ),
    Mutant(
        "skipped-block",
        "one block of a long context is left out",
        "split-KV kernels whose parts don't meet",
        PAGED,
        skip_block,
    ),
    Mutant(
        "output-scaled",
        "outputs of long contexts are 1 % too large",
        "split merges with a wrong normalisation, which a relative tolerance of 1e-2 lets pass",
        PAGED,
        scale_output,
    ),
    Mutant(
        "causal-top-left",
        "the causal mask of a chunk is aligned top-left: its rows do not see the cached context",
        "libraries that changed or differ in the alignment of the causal mask",
        PAGED,
        top_left,
    ),
    Mutant(
        "fp16-p-overflow",
        "in fp16 exponentials are taken without the maximum subtracted, and overflow",
        "fp16 kernels with a fixed or estimated maximum",
        PAGED,
        p_in_fp16,
    ),
    Mutant(
        "lse-base-2",
        "the log-sum-exp is a binary logarithm",
        "kernels that compute with exp2, and return what they have",
        BOTH,
        lse_base_2,
    ),
    Mutant(
        "lse-without-sink",
        "the log-sum-exp leaves out the sinks, so that merged parts weigh too little or too much",
        "kernels that add the sinks to the denominator after the log-sum-exp is stored",
        BOTH,
        lse_without_sinks,
    ),
    Mutant(
        "merge-empty-part",
        "what an empty part happens to hold is multiplied by a weight of 0: NaN there spreads",
        "merges of split or cascaded attention",
        "merge_attention",
        nan_of_empty_part,
    ),
    Mutant(
        "atomics-nondeterministic",
        "splits are added by atomics, so that two runs of a long context differ in the last bits",
        "split-KV kernels that accumulate in global memory",
        PAGED,
        atomics,
    ),
)
