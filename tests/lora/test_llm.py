"""`LLM` with adapters: chosen by request, loaded and unloaded while it serves, apart from each other in every way."""

from __future__ import annotations

import shutil

import pytest
import torch

from octavo import LLM, FinishReason, LoRARequest, SamplingParams
from octavo.backends.cpu.device import CpuBackend
from octavo.core.base.errors import BackendUnavailable, CheckpointError, ConfigError, InvalidRequest
from tests.fakes import tiny_models
from tests.lora.packer import make_lora

TARGETS = ["q_proj", "v_proj", "down_proj", "gate_proj"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_models.make_llama()


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory):
    return tiny_models.save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loras(model):
    return [make_lora(model, TARGETS, r=4 + 4 * i, rslora=i == 1, seed=i) for i in range(3)]


@pytest.fixture
def paths(loras, tmp_path):
    return [str(lora.save(tmp_path / f"adapter-{i}")) for i, lora in enumerate(loras)]


@pytest.fixture
def llm_of(directory):
    opened = []

    def make(**options):
        values = {"backend": "cpu", "num_threads": 1, "num_kv_blocks": 64, "block_size": 4, "progress": False}
        llm = LLM(str(directory), **{**values, "enable_lora": True, **options})
        opened.append(llm)
        return llm

    yield make
    for llm in opened:
        llm.close()


def prompt_of(length, seed=0):
    return tiny_models.random_prompt(199, length, seed)


def expected(model, lora, prompt, count=6):
    return tiny_models.greedy(model if lora is None else lora.merged(model), prompt, count)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def use_of(llm):
    """What is in the slots of the engine's only worker."""
    return llm._engine._executor._adapters.use()


def test_each_prompt_runs_with_its_own_adapter(llm_of, model, loras, paths):
    llm = llm_of()
    chosen = [0, None, 1, 2, None, 0]
    prompts = [prompt_of(5 + i, i) for i in range(len(chosen))]
    requests = [None if i is None else LoRARequest(f"a{i}", i + 1, paths[i]) for i in chosen]
    outputs = llm.generate(prompts, GREEDY, lora_request=requests)
    for i, prompt, tokens in zip(chosen, prompts, tokens_of(outputs), strict=True):
        assert tokens == expected(model, None if i is None else loras[i], prompt)
    assert [info.name for info in llm.list_adapters()] == ["a0", "a1", "a2"]
    prompt = prompt_of(9)
    (by_name,) = llm.generate(prompt, GREEDY, lora_request=LoRARequest("a1"))
    assert by_name.outputs[0].token_ids == expected(model, loras[1], prompt)
    pieces = list(llm.generate_stream(prompt, GREEDY, lora_request=LoRARequest("a2")))
    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == expected(model, loras[2], prompt)


def test_one_slot_for_three_adapters(llm_of, model, loras, paths):
    llm = llm_of(max_loras=1, lora_modules={f"a{i}": path for i, path in enumerate(paths)})
    prompts = [prompt_of(4 + i, i) for i in range(9)]
    outputs = llm.generate(prompts, GREEDY, lora_request=[LoRARequest(f"a{i % 3}") for i in range(9)])
    for i, (prompt, tokens) in enumerate(zip(prompts, tokens_of(outputs), strict=True)):
        assert tokens == expected(model, loras[i % 3], prompt)
    assert len(use_of(llm).slots) == 1


def test_several_choices_of_one_request(llm_of, model, loras, paths):
    llm = llm_of(lora_modules={"a": paths[0]})
    (output,) = llm.generate(prompt_of(7), GREEDY.with_(n=3), lora_request=LoRARequest("a"))
    assert [choice.token_ids for choice in output.outputs] == [expected(model, loras[0], prompt_of(7))] * 3


def test_preemption_brings_the_adapter_back(llm_of, model, loras, paths):
    llm = llm_of(lora_modules={"a": paths[0], "b": paths[1]}, max_loras=1, num_kv_blocks=16, max_model_len=48)
    prompts = [prompt_of(12, i) for i in range(4)]
    params = GREEDY.with_(max_tokens=20)
    outputs = llm.generate(prompts, params, lora_request=[LoRARequest("ab"[i // 2]) for i in range(4)])
    assert llm.stats().preemptions > 0
    for i, (prompt, tokens) in enumerate(zip(prompts, tokens_of(outputs), strict=True)):
        assert tokens == expected(model, loras[i // 2], prompt, 20)


def test_cached_prefixes_belong_to_a_content(llm_of, model, loras, paths, tmp_path):
    """vllm#30931, #44701, #42125: the same name with other weights; base with the adapter's name as salt."""
    llm = llm_of()
    prompt = prompt_of(20)

    def run(name, path="", lora=None):
        request = LoRARequest(name, lora_path=path) if name else None
        (output,) = llm.generate(prompt, GREEDY, lora_request=request)
        assert output.outputs[0].token_ids == expected(model, lora, prompt)
        return output.num_cached_tokens

    assert run("x", paths[0], loras[0]) == 0
    assert run("x", paths[0], loras[0]) == 16
    assert run(None) == 0
    copy = shutil.copytree(paths[0], tmp_path / "copy")
    assert run("same weights elsewhere", str(copy), loras[0]) == 16
    shutil.rmtree(copy)
    shutil.copytree(paths[1], copy)
    llm.load_adapter("same weights elsewhere", str(copy))
    assert run("same weights elsewhere", lora=loras[1]) == 0
    assert run("x", lora=loras[0]) == 16
    assert run(None) == 16


def test_the_files_of_a_known_adapter_are_not_read_again(llm_of, model, loras, paths):
    llm = llm_of()
    request = LoRARequest("a", 1, paths[0])
    llm.generate(prompt_of(5), GREEDY, lora_request=request)
    shutil.rmtree(paths[0])
    assert tokens_of(llm.generate(prompt_of(5), GREEDY, lora_request=request)) == [
        expected(model, loras[0], prompt_of(5))
    ]


def test_an_unloaded_adapter_serves_out_its_requests_and_is_gone(llm_of, model, loras, paths):
    """vllm#54839: its weights are freed as well as its name."""
    llm = llm_of(lora_modules={"a": paths[0], "b": paths[1]})
    prompt = prompt_of(8)
    stream = llm.generate_stream(prompt, GREEDY, lora_request=LoRARequest("a"))
    tokens = list(next(stream).outputs[0].token_ids)
    adapter_id = llm.list_adapters()[0].adapter_id
    llm.unload_adapter("a")
    with pytest.raises(InvalidRequest, match="'a' is not loaded"):
        llm.generate(prompt, GREEDY, lora_request=LoRARequest("a"))
    assert adapter_id in use_of(llm).slots
    tokens += [token for piece in stream for token in piece.outputs[0].token_ids]
    assert tokens == expected(model, loras[0], prompt)
    use = use_of(llm)
    assert adapter_id not in use.slots
    assert use.known == (llm.list_adapters()[0].adapter_id,)
    assert use.host_bytes == 0 or adapter_id not in use.known


def test_unloading_an_idle_adapter_frees_it_at_once(llm_of, paths):
    llm = llm_of(lora_modules={"a": paths[0]})
    llm.generate(prompt_of(5), GREEDY, lora_request=LoRARequest("a"))
    llm.unload_adapter("a")
    use = use_of(llm)
    assert (use.known, use.host_bytes, use.pinned) == ((), 0, frozenset())
    assert set(use.slots) == {None}
    assert llm.list_adapters() == []


def test_two_names_of_one_content_are_one_adapter(llm_of, paths):
    llm = llm_of(lora_modules={"a": paths[0], "b": paths[0]})
    assert len(use_of(llm).known) == 1
    llm.unload_adapter("a")
    assert len(use_of(llm).known) == 1
    llm.generate(prompt_of(5), GREEDY, lora_request=LoRARequest("b"))
    llm.unload_adapter("b")
    assert use_of(llm).known == ()


def test_programs_are_made_anew_for_new_layers_and_kept_for_known_ones(
    llm_of, model, loras, paths, tmp_path, monkeypatch
):
    """A recorded step calls what it called when it was recorded."""
    made = []
    compile_ = CpuBackend.compile
    monkeypatch.setattr(
        CpuBackend, "compile", lambda self, step, *shape: made.append(step) or compile_(self, step, *shape)
    )
    llm = llm_of()
    prompt = prompt_of(6)
    llm.generate(prompt, GREEDY)
    assert len(made) == 1
    llm.generate(prompt, GREEDY, lora_request=LoRARequest("a", 1, paths[0]))
    assert len(made) == 2
    llm.generate(prompt, GREEDY, lora_request=LoRARequest("b", 2, paths[1]))
    llm.generate(prompt, GREEDY, lora_request=LoRARequest("a"))
    assert len(made) == 2
    other = make_lora(model, ["up_proj"], seed=8)
    llm.load_adapter("other", str(other.save(tmp_path / "other")))
    llm.generate(prompt, GREEDY)
    assert len(made) == 3


def test_a_new_layer_is_run_though_programs_were_made_before(llm_of, model, loras, paths, tmp_path):
    llm = llm_of()
    prompt = prompt_of(6)
    llm.generate(prompt, GREEDY, lora_request=LoRARequest("a", 1, paths[0]))
    other = make_lora(model, ["up_proj", "lm_head", "embed_tokens"], seed=8)
    request = LoRARequest("other", 2, str(other.save(tmp_path / "other")))
    assert tokens_of(llm.generate(prompt, GREEDY, lora_request=request)) == [expected(model, other, prompt)]


def test_a_broken_adapter_fails_its_own_load_and_nobody_else(llm_of, model, loras, paths, tmp_path):
    llm = llm_of(lora_modules={"a": paths[0]})
    bad = make_lora(model, TARGETS)
    bad.layers["model.layers.1.self_attn.q_proj"][0][0, 0] = float("nan")
    prompt = prompt_of(8)
    stream = llm.generate_stream(prompt, GREEDY, lora_request=LoRARequest("a"))
    tokens = list(next(stream).outputs[0].token_ids)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj holds values in A that are NaN"):
        llm.load_adapter("bad", str(bad.save(tmp_path / "bad")))
    with pytest.raises(CheckpointError, match="cannot read"):
        llm.generate(prompt, GREEDY, lora_request=LoRARequest("none", 3, str(tmp_path / "none")))
    with pytest.raises(CheckpointError, match="NaN"):
        llm.load_adapter("a", str(tmp_path / "bad"))  # what "a" meant before, it still means
    tokens += [token for piece in stream for token in piece.outputs[0].token_ids]
    assert tokens == expected(model, loras[0], prompt)
    assert [info.name for info in llm.list_adapters()] == ["a"]


def test_an_adapter_whose_files_went_fails_its_own_requests_only(llm_of, model, loras, paths):
    """One host copy: the other adapter is read again when a request needs it."""
    llm = llm_of(lora_modules={"a": paths[0], "b": paths[1]}, max_loras=1, max_cpu_loras=1)
    shutil.rmtree(paths[0])
    prompts = [prompt_of(6, i) for i in range(3)]
    outputs = llm.generate(prompts, GREEDY, lora_request=[LoRARequest("b"), LoRARequest("a"), None])
    assert outputs[1].outputs[0].finish_reason is FinishReason.ERROR
    assert "cannot read" in outputs[1].outputs[0].error
    assert outputs[0].outputs[0].token_ids == expected(model, loras[1], prompts[0])
    assert outputs[2].outputs[0].token_ids == expected(model, None, prompts[2])


def test_prompt_logprobs_are_the_adapters(llm_of, model, loras, paths):
    llm = llm_of(lora_modules={"a": paths[0]})
    prompt = prompt_of(10)
    (output,) = llm.generate(prompt, GREEDY.with_(prompt_logprobs=0), lora_request=LoRARequest("a"))
    logprobs = tiny_models.logits_of(loras[0].merged(model), prompt).log_softmax(-1)
    found = torch.tensor(
        [each[token].logprob for each, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    )
    torch.testing.assert_close(found, logprobs[range(9), prompt[1:]], rtol=1e-3, atol=1e-3)


def test_without_adapters_a_request_for_one_is_refused(llm_of, paths):
    llm = llm_of(enable_lora=False)
    with pytest.raises(InvalidRequest, match="start it with enable_lora"):
        llm.generate(prompt_of(4), GREEDY, lora_request=LoRARequest("a", 1, paths[0]))
    assert llm._engine._executor._adapters is None
    with pytest.raises(InvalidRequest, match="enable_lora"):
        llm.load_adapter("a", paths[0])


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (LoRARequest("nobody"), "'nobody' is not loaded"),
        ([LoRARequest("a")], "1 lora_requests for 2 prompts"),
        ("a", "must be a LoRARequest"),
        (LoRARequest("", 1, "x"), "lora_name is empty"),
    ],
)
def test_wrong_requests_say_what_is_wrong(llm_of, paths, request_, says):
    llm = llm_of(lora_modules={"a": paths[0]})
    with pytest.raises(InvalidRequest, match=says):
        llm.generate([prompt_of(4), prompt_of(5)], GREEDY, lora_request=request_)
    llm.generate(prompt_of(4), GREEDY, lora_request=LoRARequest("a"))


def test_what_can_not_start_says_so(llm_of, model, paths, tmp_path):
    with pytest.raises(CheckpointError, match="above max_lora_rank 4; raise it"):
        llm_of(lora_modules={"a": paths[1]}, max_lora_rank=4)
    with pytest.raises(CheckpointError, match="cannot read"):
        llm_of(lora_modules={"a": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="max_loras"):
        llm_of(max_loras=0)


def test_a_backend_without_a_kernel_of_its_own_says_so_where_that_matters(llm_of, paths):
    """The reference's sums over a batch depend on what is in it."""
    for option in ("deterministic", "strict_backend"):
        with pytest.raises(BackendUnavailable, match="no kernel of its own"):
            llm_of(lora_modules={"a": paths[0]}, **{option: True})
        llm = llm_of(**{option: True})
        with pytest.raises(BackendUnavailable, match="no kernel of its own"):
            llm.load_adapter("a", paths[0])
        assert llm.list_adapters() == []
        llm.generate(prompt_of(4), GREEDY)


def test_slots_are_as_large_as_the_first_adapters_need(llm_of, model, tmp_path):
    large = make_lora(model, ["q_proj"], r=24)
    llm = llm_of(lora_modules={"a": str(large.save(tmp_path / "large"))})
    small = use_of(llm).device_bytes
    assert tokens_of(llm.generate(prompt_of(5), GREEDY, lora_request=LoRARequest("a"))) == [
        expected(model, large, prompt_of(5))
    ]
    assert small == 4 * 3 * ((24 * (48 + 48)) * 4 + 4)


def test_the_base_model_alone_has_the_bits_that_it_has_beside_adapters(llm_of, model, paths):
    """A step without adapters calls nothing of them; that must not be seen in a reply."""
    llm = llm_of(lora_modules={"a": paths[0]})
    params = GREEDY.with_(prompt_logprobs=0, logprobs=0)
    prompts = [prompt_of(9, 1), prompt_of(7, 2)]
    llm.reset_prefix_cache()
    (alone,) = llm.generate(prompts[0], params)
    llm.reset_prefix_cache()
    beside, _ = llm.generate(prompts, params, lora_request=[None, LoRARequest("a")])
    assert beside.prompt_logprobs == alone.prompt_logprobs
    assert beside.outputs[0].logprobs == alone.outputs[0].logprobs
