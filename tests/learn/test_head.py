import math

import pytest
import torch

from making import distance
from turnwise.learn import head
from turnwise.learn.head import chunks, token_logprobs

TOKENS, WIDTH, VOCABULARY = 11, 6, 17


def naive(hidden, weight, targets, temperature):
    table = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


def inputs(dtype=torch.float64, tokens=TOKENS, seed=0):
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, generator=random, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=random, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (tokens,), generator=random)
    factors = torch.randn(2, tokens, generator=random, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, factors


def results(function, hidden, weight, targets, temperature, factors):
    """(logprobs, entropies, gradient of hidden, gradient of weight) of a weighted sum of both outputs."""
    logprobs, entropies = function(hidden, weight, targets, temperature)
    total = (logprobs * factors[0].to(logprobs.dtype)).sum() + (entropies * factors[1].to(logprobs.dtype)).sum()
    gradients = torch.autograd.grad(total, (hidden, weight))
    return [x.detach().double() for x in (logprobs, entropies, *gradients)]


@pytest.mark.parametrize("chunk_elements", [1, VOCABULARY, 3 * VOCABULARY, 5 * VOCABULARY + 1, 1 << 22])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("terms", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_chunks_equal_a_whole_log_softmax(monkeypatch, chunk_elements, temperature, terms):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, targets, factors = inputs()
    factors = factors * torch.tensor(terms, dtype=torch.float64)[:, None]
    found = results(token_logprobs, hidden, weight, targets, temperature, factors)
    wanted = results(naive, hidden, weight, targets, temperature, factors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_pass_the_finite_difference_check(monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 2 * VOCABULARY)
    hidden, weight, targets, _ = inputs(tokens=5)
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, targets, 1.3), (hidden, weight), atol=1e-8)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_is_close_and_its_sums_are_float32(monkeypatch, weight_dtype):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 2 * VOCABULARY)
    hidden, weight, targets, factors = inputs()
    wanted = results(naive, hidden, weight, targets, 1.0, factors)
    narrow = hidden.detach().bfloat16().requires_grad_(), weight.detach().to(weight_dtype).requires_grad_()
    logprobs, entropies = token_logprobs(*narrow, targets, 1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32
    found = results(token_logprobs, *narrow, targets, 1.0, factors)
    assert [distance(one, other) < 0.02 for one, other in zip(found, wanted, strict=True)] == [True] * 4
    gradients = torch.autograd.grad(token_logprobs(*narrow, targets, 1.0)[0].sum(), narrow)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, weight_dtype]


def test_logits_that_overflow_an_exponential_are_fine():
    hidden = torch.full((2, 1), 1000.0)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    logprobs, entropies = token_logprobs(hidden, weight, torch.tensor([0, 2]), 1.0)
    assert logprobs.tolist() == [0.0, -2000.0]
    assert entropies.tolist() == [0.0, 0.0]


def test_even_logits_have_the_greatest_entropy():
    hidden, weight = torch.zeros(3, WIDTH), torch.ones(VOCABULARY, WIDTH)
    logprobs, entropies = token_logprobs(hidden, weight, torch.tensor([0, 1, 2]), 1.0)
    assert entropies.tolist() == pytest.approx([math.log(VOCABULARY)] * 3)
    assert logprobs.tolist() == pytest.approx([-math.log(VOCABULARY)] * 3)


def test_no_tokens_have_no_logprobs_and_no_gradient():
    hidden, weight, targets, _ = inputs(tokens=0)
    logprobs, entropies = token_logprobs(hidden, weight, targets, 1.0)
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert not weight.grad.any()


def test_chunks_hold_no_more_logits_than_allowed(monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 40)
    assert chunks(10, 10) == [(0, 4), (4, 8), (8, 10)]
    assert chunks(2, 100) == [(0, 1), (1, 2)]
    assert chunks(0, 10) == []
