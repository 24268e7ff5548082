"""The same rows alone, in pieces and all at once: their bits must not depend on who shares the batch.

    together   rows 0 ……………………………………… T     one call   ─► out     judged by the oracle as well
    in pieces  |1|2|    8   |   16   | … |   T calls   ─► alone   must be out, bit for bit

Pieces lie on both sides of the tiles that kernels use. Attention's pieces are requests by themselves, a prompt in
chunks, and draft rows one by one. Only for backends that declare `batch_invariant`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from octavo.conformance.case import Case, all_of, computes_in, stores_kv_in, stores_weights_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import Facts, dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid import gemm, rms_norm
from octavo.conformance.grid.attending import Setting, draw_statistical
from octavo.conformance.grid.batch import Batch, Request, lay_out
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.trial import HostPool, Outputs, Trial, given, wanted
from octavo.core.backend import Epilogue, Gate, KVCacheSpec, RowSpec

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NOT_DECLARED = "it does not declare batch invariance"
LANES = ("statistical", "exact")
PROFILES = frozenset({"deterministic"})

PIECES = (1, 2, 4, 7, 8, 15, 16, 17, 31, 32, 33)
ROWS = sum(PIECES)
BLOCK_SIZE = 16
SHAPES: tuple[tuple[int, int, Gate | None], ...] = (
    (96, 576, None),
    (33, 1000, None),
    (1, 4099, None),
    (96, 576, "silu"),
)
"""N, K and gate of the products."""

ALONE = {"out": "alone"}
"""Output of the call -> where the pieces put the same. Never written to."""

Piece = Callable[[Bench, slice], None]
"""Calls the op on some rows of "x", into the same rows of "alone"."""


def declares_invariance(facts: Facts) -> str | None:
    """The requirement of every case here."""
    return None if facts.batch_invariant else NOT_DECLARED


def cases() -> Iterable[Case]:
    yield from _gemm_cases()
    yield from _norm_cases()
    yield from _attention_cases()


# -- ops on rows ------------------------------------------------------------------------------------------------


def _gemm_cases() -> Iterable[Case]:
    for dtype, stored in ((F32, F32), (F32, BF16), (BF16, BF16), (F16, F16)):
        for n, k, gate in SHAPES:
            point = gemm.Point("statistical", ROWS, n, k, dtype=dtype, stored=stored, gate=gate)
            yield Case(
                name=f"invariance.gemm/{point.name.partition('/')[2]}",
                op="gemm",
                spec=point.spec,
                axes={
                    "dtype": dtype_name(dtype),
                    "weight": dtype_name(stored),
                    "k": str(k),
                    "epilogue": point.epilogue,
                },
                lanes=LANES,
                build=functools.partial(build_gemm, point),
                profiles=PROFILES,
                faults=frozenset({"gemm-split-k-by-batch"} if dtype == stored == F32 else ()),
                requires=all_of(declares_invariance, computes_in(dtype), stores_weights_in(stored)),
            )


def build_gemm(point: gemm.Point, draw: Draw) -> Trial:
    def piece(bench: Bench, rows: slice) -> None:
        op = bench.op("gemm", point.spec)
        op(bench["x"][rows], bench.weight("w"), out=bench["alone"][rows], epilogue=Epilogue(gate=point.gate))

    return in_pieces(gemm.build_statistical(point, draw), piece)


def _norm_cases() -> Iterable[Case]:
    for dtype in (F32, BF16, F16):
        for width in (64, 576, 2048, 4097):
            point = rms_norm.Point(dtype, (ROWS, width))
            yield Case(
                name=f"invariance.rms_norm/{point.name}",
                op="rms_norm",
                spec=RowSpec(width, dtype, ""),
                axes={"dtype": dtype_name(dtype), "width": str(width)},
                lanes=LANES,
                build=functools.partial(build_norm, point),
                profiles=PROFILES,
                faults=frozenset({"rms-norm-batch-dependent-block"} if width >= 576 and dtype == F32 else ()),
                requires=all_of(declares_invariance, computes_in(dtype)),
            )


def build_norm(point: rms_norm.Point, draw: Draw) -> Trial:
    def piece(bench: Bench, rows: slice) -> None:
        op = bench.op("rms_norm", RowSpec(point.shape[-1], point.dtype, ""))
        op(bench["x"][rows], bench["weight"], out=bench["alone"][rows], eps=rms_norm.EPS)

    return in_pieces(rms_norm.build(point, draw), piece)


def in_pieces(trial: Trial, piece: Piece, outputs: Mapping[str, str] = ALONE) -> Trial:
    """A trial whose rows are computed once more, some at a time. outputs: of the call -> of the pieces."""

    def run(bench: Bench) -> None:
        trial.run(bench)
        for rows in spans(PIECES):
            piece(bench, rows)

    return judged_alone(trial, run, outputs)


def judged_alone(trial: Trial, run: Callable[[Bench], None], outputs: Mapping[str, str] = ALONE) -> Trial:
    """A trial that `run` computes twice: the pieces, from the same beginnings, must give what is judged."""
    twins = [
        replace(tensor, name=outputs[tensor.name], strides=None, offset=0)
        for tensor in trial.tensors
        if tensor.name in outputs
    ]

    def check(found: Outputs) -> list[Finding]:
        return [*trial.check(found), *(exact(alone, found[alone], found[name]) for name, alone in outputs.items())]

    return replace(trial, tensors=(*trial.tensors, *twins), run=run, check=check)


def spans(sizes: Sequence[int]) -> list[slice]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


# -- attention --------------------------------------------------------------------------------------------------

BATCHES: dict[str, tuple[tuple[Request, ...], tuple[tuple[int, ...], ...]]] = {
    "decode": (tuple(Request(1, n) for n in (1, 15, 16, 17, 130, 513)), ((1,),) * 6),
    "chunks": ((Request(130, 130), Request(40, 300)), ((1, 16, 33, 80), (7, 33))),
    "drafts": ((Request(8, 200), Request(4, 33), Request(2, 17)), ((1,) * 8, (2, 2), (1, 1))),
    "mixed": ((Request(1, 300), Request(65, 65), Request(3, 120), Request(1, 9)), ((1,), (64, 1), (3,), (1,))),
}
"""Name -> requests, and into how many rows at a time each of them is cut. Never written to."""


def is_many(dtype: torch.dtype, kv_dtype: torch.dtype, batch: str) -> bool:
    """Whether a fault that shows in large batches, in the last bits, shows in this one."""
    return dtype == kv_dtype == F32 and batch in ("chunks", "mixed")


def _attention_cases() -> Iterable[Case]:
    settings = [Setting(dtype=dtype, kv_dtype=kv) for dtype, kv in ((F32, F32), (F32, BF16), (BF16, BF16), (F16, F16))]
    settings += [Setting(window=20), Setting(softcap=30.0, sinks=True), Setting(heads=6, kv_heads=2, alibi=True)]
    for setting in settings:
        for batch in BATCHES:
            yield Case(
                name=f"invariance.paged_attention/{batch}-{setting.name}",
                op="paged_attention",
                spec=setting.spec(BLOCK_SIZE),
                axes=setting.axes() | {"batch": batch},
                lanes=LANES,
                build=functools.partial(build_attention, setting, batch),
                profiles=PROFILES,
                faults=frozenset(
                    {"attention-splits-by-batch"} if is_many(setting.dtype, setting.kv_dtype, batch) else ()
                ),
                requires=all_of(declares_invariance, computes_in(setting.dtype), stores_kv_in(setting.kv_dtype)),
            )


def build_attention(setting: Setting, name: str, draw: Draw) -> Trial:
    requests, cuts = BATCHES[name]
    batch = lay_out(draw, requests, BLOCK_SIZE)
    drawn = draw_statistical(draw, setting, requests, BLOCK_SIZE, False)
    pieces = pieces_of(batch, cuts)
    shape = (batch.num_tokens, setting.heads, setting.v_head_dim)
    tensors = [*batch.tensors(), given("q", drawn.q_THD)]
    tensors += [wanted("out", shape, setting.dtype)]
    tensors += [tensor for prefix, part, _ in pieces for tensor in part.tensors(prefix)]
    tensors += [given("sinks", drawn.rule.sinks_H)] if drawn.rule.sinks_H is not None else []
    tensors += [given("slopes", drawn.rule.alibi_slopes_H)] if drawn.rule.alibi_slopes_H is not None else []
    spec = KVCacheSpec(
        setting.kv_heads, setting.head_dim, setting.v_head_dim, setting.kv_dtype, BLOCK_SIZE, setting.window
    )

    def run(bench: Bench) -> None:
        _attend(setting, bench, batch, "", slice(0, batch.num_tokens), "out")
        for prefix, part, rows in pieces:
            _attend(setting, bench, part, prefix, rows, "alone")

    pool = HostPool("kv", spec, batch.num_blocks, batch.blocks(drawn.keys, drawn.values))
    return judged_alone(Trial(tuple(tensors), run, drawn.check, pools=(pool,)), run)


def pieces_of(batch: Batch, cuts: Sequence[Sequence[int]]) -> list[tuple[str, Batch, slice]]:
    """Every piece: the prefix of its metadata, a batch of one, and its rows among all. A chunk sees no later keys."""
    pieces, first = [], 0
    for b, (request, sizes) in enumerate(zip(batch.requests, cuts, strict=True)):
        for rows in spans(sizes):
            keys = request.num_keys - request.num_rows + rows.stop
            part = replace(
                batch,
                requests=(Request(rows.stop - rows.start, keys),),
                ids=batch.ids[b : b + 1],
                table=batch.table[b : b + 1].clone(),
            )
            pieces.append((f"{b}.{rows.start}.", part, slice(first + rows.start, first + rows.stop)))
        first += request.num_rows
    return pieces


def _attend(setting: Setting, bench: Bench, batch: Batch, prefix: str, rows: slice, out: str) -> None:
    op = bench.op("paged_attention", setting.spec(BLOCK_SIZE))
    extra: dict[str, object] = {"sinks_H": bench["sinks"]} if setting.sinks else {}
    extra |= {"alibi_slopes_H": bench["slopes"]} if setting.alibi else {}
    op(
        bench["q"][rows],
        bench.kv("kv"),
        bench.plan(batch.metadata(bench, prefix)),
        out=bench[out][rows],
        softmax_scale=setting.softmax_scale,
        window=setting.window,
        softcap=setting.softcap,
        **extra,
    )
