"""What attention cases draw and how they are judged, whether keys are paged, contiguous or latent.

    Setting ── what is attended: heads, dtypes, mask, scales
       │ draw_statistical   normal numbers whose softcap, sinks and scales matter      ┐
       │ draw_needle        ±1 codes: each row must give one key's value, bit for bit  ├─► Drawn(q, keys, values, …)
       └ draw_visible       q = 0: each row gives the mean of what it sees             ┘

Keys and values are drawn per request, [L, K, D], in the dtype that the cache stores; a family lays them out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid.batch import Request, share
from octavo.conformance.grid.needle import Needle, find_needles
from octavo.conformance.lanes import probe
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.oracle.attention import Attended, Rule, attend, visible
from octavo.conformance.oracle.quantise import decode
from octavo.conformance.trial import Outputs
from octavo.core.backend import AttentionSpec, KVLayout, ScaleKind

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
ONE_BYTE = (*FP8, torch.int8)
"""What a cache holds as codes, beside scales."""

ONE_BYTE_PROFILES = {dtype: frozenset({"fp8kv"}) for dtype in FP8} | {torch.int8: frozenset({"int8kv"})}
"""Where cases of such caches stand. Never written to."""


@dataclass(frozen=True)
class Setting:
    """What is attended.

    Attributes:
        heads, kv_heads, head_dim, v_head_dim: H, K, D, Dv.
        dtype: of q and out. kv_dtype: as stored.
        window: in tokens, the query's own included.
        kv_scale: K and V scales of an 8-bit cache, always unequal: one each, or one per KV head.
        heat: standard deviation of the scores.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    kv_scale: ScaleKind = "none"
    heat: float = 1.0

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    @property
    def name(self) -> str:
        """What differs from the plain, in a case's name."""
        kv = "" if self.kv_dtype == self.dtype else f".{dtype_name(self.kv_dtype)}"
        values = "" if self.v_head_dim == self.head_dim else f"v{self.v_head_dim}"
        parts = [f"{dtype_name(self.dtype)}{kv}", f"h{self.heads}k{self.kv_heads}d{self.head_dim}{values}"]
        parts += [] if self.causal else ["full"]
        parts += [] if self.window is None else [f"w{self.window}"]
        parts += [] if self.softcap is None else [f"cap{self.softcap:g}"]
        parts += ["sinks"] if self.sinks else []
        parts += ["alibi"] if self.alibi else []
        parts += [] if self.kv_scale == "none" else [f"scale.{self.kv_scale}"]
        return "-".join(parts + ([] if self.heat == 1 else [f"heat{self.heat:g}"]))

    def spec(self, block_size: int) -> AttentionSpec:
        return AttentionSpec(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.v_head_dim,
            self.dtype,
            self.kv_dtype,
            block_size,
            KVLayout.NHD,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap is not None,
            sinks=self.sinks,
            alibi=self.alibi,
            kv_scale=self.kv_scale,
        )

    def axes(self) -> dict[str, str]:
        """Axes of the report's matrix."""
        window = "off" if self.window is None else "1" if self.window == 1 else "on"
        return {
            "dtype": dtype_name(self.dtype),
            "kv": dtype_name(self.kv_dtype),
            "head": str(self.head_dim) if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}",
            "gqa": str(self.heads // self.kv_heads),
            "window": window,
            "softcap": f"{self.softcap or 0:g}",
            "sinks": "yes" if self.sinks else "no",
            "alibi": "yes" if self.alibi else "no",
        }


@dataclass(frozen=True)
class Drawn:
    """Host tensors of one trial. Scales are [1] or [K] fp32; `check` looks at "out" and, where asked, "lse"."""

    q_THD: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    rule: Rule
    check: Callable[[Outputs], list[Finding]]
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def draw_statistical(draw: Draw, setting: Setting, requests: Sequence[Request], block_size: int, lse: bool) -> Drawn:
    """Normal numbers with a small mean.

    A softcap's scores are as large as the cap, sinks as large as a row's log-sum-exp: else leaving either out would
    drown in rounding.
    """
    s = setting
    heat = s.softcap if s.softcap is not None else s.heat
    rows = sum(r.num_rows for r in requests)
    scales = _scales(s, power_of_two=False)
    q = draw.normal(rows, s.heads, s.head_dim, std=heat, mean=0.1).to(s.dtype)
    keys = [_stored(draw, s, r.num_keys, s.head_dim, 0.1, scales is not None) for r in requests]
    values = [_stored(draw, s, r.num_keys, s.v_head_dim, 0.2, scales is not None) for r in requests]
    share(requests, block_size, keys)
    share(requests, block_size, values)
    # Not all of the cap: a row of one key at -cap must not weigh less than fp32 can hold beside its sink.
    level = 0.6 * s.softcap if s.softcap else math.log(1 + max(r.num_keys for r in requests)) + heat**2 / 2
    rule = Rule(
        s.softmax_scale,
        s.causal,
        s.window,
        s.softcap,
        draw.normal(s.heads, mean=level) if s.sinks else None,
        torch.exp2(-8.0 * torch.arange(1, s.heads + 1) / s.heads) if s.alibi else None,
    )
    k_scale, v_scale = scales or (None, None)

    @functools.cache  # The same for all attempts, and for all backends that a trial is shared by.
    def found() -> Attended:
        wide_keys = [_widened(k, k_scale) for k in keys]
        wide_values = [_widened(v, v_scale) for v in values]
        return attend(q, wide_keys, wide_values, [r.num_rows for r in requests], rule)

    def check(outputs: Outputs) -> list[Finding]:
        return judged(outputs, found(), s.head_dim, s.dtype, lse=lse)

    return Drawn(q, keys, values, rule, check, k_scale, v_scale)


def judged(outputs: Outputs, found: Attended, head_dim: int, dtype: torch.dtype, *, lse: bool) -> list[Finding]:
    """The statistical lane over out and lse."""
    findings = [statistical("out", outputs["out"], found.out, found.out_bound(head_dim, dtype))]
    return findings + ([statistical("lse", outputs["lse"], found.lse, found.lse_bound(head_dim))] if lse else [])


def draw_needle(draw: Draw, setting: Setting, requests: Sequence[Request], block_size: int) -> Drawn:
    """Every row of every head looks for one key: at block edges, window edges, ends, or a hidden one with a decoy."""
    s = setting
    rule = Rule(s.softmax_scale, s.causal, s.window)
    scales = _scales(s, power_of_two=True)
    k_scale, v_scale = scales or (None, None)
    keys = [torch.empty(r.num_keys, s.kv_heads, s.head_dim) for r in requests]
    spread = 63 if s.kv_dtype == torch.int8 else 1  # else all values of a key would be the code 1
    values = [
        (spread * probe.needle_values(draw, r.num_keys, s.kv_heads, s.v_head_dim, torch.float32)).to(s.kv_dtype)
        for r in requests
    ]
    queries, wants = [], []
    for request, key, value in zip(requests, keys, values, strict=True):
        needle = find_needles(request, block_size, rule, s.heads, draw)
        for head in range(s.kv_heads):
            key[:, head] = probe.needle_codes(
                draw, request.num_keys, s.head_dim, list(needle.targets), dict(needle.decoys)
            )
        queries.append(_needle_rows(s, needle, key, k_scale))
        wants.append(_needle_values(s, needle, _widened(value, v_scale)))
    want = torch.cat(wants).to(s.dtype)
    stored = [k.to(s.kv_dtype) for k in keys]

    def check(outputs: Outputs) -> list[Finding]:
        return [probe.found("out", outputs["out"], want)]

    return Drawn(torch.cat(queries).to(s.dtype), stored, values, rule, check, k_scale, v_scale)


def draw_visible(draw: Draw, setting: Setting, requests: Sequence[Request]) -> Drawn:
    """q = 0, so that whatever else a score goes through, every key that is seen weighs the same."""
    s = setting
    rows = sum(r.num_rows for r in requests)
    keys = [draw.normal(r.num_keys, s.kv_heads, s.head_dim).to(s.kv_dtype) for r in requests]
    values = [draw.signs(r.num_keys, s.kv_heads, s.v_head_dim).to(s.kv_dtype) for r in requests]
    rule = Rule(s.softmax_scale, s.causal, s.window, s.softcap)

    def check(outputs: Outputs) -> list[Finding]:
        findings, row = [], 0
        for request, value in zip(requests, values, strict=True):
            codes = value.float().repeat_interleave(s.heads // s.kv_heads, dim=1)
            for seen in visible(request.num_rows, request.num_keys, rule):
                got = outputs["out"][row]
                is_empty = not bool(seen.any())
                zeros = torch.zeros_like(got)
                findings.append(
                    probe.found("out", got, zeros) if is_empty else probe.visible_set("out", got, codes, seen)
                )
                row += 1
        return findings

    return Drawn(torch.zeros(rows, s.heads, s.head_dim, dtype=s.dtype), keys, values, rule, check)


def sees_anything(setting: Setting, requests: Sequence[Request]) -> tuple[bool, bool]:
    """Whether some row sees a key, and whether all do."""
    rule = Rule(1.0, setting.causal, setting.window)
    seen = [bool(row) for r in requests for row in visible(r.num_rows, r.num_keys, rule).any(dim=1)]
    return any(seen), all(seen)


def _stored(draw: Draw, s: Setting, length: int, width: int, mean: float, is_scaled: bool) -> torch.Tensor:
    """Values as the cache keeps them; codes of an 8-bit cache use much of its range."""
    std = 8.0 if is_scaled else 1.0
    return draw.normal(length, s.kv_heads, width, mean=mean * std, std=std).clamp(-96, 96).to(s.kv_dtype)


def _scales(s: Setting, *, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """K and V scales, far apart, so that swapping or leaving out either shows."""
    if s.kv_scale == "none":
        return None
    heads = torch.arange(s.kv_heads if s.kv_scale == "head" else 1, dtype=torch.float32)
    if power_of_two:
        return torch.exp2(-1 - heads % 2), torch.exp2(2 + heads % 3)
    return 0.13 * (1 + 0.25 * heads), 0.31 / (1 + 0.5 * heads)


def _widened(x_LKD: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    x = decode(x_LKD) if x_LKD.dtype in FP8 else x_LKD.double()
    return x if scale is None else x * scale.double()[:, None]


def _needle_rows(s: Setting, needle: Needle, key_LKD: torch.Tensor, k_scale: torch.Tensor | None) -> torch.Tensor:
    """q [Q, H, D], the codes of the chosen keys, large enough that softmax saturates under this head's scale."""
    rows = torch.zeros(len(needle.chosen), s.heads, s.head_dim)
    make = functools.partial(probe.needle_query, has_decoy=bool(needle.decoys))
    for r, chosen in enumerate(needle.chosen):
        for h, target in enumerate(chosen):
            if target is not None:
                kv_head = h // (s.heads // s.kv_heads)
                scale = 1.0 if k_scale is None else float(k_scale[kv_head % len(k_scale)])
                rows[r, h] = make(key_LKD[:, kv_head], target, s.softmax_scale * scale)
    return rows


def _needle_values(s: Setting, needle: Needle, value_LKD: torch.Tensor) -> torch.Tensor:
    """[Q, H, Dv]: the value of the key that must win; 0 for a row that sees none."""
    want = torch.zeros(len(needle.winners), s.heads, s.v_head_dim, dtype=torch.float64)
    for r, winners in enumerate(needle.winners):
        for h, winner in enumerate(winners):
            if winner is not None:
                want[r, h] = value_LKD[winner, h // (s.heads // s.kv_heads)]
    return want
