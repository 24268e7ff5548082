"""What running a case gave: `Outcome` as the candidate's process reports it, `CaseResult` as it was judged.

    candidate's process ──Outcome (bytes of outputs, faults, implementation)──► judge ──CaseResult──► report, JSON

Both are msgspec structs: they cross a process border or go to a file without pickling anything.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec
import torch

from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding

Implementation = Literal["own", "composite", "fallback", ""]


class Status(enum.StrEnum):
    """How a case ended.

    pass         every lane passes, on the backend's own kernel or a composite with one
    fail         a lane fails, or a defence was hit
    unsupported  supports() said so and the op raised
    fallback     every lane passes, but on the reference ops
    xfail        fails as gaps.toml says (notimpl, notyet)
    xpass        passes although gaps.toml says it fails: counts as a failure
    waived       fails, and gaps.toml says it always will (never)
    mistrusted   the numbers are right, but not how they came about
    crash        the process ended
    timeout      the case did not end in time
    """

    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported"
    FALLBACK = "fallback"
    XFAIL = "xfail"
    XPASS = "xpass"
    WAIVED = "waived"
    MISTRUSTED = "mistrusted"
    CRASH = "crash"
    TIMEOUT = "timeout"


BAD = frozenset({Status.FAIL, Status.XPASS, Status.MISTRUSTED, Status.CRASH, Status.TIMEOUT})
"""Statuses that fail any profile."""


OWN_KERNELS = frozenset({"paged_attention", "gemm"})
"""Ops whose fallback never earns a profile."""


class TensorBytes(msgspec.Struct, frozen=True):
    """A host tensor as plain bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorBytes:
        raw = x.contiguous().reshape(-1).view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8)
        return cls(dtype_name(x.dtype), tuple(x.shape), raw.numpy().tobytes())

    def tensor(self) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(dtype).view(self.shape)


class Outcome(msgspec.Struct, kw_only=True):
    """What the candidate's side saw.

    Attributes:
        implementation: of the case's own op; empty when it never got that far.
        reason: why it isn't the backend's own.
        ops: "op:implementation" of everything that was bound, parts of composites included.
        is_refused: supports() refused and the op raised UnsupportedOp.
        error: what was raised, when something was.
        is_lost: that is, another rank of the group was gone: look there for the cause.
        faults: defences that were hit.
        mistrust: what makes right numbers worthless.
        attempts: outputs by name; one, or two where a non-deterministic op differed.
        seconds: both attempts together.
    """

    implementation: Implementation = ""
    reason: str = ""
    ops: list[str] = []
    is_refused: bool = False
    error: str = ""
    is_lost: bool = False
    faults: list[str] = []
    mistrust: list[str] = []
    attempts: list[dict[str, TensorBytes]] = []
    seconds: float = 0.0

    @property
    def has_fallback_kernel(self) -> bool:
        """Whether a product or paged attention inside a composite runs on the reference."""
        return any(f"{op}:fallback" in self.ops for op in OWN_KERNELS)


def digest_of(outcomes: Sequence[Outcome]) -> str:
    """Of all bits of the first attempts' outputs, of all ranks; empty when there are none."""
    if not any(outcome.attempts for outcome in outcomes):
        return ""
    digest = hashlib.sha256()
    for outcome in outcomes:
        for name, x in sorted(outcome.attempts[0].items() if outcome.attempts else ()):
            digest.update(f"{name} {x.dtype} {x.shape} ".encode())
            digest.update(x.data)
    return digest.hexdigest()


class CaseResult(msgspec.Struct, kw_only=True, omit_defaults=False):
    """One case, judged.

    Attributes:
        share, rms, gain: the worst over all findings, each as a share of its limit; None when none reported it.
        worst_index, worst_output: where `share` was found.
        detail: one line: what failed, or why it is not the backend's own.
        rerun: a command line that runs this case alone, with this seed.
        digest: of the outputs' bits, to compare runs.
        figures: what a build or a measurement gave, by name; empty for cases that compare numbers.
    """

    name: str
    op: str
    axes: dict[str, str]
    lanes: tuple[str, ...]
    status: Status
    implementation: Implementation = ""
    ops: list[str] = []
    detail: str = ""
    share: float | None = None
    rms: float | None = None
    gain: float | None = None
    worst_output: str = ""
    worst_index: tuple[int, ...] = ()
    findings: list[Finding] = []
    seconds: float = 0.0
    rerun: str = ""
    digest: str = ""
    figures: dict[str, float] = {}
