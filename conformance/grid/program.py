"""A step compiled once and run again and again: other lengths, fewer requests, padding rows, the first batch once more.

    step(buffers)   q of the step's tokens ─► paged_attention ─► rows that are wanted ─► logits
    compile once ─► run: decode ─► run: other lengths ─► run: one request, the rest padding ─► run: the first again

The buffers are made as the engine makes them: tokens, rows and logits lie in tensors that stay, metadata is new in
each step and goes through `plan`. All steps have the shape of one token bucket: padding tokens belong to no request
and write to slot -1, padding requests have no token and length 0. What a recorded step has baked in (a length, a
table, the number of requests) shows in a later one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, all_of, computes_in, stores_kv_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid.attending import Setting, draw_statistical
from octavo.conformance.grid.batch import Batch, Request, lay_out
from octavo.conformance.harness.bench import Bench
from octavo.conformance.trial import HostPool, Outputs, Trial, given, wanted
from octavo.core.backend import AttentionMetadata, KVCacheSpec, StepBuffers

BLOCK = 16
BUCKET = 8
"""Tokens of a step where the device takes any number."""

DECODE = (Request(1, 20), Request(1, 5), Request(1, 33))
STEPS = (DECODE, (Request(1, 48), Request(3, 17)), (Request(1, 2),), (Request(1, 21), Request(1, 6), Request(1, 34)))
"""The batches of one program, in order. The last is the first, one token later."""

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Step:
    """One batch of the program, padded.

    Attributes:
        first_row: its first row of all steps' queries. num_rows: its real tokens.
    """

    requests: tuple[Request, ...]
    first_row: int
    table: torch.Tensor
    slots: torch.Tensor

    @property
    def num_rows(self) -> int:
        return sum(r.num_rows for r in self.requests)


def cases() -> Iterable[Case]:
    for dtype, window in itertools.product((F32, BF16, F16), (None, 17)):
        setting = Setting(dtype=dtype, kv_dtype=dtype, window=window)
        yield Case(
            name=f"program/{setting.name}",
            op="paged_attention",
            spec=setting.spec(BLOCK),
            axes={"dtype": dtype_name(dtype), "window": "off" if window is None else "on"},
            lanes=("statistical",),
            build=functools.partial(build, setting),
            profiles=frozenset({"core", "deterministic", "smoke", "tiny", "tiny-full"}),
            faults=frozenset({"stale-length-on-replay"}),
            requires=all_of(computes_in(dtype), stores_kv_in(dtype)),
        )


def build(setting: Setting, draw: Draw) -> Trial:
    requests = tuple(itertools.chain(*STEPS))
    batch = lay_out(draw, requests, BLOCK, window=setting.window)
    drawn = draw_statistical(draw, setting, requests, BLOCK, lse=False)
    steps = _steps(batch)
    spec = KVCacheSpec(setting.kv_heads, setting.head_dim, setting.v_head_dim, setting.kv_dtype, BLOCK, setting.window)
    outs = tuple(
        wanted(f"out{i}", (step.num_rows, setting.heads, setting.v_head_dim), F32) for i, step in enumerate(steps)
    )

    def check(outputs: Outputs) -> list[Finding]:
        rows = torch.cat([outputs[out.name] for out in outs])
        return drawn.check({"out": rows.to(setting.dtype)})

    return Trial(
        (given("q", drawn.q_THD), *outs),
        functools.partial(_run, setting, steps, draw.facts.token_buckets),
        check,
        pools=(HostPool("kv", spec, batch.num_blocks, batch.blocks(drawn.keys, drawn.values)),),
    )


def _steps(batch: Batch) -> tuple[Step, ...]:
    """The batch, which holds the requests of all steps, cut into steps."""
    steps, request, row, slots = [], 0, 0, batch.slots()
    for requests in STEPS:
        rows = sum(r.num_rows for r in requests)
        steps.append(Step(requests, row, batch.table[request : request + len(requests)], slots[row : row + rows]))
        request, row = request + len(requests), row + rows
    return tuple(steps)


def _run(setting: Setting, steps: Sequence[Step], buckets: Sequence[int], bench: Bench) -> None:
    """Compile at the first step's shape, run all; results are copied away, as the next run overwrites them."""
    backend = bench.backend
    size = next((bucket for bucket in buckets if bucket >= BUCKET), BUCKET)
    attend = bench.op("paged_attention", setting.spec(BLOCK))
    query = backend.empty(size, setting.heads, setting.head_dim, dtype=setting.dtype)
    attended = backend.empty(size, setting.heads, setting.v_head_dim, dtype=setting.dtype)

    def step(buffers: StepBuffers) -> None:
        query.copy_(bench["q"].index_select(0, buffers.token_ids_T))
        attend(
            query,
            bench.kv("kv"),
            buffers.plans[0],
            out=attended,
            softmax_scale=setting.softmax_scale,
            window=setting.window,
        )
        buffers.logits_RV.copy_(attended.index_select(0, buffers.logit_rows_R).flatten(1))

    kept = _Kept(bench, size, setting.heads * setting.v_head_dim)
    program = None
    for i, batch in enumerate(steps):
        buffers = kept.filled(batch)
        if program is None:
            program = backend.compile(step, size, buffers) if buckets else backend.compile(step, None, None)
        program.run(buffers)
        bench[f"out{i}"].copy_(buffers.logits_RV[: batch.num_rows].view(bench[f"out{i}"].shape))


class _Kept:
    """The tensors that stay from step to step, and a step's buffers over them."""

    def __init__(self, bench: Bench, size: int, width: int) -> None:
        self._bench = bench
        self._size = size
        empty = bench.backend.empty
        self._token_ids, self._positions, self._rows = (empty(size, dtype=torch.int64) for _ in range(3))
        self._logits = empty(size, width, dtype=F32)

    def filled(self, step: Step) -> StepBuffers:
        send = self._bench.backend.from_host
        rows = torch.arange(step.num_rows)
        positions = torch.cat([torch.arange(r.num_keys - r.num_rows, r.num_keys) for r in step.requests])
        return StepBuffers(
            token_ids_T=send(self._padded(rows + step.first_row), out=self._token_ids),
            positions_T=send(self._padded(positions), out=self._positions),
            plans=(self._bench.plan(self._metadata(step)),),
            logit_rows_R=send(self._padded(rows), out=self._rows),
            logits_RV=self._logits,
        )

    def _metadata(self, step: Step) -> AttentionMetadata:
        send, count = self._bench.backend.from_host, len(step.requests)
        starts = torch.tensor([0, *itertools.accumulate(r.num_rows for r in step.requests)], dtype=torch.int32)
        starts = torch.cat((starts, starts[-1:].expand(self._size - count)))
        lengths = torch.zeros(self._size, dtype=torch.int32)
        lengths[:count] = torch.tensor([r.num_keys for r in step.requests])
        table = torch.zeros(self._size, step.table.shape[1], dtype=torch.int32)
        table[:count] = step.table
        return AttentionMetadata(
            count,
            step.num_rows,
            max(r.num_rows for r in step.requests),
            max(r.num_keys for r in step.requests),
            send(starts),
            send(lengths),
            send(table),
            send(self._padded(step.slots, fill=-1)),
            BLOCK,
        )

    def _padded(self, x: torch.Tensor, fill: int = 0) -> torch.Tensor:
        return torch.cat((x, x.new_full((self._size - len(x),), fill)))
