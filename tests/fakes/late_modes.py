"""How torch's ops reach a LateDevice: each is looked at, and queued, done at once, or refused.

op on tensors of the device      queued; its outputs are there at once, poisoned until it has run
view                             done at once: it moves nothing
copy from the host               pinned and non_blocking: queued, and reads the host's memory late; else waits
copy to the host                 waits, unless pinned and non_blocking
a number read back, or a shape that depends on numbers        waits; refused while recording
a host tensor among the device's                              refused, as on a device
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from tests.fakes.late_device import LateDevice

aten = torch.ops.aten


class LateModes:
    """Both modes of torch, entered and left together."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(_Functions(self._device))
        self._stack.enter_context(_Ops(self._device))

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _Functions(TorchFunctionMode):
    """What torch does in Python's reach and without an op: devices' names, and reading memory straight."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from tests.fakes.late_device import DEVICE

        kwargs = kwargs or {}
        if self._device.is_running:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "tensor" and _is_ours(kwargs.get("device")):
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        if not (args and self._device.owns(args[0])):
            return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE
        if name == "numpy":
            raise TypeError("can't convert a device tensor to numpy; copy it to the host first")
        if name == "tolist":
            self._device.wait_for_all("tolist()")
        if name == "cpu" or (name == "to" and _names_host(args[1:], kwargs)):
            host = torch.empty(args[0].shape, dtype=args[0].dtype)
            host.copy_(args[0])
            return host if name == "cpu" else func(host, *args[1:], **kwargs)
        return func(*args, **kwargs)


class _Ops(TorchDispatchMode):
    """The ops that are left when torch has taken all else apart."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = self._device
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        makes = _is_ours(kwargs.get("device"))
        if device.is_running or not (makes or any(map(device.owns, tensors))):
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if makes and func is aten._to_copy.default and not device.owns(args[0]):
            return self._moved(func, args, kwargs)
        if _is_view(func):
            return func(*args, **kwargs)
        args, kwargs = self._on_device(func, args, kwargs)
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            return self._written(func, args, kwargs)
        return self._computed(func, args, kwargs | ({"device": "cpu"} if makes else {}))

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        kinds = self._device.kind(destination), self._device.kind(source)
        is_late = non_blocking and "host" not in kinds
        if kinds[0] != "device":
            if not is_late:
                self._device.wait_for_all("a copy to the host")
                with self._device.running():
                    return destination.copy_(source)
        elif kinds[1] != "device" and not is_late:
            self._device.wait_for_all("a copy from ordinary host memory")
            with self._device.running():
                return destination.copy_(source)
        self._device.submit(torch.Tensor.copy_, destination, source)
        return destination

    def _moved(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """A host tensor's copy on the device."""
        with self._device.running():
            converted = func(*args, **kwargs | {"device": "cpu"}).clone()
        out = self._device.allocate(converted.shape, converted.dtype)
        return self._copy(out, converted)

    def _on_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The arguments, host numbers as they stand now; refuses other host tensors, indices apart."""
        may_index = func.overloadpacket in (aten.index, aten.index_put_, aten.index_put)

        def checked(x: torch.Tensor) -> torch.Tensor:
            if self._device.owns(x):
                return x
            if x.dim() and not may_index:
                raise RuntimeError(f"{func}: expected all tensors to be on the same device; {list(x.shape)} is not")
            with self._device.running():
                return x.clone()

        return pytree.tree_map_only(torch.Tensor, checked, (args, kwargs))

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op that writes into its arguments; which of them it returns, it tells by its schema."""
        self._device.submit(lambda a, k: func(*a, **k), args, kwargs)
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = [given[a.name] for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        count = len(func._schema.returns)
        return None if not count else written[0] if count == 1 else tuple(written)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op with new outputs."""
        shapes = _shapes(func, args, kwargs)
        if shapes is None:
            return self._awaited(func, args, kwargs)
        outputs = pytree.tree_map_only(torch.Tensor, self._like, shapes)
        if not func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            self._device.submit(_into(func), outputs, args, kwargs)
        return outputs

    def _awaited(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op whose result, or the shape of it, only the numbers tell."""
        self._device.wait_for_all(str(func))

        def kept(x: torch.Tensor) -> torch.Tensor:
            return self._device.allocate(x.shape, x.dtype).copy_(x)

        with self._device.running():
            return pytree.tree_map_only(torch.Tensor, kept, func(*args, **kwargs))

    def _like(self, shape: torch.Tensor) -> torch.Tensor:
        with self._device.running():
            span = 1 + sum((n - 1) * s for n, s in zip(shape.shape, shape.stride(), strict=True))
            flat = self._device.allocate((span if shape.numel() else 0,), shape.dtype)
            return flat.as_strided(shape.shape, shape.stride())


def _into(func: Any) -> Callable[..., None]:
    def run(outputs: Any, args: Any, kwargs: Any) -> None:
        found = pytree.tree_leaves(func(*args, **kwargs))
        for output, value in zip(pytree.tree_leaves(outputs), found, strict=True):
            output.copy_(value)

    return run


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """The outputs on the meta device; None where numbers decide."""
    if any("Tensor" not in str(r.type) for r in func._schema.returns):
        return None
    masks = [x for x in pytree.tree_leaves(args[1:]) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
    if func.overloadpacket is aten.index and masks:
        return None
    to_meta = {"device": torch.device("meta")} if "device" in kwargs else {}
    try:
        with torch.utils._python_dispatch._disable_current_modes():
            meta = pytree.tree_map_only(torch.Tensor, _meta, (args, kwargs))
            return func(*meta[0], **meta[1] | to_meta)
    except (NotImplementedError, RuntimeError):
        return None


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _is_ours(device: Any) -> bool:
    if device is None:
        return False
    device = torch.device(device)
    return bool(device.type == "cpu" and device.index == 0)


def _names_host(args: Any, kwargs: Any) -> bool:
    named = [x for x in (*args, kwargs.get("device")) if isinstance(x, str | torch.device)]
    return any(torch.device(x) == torch.device("cpu") for x in named)
