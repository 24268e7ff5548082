"""What a request asks of a pooling model (embeddings, classes, scores), and what its engine is told to do.

    PoolingParams   as the user gives them; None leaves a choice to the checkpoint
    PoolingJob      one request's work with nothing left open; made at the door, carried to the runner

The names of the parameters are vLLM's, so that a script changes one import.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.base.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How one vector is made.

    Attributes:
        dimensions: keep this many elements of an embedding, before it is normalised; None keeps all.
        normalize: give an embedding length 1; None does what the checkpoint says.
        use_activation: give a classifier's probabilities (True, None) or its logits (False).
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise InvalidRequest(
                f"dimensions is {self.dimensions!r}; give a whole number of at least 1", field="dimensions"
            )
        for name in ("normalize", "use_activation"):
            if (value := getattr(self, name)) is not None and type(value) is not bool:
                raise InvalidRequest(f"{name} is {value!r}; give True or False, or leave it out", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingJob:
    """What becomes of the hidden rows of one request.

    Attributes:
        needs_every_token: rows before the last count too, so that none may be skipped by a cache hit.
        first_token: a mean leaves out the tokens before it (a prompt that is not part of the text).
        first_segment_tokens: tokens of the first text of a pair, where the model tells texts apart; None: all.
        dimensions: elements to keep; None keeps all.
        normalize: the vector gets length 1.
        activate: a classifier's activation is applied.
    """

    needs_every_token: bool
    first_token: int = 0
    first_segment_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool = False
    activate: bool = False
