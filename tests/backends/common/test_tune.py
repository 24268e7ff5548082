"""The search for launch parameters, against a device that is a formula, and one that a parameter breaks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch

from octavo.backends.common.device import GpuBackend
from octavo.backends.common.tune import Found, as_toml, neighbours, retuned, search, tune
from octavo.backends.common.tune_bench import Bench, DeviceTrial, Subject
from octavo.backends.common.tune_process import Lost, Sandbox
from octavo.backends.common.tuning import Entry, PinnedTable, TuningTable, read_entries
from octavo.core.backend import BackendRegistry, KVCache, KVCacheSpec
from octavo.core.backend.workloads import Tensors, Workload, attention, products, rows
from octavo.core.base.errors import BackendUnavailable, ConfigError
from octavo.core.cli.tune import open_device
from tests.fakes import sticky_device
from tests.fakes.sticky_device import formula

ENTRIES = [
    Entry("gemm", {"m": (1, 16)}, {"BLOCK": 16}, {"num_warps": 2, "num_stages": 2}, "model"),
    Entry("gemm", {}, {"BLOCK": 16}, {"num_warps": 2, "num_stages": 2}, "model"),
]


@dataclass
class FormulaTrial:
    m: int
    wrong_from: int = 1 << 30
    broken_from: int = 1 << 30
    is_level: bool = False

    @property
    def name(self) -> str:
        return f"m{self.m}"

    def call(self, table: TuningTable) -> torch.Tensor:
        block = table.pick("gemm", m=self.m).tile["BLOCK"]
        if block >= self.broken_from:
            raise RuntimeError("out of shared memory")
        return torch.ones(4) * (2 if block >= self.wrong_from else 1)

    def seconds(self, table: TuningTable) -> float:
        entry = table.pick("gemm", m=self.m)
        return 1.0 - 1e-3 * entry.tile["BLOCK"] / 16 if self.is_level else formula(entry)

    def release(self) -> None:
        return


def searched(trial: FormulaTrial, only: str | None = None) -> list[Found]:
    bench = Bench(Subject("none", "a formula", (), ()), TuningTable(ENTRIES), [trial], lambda: None)
    return [found for _, found in tune(bench, only=only)]


def test_each_entry_is_searched_for_the_workloads_that_it_serves() -> None:
    found = searched(FormulaTrial(8))
    first, last = found
    assert first.entry.constants == {"BLOCK": 64, "num_warps": 8, "num_stages": 4}
    assert first.gain == pytest.approx(13.0)
    assert "a formula: 13.00x of BLOCK 16, num_warps 2, num_stages 2, over m8" in first.entry.why
    assert last.entry is ENTRIES[1]
    assert last.workloads == ()


@pytest.mark.parametrize("fault", ["wrong_from", "broken_from"])
def test_parameters_with_other_numbers_or_errors_are_passed_over(fault: str) -> None:
    (first, _) = searched(FormulaTrial(8, **{fault: 64}))
    assert first.entry.constants == {"BLOCK": 32, "num_warps": 8, "num_stages": 4}


def test_nothing_is_changed_for_less_than_the_noise() -> None:
    (first, _) = searched(FormulaTrial(8, is_level=True))
    assert first.entry is ENTRIES[0]


@pytest.mark.parametrize(
    ("name", "value", "steps"),
    [
        ("PER_UNIT", 1, (2,)),
        ("GROUP_M", 8, (4, 16)),
        ("SWAP", 1, (0,)),
        ("LIBRARY", 0, (1,)),
        ("num_stages", 1, (2,)),
        ("PROMOTE", 32, ()),
    ],
)
def test_no_value_is_tried_that_means_nothing(name: str, value: int, steps: tuple[int, ...]) -> None:
    entry = Entry("gemm", {}, {name: value}, {}, "model")
    assert tuple(neighbour.tile[name] for neighbour in neighbours(entry)) == steps


def test_only_the_kernels_asked_for_are_searched() -> None:
    assert searched(FormulaTrial(8), only="attention") == []


def test_what_is_written_reads_back_the_same() -> None:
    entry = Entry("gemm", {"m": (1, 16), "dtype": "bfloat16"}, {"BLOCK": 16}, {"num_warps": 2}, 'µs "quoted"', "x.toml")
    bare = Entry("gemm", {}, {}, {}, "all", "x.toml")
    text = as_toml([entry, bare], "Measured.\nTwice.")
    assert text.startswith("# Measured.\n# Twice.\n")
    assert read_entries("x.toml", text) == [entry, bare]


def test_what_breaks_the_device_ends_a_process_and_the_search_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of the first entry BLOCK 32 stands between 16 and the best; the last one breaks the device as it stands."""
    files: list[tuple[str, str]] = []
    found: list[Found] = []
    search(sticky_device.make_bench, only=None, on_found=found.append, write=lambda *file: files.append(file))
    assert [f.entry.constants for f in found] == [
        {"BLOCK": 16, "num_warps": 8, "num_stages": 4},
        {"BLOCK": 64, "num_warps": 8, "num_stages": 4},
        sticky_device.ENTRIES[2].constants,
    ]
    assert [name for name, _ in files] == ["gemm.toml", "gemm.toml"]  # after each entry
    first, second = (read_entries(*file) for file in files)
    assert [entry.constants for entry in first] == [found[0].entry.constants, sticky_device.ENTRIES[1].constants]
    assert [entry.constants for entry in second] == [f.entry.constants for f in found[:2]]
    assert caplog.text.count("BLOCK 32, num_warps 2, num_stages 2 is passed over: the device was lost") == 1
    assert caplog.text.count("BLOCK 32") == 2  # of two entries, not once for each step of the search
    assert "workload norm-m1 is left out: as the table has it, the device was lost" in caplog.text


@pytest.fixture
def emulated() -> Iterator[GpuBackend]:
    registry = BackendRegistry.discover()
    backend = cast(GpuBackend, registry.create(registry.choose("cuda")))
    yield backend
    backend.close()


def small_workloads() -> list[Workload]:
    """A product that keeps its weights, attention whose plan hangs on the table, a norm that adds to its residual."""
    product = products._gemm("small", torch.float32, products.Product(4, 64, 256, products.INT4))
    heads, batch = attention.Heads(2, 1, 32), attention.Batch(2, 1, 48)
    return [product, attention._paged("small", heads, batch, torch.float32), rows._norm(torch.float32, 2)]


@pytest.mark.parametrize("workload", small_workloads(), ids=lambda w: w.op)
def test_a_trial_has_the_same_numbers_under_every_table(emulated: GpuBackend, workload: Workload) -> None:
    def kv_cache(spec: KVCacheSpec, num_blocks: int) -> KVCache:
        return emulated.kv_view(emulated.allocate_kv_pool(num_blocks, spec.block_bytes), spec)

    table = emulated.gpu.tuning
    trial = DeviceTrial(emulated, workload, Tensors(emulated.device, torch.float32, kv_cache))
    watched = PinnedTable(table)
    first = trial.call(watched)
    assert first.isfinite().all()
    assert first.std() > 0
    assert torch.equal(trial.call(table), first)
    for entry in watched.given:
        other = replace(entry, options={**entry.options, "num_stages": 1})
        pinned = PinnedTable(table, other, instead_of=entry)
        assert torch.equal(trial.call(pinned), first)
        assert pinned.was_taken
    trial.release()
    assert torch.equal(trial.call(table), first)


def test_an_emulated_device_is_not_tuned() -> None:
    with pytest.raises(ConfigError, match=r"backend cuda runs on .*, emulated: there is no device to measure"):
        retuned(functools.partial(open_device, "cuda", {}), only=None, on_found=lambda _: None, write=lambda *_: None)


def test_a_process_that_hangs_is_killed_and_the_next_answers() -> None:
    entry = sticky_device.ENTRIES[1]
    with Sandbox(sticky_device.make_bench, answer_s=30.0) as sandbox:
        with pytest.raises(Lost, match="ended with 139"):
            sandbox.seconds(1, replace(entry, options={**entry.options, "num_warps": 16}), [2])
        assert sandbox.seconds(1, entry, [2]) == pytest.approx(formula(entry))
        sandbox._answer_s = 0.5
        with pytest.raises(Lost, match=r"no answer within 0\.5 s; its process was killed"):
            sandbox.seconds(1, replace(entry, options={**entry.options, "num_stages": 6}), [2])
        assert sandbox.starts == 2


def test_where_there_is_no_device_the_reason_comes_through() -> None:
    with pytest.raises(BackendUnavailable, match="no device is here; plug one in") as error:
        Sandbox(sticky_device.make_none)
    assert error.value.field == "backend"
