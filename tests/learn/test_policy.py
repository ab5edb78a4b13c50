import copy

import numpy as np
import pytest
import torch

from making import VOCABULARY, distance, gradients, make_model, make_turns
from turnwise.learn.attention import NAME
from turnwise.learn.policy import DTYPES, Policy, check_model, load_model, load_tokenizer, pick_device
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
    outputs = [policy.logprobs(plan) for plan in plans]
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
        cut, _ = Policy(model, dtype=torch.float64).logprobs(other)
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
    once, _ = policy.logprobs(single)
    once.sum().backward()
    gradient = gradients(model)
    model.zero_grad()
    both, _ = policy.logprobs(twice)
    both.sum().backward()
    assert both.tolist() == once.tolist() * 2
    for name, doubled in gradients(model).items():
        assert distance(doubled, 2 * gradient[name]) < 1e-13


def test_bfloat16_computes_near_float32_with_float32_weights_and_gradients():
    model, turns = make_model(), some_turns()
    [plan] = pack(turns, 1000)
    wide, _ = Policy(model).logprobs(plan)
    wide.sum().backward()
    gradient = gradients(model)
    model.zero_grad()
    used = []
    policy = Policy(model, dtype=torch.bfloat16)
    watch = model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, given, out: used.append(out.dtype))
    narrow, entropies = policy.logprobs(plan)
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
        _, cold = Policy(model, dtype=torch.float64, temperature=0.1).logprobs(plan)
        _, hot = Policy(model, dtype=torch.float64, temperature=1e6).logprobs(plan)
    assert hot.tolist() == pytest.approx([np.log(VOCABULARY)] * len(hot), abs=1e-6)
    assert (cold < hot).all()


# ---------------------------------------------------------------- refusals


def refusal(make):
    with pytest.raises(ValueError, match=r"^this model") as caught:
        Policy(make())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sliding_layers_are_refused():
    message = refusal(lambda: make_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1))
    assert message == "this model has full_attention, sliding_attention layers; only full attention is supported"


@pytest.mark.parametrize("kind", KINDS)
def test_attention_dropout_is_refused(kind):
    message = refusal(lambda: make_model(kind, attention_dropout=0.1))
    assert message == "this model has dropout; set every dropout in its config.json to 0"


SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@pytest.mark.parametrize(("name", "value"), [*zip(SCALES, (30.0, 0.0625, 8.0), strict=True)])
def test_scaled_logits_are_refused(name, value):
    model = make_model()
    setattr(model.config, name, value)
    with pytest.raises(ValueError, match=rf"scales its logits \({name}\)"):
        check_model(model)


@pytest.mark.parametrize(("name", "value"), [*zip(SCALES, (None, 1.0, 1), strict=True)])
def test_neutral_scales_are_fine(name, value):
    model = make_model()
    setattr(model.config, name, value)
    check_model(model)


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def mistral_with_a_window():
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))


def gemma2_with_capped_attention():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    full = {"layer_types": ["full_attention"] * 2, "final_logit_softcapping": None}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **full, head_dim=8, attn_logit_softcapping=0.5))


def phi_with_a_bias_in_its_head():
    from transformers import PhiConfig, PhiForCausalLM

    return PhiForCausalLM(PhiConfig(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0))


def gpt2_with_dropout():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0))


def llama_with_rope_that_depends_on_the_longest_row():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return make_model("llama", max_position_embeddings=8, rope_parameters=rope)


@pytest.mark.parametrize(
    "make",
    [
        mistral_with_a_window,
        gemma2_with_capped_attention,
        phi_with_a_bias_in_its_head,
        gpt2_with_dropout,
        llama_with_rope_that_depends_on_the_longest_row,
    ],
)
def test_what_packed_passes_would_get_wrong_is_refused(make):
    refusal(make)


# ---------------------------------------------------------------- loading


def test_a_policy_computes_in_training_mode_with_its_own_attention():
    policy = Policy(make_model().eval())
    assert policy.model.training
    assert policy.model.config._attn_implementation == NAME
    assert policy.device == "cpu"


def test_a_missing_model_folder_is_one_line_before_anything_is_loaded(tmp_path):
    from turnwise.build import check
    from turnwise.config import parse_recipe

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
    assert load_tokenizer(str(tmp_path)).eos_token == "<|im_end|>"


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto") == "mps"
    assert pick_device("cpu") == "cpu"
    with pytest.raises(ValueError, match=r'"cuda" is not available here; set model\.device = "auto"'):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == "cuda"
