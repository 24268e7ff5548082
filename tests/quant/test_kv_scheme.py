"""`kv_cache_scheme`: what is taken, and what is passed over with its reason while the weights load all the same."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.quant.kv_scheme import KVScheme, read_kv_scheme

FLOAT = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize(
    ("value", "scheme"),
    [
        (None, None),
        ({}, None),
        ("static", KVScheme()),
        (FLOAT, KVScheme()),
        (FLOAT | {"strategy": "attn_head", "observer": "minmax"}, KVScheme()),
        (FLOAT | {"type": "int"}, KVScheme(is_float=False)),
    ],
)
def test_what_is_taken(value: Any, scheme: KVScheme | None) -> None:
    assert read_kv_scheme({"quant_method": "fp8", "kv_cache_scheme": value}) == scheme


def test_a_config_without_one_says_nothing() -> None:
    assert read_kv_scheme({"quant_method": "fp8"}) is None
    assert read_kv_scheme("fp8") is None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (FLOAT | {"num_bits": 4}, "num_bits is 4"),
        (FLOAT | {"symmetric": False}, "zero points"),
        (FLOAT | {"strategy": "channel"}, "strategy is 'channel'"),
        (FLOAT | {"rotation": "hadamard"}, "rotation is 'hadamard'"),
        ("per-moon", "'per-moon' is not known"),
        ([8], "no object"),
    ],
)
def test_what_is_not_implemented_is_named(value: Any, says: str) -> None:
    scheme = read_kv_scheme({"kv_cache_scheme": value})
    assert scheme is not None
    assert says in scheme.refusal


def test_the_codes_and_the_option_of_a_scheme() -> None:
    assert (KVScheme().option, KVScheme().largest_code) == ("fp8", 448.0)
    assert (KVScheme(is_float=False).option, KVScheme(is_float=False).largest_code) == ("int8", 127.0)
