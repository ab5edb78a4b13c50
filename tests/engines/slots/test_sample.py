import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.engines.slots.sample import BatchSampling, draw

LAST = 1 - 2.0**-53
ANY = BatchSampling(None, None, None)


def column(value, rows=1):
    return None if value is None else torch.tensor([value] * rows)


def frequencies(logits, temperature=None, top_p=None, top_k=None, num=20_000):
    """Share and logprob of each token when noise takes `num` evenly spaced values."""
    noise = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    shape = BatchSampling(column(temperature, num), column(top_p, num), column(top_k, num))
    tokens, logprobs = draw(logits.expand(num, -1), shape, noise)
    shares = torch.bincount(tokens, minlength=len(logits)).double().numpy() / num
    of_token = np.full(len(logits), np.nan)
    of_token[tokens.numpy()] = logprobs.numpy()
    return shares, of_token


def expected(logits, temperature=1.0, top_p=1.0, top_k=0):
    """Probabilities by definition, in float64."""
    scaled = logits.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights)
    if top_k:
        weights[order[top_k:]] = 0
    mass = np.cumsum(weights[order] / weights.sum())
    weights[order[1:][mass[:-1] >= top_p]] = 0
    return weights / weights.sum()


LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 2


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 400},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"temperature": 2.0, "top_k": 12, "top_p": 0.8},
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_shaped_distribution(shape):
    shares, logprobs = frequencies(LOGITS, **shape)
    probabilities = expected(LOGITS, **shape)
    assert np.abs(shares - probabilities).max() < 1.01 / 20_000 + 1e-6
    assert (shares[probabilities == 0] == 0).all()
    drawn = shares > 0
    np.testing.assert_allclose(logprobs[drawn], np.log(probabilities[drawn]), atol=2e-6)


def test_equal_logits_share_equally_under_top_k_of_all():
    shares, logprobs = frequencies(torch.zeros(8), top_k=8)
    np.testing.assert_allclose(shares, 1 / 8, atol=1e-4)
    np.testing.assert_allclose(logprobs, np.log(1 / 8), atol=1e-6)


def test_a_large_vocabulary_is_drawn_from_evenly():
    """The noise in the middle of each token's share draws that token: sums in float32 would drift past it."""
    size, rows = 150_000, 40
    chosen = torch.linspace(0, size - 1, rows, dtype=torch.float64).long()
    tokens, _ = draw(torch.zeros(rows, size), ANY, (chosen.double() + 0.5) / size)
    assert tokens.tolist() == chosen.tolist()


def test_temperature_zero_takes_the_likeliest_for_certain():
    logits = torch.randn(64, 30)
    noise = torch.linspace(0, LAST, 64, dtype=torch.float64)
    tokens, logprobs = draw(logits, BatchSampling(torch.zeros(64), None, None), noise)
    assert torch.equal(tokens, logits.argmax(-1))
    assert (logprobs == 0).all()


def test_every_row_has_its_own_shape():
    """Rows keep their own temperature, top-k and top-p, and give what they would give alone."""
    logits = LOGITS.expand(4, -1)
    shape = BatchSampling(
        torch.tensor([0.0, 0.5, 1.0, 2.0]), torch.tensor([1.0, 0.7, 1.0, 0.5]), torch.tensor([0, 0, 3, 7])
    )
    for noise in torch.linspace(0, LAST, 50, dtype=torch.float64):
        tokens, logprobs = draw(logits, shape, noise.expand(4))
        for row in range(4):
            only = BatchSampling(shape.temperature[row, None], shape.top_p[row, None], shape.top_k[row, None])
            token, logprob = draw(LOGITS[None], only, noise[None])
            assert tokens[row] == token[0]
            assert logprobs[row] == pytest.approx(float(logprob[0]), abs=1e-6)


@pytest.mark.parametrize("noise", [0.0, 2.0**-53, 0.5, LAST])
@pytest.mark.parametrize("where", ["first", "last", "around"])
def test_a_token_without_probability_is_never_drawn(noise, where):
    logits = torch.randn(200, 50)
    hidden = {"first": slice(0, 20), "last": slice(30, 50), "around": [*range(10), *range(40, 50)]}[where]
    logits[:, hidden] = -torch.inf
    tokens, logprobs = draw(logits, ANY, torch.full((200,), noise, dtype=torch.float64))
    assert torch.isfinite(logits.gather(1, tokens[:, None])).all()
    assert torch.isfinite(logprobs).all()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=20),
    st.sampled_from([0.0, 2.0**-53, 0.25, 0.999999, LAST]),
    st.sampled_from([None, 0.1, 1.0, 7.0]),
    st.sampled_from([None, 1e-9, 0.5, 0.999999]),
    st.sampled_from([None, 1, 3]),
)
def test_any_logits_give_a_token_of_the_distribution(values, noise, temperature, top_p, top_k):
    logits = torch.tensor([values])
    shape = BatchSampling(column(temperature), column(top_p), column(top_k))
    tokens, logprobs = draw(logits, shape, torch.tensor([noise], dtype=torch.float64))
    assert 0 <= int(tokens[0]) < len(values)
    assert torch.isfinite(logprobs).all()
    assert float(logprobs[0]) <= 0
    if top_k == 1:
        assert values[int(tokens[0])] == max(values)


def test_half_precision_logits_are_shaped_in_full():
    logits = LOGITS.bfloat16()[None]
    tokens, logprobs = draw(logits, ANY, torch.tensor([0.4], dtype=torch.float64))
    assert logprobs.dtype == torch.float32
    assert float(logprobs[0]) == pytest.approx(float(logits.float().log_softmax(-1)[0, int(tokens[0])]), abs=1e-6)


def test_a_row_with_top_p_one_keeps_its_tail_beside_one_with_less():
    logits = torch.tensor([[20.0, 0.0, -3.0, -4.0]] * 2)
    noise = torch.full((2,), LAST, dtype=torch.float64)
    tokens, _ = draw(logits, BatchSampling(None, torch.tensor([1.0, 0.5]), None), noise)
    assert tokens.tolist() == [3, 0]


@pytest.mark.parametrize("temperature", [None, 0.0, 0.7])
def test_a_row_of_logits_that_are_not_numbers_says_so_and_leaves_the_others_alone(temperature):
    rows = torch.tensor([[0.0, 2.0, 1.0], [0.0, torch.nan, 1.0], [0.0, torch.inf, 1.0], [-torch.inf] * 3, [3.0, 0, 1]])
    noise = torch.full((5,), 0.5, dtype=torch.float64)
    shape = lambda size: BatchSampling(None if temperature is None else torch.full((size,), temperature), None, None)
    tokens, logprobs = draw(rows, shape(5), noise)
    assert logprobs.isnan().tolist() == [False, True, True, True, False]
    alone, chances = draw(rows[[0, 4]], shape(2), noise[:2])
    assert tokens[[0, 4]].tolist() == alone.tolist()
    assert logprobs[[0, 4]].tolist() == chances.tolist()
