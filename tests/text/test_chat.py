"""Chat templates: as Hugging Face renders them, refusals as the request's error, one BOS."""

import contextlib
from datetime import datetime

import pytest

from octavo.core.base.errors import CheckpointError, InvalidRequest
from octavo.core.text.chat import ChatTemplate, chat_template_of, encode_chat

GEMMA_STYLE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}
{% endif %}
{{ '<turn>' + message['role'] + '\n' + message['content'] | trim + '<end>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"""
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def user(content):
    return {"role": "user", "content": content}


def text_parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.fixture(scope="module")
def smollm2_chat(smollm2):
    return chat_template_of(smollm2)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        [user("Hi 😀")],
        [{"role": "system", "content": "Be brief."}, user("Hi"), {"role": "assistant", "content": "Yes?"}, user("")],
    ],
)
def test_equals_hugging_face(smollm2_chat, hf_smollm2, messages, prompt):
    expected = hf_smollm2.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert smollm2_chat.render(messages, add_generation_prompt=prompt) == expected


def test_text_parts_equal_the_joined_string(smollm2_chat):
    """Case E1: SmolLM2's template adds strings; parts are joined with a line feed."""
    system = {"role": "system", "content": text_parts("Be", "brief")}
    rendered = smollm2_chat.render([system, user(text_parts("Say", "hi"))])
    assert rendered == smollm2_chat.render([{"role": "system", "content": "Be\nbrief"}, user("Say\nhi")])
    assert not smollm2_chat.takes_parts


def test_a_template_that_reads_parts_gets_them():
    template = ChatTemplate(PARTS, {})
    assert template.takes_parts
    assert template.render([user(text_parts("Say", "hi")), user("!")]) == "Sayhi!"
    assert not ChatTemplate("{{ messages[0].content | string | trim }}", {}).takes_parts


def test_an_image_is_refused(smollm2_chat):
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(InvalidRequest, match=r"messages\[1\].content\[1\] is no text.*text only"):
        smollm2_chat.render([user("a"), user([*text_parts("b"), image])])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] has no role"),
        ([{"content": "hi"}], r"messages\[0\] has no role"),
        ([user("a"), user(3)], r"messages\[1\].content is a int"),
        ([user([{"type": "text"}])], r"messages\[0\].content\[0\]"),
        ([user(["hi"])], r"messages\[0\].content\[0\]"),
    ],
)
def test_malformed_messages_are_named(smollm2_chat, messages, message):
    with pytest.raises(InvalidRequest, match=message):
        smollm2_chat.render(messages)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "x"}, user("y")], "System role not supported"),
        ([{"role": "system", "content": "x"}], "System role not supported"),
        ([user("a"), user("b")], "Conversation roles must alternate"),
    ],
)
def test_a_refusal_carries_the_templates_words(messages, words):
    """Case E4."""
    with pytest.raises(InvalidRequest, match=words):
        ChatTemplate(GEMMA_STYLE, {"bos_token": "<bos>"}).render(messages)


def test_no_template_says_use_completions(gemma):
    with pytest.raises(InvalidRequest, match="no chat template; use completions"):
        chat_template_of(gemma)


@pytest.mark.parametrize(
    "source", ["{{ 1 + 'a' }}", "{{ nothing.at.all }}", "{{ messages[9].content }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_fails_is_the_requests_error(source):
    with pytest.raises(InvalidRequest, match="chat template rejected"):
        ChatTemplate(source, {}).render([user("hi")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source):
    template = ChatTemplate(source, {})
    with contextlib.suppress(InvalidRequest):
        assert template.render([user("hi")]) == ""  # jinja shows what it forbids as undefined


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr("octavo.core.text.chat.MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        ChatTemplate("{% for i in range(99999) %}{{ i }}{% endfor %}", {}).render([user("hi")])


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_all_names_that_templates_read(name):
    template = ChatTemplate(
        "{% for m in messages %}{{ m.reasoning_content }},{{ m.reasoning }},{{ m.thinking }};{% endfor %}", {}
    )
    said = {"role": "assistant", "content": "Four.", name: "Hm"}
    assert template.render([user("x"), said]) == ",,;Hm,Hm,Hm;"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    beside_a_call = template.render([{**said, "tool_calls": [call]}])
    assert beside_a_call == ("Hm,Hm,Hm;" if name == "thinking" else "Hm,Hm,;")


@pytest.mark.parametrize("name", ["self", "args", "messages_", "", "loop", "range", "raise_exception"])
def test_variables_may_have_any_name(smollm2_chat, name):
    """Those that Python's calls use among them."""
    assert smollm2_chat.render([user("x")], variables={name: 1}) == smollm2_chat.render([user("x")])


def test_a_model_may_have_a_template_of_its_own_for_tools():
    template = ChatTemplate("plain {{ messages[0].content }}", {}, with_tools="{{ tools }} {{ messages[0].content }}")
    assert template.render([user("x")]) == "plain x"
    assert template.render([user("x")], tools=[]) == "plain x"
    assert template.render([user("x")], tools=["f"]) == "['f'] x"


OPEN = [user("Where?"), {"role": "assistant", "content": " I will go "}]


def test_a_rendered_conversation_can_end_in_its_last_message(smollm2_chat):
    whole = smollm2_chat.render(OPEN, add_generation_prompt=False)
    open_end = smollm2_chat.render(OPEN, add_generation_prompt=False, continue_final_message=True)
    assert open_end.endswith(" I will go ")
    assert whole == open_end + "<|im_end|>\n"


def test_the_open_end_is_behind_the_last_part():
    parts = [user("x"), {"role": "assistant", "content": text_parts("Say", "hi")}]
    rendered = ChatTemplate(PARTS + " end", {}).render(parts, add_generation_prompt=False, continue_final_message=True)
    assert rendered == "xSayhi"
    assert parts[1]["content"] == text_parts("Say", "hi")  # what the caller gave stays as it was


@pytest.mark.parametrize(
    ("template", "messages", "options", "says"),
    [
        ("{{ messages[-1].content }}", OPEN, {}, "give one of them"),
        ("{{ messages[0].content }}", OPEN, {"add_generation_prompt": False}, "does not write the last message"),
        ("{{ messages }}", [user("")], {"add_generation_prompt": False}, "needs words"),
    ],
)
def test_what_can_not_go_on_is_refused(template, messages, options, says):
    with pytest.raises(InvalidRequest, match=says) as refusal:
        ChatTemplate(template, {}).render(messages, continue_final_message=True, **options)
    assert refusal.value.field == "continue_final_message"


def test_the_older_form_of_calls_is_refused(smollm2_chat):
    for message in ({"role": "function", "content": "x"}, {**user("x"), "function_call": {"name": "f"}}):
        with pytest.raises(InvalidRequest, match="older form"):
            smollm2_chat.render([message])


def test_a_bad_template_is_the_checkpoints_error():
    with pytest.raises(CheckpointError, match="not valid jinja, line 2"):
        ChatTemplate("a\n{% if %}", {})
    with pytest.raises(CheckpointError, match="characters; the limit is"):
        ChatTemplate("a" * 1_000_001, {})


def test_what_published_templates_use():
    source = (
        "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% set ns.n = ns.n + 1 %}{% endgeneration %}{% endfor %}"
        "|{{ tools | tojson }}|{{ strftime_now('%Y') }}|{{ ns.n }}|{{ thinking }}|{{ {'a': 'é<'} | tojson(indent=1) }}"
    )
    template = ChatTemplate(source, {}, now=lambda: datetime(2031, 1, 1))
    messages = [user("a"), {"role": "tool", "content": "skipped"}, {"role": "assistant", "content": None}]
    rendered = template.render(messages, tools=[{"name": "f"}], variables={"thinking": True})
    assert rendered == 'a|[{"name": "f"}]|2031|2|True|{\n "a": "é<"\n}'


def test_blocks_are_trimmed_as_hugging_face_does():
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(source, {}).render([user("a"), user("b")]) == "a\nb\n"


def test_exactly_one_bos(gemma, smollm2):
    """Case E3: the template writes BOS and the tokenizer adds one."""
    rendered = ChatTemplate(GEMMA_STYLE, gemma.special_tokens).render([user("hi")])
    assert rendered.startswith("<bos><turn>user")
    expected = [2, *gemma.encode(rendered.removeprefix("<bos>"), add_special_tokens=False)]
    assert encode_chat(gemma, rendered) == expected
    assert encode_chat(gemma, "<bos>" + rendered) == expected
    assert encode_chat(gemma, rendered.removeprefix("<bos>")) == expected
    assert encode_chat(gemma, "") == [2]
    assert gemma.encode("hi").count(2) == 1


def test_no_bos_where_the_tokenizer_adds_none(smollm2, smollm2_chat, hf_smollm2):
    messages = [user("Hi"), {"role": "assistant", "content": "Yes?"}]
    ids = encode_chat(smollm2, smollm2_chat.render(messages))
    assert ids == hf_smollm2.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
