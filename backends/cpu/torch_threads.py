"""Torch's own thread count while engines use the CPU: taken over by the first, given back by the last.

    claim(1)  claim(1)            release()        release()
    8 ──► 1 ──────────────────────── 1 ───────────── 8        whichever engine is closed first

torch keeps one count per process, so its owner here is one per process too: TORCH_THREADS, the only state of this
module. What an engine alone could remember, the count it found, may be another engine's.
"""

from __future__ import annotations

import threading

import torch


class TorchThreads:
    """Who has taken over torch's thread count, and what it was before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: list[Claim] = []
        self._found = 0  # torch's count before the first claim

    def claim(self, num_threads: int) -> Claim:
        """Set torch's count until the claim is released; of several claims the newest decides."""
        with self._lock:
            if not self._claims:
                self._found = torch.get_num_threads()
            made = Claim(self, num_threads)
            self._claims.append(made)
            torch.set_num_threads(num_threads)
            return made

    def release(self, claim: Claim) -> None:
        """Give up a claim: the newest that is left decides, or what was found. Idempotent."""
        with self._lock:
            if claim not in self._claims:
                return
            is_ours = torch.get_num_threads() == self._claims[-1].num_threads  # else the user has set it since
            self._claims.remove(claim)
            if is_ours:
                torch.set_num_threads(self._claims[-1].num_threads if self._claims else self._found)


class Claim:
    """One engine's wish of how many threads torch uses."""

    def __init__(self, owner: TorchThreads, num_threads: int) -> None:
        self.num_threads = num_threads
        self._owner = owner

    def release(self) -> None:
        """See TorchThreads.release."""
        self._owner.release(self)


TORCH_THREADS = TorchThreads()
"""Of this process."""
