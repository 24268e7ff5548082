"""One family of `families.py`: how its tiny model is made, and what is known of its config's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fakes import tiny_models


@dataclass(frozen=True)
class TinyFamily:
    """One family.

    Attributes:
        config, model: names of Hugging Face's classes.
        sizes: of the model.
        variants: changes of `sizes`, by name.
        inert: fields that change nothing, each with its reason.
        unseen: fields that change something only in other variants, each with what decides here.
        matters: fields that are inert elsewhere and not here.
        exempt: fields in which this family is meant to differ from Hugging Face's class, each with its reason.
        others: values that a field is changed to, where the usual change says nothing.
        scales: factors of weights whose names end so, where the usual ones would show nothing.
    """

    config: str
    model: str
    sizes: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    inert: Mapping[str, str] = field(default_factory=dict)
    unseen: Mapping[str, str] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)
    matters: tuple[str, ...] = ()
    others: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_encoder(self) -> bool:
        """Whether it has no head and sees whole texts."""
        return self.model.endswith("Model")

    def make(self, seed: int = 0, **changes: Any) -> torch.nn.Module:
        """A model with random weights of standard deviation 0.2, in fp32, whose attention is eager."""
        import transformers

        config = getattr(transformers, self.config)(**(dict(self.sizes) | changes))
        model = tiny_models.randomized(getattr(transformers, self.model), config, seed)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                for ending, scale in self.scales.items():
                    tensor.mul_(scale if name.endswith(ending) else 1.0)
        return model
