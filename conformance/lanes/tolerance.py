"""How far an honest result may lie from the float64 oracle: one `Bound` per op, each derived here.

    Bound ── element   |e| must not pass it anywhere
          ├─ sigma     predicted standard deviation of e: rms(e) ≤ 2 · rms(sigma)
          └─ unit      what the gain may be off by, besides 6 standard errors

u is the unit roundoff of a dtype: rounding to nearest gives x(1 + d), |d| ≤ u, and d is close to uniform in ±u, whose
variance is u²/3. The oracle is fed inputs that are already rounded, so only the op's own roundings count. A sum of L
terms rounded L times in any order errs by a random walk: ~ √L · u · (size of the sums).

Below a dtype's smallest normal number the spacing is the same everywhere: a result is off by up to half of it, whatever
its size, and by a third of that squared in the variance. That half is granted once, not doubled: a subnormal result
that is rounded from the middle between two takes all of its bound, and no honest one takes more. A share near 1 in
fp16, whose smallest normal number is 2^-14, may be just that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from octavo.conformance.lanes.accumulation import Accumulation

U32 = 2.0**-24
UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: U32,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e4m3fnuz: 2.0**-4,
}
"""Unit roundoffs. Never written to."""

SUBNORMAL = {torch.float16: 2.0**-25}
"""Half of the smallest subnormal, where a result may be that small."""


@dataclass(frozen=True)
class Bound:
    """What is allowed. element and sigma have the output's shape, float64."""

    element: torch.Tensor
    sigma: torch.Tensor
    unit: float


def _rounding_variance(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the one rounding of x to dtype, subnormal results included."""
    return (UNIT[dtype] ** 2 * x.square() + SUBNORMAL.get(dtype, 0.0) ** 2) / 3


def attention_bound(
    out: torch.Tensor,
    *,
    weighted_rms: torch.Tensor,
    weighted_sum: torch.Tensor,
    score_size: torch.Tensor,
    value_per_mass: torch.Tensor,
    head_dim: int,
    num_keys: torch.Tensor | int,
    dtype: torch.dtype,
    p_dtype: torch.dtype | None = None,
) -> Bound:
    """Attention's bound.

    Args:
        out: o, the oracle's output [T, H, Dv].
        weighted_rms: Q = √Σp²v², [T, H, Dv].
        weighted_sum: A = Σp|v|, [T, H, Dv].
        score_size: σ = max_j scale·Σ|q·k|, [T, H, 1].
        value_per_mass: Σ|v| / l over the keys seen, l the softmax denominator (of exp(s - max)), [T, H, Dv].
        num_keys: L, a number or [T, 1, 1].
        p_dtype: what probabilities are rounded to before the second product; the output's dtype if not given.

    Derivation. Rounding the output: u_o|o|, doubled because the value rounded is already off. Rounding each p to u_p:
    Σ p_j d_j v_j, a random sum of size u_p·Q, 4 standard deviations and more at any length. A score errs by √D·u32·σ
    (a sum of D products) and exp turns that into a relative error of p, in numerator and denominator alike: 2(√D·u32·σ
    + a few ulp of exp) · A. Adding up L terms in fp32: √L·u32·A. In fp16 results and p may be subnormal, each off by
    2^-25 absolutely: 2^-25 (1 + Σ|v|/l).
    """
    u_o, u_p = UNIT[dtype], UNIT[p_dtype or dtype]
    root_d = math.sqrt(head_dim)
    root_l = torch.as_tensor(num_keys, dtype=torch.float64).sqrt()
    score = root_d * U32 * score_size
    element = 2 * u_o * out.abs() + 4 * u_p * weighted_rms
    element = element + (2 * (score + 4 * U32) + root_l * U32) * weighted_sum
    element = element + SUBNORMAL.get(dtype, 0.0) * (1 + value_per_mass)
    variance = _rounding_variance(out, dtype) + u_p**2 / 3 * weighted_rms.square()
    variance = variance + ((score + root_l * U32) * weighted_sum).square()
    return Bound(element, variance.sqrt(), u_o)


def lse_bound(lse: torch.Tensor, *, score_size: torch.Tensor, head_dim: int, num_keys: torch.Tensor | int) -> Bound:
    """Natural log-sum-exp in fp32. lse, score_size [T, H]; num_keys a number or [T, 1].

    Every score is off by at most 2√D·u32·σ, hence so is their log-sum-exp; the sum of L positive terms is off by a
    factor 1 + √L·u32, hence its logarithm by √L·u32; exp, log and the final addition of the maximum cost a few ulp of
    |lse| and of 1.
    """
    root_l = torch.as_tensor(num_keys, dtype=torch.float64).sqrt()
    finite = torch.where(lse.isfinite(), lse, torch.zeros_like(lse))
    sigma = U32 * (math.sqrt(head_dim) * score_size + root_l + finite.abs() + 4)
    return Bound(4 * sigma, sigma, U32)


def product_bound(
    c: torch.Tensor,
    squares: torch.Tensor,
    *,
    inner: int,
    dtype: torch.dtype,
    accumulation: Accumulation,
    slope: torch.Tensor | float = 1.0,
    x_dtype: torch.dtype = torch.bfloat16,
    operand_unit: float = 0.0,
    relative: float = 0.0,
    term_squares: torch.Tensor | None = None,
) -> Bound:
    """A product's bound. c [M, N] after the epilogue, squares = Σ(ab)² of the product, [M, N].

    Rounding the output: 2u_o|c|. Adding K products in an accumulator of unit u: each partial sum is of the size of
    √Σ(ab)² + |c| (a random walk that ends at c) and is rounded K times: √K·u·(√Σ(ab)² + |c|), four times over for
    the element. A truncating accumulator errs one way: K instead of √K. One that is emptied into fp32 every R columns
    drops bits of the R columns' sum only, and of runs that point either way: √R in place of √K, and fp32's own error.
    Where all terms are alike the loss is one-sided within a run after all: on a tensor core that aligns 32 products to
    the largest addend, each of them loses up to u times the power of two below the sum so far. For R = 128 that is
    32 · (32 + 64 + 64) u of the first product's size, or 40 u of the run's, and 4 u for its four sums: 4 √R u = 45 u,
    which the element has. Operands rounded on the way in (tf32) add
    √2·u_in·√Σ(ab)². `slope` is by how much the epilogue stretches an error of the product (a gate).

    `operand_unit`: an operand that the op computes itself (a normalised x, a dequantised weight) may be rounded with
    this unit before the product: independent errors of u·|ab| at most: √2·u·√Σ(ab)², as above. Of one scale and codes
    1, 2, 4 the products round alike: all weights may be off by one factor, which the gain's unit has to hold.
    `relative`: an error common to all terms of an output (the norm's 1/rms): relative·|c|.
    `term_squares`: of what is added, where that is more than ab. With zero points a kernel may add up Σx·code·scale and
    subtract offset·Σx afterwards: both are larger than what they leave, and are rounded at their own size.
    """
    u_o, spread = UNIT[dtype], squares.sqrt()
    added = spread if term_squares is None else term_squares.sqrt()
    summing = accumulation.error(inner) * (added + c.abs())
    if x_dtype == torch.float32 and accumulation.operand_unit:
        summing = summing + math.sqrt(2) * accumulation.operand_unit * added
    summing = (summing + math.sqrt(2) * operand_unit * spread + relative * c.abs()) * slope
    common = operand_unit + (accumulation.operand_unit if operand_unit and x_dtype == torch.float32 else 0.0)
    sigma = (_rounding_variance(c, dtype) + summing.square()).sqrt()
    # Two ulp of fp32 for what an epilogue computes in fp32 (bias, gate, residual) before the one rounding to dtype.
    element = 2 * u_o * c.abs() + 4 * summing + 2 * U32 * c.abs() + SUBNORMAL.get(dtype, 0.0)
    return Bound(element, sigma, u_o + common)


def norm_bound(out: torch.Tensor, *, width: int, dtype: torch.dtype) -> Bound:
    """RMSNorm: x · r · w with r = 1/√(mean x² + eps), in fp32.

    The mean of M positive squares is off by a factor 1 + √M·u32 at most (4 standard deviations: 4√M), r by half of
    that; r itself is good to 2 ulp, each of two products to u32. Then one rounding to dtype, doubled: 2u_o|o|.
    """
    u_o = UNIT[dtype]
    inner = norm_error(width)
    magnitude = out.abs()
    element = (2 * u_o + inner) * magnitude + SUBNORMAL.get(dtype, 0.0)
    sigma = (_rounding_variance(out, dtype) + (inner / 2 * magnitude).square()).sqrt()
    return Bound(element, sigma, u_o)


def layer_norm_bound(
    out: torch.Tensor,
    scaled: torch.Tensor,
    shift: torch.Tensor,
    *,
    size: torch.Tensor,
    inverse: torch.Tensor,
    dtype: torch.dtype,
) -> Bound:
    """LayerNorm: (x - μ)·r·w + b in fp32, r = 1/√(mean (x - μ)² + eps); arguments as the oracle's LayerNorm has them.

    The mean of M numbers of size A = mean|x| is off by e = 4√M·u32·A (a random walk, 4 standard deviations) and rounded
    once more: it moves all of a row by e, which comes out as |w|·r·e. Squared distances from a mean that is off add up
    to e² too much, hence r is off by a factor ½e²r²; and as in norm_bound by what a sum of M squares and a root cost. A
    kernel that squares before it takes the mean off errs by √M·u32·mean x² there, which no term here stands for.
    The difference, two products and the bias cost one rounding each.
    """
    width = out.shape[-1]
    error = U32 * (4 * math.sqrt(width) + 1) * size
    inner = norm_error(width) + (error * inverse).square() / 2
    moved = shift * error + inner * scaled.abs()
    element = 2 * UNIT[dtype] * out.abs() + moved + 2 * U32 * (scaled.abs() + out.abs()) + SUBNORMAL.get(dtype, 0.0)
    sigma = (_rounding_variance(out, dtype) + (moved / 2).square()).sqrt()
    return Bound(element, sigma, UNIT[dtype])


def sum_error(messages: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """What the sum of the ranks' messages [W, T, M] may be off by before anything is added to it, [T, M].

    W additions in fp32, and one rounding to dtype, doubled as for outputs: 2u_o|Σx| + W·u32·Σ|x|. A group of one adds
    nothing.
    """
    world = messages.shape[0]
    if world == 1:
        return torch.zeros(messages.shape[1:], dtype=torch.float64)
    wide = messages.double()
    return 2 * UNIT[dtype] * wide.sum(0).abs() + world * U32 * wide.abs().sum(0) + SUBNORMAL.get(dtype, 0.0)


def reduced_norm_bound(
    total: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, error: torch.Tensor, dtype: torch.dtype
) -> Bound:
    """RMSNorm of a sum that is itself off by `error`. total, out, error [T, M]; out is the norm of total.

    Every element brings its own error, times what the norm makes of it: |w|·r·error = |out / total|·error, written with
    r since total may be 0. The mean of squares takes the errors of all elements, in the worst case in one direction: r
    is off by the factor 1 + rms(error)/rms(total). Besides, whatever norm_bound allows.
    """
    plain = norm_bound(out, width=total.shape[-1], dtype=dtype)
    size = total.square().mean(-1, keepdim=True).sqrt().clamp_min(2.0**-126)
    own = weight.double().abs() / size * error
    common = out.abs() * error.square().mean(-1, keepdim=True).sqrt() / size
    sigma = (plain.sigma.square() + (own.square() + common.square()) / 4).sqrt()
    return Bound(plain.element + own + common, sigma, plain.unit)


def norm_error(width: int) -> float:
    """What all elements of a normalised row share as a relative error, see norm_bound; 4 standard deviations."""
    return U32 * (2 * math.sqrt(width) + 6)


def lora_bound(
    out: torch.Tensor,
    delta: torch.Tensor,
    *,
    inner_error: torch.Tensor,
    squares: torch.Tensor,
    rank: int,
    dtype: torch.dtype,
    accumulation: Accumulation,
) -> Bound:
    """out = y + delta, delta = scale·B·(A·x). All [T, N], scale included.

    Args:
        inner_error: √Σ(scale·b·σ_h)² over the rank, σ_h = steps(K)·u·(√Σ(ax)² + |h|) the error of h = A·x in fp32.
        squares: Σ(scale·b·h)².

    Errors of h are independent from rank to rank and reach the output through b: their root of squares. The second
    product errs like any product of `rank` terms, and scale and sum cost two more roundings in fp32. h stays in fp32.
    """
    u_o = UNIT[dtype]
    steps = float(rank) if accumulation.truncating else math.sqrt(rank)
    summing = inner_error + accumulation.unit * steps * (squares.sqrt() + delta.abs()) + U32 * (delta.abs() + out.abs())
    sigma = (_rounding_variance(out, dtype) + summing.square()).sqrt()
    return Bound(2 * u_o * out.abs() + 4 * summing + SUBNORMAL.get(dtype, 0.0), sigma, u_o)


def route_bound(weights: torch.Tensor, *, experts: int, depth: torch.Tensor | float) -> Bound:
    """Weights of the chosen experts, fp32. depth = largest |logit - max| of a softmax (or |logit| of a sigmoid).

    exp(x) turns the rounding of its argument into a relative error |x|·u32, and costs 2 ulp; the sum of E positive
    terms √E·u32, quotient, renormalisation (another sum of the same errors) and scale 2 ulp each.
    """
    relative = U32 * (2 * torch.as_tensor(depth, dtype=torch.float64) + math.sqrt(experts) + 10)
    element = 2 * relative * weights.abs() + 2.0**-126
    return Bound(element.expand(weights.shape), (relative * weights.abs()).expand(weights.shape), U32)


def rounding_bound(out: torch.Tensor, *, dtype: torch.dtype, inner: torch.Tensor | float = 0.0) -> Bound:
    """One rounding to dtype of a value that fp32 arithmetic got within `inner` (absolute): sums of two, merges.

    Element: u_o(1 + u_o)|o| doubled for values near a tie, and inner; sigma: uniform rounding and half of inner.
    """
    u_o = UNIT[dtype]
    absolute = torch.as_tensor(inner, dtype=torch.float64).expand(out.shape)
    element = 2 * u_o * out.abs() + absolute + SUBNORMAL.get(dtype, 0.0)
    sigma = (_rounding_variance(out, dtype) + (absolute / 2).square()).sqrt()
    return Bound(element, sigma, u_o)


def combine_bound(out: torch.Tensor, added: torch.Tensor, *, terms: int, dtype: torch.dtype) -> Bound:
    """A sum of `terms` products and what they are added to, in fp32 and in order; added = |residual| + Σ|w·y|.

    No partial sum is larger than `added`, and each is rounded once, its product once: 2·terms·u32·added at most.
    """
    return rounding_bound(out, dtype=dtype, inner=2 * terms * U32 * added)


def rotary_bound(out: torch.Tensor, pair_size: torch.Tensor, *, dtype: torch.dtype) -> Bound:
    """Rotary: a·cos ∓ b·sin with cos and sin given. pair_size = |a cos| + |b sin|: two products and one sum in fp32,
    each within u32 of a term no larger than pair_size: 3·u32·pair_size, then one rounding."""
    return rounding_bound(out, dtype=dtype, inner=3 * U32 * pair_size)


def gate_bound(out: torch.Tensor, product: torch.Tensor, *, dtype: torch.dtype) -> Bound:
    """act(g)·u, product = g·u. exp and tanh are good to a few ulp of their value: 4·u32·|out|, two roundings included.

    Where act(g) cancels (g « 0: 1 + tanh, 1 + erf) the error is absolute, ½|g·u| times that of tanh or erf. For erf
    kernels commonly take Abramowitz & Stegun 7.1.26, which is off by 1.5e-7 = 2.5·u32, and evaluate it in fp32: five
    Horner steps of terms up to 1.45, the last times an exponential: some 9·u32 more. ½·11.5·u32·|g·u|: 6·u32·|g·u|.
    A sigmoid may be had from a tanh too, and (u + 1)·a as u·a + a: both err by no more of |g|·(|u| + 1).
    """
    return rounding_bound(out, dtype=dtype, inner=U32 * (4 * out.abs() + 6 * product.abs()))
