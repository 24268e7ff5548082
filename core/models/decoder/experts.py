"""The experts of one layer: their weights, wherever the checkpoint keeps them, and their two grouped products.

    each      experts.7.gate_proj.weight [I, M], up, down                 three tensors of each expert
    stacked   experts.gate_up_proj [E, M, 2I], experts.down_proj [E, I, M]        all experts in one, transposed;
              gate and up in halves of the last axis, or in turn

    sorted rows [N, M] ─ grouped [gate; up] (+ bias) ─ act ─ grouped down (+ bias) ─► [N, M]

Over ranks either every expert's inner width is split or whole experts are shared out; results are summands both ways.
Adapters add to both products; those of a stacked checkpoint have its experts' names as if each had tensors of its own.

Shape letters: M hidden, E experts, I inner width, N rows of work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from octavo.core.backend.ops import PackedWeight
from octavo.core.backend.quant import QuantizedTensor
from octavo.core.backend.specs import GroupedGemmSpec, RowSpec, WeightSpec
from octavo.core.layers.context import LayerContext
from octavo.core.layers.stored import PartCut, Piece, columns_of, rows_of, stored_product
from octavo.core.load.stream import WeightTarget
from octavo.core.lora.experts import ExpertAdapters
from octavo.core.lora.parts import PartShape
from octavo.core.lora.slots import AdapterSlots
from octavo.core.lora.stacked import ExpertStack
from octavo.core.models.decoder.config import MoeConfig
from octavo.core.parallel.mesh import Range

MODULE_OF_EXPERTS = "mlp.experts"
"""What Hugging Face calls the module of a layer's experts, whatever a checkpoint's tensors are called."""


class Experts:
    """E experts of one shape.

    Args:
        context: the model's.
        config: the layer's mixture.
        prefix: of the layer's names.
        hidden_size: M.
    """

    def __init__(self, context: LayerContext, config: MoeConfig, prefix: str, hidden_size: int) -> None:
        self._context, self._config = context, config
        self._hidden_size = hidden_size
        self._name = f"{prefix}.{config.experts}"
        self._prefix = prefix
        self._plain_parts: set[tuple[str, ...]] = set()
        inner = config.intermediate_size
        if context.expert_parallel:
            self.kept, self._inner = context.shard.split(config.num_experts, "num_experts"), (0, inner)
        else:
            self.kept, self._inner = (0, config.num_experts), context.shard.split(inner, "moe_intermediate_size")
        self.adds_once = context.shard.rank == 0
        width = self._inner[1] - self._inner[0]
        # A bias or an adapter stands between product and gate, so that they can't be one.
        self._fused = not config.bias and context.adapters is None
        self._up, self._up_weights = self._product(2 * width, hidden_size, gated=self._fused, parts=("gate", "up"))
        self._down, self._down_weights = self._product(hidden_size, width, gated=False, parts=("down",))
        rows, dtype = config.top_k, context.activation_dtype
        self._inner_NI = context.workspace.claim(f"experts_{width}", rows * width, dtype=dtype).view(-1, width)
        if config.bias:
            local = self.kept[1] - self.kept[0]
            self._up_bias_EN = context.backend.empty(local, 2 * width, dtype=dtype)
            self._down_bias_EM = context.backend.empty(local, hidden_size, dtype=dtype)
        if not self._fused:
            both = context.workspace.claim(f"expert_pairs_{width}", rows * 2 * width, dtype=dtype)
            self._pair_NI = both.view(-1, 2 * width)
            self._act_mul = context.bind(Experts, self, "act_mul", RowSpec(2 * width, dtype, config.gate_function))
        self.adapters = None if context.adapters is None else self._register(context.adapters)

    def __call__(
        self,
        x_NM: torch.Tensor,
        segment_start: torch.Tensor,
        *,
        out: torch.Tensor,
        member_N: torch.Tensor | None = None,
    ) -> None:
        """out [N, M] = each row through the expert of its segment. Rows behind the last segment are undefined.

        member_N: what `adapters.members` gives for these rows.
        """
        inner_NI = self._inner_NI[: len(x_NM)]
        if self._fused:
            self._up(x_NM, self._up_weights, segment_start, out=inner_NI, gate=self._config.gate_function)
            self._down(inner_NI, self._down_weights, segment_start, out=out)
            return
        pair_NI = self._pair_NI[: len(x_NM)]
        self._up(x_NM, self._up_weights, segment_start, out=pair_NI)
        if self._config.bias:
            rows_N = torch.arange(len(x_NM), device=segment_start.device, dtype=segment_start.dtype)
            expert_N = torch.searchsorted(segment_start[1:], rows_N, right=True).clamp_(max=len(self._up_weights) - 1)
            pair_NI.add_(self._up_bias_EN[expert_N])
        if self.adapters is not None and member_N is not None:
            self.adapters.up.add(x_NM, member_N, out=pair_NI)
        self._act_mul(pair_NI, out=inner_NI, gate=self._config.gate_function)
        self._down(inner_NI, self._down_weights, segment_start, out=out)
        if self._config.bias and (self.adds_once or self._context.expert_parallel):
            out.add_(self._down_bias_EM[expert_N])
        if self.adapters is not None and member_N is not None:
            self.adapters.down.add(inner_NI, member_N, out=out)

    def targets(self) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill the experts."""
        if self._config.stacked is None or self._is_split_by_reader:
            return self._targets_each()
        return self._targets_stacked()

    def _product(self, rows: int, columns: int, *, gated: bool, parts: tuple[str, ...]):  # type: ignore[no-untyped-def]
        """The grouped product of E weights [rows, columns], and the weights."""
        context = self._context
        experts = range(*self.kept)
        plain = GroupedGemmSpec(
            weight=WeightSpec(rows, columns, context.dtype, gated=gated),
            num_experts=len(experts),
            x_dtype=context.activation_dtype,
            out_dtype=context.activation_dtype,
            gate=self._config.gate_function if gated else None,
        )
        spec = self._stored(plain, parts)
        weights = [context.opset.prepare_weight(spec) for _ in experts]
        return context.bind(Experts, self, "grouped_gemm", spec), weights

    def _stored(self, plain: GroupedGemmSpec, parts: tuple[str, ...]) -> GroupedGemmSpec:
        """The product with all experts' weights as they are stored, where that is alike and can be placed so."""
        specs: set[GroupedGemmSpec] = set()
        for expert in range(*self.kept):
            spec, stored = stored_product(self._context, plain, self._cuts(expert, parts))
            specs.add(spec if stored.input_order is None else plain)
        kept = specs.pop() if len(specs) == 1 else plain
        if kept.weight.scheme is None:
            self._plain_parts.add(parts)
        return kept

    def _cuts(self, expert: int, parts: tuple[str, ...]) -> list[PartCut]:
        """What this rank holds of an expert's layers. Rows in turn are cut like halves: their scales are by row."""
        (start, stop), inner, hidden = self._inner, self._config.intermediate_size, self._hidden_size
        names = self._names(expert, parts)
        if parts == ("down",):
            return [PartCut(names[0], (hidden, inner), ((0, hidden),), self._inner)]
        if self._config.stacked is None:
            return [PartCut(name, (inner, hidden), ((start, stop),), (0, hidden)) for name in names]
        halves = ((start, stop), (inner + start, inner + stop))
        return [PartCut(names[0], (2 * inner, hidden), halves, (0, hidden))]

    def _part(self, name: str, parts: tuple[str, ...], stored: Piece) -> Piece:
        """A tensor of the checkpoint as the product's weights are kept: as it is, or dequantised."""
        if parts not in self._plain_parts:
            return stored
        return self._context.formats.linear([name]).as_plain().part(name, stored)

    def _register(self, slots: AdapterSlots) -> ExpertAdapters:
        """Slots for every local expert, under the names that the experts have as modules of their own."""
        config, inner, hidden = self._config, self._config.intermediate_size, self._hidden_size
        experts = range(config.num_experts)
        own = {"gate": config.gate, "up": config.up, "down": config.down}

        def shape(part: str, rows: int, columns: int, kept_rows: Range | None, kept_columns: Range | None) -> PartShape:
            names = [f"{self._name}.{expert}.{own[part]}" for expert in experts]
            return PartShape(
                tuple(names[slice(*self.kept)]),
                rows,
                columns,
                None if kept_rows is None else (kept_rows,),
                kept_columns,
                "expert",
                elsewhere=tuple(names[: self.kept[0]] + names[self.kept[1] :]),
            )

        up = [shape(part, inner, hidden, self._inner, None) for part in ("gate", "up")]
        down = shape("down", hidden, inner, None, self._inner)
        gates, ups, downs = ([f"{self._name}.{expert}.{own[part]}" for expert in experts] for part in own)
        stack = ExpertStack(gates, ups, downs, inner, hidden, in_turn=config.stacked == "interleaved")
        return slots.experts(up, down, stack, (self._name, f"{self._prefix}.{MODULE_OF_EXPERTS}"))

    def _names(self, expert: int, parts: tuple[str, ...]) -> list[str]:
        config = self._config
        if config.stacked is not None:
            return [f"{self._name}.{expert}.{'gate_up_proj' if 'gate' in parts else 'down_proj'}"]
        own = {"gate": config.gate, "up": config.up, "down": config.down}
        return [f"{self._name}.{expert}.{own[part]}" for part in parts]

    @property
    def _is_split_by_reader(self) -> bool:
        """Whether the checkpoint's reader gives stacked experts one by one."""
        return self._config.split or self._context.formats.linear(self._names(0, ("down",))).scheme is not None

    # -- tensors of each expert -------------------------------------------------------------------------------

    def _targets_each(self) -> dict[str, WeightTarget]:
        inner, hidden, pair = self._config.intermediate_size, self._hidden_size, ("gate", "up")
        targets: dict[str, WeightTarget] = {}

        def add(name: str, parts: tuple[str, ...], shape: tuple[int, int], place: Callable[[Piece], None]) -> None:
            targets[f"{name}.weight"] = WeightTarget(shape, lambda stored: place(self._part(name, parts, stored)))

        for expert in range(self._config.num_experts):
            names = self._names(expert, pair)
            if self._config.stacked is not None:
                add(names[0], pair, (2 * inner, hidden), partial(self._place_pair, expert))
            else:
                for half, name in enumerate(names):
                    add(name, pair, (inner, hidden), partial(self._place_up, expert, half))
            add(self._names(expert, ("down",))[0], ("down",), (hidden, inner), partial(self._place_down, expert))
        return targets | self._bias_targets()

    def _place_up(self, expert: int, half: int, weight_IM: Piece) -> None:
        """Gate (half 0) or up (half 1) of one expert."""
        if (weight := self._local(self._up_weights, expert)) is not None:
            rows = rows_of(weight_IM, *self._inner)
            _place(weight, rows, half * (self._inner[1] - self._inner[0]))

    def _place_pair(self, expert: int, pair_NM: Piece) -> None:
        """Gate and up of one expert, in halves or in turn."""
        for half, rows in enumerate(self._halves(pair_NM)):
            self._place_up(expert, half, rows)

    def _place_down(self, expert: int, weight_MI: Piece) -> None:
        if (weight := self._local(self._down_weights, expert)) is not None:
            _place(weight, columns_of(weight_MI, *self._inner), 0)

    def _local(self, weights: list[PackedWeight], expert: int) -> PackedWeight | None:
        first, end = self.kept
        return weights[expert - first] if first <= expert < end else None

    def _halves(self, pair_NM: Piece) -> tuple[Piece, ...]:
        inner = self._config.intermediate_size
        if self._config.stacked == "halves":
            return rows_of(pair_NM, 0, inner), rows_of(pair_NM, inner, 2 * inner)
        if isinstance(pair_NM, torch.Tensor):
            return pair_NM[0::2], pair_NM[1::2]
        return every_second(pair_NM, 0), every_second(pair_NM, 1)

    # -- tensors of all experts -------------------------------------------------------------------------------

    def _targets_stacked(self) -> dict[str, WeightTarget]:
        experts, inner, hidden = self._config.num_experts, self._config.intermediate_size, self._hidden_size

        def place_pairs(pairs_EMN: torch.Tensor) -> None:
            for expert in range(*self.kept):
                self._place_pair(expert, pairs_EMN[expert].T)

        def place_downs(downs_EIM: torch.Tensor) -> None:
            for expert in range(*self.kept):
                self._place_down(expert, downs_EIM[expert].T)

        return {
            f"{self._name}.gate_up_proj": WeightTarget((experts, hidden, 2 * inner), place_pairs),
            f"{self._name}.down_proj": WeightTarget((experts, inner, hidden), place_downs),
        } | self._bias_targets()

    def _bias_targets(self) -> dict[str, WeightTarget]:
        if not self._config.bias:
            return {}
        backend, config = self._context.backend, self._config

        def place_pairs(bias_EN: torch.Tensor) -> None:
            kept_EN = bias_EN[slice(*self.kept)].to(self._up_bias_EN.dtype)
            inner = config.intermediate_size
            gate, up = (
                (kept_EN[:, :inner], kept_EN[:, inner:])
                if config.stacked == "halves"
                else (kept_EN[:, 0::2], kept_EN[:, 1::2])
            )
            inner_range = slice(*self._inner)
            backend.from_host(torch.cat((gate[:, inner_range], up[:, inner_range]), 1), out=self._up_bias_EN)

        def place_downs(bias_EM: torch.Tensor) -> None:
            backend.from_host(bias_EM[slice(*self.kept)].to(self._down_bias_EM.dtype), out=self._down_bias_EM)

        return {
            f"{self._name}.gate_up_proj_bias": WeightTarget(
                (config.num_experts, 2 * config.intermediate_size), place_pairs
            ),
            f"{self._name}.down_proj_bias": WeightTarget((config.num_experts, self._hidden_size), place_downs),
        }


def every_second(weight_NK: QuantizedTensor, first: int) -> QuantizedTensor:
    """Rows first, first + 2, … of a weight whose scales belong to single rows."""
    zeros = weight_NK.zero_points
    return QuantizedTensor(
        weight_NK.scheme,
        weight_NK.codes_NK[first::2],
        weight_NK.scales[first::2],
        None if zeros is None else zeros[first::2],
    )


def _place(weight: PackedWeight, part_NK: Piece, row_offset: int) -> None:
    if weight.spec.scheme is None and isinstance(part_NK, QuantizedTensor):
        part_NK = part_NK.dequantize()
    weight.place(part_NK, row_offset)
