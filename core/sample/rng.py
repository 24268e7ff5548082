"""One uniform number per (seed, choice, position), from a counter instead of a state.

    counter  [ position, 0, choice, 0 ]  ──Philox4x32-10, key = the seed's two halves──▶ 4 words; the first is used

Because nothing is remembered between draws, a token's random number doesn't depend on who shares the batch, on
preemption, or on the order of execution.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def philox4x32(counter_4R: npt.NDArray[np.uint64], key_2R: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10, over columns.

    Shapes: counter [4, R], key [2, R], 32-bit words held in uint64; returns [4, R] alike.
    """
    even, odd = counter_4R[0::2], counter_4R[1::2]
    key = key_2R
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        high, low = product >> _WORD_BITS, product & _LOW_WORD
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
        key = (key + _KEY_STEPS) & _LOW_WORD
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(
    seed_R: npt.NDArray[np.uint64], choice_R: npt.NDArray[np.uint64], position_R: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float32]:
    """Numbers in [0, 1), multiples of 2**-24.

    Args:
        seed_R: any 64 bits.
        choice_R: which of a request's n choices, below 2**32.
        position_R: which of the choice's output tokens, from 0.
    """
    counter = np.stack([position_R & _LOW_WORD, position_R >> _WORD_BITS, choice_R, np.zeros_like(choice_R)])
    word = philox4x32(counter, np.stack([seed_R & _LOW_WORD, seed_R >> _WORD_BITS]))[0]
    number_R: npt.NDArray[np.float32] = (word >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
    return number_R
