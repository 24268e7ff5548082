"""Slots of a device: what they add to products, who is in them, what is kept and what is given back."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from octavo.core.backend.opset import OpSet
from octavo.core.base.errors import CheckpointError, ConfigError
from octavo.core.lora.adapter import read_adapter
from octavo.core.lora.parts import PartShape
from octavo.core.lora.slots import AdapterSlots
from tests.lora.packer import make_lora
from tests.models.step_runner import ReferenceBackend

K, V, M = 24, 40, 24
ROWS = {"q_proj": 16, "k_proj": 8, "v_proj": 8}


class Net(torch.nn.Module):
    """Layers with the shapes of a decoder's."""

    def __init__(self):
        super().__init__()
        for name, rows in ROWS.items():
            setattr(self, name, torch.nn.Linear(K, rows, bias=False))
        self.embed_tokens = torch.nn.Embedding(V, M)
        self.lm_head = torch.nn.Linear(M, V, bias=False)


class World:
    """Slots with a fused product, an embedding and a head registered, as a model would."""

    def __init__(self, *, rank=0, ranks=1, dtype=torch.float32, max_loras=2, max_lora_rank=8, max_cpu_loras=4):
        self.net = Net()
        self.backend = ReferenceBackend()
        self.slots = AdapterSlots(
            self.backend, OpSet(self.backend), dtype=dtype, max_tokens=64, max_loras=max_loras,
            max_lora_rank=max_lora_rank, max_cpu_loras=max_cpu_loras,
        )  # fmt: skip

        def part(total):
            return rank * total // ranks, (rank + 1) * total // ranks

        self.vocab = part(V)
        self.qkv = self.slots.product(
            [PartShape((name,), rows, K, kept_rows=(part(rows),)) for name, rows in ROWS.items()]
        )
        self.embedding = self.slots.embedding(
            PartShape(("embed_tokens",), M, V, kept_columns=self.vocab, kind="embedding"),
            scale=3.0,
            repeats=lambda weight: torch.equal(weight, self.net.embed_tokens.weight),
        )
        self.head = self.slots.product(
            [PartShape(("lm_head",), V, M, kept_rows=(self.vocab,), kind="head")], dtype=torch.float32
        )
        self.q_range = part(ROWS["q_proj"])

    def load(self, lora, path):
        return self.slots.load(str(lora.save(path))).adapter_id


def rows_of(*slots):
    return torch.tensor(slots, dtype=torch.int32)


def delta_of(lora, name, x):
    a, b, scale = lora.layers[name]
    return scale * (x @ a.T) @ b.T


def test_each_row_gets_its_own_adapter_and_base_rows_keep_their_bits(tmp_path):
    world = World()
    loras = [
        make_lora(world.net, ["q_proj", "v_proj"], r=4, seed=1),
        make_lora(world.net, ["v_proj", "k_proj", "q_proj"], r=8, rslora=True, ranks={"k_proj": 3}, seed=2),
    ]
    slots = [world.slots.acquire(world.load(lora, tmp_path / str(i))) for i, lora in enumerate(loras)]
    x = torch.randn(5, K)
    before = torch.randn(5, 32)
    out = before.clone()
    world.qkv.add(x, rows_of(slots[1], -1, slots[0], slots[0], -1), out=out)
    for row, lora in ((0, loras[1]), (2, loras[0]), (3, loras[0])):
        parts = [
            delta_of(lora, name, x[row]) if name in lora.layers else torch.zeros(rows) for name, rows in ROWS.items()
        ]
        torch.testing.assert_close(out[row], before[row] + torch.cat(parts), rtol=1e-5, atol=1e-5)
    assert torch.equal(out[[1, 4]], before[[1, 4]])


def test_a_layer_that_no_adapter_has_takes_no_memory(tmp_path):
    world = World()
    assert world.slots.use().device_bytes == 0
    generation = world.slots.generation
    world.load(make_lora(world.net, ["q_proj"], r=4), tmp_path / "a")
    q_only = world.slots.use().device_bytes
    assert q_only == 2 * (8 * (K + 16) * 4 + 4)
    assert world.slots.generation == generation + 1
    world.load(make_lora(world.net, ["q_proj"], r=2, seed=5), tmp_path / "b")
    assert (world.slots.use().device_bytes, world.slots.generation) == (q_only, generation + 1)
    world.load(make_lora(world.net, ["v_proj"], r=2, seed=6), tmp_path / "c")
    assert world.slots.use().device_bytes > q_only
    assert world.slots.generation == generation + 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_hold_parts_that_add_up(tmp_path, ranks):
    lora = make_lora(Net(), ["q_proj", "embed_tokens", "lm_head"], r=4, seed=3)
    x, ids = torch.randn(3, K), torch.tensor([0, 21, 39])
    q, embedded, logits = torch.zeros(3, 16), torch.zeros(3, M), torch.zeros(3, V)
    for rank in range(ranks):
        world = World(rank=rank, ranks=ranks)
        slot = world.slots.acquire(world.load(lora, tmp_path / "a"))
        who = rows_of(slot, -1, slot)
        qkv = torch.zeros(3, 32 // ranks)
        world.qkv.add(x, who, out=qkv)
        start, stop = world.q_range
        q[:, start:stop] = qkv[:, : stop - start]
        world.embedding.add_rows(ids, who, out=embedded)
        world.head.add(x, who, out=logits[:, slice(*world.vocab)])
    mask = torch.tensor([[1.0], [0.0], [1.0]])
    a, b, scale = lora.layers["embed_tokens"]
    torch.testing.assert_close(q, mask * delta_of(lora, "q_proj", x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, mask * delta_of(lora, "lm_head", x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(embedded, mask * 3.0 * scale * (b @ a[:, ids]).T, rtol=1e-5, atol=1e-5)


def test_logits_of_half_precision_activations_are_added_in_fp32(tmp_path):
    world = World(dtype=torch.bfloat16)
    lora = make_lora(world.net, ["lm_head"], r=4)
    slot = world.slots.acquire(world.load(lora, tmp_path / "a"))
    x = torch.randn(2, M).bfloat16()
    out = torch.zeros(2, V)
    world.head.add(x, rows_of(slot, slot), out=out)
    torch.testing.assert_close(out, delta_of(lora, "lm_head", x.float()), rtol=1e-5, atol=1e-5)


def test_the_longest_idle_adapter_makes_room_and_users_keep_theirs(tmp_path):
    world = World(max_loras=2)
    ids = [world.load(make_lora(world.net, ["q_proj"], seed=i), tmp_path / str(i)) for i in range(4)]
    first, second = world.slots.acquire(ids[0]), world.slots.acquire(ids[1])
    assert world.slots.acquire(ids[0]) == first
    world.slots.release(ids[0])
    world.slots.release(ids[1])
    assert world.slots.use().pinned == {ids[0]}
    assert world.slots.acquire(ids[2]) == second  # 1 was idle; 0 still has a user
    with pytest.raises(RuntimeError, match="all 2 are in use"):
        world.slots.acquire(ids[3])
    world.slots.release(ids[0])
    world.slots.release(ids[2])
    world.slots.acquire(ids[3])
    assert set(world.slots.use().slots) == {ids[2], ids[3]}
    with pytest.raises(RuntimeError, match="more often"):
        world.slots.release(ids[0])


def test_a_reused_slot_holds_nothing_of_whom_it_had(tmp_path):
    world = World(max_loras=1)
    both = world.load(make_lora(world.net, ["q_proj", "v_proj", "embed_tokens"], r=8, seed=1), tmp_path / "both")
    lora = make_lora(world.net, ["q_proj"], r=2, seed=2)
    q_only = world.load(lora, tmp_path / "q")
    world.slots.acquire(both)
    world.slots.release(both)
    slot = world.slots.acquire(q_only)
    x, out, embedded = torch.randn(2, K), torch.zeros(2, 32), torch.zeros(2, M)
    world.qkv.add(x, rows_of(slot, slot), out=out)
    world.embedding.add_rows(torch.tensor([1, 2]), rows_of(slot, slot), out=embedded)
    torch.testing.assert_close(out[:, :16], delta_of(lora, "q_proj", x), rtol=1e-5, atol=1e-5)
    assert not out[:, 16:].any()
    assert not embedded.any()


def test_a_forgotten_adapter_is_gone_from_host_and_device(tmp_path):
    """vllm#54839."""
    world = World()
    adapter_id = world.load(make_lora(world.net, ["q_proj"]), tmp_path / "a")
    slot = world.slots.acquire(adapter_id)
    with pytest.raises(RuntimeError, match="1 requests used it"):
        world.slots.forget(adapter_id)
    adapter_id = world.load(make_lora(world.net, ["q_proj"]), tmp_path / "a")
    world.slots.release(adapter_id)
    world.slots.forget(adapter_id)
    use = world.slots.use()
    assert (use.slots, use.known, use.host_bytes) == ((None, None), (), 0)
    out = torch.zeros(1, 32)
    world.qkv.add(torch.randn(1, K), rows_of(slot), out=out)
    assert not out.any()
    world.slots.forget("never seen")


def test_host_copies_are_bounded_and_read_again(tmp_path):
    world = World(max_loras=1, max_cpu_loras=2)
    loras = [make_lora(world.net, ["q_proj"], seed=i) for i in range(3)]
    ids = [world.load(lora, tmp_path / str(i)) for i, lora in enumerate(loras)]
    one_copy = 4 * (K + 16) * 4
    assert world.slots.use().host_bytes == 2 * one_copy
    slot = world.slots.acquire(ids[0])  # its copy had made room
    out, x = torch.zeros(1, 32), torch.randn(1, K)
    world.qkv.add(x, rows_of(slot), out=out)
    torch.testing.assert_close(out[:, :16], delta_of(loras[0], "q_proj", x), rtol=1e-5, atol=1e-5)
    assert world.slots.use().host_bytes == 2 * one_copy


def test_files_that_changed_or_went_fail_their_own_acquire_only(tmp_path):
    world = World(max_loras=1, max_cpu_loras=1)
    ids = [world.load(make_lora(world.net, ["q_proj"], seed=i), tmp_path / str(i)) for i in range(3)]
    make_lora(world.net, ["q_proj"], seed=9).save(tmp_path / "0")
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(CheckpointError, match="changed since it was loaded"):
        world.slots.acquire(ids[0])
    with pytest.raises(CheckpointError, match="cannot read"):
        world.slots.acquire(ids[1])
    world.slots.acquire(ids[2])
    assert world.slots.use().slots == (ids[2],)


def test_a_file_that_is_written_over_while_it_is_read_changes_nothing(tmp_path):
    """What was hashed is what is used; and a file cut short under the reader would end the whole process."""
    lora = make_lora(World().net, ["q_proj"])
    adapter = read_adapter(lora.save(tmp_path / "a"))
    file = tmp_path / "a" / "adapter_model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-4 * (K + 16) * 4, os.SEEK_END)  # both matrices
        stream.write(bytes(4 * (K + 16) * 4))
    weights, (a, b, _) = adapter.layers["q_proj"].weights, lora.layers["q_proj"]
    assert torch.equal(weights.a_RK, a)
    assert torch.equal(weights.b_NR, b)
    os.truncate(file, 0)
    assert torch.equal(weights.a_RK, a)
    with pytest.raises(CheckpointError, match="truncated"):
        read_adapter(tmp_path / "a")


def test_identity_is_content_and_not_name_or_place(tmp_path):
    world = World()
    lora = make_lora(world.net, ["q_proj"], seed=1)
    first = world.load(lora, tmp_path / "a")
    assert world.load(lora, tmp_path / "elsewhere") == first
    lora.config |= {"base_model_name_or_path": "somebody/model", "lora_dropout": 0.0}
    assert world.load(lora, tmp_path / "retold") == first
    assert world.slots.use().known == (first,)
    lora.config["lora_alpha"] = 9
    assert world.load(lora, tmp_path / "a") != first  # the same place, another scale
    a, b, scale = lora.layers["q_proj"]
    lora.config["lora_alpha"] = 8
    lora.layers["q_proj"] = (a, b.nextafter(torch.tensor(9.0)), scale)
    assert world.load(lora, tmp_path / "b") != first


def test_a_copy_of_the_base_weight_is_compared(tmp_path):
    world = World()
    lora = make_lora(world.net, ["embed_tokens"], seed=1)
    lora.extra["base_model.model.embed_tokens.base_layer.weight"] = world.net.embed_tokens.weight.detach().clone()
    world.load(lora, tmp_path / "same")
    lora.extra["base_model.model.embed_tokens.base_layer.weight"][3, 3] += 1
    with pytest.raises(CheckpointError, match="embed_tokens comes with a base weight that is not this model's"):
        world.load(lora, tmp_path / "other")


def test_no_memory_for_more_layers_is_one_clear_error(tmp_path):
    world = World()
    world.backend.memory_info = lambda: type("Memory", (), {"free_bytes": 1000})()
    with pytest.raises(ConfigError, match="2568 bytes, but 1000 are free; lower max_loras"):
        world.load(make_lora(world.net, ["q_proj"]), tmp_path / "a")
    assert world.slots.use().known == ()


def config_text(text):
    return lambda lora, path: (lora.save(path) / "adapter_config.json").write_text(text)


def without(name):
    return lambda lora, path: (lora.save(path) / name).unlink()


def pickled(lora, path):
    (lora.save(path) / "adapter_model.safetensors").rename(path / "adapter_model.bin")


def cut_off(lora, path):
    file = lora.save(path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def value(matrix, number):
    def change(lora, path):
        lora.layers["q_proj"][matrix][1, 2] = number
        lora.save(path)

    return change


def shapes(a_shape, b_shape, **config):
    def change(lora, path):
        lora.layers["q_proj"] = (torch.zeros(a_shape), torch.zeros(b_shape), 2.0)
        lora.config |= config
        lora.save(path)

    return change


def config(**fields):
    def change(lora, path):
        lora.config |= fields
        lora.save(path)

    return change


def one_more(name, tensor):
    def change(lora, path):
        lora.extra[name] = tensor
        lora.save(path)

    return change


def half_a_layer(lora, path):
    lora.extra["base_model.model.q_proj.lora_A.weight"] = lora.layers.pop("q_proj")[0]
    lora.save(path)


def nothing(lora, path):
    lora.layers.clear()
    lora.save(path)


def renamed(lora, path):
    lora.layers["qq_proj"] = lora.layers.pop("q_proj")
    lora.config["target_modules"] = ["qq_proj"]
    lora.save(path)


def integers(lora, path):
    a, b, scale = lora.layers["q_proj"]
    lora.layers["q_proj"] = (a.long(), b, scale)
    lora.save(path)


def as_embedding(lora, path):
    lora.embeddings = frozenset({"q_proj"})
    lora.save(path)


BROKEN = {
    "no config": (without("adapter_config.json"), "cannot read"),
    "config is no JSON": (config_text("{"), "not valid JSON"),
    "config is a list": (config_text("[]"), "not a JSON object"),
    "no weights": (without("adapter_model.safetensors"), "has no adapter_model.safetensors"),
    "pickled": (pickled, "never loaded"),
    "cut off": (cut_off, "truncated"),
    "NaN": (value(0, float("nan")), "in A that are NaN or infinite"),
    "infinite": (value(1, float("inf")), "in B that are NaN or infinite"),
    "another shape": (shapes((4, 25), (16, 4)), r"is \[16, 25\] in the adapter and \[16, 24\] in the model"),
    "rank unlike config": (shapes((5, 24), (16, 5)), "rank 4 by adapter_config.json"),
    "rank above slots": (shapes((9, 24), (16, 9), r=9), "above max_lora_rank 8; raise it"),
    "three axes": (shapes((4, 24, 1), (16, 4)), r"has matrices of torch.float32 \[4, 24, 1\]"),
    "unknown layer": (renamed, "did you mean 'q_proj'"),
    "half a layer": (half_a_layer, "has A where it needs A and B"),
    "DoRA": (one_more("base_model.model.q_proj.lora_magnitude_vector", torch.ones(16)), "belongs to DoRA"),
    "bias": (one_more("base_model.model.q_proj.lora_B.bias", torch.ones(16)), "biases of adapters"),
    "foreign names": (one_more("q_proj.lora_A.weight", torch.ones(4, 24)), "no part of a plain LoRA adapter"),
    "saved module": (one_more("base_model.model.v_proj.weight", torch.ones(8, 24)), "not this model's"),
    "integers": (integers, "torch.int64"),
    "not selected": (config(target_modules=["v_proj"]), "does not select it"),
    "selected without weights": (config(target_modules=["q_proj", "v_proj"]), "v_proj is selected by target_modules"),
    "embedding for a product": (as_embedding, "an embedding in one"),
    "nothing": (nothing, "no adapter weights"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_adapter_fails_its_own_load_and_leaves_nothing(tmp_path, kind):
    world = World()
    good = world.load(make_lora(world.net, ["v_proj"], seed=7), tmp_path / "good")
    before = world.slots.use()
    spoil, says = BROKEN[kind]
    spoil(make_lora(world.net, ["q_proj"]), tmp_path / "bad")
    with pytest.raises(CheckpointError, match=says):
        world.slots.load(str(tmp_path / "bad"))
    assert world.slots.use() == before
    world.slots.acquire(good)


def test_values_too_large_for_the_slots_type_are_refused(tmp_path):
    lora = make_lora(Net(), ["q_proj"])
    lora.layers["q_proj"][0][0, 0] = 1e5
    World().load(lora, tmp_path / "a")
    with pytest.raises(CheckpointError, match="in A that are NaN or infinite as float16"):
        World(dtype=torch.float16).load(lora, tmp_path / "a")
