"""The false-alarm gate: honest variants pass, whatever the seed; and a variant that isn't honest is noticed."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo.conformance import command, suite
from octavo.conformance.draw import Draw
from octavo.conformance.harness.host import HostBackend
from octavo.conformance.harness.judge import judge
from octavo.conformance.harness.result import Status
from octavo.conformance.trial import Trial
from octavo.conformance.variants import attention, gate, product
from octavo.conformance.variants.base import Variant
from octavo.conformance.variants.gate import VARIANTS, Verdict, try_variant
from octavo.conformance.variants.run import Report, begun, current_hash, encode, run, taken_up
from octavo.core.backend.reference.attention import Rule
from octavo.core.backend.reference.attention import attend as plain_attend
from octavo.core.cli import conform

SEED, PROFILE = 100, "tiny"  # `make nightly JOBS=variants` runs core, and twenty seeds.


@pytest.mark.parametrize("group", gate.groups(), ids=lambda group: group[0].name)
def test_no_false_alarm(group: list[Variant]) -> None:
    verdicts = gate.try_variants(group, SEED, PROFILE)
    assert [alarm for verdict in verdicts for alarm in verdict.alarms] == []
    assert all(verdict.tried for verdict in verdicts)


EXACT = {
    "quantize", "embed", "write_kv", "write_mla", "copy_blocks", "gather_blocks", "scatter_blocks", "all_reduce_norm",
    "communicator", "moe_permute",
}  # fmt: skip
"""Ops that leave no choice, or whose choices are those of another op: all_reduce_norm is a sum and rms_norm."""


def test_every_op_that_leaves_a_choice_has_variants() -> None:
    concerned = {op for variant in VARIANTS for op in variant.concerns}
    assert {case.op for case in suite.families().values()} - EXACT <= concerned


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_it_computes_otherwise_than_the_reference(variant: Variant) -> None:
    """A variant that gives the reference's bits everywhere shows nothing of the bounds."""
    if not variant.ops or variant.concerns == ("sample",):
        pytest.skip("it differs in its data, or only for numbers that fall on a rounding of a sum")
    backends = (variant.make(), HostBackend())
    cases = [c for c in suite.select("full") if c.op in variant.concerns and {"exact", "probe"}.isdisjoint(c.lanes[:1])]
    cases = [*variant.cases(), *(c for c in cases if variant.alter(c) is not None)]
    assert any(len({judge(case, backend, SEED).digest for backend in backends}) == 2 for case in cases[:40])


ROOT = Path(__file__).parents[2]


def test_the_report_that_is_checked_in_is_of_this_suite() -> None:
    report = json.loads((ROOT / "docs/reports/variants.json").read_text())
    if not report.get("must_pass"):
        pytest.skip("made before reports named their cases")
    assert report["must_pass"] == current_hash(report["profile"]), "run make nightly JOBS=variants"
    assert {verdict["variant"] for verdict in report["verdicts"]} == {variant.name for variant in VARIANTS}


def test_a_run_that_was_left_is_taken_up_and_one_of_other_cases_is_not() -> None:
    new = begun(100, 1, "tiny", "lora_gemm")
    whole = list(run(new, 1, lambda _: None))[-1]
    assert whole.is_whole
    left = msgspec.structs.replace(whole, verdicts=[v for v in whole.verdicts if v.variant != "lora-ranks"])
    assert taken_up(encode(left), new) == left
    told: list[str] = []
    assert list(run(left, 1, lambda verdict: told.append(verdict.variant)))[-1] == whole
    assert told == ["lora-ranks"]
    assert taken_up(encode(msgspec.structs.replace(left, must_pass="0" * 16)), new) == new
    assert taken_up(b"{", new) == new


def test_a_report_is_replaced_by_a_whole_one_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, words = tmp_path / "v.json", ["conform", "--variants", "--profile", "tiny", "--only", "lora_gemm"]
    words += ["--seed", "100", "--seeds", "1", "--json", str(path)]
    path.write_text("better")
    honest = gate.try_variants

    def interrupted(group: list[Variant], *args: Any, **kwargs: Any) -> list[Verdict]:
        if group[0].name.startswith("lora"):
            raise KeyboardInterrupt
        return honest(group, *args, **kwargs)

    monkeypatch.setattr("octavo.conformance.variants.run.try_variants", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.run(parsed(words))
    assert path.read_text() == "better"
    left = msgspec.json.decode((tmp_path / "v.json.unfinished").read_bytes(), type=Report)
    assert 0 < len(left.verdicts) < len(VARIANTS)
    monkeypatch.undo()
    assert command.run(parsed(words)) == 0
    whole = msgspec.json.decode(path.read_bytes(), type=Report)
    assert whole.is_whole
    assert whole.verdicts[: len(left.verdicts)] == left.verdicts
    assert [file.name for file in tmp_path.iterdir()] == ["v.json"]


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    conform.add_arguments(parser)
    return parser.parse_args(words[1:])


def test_variants_of_the_same_cases_are_tried_on_one_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(v.name for group in gate.groups() for v in group) == sorted(v.name for v in VARIANTS)
    drawn: list[str] = []
    (group,) = (group for group in gate.groups() if group[0].name == "lora-split-k")
    (case,) = (c for c in suite.select("tiny") if c.name == "lora_gemm.exact/float32-t5-k64-n48-r16.8-last")

    def build(draw: Draw) -> Trial:
        drawn.append(case.name)
        return case.build(draw)

    counted = replace(case, build=build)
    monkeypatch.setattr("octavo.conformance.variants.gate.select", lambda _: [counted])
    verdicts = gate.try_variants(group, 100, "tiny")
    assert [v.tried for v in verdicts] == [1] * len(group)
    assert len(group) > 1
    assert len(drawn) == 1


def test_an_accumulator_that_is_not_declared_raises_an_alarm() -> None:
    (honest,) = [v for v in VARIANTS if v.name == "gemm-fp22"]
    silent = Variant("silent", "fp22, declared as fp32", honest.concerns, honest.ops)
    assert try_variant(silent, 100, "tiny", only="gemm").alarms


def test_queries_rounded_after_scaling_are_found_unless_the_scale_is_a_power_of_two() -> None:
    """Scaled in fp32 they are honest; in 16 bits scores are off by more than a score in fp32 may be."""
    names = {80: "prefill.3-bfloat16-h5k1d80-full-w129-lse", 64: "plain.37-bfloat16-h4k2d64-lse"}
    statuses = {}
    for head_dim, name in names.items():
        case = suite.families()[f"attention.statistical/{name}"]
        for is_rounded in (False, True):
            op = attention.attention_with(attention.Scheme(scales_q=not is_rounded, rounds_q=is_rounded))
            backend = Variant("q", "q scaled beforehand", ("attention",), {"attention": op}).make()
            statuses[head_dim, is_rounded] = judge(case, backend, SEED).status
    assert statuses.pop((80, True)) is Status.FAIL
    assert set(statuses.values()) == {Status.PASS}


def test_rounding_to_tf32_is_to_nearest_even() -> None:
    unit = 2.0**-10
    x = torch.tensor([1 + unit / 2, 1 + 3 * unit / 2, 1 + unit / 2 + 2**-20, -1 - unit])
    one = torch.ones(1, 1)
    got = torch.stack([product.tf32(v.view(1, 1), one) for v in x]).flatten()
    assert got.tolist() == [1.0, 1 + 2 * unit, 1 + unit, -1 - unit]


def test_truncation_is_toward_zero() -> None:
    x, one = torch.tensor([[1 + 2.0**-5, -1 - 2.0**-5]]), torch.ones(1, 2)
    assert product.truncating(x[:, :1], one[:, :1], bits=5).item() == 1.0
    assert product.truncating(x[:, 1:], one[:, 1:], bits=5).item() == -1.0


@pytest.mark.parametrize(
    "scheme",
    [
        attention.Scheme(block=8, splits=3, order="shuffled"),
        attention.Scheme(block=17),
        attention.Scheme(block=16, splits=16, order="back"),
    ],
    ids=str,
)
def test_attention_in_blocks_is_attention(scheme: attention.Scheme) -> None:
    """Against the reference's one-piece softmax, in fp32, with every feature on."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(6, 4, 16, generator=generator)
    k, v = torch.randn(2, 70, 2, 16, generator=generator)
    sinks, slopes = torch.randn(4, generator=generator), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    rule = Rule(0.25, window=40, softcap=30.0, sinks_H=sinks, alibi_slopes_H=slopes)
    want, want_lse = plain_attend(q, k, v, rule, first_row=64, first_key=0)
    got, lse = attention.attend(q, k, v, rule, scheme, first_row=64, first_key=0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_a_row_that_sees_no_key_gives_zero() -> None:
    q, k, v = torch.randn(2, 2, 8), torch.randn(0, 1, 8), torch.randn(0, 1, 8)
    rule = Rule(1.0, sinks_H=torch.zeros(2))
    out, lse = attention.attend(q, k, v, rule, attention.Scheme(splits=2), first_row=0, first_key=0)
    assert not out.any()
    assert bool((lse == -torch.inf).all())
