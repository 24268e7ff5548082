"""The native row kernels against float64, bounded by their own arithmetic, and a row's bits whatever the batch."""

from __future__ import annotations

import pytest
import torch

from octavo.backends.cpu.elementwise import ElementwiseOps
from octavo.backends.cpu.native import NativeError
from octavo.core.backend.reference import rows as reference
from octavo.core.backend.specs import RowSpec
from octavo.core.base.errors import UnsupportedOp

U32 = 2.0**-24
SUBNORMAL = 2.0**-126
GATES = ("silu", "gelu_tanh", "gelu")


@pytest.fixture
def ops(make_context):
    return ElementwiseOps(make_context())


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestRmsNorm:
    # A square rounds once, a partial sum at most width / 64 + 8 times; half of that survives the root, and root,
    # quotient and three products round once each.
    @staticmethod
    def bound(want, width):
        return (width / 128 + 10) * U32 * want.abs() + SUBNORMAL

    @staticmethod
    def oracle(x, weight, eps):
        out = torch.empty(x.shape, dtype=torch.float64)
        reference.rms_norm(x.double(), weight.double(), out=out, eps=eps)
        return out

    @pytest.mark.parametrize("width", [1, 7, 15, 16, 17, 63, 64, 65, 100, 576, 1000, 4096])
    def test_matches_oracle(self, make_context, isa, width):
        x, weight, out = normal(5, width), normal(width, seed=1), torch.full((5, width), torch.nan)
        ElementwiseOps(make_context(2, isa)).rms_norm(x, weight, out=out, eps=1e-5)
        want = self.oracle(x, weight, 1e-5)
        assert ((out - want).abs() <= self.bound(want, width)).all()

    def test_heads_and_strides(self, ops):
        wide = normal(6, 400)
        x = wide[:, 10:330].unflatten(1, (5, 64))
        out = torch.full((6, 7, 80), 3.0)
        ops.rms_norm(x, normal(64, seed=1), out=out[:, 1:6, 8:72], eps=1e-6)
        want = self.oracle(x, normal(64, seed=1), 1e-6)
        assert ((out[:, 1:6, 8:72] - want).abs() <= self.bound(want, 64)).all()
        out[:, 1:6, 8:72] = 3.0
        assert (out == 3).all()

    def test_in_place(self, ops):
        x, weight = normal(4, 100), normal(100, seed=1)
        want = torch.empty_like(x)
        ops.rms_norm(x, weight, out=want, eps=1e-5)
        ops.rms_norm(x, weight, out=x, eps=1e-5)
        assert torch.equal(x, want)

    def test_residual_is_updated_first(self, ops):
        x, residual, weight = normal(9, 100), normal(9, 100, seed=1), normal(100, seed=2)
        total, want, out = x + residual, torch.empty_like(x), torch.empty_like(x)
        kept = x.clone()
        ops.rms_norm(total, weight, out=want, eps=1e-5)
        ops.rms_norm(x, weight, out=out, eps=1e-5, residual=residual)
        assert torch.equal(residual, total)
        assert torch.equal(out, want)
        assert torch.equal(x, kept)

    def test_extreme_rows(self, ops):
        x = torch.stack(
            [torch.zeros(48), torch.full((48,), 1e18), torch.full((48,), 1e-30), torch.full((48,), torch.nan)]
        )
        out = torch.empty_like(x)
        ops.rms_norm(x, torch.ones(48), out=out, eps=1e-6)
        assert (out[0] == 0).all()
        torch.testing.assert_close(out[1], torch.ones(48), rtol=1e-6, atol=0)
        torch.testing.assert_close(out[2], torch.full((48,), 1e-27), rtol=1e-6, atol=0)
        assert out[3].isnan().all()

    def test_rows_do_not_depend_on_the_batch(self, make_context):
        x, weight = normal(300, 576), normal(576, seed=1)
        out = torch.empty_like(x)
        ElementwiseOps(make_context(3)).rms_norm(x, weight, out=out, eps=1e-5)  # enough rows for the pool
        ops = ElementwiseOps(make_context(1))
        for row in (0, 1, 150, 299):
            alone = torch.empty(1, 576)
            ops.rms_norm(x[row : row + 1], weight, out=alone, eps=1e-5)
            assert torch.equal(alone[0], out[row])

    def test_no_rows(self, ops):
        ops.rms_norm(torch.empty(0, 8), torch.ones(8), out=torch.empty(0, 8), eps=1e-5)

    def test_refusals(self, ops):
        x, weight = normal(2, 8), torch.ones(8)
        with pytest.raises(UnsupportedOp, match="fp32"):
            ops.rms_norm(x.to(torch.bfloat16), weight, out=x.clone(), eps=1e-5)
        with pytest.raises(ValueError, match="rms_norm of"):
            ops.rms_norm(x, torch.ones(7), out=x.clone(), eps=1e-5)
        with pytest.raises(ValueError, match="residual"):
            ops.rms_norm(x, weight, out=x.clone(), eps=1e-5, residual=normal(1, 8))


class TestActMul:
    @staticmethod
    def gates():
        special = torch.tensor(
            [0.0, -0.0, 1e-30, -1e-30, 5.0, -5.0, 12.0, -12.0, 30.0, -30.0, 200.0, -200.0, 1e20, -1e20]
        )
        return torch.cat([special, normal(1000) * 3])

    # The exponential's argument z carries about 4 u |z| and e^z inherits it as a factor; the rest rounds once each.
    @pytest.mark.parametrize("gate", GATES)
    def test_matches_oracle(self, make_context, isa, gate):
        gates = self.gates()
        up = normal(len(gates), seed=1)
        out = torch.full((1, len(gates)), torch.nan)
        ElementwiseOps(make_context(2, isa)).act_mul(torch.cat([gates, up])[None], out=out, gate=gate)
        x = gates.double()
        # Written without cancellation: 1 + tanh and 1 + erf lose their digits far below zero, even in float64.
        z, act = {
            "silu": (torch.zeros_like(x), x * torch.sigmoid(x)),
            "gelu_tanh": (
                1.6 * (x + 0.044715 * x**3),
                x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
            ),
            "gelu": (x**2 / 2, x / 2 * torch.erfc(-x * 0.5**0.5)),
        }[gate]
        want = act * up
        bound = (8 + 4 * z.abs()) * U32 * want.abs() + 8 * SUBNORMAL * (gates.abs() + 1) * (up.abs() + 1)
        assert ((out - want).abs() <= bound).all()

    def test_nan_comes_out(self, ops):
        x = torch.full((1, 40), torch.nan)
        for gate in GATES:
            out = torch.zeros(1, 20)
            ops.act_mul(x, out=out, gate=gate)
            assert out.isnan().all()

    @pytest.mark.parametrize("width", [1, 15, 16, 17, 100])
    def test_widths_and_strides(self, ops, width):
        wide = normal(5, 2 * width + 9)
        out = torch.full((5, width + 6), 3.0)
        ops.act_mul(wide[:, 4 : 4 + 2 * width], out=out[:, 2 : 2 + width], gate="silu")
        for row in range(5):
            alone = torch.empty(1, width)
            ops.act_mul(wide[row : row + 1, 4 : 4 + 2 * width], out=alone, gate="silu")
            assert torch.equal(out[row, 2 : 2 + width], alone[0])
        out[:, 2 : 2 + width] = 3.0
        assert (out == 3).all()

    def test_many_rows_use_the_pool(self, make_context):
        x = normal(200, 300)
        one, many = torch.empty(200, 150), torch.empty(200, 150)
        ElementwiseOps(make_context(1)).act_mul(x, out=one, gate="gelu_tanh")
        ElementwiseOps(make_context(3)).act_mul(x, out=many, gate="gelu_tanh")
        assert torch.equal(one, many)

    def test_refusals(self, ops):
        with pytest.raises(UnsupportedOp, match="fp32"):
            ops.act_mul(normal(2, 8).to(torch.float16), out=torch.empty(2, 4), gate="silu")
        with pytest.raises(ValueError, match="act_mul of"):
            ops.act_mul(normal(2, 8), out=torch.empty(2, 5), gate="silu")


class TestRotary:
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(
        ("head_dim", "rotary_dim"), [(64, 64), (80, 32), (40, 40), (96, 72), (6, 2), (256, 256), (64, 0)]
    )
    def test_matches_oracle(self, make_context, isa, head_dim, rotary_dim, interleaved):
        q, k, positions, table = case(head_dim, rotary_dim)
        out_q, out_k = torch.full_like(q, torch.nan), torch.full_like(k, torch.nan)
        ops = ElementwiseOps(make_context(2, isa))
        ops.rotary(q, k, positions, table, out_q=out_q, out_k=out_k, interleaved=interleaved)
        angles = table.double()[positions]
        for x, out in ((q, out_q), (k, out_k)):
            want = reference.rotated(x.double(), angles, interleaved)
            # Two products and a sum: two roundings of each term at most.
            spread = reference.rotated(x.double().abs(), with_negative_sines(angles.abs()), interleaved).abs()
            spread = torch.maximum(spread, reference.rotated(x.double().abs(), angles.abs(), interleaved).abs())
            assert ((out - want).abs() <= 2 * U32 * spread).all()
            assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_in_place_and_strided(self, ops, interleaved):
        q, k, positions, table = case(64, 48)
        want_q, want_k = torch.empty_like(q), torch.empty_like(k)
        ops.rotary(q, k, positions, table, out_q=want_q, out_k=want_k, interleaved=interleaved)
        fused = torch.cat([q, k], dim=1)  # heads of q and k side by side, as one product writes them
        in_q, in_k = fused[:, : q.shape[1]], fused[:, q.shape[1] :]
        ops.rotary(in_q, in_k, positions, table, out_q=in_q, out_k=in_k, interleaved=interleaved)
        assert torch.equal(in_q, want_q)
        assert torch.equal(in_k, want_k)

    def test_position_outside_the_table(self, ops):
        q, k, positions, table = case(16, 16)
        for bad in (-1, len(table)):
            positions[1] = bad
            out_q, out_k = torch.zeros_like(q), torch.zeros_like(k)
            with pytest.raises(NativeError, match="out of range"):
                ops.rotary(q, k, positions, table, out_q=out_q, out_k=out_k)
            assert (out_q == 0).all()

    def test_refusal(self, ops):
        q, k, positions, table = case(16, 16)
        with pytest.raises(UnsupportedOp, match="int64"):
            ops.rotary(q, k, positions.int(), table, out_q=q, out_k=k)


def case(head_dim, rotary_dim):
    """q [7, 5, D], k [7, 2, D], positions, and a table of cosines and sines."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(60, rotary_dim // 2, generator=generator) * 100
    positions = torch.randint(0, 60, (7,), generator=generator)
    return (
        normal(7, 5, head_dim),
        normal(7, 2, head_dim, seed=1),
        positions,
        torch.cat([angles.cos(), angles.sin()], dim=1),
    )


def with_negative_sines(table):
    cos, sin = table.chunk(2, dim=-1)
    return torch.cat([cos, -sin], dim=-1)


class TestSupports:
    def test_what_it_runs(self, ops):
        assert ops.supports("rms_norm", RowSpec(576, torch.float32)) is None
        assert ops.supports("rms_norm", RowSpec(576, torch.float32, "residual")) is None
        for gate in GATES:
            assert ops.supports("act_mul", RowSpec(3072, torch.float32, gate)) is None
        assert ops.supports("rotary", RowSpec(64, torch.float32, "interleaved", 32)) is None

    @pytest.mark.parametrize(
        ("op", "spec", "reason"),
        [
            ("rms_norm", RowSpec(576, torch.bfloat16), "fp32"),
            ("rms_norm", RowSpec(576, torch.float32, "gemma"), "gemma"),
            ("act_mul", RowSpec(576, torch.float32, "relu"), "relu"),
            ("rotary", RowSpec(64, torch.float32, "", 33), "even"),
            ("sample", RowSpec(64, torch.float32), "no native sample"),
        ],
    )
    def test_what_it_refuses(self, ops, op, spec, reason):
        assert reason in ops.supports(op, spec).reason
