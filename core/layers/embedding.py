"""The token embedding and the output head.

    untied   embed_tokens.weight -> packed (rows looked up)         lm_head.weight -> packed (product)
    tied     embed_tokens.weight -> ONE packed weight, looked up and multiplied; lm_head.weight is usually absent

Over ranks both are split by rows, the vocabulary: a rank looks up the ids it holds, gives zeros for the others and the
sum over ranks is the embedding; of the logits each writes its columns, the others are 0, and the sum is the whole row.

A checkpoint that calls itself tied and yet brings an `lm_head.weight` with other values has a real head under a wrong
flag: it gets a weight of its own, so that the file's values win over the flag.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import torch

from octavo.core.backend.ops import Epilogue, PackedWeight
from octavo.core.backend.quant import QuantizedTensor
from octavo.core.backend.specs import GemmSpec, RowSpec, WeightSpec
from octavo.core.layers.context import LayerContext
from octavo.core.layers.stored import PartCut, rows_of, stored_product
from octavo.core.load.stream import WeightTarget
from octavo.core.lora.parts import PartShape
from octavo.core.parallel.mesh import Range
from octavo.core.quant.formats import LinearFormat

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
        self.vocab_size = vocab_size
        self.width = width
        self.tied = tied
        self.shard = context.shard
        self.kept = context.shard.padded(vocab_size)
        self.spec, self._format = head_spec(context, name, (vocab_size, width), self.kept, embedding=True)
        self.weight = context.opset.prepare_weight(self.spec)
        self._name = name
        self._scale = scale
        row = RowSpec(width, context.activation_dtype, extent=self.kept[1] - self.kept[0])
        self._embed = context.bind(Embedding, self, "embed", row, product=self.spec)
        self._adapters = None
        if context.adapters is not None and type(self).__call__ is Embedding.__call__:
            shape = PartShape((name,), width, vocab_size, kept_columns=self.kept, kind="embedding")
            repeats = partial(repeats_weight, context, self.weight, self.kept)
            self._adapters = context.adapters.embedding(shape, scale=scale, repeats=repeats)

    def __call__(self, ids_T: torch.Tensor, *, out: torch.Tensor, adapter_T: torch.Tensor | None = None) -> None:
        """out [T, M] = scale * the rows of the ids; adapter_T as for Linear."""
        if self.shard.is_whole:
            self._embed(ids_T, self.weight, out=out, scale=self._scale)
            if self._adapters is not None and adapter_T is not None:
                self._adapters.add_rows(ids_T, adapter_T, out=out)
            return
        start, stop = self.kept
        is_elsewhere_T = (ids_T < start) | (ids_T >= stop)
        self._embed((ids_T - start).masked_fill_(is_elsewhere_T, 0), self.weight, out=out, scale=self._scale)
        out.masked_fill_(is_elsewhere_T[:, None], 0.0)
        if self._adapters is not None and adapter_T is not None:
            self._adapters.add_rows(ids_T, adapter_T, out=out)
        self.shard.comm.all_reduce(out, out=out)

    def targets(self) -> dict[str, WeightTarget]:
        """The checkpoint tensor that fills the weight."""
        place = partial(place_rows, self.weight, self._format, self._name, self.kept)
        target = WeightTarget((self.vocab_size, self.width), place)
        return {f"{self._name}.weight": target}


class OutputHead:
    """Logits of rows: out [R, V] = x @ W.T + b, then scale, then softcap.

    Args:
        context: the model's.
        name: of the layer in the checkpoint.
        embedding: the model's; its weight is used when it says it is tied.
        softcap: c of c·tanh(logit / c); None leaves logits alone.
        scale: logits are multiplied by it.
        bias: a vector is added.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        embedding: Embedding,
        *,
        softcap: float | None = None,
        scale: float = 1.0,
        bias: bool = False,
    ) -> None:
        self._context = context
        self._name = name
        self._embedding = embedding
        self._softcap = softcap
        self._scale = scale
        self._vocab_size = embedding.vocab_size
        self._width = embedding.width
        self._kept = embedding.kept
        rows = self._kept[1] - self._kept[0]
        self._bias_N = context.backend.empty(rows, dtype=torch.float32) if bias else None
        self._epilogue = None if self._bias_N is None else Epilogue(bias_N=self._bias_N)
        if embedding.tied:
            self._use(embedding.weight, replace(embedding.spec, bias=bias))
        else:
            self._use_own_weight()
        self._adapters = None
        if context.adapters is not None and type(self).__call__ is OutputHead.__call__:
            shape = PartShape((name,), self._vocab_size, self._width, kept_rows=(self._kept,), kind="head")
            self._adapters = context.adapters.product([shape], dtype=torch.float32, repeats=self._repeats)

    def __call__(self, x_RM: torch.Tensor, *, out: torch.Tensor, adapter_R: torch.Tensor | None = None) -> None:
        """out [R, V] fp32 = the logits; adapter_R as for Linear."""
        shard = self._context.shard
        own = out
        if not shard.is_whole:
            out.zero_()
            own = out[:, slice(*self._kept)]
        self._gemm(x_RM, self.weight, out=own, epilogue=self._epilogue)
        if self._adapters is not None and adapter_R is not None:
            self._adapters.add(x_RM, adapter_R, out=own)
        if not shard.is_whole:
            shard.comm.all_reduce(out, out=out)
        if self._scale != 1.0:
            out.mul_(self._scale)
        if self._softcap is not None:
            out.div_(self._softcap).tanh_().mul_(self._softcap)

    def targets(self) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill the weight, which is not required when the head is tied, and the bias."""
        tied = self._embedding.tied
        place = self._place_beside_tied if tied else self._place
        targets = {f"{self._name}.weight": WeightTarget((self._vocab_size, self._width), place, required=not tied)}
        if self._bias_N is not None:
            targets[f"{self._name}.bias"] = WeightTarget((self._vocab_size,), self._place_bias)
        return targets

    def _use(self, weight: PackedWeight, spec: GemmSpec) -> None:
        self.weight = weight
        self._gemm = self._context.bind(OutputHead, self, "gemm", spec)

    def _use_own_weight(self) -> None:
        shape = (self._vocab_size, self._width)
        spec, self._format = head_spec(self._context, self._name, shape, self._kept, embedding=False)
        spec = replace(spec, bias=self._bias_N is not None)
        self._use(self._context.opset.prepare_weight(spec), spec)

    def _place(self, weight_VM: torch.Tensor | QuantizedTensor) -> None:
        place_rows(self.weight, self._format, self._name, self._kept, weight_VM)

    def _place_bias(self, bias_V: torch.Tensor) -> None:
        self._context.backend.from_host(bias_V[slice(*self._kept)].to(torch.float32), out=self._bias_N)

    def _place_beside_tied(self, weight_VM: torch.Tensor | QuantizedTensor) -> None:
        """Keep the tie when the tensor repeats the embedding, which was placed before; else give the head its own."""
        if repeats_weight(self._context, self._embedding.weight, self._kept, weight_VM):
            return
        logger.warning(
            "the config ties %s to the embedding, but the checkpoint holds other values for it; they are used",
            self._name,
        )
        self._use_own_weight()
        self._place(weight_VM)

    def _repeats(self, weight_VM: torch.Tensor) -> bool:
        return repeats_weight(self._context, self.weight, self._kept, weight_VM)


def repeats_weight(
    context: LayerContext, weight: PackedWeight, kept: Range, tensor_VM: torch.Tensor | QuantizedTensor
) -> bool:
    """Whether a checkpoint's tensor holds what a weight already holds of it."""
    kept_NM = rows_of(tensor_VM, *kept)
    weight_NM = kept_NM if isinstance(kept_NM, torch.Tensor) else kept_NM.dequantize()
    if weight_NM.shape != (weight.spec.out_features, weight.spec.in_features):
        return False
    backend = context.backend
    found = backend.empty(_COMPARED_ROWS, weight.spec.in_features, dtype=torch.float32)
    for start in range(0, len(weight_NM), _COMPARED_ROWS):
        rows = weight_NM[start : start + _COMPARED_ROWS]
        if weight.spec.scheme is None:
            rows = rows.to(context.dtype)
        rows = rows.to(torch.float32)
        ids = backend.from_host(torch.arange(start, start + len(rows)))
        weight.rows(ids, out=found[: len(rows)])
        if not torch.equal(backend.to_host(found[: len(rows)]), rows):
            return False
    return True


def place_rows(
    weight: PackedWeight, stored: LinearFormat, name: str, kept: Range, tensor_VM: torch.Tensor | QuantizedTensor
) -> None:
    """Fill a weight with this rank's rows of a checkpoint tensor."""
    rows_NM = rows_of(stored.part(name, tensor_VM), *kept)
    if weight.spec.scheme is None and isinstance(rows_NM, QuantizedTensor):
        rows_NM = rows_NM.dequantize()
    weight.place(rows_NM, 0)


def head_spec(
    context: LayerContext, name: str, shape: tuple[int, int], kept: Range, *, embedding: bool
) -> tuple[GemmSpec, LinearFormat]:
    """The product of an output head as its weight is stored: fp32 logits whatever the activations are.

    Columns that are stored in another order are put back: the weight is then plain.

    Args:
        context: the model's.
        name: of the layer in the checkpoint.
        shape: V and M.
        kept: the rows that this rank holds.
        embedding: rows are looked up, too.
    """
    plain = GemmSpec(
        weight=WeightSpec(kept[1] - kept[0], shape[1], context.dtype, embedding=embedding),
        x_dtype=context.activation_dtype,
        out_dtype=torch.float32,
    )
    spec, stored = stored_product(context, plain, [PartCut(name, shape, (kept,), (0, shape[1]))])
    return (spec, stored) if stored.input_order is None else (plain, stored.as_plain())
