"""Dense layers on pooled rows: sentence-transformers' Dense modules, and the heads of classifiers.

    pooled [B, M] fp32 on the host ── device ── x @ W.T + b, tanh ── … ── host [B, N] fp32

They run on the device, once for all texts that end in a step. Their weights come from the model's own files, or, for
Dense modules, from a file of their own beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.ops import Epilogue
from octavo.core.backend.opset import OpSet
from octavo.core.backend.quant import QuantizedTensor
from octavo.core.backend.specs import GemmSpec, WeightSpec
from octavo.core.load.stream import WeightTarget
from octavo.core.pool.pooler import HeadLayer


class PoolHead:
    """A chain of dense layers.

    Args:
        backend, opset: where it runs.
        layers: in order.
        dtype: how weights are stored; activation_dtype: what the backend computes in for it.
        max_rows: the most texts that end in one step.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        opset: OpSet,
        layers: Sequence[HeadLayer],
        *,
        dtype: torch.dtype,
        activation_dtype: torch.dtype,
        max_rows: int,
    ) -> None:
        self._backend = backend
        self._input_BM = backend.empty(max_rows, layers[0].in_features, dtype=activation_dtype)
        self._layers = [_Dense(backend, opset, layer, dtype, activation_dtype, max_rows) for layer in layers]

    def __call__(self, pooled_BM: torch.Tensor) -> torch.Tensor:
        """[B, N] fp32 on the host, from [B, M] fp32 on the host."""
        count = len(pooled_BM)
        x = self._backend.from_host(pooled_BM.to(self._input_BM.dtype), out=self._input_BM)[:count]
        for layer in self._layers:
            x = layer(x)
        return self._backend.to_host(x).to(torch.float32)

    def targets(self, layers: Sequence[HeadLayer]) -> dict[str, WeightTarget]:
        """The tensors that fill some of its layers, by their names in the file that holds them."""
        filled = [dense for dense in self._layers if dense.layer in layers]
        return {name: target for dense in filled for name, target in dense.targets().items()}


class _Dense:
    def __init__(
        self,
        backend: DeviceBackend,
        opset: OpSet,
        layer: HeadLayer,
        dtype: torch.dtype,
        activation_dtype: torch.dtype,
        max_rows: int,
    ) -> None:
        spec = GemmSpec(
            weight=WeightSpec(layer.out_features, layer.in_features, dtype),
            x_dtype=activation_dtype,
            out_dtype=activation_dtype,
            bias=layer.bias,
        )
        self.layer = layer
        self._backend = backend
        self._weight = opset.prepare_weight(spec)
        self._gemm = opset.bind("gemm", spec)
        self._bias_N = backend.empty(layer.out_features, dtype=torch.float32) if layer.bias else None
        self._epilogue = Epilogue(bias_N=self._bias_N) if layer.bias else None
        self._out_BN = backend.empty(max_rows, layer.out_features, dtype=activation_dtype)

    def __call__(self, x_BM: torch.Tensor) -> torch.Tensor:
        out_BN = self._out_BN[: len(x_BM)]
        self._gemm(x_BM, self._weight, out=out_BN, epilogue=self._epilogue)
        return out_BN.tanh_() if self.layer.activation == "tanh" else out_BN

    def targets(self) -> dict[str, WeightTarget]:
        shape = (self.layer.out_features, self.layer.in_features)
        targets = {f"{self.layer.name}.weight": WeightTarget(shape, self._place)}
        if self._bias_N is not None:
            targets[f"{self.layer.name}.bias"] = WeightTarget(shape[:1], partial(self._place_bias, self._bias_N))
        return targets

    def _place(self, weight_NM: torch.Tensor | QuantizedTensor) -> None:
        plain = weight_NM.dequantize() if isinstance(weight_NM, QuantizedTensor) else weight_NM
        self._weight.place(plain, 0)

    def _place_bias(self, out_N: torch.Tensor, bias_N: torch.Tensor) -> None:
        self._backend.from_host(bias_N.to(torch.float32), out=out_N)
