"""Text to token ids and back.

    encode   text --normalise, cut, merge (tokenizers library)--> ids
    decode   ids --bytes of each token (byte_table.py)--> bytes --UTF-8--> text

`LLM` and the server share one tokenizer; it may be used from several threads. Nothing outside core/text looks at the
library's object. Decoding is our own, over bytes, so that a stream of deltas and one full decode can never differ
(detokenizer.py); spaces are never "cleaned up".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from octavo.core.base.errors import InvalidRequest
from octavo.core.text.byte_table import ByteTable

if TYPE_CHECKING:
    import tokenizers


_LONE_SURROGATE = "the text holds a lone surrogate, which is not valid Unicode; send well-formed UTF-8"


class Tokenizer:
    """A model's vocabulary and the rules around it.

    Args:
        backend: the `tokenizers` library's object.
        special_tokens: role -> token ("bos_token", "eos_token", …), as a chat template sees them.
        eos_token_ids: ids that end a reply according to the tokenizer; a model's generation config may name more.
        chat_template: the model's jinja template, if it has one.
        tool_chat_template: the one for conversations with tools, where a model has two.

    Raises:
        CheckpointError: tokens can't be turned into bytes (byte_table.py).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: tuple[int, ...],
        chat_template: str | None = None,
        tool_chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bytes = ByteTable(backend)
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.tool_chat_template = tool_chat_template
        self.bos_token_id = self.token_id(special_tokens["bos_token"]) if "bos_token" in special_tokens else None
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.adds_bos = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def strips_leading_space(self) -> bool:
        """Whether the text of a whole sequence loses the one space that encoding put before it."""
        return self._bytes.strips_leading_space

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised.

        Args:
            text: any string.
            add_special_tokens: also add what the tokenizer puts around a text (BOS, EOS), if anything.

        Raises:
            InvalidRequest: the text holds half of a surrogate pair, which is no character.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(_LONE_SURROGATE, field="prompt") from error
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Token ids of two texts as one input, and how many tokens come before the second text's.

        The tokenizer decides what stands around and between them, and which of that belongs to the second text; where
        it does not tell texts apart, all tokens count as the first one's.

        Raises:
            InvalidRequest: as for `encode`.
        """
        try:
            encoding = self._backend.encode(first, second)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(_LONE_SURROGATE, field="prompt") from error
        return encoding.ids, encoding.type_ids.index(1) if 1 in encoding.type_ids else len(encoding.ids)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD, ids outside the vocabulary stand for nothing."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self._bytes[i] for i in token_ids if i not in hidden])
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes a token adds to the text; empty for ids outside the vocabulary."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """A token's bytes as text by themselves; parts of characters show as U+FFFD."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Id of a token in the vocabulary's own spelling, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id
