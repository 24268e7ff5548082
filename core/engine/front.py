"""What `AsyncEngine` has on its own side of the wire once a model is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.base.config import EngineConfig
from octavo.core.base.metrics import SchedulerStats
from octavo.core.engine import messages
from octavo.core.engine.adapter_calls import AdapterDesk
from octavo.core.engine.channel import EngineChannel
from octavo.core.engine.loading import TextSide, open_model, read_text_side
from octavo.core.engine.output_processor import OutputProcessor
from octavo.core.engine.pooling_calls import PoolingDoor
from octavo.core.engine.prompts import PromptReader, ServedModel
from octavo.core.engine.state_calls import StateDesk


@dataclass(slots=True)
class Front:
    """Readers of requests and of replies.

    Attributes:
        model: facts of the model and its tokenizer.
        reader, pooling: make requests of what callers give.
        processor: makes text of what the engine sends.
        desk: calls about adapters that wait for their answer.
        states: questions about the engine's state.
        stats: the engine's, of its last message.
    """

    model: ServedModel
    reader: PromptReader
    pooling: PoolingDoor
    processor: OutputProcessor
    desk: AdapterDesk
    states: StateDesk
    stats: SchedulerStats

    def take(self, answer: messages.AdaptersChanged | messages.StateRead) -> None:
        """Hand an answer of the engine process to whoever asked."""
        if isinstance(answer, messages.AdaptersChanged):
            self.desk.take(answer)
        else:
            self.states.take(answer)

    def end(self, cause: str) -> None:
        """The engine is gone: no question gets an answer."""
        self.desk.end(cause)
        self.states.end(cause)


async def load_front(config: EngineConfig, channel: EngineChannel, send: Callable[[messages.ToEngine], None]) -> Front:
    """Read the tokenizer while the engine process loads the weights, and wait for both.

    Raises:
        UserError: what the process refuses to start with.
        EngineDead: it ended.
    """
    receiving = asyncio.create_task(channel.receive_first())
    try:
        text, ready = await asyncio.gather(asyncio.to_thread(_text_side, config), receiving)
    finally:
        receiving.cancel()
    if isinstance(ready, messages.Failed):
        raise messages.error_of(ready)
    assert isinstance(ready, messages.Ready)
    model = ServedModel(
        vocab_size=ready.vocab_size,
        max_model_len=ready.max_model_len,
        eos_token_ids=text.eos_token_ids,
        tokenizer=text.tokenizer,
        pooler=text.pooler,
    )
    reader = PromptReader(model, grammar_timeout_seconds=config.grammar_timeout_seconds)
    door, processor = PoolingDoor(model, reader), OutputProcessor(text.tokenizer)
    desk = AdapterDesk(send, ready.adapters)
    return Front(model, reader, door, processor, desk, StateDesk(send), ready.stats)


def _text_side(config: EngineConfig) -> TextSide:
    with open_model(config) as checkpoint:
        return read_text_side(config, checkpoint)
