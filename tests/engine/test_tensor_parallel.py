"""A model over the processes of several ranks: the same answers, and every way in which a rank may be lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo import LLM, AsyncEngine, SamplingParams
from octavo.core.backend import Capabilities, SingleRank
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import BackendUnavailable, ConfigError, EngineDead, InvalidRequest
from octavo.core.cli.main import main
from octavo.core.engine import multiproc
from octavo.core.engine.engine import Engine
from octavo.core.engine.multiproc import MultiprocExecutor
from octavo.core.engine.outputs import RequestOutput
from octavo.core.engine.wire import EngineRequest
from tests.engine.worlds import NullWorld, TinyModels, drive
from tests.fakes import tiny_encoders, tiny_models
from tests.fakes.chains import save_chains
from tests.fakes.tiny_models import random_prompt
from tests.pool.directories import compact, write_modules

ROOT = Path(__file__).parents[2]
VOCAB = 199
TIGHT = 70
"""KV blocks: two or three requests at once, so that batches preempt."""

LENGTHS = (1, 3, 4, 5, 16, 17, 33, 64, 90)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, prompt_logprobs=1)
TOLERANCE = 1e-4

OPTIONS: dict[str, Any] = {"backend": "cpu", "num_threads": 2, "progress": False, "num_kv_blocks": TIGHT}


def prompts() -> list[list[int]]:
    """Of several lengths; every other one begins like the longest."""
    longest = random_prompt(VOCAB, 90)
    return [longest[:length] if i % 2 else random_prompt(VOCAB, length) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def whole(tiny: TinyModels) -> Iterator[LLM]:
    """The model on one device, with room, and without a cache."""
    with tiny.llm("llama", enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def split(tiny: TinyModels) -> Iterator[LLM]:
    """The model over two ranks, with a tight pool and a prefix cache. Tests leave it alive."""
    with tiny.llm("llama", tensor_parallel_size=2, num_kv_blocks=TIGHT) as llm:
        yield llm


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    """What a test starts has ended with it; fixtures of the module are started before."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert psutil.wait_procs(left, timeout=5)[1] == []


def executor_of(llm: LLM) -> MultiprocExecutor:
    executor = llm._engine._executor
    assert isinstance(executor, MultiprocExecutor)
    return executor


def logprobs_of(output: RequestOutput) -> list[float]:
    """The log probability of every token but the first, prompt and reply."""
    positions = [*(output.prompt_logprobs or [None])[1:], *(output.outputs[0].logprobs or [])]
    return [next(iter(position.values())).logprob for position in positions if position is not None]


def check_equal(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=TOLERANCE)


# -- answers --------------------------------------------------------------------------------------------------


def test_replies_equal_those_of_one_device(whole: LLM, split: LLM) -> None:
    """Log probabilities of prompts and replies are a function of all logits."""
    expected = whole.generate(prompts(), GREEDY)
    assert len(logprobs_of(expected[-1])) == LENGTHS[-1] - 1 + 24
    check_equal(split.generate(prompts(), GREEDY), expected)
    assert split.stats().preemptions > 0


def test_replies_with_tokens_guessed_ahead_equal_those_without(whole: LLM, tiny: TinyModels) -> None:
    with tiny.llm("llama", tensor_parallel_size=2, num_speculative_tokens=4) as llm:
        params = GREEDY.with_(max_tokens=100)
        check_equal(llm.generate(prompts()[:5], params), whole.generate(prompts()[:5], params))
        assert llm.stats().accepted_tokens > 0


def test_replies_after_cache_hits_equal_cold_ones(whole: LLM, split: LLM) -> None:
    params = GREEDY.with_(prompt_logprobs=None)
    split.reset_prefix_cache()
    (cold,) = split.generate(prompts()[-1:], params)
    (hot,) = split.generate(prompts()[-1:], params)
    assert (cold.num_cached_tokens, hot.num_cached_tokens) == (0, 88)
    assert hot.outputs == cold.outputs
    check_equal([hot], whole.generate(prompts()[-1:], params))


def test_bits_do_not_depend_on_company(split: LLM) -> None:
    """Sampled replies too: the group adds in one order, whatever shares the batch, and rank 0 alone draws."""
    each = [
        SamplingParams(max_tokens=20, temperature=1.2, seed=i, top_p=0.9, logprobs=3, frequency_penalty=0.3)
        for i in range(len(LENGTHS))
    ]
    alone = [split.generate([prompt], params)[0].outputs for prompt, params in zip(prompts(), each, strict=True)]
    assert [output.outputs for output in split.generate(prompts(), each)] == alone


def test_what_a_request_asks_of_the_sampler_reaches_rank_0(whole: LLM, split: LLM) -> None:
    prompt = prompts()[3]
    usual = whole.generate([prompt], GREEDY)[0].outputs[0].token_ids
    for changes in (
        {"logit_bias": {7: 100.0}},
        {"allowed_token_ids": (3, 5, 8)},
        {"bad_words_token_ids": ((usual[0],), tuple(usual[1:3]))},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"stop_token_ids": (usual[4],), "min_tokens": 3},
        {"n": 3, "max_tokens": 0},
    ):
        params = GREEDY.with_(**changes)
        found, expected = (llm.generate([prompt], params)[0] for llm in (split, whole))
        assert [choice.token_ids for choice in found.outputs] == [choice.token_ids for choice in expected.outputs]
        assert [choice.stop_reason for choice in found.outputs] == [choice.stop_reason for choice in expected.outputs]


def test_what_can_not_cross_is_refused_and_the_engine_goes_on(whole: LLM, split: LLM) -> None:
    with pytest.raises(InvalidRequest, match="set tensor_parallel_size to 1") as error:
        split.generate([[1, 2]], SamplingParams(logits_processors=(lambda _p, _o, logits_V: logits_V,)))
    assert error.value.field == "logits_processors"
    check_equal(split.generate([[1, 2]], GREEDY), whole.generate([[1, 2]], GREEDY))


def test_ops_are_those_of_one_device(whole: LLM, split: LLM) -> None:
    assert {(choice.op, choice.implementation) for choice in split.op_choices()} == {
        (choice.op, choice.implementation) for choice in whole.op_choices()
    }


def test_more_ranks_than_kv_heads_windows_and_a_tied_vocabulary_that_does_not_divide(tiny: TinyModels) -> None:
    with tiny.llm("gemma3") as llm:
        expected = llm.generate(prompts(), GREEDY)
    with tiny.llm("gemma3", tensor_parallel_size=4, num_threads=1) as llm:
        check_equal(llm.generate(prompts(), GREEDY), expected)


def test_vectors_of_an_encoder_equal_those_of_one_device(tmp_path: Path) -> None:
    """Rank 0 alone makes vectors of rows that every rank has."""
    model = tiny_encoders.make_encoder("bert")
    write_modules(tiny_models.save(model, tmp_path), compact("mean", 48))
    texts = [tiny_encoders.random_text(model.config, length) for length in (17, 1, 60, 5)]
    options = {**OPTIONS, "num_kv_blocks": None}
    with LLM(str(tmp_path), **options) as llm:
        expected = llm.embed(texts)
    with LLM(str(tmp_path), tensor_parallel_size=2, **options) as llm:
        for one, other in zip(llm.embed(texts), expected, strict=True):
            assert one.outputs.embedding == pytest.approx(other.outputs.embedding, abs=TOLERANCE)


# -- starting -------------------------------------------------------------------------------------------------


def test_engines_that_start_at_once_do_not_meet(tiny: TinyModels) -> None:
    """vllm#40443, #28498, #7196: two groups were told one port."""

    def reply(_: int) -> list[int]:
        with tiny.llm("llama", tensor_parallel_size=2) as llm:
            return llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(reply, range(2))
    assert other == one


def test_the_kv_cache_is_the_smallest_of_any_rank(tiny: TinyModels) -> None:
    """A size in bytes buys each rank twice the blocks, since it holds half of the heads."""
    with tiny.llm("llama", num_kv_blocks=None, kv_cache_memory_bytes=1 << 19) as llm:
        alone = llm.stats().kv_blocks_total
    with tiny.llm("llama", num_kv_blocks=None, kv_cache_memory_bytes=1 << 19, tensor_parallel_size=2) as llm:
        assert llm.stats().kv_blocks_total == 2 * alone + 1  # block 0 is no one's


def test_what_all_ranks_refuse_is_said_once_as_it_is(tiny: TinyModels, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as error:
        tiny.llm("llama", tensor_parallel_size=2, num_kv_blocks=1)
    assert str(error.value).startswith("num_kv_blocks 1 gives 1 KV blocks")
    assert error.value.field == "num_kv_blocks"
    assert "Traceback" not in capfd.readouterr().err


def test_a_rank_that_fails_alone_while_it_loads(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others wait for it in vain, and must not be waited for."""
    make_faulty(monkeypatch, "load")
    began = time.monotonic()
    with pytest.raises(EngineDead, match=r"^rank 1 of 2 failed: ValueError: no room on this device$"):
        tiny.llm("llama", tensor_parallel_size=2)
    assert time.monotonic() - began < 60
    assert "ValueError: no room on this device" in capfd.readouterr().err  # with its traceback


@pytest.mark.parametrize(("graphs", "capturable"), [(True, False), (False, False), (True, True)])
def test_steps_are_not_recorded_without_their_collectives(
    null: NullWorld, monkeypatch: pytest.MonkeyPatch, graphs: bool, capturable: bool
) -> None:
    """A replay would leave them out, and every rank go on with its own summand."""
    init = Capabilities.__init__

    def variant(self: Capabilities, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs | {"graphs": graphs})

    monkeypatch.setattr(Capabilities, "__init__", variant)
    monkeypatch.setattr(SingleRank, "capturable", capturable)
    if graphs and not capturable:
        with pytest.raises(BackendUnavailable, match="records steps, and its collectives"):
            null.llm(num_kv_blocks=10)
    else:
        null.llm(num_kv_blocks=10).close()


# -- losing a rank --------------------------------------------------------------------------------------------


def make_faulty(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(multiproc, "MODULE", "tests.engine.faulty_rank")
    monkeypatch.setenv("RANK_FAULT", fault)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("step", "rank 1 of 2 failed: ArithmeticError: the kernel of rank 1"),
        ("exit", "rank 1 of 2 ended with exit code 7; it said last: the driver says farewell"),
    ],
)
def test_a_rank_that_goes_wrong_in_a_step_ends_the_engine_with_its_cause(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, fault: str, cause: str
) -> None:
    """The other rank's word, that it lost its partner, is no cause."""
    make_faulty(monkeypatch, fault)
    with tiny.llm("llama", tensor_parallel_size=2) as llm:
        with pytest.raises(EngineDead) as error:
            llm.generate([[1, 2, 3]], GREEDY)
        assert str(error.value) == cause
        with pytest.raises(EngineDead, match="make a new engine"):
            llm.generate([[1, 2, 3]], GREEDY)
        with pytest.raises(EngineDead, match=cause):
            llm.op_choices()


@pytest.mark.parametrize(
    ("patience", "cause"),
    [
        (2.0, r"rank 1 of 2 did not answer within \d+\.\d s"),  # rank 0 gives up on it, and is no cause
        (300.0, r"ranks 0 and 1 of 2 did not answer within \d+\.\d s"),  # the engine is the first to give up
    ],
)
def test_a_rank_that_hangs_is_given_up(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, patience: float, cause: str
) -> None:
    make_faulty(monkeypatch, "hang")
    monkeypatch.setenv("RANK_PATIENCE", str(patience))
    model = tiny.directory("llama")
    config = EngineConfig(model=str(model), tensor_parallel_size=2, **OPTIONS)
    engine = Engine(config, MultiprocExecutor(config, model, step_seconds=60.0 if patience < 60.0 else 2.0))
    began = time.monotonic()
    with pytest.raises(EngineDead, match=f"^{cause}$"):
        drive(engine, [EngineRequest(request_id="a", prompt_token_ids=[1, 2], params=GREEDY)])
    assert time.monotonic() - began < 30
    engine.close()


def test_a_rank_that_is_killed_while_it_works(tiny: TinyModels) -> None:
    with tiny.llm("llama", tensor_parallel_size=2) as llm:
        killer = threading.Timer(0.3, os.kill, (executor_of(llm).pids[1], signal.SIGKILL))
        killer.start()
        with pytest.raises(EngineDead, match=r"^rank 1 of 2 was killed by SIGKILL; perhaps memory ran out$"):
            llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=400, ignore_eos=True))
        killer.join()


def test_an_interrupted_step_is_the_last(tiny: TinyModels) -> None:
    """Ctrl-C reaches the whole group: the ranks leave it to the engine."""
    with tiny.llm("llama", tensor_parallel_size=2) as llm:
        pids = [os.getpid(), *executor_of(llm).pids]
        timer = threading.Timer(0.5, lambda: [os.kill(pid, signal.SIGINT) for pid in reversed(pids)])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=400, ignore_eos=True))
        timer.join()
        with pytest.raises(EngineDead, match="interrupted"):
            llm.op_choices()
        assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids[1:])


def test_a_rank_that_is_killed_while_nothing_runs(tmp_path: Path) -> None:
    """The engine's process sleeps then, and must wake."""

    async def scenario() -> None:
        model = str(save_chains(tmp_path))
        before = set(psutil.Process().children())
        async with AsyncEngine(
            model, tokenizer="smollm2", tensor_parallel_size=2, max_model_len=256, **OPTIONS
        ) as engine:
            output = await engine.complete("ABC", SamplingParams(temperature=0.0, max_tokens=20))
            assert output.outputs[0].text == "DEFGH ok"
            (process,) = (p for p in psutil.Process().children() if p not in before)
            ranks = process.children()
            assert len(ranks) == 2
            ranks[0].kill()
            async with asyncio.timeout(10):
                await engine.wait_ended()
            assert str(engine.cause_of_end).startswith("rank ")
            assert str(engine.cause_of_end).endswith(" of 2 was killed by SIGKILL; perhaps memory ran out")
            with pytest.raises(EngineDead, match="was killed by SIGKILL"):
                await engine.complete("ABC", GREEDY)

    asyncio.run(scenario())


SCRIPT = """
import sys
from octavo import LLM
llm = LLM(sys.argv[1], backend="cpu", tensor_parallel_size=2, num_kv_blocks=100, num_threads=2, progress=False)
print(*llm._engine._executor.pids, flush=True)
llm.generate([[1, 2, 3]] * 8, __import__("octavo").SamplingParams(max_tokens=500, ignore_eos=True))
"""


def test_ranks_end_with_an_engine_that_is_killed(tiny: TinyModels) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", SCRIPT, str(tiny.directory("llama"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}) as engine:
        assert engine.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in engine.stdout.readline().split()]
        assert len(ranks) == 2
        engine.kill()
    assert psutil.wait_procs(ranks, timeout=10)[1] == []


# -- the command line -----------------------------------------------------------------------------------------


def test_run_over_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = str(save_chains(tmp_path))
    flags = ["--backend", "cpu", "--tokenizer", "smollm2", "--num-kv-blocks", "100", "--no-progress"]
    assert main(["run", model, "ABC", "--raw", *flags, "--tensor-parallel-size", "2"]) == 0
    assert capfd.readouterr().out == "DEFGH ok\n"
    assert main(["plan", model, *flags, "--tensor-parallel-size", "2"]) == 0
    assert "2 devices" in capfd.readouterr().out


def test_a_terminal_sees_the_progress_of_one_rank(tiny: TinyModels) -> None:
    terminal, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    script = SCRIPT.replace("progress=False", "progress=True").replace("max_tokens=500", "max_tokens=1")
    command = [sys.executable, "-c", script, str(tiny.directory("llama"))]
    env = os.environ | {"PYTHONPATH": paths}
    assert subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=env, check=False).returncode == 0
    os.close(theirs)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    bars = [line for line in re.split(r"[\r\n]+", shown) if line.startswith("Loading: ")]
    assert bars
    assert len([bar for bar in bars if "  0%" in bar]) == 1
