"""What a plug-in does wrong gives one line at the start, naming its package and a remedy; an older plug-in loads."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.core.backend import (
    API_VERSION,
    BackendInfo,
    BackendRegistry,
    KVCacheSpec,
    KVPool,
    MemoryInfo,
    Ops,
    Unsupported,
    hookimpl,
)
from octavo.core.base.errors import BackendUnavailable
from tests.fakes import null_backend
from tests.fakes.null_backend import NullBackend

HERE = __name__
INFO = BackendInfo(
    name="null", api_version=API_VERSION, distribution="octavo-acme", probe=f"{HERE}:probe", factory=f"{HERE}:make"
)
Change = Callable[[NullBackend], None]
change: list[Change] = []


def probe() -> None:
    raise OSError("bad firmware")


def make(_: Any) -> NullBackend:
    backend = NullBackend()
    for each in change:
        each(backend)
    return backend


def declare(**fields: Any) -> Change:
    def apply(backend: NullBackend) -> None:
        backend.capabilities = replace(backend.capabilities, **fields)

    return apply


def have(**attributes: Any) -> Change:
    """Set attributes of the device."""

    def apply(backend: NullBackend) -> None:
        for name, value in attributes.items():
            setattr(backend, name, value)

    return apply


def answers(*given: Any) -> Change:
    """supports() gives these answers in turn, over and over."""

    def apply(backend: NullBackend) -> None:
        turn = iter(range(10**6))
        backend.ops.supports = lambda op, spec: given[next(turn) % len(given or " ")]  # type: ignore[method-assign]

    return apply


def no_bf16(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bfloat16:
        raise RuntimeError("no such unit")
    return torch.empty(shape, dtype=dtype)


def no_fp16_view(pool: KVPool, spec: KVCacheSpec) -> Any:
    if spec.dtype == torch.float16:
        raise KeyError(spec.dtype)
    return types.SimpleNamespace(key_NSKD=None, value_NSKD=None)


def one_dtype_view(pool: KVPool, spec: KVCacheSpec) -> Any:
    key = torch.empty(pool.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim, dtype=torch.float16)
    return types.SimpleNamespace(key_NSKD=key, value_NSKD=key)


LIES = {
    "kv dtype": ([declare(kv_dtypes=(torch.float32, torch.float16)), have(kv_view=no_fp16_view)], "in kv_dtypes"),
    "kv view": ([have(kv_view=one_dtype_view)], "kv_view of torch.float32"),
    "no kv dtype": ([declare(kv_dtypes=())], "no kv_dtypes"),
    "activation": (
        [declare(activation_dtype={torch.float32: torch.bfloat16}), have(empty=no_bf16)],
        "declares torch.bfloat16 .activation_dtype., which its memory does not take: RuntimeError: no such unit",
    ),
    "default dtype": ([declare(default_dtype=torch.bfloat16)], "default_dtype torch.bfloat16, for which"),
    "copies": ([have(to_host=torch.zeros_like)], "do not come back"),
    "device": ([have(device=torch.device("meta"))], "on meta, its memory gives .* on cpu"),
    "buckets": ([declare(dynamic_shapes=False, token_buckets=(16, 4))], "token_buckets .16, 4.; they must be"),
    "no buckets": ([declare(dynamic_shapes=False)], "must be positive and ascending"),
    "both": ([declare(token_buckets=(4,))], "but dynamic_shapes as well"),
    "fp8": ([declare(fp8="e5m2")], "fp8 'e5m2'; it must be one of"),
    "memory": ([have(memory_info=lambda: MemoryInfo(5, 4))], "free bytes must lie between"),
    "name": ([have(name="nul")], "calls itself 'nul'"),
    "method": ([have(compile=None)], "no method compile"),
    "capabilities": ([have(capabilities={})], "are a dict"),
    "supports": ([have(ops=types.SimpleNamespace(gemm=print))], "gemm but no supports"),
    "inherited supports": ([have(ops=type("Inherits", (Ops,), {"embed": print})())], "embed but no supports"),
    "packing": (
        [have(ops=types.SimpleNamespace(gemm=print, supports=lambda op, spec: None))],
        "gemm but no prepare_weight..; it must pack",
    ),
    "no answer": ([answers(True)], "supports.'gemm', …. answers True; it must answer None or Unsupported"),
    "two answers": ([answers(None, Unsupported("not today"))], "answers None, and asked the same again Unsupported"),
    "no supports": ([answers()], "start-up check ended in IndexError"),
    "kv flavour": (
        [declare(fp8="e4m3fnuz", kv_dtypes=(torch.float8_e4m3fn,))],
        "declares torch.float8_e4m3fn, and fp8 'e4m3fnuz', which is another flavour",
    ),
    "no flavour": ([declare(kv_dtypes=(torch.float8_e4m3fnuz,))], "declares torch.float8_e4m3fnuz, and fp8 None"),
    "no memory": ([declare(total_memory_bytes=0)], "total_memory_bytes 0 .*; they must be positive"),
    "no tokens": ([declare(default_max_num_batched_tokens=0)], "batched_tokens 0; they must be positive"),
    "rows of chance": ([declare(batch_invariant=True, deterministic=False)], "batch_invariant, but not determ"),
    "never alone": ([declare(world_sizes=(2, 4))], "world_sizes .2, 4.; they must ascend from 1"),
    "no KV share": ([declare(kv_memory_fraction=0.0)], "kv_memory_fraction 0.0; it must lie above 0"),
    "a KV share of more than all": ([declare(kv_memory_fraction=1.5)], "kv_memory_fraction 1.5; it must lie above 0"),
    "groups": ([declare(world_sizes=(1, 4, 2))], "world_sizes .1, 4, 2.; they must ascend from 1"),
    "zero bucket": ([declare(dynamic_shapes=False, token_buckets=(0, 4))], "must be positive and ascending"),
    "same bucket": ([declare(dynamic_shapes=False, token_buckets=(4, 4))], "must be positive and ascending"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_device_that_is_not_what_it_declares_does_not_start(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, message = LIES[case]
    monkeypatch.setattr(f"{HERE}.change", changes)
    with pytest.raises(BackendUnavailable, match=message) as error:
        BackendRegistry().create(INFO)
    assert "package octavo-acme" in str(error.value)
    assert "upgrade octavo-acme or report it to its authors" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_honest_device_starts_and_is_left_as_it_was() -> None:
    backend: Any = BackendRegistry().create(INFO)
    assert backend.live_bytes == 0
    assert not backend.closed


def test_a_probe_that_raises_names_the_package_and_a_remedy() -> None:
    registry = BackendRegistry()
    registry.add(INFO)
    with pytest.raises(BackendUnavailable, match="bad firmware") as error:
        registry.choose("null")
    assert "reinstall or report octavo-acme" in str(error.value)


def test_a_plugin_of_this_version_loads_when_the_hosts_version_is_raised() -> None:
    raised = BackendRegistry(api_version=API_VERSION + 1)
    raised.register(null_backend, "octavo-null")
    backend = raised.create(raised.choose("null"))
    assert backend.name == "null"
    twice = BackendRegistry(api_version=API_VERSION + 2)
    with pytest.raises(BackendUnavailable, match=r"of package octavo-null was written for .*: upgrade octavo-null"):
        twice.register(null_backend, "octavo-null")


def test_a_plugin_of_a_later_version_names_what_to_upgrade() -> None:
    @hookimpl
    def register_backends(registry: BackendRegistry) -> None:
        registry.add(replace(INFO, api_version=API_VERSION + 1))

    with pytest.raises(BackendUnavailable, match=f"package octavo-acme .* API {API_VERSION + 1}.*: upgrade octavo$"):
        BackendRegistry().register(types.SimpleNamespace(register_backends=register_backends), "octavo-acme")
