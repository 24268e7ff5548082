"""The request bodies of models that give vectors: OpenAI's embeddings, and vLLM's classify, rerank and score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from octavo.core.serve.schema import MAX_PROMPTS, CheckedRequest, Prompts


def _as_many_texts(value: Any) -> list[str]:
    """A text or a list of texts, as a list."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or any(type(each) is not str for each in texts):
        raise PydanticCustomError("texts", "give a text or a list of at least one text")
    if len(texts) > MAX_PROMPTS:
        raise PydanticCustomError("texts", f"give at most {MAX_PROMPTS} texts at once")
    return texts


ManyTexts = Annotated[Any, PlainValidator(_as_many_texts, str | list[str])]


class PoolingRequest(CheckedRequest):
    """What these endpoints take."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "truncate_prompt_tokens": (),
        "truncation_side": (),
        "add_special_tokens": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "messages": (),
    }

    user: str | None = None


class EmbeddingRequest(PoolingRequest):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = Field(default=None, max_length=256)


class ClassifyRequest(PoolingRequest):
    """POST /v1/classify."""

    input: Prompts
    use_activation: bool | None = None


class ScoreRequest(PoolingRequest):
    """POST /v1/score."""

    text_1: ManyTexts
    text_2: ManyTexts
    use_activation: bool | None = None


class RerankRequest(PoolingRequest):
    """POST /v1/rerank."""

    query: str
    documents: ManyTexts
    top_n: int | None = Field(default=None, ge=0)
    return_documents: bool = True
    use_activation: bool | None = None
