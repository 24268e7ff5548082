"""`octavo run`: one answer, streamed; a conversation; what is read from a pipe."""

import io

import pytest

from octavo.core.base.errors import InvalidRequest
from octavo.core.cli.main import main
from tests.fakes.scripted_llm import piece, scripted_llm


@pytest.fixture
def llm(monkeypatch):
    return scripted_llm(monkeypatch)


@pytest.fixture
def stdin(monkeypatch):
    def put(text, tty=False):
        stream = io.StringIO(text)
        stream.isatty = lambda: tty
        monkeypatch.setattr("sys.stdin", stream)

    return put


def test_a_prompt_is_answered_through_the_chat_template(llm, capsys):
    assert main(["run", "m", "Hi", "--system", "Be brief.", "--max-tokens", "7", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == "Hello there\n"
    (made,) = llm.made
    assert made.fields["model"] == "m"
    assert made.fields["dtype"] == "float32"
    assert made.closed
    ((messages, params),) = made.asked
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert params.max_tokens == 7
    assert params.greedy


def test_raw_continues_the_text(llm, capsys):
    assert main(["run", "m", "Once", "--raw", "--temperature", "0.5", "--seed", "3", "--stop", "a", "--stop", "b"]) == 0
    assert capsys.readouterr().out == "Hello there\n"
    ((prompt, params),) = llm.made[0].asked
    assert prompt == "Once"
    assert (params.temperature, params.seed, params.stop) == (0.5, 3, ("a", "b"))


def test_a_pipe_is_the_prompt(llm, stdin):
    stdin("from a pipe\n")
    assert main(["run", "m", "--raw"]) == 0
    assert llm.made[0].asked[0][0] == "from a pipe\n"


def test_an_empty_pipe_is_refused_before_anything_loads(llm, stdin, capsys):
    stdin("")
    assert main(["run", "m"]) == 2
    assert "there is no prompt" in capsys.readouterr().err
    assert llm.made == []


def test_a_conversation_remembers(llm, stdin, capsys):
    stdin("Hi\n\nAgain\n", tty=True)
    assert main(["run", "m"]) == 0
    first, second = (messages for messages, _ in llm.made[0].asked)
    assert [turn["content"] for turn in first] == ["Hi"]
    assert [(turn["role"], turn["content"]) for turn in second] == [
        ("user", "Hi"),
        ("assistant", "Hello there"),
        ("user", "Again"),
    ]


def test_ctrl_c_ends_the_reply_and_not_the_conversation(llm, stdin, capsys):
    def interrupted(self, messages, params):
        self.asked.append(list(messages))
        yield piece("Hel")
        if len(self.asked) == 1:
            raise KeyboardInterrupt

    llm.chat_stream = interrupted
    stdin("One\nTwo\n", tty=True)
    assert main(["run", "m"]) == 0
    assert "[interrupted]" in capsys.readouterr().out
    assert [turn["content"] for turn in llm.made[0].asked[1]] == ["Two"]


def test_a_model_without_a_template_names_raw(llm, capsys):
    def refuse(self, messages, params):
        raise InvalidRequest("the model has no chat template", field="messages")

    llm.chat_stream = refuse
    assert main(["run", "m", "Hi"]) == 2
    assert capsys.readouterr().err == (
        "octavo: error: the model has no chat template; --raw continues the text without a template\n"
    )
