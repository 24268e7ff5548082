"""How a request names its low-rank adapter, and what an engine tells of the adapters it serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Which adapter a prompt runs with, in the shape that vLLM's users know.

    Attributes:
        lora_name: the adapter's name; one that the engine does not know yet is loaded from lora_path.
        lora_int_id: taken and not used: an adapter is known by its content.
        lora_path: a PEFT directory; "" where the engine knows the name.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """An adapter that an engine serves.

    Attributes:
        name: by which requests ask for it.
        path: of its files.
        adapter_id: a digest of its content; equal copies have one.
        rank: the largest of its layers.
        num_layers: layers that it adapts.
    """

    name: str
    path: str
    adapter_id: str
    rank: int
    num_layers: int
