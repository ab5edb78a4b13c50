"""Attention as a GPU computes it, against that of a CPU and against padded rows, in float64 and with gradients."""

import itertools
import runpy
import weakref

import pytest
import torch

from learn.test_blocks import errors, states_of, through_a_window, with_a_sink_key
from learn.test_flex import random_tree
from learn.test_policy import branching_turns, gradient_of
from support.gpu import attention_of_a_gpu, backward_on_a_cpu, flex_by_definition
from support.making import distance, make_model, make_turn, make_turns
from support.paths import DOCS
from turnwise.learn import varlen
from turnwise.learn.attention import PackedAttention, attention_of
from turnwise.learn.blocks import BlockAttention, Relay
from turnwise.learn.flex import FlexAttention
from turnwise.learn.policy import Policy
from turnwise.learn.varlen import VarlenAttention
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.tree import tree

EXACT = 1e-12


def with_gradients(attend, states, pull, **more):
    """(output, gradients of all states and of sinks)."""
    given = [*states, *(x for x in more.values() if isinstance(x, torch.Tensor))]
    out = attend(0, *states, None, **more)
    return out.detach(), *torch.autograd.grad(out, given, pull)


@pytest.mark.parametrize("heads", [(4, 4), pytest.param((4, 2), marks=pytest.mark.slow)])
def test_trees_and_their_gradients_are_those_of_blocks(heads):
    """By torch's own kernel, uncompiled; the log-sum-exp has a gradient too, through which those of sinks go."""
    plan = random_tree(3)
    states, pull = states_of(plan, heads, 16)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    with backward_on_a_cpu():
        found = with_gradients(FlexAttention(plan.exit, "cpu"), states, pull, sinks=sinks)
    assert max(errors(found, with_a_sink_key(plan, states, sinks, pull))) < EXACT
    assert (
        max(errors(found, with_gradients(BlockAttention(plan.stretches[0].blocks), states, pull, sinks=sinks))) < EXACT
    )


@pytest.mark.slow
@pytest.mark.parametrize("window", [40, 128])
def test_gradients_of_windows(window):
    plan = random_tree(5, prefix=256)
    states, pull = states_of(plan, (4, 2), 16)
    with backward_on_a_cpu():
        found = with_gradients(FlexAttention(plan.exit, "cpu", plan.depth), states, pull, window=window)
    assert max(errors(found, through_a_window(plan, states, pull, window))) < EXACT


@pytest.mark.slow
def test_values_of_another_width_have_their_gradients():
    plan = random_tree(3)
    (query, key, _), _ = states_of(plan, (4, 2), 24)
    (_, _, value), pull = states_of(plan, (4, 2), 16, seed=1)
    with backward_on_a_cpu():
        found = with_gradients(FlexAttention(plan.exit, "cpu"), (query, key, value), pull)
    padded = torch.nn.functional.pad(value, (0, 8))
    out = BlockAttention(plan.stretches[0].blocks)(0, query, key, padded, None)[..., :16]
    wanted = out.detach(), *torch.autograd.grad(out, (query, key, value), pull)
    assert max(errors(found, wanted)) < EXACT


# ---------------------------------------------------------------- stretches


def by_stretches(plan, states, sinks, pull, edges, window=None, kernel=None):
    """Output and gradients by one attention per stretch: for keys and values first, then from last to first."""
    relay = Relay(plan.num_tokens)
    stretches = list(itertools.pairwise(edges))
    attends = [FlexAttention(plan.exit, "cpu", plan.depth, *edge, relay) for edge in stretches]
    for attend in attends:
        attend.kernel = kernel or attend.kernel
    with torch.no_grad():
        outs = [
            attend(0, *(x[:, :, start:end] for x in states), None, sinks=sinks, window=window)  # type: ignore[call-arg, misc]
            for attend, (start, end) in zip(attends, stretches, strict=True)
        ]
    gradients = [torch.zeros_like(x) for x in (*states, sinks)]
    for attend, (start, end) in reversed(list(zip(attends, stretches, strict=True))):
        own = [x[:, :, start:end].detach().requires_grad_() for x in states]
        out = attend(0, *own, None, sinks=sinks, window=window)
        *parts, of_sinks = torch.autograd.grad(out, [*own, sinks], pull[:, start:end])
        for total, part in zip(gradients[:3], parts, strict=True):
            total[:, :, start:end] = part
        gradients[3] += of_sinks
    return torch.cat(outs, 1), *gradients


@pytest.mark.parametrize("kernel", [flex_by_definition, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [None, 100])
def test_stretches_with_handed_keys_are_the_whole(window, kernel):
    plan = random_tree(3, prefix=150)
    states, pull = states_of(plan, (4, 2), 16)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    edges = [0, 128, 131, 260, plan.num_tokens]
    with backward_on_a_cpu():
        found = by_stretches(plan, states, sinks, pull, edges, window, kernel)
    whole = BlockAttention(plan.stretches[0].blocks, depth=plan.depth)
    wanted = with_gradients(whole, states, pull, sinks=sinks, **({} if window is None else {"window": window}))
    assert max(errors(found, wanted)) < EXACT


def test_a_differentiated_stretch_does_not_keep_the_relay_alive():
    plan = tree([make_turn([1, 2, 3, 4], [5, 6])])
    states, _ = states_of(plan)
    relay = Relay(plan.num_tokens)
    gone = weakref.ref(relay)
    attend = FlexAttention(plan.exit, "cpu", plan.depth, 0, plan.num_tokens, relay)
    attend.kernel = flex_by_definition
    out = attend(0, *states, None)  # type: ignore[call-arg]
    out.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="differentiated once"):
        out.sum().backward()
    del relay, attend
    assert gone() is None
    assert out.grad_fn is not None


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_policy_in_several_passes_has_the_gradient_of_one_pass(checkpointing):
    """And that of a CPU. Keys and values of all layers are handed on, and their gradients back."""
    model, made = make_model(dtype="float64"), []
    how = {"dtype": torch.float64, "checkpointing": checkpointing}
    assert sum(len(plan.stretches) for plan in cut(branching_turns(), 24)) == 4
    with attention_of_a_gpu(made):
        found, whole = (gradient_of(Policy(model, **how), size) for size in (24, 1000))
    relayed = [attend for attend in made if isinstance(attend, FlexAttention) and attend.relay is not None]
    assert sum(attend.start > 0 for attend in relayed) > 2
    wanted = gradient_of(Policy(model, dtype=torch.float64), 24)
    for name, grad in wanted.items():
        assert distance(found[name], grad) < 1e-11
        assert distance(whole[name], grad) < 1e-11


def test_a_model_with_sinks_and_windows_in_several_passes():
    """gpt-oss, whose layers have both."""
    page = runpy.run_path(str(DOCS / "make_models.py"))
    model = page["small_model"]("gpt_oss", sliding_window=5).double()
    model.set_experts_implementation("eager")
    with page["Wide"]():
        policy = Policy(model, dtype=torch.float64)
        wanted = gradient_of(policy, 1000)
        with attention_of_a_gpu():
            found = gradient_of(policy, 24)
    assert {name for name in wanted if "sinks" in name}
    assert max(distance(found[name], wanted[name]) for name in wanted) < 1e-9


# ---------------------------------------------------------------- chains


@pytest.fixture
def any_dtype(monkeypatch):
    """The kernel that is played takes float64."""
    monkeypatch.setattr(varlen, "suits", lambda query, value: query.shape[-1] == value.shape[-1])


def test_packed_plans_are_one_call_of_the_kernel_for_chains(any_dtype):
    turns = make_turns([(3, 2), (9, 4), (5, 3), (7, 1)], growing=False)
    [plan] = pack(turns, 100)
    model, made = make_model(dtype="float64"), []
    with attention_of_a_gpu(made):
        policy = Policy(model, dtype=torch.float64, layout=pack)
        [(_, logprobs, _)] = policy.passes(plan)
        logprobs.sum().backward()
    [attend] = made
    assert isinstance(attend, VarlenAttention)
    assert attend.edges.tolist() == [0, 5, 13, 21, 34]
    assert attend.longest == 13
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    [(_, logprobs, _)] = Policy(model, dtype=torch.float64, layout=pack).passes(plan)
    logprobs.sum().backward()
    assert max(distance(found[name], parameter.grad) for name, parameter in model.named_parameters()) < EXACT


@pytest.mark.parametrize("window", [1, 4, 12, 13, 50])
def test_chains_through_a_window(any_dtype, window):
    [plan] = pack(make_turns([(3, 2), (9, 4), (9, 4)], growing=False), 100)
    states, pull = states_of(plan, (4, 2), 8)
    with attention_of_a_gpu():
        attend = attention_of(plan, plan.stretches[0], "cuda")
    found = with_gradients(attend, states, pull, window=window)
    assert max(errors(found, through_a_window(plan, states, pull, window))) < EXACT


def test_what_the_kernel_for_chains_does_not_take_is_left_to_the_other():
    [plan] = pack(make_turns([(3, 2), (9, 4)], growing=False), 100)
    asked = []

    def other():
        return lambda layer, query, key, value, *_, **more: asked.append((query.dtype, more["sinks"])) or value

    attend = VarlenAttention(plan.stretches[0].blocks, "cpu", other)
    attend.kernel = lambda query, *_, **how: asked.append("kernel") or query
    narrow = [torch.zeros(1, 4, plan.num_tokens, 16, dtype=torch.bfloat16) for _ in range(3)]
    attend(0, *narrow, None)  # type: ignore[call-arg]
    assert asked.pop() == "kernel"  # type: ignore[comparison-overlap]
    attend(0, *narrow, None, sinks=torch.zeros(4))  # type: ignore[call-arg, misc]
    assert asked.pop()[1] is not None
    attend(0, *(x.float() for x in narrow), None)  # type: ignore[call-arg]
    assert asked.pop() == (torch.float32, None)
    for query, value in ((24, 16), (12, 12), (512, 512)):
        widths = [torch.zeros(1, 4, plan.num_tokens, width, dtype=torch.bfloat16) for width in (query, query, value)]
        attend(0, *widths, None)  # type: ignore[call-arg]
        assert asked.pop() != "kernel"  # type: ignore[comparison-overlap]


# ---------------------------------------------------------------- which attention a plan gets


def test_a_gpu_computes_trees_and_stretches_by_flex_and_chains_by_varlen(monkeypatch):
    plan = random_tree(3)
    [chains] = pack(make_turns([(3, 2), (4, 3)], growing=False), 100)
    [long] = cut(make_turns([(30, 5), (4, 3)]), 12)
    made = []
    with attention_of_a_gpu(made):
        attention_of(plan, plan.stretches[0], "cuda")
        attention_of(chains, chains.stretches[0], "cuda")
        for stretch in long.stretches:
            attention_of(long, stretch, "cuda", Relay(long.num_tokens))
    assert [type(attend) for attend in made] == [FlexAttention, VarlenAttention, *[FlexAttention] * 4]
    assert [(attend.start, attend.end) for attend in made[2:]] == [(s.start, s.end) for s in long.stretches]
    monkeypatch.setattr("turnwise.learn.attention.has_varlen", lambda: False)  # as on a GPU before Ampere
    assert isinstance(attention_of(chains, chains.stretches[0], "cuda"), PackedAttention)


def test_mps_computes_what_shares_nothing_in_one_pass():
    plan = random_tree(3)
    [chains] = pack(make_turns([(3, 2), (4, 3)], growing=False), 100)
    assert isinstance(attention_of(chains, chains.stretches[0], "mps"), PackedAttention)
    with pytest.raises(ValueError, match=r'^shared prefixes are not computed on mps; set layout = "packed"$'):
        attention_of(plan, plan.stretches[0], "mps")
    [long] = cut(make_turns([(30, 5), (4, 3)]), 12)
    with pytest.raises(
        ValueError, match=r"^a turn of 42 tokens does not fit in one pass.* raise max_tokens_per_microbatch to 42$"
    ):
        attention_of(long, long.stretches[0], "mps", Relay(long.num_tokens))
