import math

import pytest
import torch

from support.making import distance
from turnwise.learn import head
from turnwise.learn.head import bucket_logprobs, chunks, likeliest, token_logprobs

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


def random_mask(tokens=TOKENS, targets=None, seed=7):
    """Sets of about half of the tokens, the target of every place among them, and the same densely."""
    random = torch.Generator().manual_seed(seed)
    allowed = torch.rand(tokens, VOCABULARY, generator=random) < 0.5
    allowed[torch.arange(tokens), targets] = True
    padded = torch.nn.functional.pad(allowed, (0, -VOCABULARY % 8)).view(tokens, -1, 8)
    bits = (padded.to(torch.uint8) << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)
    order = torch.randperm(tokens, generator=random)
    return head.Mask(bits[order], order.argsort()), allowed


def under_mask(hidden, weight, targets, temperature, allowed):
    table = (hidden @ weight.T / temperature).masked_fill(~allowed, -math.inf).log_softmax(-1)
    shares = table.exp()
    return table.gather(1, targets[:, None])[:, 0], -(shares * table.masked_fill(~allowed, 0.0)).sum(-1)


@pytest.mark.parametrize(
    ("chunk_elements", "narrowest"), [(1, 1), (30, 3), (64, 8), (2 * VOCABULARY, 5), (1 << 21, 256)]
)
@pytest.mark.parametrize("kept", [0, 1 << 24])
@pytest.mark.parametrize("terms", [(1.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("masked", [False, True])
def test_tiles_of_every_shape_equal_a_whole_log_softmax(monkeypatch, chunk_elements, narrowest, kept, terms, masked):
    """Tiles with some of the places, some of the vocabulary, and both; also those in which nothing is allowed."""
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(head, "NARROWEST", narrowest)
    monkeypatch.setattr(head, "KEPT_ELEMENTS", kept)
    hidden, weight, targets, factors = inputs()
    factors = factors * torch.tensor(terms, dtype=torch.float64)[:, None]
    mask, allowed = random_mask(targets=targets) if masked else (None, torch.ones(TOKENS, VOCABULARY, dtype=torch.bool))
    given = (hidden, weight, targets, 0.8, factors)
    found = results(lambda *given: token_logprobs(*given, mask), *given)  # type: ignore[call-arg]
    wanted = results(lambda *given: under_mask(*given, allowed), *given)  # type: ignore[call-arg]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_kept_and_recomputed_gradients_are_the_same_bits(monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 30)
    monkeypatch.setattr(head, "NARROWEST", 4)
    hidden, weight, targets, _ = inputs(torch.float32)
    logprobs, _ = token_logprobs(hidden, weight, targets, 0.8)
    first, second = (torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, targets, factors = inputs()
    wanted = results(token_logprobs, hidden, weight, targets, 1.0, factors)[2]
    logprobs, entropies = token_logprobs(hidden, weight.detach(), targets, 1.0)
    ((logprobs * factors[0]).sum() + (entropies * factors[1]).sum()).backward()
    assert distance(hidden.grad, wanted) < 1e-12
    assert weight.grad is None


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
    monkeypatch.setattr(head, "NARROWEST", 7)
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


def test_chunks_hold_no_more_logits_than_allowed():
    assert chunks(10, 10, 40) == [(0, 4), (4, 8), (8, 10)]
    assert chunks(2, 100, 40) == [(0, 1), (1, 2)]
    assert chunks(0, 10, 40) == []


# ---------------------------------------------------------------- buckets


def naive_buckets(hidden, weight, targets, temperature, tokens):
    """By whole distributions, without a chunk or a logarithm of a sum that is not written out."""
    table = torch.log_softmax(hidden @ weight.T / temperature, -1)
    others = torch.ones_like(table).scatter(1, tokens, 0.0)
    rest = (table.exp() * others).sum(-1, keepdim=True).log()
    return *naive(hidden, weight, targets, temperature), torch.cat([table.gather(1, tokens), rest], 1)


def some_tokens(count, tokens=TOKENS, seed=3):
    """`count` different ones in every place."""
    random = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(VOCABULARY, generator=random)[:count] for _ in range(tokens)])


def bucket_results(function, hidden, weight, targets, temperature, tokens, factors):
    """(logprobs, entropies, buckets, gradients of hidden and weight) of a weighted sum of all three."""
    found = function(hidden, weight, targets, temperature, tokens)
    random = torch.Generator().manual_seed(5)
    of_buckets = torch.randn(found[2].shape, generator=random, dtype=torch.float64)
    total = sum((x * f.to(x.dtype)).sum() for x, f in zip(found, (*factors, of_buckets), strict=True))
    return [x.detach().double() for x in (*found, *torch.autograd.grad(total, (hidden, weight)))]


@pytest.mark.parametrize("chunk_elements", [1, 3 * VOCABULARY, 1 << 22])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("count", [1, 4, VOCABULARY - 1])
@pytest.mark.parametrize("terms", [(1.0, 1.0), (0.0, 0.0)])
def test_buckets_in_chunks_equal_those_of_whole_distributions(monkeypatch, chunk_elements, temperature, count, terms):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(head, "NARROWEST", 5)
    hidden, weight, targets, factors = inputs()
    factors = factors * torch.tensor(terms, dtype=torch.float64)[:, None]
    given = hidden, weight, targets, temperature, some_tokens(count), factors
    for one, other in zip(bucket_results(bucket_logprobs, *given), bucket_results(naive_buckets, *given), strict=True):
        assert distance(one, other) < 1e-12


@pytest.mark.parametrize("count", [1, 4])
def test_gradients_of_buckets_pass_the_finite_difference_check(monkeypatch, count):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 2 * VOCABULARY)
    hidden, weight, targets, _ = inputs(tokens=5)
    tokens = some_tokens(count, tokens=5)
    function = lambda h, w: bucket_logprobs(h, w, targets, 1.3, tokens)
    assert torch.autograd.gradcheck(function, (hidden, weight), atol=1e-8)


def test_buckets_change_no_bit_of_the_logprobs():
    hidden, weight, targets, _ = inputs(torch.float32)
    plain, beside = (
        token_logprobs(hidden, weight, targets, 0.9),
        bucket_logprobs(hidden, weight, targets, 0.9, some_tokens(4)),
    )
    assert torch.equal(plain[0], beside[0])
    assert torch.equal(plain[1], beside[1])


def test_a_rest_of_next_to_nothing_is_exact_and_can_come_back():
    """In float32, where 1 minus the others is 0 long before: logits 0, -120 and -121, the first by itself."""
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[0.0], [-120.0], [-121.0]], requires_grad=True)
    _, _, buckets = bucket_logprobs(hidden, weight, torch.tensor([0]), 1.0, torch.tensor([[0]]))
    assert buckets[0].tolist() == pytest.approx([0.0, -120.0 + math.log1p(math.exp(-1.0))], rel=1e-6)
    buckets[0, 1].backward()
    share = 1.0 / (1.0 + math.exp(-1.0))
    assert weight.grad[:, 0].tolist() == pytest.approx([-1.0, share, 1.0 - share], rel=1e-5)


def test_without_a_rest_its_logprob_is_that_of_nothing_and_others_have_their_gradient():
    hidden, weight, targets, _ = inputs()
    tokens = some_tokens(VOCABULARY)
    _, _, buckets = bucket_logprobs(hidden, weight, targets, 1.0, tokens)
    assert buckets[:, -1].isneginf().all()
    factors = torch.randn(buckets[:, :-1].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table = torch.log_softmax(hidden @ weight.T, -1).gather(1, tokens)
    found = torch.autograd.grad((buckets[:, :-1] * factors).sum(), (hidden, weight))
    wanted = torch.autograd.grad((table * factors).sum(), (hidden, weight))
    assert [distance(one, other) < 1e-12 for one, other in zip(found, wanted, strict=True)] == [True] * 2


def test_buckets_in_bfloat16_are_close_and_float32():
    hidden, weight, targets, factors = inputs()
    given = targets, 1.0, some_tokens(4), factors
    wanted = bucket_results(naive_buckets, hidden, weight, *given)
    narrow = hidden.detach().bfloat16().requires_grad_(), weight.detach().requires_grad_()
    assert bucket_logprobs(*narrow, *given[:3])[2].dtype == torch.float32
    found = bucket_results(bucket_logprobs, *narrow, *given)
    assert [distance(one, other) < 0.02 for one, other in zip(found, wanted, strict=True)] == [True] * 5


@pytest.mark.parametrize("chunk_elements", [1, 3 * VOCABULARY, 1 << 22])
def test_the_likeliest_tokens_and_their_buckets(monkeypatch, chunk_elements):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, targets, _ = inputs()
    tokens, buckets = likeliest(hidden, weight, 0.7, 4, VOCABULARY)
    table = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    assert torch.equal(tokens, table.argsort(-1, descending=True)[:, :4])
    assert not buckets.requires_grad
    torch.testing.assert_close(
        buckets, naive_buckets(hidden, weight, targets, 0.7, tokens)[2].detach(), rtol=1e-12, atol=1e-12
    )


def test_the_likeliest_of_fewer_tokens_leave_the_others_to_the_rest():
    hidden, weight, _, _ = inputs()
    tokens, buckets = likeliest(hidden, weight, 1.0, 3, 5)
    assert int(tokens.max()) < 5
    table = torch.log_softmax(hidden @ weight.T, -1)
    assert torch.equal(tokens, table[:, :5].argsort(-1, descending=True)[:, :3])
    assert buckets.exp().sum(-1).tolist() == pytest.approx([1.0] * TOKENS, rel=1e-12)
