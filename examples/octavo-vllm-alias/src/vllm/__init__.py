"""Not vLLM: Octavo's stand-in for its command, so that `python -m vllm.entrypoints.openai.api_server` starts Octavo."""


def __getattr__(name: str) -> object:
    raise AttributeError(
        f"vllm.{name} is not here: this is Octavo's stand-in for the command; `from octavo import {name}`"
    )
