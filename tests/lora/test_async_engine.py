"""Adapters of an engine in a process of its own: the same answers, over messages."""

from __future__ import annotations

import asyncio

import pytest

from octavo import AsyncEngine, LoRARequest, SamplingParams
from octavo.core.base.errors import CheckpointError, EngineDead, InvalidRequest
from tests.fakes import tiny_models
from tests.lora.packer import make_lora

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
OPTIONS = {"backend": "cpu", "num_threads": 1, "num_kv_blocks": 64, "block_size": 4, "progress": False}


@pytest.fixture(scope="module")
def model():
    return tiny_models.make_llama()


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory):
    return str(tiny_models.save(model, tmp_path_factory.mktemp("model")))


def expected(model, lora, prompt, count=6):
    return tiny_models.greedy(model if lora is None else lora.merged(model), prompt, count)


def test_requests_of_several_adapters_at_once(model, directory, tmp_path):
    loras = [make_lora(model, ["q_proj", "down_proj"], r=3 + i, seed=i) for i in range(3)]
    paths = [str(lora.save(tmp_path / str(i))) for i, lora in enumerate(loras)]
    prompts = [tiny_models.random_prompt(199, 4 + i, i) for i in range(8)]

    async def run():
        async with AsyncEngine(directory, **OPTIONS, lora_modules={"a0": paths[0]}, max_loras=2) as engine:
            assert [info.name for info in engine.list_adapters()] == ["a0"]
            info = await engine.load_adapter("a1", paths[1])
            assert (info.rank, info.num_layers) == (4, 6)
            requests = [LoRARequest("a0"), LoRARequest("a1"), LoRARequest("a2", 3, paths[2]), None] * 2
            outputs = await asyncio.gather(
                *(engine.complete(p, GREEDY, lora_request=r) for p, r in zip(prompts, requests, strict=True))
            )
            assert [info.name for info in engine.list_adapters()] == ["a0", "a1", "a2"]
            streamed = [
                token
                async for piece in engine.generate(prompts[0], GREEDY, lora_request=LoRARequest("a1"))
                for token in piece.outputs[0].token_ids
            ]
            return [output.outputs[0].token_ids for output in outputs], streamed

    found, streamed = asyncio.run(run())
    chosen = [*loras, None] * 2
    assert found == [expected(model, lora, prompt) for lora, prompt in zip(chosen, prompts, strict=True)]
    assert streamed == expected(model, loras[1], prompts[0])


def test_what_is_wrong_comes_back_and_the_engine_goes_on(model, directory, tmp_path):
    lora = make_lora(model, ["q_proj"])
    path = str(lora.save(tmp_path / "a"))
    prompt = tiny_models.random_prompt(199, 5)

    async def run():
        async with AsyncEngine(directory, **OPTIONS, enable_lora=True) as engine:
            with pytest.raises(CheckpointError, match="cannot read"):
                await engine.load_adapter("a", str(tmp_path / "none"))
            with pytest.raises(CheckpointError, match="cannot read"):
                await engine.complete(prompt, GREEDY, lora_request=LoRARequest("a", 1, str(tmp_path / "none")))
            with pytest.raises(InvalidRequest, match="'a' is not loaded"):
                await engine.complete(prompt, GREEDY, lora_request=LoRARequest("a"))
            with pytest.raises(InvalidRequest, match="'a' is not loaded"):
                await engine.unload_adapter("a")
            await engine.load_adapter("a", path)
            output = await engine.complete(prompt, GREEDY, lora_request=LoRARequest("a"))
            await engine.unload_adapter("a")
            assert engine.list_adapters() == []
            with pytest.raises(InvalidRequest, match="'a' is not loaded"):
                await engine.complete(prompt, GREEDY, lora_request=LoRARequest("a"))
            base = await engine.complete(prompt, GREEDY)
            return output.outputs[0].token_ids, base.outputs[0].token_ids

    assert asyncio.run(run()) == (expected(model, lora, prompt), expected(model, None, prompt))


def test_a_call_that_waits_ends_with_the_engine(model, directory, tmp_path):
    path = str(make_lora(model, ["q_proj"]).save(tmp_path / "a"))

    async def run():
        async with AsyncEngine(directory, **OPTIONS, enable_lora=True) as engine:
            loading = asyncio.create_task(engine.load_adapter("a", path))
            await asyncio.sleep(0)
            await engine.close()
            with pytest.raises(EngineDead):
                await loading

    asyncio.run(run())


@pytest.mark.parametrize("ranks", [2])
def test_a_model_split_over_ranks(model, directory, tmp_path, ranks):
    """Each rank cuts the adapters to its part; load, unload and refusal are one for all."""
    loras = [
        make_lora(model, ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"], seed=1)
    ]
    loras.append(make_lora(model, ["v_proj", "gate_proj"], r=7, rslora=True, seed=2))
    paths = [str(lora.save(tmp_path / str(i))) for i, lora in enumerate(loras)]
    bad = make_lora(model, ["q_proj"])
    bad.layers["model.layers.0.self_attn.q_proj"][1][0, 0] = float("inf")
    bad_path = str(bad.save(tmp_path / "bad"))
    prompts = [tiny_models.random_prompt(199, 5 + i, i) for i in range(3)]

    async def run():
        options = {**OPTIONS, "tensor_parallel_size": ranks, "num_threads": 2, "lora_modules": {"a0": paths[0]}}
        async with AsyncEngine(directory, **options) as engine:
            with pytest.raises(CheckpointError, match="NaN or infinite"):
                await engine.load_adapter("bad", bad_path)
            await engine.load_adapter("a1", paths[1])
            requests = [LoRARequest("a0"), LoRARequest("a1"), None]
            outputs = await asyncio.gather(
                *(engine.complete(p, GREEDY, lora_request=r) for p, r in zip(prompts, requests, strict=True))
            )
            await engine.unload_adapter("a0")
            (again,) = await engine.complete_many([prompts[1]], GREEDY, lora_request=LoRARequest("a1"))
            assert again.outputs[0].token_ids == outputs[1].outputs[0].token_ids
            return [output.outputs[0].token_ids for output in outputs]

    assert asyncio.run(run()) == [
        expected(model, lora, prompt) for lora, prompt in zip((*loras, None), prompts, strict=True)
    ]
