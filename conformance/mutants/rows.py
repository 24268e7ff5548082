"""Faults of ops on rows: norms, rotary embedding, look-up, quantisation."""

from __future__ import annotations

import math

import torch

from octavo.conformance.mutants.base import Call, Mutant, Op, after, around, before

BATCH_ROWS = 16


@before
def residual_kept(call: Call) -> None:
    """The norm is right, but the sum is never stored: the next layer adds to a stale residual."""
    if call["residual"] is not None:
        call["residual"] = call["residual"].clone()


@before
def rows_dense(call: Call) -> None:
    """Rows are taken to lie one behind the other, whatever the strides say."""
    x = call["x"]
    if not x.is_contiguous():
        call["x"] = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()).clone()


@around
def other_order_for_batches(honest: Op, call: Call) -> None:
    """More rows, smaller blocks: the squares are added up in another order."""
    if call["x"].shape[0] < BATCH_ROWS:
        honest(**call)
        return
    out, residual = call["out"], call["residual"]
    for name in ("x", "weight_M", "residual", "out"):
        call[name] = None if call[name] is None else call[name].flip(-1)
    honest(**call)
    out.copy_(call["out"].flip(-1))
    if residual is not None:
        residual.copy_(call["residual"].flip(-1))


@before
def never_interleaved(call: Call) -> None:
    call["interleaved"] = False


@after
def tail_zeroed(call: Call) -> None:
    """What lies beyond the rotary dimensions is not copied."""
    width = call["cos_sin_PR"].shape[-1]
    for name in {"out_q", "out_k"} & call.keys():
        call[name][..., width:] = 0


@before
def end_of_table(call: Call) -> None:
    """The last row is looked up one row further, where the table has ended: there the reference finds row 0."""
    ids, rows = call["ids_T"], call["w"].spec.out_features
    call["ids_T"] = torch.where(ids == rows - 1, 0, ids)


@after
def truncate(call: Call) -> None:
    """Codes are cut towards zero instead of rounded to the nearest."""
    out = call["out"]
    quotient = call["x_TK"].float() / _per_element(call["scales"], out.shape[-1])
    codes = out.float()
    step = torch.where(codes.abs() > quotient.abs(), 1, 0)
    # One less in magnitude: of an integer its value, of an 8-bit float its bits.
    if out.dtype == torch.int8:
        out -= (codes.sign() * step).to(torch.int8)
    else:
        out.view(torch.uint8).sub_(step.to(torch.uint8))


@around
def no_saturation(honest: Op, call: Call) -> None:
    """Beyond the largest code an 8-bit float becomes NaN, and an integer starts again at the other end."""
    if "scheme" in call:
        honest(**call)
        _overflow_codes(call)
        return
    dtype = call["kv"].spec.dtype
    for name, scale in (("k_TKD", call["k_scale"]), ("v_TKD", call["v_scale"])) if dtype.itemsize == 1 else ():
        factor = 1.0 if scale is None else scale if scale.numel() == 1 else scale[:, None]
        call[name] = call[name].masked_fill(_overflows(call[name].float() / factor, dtype), torch.nan)
    honest(**call)


def _overflow_codes(call: Call) -> None:
    out = call["out"]
    quotient = call["x_TK"].float() / _per_element(call["scales"], out.shape[-1])
    if out.dtype == torch.int8:
        codes = quotient.round().long()
        out.copy_(torch.where(codes.abs() > 127, (codes + 128) % 256 - 128, out))
    else:
        out.copy_(torch.where(_overflows(quotient, out.dtype), torch.nan, out.float()))


def _overflows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is nearer to the number that would come after the largest one."""
    info = torch.finfo(dtype)
    half_a_step: float = info.eps / 2 * 2 ** int(math.log2(info.max))
    return x.abs() > info.max + half_a_step


def _per_element(scales: torch.Tensor, width: int) -> torch.Tensor:
    return scales.repeat_interleave(width // scales.shape[-1], dim=-1)


MUTANTS = (
    Mutant(
        "residual-never-written",
        "rms_norm with a residual gives the right norm and does not store the sum",
        "fused norm kernels that write one of two outputs",
        "rms_norm",
        residual_kept,
    ),
    Mutant(
        "rms-norm-last-stride",
        "rms_norm reads strided rows as if they were contiguous",
        "kernels that take a pointer and no stride",
        "rms_norm",
        rows_dense,
    ),
    Mutant(
        "rms-norm-batch-dependent-block",
        "with more rows the squares of a row are added in another order, so that its bits depend on the batch",
        "norm kernels whose block size is chosen by the number of rows",
        "rms_norm",
        other_order_for_batches,
        backend={"batch_invariant": True},
    ),
    Mutant(
        "rotary-interleaved-wrong",
        "interleaved pairs are turned as halves",
        "kernels to which the second style was added later",
        ("rotary", "rope_write_kv"),
        never_interleaved,
    ),
    Mutant(
        "rotary-partial-tail",
        "elements beyond the rotary dimensions are zeroed",
        "kernels written for full rotary embedding",
        ("rotary", "rope_write_kv"),
        tail_zeroed,
    ),
    Mutant(
        "embed-out-of-table",
        "the last row is looked up beyond the table's end",
        "tables padded or split among ranks, with a bound off by one",
        "embed",
        end_of_table,
    ),
    Mutant(
        "quantize-truncates",
        "codes are cut towards zero instead of rounded to the nearest",
        "conversions by a cast",
        "quantize",
        truncate,
    ),
    Mutant(
        "quantize-no-saturation",
        "values beyond the largest code become NaN in 8-bit floats, and start again at the other end in integers",
        "conversions that do not saturate",
        ("quantize", "write_kv", "rope_write_kv"),
        no_saturation,
    ),
)
