"""The token embedding and the output head.

    untied   embed_tokens.weight -> packed (rows looked up)         lm_head.weight -> packed (product)
    tied     embed_tokens.weight -> ONE packed weight, looked up and multiplied; lm_head.weight is usually absent

A checkpoint that calls itself tied and yet brings an `lm_head.weight` with other values has a real head under a wrong
flag: it gets a weight of its own, so that the file's values win over the flag.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from octavo.core.backend.ops import PackedWeight
from octavo.core.backend.specs import GemmSpec, RowSpec, WeightSpec
from octavo.core.layers.context import LayerContext
from octavo.core.load.stream import WeightTarget

logger = logging.getLogger(__name__)

_COMPARED_ROWS = 1024


class Embedding:
    """Rows of a [V, M] weight by token id.

    Args:
        context: the model's.
        name: of the layer in the checkpoint.
        vocab_size, width: V and M.
        scale: rows are multiplied by it.
        tied: the weight also serves the output head.
    """

    def __init__(
        self, context: LayerContext, name: str, vocab_size: int, width: int, *, scale: float = 1.0, tied: bool
    ) -> None:
        self.spec = _head_spec(context, vocab_size, width, embedding=True)
        self.weight = context.opset.prepare_weight(self.spec)
        self.tied = tied
        self._name = name
        self._scale = scale
        row = RowSpec(width, context.activation_dtype, extent=vocab_size)
        self._embed = context.bind(Embedding, self, "embed", row, product=self.spec)

    def __call__(self, ids_T: torch.Tensor, *, out: torch.Tensor) -> None:
        """out [T, M] = scale * the rows of the ids."""
        self._embed(ids_T, self.weight, out=out, scale=self._scale)

    def targets(self) -> dict[str, WeightTarget]:
        """The checkpoint tensor that fills the weight."""
        shape = (self.spec.weight.out_features, self.spec.weight.in_features)
        return {f"{self._name}.weight": WeightTarget(shape, partial(self.weight.place, row_offset=0))}


class OutputHead:
    """Logits of rows: out [R, V] = x @ W.T, then softcap.

    Args:
        context: the model's.
        name: of the layer in the checkpoint.
        embedding: the model's; its weight is used when it says it is tied.
        softcap: c of c·tanh(logit / c); None leaves logits alone.
    """

    def __init__(self, context: LayerContext, name: str, embedding: Embedding, *, softcap: float | None = None) -> None:
        self._context = context
        self._name = name
        self._embedding = embedding
        self._softcap = softcap
        self._vocab_size = embedding.spec.weight.out_features
        self._width = embedding.spec.weight.in_features
        if embedding.tied:
            self._use(embedding.weight, embedding.spec)
        else:
            self._use_own_weight()

    def __call__(self, x_RM: torch.Tensor, *, out: torch.Tensor) -> None:
        """out [R, V] fp32 = the logits."""
        self._gemm(x_RM, self.weight, out=out, epilogue=None)
        if self._softcap is not None:
            out.div_(self._softcap).tanh_().mul_(self._softcap)

    def targets(self) -> dict[str, WeightTarget]:
        """The checkpoint tensor that fills the weight; not required when the head is tied."""
        place = self._place_beside_tied if self._embedding.tied else partial(self.weight.place, row_offset=0)
        shape = (self._vocab_size, self._width)
        return {f"{self._name}.weight": WeightTarget(shape, place, required=not self._embedding.tied)}

    def _use(self, weight: PackedWeight, spec: GemmSpec) -> None:
        self.weight = weight
        self._gemm = self._context.bind(OutputHead, self, "gemm", spec)

    def _use_own_weight(self) -> None:
        spec = _head_spec(self._context, self._vocab_size, self._width, embedding=False)
        self._use(self._context.opset.prepare_weight(spec), spec)

    def _place_beside_tied(self, weight_VM: torch.Tensor) -> None:
        """Keep the tie when the tensor repeats the embedding, which was placed before; else give the head its own."""
        if self._repeats_embedding(weight_VM):
            return
        logger.warning(
            "the config ties %s to the embedding, but the checkpoint holds other values for it; they are used",
            self._name,
        )
        self._use_own_weight()
        self.weight.place(weight_VM, 0)

    def _repeats_embedding(self, weight_VM: torch.Tensor) -> bool:
        backend, dtype = self._context.backend, self._context.dtype
        found = backend.empty(_COMPARED_ROWS, self._width, dtype=torch.float32)
        for start in range(0, self._vocab_size, _COMPARED_ROWS):
            rows = weight_VM[start : start + _COMPARED_ROWS].to(dtype).to(torch.float32)
            ids = backend.from_host(torch.arange(start, start + len(rows)))
            self._embedding.weight.rows(ids, out=found[: len(rows)])
            if not torch.equal(backend.to_host(found[: len(rows)]), rows):
                return False
        return True


def _head_spec(context: LayerContext, vocab_size: int, width: int, *, embedding: bool) -> GemmSpec:
    """The product of the output head: fp32 logits whatever the activations are."""
    return GemmSpec(
        weight=WeightSpec(vocab_size, width, context.dtype, embedding=embedding),
        x_dtype=context.activation_dtype,
        out_dtype=torch.float32,
    )
