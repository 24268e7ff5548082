"""All variants over many seeds, on several processes, written as it goes and taken up again where it was left.

    (seed, variants of the same cases) ──► processes ──► Verdicts ──► report so far, after each

A report of another suite, profile, or list of cases (the must-pass hash) is not taken up but begun anew.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import msgspec
import torch

from octavo.conformance.profiles import profile_named
from octavo.conformance.variants.gate import VARIANTS, Verdict, cases_of, groups, try_variants
from octavo.conformance.version import SUITE_VERSION, must_pass_hash


class Report(msgspec.Struct, kw_only=True):
    """What was run, and what came of it.

    Attributes:
        seed, seeds: the first, and how many.
        only: to which op, case or prefix it was narrowed; empty for all.
        must_pass: hash of the cases that were run.
        verdicts: in the order of seeds and variants.
    """

    seed: int
    seeds: int
    profile: str
    only: str = ""
    suite_version: int = SUITE_VERSION
    must_pass: str = ""
    verdicts: list[Verdict] = []

    @property
    def is_whole(self) -> bool:
        return len(self.verdicts) == self.seeds * len(VARIANTS)


def begun(seed: int, seeds: int, profile: str, only: str | None) -> Report:
    """A report without verdicts."""
    return Report(seed=seed, seeds=seeds, profile=profile, only=only or "", must_pass=current_hash(profile))


def current_hash(profile: str) -> str:
    """Of the cases that variants are tried on in this suite; a profile's other cases don't change it."""
    cases = {case.name: case for group in groups() for case in cases_of(group[0], profile)}
    return must_pass_hash(profile_named("full"), cases.values())


def encode(report: Report) -> bytes:
    """The file's bytes."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def taken_up(old: bytes, new: Report) -> Report:
    """`new` with the verdicts of a run of the same; without them if it is another's, or no report."""
    try:
        known = msgspec.json.decode(old, type=Report)
    except msgspec.DecodeError:
        return new
    return known if msgspec.structs.replace(known, verdicts=[]) == new else new


def run(report: Report, jobs: int, tell: Callable[[Verdict], None]) -> Iterator[Report]:
    """Every verdict that is missing; the report so far after those of a group."""
    done = {(verdict.seed, verdict.variant) for verdict in report.verdicts}
    todo = []
    for seed in range(report.seed, report.seed + report.seeds):
        left = [[v.name for v in group if (seed, v.name) not in done] for group in groups()]
        todo += [(names, seed) for names in left if names]
    order = {variant.name: index for index, variant in enumerate(VARIANTS)}
    for found in _verdicts(todo, report, jobs):
        for verdict in found:
            tell(verdict)
        verdicts = sorted([*report.verdicts, *found], key=lambda v: (v.seed, order[v.variant]))
        report = msgspec.structs.replace(report, verdicts=verdicts)
        yield report


def _verdicts(todo: Sequence[tuple[list[str], int]], report: Report, jobs: int) -> Iterator[list[Verdict]]:
    if jobs == 1:
        yield from (_some(names, seed, report.profile, report.only) for names, seed in todo)
        return
    context = multiprocessing.get_context("spawn")  # A fork would copy torch's threads in the middle of things.
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(_some, names, seed, report.profile, report.only) for names, seed in todo]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _some(names: list[str], seed: int, profile: str, only: str) -> list[Verdict]:
    return try_variants([v for v in VARIANTS if v.name in names], seed, profile, only=only or None)
