"""The runner's rows: what a step's inputs say of each request's positions."""

from __future__ import annotations

from octavo.core.base.params import SamplingParams
from octavo.core.engine.batch import InputBatch
from octavo.core.sched.output import NewRequest, RunningRequest, SchedulerOutput


def new_request(request_id: str, num_tokens: int, rotary_offset: int, first_block: int) -> NewRequest:
    return NewRequest(
        request_id=request_id,
        token_ids=tuple(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(),
        choice_index=0,
        end_token_ids=frozenset(),
        block_ids=(tuple(range(first_block, first_block + 4)),),
        num_computed_tokens=0,
        adapter_id=None,
        resumed=False,
        needs_prompt_logprobs=False,
        rotary_offset=rotary_offset,
    )


def output_of(num_scheduled: dict[str, int]) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=1,
        new_requests=(),
        running=(),
        num_scheduled_tokens=num_scheduled,
        finished_request_ids=(),
        preempted_request_ids=(),
        block_copies=(),
        total_num_scheduled_tokens=sum(num_scheduled.values()),
    )


def test_an_offset_moves_the_models_positions_and_nothing_else():
    batch = InputBatch(max_num_seqs=2, max_model_len=16, block_sizes=(4,))
    batch.add(new_request("short", 3, 0, first_block=1))
    batch.add(new_request("long", 6, 100, first_block=5))
    inputs = batch.prepare(output_of({"short": 3, "long": 5}))
    assert inputs.positions_T.tolist() == [0, 1, 2, 100, 101, 102, 103, 104]
    assert inputs.token_ids_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert inputs.seq_lens_B.tolist() == [3, 5]
    assert inputs.groups[0].slot_mapping.tolist() == [4, 5, 6, 20, 21, 22, 23, 24]
    batch.advance(RunningRequest("long", ((),), 5))
    assert batch.prepare(output_of({"long": 1})).positions_T.tolist() == [105]


def test_a_freed_row_forgets_its_offset():
    batch = InputBatch(max_num_seqs=1, max_model_len=16, block_sizes=(4,))
    batch.add(new_request("long", 2, 100, first_block=1))
    batch.remove("long")
    batch.add(new_request("short", 2, 0, first_block=1))
    assert batch.prepare(output_of({"short": 2})).positions_T.tolist() == [0, 1]
