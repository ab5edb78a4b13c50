import copy
from typing import Any

import numpy as np
import pytest
import torch

from support.making import VOCABULARY, distance, gradients, logprobs_of, make_model, make_turns
from turnwise.learn.attention import NAME
from turnwise.learn.policy import DTYPES, Policy, load_model, load_tokenizer, pick_device
from turnwise.learn.tiny import build_tokenizer
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.plan import Plan

KINDS = ("qwen3", "qwen2", "llama")


def some_turns():
    """A growing attempt, a windowed one, and one turn without an action."""
    return [
        *make_turns([(5, 3), (2, 1), (4, 4)], seed=1),
        *make_turns([(7, 2), (3, 5), (1, 1)], growing=False, seed=2),
        *make_turns([(3, 0)], seed=3),
    ]


def padded(model, turns, temperature):
    """(logprobs, entropies) of every action token, turn after turn, from one padded row per turn and whole logits."""
    width = max(len(turn.prompt) + len(turn.action) for turn in turns)
    tokens = torch.zeros(len(turns), width, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, turn in enumerate(turns):
        size = len(turn.prompt) + len(turn.action)
        tokens[row, :size] = torch.from_numpy(np.concatenate([turn.prompt, turn.action]).astype(np.int64))
        mask[row, :size] = 1
    table = (model(input_ids=tokens, attention_mask=mask, use_cache=False).logits / temperature).log_softmax(-1)
    logprobs, entropies = [], []
    for row, turn in enumerate(turns):
        part = table[row, len(turn.prompt) - 1 : len(turn.prompt) + len(turn.action) - 1]
        logprobs.append(part.gather(1, torch.from_numpy(turn.action.astype(np.int64))[:, None])[:, 0])
        entropies.append(-(part.exp() * part).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def in_turn_order(plans, outputs, num_turns):
    """The outputs of plans as one tensor, turn after turn."""
    parts = [torch.zeros(0)] * num_turns
    for plan, output in zip(plans, outputs, strict=True):
        for turn, part in zip(plan.turns, output.tensor_split(plan.offsets[1:-1].tolist()), strict=True):
            parts[turn] = part
    return torch.cat([part for part in parts if len(part)])


def with_gradient(model, logprobs, entropies):
    """The outputs, and the gradient of an arbitrary weighted sum of them by every parameter."""
    pull = torch.Generator().manual_seed(0)
    factors = torch.randn(2, len(logprobs), generator=pull, dtype=torch.float64).to(logprobs.dtype)
    model.zero_grad()
    (factors[0] @ logprobs + factors[1] @ entropies).backward()
    return logprobs.detach(), entropies.detach(), gradients(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "attention", "exact", "tolerance"),
    [
        ("float32", "sdpa", False, 1e-5),
        ("float32", "eager", False, 1e-5),
        ("float64", "sdpa", False, 1e-6),
        ("float64", "sdpa", True, 1e-12),
    ],
)
@pytest.mark.parametrize(("tokens_per_pass", "temperature"), [(1000, 1.0), (19, 0.8)])
def test_packed_logprobs_and_gradients_equal_padded_rows(
    kind, dtype, attention, exact, tolerance, tokens_per_pass, temperature
):
    turns = some_turns()
    model = make_model(kind, dtype=dtype if exact else "float32").to(DTYPES[dtype])
    stock = copy.deepcopy(model)
    stock.set_attn_implementation(attention)
    wanted = with_gradient(stock, *padded(stock, turns, temperature))

    policy = Policy(model, dtype=DTYPES[dtype], temperature=temperature)
    plans = pack(turns, tokens_per_pass)
    assert len(plans) == (1 if tokens_per_pass == 1000 else 4)
    outputs = [logprobs_of(policy, plan) for plan in plans]
    logprobs, entropies = (in_turn_order(plans, output, len(turns)) for output in zip(*outputs, strict=True))
    found = with_gradient(model, logprobs, entropies)

    assert distance(found[0], wanted[0]) <= tolerance
    assert distance(found[1], wanted[1]) <= tolerance
    assert found[2].keys() == wanted[2].keys()
    assert {name: d for name in wanted[2] if not (d := distance(found[2][name], wanted[2][name])) <= tolerance} == {}


def test_the_reference_notices_a_different_attention():
    """What the test above rests on: these models do not give the same numbers whatever a token sees."""
    model, turns = make_model(dtype="float64"), some_turns()[:2]
    whole, _ = padded(model, turns, 1.0)
    [plan] = pack(turns, 1000)
    other = Plan(plan.tokens, plan.depth, np.where(plan.depth == 3, -1, plan.parent), *list(vars(plan).values())[3:7])
    with torch.no_grad():
        cut, _ = logprobs_of(Policy(model, dtype=torch.float64), other)
    assert distance(cut, whole.detach()) > 1e-2


def test_shared_action_nodes_are_computed_once_and_count_for_every_turn():
    [turn] = make_turns([(4, 3)])
    [single] = pack([turn], 100)
    twice = Plan(
        single.tokens,
        single.depth,
        single.parent,
        single.exit,
        turns=np.array([0, 1]),
        offsets=np.array([0, 3, 6]),
        action_nodes=np.concatenate([single.action_nodes, single.action_nodes]),
    )
    model = make_model(dtype="float64")
    policy = Policy(model, dtype=torch.float64)
    once, _ = logprobs_of(policy, single)
    once.sum().backward()
    gradient = gradients(model)
    model.zero_grad()
    both, _ = logprobs_of(policy, twice)
    both.sum().backward()
    assert both.tolist() == once.tolist() * 2
    for name, doubled in gradients(model).items():
        assert distance(doubled, 2 * gradient[name]) < 1e-13


def test_bfloat16_computes_near_float32_with_float32_weights_and_gradients():
    model, turns = make_model(), some_turns()
    [plan] = pack(turns, 1000)
    wide, _ = logprobs_of(Policy(model), plan)
    wide.sum().backward()
    gradient = gradients(model)
    model.zero_grad()
    used = []
    policy = Policy(model, dtype=torch.bfloat16)
    watch = model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, given, out: used.append(out.dtype))
    narrow, entropies = logprobs_of(policy, plan)
    watch.remove()
    narrow.sum().backward()
    assert used == [torch.bfloat16]
    assert narrow.dtype == entropies.dtype == torch.float32
    assert distance(narrow.detach(), wide.detach()) < 0.02
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert distance(parameter.grad, gradient[name]) < 0.2


def test_temperature_divides_logits():
    model = make_model(dtype="float64")
    [plan] = pack(some_turns(), 1000)
    with torch.no_grad():
        _, cold = logprobs_of(Policy(model, dtype=torch.float64, temperature=0.1), plan)
        _, hot = logprobs_of(Policy(model, dtype=torch.float64, temperature=1e6), plan)
    assert hot.tolist() == pytest.approx([np.log(VOCABULARY)] * len(hot), abs=1e-6)
    assert (cold < hot).all()


# ---------------------------------------------------------------- checkpointing


def branching_turns():
    """Attempts that begin alike and part, and one alone."""
    return [
        *make_turns([(30, 6), (8, 6), (9, 7)], seed=1),
        *make_turns([(30, 6), (8, 5)], seed=1),
        *make_turns([(12, 5)], seed=4),
    ]


def gradient_of(policy, tokens_per_pass):
    """By name, of logprobs and entropies of all turns, pass by pass."""
    policy.model.zero_grad()
    for plan in cut(branching_turns(), tokens_per_pass):
        for _, logprobs, entropies in policy.passes(plan):
            (logprobs.sum() + 0.1 * entropies.sum()).backward()
    return {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("tokens_per_pass", "num_passes"), [(1000, 1), (24, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointing_changes_no_bit_of_a_gradient(tokens_per_pass, num_passes, dtype):
    assert sum(len(plan.stretches) for plan in cut(branching_turns(), tokens_per_pass)) == num_passes
    kept, recomputed = (
        gradient_of(Policy(make_model(), dtype=DTYPES[dtype], checkpointing=on), tokens_per_pass)
        for on in (False, True)
    )
    assert kept.keys() == recomputed.keys()
    assert [name for name in kept if not torch.equal(kept[name], recomputed[name])] == []


def count_calls(model):
    """A list that grows with every forward pass of a layer's attention."""
    calls = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    return calls


@pytest.mark.parametrize("on", [False, True])
def test_only_a_pass_that_is_differentiated_computes_layers_twice(on):
    model = make_model()
    policy = Policy(model, checkpointing=on)
    calls = count_calls(model)
    [plan] = cut(branching_turns(), 1000)
    with torch.no_grad():
        logprobs_of(policy, plan)
    assert len(calls) == 2
    logprobs, _ = logprobs_of(policy, plan)
    assert len(calls) == 4
    logprobs.sum().backward()
    assert len(calls) == (6 if on else 4)
    assert not model.is_gradient_checkpointing


def test_checkpointing_keeps_less():
    """Bytes that a pass keeps for its gradient."""

    def kept(on):
        sizes = {}
        [plan] = cut(branching_turns(), 1000)
        policy = Policy(make_model(num_hidden_layers=8), checkpointing=on)
        own = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logprobs = logprobs_of(policy, plan)[0]
        del logprobs
        return sum(sizes.values())

    assert kept(True) < kept(False) / 3


def test_an_engine_on_the_same_module_samples_the_same_with_checkpointing():
    import asyncio

    from turnwise.engines.base import Sampling
    from turnwise.engines.slots.model import SlotModel
    from turnwise.engines.slots.request import Request

    def sampled(on):
        model = make_model()
        policy = Policy(model, checkpointing=on)
        gradient_of(policy, 1000)
        slots = SlotModel(model, slots=2, context=40, end_tokens=[], decode=str, dtype=torch.float32)
        loop = asyncio.new_event_loop()
        for place, size in enumerate([5, 8, 3]):
            prompt = np.arange(size, dtype=np.int32)
            slots.submit(Request(prompt, Sampling(9), str(place), place, loop.create_future()))
        done = []
        while slots.busy:
            done += slots.step()
        loop.close()
        return [(completion.tokens.tolist(), completion.logprobs.tolist()) for _, completion in done]

    assert sampled(True) == sampled(False)


def test_a_model_that_cannot_recompute_its_layers_is_refused(monkeypatch):
    model = make_model()
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    Policy(model)
    with pytest.raises(
        ValueError, match=r"^Qwen3ForCausalLM cannot recompute .* set model\.gradient_checkpointing = false$"
    ):
        Policy(model, checkpointing=True)


def recipe_of(**settings):
    from turnwise.recipe.parse import parse_recipe

    return parse_recipe({"env": {"name": "hops"}, **settings}, "test.toml")


def test_a_recipe_says_how_its_policy_computes():
    from turnwise.assemble.checks import check_model
    from turnwise.assemble.learner import policy_of

    plain = policy_of(recipe_of(), make_model())
    assert plain.recomputed == []
    rollout = {"max_prompt_tokens": 60, "max_trajectory_tokens": 64}
    policy = policy_of(recipe_of(model={"gradient_checkpointing": True}, rollout=rollout), make_model())
    assert len(policy.recomputed) >= 2
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    policy_of(recipe_of(), make_model("qwen2", **window))  # which computes windows; the slot engine does not
    tokenizer = build_tokenizer(["go"])
    check_model(recipe_of(rollout=rollout), make_model("qwen2", **window), tokenizer)
    with pytest.raises(ValueError, match=r"set rollout\.max_trajectory_tokens to 64 or less, or engine.name = "):
        check_model(recipe_of(), make_model("qwen2", **window), tokenizer)
    check_model(recipe_of(engine={"name": "vllm"}), make_model("qwen2", **window), tokenizer)


def test_mps_needs_a_pass_as_long_as_a_turn():
    from types import SimpleNamespace

    from turnwise.assemble.learner import policy_of

    elsewhere = SimpleNamespace(device=torch.device("mps"), parameters=lambda: iter([torch.zeros(1)]))
    with pytest.raises(
        ValueError,
        match=r"^max_tokens_per_microbatch = 100 cannot hold a turn .* = 4608, and mps computes no turn in several",
    ):
        policy_of(recipe_of(max_tokens_per_microbatch=100), elsewhere)
    policy_of(recipe_of(max_tokens_per_microbatch=100), make_model())


# ---------------------------------------------------------------- loading


def test_a_policy_computes_in_training_mode_with_its_own_attention():
    model = make_model().eval()
    policy = Policy(model)
    assert model.training
    assert policy.model.config._attn_implementation == NAME
    assert policy.device == "cpu"


def test_a_missing_model_folder_is_one_line_before_anything_is_loaded(tmp_path):
    from turnwise.assemble.checks import check
    from turnwise.recipe.parse import parse_recipe

    recipe = parse_recipe({"env": {"name": "hops"}, "model": {"path": str(tmp_path / "none")}}, "test.toml")
    with pytest.raises(ValueError, match=r'^no model folder at .*none; save one there .* or set model\.path = "tiny"$'):
        check(recipe)


def test_a_folder_loads_in_float32_whatever_it_was_saved_in(tmp_path):
    from turnwise.learn.tiny import build_tokenizer

    model = make_model()
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    build_tokenizer(["a b"]).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.float())
    tokenizer: Any = load_tokenizer(str(tmp_path))
    assert tokenizer.eos_token == "<|im_end|>"


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto") == "cpu"
    assert pick_device("mps") == "mps"
    assert pick_device("cpu") == "cpu"
    with pytest.raises(ValueError, match=r'"cuda" is not available here; set model\.device = "auto"'):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == "cuda"
