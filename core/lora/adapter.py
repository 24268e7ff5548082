"""Reading a PEFT directory: adapter_config.json and adapter_model.safetensors become layers with A, B and a scale.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [R, K]  ┐
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight [N, R]  ┴─► "model.layers.0.self_attn.q_proj"
    base_model.model.model.embed_tokens.lora_embedding_A           [R, V]  ┐
    base_model.model.model.embed_tokens.lora_embedding_B           [M, R]  ┴─► "model.embed_tokens", is_embedding
    base_model.model.lm_head.base_layer.weight, …lm_head.weight    [V, M]      a copy of the base model's own weight

An adapter's identity is a digest of everything that its replies depend on: names, scales, types and bytes of its
matrices. Equal copies have one identity wherever they lie and whatever they are called; other weights under an old name
have another. Whether the layers fit a model, `AdapterSlots` checks. Nothing is ever unpickled.

The file is read once, into memory, and never mapped: somebody may write over it while it is served. What was hashed is
then what is used, and a file that is cut short is an error, not a SIGBUS that ends the engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from octavo.core.base.errors import CheckpointError
from octavo.core.lora.parts import LoraWeights
from octavo.core.lora.settings import CONFIG_FILE, LoraSettings

WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_TENSOR = re.compile(
    r"(?P<layer>.+?)\.(?:lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<embedding>[AB])|(?P<base>(base_layer\.)?weight))"
)
_NESTED = ".base_layer"
"""What PEFT puts between a module's name and the matrices of all its adapted parameters but one."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLayer:
    """One layer of an adapter, as stored.

    Attributes:
        weights: A, B and the scale.
        is_embedding: it adapts a table that ids look up.
    """

    weights: LoraWeights
    is_embedding: bool


@dataclass(frozen=True, slots=True, eq=False)
class MatrixPair:
    """A and B of a parameter, as stored; see stacked.py."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A PEFT directory, read and checked as far as that goes without a model.

    Attributes:
        path: the directory.
        adapter_id: digest of the content.
        settings: what its config says.
        layers: by checkpoint layer.
        parameters: by module, pairs of matrices for parameters of it that target_parameters names.
        base_weights: by checkpoint layer, weights of the base model that the file repeats.
    """

    path: Path
    adapter_id: str
    settings: LoraSettings
    layers: Mapping[str, AdapterLayer]
    parameters: Mapping[str, tuple[MatrixPair, ...]]
    base_weights: Mapping[str, torch.Tensor]

    @property
    def num_layers(self) -> int:
        """Layers that it adapts; a parameter that holds several experts counts as one."""
        return len(self.layers) + sum(len(pairs) for pairs in self.parameters.values())


def directory_of(path: str) -> Path:
    """The absolute directory that a path of an adapter means, `~` expanded.

    Raises:
        CheckpointError: the path is empty, no path of a file system, or begins with the home of a user who has none.
    """
    if not path:
        raise CheckpointError("an adapter's path is empty; give a PEFT directory", field="lora_path")
    try:
        if "\0" in path:
            raise ValueError
        os.fsencode(path)
        return Path(path).expanduser().absolute()
    except (RuntimeError, ValueError) as error:  # RuntimeError: of expanduser; ValueError: unpaired surrogates too
        raise CheckpointError(
            "lora_path is no path on this machine; give a PEFT directory, with ~ for none but a user's home",
            field="lora_path",
        ) from error


def read_settings(path: Path) -> LoraSettings:
    """Read an adapter's config alone.

    Raises:
        CheckpointError: it is missing or malformed, or asks for what is not implemented.
    """
    file = path / CONFIG_FILE
    try:
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise CheckpointError(f"{file} is no regular file; give a PEFT adapter's directory", field="lora")
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        cause = error.strerror or error
        raise CheckpointError(f"cannot read {file}: {cause}; give a PEFT adapter's directory", field="lora") from error
    except (ValueError, RecursionError) as error:
        cause = str(error).splitlines()[0]
        raise CheckpointError(f"{file} is not valid JSON ({cause}); download it again", field="lora") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds a {type(values).__name__}, not a JSON object", field="lora")
    return LoraSettings.read(values, path)


def read_adapter(path: Path) -> Adapter:
    """Read an adapter's config and its weights.

    Raises:
        CheckpointError: a file is missing or damaged, the two contradict each other, or one asks for what is not
            implemented.
    """
    settings = read_settings(path)
    tensors = _tensors(path)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
        if match is None or ".lora_" in match["layer"]:
            raise _foreign(path, name)
        kind = "base" if match["base"] else match["linear"] or f"embedding_{match['embedding']}"
        found.setdefault(match["layer"], {})[kind] = tensor
    base_weights = {layer: kinds.pop("base") for layer, kinds in found.items() if "base" in kinds}
    layers: dict[str, AdapterLayer] = {}
    parameters: dict[str, tuple[MatrixPair, ...]] = {}
    for layer, kinds in sorted(found.items()):
        module = layer.removesuffix(_NESTED)
        while module.endswith(_NESTED):
            module = module.removesuffix(_NESTED)
        if not kinds:
            continue
        if settings.target_parameters and not settings.selects(module):
            pair = MatrixPair(*_matrices(path, layer, kinds, ("A", "B")))
            parameters[module] = (*parameters.get(module, ()), pair)
        else:
            layers[layer] = _layer(path, settings, layer, kinds)
    if not layers and not parameters:
        raise CheckpointError(f"{path / WEIGHTS_FILE} holds no adapter weights; save the adapter again", field="lora")
    return Adapter(path, _digest(settings, layers, parameters), settings, layers, parameters, base_weights)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    file = path / WEIGHTS_FILE
    if not file.is_file():
        has_pickle = (path / "adapter_model.bin").is_file()
        why = "; adapter_model.bin can run code and is never loaded: save the adapter again as safetensors"
        raise CheckpointError(f"{path} has no {WEIGHTS_FILE}{why if has_pickle else '; download it'}", field="lora")
    try:
        return load(file.read_bytes())
    except (SafetensorError, OSError, KeyError) as error:  # KeyError: a type that torch lacks
        cause = str(error).splitlines()[0]
        raise CheckpointError(
            f"{file} is truncated or not a safetensors file ({cause}); download it again", field="lora"
        ) from error


def _foreign(path: Path, name: str) -> CheckpointError:
    """The error for a tensor that is no part of a low-rank adapter."""
    known = {
        "lora_magnitude_vector": "it belongs to DoRA, which is not implemented",
        "lora_B.bias": "biases of adapters are not implemented",
    }
    why = next((text for mark, text in known.items() if mark in name), "it is no part of a plain LoRA adapter")
    return CheckpointError(f"{path / WEIGHTS_FILE}: tensor {name}: {why}; merge the adapter into its model", field=name)


def _layer(path: Path, settings: LoraSettings, name: str, kinds: Mapping[str, torch.Tensor]) -> AdapterLayer:
    """One layer, its tensors checked against each other and against the config."""
    is_embedding = "embedding_A" in kinds
    a_RK, b_NR = _matrices(path, name, kinds, ("embedding_A", "embedding_B") if is_embedding else ("A", "B"))
    if not settings.selects(name):
        raise _wrong(path, name, f"has weights, but target_modules of {CONFIG_FILE} does not select it")
    rank = settings.rank_of(name)
    if a_RK.shape[0] != rank or b_NR.shape[1] != rank:
        raise _wrong(path, name, f"has A {list(a_RK.shape)} and B {list(b_NR.shape)}, but rank {rank} by {CONFIG_FILE}")
    return AdapterLayer(LoraWeights(a_RK, b_NR, settings.scale_of(name)), is_embedding)


def _matrices(
    path: Path, name: str, kinds: Mapping[str, torch.Tensor], pair: tuple[str, str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a layer, which has nothing else."""
    if set(kinds) != set(pair):
        raise _wrong(path, name, f"has {' and '.join(sorted(kinds))} where it needs {pair[0]} and {pair[1]}")
    a_RK, b_NR = kinds[pair[0]], kinds[pair[1]]
    if any(tensor.ndim != 2 or tensor.dtype not in _DTYPES for tensor in (a_RK, b_NR)):
        raise _wrong(path, name, f"has matrices of {a_RK.dtype} {list(a_RK.shape)} and {b_NR.dtype} {list(b_NR.shape)}")
    return a_RK, b_NR


def _wrong(path: Path, layer: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path / WEIGHTS_FILE}: layer {layer} {what}; the files are damaged or belong to different adapters: "
        "save the adapter again",
        field=layer,
    )


def _digest(
    settings: LoraSettings, layers: Mapping[str, AdapterLayer], parameters: Mapping[str, tuple[MatrixPair, ...]]
) -> str:
    """SHA-256 over all that a reply depends on. Requests of different users share cached blocks by it."""
    digest = hashlib.sha256()

    def add(what: object, *matrices: torch.Tensor) -> None:
        shapes = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in matrices]
        digest.update(repr((what, shapes)).encode())
        for tensor in matrices:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)

    for name, layer in layers.items():
        weights = layer.weights
        add((name, layer.is_embedding, weights.scale.hex()), weights.a_RK, weights.b_NR)
    if parameters:
        add(settings)  # which pair has which scale, the model's shapes say
    for name, pairs in parameters.items():
        for pair in pairs:
            add(name, pair.a, pair.b)
    return digest.hexdigest()
