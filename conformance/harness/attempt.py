"""Runs a case on a live backend, twice, each time under another poison, and looks for what no oracle is needed to see.

    attempt 1: NaN in outputs, gaps, unused KV      ┐ outputs must agree bit for bit, unless the backend declares
    attempt 2: huge finite values in the same       ┘ itself non-deterministic
        │
        └ the weights that attempt 1 packed and used: what a product did to its weight shows

Faults of an attempt: guard bands, gaps or inputs changed; elements never written; non-finite or all-zero outputs; an
op that raises; outputs that still change after the device said it was done. The oracle comes later, elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial

import torch

from octavo.conformance.case import COMMUNICATOR, Case
from octavo.conformance.draw import Draw, case_seed
from octavo.conformance.facts import Facts
from octavo.conformance.harness.bench import Bench
from octavo.conformance.harness.poison import Poison, same_bits
from octavo.conformance.harness.refusal import answers, ran_all_the_same, wavering
from octavo.conformance.harness.result import OWN_KERNELS, Outcome, TensorBytes
from octavo.conformance.trial import Role, Trial
from octavo.core.backend import Communicator, DeviceBackend, PackedWeight, Unsupported
from octavo.core.base.errors import RankLost, UnsupportedOp

WATCHED = 2
WATCH_S = 0.03
"""The outputs of one case in so many are looked at for so long, after the device said that its work was done."""


def execute(
    case: Case,
    backend: DeviceBackend,
    seed: int,
    *,
    strict: bool = False,
    options: Mapping[str, str] | None = None,
    rank: int = 0,
    address: str = "",
) -> Outcome:
    """Both attempts of a case. Never raises for what a backend does.

    Args:
        strict: no fallback to the reference ops.
        options: with which the backend was made.
        rank, address: this backend's place in the case's group, and where that meets.
    """
    outcome = Outcome()
    started = time.perf_counter()
    seen: list[dict[str, torch.Tensor]] = []
    try:
        facts = Facts.of(backend.capabilities)
        trial = case.build(Draw(seed, case.name, case.summed_as, facts, rank=rank))
        with _group(case, backend, rank, address) as group:
            make = partial(Bench, trial, backend, strict=strict, options=options, group=group)
            outputs, weights = _attempt(case, trial, make, Poison.NAN, outcome)
            seen.append(outputs)
            make = partial(make, weights=weights)
            watch_s = WATCH_S if is_watched(case, seed) else 0.0
            outputs, _ = _attempt(case, trial, make, Poison.HUGE, outcome, watch_s)
            seen.append(outputs)
    except Exception as error:
        _record(case, error, outcome)
        if outcome.is_refused and case.world == 1 and ran_all_the_same(case, trial, backend):
            outcome.is_refused = False
            outcome.error = (
                f"supports() refused ({outcome.reason}), and the op, called all the same, ran: it must raise"
            )
    if len(seen) == len(Poison):
        _compare(seen, outcome, is_deterministic=backend.capabilities.deterministic)
    outcome.attempts = [{name: TensorBytes.of(x) for name, x in outputs.items()} for outputs in seen]
    outcome.seconds = time.perf_counter() - started
    return outcome


def is_watched(case: Case, seed: int) -> bool:
    """Whether a late write is waited for. By the seed, so that a case reruns alike."""
    return case_seed(seed, case.name) % WATCHED == 0


@contextmanager
def _group(case: Case, backend: DeviceBackend, rank: int, address: str) -> Iterator[Communicator | None]:
    """The case's group while it runs. A rank that fails leaves it, so that the others don't wait in vain."""
    if case.world == 1:
        yield None
        return
    with closing(backend.communicator(rank, case.world, address)) as group:
        if (group.rank, group.world_size) != (rank, case.world):
            raise ValueError(f"the communicator calls itself rank {group.rank} of {group.world_size}")
        yield group


def _attempt(
    case: Case, trial: Trial, make: Callable[[Poison], Bench], poison: Poison, outcome: Outcome, watch_s: float = 0.0
) -> tuple[dict[str, torch.Tensor], dict[str, PackedWeight]]:
    """What came out, and the weights, which were used."""
    bench = make(poison)  # The only name of it: pools, which may be huge, must be gone before the next attempt's come.
    said: list[Unsupported | None] = []
    if case.spec is not None:
        said += answers(bench.backend, case.op, bench.localized(case.spec))
        bench.op(case.op, case.spec)
        _note_choice(case, bench, outcome)
    try:
        with torch.no_grad():
            trial.run(bench)
    finally:
        if case.op == COMMUNICATOR:
            outcome.implementation = "own"
        elif case.spec is None:  # Models bind their ops while they run.
            _note_level(bench, outcome)
    if case.spec is not None:
        said += answers(bench.backend, case.op, bench.localized(case.spec))
    outputs, faults = bench.read()
    time.sleep(watch_s)
    again, late = bench.read()
    faults += [fault for fault in late if fault not in faults]
    for name in outputs:
        if not bool(same_bits(outputs[name], again[name]).all()):
            outcome.mistrust.append(f"{name} still changed after the device said that all its work was done")
    faults += _suspicious(trial, outputs) + wavering(said)
    outcome.faults += [f"{fault} (under {poison} poison)" for fault in faults]
    return outputs, bench.weights


def _note_choice(case: Case, bench: Bench, outcome: Outcome) -> None:
    report = bench.opset.report()
    outcome.ops = [f"{choice.op}:{choice.implementation}" for choice in report]
    for choice in report:
        if choice.op == case.op:
            outcome.implementation, outcome.reason = choice.implementation, choice.reason


def _note_level(bench: Bench, outcome: Outcome) -> None:
    """Above the ops: everything that was bound; the whole is as good as what must be the backend's own."""
    choices = (*bench.opset.report(), *bench.ran)
    outcome.ops = sorted({f"{choice.op}:{choice.implementation}" for choice in choices})
    missing = [op for op in sorted(OWN_KERNELS) if f"{op}:fallback" in outcome.ops]
    outcome.implementation = "fallback" if missing else "composite"
    outcome.reason = f"{' and '.join(missing)} run on the reference" if missing else ""


def _record(case: Case, error: Exception, outcome: Outcome) -> None:
    """UnsupportedOp is a refusal only where supports() refused as well; everything else is an error."""
    is_refusal = isinstance(error, UnsupportedOp) and case.spec is not None
    outcome.is_refused = is_refusal and outcome.implementation in ("fallback", "composite")
    lied = is_refusal and not outcome.is_refused
    prefix = "supports() accepted the spec, and the op refused it: " if lied else ""
    outcome.is_lost = isinstance(error, RankLost)
    outcome.error = f"{prefix}{type(error).__name__}: {error}"


def _suspicious(trial: Trial, outputs: dict[str, torch.Tensor]) -> list[str]:
    """Outputs that no honest op gives, whatever the oracle says."""
    faults = []
    for tensor in trial.tensors:
        if tensor.role is Role.GIVEN or not outputs[tensor.name].numel():
            continue
        x = outputs[tensor.name]
        values = x.to(torch.float64) if x.dtype.is_floating_point else x
        if tensor.is_finite and x.dtype.is_floating_point and (bad := int((~values.isfinite()).sum())):
            faults.append(f"{tensor.name}: {bad} of {x.numel()} values are not finite")
        if not tensor.may_be_zero and not bool(values.any()):
            faults.append(f"{tensor.name}: all zero")
    return faults


def _compare(seen: list[dict[str, torch.Tensor]], outcome: Outcome, *, is_deterministic: bool) -> None:
    """Bitwise agreement. The second attempt's outputs are kept only where they may differ."""
    first, second = seen
    differs = False
    for name, x in first.items():
        same = same_bits(x, second[name])
        if not bool(same.all()):
            differs = True
            if is_deterministic:
                at = tuple((~same).nonzero()[0].tolist())
                outcome.faults.append(
                    f"{name}: {int((~same).sum())} of {x.numel()} elements differ between two runs that differ only in "
                    f"what must not be read, first at {at}"
                )
    if not differs:
        seen.pop()
