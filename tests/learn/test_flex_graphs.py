"""How often flex attention is compiled: once for plans of any size, forward and backward. That needs no GPU."""

from random import Random

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from learn.test_blocks import errors
from learn.test_flex import random_tree
from support.gpu import backward_on_a_cpu
from turnwise.learn.blocks import BlockAttention, Relay
from turnwise.learn.flex import FlexAttention, for_any_size


@pytest.fixture
def kernel():
    """The kernel as a GPU's is compiled, but for a backend that runs it by torch's operations."""
    torch._dynamo.reset()
    counters.clear()
    with backward_on_a_cpu():
        yield for_any_size(torch.compile(flex_attention, dynamic=True, backend="aot_eager"))
    torch._dynamo.reset()


def num_graphs():
    return counters["stats"]["unique_graphs"]


def states_for(queries, keys, widths=(16, 16), heads=(4, 2)):
    random = torch.Generator().manual_seed(queries)
    shapes = [(heads[0], queries, widths[0]), (heads[1], keys, widths[0]), (heads[1], keys, widths[1])]
    # Laid out as projections are: a token's heads side by side.
    made = [torch.randn(1, size, count, width, generator=random) for count, size, width in shapes]
    return [states.transpose(1, 2).requires_grad_() for states in made]


def differentiated(attend, states, **more):
    out = attend(0, *states, 0.3, **more)
    return out.detach(), *torch.autograd.grad(out.square().sum(), states)


def sizes_seen(kernel, plans, **more):
    """The numbers of tokens of plans that were computed and differentiated, each once checked."""
    sizes = set()
    for number, plan in enumerate(plans):
        attend = FlexAttention(plan.exit, "cpu", plan.depth)
        attend.kernel = kernel
        states = states_for(plan.num_tokens, plan.num_tokens)
        found = differentiated(attend, states, **more)
        if number % 20 == 0:
            blocks = BlockAttention(plan.stretches[0].blocks, depth=plan.depth)
            assert max(errors(found, differentiated(blocks, states, **more))) < 1e-5
        sizes.add(plan.num_tokens)
    return sizes


def plans_of_many_sizes(count, seed=0):
    random = Random(seed)
    for _ in range(count):
        yield random_tree(
            random.randrange(1 << 20), random.randint(1, 8), random.choice([5, 40, 120]), random.choice([0, 60, 300])
        )


def test_a_few_plans_share_a_graph(kernel):
    """Also those of a single tile."""
    plans = [random_tree(3, 8, 90), random_tree(5, 2, 20), random_tree(5, 8, 90), random_tree(7, 3, 60)]
    sizes = sizes_seen(kernel, plans)
    assert min(sizes) < 128 < max(sizes)
    assert len(sizes) == len(plans)
    assert num_graphs() == 1


@pytest.mark.slow
def test_200_plans_share_a_graph(kernel):
    assert len(sizes_seen(kernel, plans_of_many_sizes(300))) >= 200
    assert num_graphs() == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_sinks_and_windows_have_a_graph_each(kernel):
    sizes_seen(kernel, plans_of_many_sizes(10))
    assert num_graphs() == 1
    sizes_seen(kernel, plans_of_many_sizes(10), sinks=torch.zeros(4))
    assert num_graphs() == 2
    sizes_seen(kernel, (plan for plan in plans_of_many_sizes(30) if plan.depth.max() >= 30), window=30)
    assert num_graphs() == 3


@pytest.mark.slow
def test_stretches_have_the_same_graph(kernel):
    """Whose keys are more than their queries, of any number, from any start."""
    for plan in plans_of_many_sizes(30, seed=1):
        relay, middle = Relay(plan.num_tokens), plan.num_tokens // 3 + 2
        for start, end in ((0, middle), (middle, plan.num_tokens)):
            attend = FlexAttention(plan.exit, "cpu", plan.depth, start, end, relay)
            attend.kernel = kernel
            attend(0, *states_for(end - start, end - start), 0.3).square().sum().backward()  # type: ignore[call-arg]
    assert num_graphs() == 1
