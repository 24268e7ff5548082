"""Replayed steps: bit for bit what the step does, on whatever its inputs hold now; and what is never replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.backends.cpu.attention import AttentionOps
from octavo.backends.cpu.cache import CacheOps
from octavo.backends.cpu.gemm import GemmOps
from octavo.backends.cpu.native import NativeError
from octavo.backends.cpu.program import MAX_SHAPES, ReplayingProgram
from octavo.core.backend import KVCacheSpec, KVLayout, KVPool, StepBuffers, torch_kv_view
from octavo.core.backend.kv import AttentionMetadata
from octavo.core.backend.specs import WeightSpec
from tests.fakes import tiny_models

TOKENS, VOCAB, WIDTH, HEADS, DIM, BLOCK = 8, 40, 32, 2, 16, 4


class Model:
    """A step of every kind of call: embedding, KV write, attention, torch's in-place ops, a product.

    Attributes:
        calls: how often Python ran it.
        extra: an op more, between.
    """

    def __init__(self, context):
        generator = torch.Generator().manual_seed(1)
        self.gemm, self.attention, self.cache = GemmOps(context), AttentionOps(context), CacheOps(context)
        self.embedding = self.gemm.prepare_weight(WeightSpec(VOCAB, WIDTH, torch.float32))
        self.embedding.place(torch.randn(VOCAB, WIDTH, generator=generator), 0)
        spec = KVCacheSpec(HEADS, DIM, DIM, torch.float32, BLOCK)
        self.kv = torch_kv_view(KVPool(9, spec.block_bytes, torch.zeros(9 * spec.block_bytes, dtype=torch.uint8)), spec,
                                KVLayout.HND)  # fmt: skip
        self.hidden_TM, self.mixed_TM = torch.zeros(TOKENS, WIDTH), torch.zeros(TOKENS, WIDTH)
        self.rows_RM = torch.zeros(TOKENS, WIDTH)
        self.calls = 0
        self.extra = lambda: None

    def step(self, buffers):
        self.calls += 1
        tokens, rows = len(buffers.token_ids_T), len(buffers.logit_rows_R)
        hidden, mixed = self.hidden_TM[:tokens], self.mixed_TM[:tokens]
        self.gemm.embed(buffers.token_ids_T, self.embedding, out=hidden)
        heads = hidden.unflatten(1, (HEADS, DIM))
        (plan,) = buffers.plans
        self.cache.write_kv(heads, heads, self.kv, plan.meta.slot_mapping)
        self.attention.paged_attention(heads, self.kv, plan, out=mixed.unflatten(1, (HEADS, DIM)), softmax_scale=0.25)
        hidden.add_(mixed)
        self.extra()
        torch.index_select(hidden, 0, buffers.logit_rows_R, out=self.rows_RM[:rows])
        self.gemm.gemm(self.rows_RM[:rows], self.embedding, out=buffers.logits_RV)


class World:
    """A model, its program, and memory that stays where it is."""

    def __init__(self, context):
        self.model = Model(context)
        self.program = ReplayingProgram(self.model.step, context, self.model.attention.plan)
        self.ids, self.positions = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS, dtype=torch.int64)
        self.rows, self.logits = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS, VOCAB)

    def buffers(self, lengths, counts, seed, *, width=6):
        """A step of requests with so many KV entries and so many tokens, and random ids in random blocks."""
        generator = torch.Generator().manual_seed(seed)
        tokens, requests = sum(counts), len(counts)
        self.ids[:tokens] = torch.randint(VOCAB, (tokens,), generator=generator)
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        self.rows[:requests] = starts[1:] - 1
        blocks = torch.randperm(8, generator=generator)[: 2 * requests] + 1
        table = torch.zeros(requests, width, dtype=torch.int32)
        table[:, :2] = blocks.reshape(requests, 2).to(torch.int32)
        slots = [
            int(table[i, p // BLOCK]) * BLOCK + p % BLOCK
            for i, (length, count) in enumerate(zip(lengths, counts, strict=True))
            for p in range(length - count, length)
        ]
        meta = AttentionMetadata(
            num_requests=requests, num_tokens=tokens, max_query_len=max(counts), max_seq_len=max(lengths),
            query_start_loc=starts, seq_lens=torch.tensor(lengths, dtype=torch.int32), block_table=table,
            slot_mapping=torch.tensor(slots), block_size=BLOCK,
        )  # fmt: skip
        return StepBuffers(
            self.ids[:tokens], self.positions[:tokens], (self.model.attention.plan(meta),), self.rows[:requests],
            self.logits[:requests],
        )  # fmt: skip

    def check(self, lengths, counts, seed, **kwargs):
        """The program gives what the step gives, cache included."""
        buffers = self.buffers(lengths, counts, seed, **kwargs)
        before = self.model.kv.key_NSKD.clone(), self.model.kv.value_NSKD.clone()
        calls = self.model.calls
        self.model.step(buffers)
        expected = self.logits.clone(), self.model.kv.key_NSKD.clone()
        self.model.calls = calls
        self.model.kv.key_NSKD.copy_(before[0])
        self.model.kv.value_NSKD.copy_(before[1])
        self.logits[: len(counts)].fill_(7.0)
        self.program.run(buffers)
        assert torch.equal(self.logits, expected[0])
        assert torch.equal(self.model.kv.key_NSKD, expected[1])


@pytest.fixture
def world(make_context):
    return World(make_context(2))


def test_a_shape_is_replayed_from_its_third_time_on(world):
    for turn in range(6):
        world.check([3 + turn % 3, 5], [1, 1], seed=turn)
        assert world.model.calls == min(turn + 1, 2)


def test_each_shape_has_its_own_recording(world):
    shapes = [([3, 5], [1, 1]), ([4], [4]), ([8, 2, 3], [1, 2, 1]), ([6], [1]), ([6, 6], [3, 1])]
    for turn in range(5):
        for i, (lengths, counts) in enumerate(shapes):
            world.check(lengths, counts, seed=10 * turn + i)
    assert world.model.calls == 2 * len(shapes)


def test_a_table_that_grows_is_one_shape_until_the_recorded_one_is_full(world):
    for turn, width in enumerate([2, 3, 64, 5, 65, 128, 66]):
        world.check([3, 5], [1, 1], seed=turn, width=width)
    assert world.model.calls == 4


def test_buffers_elsewhere_are_another_shape(world):
    for turn in range(3):
        world.check([3, 5], [1, 1], seed=turn)
    assert world.model.calls == 2
    world.logits = torch.zeros(TOKENS, VOCAB)
    world.check([3, 5], [1, 1], seed=4)
    assert world.model.calls == 3


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (lambda x: x + 1, "add"),
        (lambda x: torch.empty(3), "empty"),
        (lambda x: x.sum().item(), "sum"),
        (lambda x: x[0, 0].item(), "_local_scalar_dense"),
        (lambda x: x.t().contiguous(), "clone"),
        (lambda x: x.topk(2), "topk"),
    ],
)
def test_what_makes_tensors_or_numbers_is_never_replayed(world, caplog, op, name):
    world.model.extra = lambda: op(world.model.hidden_TM)
    with caplog.at_level("INFO"):
        for turn in range(5):
            world.check([3, 5], [1, 1], seed=turn)
    assert world.model.calls == 5
    (told,) = [record.getMessage() for record in caplog.records if "can't be replayed" in record.getMessage()]
    assert name in told


def test_steps_with_adapters_are_run(world):
    for turn in range(4):
        buffers = world.buffers([3, 5], [1, 1], seed=turn)
        world.program.run(replace(buffers, adapter_T=torch.zeros(2, dtype=torch.int32)))
    assert world.model.calls == 4


def test_a_step_that_fails_while_it_is_taken_down_is_taken_down_the_next_time(world):
    world.check([3, 5], [1, 1], seed=0)
    world.model.extra = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        world.program.run(world.buffers([3, 5], [1, 1], seed=1))
    world.model.extra = lambda: None
    for turn in range(3):
        world.check([3, 5], [1, 1], seed=turn)
    assert world.model.calls == 3


def test_a_kernel_that_says_no_ends_a_replay(world):
    for turn in range(3):
        world.check([3, 5], [1, 1], seed=turn)
    buffers = world.buffers([3, 5], [1, 1], seed=4)
    buffers.token_ids_T[0] = VOCAB
    with pytest.raises(NativeError):
        world.program.run(buffers)
    world.check([3, 5], [1, 1], seed=5)


def test_only_so_many_shapes_are_remembered(world):
    for width in range(1, 2 * MAX_SHAPES):
        world.program.run(world.buffers([3], [1], seed=0, width=64 * width))
    for _ in range(3):
        world.check([3], [1], seed=0, width=64)
    assert len(world.program._runs) == MAX_SHAPES


def test_decoding_is_replayed(tmp_path, monkeypatch):
    """A real model's steps of one token run without Python once their shape is known."""
    runs = []
    inner = ReplayingProgram._take_down
    monkeypatch.setattr(
        ReplayingProgram, "_take_down", lambda self, buffers: runs.append(inner(self, buffers)) or runs[-1]
    )
    tiny_models.save(tiny_models.make_llama(), tmp_path)
    with LLM(str(tmp_path), backend="cpu", num_threads=2, progress=False, num_kv_blocks=200) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert [type(run).__name__ for run in runs] == ["_Replayed"]
