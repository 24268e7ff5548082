"""What is made of a model's hidden rows: the facts, whichever files they came from.

    rows of a text [T, M] ── kind ──> [M] ── layers ──> [N] ── embed:    cut to `dimensions`, then length 1
                                                               classify: softmax or sigmoid over `labels`

`read.py` makes a Pooler from a checkpoint's JSON files; the engine's front and its worker each read it and agree,
since nothing in it depends on a device. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PoolingKind = Literal["mean", "cls", "last"]
"""The mean of all tokens' rows, the first token's row, or the last one's."""

HeadActivation = Literal["none", "tanh"]
LabelActivation = Literal["none", "sigmoid", "softmax"]
Similarity = Literal["cosine", "dot"]

KINDS: tuple[PoolingKind, ...] = ("mean", "cls", "last")


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """One dense layer on pooled rows: act(x @ W.T + b).

    Attributes:
        name: of the layer in its file: `name.weight`, `name.bias`.
        in_features, out_features: K and N.
        bias: there is one.
        activation: what follows.
        folder: the directory of its own model.safetensors; None: it is in the model's own files.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool
    activation: HeadActivation = "none"
    folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooler:
    """How one model's hidden rows become what its users ask for.

    Attributes:
        task: "embed" gives vectors, "classify" a number for each label.
        kind: which rows count.
        width: M, of the hidden rows.
        include_prompt: a mean counts the tokens of a prompt that was put before the text.
        layers: dense layers after pooling, in order.
        normalize: embeddings have length 1 unless a request says otherwise.
        dimensions: the sizes that the model was trained to be cut to; empty: it does not say.
        prompts: name -> text to put before an input; default_prompt: the one that is always put there.
        similarity: how two embeddings are compared; None: in a way that is not implemented.
        max_tokens: the longest text that the model was tuned for, specials included; None: as long as it takes.
        lower_case: texts are put into lower case first.
        token_types: how many texts of one input the model tells apart.
        labels: of a classifier, by index.
        activation: of a classifier.
    """

    task: Literal["embed", "classify"]
    kind: PoolingKind
    width: int
    include_prompt: bool = True
    layers: tuple[HeadLayer, ...] = ()
    normalize: bool = False
    dimensions: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: Similarity | None = "cosine"
    max_tokens: int | None = None
    lower_case: bool = False
    token_types: int = 1
    labels: tuple[str, ...] = ()
    activation: LabelActivation = "none"

    @property
    def out_width(self) -> int:
        """Elements of a finished vector that is not cut."""
        return self.layers[-1].out_features if self.layers else self.width
