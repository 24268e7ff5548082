"""`AsyncEngine` over a real engine process: streams, refusals, and every way to end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo import LLM, AsyncEngine, SamplingParams
from octavo.core.base.errors import ConfigError, EngineDead, InvalidRequest, ModelNotFound, UserError
from octavo.core.base.metrics import SchedulerStats
from octavo.core.base.params import FinishReason
from tests.fakes.chains import save_chains

OPTIONS: dict[str, Any] = {
    "tokenizer": "smollm2", "num_threads": 1, "progress": False, "max_num_seqs": 4, "num_kv_blocks": 500,
    "max_model_len": 2048,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
LONG = SamplingParams(temperature=0.0, max_tokens=2000)

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_chains(tmp_path_factory.mktemp("chains")))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a coroutine on the module's event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(model: str, run: Run) -> Iterator[AsyncEngine]:
    """One engine for all tests that leave it alive."""
    made = AsyncEngine(model, **OPTIONS)
    run(made.start())
    yield made
    run(made.close())


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short temporary folder for sockets. After the test it is empty, and no process that it started is alive."""
    before = set(psutil.Process().children(recursive=True))
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)
        assert list(Path(name).iterdir()) == []
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert psutil.wait_procs(left, timeout=5)[1] == []
    gc.collect()


async def until(engine: AsyncEngine, condition: Callable[[SchedulerStats], bool]) -> None:
    """Wait, for a second at most, for the engine's figures to become as told."""
    async with asyncio.timeout(1.0):
        while not condition(engine.stats()):
            await asyncio.sleep(0.005)


async def until_idle(engine: AsyncEngine) -> None:
    await until(engine, lambda s: s.num_running == s.num_waiting == s.kv_blocks_used == 0)


async def text_of(engine: AsyncEngine, prompt: Any, params: SamplingParams = GREEDY) -> str:
    return "".join([piece.outputs[0].text async for piece in engine.generate(prompt, params)])


# -- replies ------------------------------------------------------------------------------------------------------


def test_streams_and_whole_replies(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        pieces = [piece async for piece in engine.generate("ABC", GREEDY)]
        assert [piece.outputs[0].text for piece in pieces] == ["DEF", "GH", " ok", ""]
        assert [piece.finished for piece in pieces] == [False, False, False, True]
        whole = await engine.complete("ABC", GREEDY)
        assert (whole.prompt, whole.outputs[0].text, whole.outputs[0].finish_reason) == ("ABC", "DEFGH ok", "stop")
        assert (await engine.complete([35542], GREEDY)).outputs[0].token_ids == whole.outputs[0].token_ids
        said = "".join([p.outputs[0].text async for p in engine.chat([{"role": "user", "content": "x"}], GREEDY)])
        assert said == " Hello!"
        assert len((await engine.complete("Loop")).outputs[0].token_ids) == 16
        await until_idle(engine)

    run(scenario())


def test_replies_equal_those_of_llm(engine: AsyncEngine, model: str, run: Run) -> None:
    params = SamplingParams(temperature=1.5, seed=3, n=2, max_tokens=30, logprobs=2, prompt_logprobs=1)
    with LLM(model, **OPTIONS) as llm:
        expected = llm.generate(["Loop one", "ABC"], params)
    outputs = run(engine.complete_many(["Loop one", "ABC"], params))
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.outputs == wanted.outputs
        assert output.prompt_logprobs == wanted.prompt_logprobs


def test_many_at_once_and_several_prompts_of_one_call(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        texts = await asyncio.gather(*(text_of(engine, p) for p in ["ABC", "Go", "ABC"] * 8))
        assert texts == ["DEFGH ok", "ď😀 exaggerated", "DEFGH ok"] * 8
        joined = ["", "", ""]
        async for place, piece in engine.generate_many(["ABC", "Go", [6044]], GREEDY):
            joined[place] += piece.outputs[0].text
        assert joined == ["DEFGH ok", "ď😀 exaggerated", "ď😀 exaggerated"]
        assert await engine.complete_many([]) == []
        assert [piece async for piece in engine.generate_many([])] == []

    run(scenario())


def test_stop_strings_end_the_request_in_the_engine(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=2000, stop="threefour".replace("f", " f"), n=2)
        output = await engine.complete("Loop", params)
        assert [choice.text for choice in output.outputs] == [" one two ", " one two "]
        assert {choice.stop_reason for choice in output.outputs} == {"three four"}
        await until_idle(engine)

    run(scenario())


def test_closing_a_stream_ends_its_request(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        aborted = engine.stats().finished[FinishReason.ABORT]
        async with aclosing(engine.generate("Loop", LONG)) as pieces:
            async for _ in pieces:
                break
        await until_idle(engine)
        async for _ in engine.generate("Loop", LONG):
            break  # left to the garbage collector
        await until_idle(engine)
        async with aclosing(engine.generate_many(["Loop", "Loop"], LONG.with_(n=3))) as several:
            await anext(several)
        await until_idle(engine)
        assert engine.stats().finished[FinishReason.ABORT] == aborted + 8
        never_begun = engine.generate("Loop", LONG)
        await never_begun.aclose()
        assert engine.stats().num_running == 0

    run(scenario())


def test_cancelling_ends_requests_wherever_they_are(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        tasks = [asyncio.create_task(engine.complete("Loop", LONG)) for _ in range(6)]
        await until(engine, lambda s: s.num_running == 4 and s.num_waiting == 2)
        neighbour = asyncio.create_task(text_of(engine, "ABC"))
        for task in tasks:
            task.cancel()
        assert await neighbour == "DEFGH ok"
        await until_idle(engine)
        for delay in (0.0, 0.0005, 0.001, 0.002, 0.004):  # while it is read, sent, started
            task = asyncio.create_task(engine.complete("Loop", LONG))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until_idle(engine)

    run(scenario())


def test_priorities_and_salts_reach_the_scheduler(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        prompt = list(range(200, 264))
        cached = [
            (await engine.complete(prompt, GREEDY, cache_salt=salt, priority=5)).num_cached_tokens
            for salt in (None, None, "a", "a", "b")
        ]
        assert cached == [0, 48, 0, 48, 0]
        await engine.reset_prefix_cache()
        assert (await engine.complete(prompt, GREEDY)).num_cached_tokens == 0

    run(scenario())


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([49152], GREEDY, "prompt"),
        ([], GREEDY, "prompt"),
        ([1] * 2049, GREEDY, "prompt"),
        ([1] * 2000, LONG, "max_tokens"),
        ("x", SamplingParams(stop_token_ids=[10**6]), "stop_token_ids"),
        ("x", SamplingParams(logits_processors=(lambda prompt, output, logits: logits,)), "logits_processors"),
    ],
)
def test_what_is_refused_is_refused_alone(
    engine: AsyncEngine, run: Run, prompt: Any, params: SamplingParams, field: str
) -> None:
    async def scenario() -> None:
        neighbour = asyncio.create_task(text_of(engine, "Loop", GREEDY.with_(max_tokens=50)))
        for call in (
            lambda: engine.complete(prompt, params),
            lambda: engine.complete_many(["ABC", prompt], params),
            lambda: anext(engine.generate(prompt, params)),
            lambda: anext(engine.generate_many([prompt, prompt], params)),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await call()
            assert caught.value.field == field
        assert await neighbour == " one two three fourLoop" * 10
        await until_idle(engine)

    run(scenario())


def test_options_are_checked_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        AsyncEngine("smollm2", block_size=0)
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        AsyncEngine("smollm2", blok_size=16)


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("/no/such/model", {}, ModelNotFound),
        (None, {"num_kv_blocks": 1}, ConfigError),
        (None, {"max_model_len": 5000}, ConfigError),
        (None, {"tokenizer": "/no/such/tokenizer"}, ModelNotFound),
    ],
)
def test_errors_at_start_are_those_of_llm(
    model: str, run: Run, folder: Path, name: str | None, options: dict[str, Any], kind: type[UserError]
) -> None:
    options = OPTIONS | {"max_model_len": None} | options
    with pytest.raises(kind) as wanted:
        LLM(name or model, **options)
    with pytest.raises(kind) as caught:
        run(AsyncEngine(name or model, **options).start())
    assert str(caught.value) == str(wanted.value)
    assert caught.value.field == wanted.value.field


def test_without_pyzmq(model: str, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[serve\]'"):
        run(AsyncEngine(model, **OPTIONS).start())


def test_a_temporary_folder_that_can_not_hold_sockets(
    model: str, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = folder / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        run(AsyncEngine(model, **OPTIONS).start())
    assert list(long.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "missing"))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        run(AsyncEngine(model, **OPTIONS).start())
    long.rmdir()


# -- ends ---------------------------------------------------------------------------------------------------------


def child(folder: Path, before: set[psutil.Process]) -> psutil.Process:
    """The engine process that was started since `before`."""
    (process,) = (p for p in psutil.Process().children() if p not in before)
    return process


def test_a_killed_engine_ends_every_stream_with_the_cause(
    engine: AsyncEngine, model: str, run: Run, folder: Path
) -> None:
    async def scenario() -> None:
        before = set(psutil.Process().children())
        async with AsyncEngine(model, **OPTIONS) as doomed:
            assert list(folder.iterdir()) == [], "the sockets' folder outlives its use"
            tasks = [asyncio.create_task(doomed.complete("Loop", LONG)) for _ in range(3)]
            tasks += [asyncio.create_task(text_of(doomed, "Loop", LONG)) for _ in range(3)]
            await until(doomed, lambda s: s.num_running == 4)
            os.kill(child(folder, before).pid, signal.SIGKILL)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(end) for end in ends} == {EngineDead}
            assert {str(end) for end in ends} == {"the engine process was killed by SIGKILL; perhaps memory ran out"}
            assert len({id(end) for end in ends}) == 6, "one exception raised in several tasks"
            await asyncio.wait_for(doomed.wait_ended(), 1)
            with pytest.raises(EngineDead, match="SIGKILL"):
                await doomed.complete("ABC")
        assert doomed.cause_of_end is not None
        assert "SIGKILL" in doomed.cause_of_end
        assert await text_of(engine, "ABC") == "DEFGH ok"  # another engine does not notice

    run(scenario())


def test_an_engine_that_fails_says_why(model: str, run: Run, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with AsyncEngine(model, **OPTIONS) as doomed:
            waiting = asyncio.create_task(doomed.complete("Loop", LONG))
            await until(doomed, lambda s: s.num_running == 1)
            channel = doomed._channel
            assert channel is not None
            channel._outbox.send(b"\xc1")  # no message at all
            with pytest.raises(EngineDead, match="the engine process failed: DecodeError"):
                await waiting

    run(scenario())
    assert "DecodeError" in capfd.readouterr().err


def test_closing(model: str, run: Run, folder: Path) -> None:
    async def scenario() -> None:
        closed = AsyncEngine(model, **OPTIONS)
        with pytest.raises(EngineDead, match="was not started"):
            await closed.complete("ABC")
        with pytest.raises(EngineDead, match="was not started"):
            closed.stats()
        await closed.start()
        with pytest.raises(RuntimeError, match="started already"):
            await closed.start()
        waiting = asyncio.create_task(closed.complete("Loop", LONG))
        await until(closed, lambda s: s.num_running == 1)
        await asyncio.gather(closed.close(), closed.close())
        await closed.close()
        with pytest.raises(EngineDead, match="was closed"):
            await waiting
        with pytest.raises(EngineDead, match="was closed"):
            await closed.complete("ABC")
        with pytest.raises(EngineDead, match="was closed"):
            await closed.start()

    run(scenario())


def test_closing_before_the_start(model: str, run: Run, folder: Path) -> None:
    run(AsyncEngine(model, **OPTIONS).close())


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3, 1.0])
def test_giving_up_while_it_starts(model: str, run: Run, folder: Path, delay: float) -> None:
    async def scenario() -> None:
        starting = asyncio.create_task(AsyncEngine(model, **OPTIONS).start())
        await asyncio.sleep(delay)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(scenario())


def test_an_engine_killed_while_it_loads(model: str, run: Run, folder: Path) -> None:
    async def scenario() -> None:
        before = set(psutil.Process().children())
        starting = asyncio.create_task(AsyncEngine(model, **OPTIONS).start())
        while len(psutil.Process().children()) == len(before):
            await asyncio.sleep(0.01)
        child(folder, before).kill()
        with pytest.raises(EngineDead, match="SIGKILL"):
            await starting

    run(scenario())


def test_the_front_needs_no_torch() -> None:
    code = "import sys, octavo.core.engine.async_engine; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": "src"})
