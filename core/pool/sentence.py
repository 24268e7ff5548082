"""Reading of a sentence-transformers directory: which modules follow the model, and what they do.

    modules.json                        the chain: Transformer, Pooling, Dense ..., Normalize
    1_Pooling/config.json               {"pooling_mode_mean_tokens": true, ...}   the older form, one boolean per mode
                                        {"pooling_mode": "mean", ...}             the compact one
    2_Dense/config.json                 sizes, bias, activation; its weights lie beside it
    config_sentence_transformers.json   prompts by name, the similarity
    sentence_bert_config.json           the longest text

A module, a mode or a field that changes the vectors and is not known here is an error: an embedding made by a guess
looks like any other.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from octavo.core.base.errors import CheckpointError
from octavo.core.pool.pooler import HeadActivation, HeadLayer, Pooler, PoolingKind, Similarity

MODULES_FILE = "modules.json"

Json = TypeVar("Json", dict[str, Any], list[Any])

_MODES: Mapping[str, PoolingKind] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_FLAGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: Mapping[str, HeadActivation] = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Tanh": "tanh",
}
_SIMILARITIES: Mapping[str, Similarity] = {"cosine": "cosine", "dot": "dot"}
_TRANSFORMER_FIELDS = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
"""What the first module gives: the hidden rows of the model's stack."""

_WIDTHS = ("word_embedding_dimension", "embedding_dimension")


def read_sentence_modules(path: Path, width: int) -> Pooler:
    """The Pooler of a directory with a modules.json.

    Args:
        path: the directory.
        width: hidden_size of the model.

    Raises:
        CheckpointError: naming the file and the field that is damaged or not implemented.
    """
    kinds = _chain(path)
    for folder in kinds.get("Normalize", []):
        _refuse_unknown(_optional_object(path / folder / "config.json"), {"module_input_name"}, path / folder)
    pooling = _object(path / kinds["Pooling"][0] / "config.json")
    sentence = _optional_object(path / "sentence_bert_config.json")
    whole = _optional_object(path / "config_sentence_transformers.json")
    for name, usual in _TRANSFORMER_FIELDS.items():
        if sentence.get(name) not in (None, usual):
            raise _wrong(path, name, sentence[name], f"only {usual} is implemented", "sentence_bert_config.json")
    prompts, default_prompt = _prompts(path, whole)
    return Pooler(
        task="embed",
        kind=_kind(pooling, path / kinds["Pooling"][0], width),
        width=width,
        include_prompt=_boolean(pooling, "include_prompt", path / kinds["Pooling"][0], default=True),
        layers=_dense_layers(path, kinds.get("Dense", []), width),
        normalize="Normalize" in kinds,
        prompts=prompts,
        default_prompt=default_prompt,
        similarity=_SIMILARITIES.get(whole.get("similarity_fn_name") or "cosine"),
        max_tokens=_max_tokens(path, sentence),
        lower_case=sentence.get("do_lower_case") is True,
    )


def _chain(path: Path) -> dict[str, list[str]]:
    """Kind of module -> the folders of its modules, once their order has been found to be the one known here."""
    file = path / MODULES_FILE
    chain: list[tuple[str, str]] = []
    for module in _read(file, list):
        kind, folder = (module.get("type"), module.get("path")) if isinstance(module, Mapping) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str) or not kind.startswith("sentence_transformers."):
            raise CheckpointError(f"{file}: {module!r} is no module of sentence-transformers", field=file.name)
        chain.append((kind.rpartition(".")[2], folder))
    order = [kind for kind, _ in chain]
    dense = order[2:-1] if order[-1:] == ["Normalize"] else order[2:]
    if order[:2] != ["Transformer", "Pooling"] or set(dense) - {"Dense"} or chain[0][1] != "":
        raise CheckpointError(
            f"{file}: the modules are {', '.join(order) or 'none'}; Transformer (in the directory itself), Pooling, "
            "then any Dense and at last perhaps Normalize are implemented",
            field=file.name,
        )
    return {kind: [folder for each, folder in chain if each == kind] for kind in order}


def _kind(config: Mapping[str, Any], folder: Path, width: int) -> PoolingKind:
    """The pooling mode, in either form. Raises CheckpointError for several modes, none, or one that is unknown."""
    _refuse_unknown(config, {*_FLAGS, *_WIDTHS, "pooling_mode", "include_prompt"}, folder)
    for name in _WIDTHS:
        if config.get(name) not in (None, width):
            raise _wrong(folder, name, config[name], f"the model's hidden size is {width}")
    modes = {mode for flag, mode in _FLAGS.items() if _boolean(config, flag, folder)}
    named = config.get("pooling_mode")
    if named is not None:
        listed = named if isinstance(named, list | tuple) else [named]
        if not all(isinstance(mode, str) for mode in listed) or (modes and modes != set(listed)):
            raise _wrong(folder, "pooling_mode", named, "it must name the mode that the other fields name")
        modes = set(listed)
    if len(modes) != 1 or not modes <= set(_MODES):
        shown = " with ".join(sorted(modes)) or "no mode"
        raise CheckpointError(
            f"{folder / 'config.json'}: {shown} is not implemented; one of {', '.join(_MODES)} is", field="pooling_mode"
        )
    return _MODES[modes.pop()]


def _dense_layers(path: Path, folders: Collection[str], width: int) -> tuple[HeadLayer, ...]:
    layers: list[HeadLayer] = []
    for folder in folders:
        config = _object(path / folder / "config.json")
        known = {"in_features", "out_features", "bias", "activation_function"}
        ends = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
        _refuse_unknown({k: v for k, v in config.items() if ends.get(k, v) != v or k not in ends}, known, path / folder)
        wanted = layers[-1].out_features if layers else width
        if config.get("in_features") != wanted:
            raise _wrong(path / folder, "in_features", config.get("in_features"), f"{wanted} elements come in")
        out_features = config.get("out_features")
        if type(out_features) is not int or out_features < 1:
            raise _wrong(path / folder, "out_features", out_features, "it must be an integer of at least 1")
        activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
        if activation not in _ACTIVATIONS:
            raise _wrong(path / folder, "activation_function", activation, f"{', '.join(_ACTIVATIONS)} are implemented")
        bias = _boolean(config, "bias", path / folder, default=True)
        layers.append(HeadLayer("linear", wanted, out_features, bias, _ACTIVATIONS[activation], folder=path / folder))
    return tuple(layers)


def _prompts(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise _wrong(path, "prompts", prompts, "it must map names to texts", "config_sentence_transformers.json")
    if default is not None and default not in prompts:
        raise _wrong(
            path, "default_prompt_name", default, "it must be one of prompts", "config_sentence_transformers.json"
        )
    return dict(prompts), None if default is None else prompts[default]


def _max_tokens(path: Path, config: Mapping[str, Any]) -> int | None:
    value = config.get("max_seq_length")
    if value is not None and (type(value) is not int or value < 1):
        raise _wrong(path, "max_seq_length", value, "it must be an integer of at least 1", "sentence_bert_config.json")
    return value


def _refuse_unknown(config: Mapping[str, Any], known: Collection[str], folder: Path) -> None:
    for name, value in config.items():
        if name not in known and value not in (None, False):
            raise _wrong(folder, name, value, "this field may change the vectors and is not implemented")


def _boolean(config: Mapping[str, Any], name: str, folder: Path, *, default: bool = False) -> bool:
    value = config.get(name)
    if value is not None and type(value) is not bool:
        raise _wrong(folder, name, value, "it must be true or false")
    return default if value is None else value


def _object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, though {MODULES_FILE} names it; download it again", field=file.name)
    return _read(file, dict)


def _optional_object(file: Path) -> dict[str, Any]:
    return _read(file, dict) if file.is_file() else {}


def _read(file: Path, kind: type[Json]) -> Json:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        cause = str(error).splitlines()[0]
        raise CheckpointError(f"cannot read {file} as JSON ({cause}); download it again", field=file.name) from error
    if not isinstance(value, kind):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not a {kind.__name__}", field=file.name)
    return value


def _wrong(folder: Path, name: str, value: Any, reason: str, file: str = "config.json") -> CheckpointError:
    return CheckpointError(f"{folder / file}: {name} is {value!r}; {reason}", field=name)
