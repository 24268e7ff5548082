"""`AsyncEngine`: an engine in a process of its own, and the asyncio front that talks to it.

    generate() ── PromptReader ── Submit ──> engine process ── Outputs ──> OutputProcessor ── queue ──> generate()
                  (in a thread)                                 (_receive, one task)           one per live request

The front owns text and streams; the engine process owns tokens and KV. Both sockets are bound here, in a folder that
only this user may enter, before the process starts. Whichever side ends first ends the other: the process watches its
stdin, the front watches the process, and every open stream then raises EngineDead with the cause.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError, EngineDead, InvalidRequest
from octavo.core.base.metrics import SchedulerStats
from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine import messages
from octavo.core.engine.loading import open_model
from octavo.core.engine.output_processor import OutputProcessor
from octavo.core.engine.outputs import RequestOutput
from octavo.core.engine.prompts import Message, Prompt, PromptReader, ServedModel
from octavo.core.text.tokenizer import Tokenizer

STOP_SECONDS = 5.0
"""How long the engine process may take to end when asked."""

KILL_SECONDS = 2.0
"""How long it may take to notice that its front is gone, before it is killed."""


class AsyncEngine:
    """A model in its own process, for one event loop.

        async with AsyncEngine("smollm2") as engine:
            async for piece in engine.generate("Hello", SamplingParams(max_tokens=8)):
                print(piece.outputs[0].text, end="")

    Args:
        model: a directory, a .gguf file, a Hugging Face id, or a demo name.
        options: the other fields of `EngineConfig`, by name.

    Raises:
        ConfigError: an option is wrong, or pyzmq is missing.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig(model=model, **options)
        self.config.validate()
        self._ids = itertools.count()
        self._streams: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._died: Exception | None = None
        self._channel: _Channel | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._stats: SchedulerStats | None = None

    async def start(self) -> None:
        """Start the process and wait until the model is loaded. Called by `async with`.

        Raises:
            UserError: the model, the backend or the memory budget is at fault; nothing is left behind.
            EngineDead: the process ended for another reason.
        """
        self._channel = await _Channel.open(self.config)
        try:
            await self._load()
        except BaseException:
            await self.close()
            raise

    async def _load(self) -> None:
        """Read the tokenizer while the engine process loads the weights."""
        assert self._channel is not None
        tokenizer, ends = await asyncio.to_thread(_text_side, self.config)
        ready = await self._channel.receive()
        if isinstance(ready, messages.Failed):
            raise messages.error_of(ready)
        if not isinstance(ready, messages.Ready):
            raise EngineDead("the engine process said something else before it was ready")
        self._model = ServedModel(
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            eos_token_ids=ends,
            tokenizer=tokenizer,
        )
        self.facts = ready
        self._stats = ready.stats
        self._reader = PromptReader(self._model)
        self._processor = OutputProcessor(tokenizer)
        self._receiver = asyncio.create_task(self._receive())

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when it serves token ids only."""
        return self._model.tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its reply."""
        return self._model.max_model_len

    @property
    def died(self) -> Exception | None:
        """Why the engine is gone; None while it serves."""
        return self._died

    def stats(self) -> SchedulerStats:
        """The engine's gauges and totals, as of its last message."""
        if self._stats is None:
            raise EngineDead("the engine was not started; use `async with` or await start()")
        return self._stats

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue one prompt, yielding what each step brought. Closing the iterator ends the request.

        Args:
            prompt: a string or a list of token ids.
            params: None takes the defaults; logits_processors can't cross processes.
            priority: lower runs earlier, under the policy "priority".
            cache_salt: only requests of one salt share cached prefixes.

        Raises:
            InvalidRequest: before anything is yielded; the engine goes on.
            EngineDead: the engine ended.
        """
        request_id = await self._submit(prompt, params, priority, cache_salt)
        try:
            async for piece in self._pieces(request_id):
                yield piece
        finally:
            await self._drop(request_id)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Continue one prompt to its end; arguments and errors are those of `generate`."""
        request_id = await self._submit(prompt, params, priority, cache_salt)
        try:
            async for _ in self._pieces(request_id):
                pass
            return self._processor.result(request_id)
        finally:
            await self._drop(request_id)

    async def chat(
        self,
        messages_: Sequence[Message],
        params: SamplingParams | None = None,
        **template_arguments: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Reply to one conversation, as `generate` does; template_arguments are those of `ChatTemplate.render`."""
        token_ids = await self.read_chat(messages_, **template_arguments)
        async for piece in self.generate(token_ids, params):
            yield piece

    async def read_chat(self, messages_: Sequence[Message], **template_arguments: Any) -> list[int]:
        """Token ids of a conversation.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the conversation.
        """
        return await asyncio.to_thread(self._reader.read_chat, messages_, **template_arguments)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        await self._send(messages.ResetPrefixCache())

    async def close(self) -> None:
        """End the process; open streams raise EngineDead. Idempotent."""
        if self._channel is None:
            return
        channel, self._channel = self._channel, None
        if self._receiver is not None:
            self._receiver.cancel()
        self._fail(EngineDead("the engine was closed"))
        await channel.close(ask=self._receiver is not None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _submit(
        self, prompt: Prompt, params: SamplingParams | None, priority: int, cache_salt: str | None
    ) -> str:
        """Check a request, open its stream and send it; returns its id."""
        params = params or SamplingParams()
        if params.logits_processors:
            raise InvalidRequest(
                "logits_processors run in the engine's own process only; use LLM for them", field="logits_processors"
            )
        request_id = str(next(self._ids))
        request = await asyncio.to_thread(
            self._reader.read, request_id, prompt, params, priority=priority, cache_salt=cache_salt
        )
        self._streams[request_id] = asyncio.Queue()
        self._processor.add(request, prompt if isinstance(prompt, str) else None)
        try:
            await self._send(messages.submit_of(request))
        except BaseException:
            await self._drop(request_id)
            raise
        return request_id

    async def _pieces(self, request_id: str) -> AsyncIterator[RequestOutput]:
        """What comes for a request, until it is finished."""
        queue = self._streams[request_id]
        finished = False
        while not finished:
            piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            finished = piece.finished
            yield piece

    async def _send(self, message: messages.ToEngine) -> None:
        if self._died is not None:
            raise self._died
        if self._channel is None:
            raise EngineDead("the engine was not started; use `async with` or await start()")
        await self._channel.send(message)

    async def _receive(self) -> None:
        """Hand out what the engine process sends, until it ends."""
        channel = self._channel
        assert channel is not None
        while True:
            message = await channel.receive()
            if isinstance(message, messages.Failed):
                self._fail(messages.error_of(message))
                return
            if isinstance(message, messages.Outputs):
                self._stats = message.stats
                await self._hand_out(message)

    async def _hand_out(self, message: messages.Outputs) -> None:
        for output in message.outputs:
            if output.rejected_field is not None and (queue := self._streams.get(output.request_id)) is not None:
                queue.put_nowait(InvalidRequest(output.error or "refused", field=output.rejected_field or None))
        processed = self._processor.process(message.outputs)
        for piece in processed.pieces:
            self._streams[piece.request_id].put_nowait(piece)
        for stop in processed.stops:
            await self._send(messages.Abort([(stop.request_id, stop.index)], FinishReason.STOP, stop.stop_string))

    async def _drop(self, request_id: str) -> None:
        """Forget a stream; end in the engine what is still open of its request."""
        del self._streams[request_id]
        still_open = self._processor.open_choices(request_id)
        self._processor.discard(request_id)
        if still_open and self._died is None and self._channel is not None:
            await self._send(messages.Abort(still_open, FinishReason.ABORT))

    def _fail(self, error: Exception) -> None:
        self._died = self._died or error
        for queue in self._streams.values():
            queue.put_nowait(self._died)


class _Channel:
    """The engine process and the two sockets to it. Made by `open`, ended by `close`."""

    def __init__(self, folder: Path, zmq_context: Any, inbox: Any, outbox: Any) -> None:
        self._folder = folder
        self._context = zmq_context
        self._inbox = inbox
        self._outbox = outbox
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    async def open(cls, config: EngineConfig) -> Self:
        """Bind the sockets and start the process."""
        try:
            import zmq
            import zmq.asyncio
        except ImportError as error:
            raise ConfigError(
                "AsyncEngine and octavo serve need pyzmq; pip install 'octavo[serve]'", field=None
            ) from error
        folder = Path(tempfile.mkdtemp(prefix="octavo-"))
        context = zmq.asyncio.Context()
        inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        channel = cls(folder, context, inbox, outbox)
        try:
            inbox.bind(f"ipc://{folder}/from")
            outbox.bind(f"ipc://{folder}/to")
            await channel._start_process(config)
        except BaseException:
            await channel.close(ask=False)
            raise
        return channel

    async def _start_process(self, config: EngineConfig) -> None:
        import octavo

        # The child must find this very package, also when it runs from a source tree that is not installed.
        home = str(Path(octavo.__file__).parent.parent)
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "octavo.core.engine.process",
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        start = {"config": dataclasses.asdict(config), "folder": str(self._folder)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(start).encode() + b"\n")
        await self._process.stdin.drain()

    async def send(self, message: messages.ToEngine) -> None:
        """Queue a message for the process."""
        await self._outbox.send(messages.encode(message))

    async def receive(self) -> messages.FromEngine:
        """The next message; a Failed when the process is gone and has left none."""
        assert self._process is not None
        arriving = asyncio.ensure_future(self._inbox.recv())
        ending = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({arriving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done():
                await asyncio.wait({arriving}, timeout=0.2)  # its last words may still be on the way
            if arriving.done():
                return messages.decode_from_engine(arriving.result())
            return messages.Failed("EngineDead", f"it ended with exit code {self._process.returncode}")
        finally:
            arriving.cancel()
            ending.cancel()

    async def close(self, *, ask: bool) -> None:
        """End the process and remove the sockets; with `ask`, give it time to end by itself."""
        if self._process is not None:
            await self._end_process(self._process, ask=ask)
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_process(self, process: asyncio.subprocess.Process, *, ask: bool) -> None:
        if ask and process.returncode is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self.send(messages.Stop())
                    await process.wait()
        if process.stdin is not None:
            process.stdin.close()  # the process ends with its stdin, also while it loads or computes
        try:
            await asyncio.wait_for(process.wait(), KILL_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


def _text_side(config: EngineConfig) -> tuple[Tokenizer | None, tuple[int, ...]]:
    with open_model(config) as opened:
        return opened.tokenizer, opened.eos_token_ids
