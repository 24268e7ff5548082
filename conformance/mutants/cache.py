"""Faults of the KV cache: where a slot is, how its bytes are read, what unused slots do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.conformance.mutants.base import Call, Mutant, Op, after, around, before
from octavo.conformance.mutants.paged import change_meta, change_views, picked, seq_lens, table, views
from octavo.core.backend import KVCache

WRITES = ("write_kv", "rope_write_kv")
PAGED = "paged_attention"


def wrapped_32(kv: KVCache, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks as found by a byte offset in 32 signed bits; negative ones lie before the pool."""
    key, _ = views(kv)
    stride = key.stride(0) * key.dtype.itemsize
    offset = blocks.long() * stride
    return ((offset + 2**31) % 2**32 - 2**31).div(stride, rounding_mode="floor")


@before
def offsets_in_32_bits(call: Call) -> None:
    kv = call["kv"]
    if "plan" in call:
        ids = wrapped_32(kv, table(call["plan"].meta)).clamp(min=0)
        change_meta(call, block_table=ids.to(torch.int32))
    else:
        slots, size = call["slot_mapping_T"], kv.spec.block_size
        blocks = wrapped_32(kv, slots.div(size, rounding_mode="floor"))
        call["slot_mapping_T"] = torch.where((slots < 0) | (blocks < 0), -1, blocks * size + slots % size)


@before
def block_ids_in_16_bits(call: Call) -> None:
    if "plan" in call:
        change_meta(call, block_table=table(call["plan"].meta) & 0xFFFF)
    for name in {"block_ids", "source_destination"} & call.keys():
        call[name] = call[name] & 0xFFFF


def add_unseen(call: Call, b: int, value_nKD: torch.Tensor) -> None:
    """Add the values of keys whose weight is 0: 0 · NaN is NaN."""
    meta, out = call["plan"].meta, call["out"]
    leak_KD = (0 * value_nKD.flatten(0, -3).float()).sum(dim=0)
    if bool(leak_KD.isnan().any()):
        rows = slice(int(meta.query_start_loc[b]), int(meta.query_start_loc[b + 1]))
        out[rows] += leak_KD.repeat_interleave(out.shape[1] // leak_KD.shape[0], dim=0).to(out.dtype)


@after
def tail_of_last_block(call: Call) -> None:
    """Slots of the last block beyond seq_len are masked in the scores only."""
    meta, (_, value) = call["plan"].meta, views(call["kv"])
    for b, length in enumerate(seq_lens(meta).tolist()):
        if used := length % meta.block_size:
            block = picked(value, meta.block_table[b, length // meta.block_size][None])
            add_unseen(call, b, block[0, used:])


@after
def mask_added(call: Call) -> None:
    """Scores beyond the sequence's end get -inf added, and NaN - inf is NaN: the softmax of the row is lost."""
    meta, (key, _) = call["plan"].meta, views(call["kv"])
    for b, length in enumerate(seq_lens(meta).tolist()):
        if used := length % meta.block_size:
            block = picked(key, meta.block_table[b, length // meta.block_size][None])
            if bool(block[0, used:].float().isnan().any()):
                call["out"][meta.query_start_loc[b] : meta.query_start_loc[b + 1]] = torch.nan


@after
def padding_of_the_table(call: Call) -> None:
    """Blocks that table padding names, and those that left the window, take part with weight 0."""
    meta, (_, value) = call["plan"].meta, views(call["kv"])
    for b, length in enumerate(seq_lens(meta).tolist()):
        rows = int(meta.query_start_loc[b + 1] - meta.query_start_loc[b])
        first_key = 0 if call["window"] is None else max(0, length - rows - call["window"] + 1)
        unused = (
            meta.block_table[b, : first_key // meta.block_size],
            meta.block_table[b, -(-length // meta.block_size) :],
        )
        add_unseen(call, b, picked(value, torch.cat(unused)))


@before
def strides_ignored(call: Call) -> None:
    """Blocks are taken to lie one behind the other."""
    kv = call["kv"]
    stride = kv.spec.block_bytes // kv.spec.dtype.itemsize
    key, value = (x.as_strided(x.shape, (stride, *x.stride()[1:])) for x in views(kv))
    change_views(call, key, value)


@before
def tokens_dense(call: Call) -> None:
    """A token's heads are taken to lie side by side, which they don't where K and V alternate."""
    key, value = views(call["kv"])
    if key.stride(1) != key.shape[2] * key.stride(2):
        return  # not token by token
    dense = [x.as_strided(x.shape, (x.stride(0), x.shape[2] * x.shape[3], x.shape[3], 1)) for x in (key, value)]
    change_views(call, *dense)


@before
def last_slot_for_minus_one(call: Call) -> None:
    """-1 counts from the end."""
    slots, kv = call["slot_mapping_T"], call["kv"]
    call["slot_mapping_T"] = torch.where(slots < 0, kv.num_blocks * kv.spec.block_size - 1, slots)


@before
def a_slot_for_every_key(call: Call) -> None:
    """One thread per row of K, which reads a slot beyond the mapping's end."""
    slots = call["slot_mapping_T"]
    beyond = torch.arange(call["k_TKD"].shape[0] - slots.numel(), dtype=slots.dtype)
    call["slot_mapping_T"] = torch.cat((slots, beyond))


@around
def copies_at_once(_: Op, call: Call) -> None:
    """One thread block per pair: what an earlier pair put into a source is not seen."""
    sources, destinations = call["source_destination"].unbind(dim=1)
    for blocks in views(call["kv"]):
        for block, content in zip(destinations.tolist(), picked(blocks, sources), strict=True):
            blocks[block] = content


@before
def scales_ignored(call: Call) -> None:
    call["k_scale"] = call["v_scale"] = None


@before
def scales_swapped(call: Call) -> None:
    call["k_scale"], call["v_scale"] = call["v_scale"], call["k_scale"]


@before
def fnuz_as_fn(call: Call) -> None:
    """The two formats differ in their exponent's bias: what is read is twice as large."""
    if call["kv"].spec.dtype == torch.float8_e4m3fnuz:
        key, value = (x.view(torch.float8_e4m3fn) for x in views(call["kv"]))
        change_views(call, key, value)


def int8_codes(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """K and V such that an int8 cache gets `change(x / scale)`, exact where the scales are powers of two."""
    if call["kv"].spec.dtype != torch.int8:
        return
    for side in ("k", "v"):
        scale = call[f"{side}_scale"][:, None]
        x = call[f"{side}_TKD"]
        call[f"{side}_TKD"] = (change(x.float() / scale) * scale).to(x.dtype)


@before
def int8_truncated(call: Call) -> None:
    """A plain conversion rounds towards zero."""
    int8_codes(call, torch.trunc)


@before
def int8_wrapped(call: Call) -> None:
    """A plain conversion keeps the lowest eight bits."""
    int8_codes(call, lambda codes: (codes.round() + 128) % 256 - 128)


MUTANTS = (
    Mutant(
        "slot-index-32-bit",
        "the byte offset of a slot is computed in 32 bits: blocks beyond 2 GiB are read and written elsewhere",
        "cache kernels with int indices, seen once pools grew",
        (*WRITES, PAGED),
        offsets_in_32_bits,
    ),
    Mutant(
        "block-id-16-bit",
        "block ids are truncated to 16 bits",
        "kernels that pack the block table",
        (PAGED, "mla_attention", "copy_blocks", "gather_blocks", "scatter_blocks"),
        block_ids_in_16_bits,
    ),
    Mutant(
        "nan-v-beyond-seq-len",
        "V beyond the sequence's end is multiplied by a weight of 0 instead of being left out: NaN there spreads",
        "tail tiles that are masked in the scores only",
        PAGED,
        tail_of_last_block,
    ),
    Mutant(
        "mask-added",
        "keys beyond the sequence's end are masked by adding -inf to their scores: NaN in K spreads",
        "kernels that take a mask as a bias",
        PAGED,
        mask_added,
    ),
    Mutant(
        "nan-null-block",
        "blocks that only fill up the table take part with a weight of 0: NaN in the null block spreads",
        "kernels that walk the whole width of the table",
        PAGED,
        padding_of_the_table,
    ),
    Mutant(
        "strided-kv-as-contiguous",
        "blocks with room between them are read and written as if there were none",
        "kernels that take a pointer and no stride",
        (PAGED, "mla_attention", "write_kv", "gather_blocks", "scatter_blocks", "copy_blocks"),
        strides_ignored,
    ),
    Mutant(
        "interleaved-kv-as-contiguous",
        "K and V that lie side by side, token by token, are read as two dense tensors",
        "kernels that take a pointer and no stride",
        (PAGED, "write_kv", "gather_blocks", "scatter_blocks"),
        tokens_dense,
        backend={"is_interleaved": True},
    ),
    Mutant(
        "slot-minus-one-last-slot",
        "slot -1 is taken for the pool's last slot instead of writing nothing",
        "tensor libraries in which negative indices count from the end",
        (*WRITES, "write_mla"),
        last_slot_for_minus_one,
    ),
    Mutant(
        "copies-at-once",
        "pairs of a block copy run side by side: a chain of copies moves what was there before it",
        "copy kernels with a thread block per pair",
        "copy_blocks",
        copies_at_once,
    ),
    Mutant(
        "more-keys-than-slots",
        "with more rows of K than slots, rows that have none are written somewhere",
        "kernels launched over padded batches",
        WRITES,
        a_slot_for_every_key,
    ),
    Mutant(
        "kv-scales-ignored",
        "scales of an 8-bit cache are taken for 1",
        "back ends that accept the arguments and do not use them",
        (PAGED, *WRITES),
        scales_ignored,
    ),
    Mutant(
        "kv-scales-swapped",
        "K is scaled by V's scale and V by K's",
        "argument lists with two tensors of one type; unseen while tests use equal scales",
        (PAGED, *WRITES),
        scales_swapped,
    ),
    Mutant(
        "int8-kv-truncated",
        "codes of an int8 cache are rounded towards zero",
        "C and CUDA casts of a float to an integer",
        "write_kv",
        int8_truncated,
    ),
    Mutant(
        "int8-kv-wrapped",
        "what is too large for an int8 cache wraps around instead of saturating",
        "casts by way of a wider integer",
        "write_kv",
        int8_wrapped,
    ),
    Mutant(
        "fnuz-read-as-fn",
        "bytes of e4m3fnuz are read and written as e4m3fn",
        "code brought from devices of one 8-bit format to those of the other",
        (PAGED, *WRITES),
        fnuz_as_fn,
    ),
)
