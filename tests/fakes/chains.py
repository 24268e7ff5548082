"""What the tests' model writes, in SmolLM2's tokens."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.chain_model import save_chain_model

VOCAB_SIZE = 49152
END = 2
"""<|im_end|>"""

LETTERS = [35542, 33203, 23960, 10907, END]
"""ABC DEF GH ' ok' and the end: the prompt "ABC" is continued by "DEFGH ok"."""

CHARACTERS = [6044, 143, 233, 10813, 242, 218, 24098, END]
"""Go, then the two tokens of ď, the three of 😀, ' exaggerated', the end."""

REPLY = [198, 38699, 17, END]
"""What a chat prompt ends with, then ' Hello', '!', the end."""

COUNTING = [44449, 582, 827, 1296, 1876, 44449]
"""Loop one two three four Loop ..., for ever."""

FOREVER = {"max_tokens": 2000, "temperature": 0}
"""With the prompt "Loop": thousands of tokens, seconds of work."""


def save_chains(directory: Path) -> Path:
    """Write the model."""
    return save_chain_model(directory, [LETTERS, CHARACTERS, REPLY, COUNTING], VOCAB_SIZE, END)
