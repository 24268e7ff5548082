"""`AsyncEngine`: an engine in a process of its own, and the asyncio front that talks to it.

    generate() ── PromptReader ── Submit ──> engine process ── Outputs ──> OutputProcessor ── CallStream ──> generate()
                  (in a thread)   (EngineChannel)             (_receive, one task)            one per caller

The front owns text and streams; the engine process owns tokens and KV. Whichever ends first ends the other: the
process watches its stdin, the front watches the process, and every open stream then raises EngineDead with the cause.
Nothing between a request's check and its place in the engine waits, so no request can be half submitted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import EngineDead, OctavoError
from octavo.core.base.metrics import SchedulerStats
from octavo.core.base.params import FinishReason
from octavo.core.engine import messages
from octavo.core.engine.adapter_calls import AdapterDesk, AsyncAdapterMethods
from octavo.core.engine.call_stream import CallStream
from octavo.core.engine.channel import EngineChannel
from octavo.core.engine.front import Front, load_front
from octavo.core.engine.generating_methods import AsyncGeneratingMethods
from octavo.core.engine.observer import Observer, RequestReport
from octavo.core.engine.output_processor import OutputProcessor
from octavo.core.engine.pooling_calls import PoolingCall, PoolingDoor
from octavo.core.engine.pooling_methods import AsyncPoolingMethods
from octavo.core.engine.prompts import PromptReader
from octavo.core.engine.state_calls import AsyncStateMethods
from octavo.core.engine.wire import EngineRequest
from octavo.core.load.resolve import resolve_model
from octavo.core.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

NOT_STARTED = "the engine was not started; use `async with` or await start()"


class AsyncEngine(AsyncGeneratingMethods, AsyncPoolingMethods, AsyncAdapterMethods, AsyncStateMethods):
    """A model in its own process, for one event loop.

        async with AsyncEngine("smollm2") as engine:
            async for piece in engine.generate("Hello", SamplingParams(max_tokens=8)):
                print(piece.outputs[0].text, end="")

    Args:
        model: a directory, a .gguf file, a Hugging Face id, or a demo name.
        options: the other fields of `EngineConfig`, by name.

    Attributes:
        observer: its measurements; only to be read.

    Raises:
        ConfigError: an option is wrong.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig.from_keys({"model": model, **options}, "AsyncEngine")
        self._ids = itertools.count()
        self._streams: dict[str, CallStream] = {}
        self._front: Front | None = None
        self._channel: EngineChannel | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._cause_of_end: str | None = None
        self._last_progress = 0.0
        self.observer = Observer()
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Start the process and wait until the model is loaded. Called by `async with`; once.

        Raises:
            UserError: pyzmq is missing, or the model, the backend or the memory budget is at fault.
            EngineDead: the process ended for another reason, or this engine was closed.
            In each case nothing is left behind.
        """
        if self._cause_of_end is not None:
            raise EngineDead(self._cause_of_end)
        if self._channel is not None:
            raise RuntimeError("this AsyncEngine was started already")
        source = await asyncio.to_thread(resolve_model, self.config.model, self.config.revision)
        self._channel = await EngineChannel.open(
            dataclasses.replace(self.config, model=str(source.path), revision=None)
        )
        try:
            await self._load(self._channel)
        except BaseException:
            await self.close()
            raise

    async def _load(self, channel: EngineChannel) -> None:
        self._front = await load_front(self.config, channel, self._send)
        self._receiver = asyncio.create_task(self._receive(channel, self._front))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when it serves token ids only."""
        return self._started.model.tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its reply."""
        return self._started.model.max_model_len

    @property
    def cause_of_end(self) -> str | None:
        """Why the engine is gone; None while it serves."""
        return self._cause_of_end

    @property
    def num_waiting(self) -> int:
        """Requests that were submitted, have not ended, and were not running as of the engine's last step."""
        return max(0, len(self._streams) - self.stats().num_running)

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._streams)

    def stalled_seconds(self) -> float:
        """For how long there has been work and no step has ended; 0 without work."""
        return time.monotonic() - self._last_progress if self._streams else 0.0

    async def wait_ended(self) -> None:
        """Return when the engine is gone, by itself or by close()."""
        await self._ended.wait()

    def stats(self) -> SchedulerStats:
        """The engine's gauges and totals, as of its last step."""
        return self._started.stats

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, before any request that is made after this call."""
        self._send(messages.ResetPrefixCache())

    async def close(self) -> None:
        """End the process; open streams raise EngineDead. Idempotent."""
        self._end("the engine was closed")
        channel, self._channel = self._channel, None
        if channel is None:
            return
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.wait({self._receiver})
        await channel.close(ask=self._front is not None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _started(self) -> Front:
        if self._front is None:
            raise EngineDead(self._cause_of_end or NOT_STARTED)
        return self._front

    @property
    def _reader(self) -> PromptReader:
        return self._started.reader

    @property
    def _desk(self) -> AdapterDesk:
        return self._started.desk

    @property
    def _pooling(self) -> PoolingDoor:
        return self._started.pooling

    async def _run_pooling(
        self, call: PoolingCall[Result], priority: int, report: RequestReport | None
    ) -> list[Result]:
        read = partial(self._pooling.read, priority=priority)
        stream = await self._submit(call.inputs, read, every_piece=False, report=report)
        return call.finish(await self._complete(stream))

    async def _submit(
        self,
        prompts: Sequence[Item],
        read: Callable[[str, Item], EngineRequest],
        *,
        every_piece: bool,
        report: RequestReport | None,
    ) -> CallStream:
        """Check requests, open their stream and send them: all, or when one is refused none."""
        front, since = self._started, time.monotonic()
        ids = [str(next(self._ids)) for _ in prompts]
        requests: list[EngineRequest] = await asyncio.to_thread(lambda: list(map(read, ids, prompts)))
        stream = CallStream({request_id: place for place, request_id in enumerate(ids)}, every_piece=every_piece)
        try:
            if not self._streams:
                self._last_progress = time.monotonic()  # work begins now
            for request, prompt in zip(requests, prompts, strict=True):
                self._streams[request.request_id] = stream
                front.processor.add(request, prompt if isinstance(prompt, str) else None)
                self.observer.submitted(request, since, report)
                self._send(messages.submit_of(request))
        except BaseException:
            self._drop(stream)
            raise
        return stream

    def _send(self, message: messages.ToEngine) -> None:
        if self._channel is None or self._cause_of_end is not None:
            raise EngineDead(self._cause_of_end or NOT_STARTED)
        self._channel.send(message)

    async def _receive(self, channel: EngineChannel, front: Front) -> None:
        """Hand out what the engine process sends, until it ends."""
        try:
            while True:
                message = await channel.receive()
                match message:
                    case messages.Outputs():
                        front.stats = message.stats
                        self._last_progress = time.monotonic()
                        self._hand_out(message, front.processor)
                    case messages.Refused():
                        self._refuse(message)
                    case messages.AdaptersChanged() | messages.StateRead():
                        front.take(message)
                    case messages.Failed():
                        return self._end(messages.cause_of(message))
        except EngineDead as error:
            self._end(str(error))
        except Exception as error:
            logger.exception("the front of the engine failed")
            self._end(f"the front of the engine failed: {type(error).__name__}: {error}")

    def _hand_out(self, message: messages.Outputs, processor: OutputProcessor) -> None:
        processed = processor.process(message.outputs)
        if message.step is not None:
            self.observer.stepped(message.step)
        if message.fallback_calls is not None:
            self.observer.fell_back(message.fallback_calls)
        self.observer.took(processed.pieces, self._last_progress)
        for piece in processed.pieces:
            self._streams[piece.request_id].put(piece)
        for stop in processed.stops:
            self._send(messages.Abort([(stop.request_id, stop.index)], FinishReason.STOP, stop.stop_string))

    def _refuse(self, message: messages.Refused) -> None:
        stream = self._streams.get(message.request_id)
        if stream is not None:
            error = messages.error_of(message)
            assert isinstance(error, OctavoError)
            self.observer.refused(message.request_id)
            stream.fail(error)

    def _drop(self, stream: CallStream) -> None:
        """Forget a stream; end in the engine what is still open of its requests."""
        still_open: list[tuple[str, int]] = []
        for request_id in stream.places:
            self._streams.pop(request_id, None)
            still_open += self._started.processor.open_choices(request_id)
            self._started.processor.discard(request_id)
        if still_open:
            reason = FinishReason.ABORT if self._cause_of_end is None else FinishReason.ERROR
            self.observer.dropped(still_open, reason, time.monotonic())
            with suppress(EngineDead):
                self._send(messages.Abort(still_open, FinishReason.ABORT))

    def _end(self, cause: str) -> None:
        """Let nothing in any more, and end every stream with the cause."""
        if self._cause_of_end is not None:
            return
        self._cause_of_end = cause
        self._ended.set()
        for stream in self._streams.values():
            stream.fail(EngineDead(cause))
        if self._front is not None:
            self._front.end(cause)
