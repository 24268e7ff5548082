"""Workloads of token ids: what `octavo bench` and the peer scripts of tests/bench/peers serve.

    {"name": "w2", "max_seqs": 32, "requests": [{"prompt": [101, 7, …], "new": 64}, …]}      further keys are for peers

Token ids leave tokenisers out of a comparison; `new` tokens are generated whatever the model says (EOS is ignored).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.base.errors import ConfigError

LOW_ID, HIGH_ID = 100, 1000  # ids that any vocabulary has and that are rarely special


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to serve together.

    Attributes:
        name: for the report.
        max_seqs: how many may run at once.
        prompts: token ids.
        new_tokens: how many tokens to generate for each prompt.
    """

    name: str
    max_seqs: int
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]

    @property
    def longest_tokens(self) -> int:
        """The longest prompt and reply together."""
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.new_tokens, strict=True))

    def turn(self, number: int) -> list[list[int]]:
        """The prompts of one turn: the first token changes, so that no cache knows them from an earlier turn."""
        return [[LOW_ID + number % (HIGH_ID - LOW_ID), *prompt[1:]] for prompt in self.prompts]


def read_workload(path: str) -> Workload:
    """Read a workload file.

    Raises:
        ConfigError: the file is missing or not of the form above.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--workload {path}: {error.strerror}", field="workload") from None
    except ValueError as error:
        raise ConfigError(f"--workload {path}: not a JSON file: {error}", field="workload") from None
    try:
        return _checked(data)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"--workload {path}: give an object with name, max_seqs and requests, "
            "each request with prompt (token ids) and new (a count)",
            field="workload",
        ) from None


def default_workload(mode: str) -> Workload:
    """What is measured when no file is given: one 128 + 128 stream, or 32 mixed requests. Seeded."""
    rng = random.Random(1)
    shapes = [(128, 128)] if mode == "latency" else [(rng.randint(32, 256), rng.randint(32, 128)) for _ in range(32)]
    prompts = tuple(tuple(rng.randrange(LOW_ID, HIGH_ID) for _ in range(length)) for length, _ in shapes)
    return Workload(f"default-{mode}", len(shapes), prompts, tuple(new for _, new in shapes))


def _checked(data: Any) -> Workload:
    prompts = tuple(tuple(int(token) for token in request["prompt"]) for request in data["requests"])
    new_tokens = tuple(int(request["new"]) for request in data["requests"])
    if not prompts or not all(prompts) or min(new_tokens) < 1 or int(data["max_seqs"]) < 1:
        raise ValueError
    return Workload(str(data["name"]), int(data["max_seqs"]), prompts, new_tokens)
