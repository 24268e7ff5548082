"""A tokenizer from GGUF metadata.

    tokenizer.ggml.model   "gpt2"   byte-level BPE: tokens, merges, and how to cut text by the name in `.pre`
                           "llama"  sentencepiece BPE with byte fallback: tokens and scores, merges recovered from them
                           "bert"   word pieces: those that begin a word are stored with a ▁ before them, others bare
    tokenizer.ggml.token_type   1 normal  2 unknown  3 control (special)  4 user-defined  5 unused  6 byte

Only `load_tokenizer` talks to this. Building takes well under 0.2 s for 50 thousand tokens, because a process start
waits for it: no import of transformers, no pass over the vocabulary that could be left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from octavo.core.base.errors import CheckpointError
from octavo.core.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from octavo.core.text.tokenizer import Tokenizer
from octavo.core.text.word_pieces import enclosing, spelled, word_pieces

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPECIAL_TOKEN_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "mask_token": "mask_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Args:
        metadata: the file's keys and decoded values.

    Raises:
        CheckpointError: the tokenizer kind or pre-tokenizer is unknown, or the lists contradict each other.
    """
    vocab = _Vocabulary(metadata)
    if vocab.model == "gpt2":
        pre = _pre_tokenizer(metadata)
        backend, add_bos = _byte_level_bpe(vocab, pre), pre.add_bos
    elif vocab.model == "llama":
        backend, add_bos = _sentencepiece_bpe(vocab), True
    elif vocab.model == "bert":
        backend, add_bos = _bert(vocab), False
    else:
        raise CheckpointError(
            f"tokenizer.ggml.model is {vocab.model!r}; Octavo reads 'gpt2', 'llama' and 'bert' tokenizers",
            field="tokenizer.ggml.model",
        )
    special = {name: vocab.tokens[i] for name, key in _SPECIAL_TOKEN_KEYS.items() if (i := vocab.token_id(key)) >= 0}
    _mark_added_tokens(backend, vocab, special.values())
    bos = vocab.token_id("bos_token_id") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else -1
    eos = vocab.token_id("eos_token_id") if metadata.get("tokenizer.ggml.add_eos_token", False) else -1
    if vocab.model != "bert":
        backend.post_processor = _add_ends(vocab.tokens, bos, eos)
    return Tokenizer(
        backend,
        special_tokens=special,
        eos_token_ids=tuple(dict.fromkeys(i for key in _END_KEYS if (i := vocab.token_id(key)) >= 0)),
        chat_template=_template(metadata, "tokenizer.chat_template"),
        tool_chat_template=_template(metadata, "tokenizer.chat_template.tool_use"),
    )


def _template(metadata: Mapping[str, Any], key: str) -> str | None:
    template = metadata.get(key)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{key} is {str(template)[:60]!r}, no text; download the file again", field=key)
    return template


class _Vocabulary:
    """The vocabulary lists of a GGUF file, checked against each other."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model: str = metadata.get("tokenizer.ggml.model", "")
        self.tokens: Sequence[str] = self._list("tokens", str)
        self.types: Sequence[int] = self._by_token("token_type", int, default=[1] * len(self.tokens))

    @property
    def architecture(self) -> str:
        return str(self._metadata.get("general.architecture", ""))

    @property
    def adds_space_prefix(self) -> bool:
        return bool(self._metadata.get("tokenizer.ggml.add_space_prefix", True))

    def merges(self) -> list[tuple[str, str]] | None:
        """The merges in the file, best first; None when there are none."""
        if "tokenizer.ggml.merges" not in self._metadata:
            return None
        pairs = [tuple(merge.split(" ")) for merge in self._list("merges", str)]
        if wrong := next((pair for pair in pairs if len(pair) != 2), None):
            raise _damaged("merges", f"holds {' '.join(wrong)[:60]!r}, no pair of tokens")
        return [(left, right) for left, right in pairs]

    def scores(self) -> Sequence[float]:
        scores: Sequence[float] = self._by_token("scores", float)
        if any(score != score for score in scores):
            raise _damaged("scores", "holds a NaN, by which nothing can be ordered")
        return scores

    def token_id(self, key: str) -> int:
        """A special token's id; -1 when the file names none or one outside the vocabulary."""
        value = self._metadata.get(f"tokenizer.ggml.{key}", -1)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise _damaged(key, f"is {str(value)[:60]!r}, no token id")
        return int(value) if value < len(self.tokens) else -1

    def of_type(self, token_type: int) -> list[int]:
        return [i for i, kind in enumerate(self.types) if kind == token_type]

    def index(self, spelled: Sequence[str]) -> dict[str, int]:
        """Token -> id, for the tokens as spelled.

        Raises:
            CheckpointError: two ids have one spelling.
        """
        vocab = {token: i for i, token in enumerate(spelled)}
        if len(vocab) != len(spelled):
            twice = next(token for i, token in enumerate(spelled) if vocab[token] != i)
            raise CheckpointError(
                f"tokenizer.ggml.tokens holds {twice!r} twice; convert the model again", field="tokenizer.ggml.tokens"
            )
        return vocab

    def _by_token(self, key: str, kind: type, default: Sequence[Any] | None = None) -> Sequence[Any]:
        """A list with an entry for each token."""
        entries = self._list(key, kind, default)
        if len(entries) != len(self.tokens):
            raise _damaged(key, f"has {len(entries)} entries for {len(self.tokens)} tokens")
        return entries

    def _list(self, key: str, kind: type, default: Sequence[Any] | None = None) -> Sequence[Any]:
        """A list of str, int or float; in a GGUF file all entries are of one type."""
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if value is None:
            raise CheckpointError(
                f"the file has no tokenizer.ggml.{key}; convert the model again with its tokenizer",
                field=f"tokenizer.ggml.{key}",
            )
        entries: Sequence[Any] = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(entries, list | tuple) or not all(type(entry) is kind for entry in entries[:1]):
            names = {str: "strings", int: "integers", float: "floats"}
            raise _damaged(key, f"is {str(entries)[:60]!r}, no list of {names[kind]}")
        return entries


def _damaged(key: str, fault: str) -> CheckpointError:
    return CheckpointError(
        f"tokenizer.ggml.{key} {fault}; the file is damaged, download it again", field=f"tokenizer.ggml.{key}"
    )


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}, which Octavo doesn't know (known: {known}); "
            "use the safetensors version of the model, whose tokenizer.json says it all",
            field="tokenizer.ggml.pre",
        )
    return PRE_TOKENIZERS[name]


def _byte_level_bpe(vocab: _Vocabulary, pre: PreTokenizer) -> tokenizers.Tokenizer:
    merges = vocab.merges()
    if merges is None:
        raise CheckpointError(
            "the file has no tokenizer.ggml.merges; convert the model again with its tokenizer",
            field="tokenizer.ggml.merges",
        )
    backend = tokenizers.Tokenizer(
        _bpe(vocab.index(vocab.tokens), merges, fuse_unk=False, ignore_merges=pre.ignore_merges)
    )
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(vocab: _Vocabulary) -> tokenizers.Tokenizer:
    """Sentencepiece's BPE: spaces are `▁`, unknown characters fall back to their bytes."""
    # Runs of spaces are stored as spaces, but text reaches the vocabulary with `▁` for each.
    tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in vocab.tokens]
    index = vocab.index(tokens)
    # Gemma's scores leave its runs of spaces and newlines without rank; the order of ids is its merge order.
    scores = None if vocab.architecture.startswith("gemma") else vocab.scores()
    unk = vocab.token_id("unknown_token_id")
    model = _bpe(
        index,
        vocab.merges() or _merges_of(tokens, index, scores),
        fuse_unk=True,
        byte_fallback=True,
        unk_token=vocab.tokens[unk] if unk >= 0 else None,
    )
    backend = tokenizers.Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocab.adds_space_prefix:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(steps)
    return backend


def _bert(vocab: _Vocabulary) -> tokenizers.Tokenizer:
    normal = frozenset(vocab.of_type(_NORMAL))
    unknown = vocab.token_id("unknown_token_id")
    backend = word_pieces(
        vocab.index(spelled(vocab.tokens, normal)), vocab.tokens[unknown] if unknown >= 0 else "[UNK]", normal
    )
    ends = []
    for key, older in (("cls_token_id", "bos_token_id"), ("seperator_token_id", "eos_token_id")):
        if (i := vocab.token_id(key)) < 0 and (i := vocab.token_id(older)) < 0:
            raise CheckpointError(
                f"the file has no tokenizer.ggml.{key}; convert the model again with its tokenizer",
                field=f"tokenizer.ggml.{key}",
            )
        ends.append((vocab.tokens[i], i))
    backend.post_processor = enclosing(*ends)
    return backend


def _merges_of(
    tokens: Sequence[str], index: Mapping[str, int], scores: Sequence[float] | None
) -> list[tuple[str, str]]:
    """All pairs of tokens that join into a token, best first: by score (id when None), then the longest left part."""
    order = range(len(tokens)) if scores is None else sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = []
    for i in order:
        token = tokens[i]
        for cut in range(len(token) - 1, 0, -1):
            if (left := token[:cut]) in index and (right := token[cut:]) in index:
                merges.append((left, right))
    return merges


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"the GGUF file's tokenizer is inconsistent ({error}); convert the model again",
            field="tokenizer.ggml.merges",
        ) from error


def _mark_added_tokens(backend: tokenizers.Tokenizer, vocab: _Vocabulary, named: Iterable[str]) -> None:
    """Tokens that are found whole in any text: control and named ones (special), and user-defined ones."""
    special = dict.fromkeys([*(vocab.tokens[i] for i in vocab.of_type(_CONTROL)), *named])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    plain = [vocab.tokens[i] for i in vocab.of_type(_USER_DEFINED)]
    known = [token for token in plain if backend.token_to_id(token) is not None]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in known])


def _add_ends(tokens: Sequence[str], bos: int, eos: int) -> processors.TemplateProcessing | None:
    """Adds BOS and EOS where the ids are not -1."""
    ends = [(tokens[i], i) for i in (bos, eos) if i >= 0]
    if not ends:
        return None
    single = [tokens[bos]] if bos >= 0 else []
    single += ["$A"] + ([tokens[eos]] if eos >= 0 else [])
    return processors.TemplateProcessing(single=single, special_tokens=ends)
