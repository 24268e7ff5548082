"""A stand-in for LLM that answers from a script, so that the commands are tested without a model."""

from types import SimpleNamespace

import octavo


def piece(text, token_ids=(1,)):
    """One delta of a reply."""
    return SimpleNamespace(outputs=[SimpleNamespace(text=text, token_ids=list(token_ids))])


def scripted_llm(monkeypatch):
    """Put a fresh class in the place of `octavo.LLM` for one test, and return it."""
    fake = type("ScriptedLLM", (_ScriptedLLM,), {"made": []})
    monkeypatch.setitem(vars(octavo), "LLM", fake)  # setattr would import the real one first
    return fake


class _ScriptedLLM:
    """Replies with `reply`, one piece a word; keeps what it was asked.

    Attributes:
        made: every instance, newest last.
    """

    reply = ("Hello", " there")
    made: list

    def __init__(self, **fields):
        self.fields, self.asked, self.closed = fields, [], False
        type(self).made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True

    def generate(self, prompts, params):
        self.asked.append((prompts, params))
        many = params if isinstance(params, list) else [params] * len(prompts)
        return [piece("", range(wanted.max_tokens)) for wanted in many]

    def generate_stream(self, prompt, params):
        self.asked.append((prompt, params))
        if isinstance(prompt, str):
            yield from map(piece, self.reply)
        else:
            yield from (piece("x") for _ in range(params.max_tokens))

    def chat_stream(self, messages, params):
        self.asked.append(([dict(message) for message in messages], params))
        yield from map(piece, self.reply)
