"""/v1/chat/completions, whole and streamed, with OpenAI's client; what templates refuse."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordLevel

from tests.fakes.chain_model import save_chain_model
from tests.fakes.chains import LETTERS
from tests.serve.conftest import Server, error_of


def joined(stream: Any) -> dict[int, dict[str, Any]]:
    """Choice index -> what its chunks add up to."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"content": "", "logprobs": [], "finish_reason": None})
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            is_first = choice.index not in choices
            so_far = choices[choice.index]
            assert choice.delta.role == ("assistant" if is_first else None)
            so_far["content"] += choice.delta.content or ""
            so_far["finish_reason"] = choice.finish_reason
            so_far["logprobs"] += choice.logprobs.model_dump()["content"] if choice.logprobs else []
    return dict(choices)


def both(server: Server, content: Any = "Hi", **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices of a reply, after checking that it is the same streamed."""
    whole = {
        choice.index: {
            "content": choice.message.content,
            "logprobs": choice.logprobs.model_dump()["content"] if choice.logprobs else [],
            "finish_reason": choice.finish_reason,
        }
        for choice in server.chat(content, **fields).choices
    }
    assert joined(server.chat(content, stream=True, **fields)) == whole
    return whole


def test_a_reply_and_its_usage(server: Server) -> None:
    reply = server.chat(temperature=0)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", " Hello!")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert reply.usage.completion_tokens == 3
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 3


def test_streams_equal_whole_replies(server: Server) -> None:
    assert both(server, temperature=0)[0]["content"] == " Hello!"
    several = both(server, n=3, seed=5, temperature=3.0, max_tokens=6)
    assert len({choice["content"] for choice in several.values()}) == 3
    assert {choice["finish_reason"] for choice in several.values()} == {"length"}


def test_usage_ends_a_stream_when_asked(server: Server) -> None:
    *chunks, last = server.chat(n=2, temperature=0, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage == server.chat(n=2, temperature=0).usage
    assert last.usage.completion_tokens == 6
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_max_tokens_fills_the_context_by_default(server: Server) -> None:
    reply = server.chat(" one" * 1950, temperature=0, ignore_eos=True)
    assert reply.usage.total_tokens == 2048
    assert server.chat(max_tokens=5, max_completion_tokens=2, temperature=0).usage.completion_tokens == 2
    assert server.chat(max_tokens=2, temperature=0).usage.completion_tokens == 2


def test_logprobs_have_bytes_that_join_to_the_text(server: Server) -> None:
    """vllm-mlx#109 and its kind."""
    ids = [143, 233, 10813, 242, 218, 24098]
    bias = {"logit_bias": {str(i): 100 for i in ids}, "temperature": 1.0, "max_tokens": 40, "seed": 3}
    choice = both(server, logprobs=True, top_logprobs=2, **bias)[0]
    data = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"])
    assert len(choice["logprobs"]) == 40
    assert data.decode("utf-8", "replace") == choice["content"]
    for entry in choice["logprobs"]:
        assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace")
        assert [len(entry["top_logprobs"]), -10_000 < entry["logprob"] <= 0] == [2, True]
        assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]


def test_the_token_that_ends_a_reply_has_a_logprob_and_no_bytes(server: Server) -> None:
    choice = both(server, logprobs=True, top_logprobs=1, temperature=0)[0]
    assert [entry["token"] for entry in choice["logprobs"]] == [" Hello", "!", "<|im_end|>"]
    assert choice["logprobs"][-1]["bytes"] is None
    assert b"".join(bytes(entry["bytes"] or ()) for entry in choice["logprobs"]).decode() == choice["content"]


def test_logprobs_without_alternatives(server: Server) -> None:
    choice = both(server, logprobs=True, temperature=0)[0]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]] == [[], [], []]


def test_stop_strings(server: Server) -> None:
    assert both(server, temperature=0, stop="lo!")[0]["content"] == " Hel"


def test_text_parts_are_joined_by_a_line_feed(server: Server) -> None:
    """InternVL#726: a template that joins strings gets a list."""
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hi"}]
    in_parts = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "Say\nhi"}, {"role": "user", "content": "Say\nhi"}]
    in_parts_usage, plain_usage = (server.chat(each, max_tokens=1).usage for each in (in_parts, plain))
    assert in_parts_usage.prompt_tokens == plain_usage.prompt_tokens
    assert plain_usage.prompt_tokens_details.cached_tokens == (plain_usage.prompt_tokens - 1) // 16 * 16


def test_an_image_is_refused(server: Server) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = server.refusal("chat/completions", messages=[{"role": "user", "content": [image]}])
    assert error["param"] == "messages[0].content[0]"
    assert "text only" in error["message"]


@pytest.mark.parametrize("messages", [[], [{}], [{"role": "user", "content": 5}], [{"role": 5, "content": "x"}]])
def test_malformed_conversations_are_refused(server: Server, messages: list[Any]) -> None:
    assert "messages" in server.refusal("chat/completions", messages=messages)["param"]


def test_no_generation_prompt(server: Server) -> None:
    with_prompt, without = (server.chat(max_tokens=1, add_generation_prompt=on).usage for on in (True, False))
    assert without.prompt_tokens < with_prompt.prompt_tokens


def test_variables_of_the_template_can_not_replace_the_conversation(server: Server) -> None:
    error = server.refusal(
        "chat/completions", messages=[{"role": "user", "content": "x"}], chat_template_kwargs={"messages": []}
    )
    assert "messages" in error["message"]


# -- templates that refuse ----------------------------------------------------------------------------------------

GEMMA_STYLE = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{{ message['role'] }} {{ message['content'] }} {% endfor %}"""


def word_model(directory: Path, template: str | None) -> str:
    """A model of eight words, with or without a chat template."""
    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "user", "assistant", "hi", "there", "you"])}
    save_chain_model(directory, [[5, 6, 7, 2]], len(words), 2, max_position_embeddings=64)
    backend = tokenizers.Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(directory / "tokenizer.json"))
    facts = {"bos_token": "<s>", "eos_token": "</s>"} | ({} if template is None else {"chat_template": template})
    (directory / "tokenizer_config.json").write_text(json.dumps(facts))
    return str(directory)


class Words(NamedTuple):
    """Three servers in one process: one with a template that refuses, one without template, one without tokenizer."""

    strict: Server
    bare: Server
    ids_only: Server


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, chain_model: Path) -> Iterator[Words]:
    folder = tmp_path_factory.mktemp("words")
    models = [word_model(folder / str(i), template) for i, template in enumerate([GEMMA_STYLE, None])]
    servers = Words(*(Server(model, max_model_len=64) for model in (*models, str(chain_model))))
    for made in servers:
        made.start()
    try:
        for made in servers:
            made.wait_ready()
        yield servers
    finally:
        for made in servers:
            made.stop()


def user(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "system", "content": "x"}, *user("hi")], "System role not supported"),
        ([{"role": "system", "content": "x"}], "System role not supported"),
        (user("hi", "hi"), "roles must alternate"),
    ],
)
def test_a_template_refuses_in_its_own_words(words: Words, messages: list[dict[str, str]], says: str) -> None:
    """sglang#892."""
    strict = words.strict
    error = strict.refusal("chat/completions", messages=messages)
    assert says in error["message"]
    assert error["param"] == "messages"
    assert strict.chat("hi", max_tokens=1).choices[0].finish_reason == "length"


def test_without_a_template_chat_is_refused_and_completions_go_on(words: Words) -> None:
    bare = words.bare
    assert "no chat template" in bare.refusal("chat/completions", messages=user("hi"))["message"]
    assert bare.complete("hi", temperature=0).choices[0].text == "thereyou"


def test_without_a_tokenizer_token_ids_are_served(words: Words) -> None:
    server = words.ids_only
    reply = server.complete(LETTERS[:1], temperature=0, logprobs=1, echo=True)
    assert reply.choices[0].text == ""
    assert reply.choices[0].logprobs.tokens == [f"token_id:{i}" for i in LETTERS]
    assert reply.usage.completion_tokens == 4
    assert "".join(c.choices[0].text for c in server.complete(LETTERS[:1], temperature=0, stream=True)) == ""
    assert "needs a tokenizer" in server.refusal(prompt="ABC")["message"]
    assert server.refusal(prompt=[5], stop="x")["param"] == "stop"
    assert "needs a tokenizer" in server.refusal("chat/completions", messages=user("hi"))["message"]


def test_two_servers_in_one_process_keep_apart(words: Words) -> None:
    strict, bare = words.strict, words.bare
    assert strict.engine.max_model_len == bare.engine.max_model_len == 64
    before = bare.stats().generated_tokens
    strict.complete("hi", max_tokens=3, ignore_eos=True)
    assert bare.stats().generated_tokens == before
    error_of(bare.post("completions", prompt="hi " * 70), 400)
