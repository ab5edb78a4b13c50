import re
import runpy

import numpy as np
import pytest
import torch

from support.making import VOCABULARY, make_model, make_turns
from support.paths import DOCS
from turnwise.learn.model_checks import changing_positions, check_layout, check_model, short_turns
from turnwise.learn.policy import Policy
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack

KINDS = ("qwen3", "qwen2", "llama")


@pytest.fixture(scope="module")
def page():
    """The functions of the script that makes docs/reference/models.md: it has small models of every architecture."""
    return runpy.run_path(str(DOCS / "make_models.py"))


def refusal(make, **how):
    with pytest.raises(ValueError, match=r"^this model") as caught:
        Policy(make(), **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- by what a model says of itself


@pytest.mark.parametrize("name", ["mamba", "jamba", "qwen3_next", "lfm2", "minimax", "deepseek_v32"])
def test_layers_without_attention_to_all_tokens_are_refused(page, name):
    message = refusal(lambda: page["small_model"](name))
    assert re.search(
        r"has (linear|conv|indexed)\w* layers, and only full attention is computed in trees and packed turns; "
        r'set layout = "rows", which shares nothing$',
        message,
    )


@pytest.mark.parametrize("name", ["rwkv", "recurrent_gemma"])
def test_states_that_no_layer_type_tells_of_are_refused(page, name):
    message = refusal(lambda: page["small_model"](name))
    assert message.startswith("this model hands a state from token to token, which is not computed exactly in trees")
    assert message.endswith('; set layout = "rows", which shares nothing')


def sliding(window, **changes):
    return make_model("qwen2", use_sliding_window=True, sliding_window=window, max_window_layers=1, **changes)


def mistral(page, window):
    return page["small_model"]("mistral", sliding_window=window)


def deaf(model):
    """The model as one whose layers tell nobody of their windows."""
    for module in model.modules():
        if type(getattr(module, "sliding_window", None)) is int:
            module.sliding_window = None
    return model


def test_windows_are_computed_in_both_layouts(page):
    for make in (lambda: sliding(8), lambda: mistral(page, 8)):
        for layout in (cut, pack):
            assert Policy(make(), layout=layout).reach == []


def test_windows_that_layers_do_not_tell_are_refused_unless_every_turn_fits():
    for longest in ({}, {"longest": 9}):
        assert refusal(lambda: deaf(sliding(8)), **longest) == (
            "this model attends through a window (sliding_window) of 8 tokens, and neither layout computes longer "
            "turns exactly; set rollout.max_trajectory_tokens to 8 or less"
        )
    Policy(deaf(sliding(8)), longest=8)


def test_the_check_of_windows_leaves_them_as_they_were():
    model = sliding(8)
    before = [getattr(module, "sliding_window", "none") for module in model.modules()]
    Policy(model)
    assert [getattr(module, "sliding_window", "none") for module in model.modules()] == before
    assert 8 in before
    assert model.config.sliding_window == 8


def test_a_turn_that_does_not_fit_a_window_is_refused_when_it_comes():
    policy = Policy(deaf(sliding(8)), longest=8)
    [fits] = cut(make_turns([(5, 3), (2, 1)], growing=False), 100)
    [over] = cut(make_turns([(5, 4)]), 100)
    for _ in policy.passes(fits):
        pass
    with pytest.raises(ValueError, match=r"of 8 tokens, and there is a turn of 9; leave it out$"):
        next(policy.passes(over))
    next(Policy(sliding(8)).passes(over))


@pytest.mark.parametrize("tokens_per_pass", [1000, 12])
def test_turns_longer_than_a_window_are_those_of_padded_rows(page, tokens_per_pass):
    """In one pass, and with keys and values handed on from pass to pass."""
    model = page["small_model"]("gpt_oss", sliding_window=5).double()
    model.set_experts_implementation("eager")
    turns = page["some_turns"]()
    with page["Wide"]():
        model.set_attn_implementation("eager")
        wanted = page["padded"](model, turns)
        policy = Policy(model, dtype=torch.float64)
        plans = cut(turns, tokens_per_pass)
        found = {}
        for plan in plans:
            values = torch.empty(len(plan.action_nodes), dtype=torch.float64)
            with torch.no_grad():
                for picked, logprobs, _ in policy.passes(plan):
                    values[torch.from_numpy(picked)] = logprobs
            found |= dict(zip(plan.turns.tolist(), values.tensor_split(plan.offsets[1:-1].tolist()), strict=True))
    assert (max(len(plan.stretches) for plan in plans) > 1) == (tokens_per_pass == 12)
    for turn, logprobs in enumerate(wanted):
        torch.testing.assert_close(found[turn], logprobs.detach(), rtol=1e-10, atol=1e-10)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_positions_that_depend_on_the_longest_row_are_refused_unless_every_turn_is_short(kind):
    size = 16 if kind == "dynamic" else 64
    make = lambda: make_model("llama", max_position_embeddings=size, rope_parameters=ROPES[kind])
    message = refusal(make, longest=17)
    assert message.startswith(f"this model has positions ({kind}) that all change beyond 16 tokens, and neither")
    Policy(make(), longest=16)


def test_ropes_of_several_kinds_of_layers_are_all_looked_at():
    model = make_model()
    model.config.rope_parameters = {"full_attention": ROPES["longrope"], "sliding_attention": {"rope_type": "default"}}
    assert [tokens for tokens, _ in changing_positions(model.config)] == [16]


@pytest.mark.parametrize("kind", KINDS)
def test_attention_dropout_is_refused(kind):
    assert refusal(lambda: make_model(kind, attention_dropout=0.1)) == (
        "this model has dropout or noise (attention_dropout = 0.1); set every such value in its config.json to 0"
    )


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("seed_oss", "residual_dropout"),
        ("gpt2", "resid_pdrop"),
        ("opt", "layerdrop"),
        ("mixtral", "router_jitter_noise"),
    ],
)
def test_other_noise_is_refused(page, name, setting):
    message = refusal(lambda: page["small_model"](name, **{setting: 0.1}))
    assert message.startswith(f"this model has dropout or noise ({setting} = 0.1); ")


def test_dropout_of_a_classifier_is_none_of_ours(page):
    model = page["small_model"]("gpt2", summary_first_dropout=0.1)
    model.config.classifier_dropout = 0.1
    Policy(model)


def test_dropout_that_no_config_tells_of_is_refused():
    model = make_model()
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.2))
    with pytest.raises(ValueError, match=r"\(model\.layers\.1\.mlp\.act_fn\.1 drops 0\.2\)"):
        check_model(model)


def test_a_loss_of_routers_is_refused_and_their_routing_is_not(page):
    make = page["small_model"]
    assert make("qwen3_moe").config.router_aux_loss_coef > 0
    check_model(make("qwen3_moe"))
    message = refusal(lambda: make("qwen3_moe", output_router_logits=True))
    assert message.endswith("set output_router_logits to false in its config.json")
    check_model(make("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.0))


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


def test_capped_attention_is_refused(page):
    full = {"layer_types": ["full_attention"] * 2, "final_logit_softcapping": None}
    assert "attn_logit_softcapping" in refusal(lambda: page["small_model"]("gemma2", **full))


def test_a_bias_of_the_head_is_refused(page):
    assert refusal(lambda: page["small_model"]("phi")) == "this model's output layer has a bias, which is not supported"


# ---------------------------------------------------------------- by what it computes


def test_the_turns_that_are_tried_branch_and_repeat():
    [plan] = cut(short_turns(VOCABULARY), 100)
    [packed] = pack(short_turns(VOCABULARY), 100)
    assert plan.num_tokens < packed.num_tokens
    assert len(plan.stretches[0].blocks.rectangles) >= 3
    assert (plan.depth == 0).sum() == 2


def mixing(reset):
    """A model that nobody has heard of: a token's embedding has something of the token before it in the row, which
    ends at position 0 or not at all."""
    model = make_model("llama")
    body, forward = model.model, model.model.forward

    def mixed(input_ids=None, position_ids=None, inputs_embeds=None, **others):
        states = body.embed_tokens(input_ids)
        places = torch.arange(states.shape[1])[None] if position_ids is None else position_ids
        before = states.roll(1, 1) * ((places > 0) if reset else torch.arange(states.shape[1])[None] > 0)[..., None]
        return forward(inputs_embeds=states + 0.1 * before, position_ids=position_ids, **others)

    body.forward = mixed
    return model


def test_an_architecture_that_only_packing_computes_is_sent_there():
    model = mixing(reset=True)
    check_model(model)
    with pytest.raises(ValueError, match=r'^LlamaFor.* together \(relative.*\); set layout = "packed", with which it'):
        check_layout(model, cut)
    check_layout(model, pack)


@pytest.mark.parametrize("layout", [cut, pack])
def test_an_architecture_that_no_layout_computes_is_refused(layout):
    with pytest.raises(ValueError, match=r"^LlamaFor.* computes something else .*, so it cannot be trained$"):
        check_layout(mixing(reset=False), layout)


@pytest.mark.parametrize("layout", [cut, pack])
def test_a_head_with_more_to_it_is_found(layout):
    """Logits are compared, not hidden states."""
    model = make_model()
    forward = model.forward

    def scaled(**given):
        output = forward(**given)
        output.logits = output.logits * 1.01
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match="computes something else"):
        check_layout(model, layout)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bloom", "BloomForCausalLM lets nobody else compute its attention, so it cannot be trained"),
        ("stablelm", "StableLmForCausalLM does not hand on what its attention needs .*, so it cannot be trained"),
        ("hrm_text", "HrmTextForCausalLM uses a layer more than once, which is not supported"),
        ("llama4_text", "Llama4ForCausalLM does not name the part that computes hidden states, .*"),
        ("doge", r"DogeForCausalLM computes something else .*, so it cannot be trained"),
    ],
)
def test_what_cannot_be_computed_over_a_plan_is_refused_in_a_line(page, name, why):
    with pytest.raises(ValueError, match=f"^{why}$"):
        Policy(page["small_model"](name), longest=page["LONGEST"])


def test_a_check_leaves_no_gradients_behind():
    model = make_model()
    Policy(model)
    assert all(parameter.grad is None for parameter in model.parameters())


# ---------------------------------------------------------------- the page


def rows_of(text, title):
    table = text.split(f"## {title}\n")[1].split("\n## ")[0]
    return [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines() if row.startswith("| ")][1:]


def test_the_page_has_every_architecture_once(page):
    text = (DOCS / "reference" / "models.md").read_text()
    titles = ("Trained", "Trained in rows", "Refused", "Not tried")
    names = [name for title in titles for name in rows_of(text, title)]
    assert sorted(names) == sorted(page["architectures"]())
    assert len(rows_of(text, "Not tried")) < 5


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "mixtral", "gpt2", "smollm3", "gemma3_text", "glm4", "olmo2", "gpt_oss", "deepseek_v3"]
)
def test_what_the_page_calls_trained_is_exact(page, name):
    """Windows, experts, absolute positions, layers without positions, norms elsewhere, sinks, values narrower than
    keys: in float64, against rows."""
    found = page["examine"](name)
    assert found.refused == found.untried == ""
    assert max(found.tree, found.packed) < 1e-12
    assert found.engine < 1e-4
    assert name in rows_of((DOCS / "reference" / "models.md").read_text(), "Trained")


@pytest.mark.parametrize("name", ["mamba", "gemma2", "phi", "nemotron", "falcon", "rwkv"])
def test_what_the_page_calls_refused_is(page, name):
    found = page["examine"](name)
    assert found.refused
    assert page["line"](found) in (DOCS / "reference" / "models.md").read_text().splitlines()


def test_the_page_would_notice_another_computation(page):
    """Tokens at one depth get the next position: the same comparison finds another gradient."""
    model = page["small_model"]("qwen3").double()
    turns = page["some_turns"]()
    policy = Policy(model, dtype=torch.float64)
    [plan] = cut(turns, 1000)
    object.__setattr__(plan, "depth", np.where(plan.depth == 7, 8, plan.depth))
    right, wrong = (page["gradient"](model, page["laid_out"](policy, turns, lay)) for lay in (cut, lambda *_: [plan]))
    assert float((right - wrong).norm() / right.norm()) > 1e-3
