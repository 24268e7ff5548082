"""The thread pool, seen through kernels: right with any threads and callers, after fork, and quiet when idle."""

import os
import threading
import time

import pytest
import torch

from octavo.backends.cpu import native
from octavo.backends.cpu.gemm import GemmArgs, GemmOps
from octavo.backends.cpu.tape import recorded
from octavo.core.backend.specs import WeightSpec
from octavo.core.base.errors import ConfigError


class Product:
    """A product large enough for every thread to get tiles, and its right answer."""

    def __init__(self, context, seed=0):
        generator = torch.Generator().manual_seed(seed)
        plain = torch.randn(400, 64, generator=generator)
        self.x = torch.randn(5, 64, generator=generator)
        self.ops = GemmOps(context)
        self.weight = self.ops.prepare_weight(WeightSpec(400, 64, torch.float32))
        self.weight.place(plain, 0)
        self.right = self.compute()
        torch.testing.assert_close(self.right, self.x @ plain.T, rtol=1e-4, atol=1e-4)

    def compute(self, out=None):
        out = torch.empty(5, 400) if out is None else out
        self.ops.gemm(self.x, self.weight, out=out)
        return out

    def fails(self, times):
        return sum(not torch.equal(self.compute(), self.right) for _ in range(times))


def threads_of_process():
    return len(os.listdir("/proc/self/task"))


def run_in_child(work):
    """Run work() in a forked child; True when it returned a true value within ten seconds."""
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            ok = bool(work())
        finally:
            os._exit(0 if ok else 1)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.002)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8, 33])
def test_any_number_of_threads_gives_the_answer(make_context, num_threads):
    assert Product(make_context(num_threads)).fails(200) == 0


def test_engines_with_different_thread_counts_work_side_by_side(make_context):
    products = [Product(make_context(num_threads), seed=num_threads) for num_threads in (1, 2, 4)]
    failures = []
    workers = [threading.Thread(target=lambda p=p: failures.append(p.fails(200))) for p in products]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == [0, 0, 0]


def test_callers_of_one_context_take_turns(make_context):
    product = Product(make_context(3))
    failures = []
    workers = [threading.Thread(target=lambda: failures.append(product.fails(200))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == [0, 0, 0]


def test_threads_start_with_the_first_job_and_end_with_the_context(make_context):
    before = threads_of_process()
    context = make_context(4)
    assert threads_of_process() == before
    product = Product(context)
    product.compute()
    assert threads_of_process() == before + 3
    context.close()
    context.close()
    assert threads_of_process() == before


def test_idle_threads_use_no_processor_time(make_context):
    product = Product(make_context(4))
    product.compute()
    time.sleep(0.05)
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.05
    assert product.fails(1) == 0  # and they wake again


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_builds_its_own_threads(make_context):
    product = Product(make_context(3))
    shared = torch.zeros(5, 400).share_memory_()

    def child():
        product.compute(shared)
        return threads_of_process() == 3

    assert run_in_child(child)
    assert torch.equal(shared, product.right)
    assert product.fails(20) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_while_another_thread_is_inside_a_kernel(make_context):
    product = Product(make_context(3))
    stop = threading.Event()
    failures = []

    def keep_busy():
        while not stop.is_set():
            failures.append(product.fails(10))

    busy = threading.Thread(target=keep_busy)
    busy.start()
    out = torch.empty(5, 400)
    try:
        assert all(run_in_child(lambda: product.compute(out) is out) for _ in range(10))
    finally:
        stop.set()
        busy.join()
    assert not any(failures)


def test_recorded_calls_replay_in_order(make_context, library):
    context = make_context(2)
    product = Product(context)
    kernel = library.kernel("gemm", GemmArgs)
    first, second = torch.zeros(5, 400), torch.zeros(5, 400)

    def fields(out, x_rows):
        return (
            context.handle, product.x.data_ptr(), product.weight.pointer, 0, 0, out.data_ptr(), x_rows, 400, 64,
            64, 0, 400, 0, 0,
        )  # fmt: skip

    library.replay(recorded([kernel.record(*fields(first, 5)), kernel.record(*fields(second, 2))]))
    assert torch.equal(first, product.right)
    assert torch.equal(second[:2], product.right[:2])
    assert not second[2:].any()
    second.zero_()
    with pytest.raises(native.NativeError):
        library.replay(recorded([kernel.record(*fields(first, -1)), kernel.record(*fields(second, 5))]))
    assert not second.any()


@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_an_impossible_thread_count_is_refused(library, num_threads):
    with pytest.raises(ConfigError, match="num_threads"):
        native.NativeContext(library, num_threads)


def test_the_instruction_set_can_be_forced(library, isa, monkeypatch):
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    context = native.NativeContext(library, 1)
    assert context.isa == isa
    context.close()


def test_an_instruction_set_that_cannot_run_is_refused(library, monkeypatch):
    monkeypatch.setenv(native.ISA_VARIABLE, "neon" if "avx2" in library.supported_isas() else "avx2")
    with pytest.raises(ConfigError, match="this machine runs"):
        native.NativeContext(library, 1)


def test_contexts_leak_nothing(library):
    """Fifty contexts with threads and scratch memory come and go; threads and memory stay."""

    def cycle():
        context = native.NativeContext(library, 3)
        Product(context)
        context.close()

    def resident_pages():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1])

    for _ in range(10):
        cycle()
    threads, pages = threads_of_process(), resident_pages()
    for _ in range(50):
        cycle()
    assert threads_of_process() == threads
    assert resident_pages() - pages < 1024
