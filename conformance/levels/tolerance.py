"""By how much a tiny model's logits may differ from the reference's: a share of their spread, STD · √HIDDEN_SIZE.

Each of four layers has eight ops, whose errors are independent and add up in quadrature. Attention and feed-forward
may each multiply an error that comes in by √2: a layer doubles it. Errors of the first layer's ops are then doubled
four times by the end, those of the last layer's once:

    √(8 · (16² + 8² + 4² + 2²)) ≈ 52      and the worst of some 40,000 logits is 4.5 standard deviations off: 235

    16-bit activations   each op rounds its output once, uniform in ±u:         235 · u / √3               ≈ 135u
    32-bit activations   sums of K ≤ 192 products, each rounded: √(K / 3) · u   235 · 8 · 2⁻²⁴             ≈ 1.1e-4

So 128u and 1e-4. The factor √2 is an estimate, for random weights have no bound: over 60 seeds the reference ops came
to 0.60 of the bound in fp16, 0.68 in bf16 and 0.14 in fp32. Weights are no source of errors: both sides read the same
numbers, already rounded to the type that stores them. What stores bf16 and computes in fp32 is held to 1e-4 too.
"""

from __future__ import annotations

import torch

from octavo.conformance.facts import Facts, dtype_name

FP32_SHARE = 1e-4
ROUNDINGS = 128


def allowed(*dtypes: torch.dtype) -> float:
    """The largest error of a logit as a share of the logits' spread, with activations and KV in these dtypes."""
    return max(FP32_SHARE, ROUNDINGS * max(torch.finfo(dtype).eps / 2 for dtype in dtypes))


def stored_dtypes(facts: Facts) -> list[torch.dtype]:
    """In which the backend stores plain weights."""
    return [_dtype(name) for name in facts.computes]


def activation_dtype(facts: Facts, weight: torch.dtype) -> torch.dtype:
    """What models compute in whose weights are stored so."""
    return _dtype(facts.computes[dtype_name(weight)])


def kv_dtype_for(computes_in: torch.dtype, facts: Facts) -> torch.dtype:
    """KV as the model computes, where the backend can keep it so: what is lost in storage would hide faults."""
    return computes_in if dtype_name(computes_in) in facts.kv_dtypes else _dtype(facts.kv_dtypes[0])


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
