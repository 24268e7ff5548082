"""`LLM`: an engine in the caller's own process and thread.

    with LLM("smollm2") as llm:
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

Nothing runs but in a call: each `generate` and each step of a stream drives the one engine, whoever's requests it
then holds. Pieces of other open streams are kept for them until they are asked for.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import InvalidRequest
from octavo.core.base.lora import AdapterInfo, LoRARequest
from octavo.core.base.metrics import SchedulerStats
from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.loading import TextSide, open_model, read_text_side
from octavo.core.engine.output_processor import OutputProcessor
from octavo.core.engine.outputs import RequestOutput
from octavo.core.engine.pooling_calls import PoolingCall, PoolingDoor
from octavo.core.engine.pooling_methods import PoolingMethods
from octavo.core.engine.prompts import Message, Prompt, PromptReader, ServedModel, as_prompts
from octavo.core.engine.wire import EngineRequest

if TYPE_CHECKING:
    from octavo.core.backend.opset import OpChoice
    from octavo.core.engine.engine import Engine
    from octavo.core.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
Conversation = Sequence[Message]
Result = TypeVar("Result")


class LLM(PoolingMethods):
    """A model, loaded and ready to generate. Several may live in one process; threads that share one take turns.

    Args:
        model: a directory, a .gguf file, a Hugging Face id, or a demo name.
        options: the other fields of `EngineConfig`, by name.

    Raises:
        UserError: an option, the model or the backend is at fault; nothing is left behind.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = EngineConfig.from_keys({"model": model, **options}, "LLM")
        self._engine, text = _load(config)
        self._tokenizer = text.tokenizer
        self._model = ServedModel(
            vocab_size=self._engine.vocab_size,
            max_model_len=self._engine.sizes.max_model_len,
            eos_token_ids=text.eos_token_ids,
            tokenizer=text.tokenizer,
            pooler=text.pooler,
        )
        self._reader = PromptReader(self._model, self._engine.grammar_compiler, config.grammar_timeout_seconds)
        self._door = PoolingDoor(self._model, self._reader)
        self._processor = OutputProcessor(self._tokenizer)
        self._ids = itertools.count()
        self._streams: dict[str, deque[RequestOutput]] = {}
        self._turn = threading.RLock()  # whoever holds it may change the engine or the processor
        # A script that never closes its LLM gets its memory back with the object.
        self._close = weakref.finalize(self, self._engine.close)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when it serves token ids only."""
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its reply."""
        return self._model.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Continue prompts; all of them share the engine's batches.

        Args:
            prompts: one or several, each a string or a list of token ids.
            sampling_params: one for all, one for each, or None for the defaults.
            lora_request: the low-rank adapter of all, or of each (None: the base model). One that is not loaded is read
                from its path, and stays.

        Returns:
            One output per prompt, in the order given. A request that failed by itself (NaN logits, a logits processor
            that raised) has finish_reason ERROR and says why in `error`; the others are whole.

        Raises:
            InvalidRequest: a prompt, its parameters or its adapter can't be served; none of the prompts runs.
            CheckpointError: an adapter's files can't be used.
            EngineDead: the LLM was closed, or a step failed.
        """
        several = as_prompts(prompts)
        params, adapters = _as_params(sampling_params, len(several)), _as_adapters(lora_request, len(several))
        requests = [
            self._read(prompt, each, adapter) for prompt, each, adapter in zip(several, params, adapters, strict=True)
        ]
        return self._complete(requests, several)

    def _complete(self, requests: Sequence[EngineRequest], prompts: Sequence[Prompt]) -> list[RequestOutput]:
        """Run requests to their ends, in the order given."""
        request_ids = [request.request_id for request in requests]
        try:
            for request, prompt in zip(requests, prompts, strict=True):
                self._submit(request, prompt)
            unfinished = request_ids
            while unfinished:
                self._step_for(partial(self._any_open, unfinished))
                unfinished = [request_id for request_id in unfinished if self._processor.open_choices(request_id)]
        except BaseException:
            self._drop(request_ids)
            raise
        return [self._processor.result(request_id) for request_id in request_ids]

    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, yielding what each step brought. It starts with the first piece that is asked for;
        closing the iterator ends the request.

        Raises:
            InvalidRequest: before anything is yielded.
            EngineDead: the LLM was closed, or a step failed.
        """
        return self._stream(self._read(prompt, sampling_params or SamplingParams(), lora_request), prompt)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        lora_request: Adapters = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Reply to one conversation, or to several.

        Args:
            messages: OpenAI's messages, oldest first; or a list of such lists.
            sampling_params, lora_request: as for `generate`.
            template_arguments: of `ChatTemplate.render` (add_generation_prompt, tools, …).

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the conversation.
        """
        several = _as_conversations(messages)
        prompts = [self._reader.read_chat(each, **template_arguments) for each in several]
        return self.generate(prompts, sampling_params, lora_request=lora_request)

    def chat_stream(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **template_arguments: Any,
    ) -> Iterator[RequestOutput]:
        """Reply to one conversation, yielding what each step brought; see `chat` and `generate_stream`."""
        prompt = self._reader.read_chat(messages, **template_arguments)
        return self.generate_stream(prompt, sampling_params, lora_request=lora_request)

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Read a low-rank adapter, a PEFT directory; from now on the name means its content.

        Raises:
            InvalidRequest: this LLM was made without enable_lora and lora_modules.
            CheckpointError: its files can't be used; what the name meant before, it still means.
        """
        with self._turn:
            return self._engine.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away and free its weights; requests that were accepted end with it as it was.

        Raises:
            InvalidRequest: nothing has that name.
        """
        with self._turn:
            self._engine.adapters.unload(name)

    def list_adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name."""
        with self._turn:
            return self._engine.adapters.list()

    def stats(self) -> SchedulerStats:
        """Gauges and totals of the engine at this moment."""
        return self._engine.stats()

    def op_choices(self) -> tuple[OpChoice, ...]:
        """Which implementation runs each op, with reasons and the calls of fallbacks."""
        return self._engine.op_choices()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the model, the KV cache and the device. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def _pooling(self) -> PoolingDoor:
        return self._door

    def _run_pooling(self, call: PoolingCall[Result]) -> list[Result]:
        requests = [self._door.read(str(next(self._ids)), item) for item in call.inputs]
        return call.finish(self._complete(requests, [item.text for item in call.inputs]))

    def _read(self, prompt: Prompt, params: SamplingParams, adapter: LoRARequest | None = None) -> EngineRequest:
        request = self._reader.read(str(next(self._ids)), prompt, params)
        if adapter is None:
            return request
        with self._turn:
            self._engine.adapters.ensure(adapter.lora_name, adapter.lora_path)
        return replace(request, adapter=adapter.lora_name)

    def _submit(self, request: EngineRequest, prompt: Prompt) -> None:
        with self._turn:
            self._engine.add_request(request)
            self._processor.add(request, prompt if isinstance(prompt, str) else None)

    def _stream(self, request: EngineRequest, prompt: Prompt) -> Iterator[RequestOutput]:
        self._submit(request, prompt)
        pieces = self._streams[request.request_id] = deque()
        try:
            finished = False
            while not finished:
                if not pieces:
                    self._step_for(lambda: not pieces)
                    continue
                piece = pieces.popleft()
                finished = piece.finished
                yield piece
        finally:
            del self._streams[request.request_id]
            self._drop([request.request_id])

    def _any_open(self, request_ids: Sequence[str]) -> bool:
        return any(self._processor.open_choices(request_id) for request_id in request_ids)

    def _step_for(self, needed: Callable[[], bool]) -> None:
        """One engine step when it is this thread's turn, unless another thread's step has brought what is needed."""
        with self._turn:
            if needed():
                self._step()

    def _step(self) -> None:
        """One engine step; hands out its pieces and ends in the engine what ended by a stop string."""
        processed = self._processor.process(self._engine.step())
        for stop in processed.stops:
            self._engine.abort([(stop.request_id, stop.index)], FinishReason.STOP, stop.stop_string)
        for piece in processed.pieces:
            if (stream := self._streams.get(piece.request_id)) is not None:
                stream.append(piece)

    def _drop(self, request_ids: Sequence[str]) -> None:
        """End requests that nobody waits for any more."""
        with self._turn:
            for request_id in request_ids:
                self._engine.abort(self._processor.open_choices(request_id))
                self._processor.discard(request_id)


def _load(config: EngineConfig) -> tuple[Engine, TextSide]:
    """An engine, and its model's text side, read in a thread of its own while torch and the weights load."""
    with open_model(config) as checkpoint, ThreadPoolExecutor(1, thread_name_prefix="octavo-text") as beside:
        text = beside.submit(read_text_side, config, checkpoint)
        from octavo.core.engine.engine import Engine  # imports torch: only now, when the tokenizer is under way

        engine = Engine.from_checkpoint(config, checkpoint)
        try:
            return engine, text.result()
        except BaseException:
            engine.close()
            raise


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """A list of conversations, whether one or several were given."""
    if not messages or isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def _as_adapters(lora_request: Adapters, count: int) -> list[LoRARequest | None]:
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * count
    if not isinstance(lora_request, Sequence) or not all(isinstance(a, LoRARequest | None) for a in lora_request):
        raise InvalidRequest("lora_request must be a LoRARequest or a list of them", field="lora_request")
    if len(lora_request) != count:
        raise InvalidRequest(
            f"{len(lora_request)} lora_requests for {count} prompts; give one, or one for each", field="lora_request"
        )
    return list(lora_request)


def _as_params(sampling_params: Params, count: int) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if not isinstance(sampling_params, Sequence) or not all(isinstance(p, SamplingParams) for p in sampling_params):
        raise InvalidRequest("sampling_params must be a SamplingParams or a list of them", field="sampling_params")
    if len(sampling_params) != count:
        raise InvalidRequest(
            f"{len(sampling_params)} sampling_params for {count} prompts; give one, or one for each",
            field="sampling_params",
        )
    return list(sampling_params)
