"""The draw: filters as Hugging Face's, frequencies as the distribution's, rows independent of each other."""

import pytest
import torch

from octavo.core.backend.reference_sample import sample_reference


def draw(logits, uniform, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    rows = len(logits)

    def column(value, dtype=torch.float32):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    return sample_reference(
        logits, column(temperature), column(top_k, torch.int64), column(top_p), column(min_p), column(uniform)
    )


def kept(logits_V, **options):
    """Every id that some uniform number draws, found on a fine grid; the logits must not be too uneven."""
    grid = torch.arange(0, 1, 1 / 4096)
    return set(draw(logits_V.expand(len(grid), -1), grid, **options).tolist())


def some_logits(size=60, seed=0, spread=1.0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def warped(logits_V, *processors):
    """Ids that transformers' warpers leave."""
    scores = logits_V.unsqueeze(0)
    for processor in processors:
        scores = processor(None, scores)
    return set(torch.nonzero(scores[0] > -torch.inf).squeeze(-1).tolist())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.7, "min_p": 0.1},
    ],
)
def test_keeps_what_hugging_face_keeps(options, seed):
    warpers = pytest.importorskip("transformers").generation.logits_process
    makers = {
        "temperature": warpers.TemperatureLogitsWarper,
        "top_k": warpers.TopKLogitsWarper,
        "top_p": warpers.TopPLogitsWarper,
        "min_p": warpers.MinPLogitsWarper,
    }
    logits = some_logits(seed=seed)
    assert kept(logits, **options) == warped(logits, *(makers[name](value) for name, value in options.items()))


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_frequencies_follow_the_distribution(options):
    """Chi-square at a fixed sample size: 20,000 draws, limit at p < 0.0005."""
    logits, size = some_logits(20, seed=3), 20_000
    uniform = torch.rand(size, generator=torch.Generator().manual_seed(1))
    counts = torch.bincount(draw(logits.expand(size, -1), uniform, **options), minlength=20)
    ids = sorted(kept(logits, **options))
    expected = torch.softmax(logits[ids] / options.get("temperature", 1.0), 0) * size
    assert counts.sum() == counts[ids].sum() == size
    statistic = ((counts[ids] - expected) ** 2 / expected).sum()
    limits = {4: 20.0, 19: 44.5}
    assert statistic < limits[min(degrees for degrees in limits if degrees >= len(ids) - 1)]


def test_inverse_cdf_in_id_order():
    logits = torch.log(torch.tensor([0.25, 0.5, 0.25])).expand(5, -1)
    assert draw(logits, [0.0, 0.249, 0.251, 0.749, 0.751]).tolist() == [0, 0, 1, 1, 2]


def test_the_largest_uniform_number_draws_a_token_that_has_weight():
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 10:20] = 0.0
    assert draw(logits, [1 - 2**-24]).tolist() == [19]
    assert draw(logits, [0.0]).tolist() == [10]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_greedy_and_do_not_overflow(temperature):
    """Case D2."""
    logits = some_logits(5000, spread=30.0).expand(64, -1)
    uniform = torch.arange(64) / 64
    assert set(draw(logits, uniform, temperature=temperature).tolist()) == {int(logits[0].argmax())}


def test_extreme_logits():
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38], [1.0, -torch.inf, 1.0]])
    assert draw(logits, 0.9, temperature=1e-3).tolist() == [0, 2, 2]


def test_greedy_takes_the_lowest_id_of_a_tie_also_mixed_with_top_k():
    logits = torch.zeros(3, 50_000)
    logits[:, [7, 49_000]] = 5.0
    ids = draw(logits, 0.999, temperature=[0.0, 1.0, 0.0], top_k=[50, 2, 0])
    assert ids.tolist() == [7, 49_000, 7]
    assert draw(logits, 0.5, temperature=0.0).tolist() == [7, 7, 7]


@pytest.mark.parametrize("top_k", [-1, 0, 60, 61, 10**9])
def test_top_k_beyond_the_vocabulary_keeps_all(top_k):
    assert kept(some_logits(), top_k=top_k) == set(range(60))


def test_ties_with_the_last_one_kept_are_kept():
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert kept(logits, top_k=2) == {0, 1, 2, 3}
    assert kept(torch.zeros(8), top_p=0.5) == set(range(8))


def test_top_p_deeper_than_the_sorted_prefix():
    logits = some_logits(5000, spread=0.1)
    probabilities = torch.softmax(logits, 0).sort(descending=True)
    wanted = int((probabilities.values.cumsum(0) < 0.5).sum()) + 1
    assert wanted > 1000
    likely = set(probabilities.indices[: wanted + 2].tolist())
    ids = draw(logits.expand(1000, -1), torch.arange(1000) / 1000, top_p=0.5).tolist()
    assert set(ids) <= likely
    assert len(set(ids)) > 800  # of 1,000 even steps through a mass spread over about 2,300 tokens
    assert sum(i in set(probabilities.indices[256:].tolist()) for i in ids) > 500


@pytest.mark.parametrize("vocab_size", [300, 49_152])
def test_a_row_is_the_same_alone_and_in_any_batch(vocab_size):
    generator = torch.Generator().manual_seed(5)
    rows = 40
    logits = torch.randn(rows, vocab_size, generator=generator) * 4
    uniform = torch.rand(rows, generator=generator)
    options = {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(10),
        "top_k": torch.tensor([0, 40, 0, 300, 5]).repeat(8),
        "top_p": torch.tensor([1.0, 0.9, 1.0, 0.99, 0.5, 1.0, 0.3, 1.0]).repeat(5),
        "min_p": torch.tensor([0.0, 0.05]).repeat(20),
    }
    together = draw(logits, uniform, **options)
    for part in (slice(0, 1), slice(3, 4), slice(7, 16), slice(20, 40)):
        alone = draw(logits[part], uniform[part], **{name: values[part] for name, values in options.items()})
        assert alone.tolist() == together[part].tolist()


def test_inputs_are_left_as_they_are():
    logits = some_logits().expand(4, -1).clone()
    before = logits.clone()
    draw(logits, 0.5, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1)
    assert torch.equal(logits, before)
