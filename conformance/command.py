"""`octavo conform`, behind its flags: reads what the user asked for, runs it, prints it, and gives the exit code.

    words ──► run | list | verify | matrix | schema        flags ──► --mutants | --variants instead of a run

The report goes to stdout, progress to stderr. core/cli/conform.py declares the flags.
"""

from __future__ import annotations

import argparse
import math
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from octavo.conformance.mutants import listing
from octavo.conformance.mutants.gate import mutants, try_mutant
from octavo.conformance.profiles import LEVELS, PROFILES, UNCASED
from octavo.conformance.progress import ProgressLine
from octavo.conformance.report import html, json, matrix, table
from octavo.conformance.session import Settings, conform, fresh_seed, selected
from octavo.conformance.suite import families, modules_of
from octavo.conformance.variants import run as variants
from octavo.conformance.variants.gate import VARIANTS, Verdict
from octavo.conformance.verify import DEFAULT_SHARE, verify
from octavo.conformance.version import SUITE_VERSION
from octavo.core.base.errors import ConfigError
from octavo.core.base.names import did_you_mean

MET, NOT_MET = 0, 1
DEFAULT_SEEDS = 3
DIFFERENCES_SHOWN = 20


def run(args: argparse.Namespace) -> int:
    """What `octavo conform` does. Raises UserError for a call that is wrong."""
    torch.set_num_threads(1)  # The oracle's tensors are small, and the backend brings its own threads.
    words: list[str] = args.words
    gates = [name for name in ("mutants", "variants") if getattr(args, name)]
    if len(gates) + bool(words) > 1:
        raise ConfigError(f"{' and '.join([*words[:1], *(f'--{g}' for g in gates)])} can't be had at once; give one")
    if gates:
        return _mutants(args) if args.mutants else _variants(args)
    action, rest = (words[0], words[1:]) if words else ("run", [])
    actions: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
        "run": (_run, ()),
        "list": (_list, ()),
        "verify": (_verify, ("REPORT",)),
        "matrix": (_matrix, ("REPORT", "DOCUMENT")),
        "schema": (_schema, ()),
    }
    if action not in actions:
        raise ConfigError(f"unknown action {action!r}{did_you_mean(action, actions)}", field="action")
    function, wanted = actions[action]
    if len(rest) != len(wanted):
        raise ConfigError(f"octavo conform {' '.join((action, *wanted))}: {len(rest)} arguments given", field=action)
    return function(args, *rest)


def settings_of(args: argparse.Namespace) -> Settings:
    """The flags as Settings. Raises ConfigError for a value that can't be."""
    return Settings(
        backend=args.backend,
        profile=args.profile,
        only=args.only,
        seed=fresh_seed() if args.seed is None else _whole(args.seed, "--seed", least=0),
        options=_options(args.backend_option),
        in_process=args.in_process,
        timeout_s=None if args.timeout is None else _positive(args.timeout, "--timeout"),
        strict=args.strict_backend,
        target=_only_of("compile", args.profile, "--target", args.target),
        beside=_beside(args),
        jobs=_jobs(args),
        budget_s=None if args.budget is None else _positive(args.budget, "--budget"),
    )


def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    _refuse_unwritable(args.json, args.html)
    with ProgressLine() as line:
        report = conform(settings, line.case)
    _write(args.json, json.encode(report))
    _write(args.html, html.render(report).encode())
    print(table.render(report))
    return MET if report.verdict.is_met else NOT_MET


def _list(args: argparse.Namespace) -> int:
    if args.profile is None and args.only is None:
        for profile in (*PROFILES.values(), *LEVELS.values()):
            count = sum(map(profile.contains, families(modules_of(profile.name)).values()))
            print(f"{profile.name:<14}{count:>5} cases  {profile.purpose}")
        for profile in UNCASED.values():
            print(f"{profile.name:<14}{'':>11}  {profile.purpose}")
        return MET
    for case in selected(Settings(backend=args.backend, profile=args.profile, only=args.only)):
        print(f"{case.name}  {case.op}  {','.join(case.lanes)}  {','.join(sorted(case.profiles))}".rstrip())
    return MET


def _verify(args: argparse.Namespace, path: str) -> int:
    share = DEFAULT_SHARE if args.share is None else _positive(args.share, "--share")
    if share > 1:
        raise ConfigError(f"--share is {args.share}; give a number above 0 and up to 1", field="share")
    report = json.decode(_read(path), source=path)
    with ProgressLine() as line:
        outcome = verify(report, share, line.case, in_process=args.in_process, jobs=_jobs(args))
    for reason in outcome.uncompared:
        print(f"note: figures were NOT compared, statuses only: {reason}")
    for note in outcome.notes:
        print(f"note: {note}")
    for difference in outcome.differences[:DIFFERENCES_SHOWN]:
        print(difference)
    if len(outcome.differences) > DIFFERENCES_SHOWN:
        print(f"… and {len(outcome.differences) - DIFFERENCES_SHOWN} more differences")
    verdict = "holds" if outcome.holds else f"does NOT hold: {len(outcome.differences)} differ"
    figures = f", the figures of 0, for {len(outcome.uncompared)} reasons" if outcome.uncompared else ""
    print(f"{path}: {outcome.replayed} of {len(report.cases)} cases replayed{figures}; the report {verdict}")
    return MET if outcome.holds else NOT_MET


def _matrix(args: argparse.Namespace, path: str, document: str) -> int:
    report = json.decode(_read(path), source=path)
    text = _read(document).decode()
    Path(document).write_text(matrix.replaced(text, report, document), encoding="utf-8")
    return MET


def _schema(args: argparse.Namespace) -> int:
    print(msgspec.json.format(msgspec.json.encode(json.schema()), indent=1).decode())
    return MET


def _mutants(args: argparse.Namespace) -> int:
    seed = settings_of(args).seed
    _refuse_unwritable(args.json)
    started, verdicts = time.monotonic(), []
    for mutant in mutants().values():
        verdict = try_mutant(mutant, seed)
        verdicts.append(verdict)
        print(listing.render(verdict), flush=True)
    print("\n".join(listing.conclusion(verdicts, time.monotonic() - started, seed)))
    _write(args.json, _gate_json(verdicts, seed=seed))
    return MET if verdicts and all(verdict.is_caught for verdict in verdicts) else NOT_MET


def _variants(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    _refuse_unwritable(args.json)
    count = DEFAULT_SEEDS if args.seeds is None else _whole(args.seeds, "--seeds", least=1)
    report = variants.begun(settings.seed, count, settings.profile_name, settings.only)
    # Until it is whole a report stands beside the one that it will replace; a run that was left is taken up from there.
    unfinished = None if args.json is None or _is_special(args.json) else f"{args.json}.unfinished"
    if unfinished is not None and Path(unfinished).is_file():
        report = variants.taken_up(_read(unfinished), report)
    started = time.monotonic()
    for so_far in variants.run(report, settings.jobs or 1, _tell_variant):
        report = so_far
        _write(unfinished, variants.encode(report))
    _write(args.json, variants.encode(report))
    if unfinished is not None:
        Path(unfinished).unlink(missing_ok=True)
    alarms = sum(len(verdict.alarms) for verdict in report.verdicts)
    tried = sum(verdict.tried for verdict in report.verdicts)
    print(f"{alarms} false alarms in {tried} cases of {len(VARIANTS)} variants x {count} seeds, ", end="")
    print(f"{time.monotonic() - started:.0f} s")
    return MET if tried and not alarms else NOT_MET


def _tell_variant(verdict: Verdict) -> None:
    said = "" if verdict.is_honest else f"  FALSE ALARM {verdict.alarms[0]}"
    print(f"seed {verdict.seed}  {verdict.variant:<24}{verdict.tried:>5} cases{said}", flush=True)


def _gate_json(verdicts: Sequence[msgspec.Struct], **what: int | str) -> bytes:
    document: dict[str, Any] = what | {"suite_version": SUITE_VERSION, "verdicts": verdicts}
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def _refuse_unwritable(*paths: str | None) -> None:
    """Before a long run: raises ConfigError for a file that could not be written after it. What is there stays."""
    for path in filter(None, paths):
        is_new = not Path(path).exists()
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with Path(path).open("ab"):
                pass
            if is_new:
                Path(path).unlink()
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}; name another file") from None


def _write(path: str | None, data: bytes) -> None:
    if path is None:
        return
    try:
        if _is_special(path):
            Path(path).write_bytes(data)
        else:
            _replace(Path(path), data)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}; name another file") from None


def _replace(path: Path, data: bytes) -> None:
    """Write whole, or not at all: a full disk or Ctrl-C leaves what was there before, and nothing beside it."""
    # A name of this call's own: of two runs that write one report the later wins, whole.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _is_special(path: str) -> bool:
    """Whether it is no file and none to be: /dev/stdout, a pipe, where nothing can be replaced."""
    return Path(path).exists() and not Path(path).is_file()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None


def _beside(args: argparse.Namespace) -> json.Report | None:
    path = _only_of("perf", args.profile, "--beside", args.beside)
    return None if path is None else json.decode(_read(path), source=path)


def _only_of(profile: str, given: str | None, flag: str, value: str | None) -> str | None:
    if value is not None and given != profile:
        raise ConfigError(f"{flag} belongs to --profile {profile}; add that or leave {flag} out", field=flag)
    return value


def _jobs(args: argparse.Namespace) -> int | None:
    if args.jobs is not None and (args.mutants or args.profile == "perf"):
        what = "--mutants" if args.mutants else "--profile perf, which must have the device for itself,"
        raise ConfigError(f"--jobs can't be had with {what}; leave it out", field="jobs")
    return None if args.jobs is None else _whole(args.jobs, "--jobs", least=1)


def _options(words: Sequence[str]) -> dict[str, str]:
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"--backend-option is {word!r}; give KEY=VALUE", field="backend_option")
        options[key] = value
    return options


def _whole(text: str, flag: str, *, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(f"{flag} is {text!r}; give a whole number from {least}", field=flag)
    return int(text)


def _positive(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{flag} is {text!r}; give a number above 0", field=flag)
    return value
