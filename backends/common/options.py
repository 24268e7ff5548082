"""What a user may choose of a GPU by `--backend-option key=value`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Options of the backends cuda and rocm.

    Attributes:
        device: index of the device among those that the process sees; None: the first one that the backend knows. In a
            group it is rank 0's, and each rank takes the next one that the backend knows.
        graphs: record steps of few tokens and replay them; off, every step is launched kernel by kernel.
    """

    device: int | None = None
    graphs: bool = True

    def __post_init__(self) -> None:
        if self.device is not None and self.device < 0:
            raise ValueError(f"device is {self.device}; the first one is 0")
