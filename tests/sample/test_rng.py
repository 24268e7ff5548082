"""Philox4x32-10 and the uniform numbers made from it."""

import numpy as np
import pytest

from octavo.core.sample.rng import philox4x32, uniform

# From the Random123 library's known answers.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def numbers(seeds, choices, positions):
    return uniform(*(np.array(values, dtype=np.uint64) for values in (seeds, choices, positions)))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    columns = (np.array(words, dtype=np.uint64).reshape(-1, 1) for words in (counter, key))
    assert tuple(philox4x32(*columns)[:, 0].tolist()) == answer


def test_columns_are_independent():
    counters, keys = (np.array([row[i] for row in KNOWN], dtype=np.uint64).T for i in (0, 1))
    assert philox4x32(counters, keys).T.tolist() == [list(row[2]) for row in KNOWN]


def test_in_the_half_open_interval():
    many = numbers([7] * 100_000, [0] * 100_000, range(100_000))
    assert many.dtype == np.float32
    assert many.min() >= 0.0
    assert many.max() < 1.0
    assert abs(many.mean() - 0.5) < 0.005
    histogram, _ = np.histogram(many, 50, (0, 1))
    assert ((histogram - 2000) ** 2 / 2000).sum() < 90  # chi-square, 49 degrees of freedom: p < 0.0005


def test_each_of_seed_choice_and_position_matters():
    assert len({*numbers([1, 2, 2**63, 2**64 - 1], [0] * 4, [0] * 4).tolist()}) == 4
    assert len({*numbers([7] * 4, [0, 1, 2, 3], [0] * 4).tolist()}) == 4
    assert len({*numbers([7] * 4, [0] * 4, [0, 1, 2, 2**33]).tolist()}) == 4


def test_a_number_does_not_depend_on_the_rows_around_it():
    seeds, choices, positions = range(100), [i % 3 for i in range(100)], range(50, 150)
    together = numbers(seeds, choices, positions).tolist()
    alone = [numbers([s], [c], [p]).item() for s, c, p in zip(seeds, choices, positions, strict=True)]
    assert together == alone
