"""Latent attention in both forms: each equals Hugging Face, in any mixture of requests, and runs where it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.backend.kv import AttentionMetadata
from octavo.core.backend.ops import StepPlan
from octavo.core.models.decoder import mla
from octavo.core.models.decoder.mla_plain import PlainForm
from octavo.core.models.decoder.mla_runs import runs_of
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES
from tests.models.step_runner import relative_error

TOLERANCE = 1e-4


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many tokens each form attended for, over all layers."""
    counts = {"plain": 0, "absorbed": 0}
    plain, absorbed = PlainForm.__call__, mla.LatentAttention._absorbed

    def count_plain(self: Any, q_THD: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        counts["plain"] += len(q_THD)
        plain(self, q_THD, *args, **kwargs)

    def count_absorbed(self: Any, q_nope_THP: torch.Tensor, *args: Any) -> None:
        counts["absorbed"] += len(q_nope_THP)
        absorbed(self, q_nope_THP, *args)

    monkeypatch.setattr(PlainForm, "__call__", count_plain)
    monkeypatch.setattr(mla.LatentAttention, "_absorbed", count_absorbed)
    return counts


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("tells_fresh", [True, False], ids=["plain", "absorbed"])
def test_each_form_equals_hugging_face(family, tells_fresh, runner_of, forms):
    model = FAMILIES[family].make()
    runner = runner_of(model)
    runner.tells_fresh = tells_fresh
    for length in (2, 17, 200):
        prompt = tiny_models.random_prompt(runner.vocab_size, length)
        assert relative_error(runner.prompt("prompt", prompt), tiny_models.logits_of(model, prompt)) < TOLERANCE
        runner.finish("prompt")
    assert (forms["plain"] > 0, forms["absorbed"] > 0) == (tells_fresh, not tells_fresh)


def test_forms_mix_in_a_step(runner_of, forms):
    """Decoding, fresh, in the middle of a prompt, fresh, fresh, of one token: each as if it were alone."""
    model = FAMILIES["deepseek_v3"].make()
    runner = runner_of(model)
    lengths = {"decoding": (30, 1), "fresh": (0, 23), "chunk": (16, 9), "short": (0, 2), "long": (0, 70), "one": (0, 1)}
    prompts = {
        name: tiny_models.random_prompt(runner.vocab_size, before + now, seed=i)
        for i, (name, (before, now)) in enumerate(lengths.items())
    }
    for name, (before, _) in lengths.items():
        if before:
            runner.prompt(name, prompts[name][:before])
    forms.update(plain=0, absorbed=0)
    found = runner.step([(name, prompts[name][before:]) for name, (before, _) in lengths.items()])
    for (name, (_, now)), logits in zip(lengths.items(), found, strict=True):
        expected = tiny_models.logits_of(model, prompts[name])[-now:]
        assert relative_error(logits, expected) < TOLERANCE, name
    assert forms["plain"] * (1 + 9 + 1) == forms["absorbed"] * (23 + 2 + 70)
    follow = runner.step([(name, [5]) for name in lengths])  # the latents that plain forms wrote are read absorbed
    for (name, prompt), logits in zip(prompts.items(), follow, strict=True):
        assert relative_error(logits, tiny_models.logits_of(model, [*prompt, 5])[-1:]) < TOLERANCE, name


def test_an_engine_makes_keys_for_first_chunks_unless_bits_must_not_depend_on_chunks(tmp_path, forms):
    directory = str(tiny_models.save(FAMILIES["deepseek_v2"].make(), tmp_path / "model"))
    prompts = [tiny_models.random_prompt(100, length, seed=length) for length in (40, 9)]
    params = SamplingParams(temperature=0, max_tokens=6)
    replies = []
    for deterministic in (False, True):
        forms.update(plain=0, absorbed=0)
        with LLM(
            directory, backend="cpu", num_threads=2, progress=False, num_kv_blocks=100, max_num_batched_tokens=32,
            max_num_seqs=4, strict_backend=False, deterministic=deterministic,
        ) as llm:  # fmt: skip
            replies.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
        assert (forms["plain"] > 0) is not deterministic
        assert forms["absorbed"] > 0
    assert replies[0] == replies[1]


def meta_of(requests: list[tuple[int, int]], *, num_fresh: int) -> AttentionMetadata:
    starts = torch.tensor([0, *(count for count, _ in requests)]).cumsum(0).to(torch.int32)
    return AttentionMetadata(
        num_requests=len(requests), num_tokens=int(starts[-1]), max_query_len=max(count for count, _ in requests),
        max_seq_len=max(length for _, length in requests), query_start_loc=starts,
        seq_lens=torch.tensor([length for _, length in requests], dtype=torch.int32),
        block_table=torch.arange(3 * len(requests), dtype=torch.int32).view(-1, 3),
        slot_mapping=torch.arange(int(starts[-1])), block_size=16, num_fresh=num_fresh,
    )  # fmt: skip


def test_runs_are_neighbours_of_one_kind():
    plan = StepPlan(meta_of([(1, 9), (1, 1), (4, 4), (2, 2), (3, 7), (5, 5)], num_fresh=3))
    runs = list(runs_of(plan, 16, StepPlan))
    assert [(run.tokens, run.plan is None) for run in runs] == [
        (slice(0, 2), False), (slice(2, 8), True), (slice(8, 11), False), (slice(11, 16), True),
    ]  # fmt: skip
    assert [run.query_start_loc.tolist() for run in runs] == [[0, 1, 2], [0, 4, 6], [0, 3], [0, 5]]
    part = runs[2].plan.meta
    assert (part.num_requests, part.num_tokens, part.max_query_len, part.max_seq_len) == (1, 3, 3, 7)
    assert (part.block_table.tolist(), part.slot_mapping.tolist()) == ([[12, 13, 14]], [8, 9, 10])


def test_where_nobody_is_said_to_be_fresh_the_step_is_one_run_over_its_own_plan():
    plan = StepPlan(meta_of([(4, 4), (2, 2)], num_fresh=0))
    (run,) = runs_of(plan, 9, StepPlan)
    assert (run.tokens, run.plan) == (slice(0, 9), plan)


def test_a_cache_that_rounds_is_read_by_every_request(tmp_path, forms):
    directory = str(tiny_models.save(FAMILIES["deepseek_v2"].make(), tmp_path / "model"))
    prompt, params = tiny_models.random_prompt(100, 40), SamplingParams(temperature=0, max_tokens=2, logprobs=0)
    found = []
    for step_tokens in (64, 8):
        with LLM(
            directory, backend="cpu", num_threads=2, progress=False, num_kv_blocks=100, kv_cache_dtype="fp8",
            max_num_batched_tokens=step_tokens, max_num_seqs=4,
        ) as llm:  # fmt: skip
            (choice,) = llm.generate([prompt], params)[0].outputs
            found.append([entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)])
    assert forms["plain"] == 0
    assert found[0] == pytest.approx(found[1], abs=1e-4)
