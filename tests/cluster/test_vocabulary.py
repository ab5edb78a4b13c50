"""An output layer whose rows two processes share, against the whole one."""

import pytest
import torch
import torch.distributed as dist

from learn.test_head import TOKENS, VOCABULARY, inputs, random_mask, some_tokens, under_mask
from support.making import distance
from turnwise.learn import head
from turnwise.learn.head import bucket_logprobs, likeliest, token_logprobs
from turnwise.learn.softmax import VocabularyShard

FIRST = 9
"""Rows of the first process: more than those of the second, and not a whole number of bytes of a mask."""


def own_rows(weight):
    place = dist.get_rank()
    rows = slice(0, FIRST) if place == 0 else slice(FIRST, VOCABULARY)
    return weight[rows].detach().requires_grad_(), VocabularyShard(dist.group.WORLD, rows.start, VOCABULARY)


def whole_rows(local):
    """The gradients of all rows, from those of each process."""
    found = [None, None]
    dist.all_gather_object(found, local)
    return torch.cat(found)


def shared_logprobs(masked, chunk_elements):
    """On a process: (logprobs, entropies, gradient of hidden, gradient of all rows)."""
    hidden, weight, targets, factors = inputs()
    mask = random_mask(targets=targets)[0] if masked else None
    rows, shard = own_rows(weight)
    with pytest.MonkeyPatch.context() as patch:  # the process stays for other tests
        patch.setattr(head, "CHUNK_ELEMENTS", chunk_elements)
        patch.setattr(head, "NARROWEST", 4)
        logprobs, entropies = token_logprobs(hidden, rows, targets, 0.8, mask, shard)
        ((logprobs * factors[0]).sum() + (entropies * factors[1]).sum()).backward()
    return logprobs.detach(), entropies.detach(), hidden.grad, whole_rows(rows.grad)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, 40, 1 << 21])
def test_rows_of_two_processes_are_those_of_one(pool, masked, chunk_elements):
    hidden, weight, targets, factors = inputs()
    allowed = random_mask(targets=targets)[1] if masked else torch.ones(TOKENS, VOCABULARY, dtype=torch.bool)
    logprobs, entropies = under_mask(hidden, weight, targets, 0.8, allowed)
    ((logprobs * factors[0]).sum() + (entropies * factors[1]).sum()).backward()
    wanted = logprobs.detach(), entropies.detach(), hidden.grad, weight.grad
    for found in pool.run(shared_logprobs, [masked] * 2, [chunk_elements] * 2):
        assert max(distance(one, other) for one, other in zip(found, wanted, strict=True)) < 1e-12


def weighted_buckets(buckets, count):
    """Some sum of the buckets; where every token has one there is no rest, and -inf has no gradient."""
    buckets = buckets[:, : min(count + 1, VOCABULARY)]
    return (buckets * torch.linspace(-1.0, 1.0, buckets.shape[1], dtype=torch.float64)).sum()


def shared_buckets(count):
    hidden, weight, targets, _ = inputs()
    rows, shard = own_rows(weight)
    found = bucket_logprobs(hidden, rows, targets, 0.8, some_tokens(count), None, shard)
    weighted_buckets(found[2], count).backward()
    best = likeliest(hidden, rows, 0.8, 4, VOCABULARY - 1, None, shard)
    return *(x.detach() for x in found), hidden.grad, whole_rows(rows.grad), *best


@pytest.mark.parametrize("count", [1, 4, VOCABULARY])
def test_buckets_of_two_processes_are_those_of_one(pool, count):
    hidden, weight, targets, _ = inputs()
    of_one = bucket_logprobs(hidden, weight, targets, 0.8, some_tokens(count))
    weighted_buckets(of_one[2], count).backward()
    best = likeliest(hidden, weight, 0.8, 4, VOCABULARY - 1)
    wanted = [*(x.detach() for x in of_one), hidden.grad, weight.grad, *best]
    for found in pool.run(shared_buckets, [count] * 2):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def narrow_logprobs():
    hidden, weight, targets, _ = inputs()
    rows, shard = own_rows(weight)
    hidden, rows = hidden.detach().bfloat16().requires_grad_(), rows.detach().bfloat16().requires_grad_()
    logprobs, _ = token_logprobs(hidden, rows, targets, 1.0, None, shard)
    logprobs.sum().backward()
    return logprobs.detach(), hidden.grad.float(), whole_rows(rows.grad).float()


def test_bfloat16_rows_of_two_processes_are_as_close_as_those_of_one(pool):
    """Results are float32, and no further from the truth than those of one process."""
    hidden, weight, targets, _ = inputs()
    truth = token_logprobs(hidden, weight, targets, 1.0)[0]
    true = [truth.detach(), *torch.autograd.grad(truth.sum(), (hidden, weight))]
    narrow = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    alone = token_logprobs(*narrow, targets, 1.0)[0]  # type: ignore[call-arg]
    one = [alone.detach(), *(grad.float() for grad in torch.autograd.grad(alone.sum(), narrow))]
    for found in pool.run(narrow_logprobs):
        assert found[0].dtype == torch.float32
        for mine, whole, wanted in zip(found, one, true, strict=True):
            assert distance(mine, wanted) < 1.5 * distance(whole, wanted) + 1e-4
