"""Acme's memory and queue, as torch sees them: the device "acme", a PrivateUse1 device written in Python.

    AcmeTensor   sizes, strides and dtype on the host; bytes behind `raw`, which only kernels and copies touch
    QUEUE        one thread does the device's work in order; `launch` returns at once
    allocate     new memory holds 0xFF bytes: NaN as any float, -1 as any integer

Kernels are launched. torch's own ops on acme tensors wait for the queue and then run, but for views, which move no
byte; so the reference ops work here unchanged. A host tensor in an op of acme's is an error, as on any device.
A vendor with a torch backend of its own has all of this already.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("acme")
DEVICE = torch.device("acme:0")
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten._copy_from.default}


class Event(threading.Event):
    done = threading.Event.is_set


class Queue:
    """The device's work, done in order by a thread. What fails there is raised by the next wait."""

    def __init__(self) -> None:
        self.latency_s = 0.0
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._queued = self._done = 0
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="acme", daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        self._queued += 1
        self._work.put(work)

    def event(self) -> Event:
        passed = Event()
        self.put(passed.set)
        return passed

    def wait(self) -> None:
        if self._done < self._queued:
            self.event().wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                work = self._work.get()
                time.sleep(self.latency_s)
                try:
                    work()
                except Exception as error:
                    self._error = self._error or error
                self._done += 1


QUEUE = Queue()


class AcmeTensor(torch.Tensor):
    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> AcmeTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=DEVICE
        )
        self.raw = raw
        return self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _COPIES:
            for x in pytree.tree_leaves((args, kwargs)):
                if isinstance(x, torch.Tensor) and not isinstance(x, cls) and x.dim():
                    raise RuntimeError(f"{func}: a tensor on {x.device} meets tensors on {DEVICE}; copy it first")
        if not func.is_view:
            QUEUE.wait()
        inner = {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs
        result = func(*raw(args), **raw(inner))
        if torch.device(kwargs.get("device") or DEVICE).type != DEVICE.type:
            return result
        result = pytree.tree_map_only(torch.Tensor, AcmeTensor, result)
        return return_and_correct_aliasing(func, args, kwargs, result) if func._schema.is_mutable else result


def raw(tree: Any) -> Any:
    """The same structure with the bytes of each acme tensor in its place."""
    return pytree.tree_map_only(AcmeTensor, lambda x: x.raw, tree)


def launch(kernel: Callable[..., None], *args: Any) -> None:
    """Queue a kernel over the bytes of its arguments."""
    inner = raw(args)
    QUEUE.put(lambda: kernel(*inner))


def allocate(*shape: int, dtype: torch.dtype | None = None) -> AcmeTensor:
    """Poisoned memory."""
    memory = torch.empty(shape, dtype=dtype)
    memory.view(-1).view(torch.uint8).fill_(0xFF)
    return AcmeTensor(memory)


def _copy_from(source: torch.Tensor, target: torch.Tensor, _non_blocking: bool = False) -> torch.Tensor:
    QUEUE.wait()
    raw(target).copy_(raw(source))
    return target


ATEN = torch.library.Library("aten", "IMPL")
ATEN.impl("_copy_from", _copy_from, "PrivateUse1")
ATEN.impl("empty.memory_format", lambda size, dtype=None, **_: allocate(*size, dtype=dtype), "PrivateUse1")
ATEN.impl("empty_strided", lambda *a, dtype=None, **_: AcmeTensor(torch.empty_strided(*a, dtype=dtype)), "PrivateUse1")
