"""Cases D and C at the sampler: order of the steps, rows that fail alone, rows independent of each other."""

import math

import pytest
import torch

from octavo.core.sample.sampler import NO_TOKEN, Sampler

V = 50


def logits_of(rows=1, seed=0, size=V):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def peak(*ids, size=V):
    """One row that likes the ids best, in order."""
    logits = torch.zeros(1, size)
    for rank, token_id in enumerate(ids):
        logits[0, token_id] = 10.0 - rank
    return logits


def one(sampler, logits, row):
    return sampler.sample(logits, [row]).token_ids[0]


def test_greedy_takes_the_most_likely_and_the_lowest_of_a_tie(sampler, row):
    logits = logits_of(3)
    assert sampler.sample(logits, [row()] * 3).token_ids == logits.argmax(-1).tolist()
    assert one(sampler, torch.zeros(1, V), row()) == 0


def test_a_greedy_batch_goes_to_the_device_once_and_at_temperature_0(row):
    temperatures = []

    def draw(logits_RV, temperature_R, *others, out):
        temperatures.append(temperature_R.tolist())
        out.copy_(logits_RV.argmax(-1))

    logits = logits_of(4)
    assert Sampler(draw).sample(logits, [row(logprobs=2)] * 4).token_ids == logits.argmax(-1).tolist()
    assert temperatures == [[0.0] * 4]


@pytest.mark.parametrize("temperature", [0, 1e-7, 9e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tiny_temperatures_are_greedy(sampler, row, temperature, dtype):
    """Case D2; half-precision logits reach the sampler widened."""
    logits = torch.linspace(-20, 20, V).unsqueeze(0)[:, torch.randperm(V)].to(dtype).float()
    rows = [row(temperature=temperature, seed=seed) for seed in range(20)]
    assert set(sampler.sample(logits.expand(20, -1), rows).token_ids) == {int(logits.argmax())}


def test_seeds_choices_and_positions_draw_their_own_numbers(sampler, row):
    """Case D1: n choices of one seed differ, and the whole set repeats with the seed."""
    logits = torch.zeros(1, 10_000)

    def reply(choice, seed=7):
        current, tokens = row(temperature=1.0, seed=seed, choice=choice), []
        for _ in range(5):
            tokens.append(one(sampler, logits, current))
            current.append(tokens[-1])
        return tokens

    replies = [reply(choice) for choice in range(3)]
    assert len({tuple(tokens) for tokens in replies}) == 3
    assert all(len(set(tokens)) > 1 for tokens in replies)
    assert replies == [reply(choice) for choice in range(3)]
    assert reply(0, seed=8) != replies[0]
    assert reply(0, seed=-1) == reply(0, seed=2**64 - 1)


def test_a_rebuilt_row_goes_on_as_if_nothing_had_happened(sampler, row):
    params = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_k": 20}
    params |= {"bad_words_token_ids": ((4, 5), (6,)), "min_tokens": 6}
    whole, tokens = row(prompt=[1, 2], ends=[9], **params), []
    for step in range(12):
        rebuilt = row(prompt=[1, 2], outputs=tokens, ends=[9], **params)
        logits = logits_of(seed=step)
        token_id = one(sampler, logits, whole)
        assert one(sampler, logits, rebuilt) == token_id
        whole.append(token_id)
        tokens.append(token_id)


def many_rows(row):
    def scripted(prompt, output, logits):
        return logits.index_fill(0, torch.tensor([5]), 40.0)

    return [
        row(),
        row(temperature=0.8, seed=1),
        row(temperature=1.0, top_k=5, seed=2, logprobs=3),
        row(temperature=1.2, top_p=0.9, seed=3, prompt=[1, 2], repetition_penalty=1.5),
        row(temperature=1.0, min_p=0.1, seed=4, choice=1),
        row(logit_bias={3: 100.0}, logprobs=0),
        row(allowed_token_ids=(4, 8), temperature=1.0),
        row(bad_words_token_ids=((1,), (2, 3)), outputs=[2], min_tokens=4, ends=[7]),
        row(logits_processors=[scripted]),
        row(outputs=[1, 1, 2], presence_penalty=1.0, frequency_penalty=0.5, temperature=2.0),
    ]


@pytest.mark.parametrize("size", [V, 49_152])
def test_a_row_does_not_depend_on_its_neighbours(sampler, row, size):
    logits = logits_of(10, size=size)
    rows = many_rows(row)
    together = sampler.sample(logits, rows)
    backwards = sampler.sample(logits.flip(0), rows[::-1])
    assert backwards.token_ids[::-1] == together.token_ids
    assert backwards.logprobs[::-1] == together.logprobs
    for i in range(10):
        alone = sampler.sample(logits[i : i + 1].clone(), [rows[i]])
        assert (alone.token_ids, alone.logprobs) == ([together.token_ids[i]], [together.logprobs[i]])


def test_logits_are_left_as_they_are(sampler, row):
    logits = logits_of(10)
    before = logits.clone()
    sampler.sample(logits, many_rows(row))
    assert torch.equal(logits, before)


# -- masks and bias -----------------------------------------------------------------------------------------------


def test_bias_and_allowed_ids(sampler, row):
    assert one(sampler, peak(1), row(logit_bias={30: 100.0})) == 30
    assert one(sampler, peak(1), row(logit_bias={1: -100.0, 2: 5.0})) == 2
    assert one(sampler, peak(1, 2, 3), row(allowed_token_ids=(3, 2))) == 2
    for seed in range(20):
        assert one(sampler, logits_of(), row(allowed_token_ids=(3, 2), temperature=50.0, seed=seed)) in (2, 3)


def test_min_tokens_holds_every_end_id_back(sampler, row):
    """Case B4: no end id before token 8; token 9 may be one."""
    current = row(min_tokens=8, ends=[2, 0, 11], logit_bias={0: 100.0}, stop_token_ids=(11,))
    tokens = []
    for _ in range(9):
        tokens.append(one(sampler, peak(2, 11, 4), current))
        current.append(tokens[-1])
    assert tokens == [4] * 8 + [0]


def test_bad_words_block_the_last_token_after_the_others_only(sampler, row):
    """Case D4: 'exaggerated' as [24098] and as three tokens; words that begin alike stay possible."""
    words = ((30,), (10, 11, 12))
    assert one(sampler, peak(30, 7), row(bad_words_token_ids=words)) == 7
    assert one(sampler, peak(12, 7), row(bad_words_token_ids=words)) == 12
    assert one(sampler, peak(12, 7), row(bad_words_token_ids=words, outputs=[11])) == 12
    assert one(sampler, peak(12, 7), row(bad_words_token_ids=words, outputs=[3, 10, 11])) == 7
    assert one(sampler, peak(13, 7), row(bad_words_token_ids=words, outputs=[3, 10, 11])) == 13
    assert one(sampler, peak(12, 7), row(bad_words_token_ids=words, outputs=[10, 11, 3])) == 12
    assert one(sampler, peak(12, 7), row(bad_words_token_ids=words, prompt=[10, 11])) == 12


def test_bad_words_longer_than_the_output_and_ids_beyond_the_logits(sampler, row):
    assert one(sampler, peak(1), row(bad_words_token_ids=((1,) * 9, (V + 3,)), ends=[V + 1], min_tokens=2)) == 1


# -- logits processors --------------------------------------------------------------------------------------------


def test_processors_see_the_tokens_and_run_in_order_before_the_masks(sampler, row):
    seen = []

    def first(prompt, output, logits):
        seen.append((list(prompt), list(output), logits.shape, logits.dtype))
        return logits.index_fill(0, torch.tensor([8]), 90.0)

    def second(prompt, output, logits):
        logits[9] = logits[8] + 1
        return logits

    assert one(sampler, peak(1), row(prompt=[1, 2], outputs=[3], logits_processors=[first, second])) == 9
    assert seen == [([1, 2], [3], (V,), torch.float32)]
    banned = {"logits_processors": [first, second], "bad_words_token_ids": ((9,),)}
    assert one(sampler, peak(1), row(**banned)) == 8


def test_a_scripted_processor_forces_tokens(sampler, row):
    script = [5, 9, 2]

    def scripted(prompt, output, logits):
        forced = torch.full_like(logits, -torch.inf)
        forced[script[len(output)]] = 0.0
        return forced

    current = row(logits_processors=[scripted], temperature=1.0)
    for _ in script:
        current.append(one(sampler, logits_of(), current))
    assert current.output_token_ids == script


# -- penalties ----------------------------------------------------------------------------------------------------


def test_the_first_step_sees_the_prompt_for_repetition_alone(sampler, row):
    """Case D5: the prompt is one word repeated."""
    logits = peak(6, 7)
    assert one(sampler, logits, row(prompt=[6, 6, 6], repetition_penalty=1.5)) == 7
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert one(sampler, logits, row(prompt=[6, 6, 6], **{penalty: 1.5})) == 6
        assert one(sampler, logits, row(outputs=[6], **{penalty: 1.5})) == 7


def test_a_temperature_comes_after_the_penalties(sampler, row):
    """With the bias and a presence penalty of 2 the two best are equal: both are drawn about as often."""
    logits = torch.full((1, V), -100.0)
    logits[0, 3] = 2.0
    logits[0, 4] = 0.0
    rows = [row(temperature=0.5, outputs=[3], presence_penalty=2.0, seed=seed) for seed in range(400)]
    counts = torch.bincount(torch.tensor(sampler.sample(logits.expand(400, -1), rows).token_ids))
    assert 160 < counts[3] < 240
    assert counts[3] + counts[4] == 400


# -- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reason"), [(math.nan, "logits are NaN"), (math.inf, "infinite"), (-math.inf, "infinite")]
)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"logprobs": 3}, {"logit_bias": {1: 1.0}}])
def test_a_broken_row_fails_alone(sampler, row, value, reason, options):
    logits = logits_of(3)
    expected = sampler.sample(logits, [row(**options)] * 3)
    if value == -math.inf:
        logits[1] = value
    else:
        logits[1, 17] = value
    output = sampler.sample(logits, [row(**options)] * 3)
    assert list(output.failed) == [1]
    assert reason in output.failed[1]
    assert output.token_ids == [expected.token_ids[0], NO_TOKEN, expected.token_ids[2]]
    assert output.logprobs == [expected.logprobs[0], None, expected.logprobs[2]]


def broken(prompt, output, logits):
    raise KeyError("what")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"allowed_token_ids": (3,), "bad_words_token_ids": ((3,),)}, "no token is left"),
        ({"allowed_token_ids": (3,), "min_tokens": 2, "ends": [3]}, "no token is left"),
        ({"logits_processors": [broken]}, "a logits processor failed: KeyError: 'what'"),
        ({"logits_processors": [lambda prompt, output, logits: logits[:7]]}, "a logits processor failed: RuntimeError"),
        ({"logits_processors": [lambda prompt, output, logits: None]}, "a logits processor failed: TypeError"),
        ({"logits_processors": [lambda prompt, output, logits: logits / 0 * 0]}, "logits are NaN after"),
    ],
)
def test_a_row_that_its_own_parameters_break_fails_alone(sampler, row, options, reason):
    logits = logits_of(3)
    rows = [row(temperature=1.0), row(**options), row()]
    output = sampler.sample(logits, rows)
    assert list(output.failed) == [1]
    assert reason in output.failed[1]
    assert "\n" not in output.failed[1]
    neighbours = sampler.sample(logits[[0, 2]], [rows[0], rows[2]])
    assert [output.token_ids[0], output.token_ids[2]] == neighbours.token_ids


# -- logprobs -----------------------------------------------------------------------------------------------------


def test_logprobs_are_raw_whatever_the_parameters(sampler, row):
    """Case C1 and "logprobs change with temperature/top_k; raw values wanted"."""
    logits = logits_of()
    plain = torch.log_softmax(logits[0], -1)
    for options in ({}, {"temperature": 1.0, "top_k": 1}, {"temperature": 3.0, "logit_bias": {2: 50.0}}):
        output = sampler.sample(logits, [row(logprobs=5, **options)])
        entry = output.logprobs[0]
        assert entry.token_id == output.token_ids[0]
        assert entry.logprob == pytest.approx(plain[entry.token_id].item(), abs=1e-6)
        assert [token_id for token_id, _ in entry.top] == plain.topk(5).indices.tolist()
        assert entry.rank == 1 + int((plain > plain[entry.token_id]).sum())


def test_only_rows_that_ask_get_logprobs(sampler, row):
    output = sampler.sample(logits_of(3), [row(), row(logprobs=0), row(logprobs=2)])
    assert output.logprobs[0] is None
    assert [len(entry.top) for entry in output.logprobs[1:]] == [0, 2]
