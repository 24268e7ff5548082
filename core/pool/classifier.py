"""Reading of sequence classifiers: where their dense layers are, what their numbers mean.

    BertForSequenceClassification       first token ── bert.pooler.dense, tanh ── classifier
    Roberta…, XLMRoberta…               first token ── classifier.dense, tanh ── classifier.out_proj
    any other …ForSequenceClassification (a decoder)    last token ── score, without bias

A cross-encoder is a classifier with one label, whose input is a pair of texts. The activation is the one that the
config names; else softmax over several labels, sigmoid of a single one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.base.errors import CheckpointError
from octavo.core.pool.pooler import HeadLayer, LabelActivation, Pooler, PoolingKind

SUFFIX = "ForSequenceClassification"

_ACTIVATIONS: Mapping[str, LabelActivation] = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}
_OF_PROBLEM: Mapping[str, LabelActivation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def read_classifier(architecture: str, config: Mapping[str, Any], width: int) -> Pooler:
    """The Pooler of a sequence classifier.

    Raises:
        CheckpointError: labels or activation are damaged or not implemented.
    """
    labels = _labels(config)
    kind, layers = _head(architecture.removesuffix(SUFFIX), width, len(labels))
    return Pooler(
        task="classify",
        kind=kind,
        width=width,
        layers=layers,
        labels=labels,
        activation=_activation(config, len(labels)),
    )


def _head(family: str, width: int, num_labels: int) -> tuple[PoolingKind, tuple[HeadLayer, ...]]:
    if family == "Bert":
        dense, last = "bert.pooler.dense", "classifier"
    elif family in ("Roberta", "XLMRoberta"):
        dense, last = "classifier.dense", "classifier.out_proj"
    else:
        return "last", (HeadLayer("score", width, num_labels, bias=False),)
    return "cls", (HeadLayer(dense, width, width, True, "tanh"), HeadLayer(last, width, num_labels, True))


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the labels, by index; two where the config says nothing, as transformers has it."""
    named = config.get("id2label")
    if named is None:
        count = config.get("num_labels", 2)
        if type(count) is not int or count < 1:
            raise CheckpointError(f"config.json: num_labels is {count!r}; it must be at least 1", field="num_labels")
        return tuple(f"LABEL_{index}" for index in range(count))
    try:
        by_index = {int(index): str(label) for index, label in named.items()}
        return tuple(by_index[index] for index in range(max(1, len(by_index))))
    except (AttributeError, ValueError, KeyError) as error:
        raise CheckpointError(
            "config.json: id2label must map 0, 1, … to the names of the labels", field="id2label"
        ) from error


def _activation(config: Mapping[str, Any], num_labels: int) -> LabelActivation:
    section = config.get("sentence_transformers")
    named = section.get("activation_fn") if isinstance(section, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        if named not in _ACTIVATIONS:
            raise CheckpointError(
                f"config.json: the classifier's activation is {named!r}; {', '.join(_ACTIVATIONS)} are implemented",
                field="activation_fn",
            )
        return _ACTIVATIONS[named]
    problem = config.get("problem_type")
    if problem is not None:
        if problem not in _OF_PROBLEM:
            raise CheckpointError(
                f"config.json: problem_type is {problem!r}; it must be one of {', '.join(_OF_PROBLEM)}",
                field="problem_type",
            )
        return _OF_PROBLEM[problem]
    return "sigmoid" if num_labels == 1 else "softmax"
