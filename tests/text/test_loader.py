"""Tokenizers of model directories."""

import json
import sys

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from octavo.core.base.errors import CheckpointError
from octavo.core.load.resolve import HUB_PATTERNS
from octavo.core.load.safetensors import TOKENIZER_FILES
from octavo.core.text.byte_table import byte_alphabet
from octavo.core.text.loader import (
    TOOL_TEMPLATE_FILE,
    load_tokenizer,
    tokenizer_from_directory,
    tokenizer_from_files,
)


@pytest.fixture
def directory(tmp_path):
    """A byte-level tokenizer with <s> and </s>; <s> is added to texts."""
    vocab = {token: i for i, token in enumerate([*byte_alphabet(), "hi", "<s>", "</s>", "<pad>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("h", "i")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    backend.save(str(tmp_path / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "</s>", "special": True}
    write(tmp_path / "tokenizer_config.json", bos_token="<s>", eos_token=eos)
    return tmp_path


def write(path, **content):
    path.write_text(json.dumps(content))


def test_roles_come_from_the_config(directory):
    tokenizer = tokenizer_from_directory(directory)
    bos, eos = tokenizer.token_id("<s>"), tokenizer.token_id("</s>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.adds_bos) == (bos, (eos,), True)
    assert tokenizer.encode("hi") == [bos, tokenizer.token_id("hi")]
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    # </s> was an ordinary token of tokenizer.json; its role makes it special.
    assert tokenizer.encode("</s>", add_special_tokens=False) == [eos]
    assert tokenizer.decode([bos, eos]) == ""


def test_equals_transformers_on_the_directory(directory):
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(directory)), tokenizer_from_directory(directory)
    for text in ("", "hi", "hi there </s> <s>x", "é 😀\n"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), False) == theirs.decode(theirs.encode(text))


def test_special_tokens_map_is_read_where_the_config_names_none(directory):
    write(directory / "tokenizer_config.json")
    write(directory / "special_tokens_map.json", pad_token="<pad>", unk_token="not in the vocabulary")
    tokenizer = tokenizer_from_directory(directory)
    assert tokenizer.special_tokens == {"pad_token": "<pad>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())


def test_the_template_file_goes_before_the_config(directory):
    assert tokenizer_from_directory(directory).chat_template is None
    write(directory / "tokenizer_config.json", chat_template="from config")
    assert tokenizer_from_directory(directory).chat_template == "from config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    write(directory / "tokenizer_config.json", chat_template=named)
    assert tokenizer_from_directory(directory).chat_template == "named"
    assert tokenizer_from_directory(directory).tool_chat_template == "tools"
    (directory / "chat_template.jinja").write_text("from file")
    both = tokenizer_from_directory(directory)
    assert (both.chat_template, both.tool_chat_template) == ("from file", None)


def test_a_file_of_its_own_holds_the_template_for_tools(directory):
    (directory / "chat_template.jinja").write_text("plain")
    (directory / "additional_chat_templates").mkdir()
    file = directory / "additional_chat_templates" / "tool_use.jinja"
    file.write_text("tools")
    files = {path.name: path for path in directory.iterdir()} | {TOOL_TEMPLATE_FILE: file}
    found = tokenizer_from_files(files)
    assert (found.chat_template, found.tool_chat_template) == ("plain", "tools")
    assert TOOL_TEMPLATE_FILE in TOKENIZER_FILES
    assert TOOL_TEMPLATE_FILE in HUB_PATTERNS


def test_no_tokenizer_is_none_for_a_checkpoint_and_an_error_for_a_directory(tmp_path):
    assert load_tokenizer({}, {}) is None
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": 3}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_damaged_files_are_named(directory, name, content):
    (directory / name).write_text(content)
    with pytest.raises(CheckpointError, match=name) as caught:
        tokenizer_from_directory(directory)
    assert "\n" not in str(caught.value)


def test_older_formats_are_converted_by_transformers(directory):
    pytest.importorskip("transformers")
    vocab = {token: i for i, token in enumerate([*byte_alphabet(), "hi", "<|endoftext|>"])}
    (directory / "tokenizer.json").unlink()
    write(directory / "vocab.json", **vocab)
    (directory / "merges.txt").write_text("#version: 0.2\nh i\n")
    write(directory / "config.json", model_type="gpt2")
    write(directory / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>")
    tokenizer = tokenizer_from_directory(directory)
    assert tokenizer.encode("hi") == [vocab["hi"]]
    assert tokenizer.eos_token_ids == (vocab["<|endoftext|>"],)


def test_without_transformers_older_formats_say_what_to_install(directory, monkeypatch):
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"pip install 'octavo\[hf\]'"):
        tokenizer_from_directory(directory)
