"""A mixture of experts as a layer's feed-forward.

    x ─ router ─ moe_route ─► ids, weights [T, k]
    ids ─ moe_permute ─► which token each row of work belongs to, sorted by expert
    x[rows] ─ experts ─► y
    out[t] = (residual) + Σ_k weight[t, k] · y[place of (t, k)]  (+ the shared expert)

Source: Shazeer et al. 2017. Shape letters: T tokens, M hidden, E experts, N rows of work (T · top_k).
"""

from __future__ import annotations

import torch

from octavo.core.backend.specs import RowSpec
from octavo.core.layers.context import LayerContext
from octavo.core.layers.linear import Linear, Part
from octavo.core.load.stream import WeightTarget
from octavo.core.models.decoder.config import DecoderConfig, MoeConfig
from octavo.core.models.decoder.experts import Experts
from octavo.core.models.decoder.feed_forward import FeedForward, FeedForwardNames

MODULE_OF_ROUTER = "mlp.gate"
"""What Hugging Face calls most families' routers, whatever a checkpoint's tensor is called."""


class MixtureOfExperts:
    """Router, experts and the shared expert of one layer.

    Args:
        context: the model's.
        config: the mixture's.
        prefix: of the layer's names.
        hidden_size: M.
        residual: a call adds a residual.
    """

    def __init__(
        self, context: LayerContext, config: MoeConfig, prefix: str, hidden_size: int, *, residual: bool
    ) -> None:
        self._config, self._context = config, context
        self._residual = residual
        self._router = context.layer(Linear)(
            context,
            [Part(f"{prefix}.{config.router}", config.num_experts)],
            hidden_size,
            bias=config.router_bias,
            out_dtype=torch.float32,
            adapter_kind="router",
        )
        if context.adapters is not None and config.router != MODULE_OF_ROUTER:
            context.adapters.alias(f"{prefix}.{config.router}", f"{prefix}.{MODULE_OF_ROUTER}")
        self._experts = Experts(context, config, prefix, hidden_size)
        self._correction_name = f"{prefix}.{config.correction_bias}"
        self._correction_E = None
        if config.correction_bias is not None:
            self._correction_E = context.backend.empty(config.num_experts, dtype=torch.float32)
        self._claim(context, config, hidden_size)
        self._bind(context, config, hidden_size)
        self._shared: FeedForward | None = None
        self._shared_gate: Linear | None = None
        if config.shared is not None:
            self._build_shared(context, config, prefix, hidden_size)

    @classmethod
    def of_layer(cls, context: LayerContext, config: DecoderConfig, index: int, *, residual: bool) -> MixtureOfExperts:
        """The mixture of a decoder's layer."""
        assert config.moe is not None
        return cls(context, config.moe, config.names.layer.format(index), config.hidden_size, residual=residual)

    def __call__(
        self,
        x_TM: torch.Tensor,
        *,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        adapter_T: torch.Tensor | None = None,
    ) -> None:
        """out [T, M] = the mixture of x; out may be x, and residual may be out."""
        tokens, config = len(x_TM), self._config
        places_TK, weights_TK, rows_N = self._route(x_TM, adapter_T)
        sorted_NM, result_NM = self._sorted_NM[: len(rows_N)], self._result_NM[: len(rows_N)]
        torch.index_select(x_TM, 0, rows_N, out=sorted_NM)
        if config.weigh_inputs:
            sorted_NM.mul_(weights_TK.index_select(0, rows_N))
            weights_TK.fill_(1.0)
        member_N = None
        if self._experts.adapters is not None and adapter_T is not None:
            member_N = self._experts.adapters.members(adapter_T, rows_N, self._segment_start)
        self._experts(sorted_NM, self._segment_start, out=result_NM, member_N=member_N)
        if self._shared is not None:
            self._run_shared(x_TM, adapter_T)
        adds = self._residual and (self._experts.adds_once or self._context.shard.is_whole)
        self._combine(result_NM, places_TK, weights_TK, out=out, residual=residual if adds else None)
        if not self._context.shard.is_whole:
            self._context.shard.comm.all_reduce(out, out=out)
        if self._shared is not None:
            out.add_(self._shared_TM[:tokens])

    def targets(self) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill it."""
        targets = self._router.targets() | self._experts.targets()
        if self._correction_E is not None:
            target = WeightTarget((self._config.num_experts,), self._place_correction)
            targets[self._correction_name] = target
        for product in (self._shared, self._shared_gate):
            if product is not None:
                targets |= product.targets()
        return targets

    def _route(
        self, x_TM: torch.Tensor, adapter_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each pair's place among the sorted rows and its weight, and the token of each sorted row."""
        tokens, config = len(x_TM), self._config
        logits_TE, ids_TK = self._logits_TE[:tokens], self._ids_TK[:tokens]
        places_TK, weights_TK = self._places_TK[:tokens], self._weights_TK[:tokens]
        rows_N = self._rows_N[: tokens * config.top_k]
        self._router(x_TM, out=logits_TE, adapter_T=adapter_T)
        self._moe_route(
            logits_TE,
            top_k=config.top_k,
            out_weights=weights_TK,
            out_ids=ids_TK,
            scoring=config.scoring,
            renormalize=config.renormalize,
            bias_E=self._correction_E,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            scale=config.scale,
        )
        self._permute(
            ids_TK,
            first_expert=self._experts.kept[0],
            out_rows=rows_N,
            out_places=places_TK,
            segment_start=self._segment_start,
        )
        return places_TK, weights_TK, rows_N

    def _run_shared(self, x_TM: torch.Tensor, adapter_T: torch.Tensor | None) -> None:
        """The shared expert of x, before x may be overwritten."""
        assert self._shared is not None
        shared_TM = self._shared_TM[: len(x_TM)]
        self._shared(x_TM, out=shared_TM, adapter_T=adapter_T)
        if self._shared_gate is not None:
            gate_T1 = self._shared_gate_T1[: len(x_TM)]
            self._shared_gate(x_TM, out=gate_T1, adapter_T=adapter_T)
            shared_TM.mul_(gate_T1.sigmoid_())

    def _build_shared(self, context: LayerContext, config: MoeConfig, prefix: str, hidden_size: int) -> None:
        name = f"{prefix}.{config.shared}"
        names = FeedForwardNames(gate=f"{name}.gate_proj", up=f"{name}.up_proj", down=f"{name}.down_proj")
        inner, dtype = config.shared_intermediate_size, context.activation_dtype
        self._shared = FeedForward(context, names, hidden_size, inner, gate=config.gate_function)
        self._shared_TM = context.workspace.claim("shared_expert", hidden_size, dtype=dtype)
        if config.shared_gate is not None:
            self._shared_gate = context.layer(Linear)(context, [Part(f"{prefix}.{config.shared_gate}", 1)], hidden_size)
            self._shared_gate_T1 = context.workspace.claim("shared_gate", 1, dtype=dtype)

    def _claim(self, context: LayerContext, config: MoeConfig, hidden_size: int) -> None:
        claim, dtype, top_k = context.workspace.claim, context.activation_dtype, config.top_k
        local = self._experts.kept[1] - self._experts.kept[0]
        self._logits_TE = claim("router", config.num_experts, dtype=torch.float32)
        self._ids_TK = claim("expert_ids", top_k, dtype=torch.int32)
        self._weights_TK = claim("expert_weights", top_k, dtype=torch.float32)
        self._places_TK = claim("expert_places", top_k, dtype=torch.int64)
        self._rows_N = claim("expert_rows", top_k, dtype=torch.int64).view(-1)
        self._sorted_NM = claim("expert_inputs", top_k * hidden_size, dtype=dtype).view(-1, hidden_size)
        self._result_NM = claim("expert_outputs", top_k * hidden_size, dtype=dtype).view(-1, hidden_size)
        self._segment_start = context.backend.empty(local + 1, dtype=torch.int32)

    def _bind(self, context: LayerContext, config: MoeConfig, hidden_size: int) -> None:
        def bind(op: str, spec: RowSpec):  # type: ignore[no-untyped-def]
            return context.bind(MixtureOfExperts, self, op, spec)

        dtype, local = context.activation_dtype, self._experts.kept[1] - self._experts.kept[0]
        adds = "residual" if self._residual else ""
        self._moe_route = bind("moe_route", RowSpec(config.num_experts, torch.float32, config.scoring, config.top_k))
        self._permute = bind("moe_permute", RowSpec(local, torch.int32, extent=config.top_k))
        self._combine = bind("moe_combine", RowSpec(hidden_size, dtype, adds, config.top_k))

    def _place_correction(self, bias_E: torch.Tensor) -> None:
        self._context.backend.from_host(bias_E.to(torch.float32), out=self._correction_E)
