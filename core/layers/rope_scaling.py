"""How rotary frequencies are changed so that a model reads longer texts than it was first trained on.

    scheme        frequencies                                     cos and sin are multiplied by
    linear        f / factor                                      1
    dynamic       a larger base, the longer the request           1
    llama3        low ones / factor, high ones kept, a blend      1
    yarn          the same idea over dimensions                   1 + 0.1 ln factor, or as the config says
    longrope      f / short or f / long, by the request's length  sqrt(1 + ln factor / ln original), or as it says
    proportional  f of the whole head, the last ones 0            1

A scheme is a frozen value: it is part of the key under which layers share a table. `switch_tokens` is set by the two
schemes whose frequencies depend on a request's length; see `rope.py` for what is made of it. Everything is computed in
fp32 in the order of the checkpoints' reference, so that far positions get the angles the model was trained with.

Shape letters: R rotated elements of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch


class RopeScaling(Protocol):
    """One scheme. Hashable, and equal to another that gives the same tables."""

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin, hence scores by its square."""

    @property
    def switch_tokens(self) -> int | None:
        """Requests of more tokens than this have other frequencies; None: all have the same."""

    def frequencies(self, theta: float, rotary_dim: int, num_tokens: int) -> torch.Tensor:
        """Radians per position, fp32 [R / 2], for requests of up to `num_tokens` tokens."""

    def max_position(self, stated: int) -> int:
        """Positions the scaled model reads, where its config states `stated` and the two may not be the same."""


def plain_frequencies(theta: float, rotary_dim: int) -> torch.Tensor:
    """Unscaled radians per position, fp32 [R / 2]. Source: Su et al. 2021 (RoFormer)."""
    return 1.0 / _wavelengths(theta, rotary_dim)


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`. Source: Chen et al. 2023 (position interpolation)."""

    attention_factor: ClassVar[float] = 1.0
    switch_tokens: ClassVar[int | None] = None

    factor: float

    def frequencies(self, theta: float, rotary_dim: int, num_tokens: int) -> torch.Tensor:
        """See `RopeScaling`."""
        return plain_frequencies(theta, rotary_dim) / self.factor

    def max_position(self, stated: int) -> int:
        """The config states the unscaled length."""
        return int(stated * self.factor)


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """A base that grows with the request's length beyond the original one.

    Attributes:
        original_max_position: tokens up to which a request has the unscaled frequencies.

    Source: the NTK-aware method of bloc97 and emozilla, as described by Peng et al. 2023 (YaRN), section 3.
    """

    attention_factor: ClassVar[float] = 1.0

    factor: float
    original_max_position: int

    @property
    def switch_tokens(self) -> int | None:
        """The original length."""
        return self.original_max_position

    def frequencies(self, theta: float, rotary_dim: int, num_tokens: int) -> torch.Tensor:
        """See `RopeScaling`."""
        tokens = max(num_tokens, self.original_max_position)
        stretch = self.factor * tokens / self.original_max_position - (self.factor - 1)
        base = theta * stretch ** (rotary_dim / (rotary_dim - 2))
        return plain_frequencies(base, rotary_dim)

    def max_position(self, stated: int) -> int:
        """The config states the unscaled length."""
        return int(stated * self.factor)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a linear blend of both in between.

    Attributes:
        low_freq_factor, high_freq_factor: wavelengths above original / low are low frequencies, below original /
            high are high ones.
        original_max_position: positions of the first training, in tokens.

    Source: Llama team 2024 (The Llama 3 herd of models).
    """

    attention_factor: ClassVar[float] = 1.0
    switch_tokens: ClassVar[int | None] = None

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def frequencies(self, theta: float, rotary_dim: int, num_tokens: int) -> torch.Tensor:
        """See `RopeScaling`."""
        plain = plain_frequencies(theta, rotary_dim)
        wavelengths = 2 * math.pi / plain
        low, high = self.low_freq_factor, self.high_freq_factor
        blend = (self.original_max_position / wavelengths - low) / (high - low)
        blended = (1 - blend) * plain / self.factor + blend * plain
        scaled = torch.where(wavelengths > self.original_max_position / low, plain / self.factor, blended)
        return torch.where(wavelengths < self.original_max_position / high, plain, scaled)

    def max_position(self, stated: int) -> int:
        """The config states the scaled length."""
        return stated


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Dimensions that turn often over the original length kept, those that turn seldom interpolated, a ramp between.

    Attributes:
        original_max_position: positions of the first training, in tokens.
        attention_factor: multiplies cos and sin.
        beta_fast, beta_slow: turns over the original length at the two ends of the ramp.
        truncate: whether the ramp's ends are moved outwards to whole dimensions.
        mscale_all_dim: DeepSeek's second temperature; 0 where there is none. See `softmax_factor`.

    Source: Peng et al. 2023 (YaRN).
    """

    switch_tokens: ClassVar[int | None] = None

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = 0.0

    @property
    def softmax_factor(self) -> float:
        """Multiplies the scores of DeepSeek's latent attention, on top of what is in the table; others ignore it."""
        return yarn_temperature(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def frequencies(self, theta: float, rotary_dim: int, num_tokens: int) -> torch.Tensor:
        """See `RopeScaling`."""
        wavelengths = _wavelengths(theta, rotary_dim)
        kept, interpolated = 1.0 / wavelengths, 1.0 / (self.factor * wavelengths)
        first, last = self._ramp(theta, rotary_dim)
        keep = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
        return interpolated * (1 - keep) + kept * keep

    def max_position(self, stated: int) -> int:
        """The original length, scaled; configs state one or the other, and some a third."""
        return int(self.original_max_position * self.factor)

    def _ramp(self, theta: float, rotary_dim: int) -> tuple[float, float]:
        """The dimensions where the ramp begins and ends, never equal."""

        def dimension(turns: float) -> float:
            wavelength = self.original_max_position / (turns * 2 * math.pi)
            return rotary_dim * math.log(wavelength) / (2 * math.log(theta))

        first, last = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        return first, last + 0.001 if first == last else last


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """How much sharper attention gets at `factor` times the length; 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """A divisor per frequency, from one list for short requests and another for long ones.

    Attributes:
        short_factors, long_factors: R / 2 divisors each.
        original_max_position: tokens up to which a request is short.
        attention_factor: multiplies cos and sin of both.

    Source: Ding et al. 2024 (LongRoPE).
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float

    @property
    def switch_tokens(self) -> int | None:
        """The original length."""
        return self.original_max_position

    def frequencies(self, theta: float, rotary_dim: int, num_tokens: int) -> torch.Tensor:
        """See `RopeScaling`."""
        factors = self.long_factors if num_tokens > self.original_max_position else self.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _wavelengths(theta, rotary_dim))

    def max_position(self, stated: int) -> int:
        """The config states the scaled length."""
        return stated


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Frequencies spread over the whole head, of which the first are used and the others are 0: no rotation.

    Attributes:
        fraction: of the head's elements that are rotated.
        factor: divides positions.

    Source: Gemma team 2025 (Gemma 4), as Hugging Face's classes compute it.
    """

    attention_factor: ClassVar[float] = 1.0
    switch_tokens: ClassVar[int | None] = None

    fraction: float
    factor: float = 1.0

    def frequencies(self, theta: float, rotary_dim: int, num_tokens: int) -> torch.Tensor:
        """See `RopeScaling`."""
        rotated = int(self.fraction * rotary_dim // 2)
        kept = torch.arange(rotary_dim // 2) < rotated
        return torch.where(kept, plain_frequencies(theta, rotary_dim), 0.0) / self.factor

    def max_position(self, stated: int) -> int:
        """The config states the scaled length."""
        return stated


def _wavelengths(theta: float, rotary_dim: int) -> torch.Tensor:
    """Positions per radian, fp32 [R / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return torch.pow(theta, exponents)
