"""Paged attention of several layers over one plan, as a step of a model has it: a plan serves each layer of its group.

    plan ──► layer 1 (q1, pool kv1 → out1) ──► layer 2 (q2, pool kv2 → out2) ──► layer 1 once more (→ again)

All three are judged by the oracle, and `again` must be `out1` bit for bit unless the backend declares itself
non-deterministic. What a kernel leaves in a plan (a semaphore that is not reset, a partial result, a pointer to the
first layer's pool) shows in the second call, or in the third.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import msgspec
import torch

from octavo.conformance.case import Case, all_of, computes_in, stores_kv_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid.attending import Drawn, Setting, draw_statistical
from octavo.conformance.grid.batch import Batch, Request, lay_out
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.trial import HostPool, Outputs, Trial, given, wanted
from octavo.core.backend import KVCacheSpec

BLOCK = 16
SCENES = {
    "decode": (Request(1, 150), Request(1, 21)),
    "chunk": (Request(5, 37), Request(3, 20)),
    "long": (Request(1, 1100), Request(1, 40), Request(1, 1)),
}
"""By name. Long contexts are split, and what the splits leave is merged. Never written to."""

CALLS = (("out1", 1), ("out2", 2), ("again", 1))
"""In order: the output and its layer."""


def cases() -> Iterable[Case]:
    for dtype, scene in itertools.product((torch.float32, torch.bfloat16, torch.float16), SCENES):
        setting = Setting(dtype=dtype, kv_dtype=dtype)
        names = {"core", "deterministic", "tiny-full"} | ({"smoke", "tiny"} if scene != "long" else {"smoke"})
        yield Case(
            name=f"paged_attention.again/{scene}-{setting.name}-b{BLOCK}",
            op="paged_attention",
            spec=setting.spec(BLOCK),
            axes={"dtype": dtype_name(dtype), "batch": scene},
            lanes=("statistical",),
            build=functools.partial(build, setting, SCENES[scene]),
            profiles=frozenset(names),
            faults=frozenset({"plan-spent-after-one-layer"} if dtype == torch.float32 and scene != "chunk" else ()),
            requires=all_of(computes_in(dtype), stores_kv_in(dtype)),
        )


def build(setting: Setting, requests: tuple[Request, ...], draw: Draw) -> Trial:
    batch = lay_out(draw, requests, BLOCK)
    layers = {layer: draw_statistical(draw, setting, requests, BLOCK, lse=False) for layer in (1, 2)}
    shape = (batch.num_tokens, setting.heads, setting.v_head_dim)
    spec = KVCacheSpec(setting.kv_heads, setting.head_dim, setting.v_head_dim, setting.kv_dtype, BLOCK)
    pools = [
        HostPool(f"kv{layer}", spec, batch.num_blocks, batch.blocks(drawn.keys, drawn.values))
        for layer, drawn in layers.items()
    ]
    return Trial(
        (
            *batch.tensors(),
            *(given(f"q{layer}", drawn.q_THD) for layer, drawn in layers.items()),
            *(wanted(out, shape, setting.dtype) for out, _ in CALLS),
        ),
        functools.partial(_run, setting, batch),
        functools.partial(_check, layers, draw.facts.deterministic),
        pools=tuple(pools),
    )


def _run(setting: Setting, batch: Batch, bench: Bench) -> None:
    plan = bench.plan(batch.metadata(bench))
    attend = bench.op("paged_attention", setting.spec(BLOCK))
    for out, layer in CALLS:
        attend(bench[f"q{layer}"], bench.kv(f"kv{layer}"), plan, out=bench[out], softmax_scale=setting.softmax_scale)


def _check(layers: dict[int, Drawn], is_deterministic: bool, outputs: Outputs) -> list[Finding]:
    findings = [
        msgspec.structs.replace(finding, output=out)
        for out, layer in CALLS
        for finding in layers[layer].check({"out": outputs[out]})
    ]
    return findings + ([exact("again", outputs["again"], outputs["out1"])] if is_deterministic else [])
