"""Models with layers other than attention, in a layout of rows: against transformers' own rows, in float64."""

import runpy

import pytest
import torch

from learn.test_policy import recipe_of
from support.making import make_model, make_turn
from support.paths import DOCS
from turnwise.assemble.checks import check_model
from turnwise.assemble.learner import told_of_layout
from turnwise.learn import model_checks
from turnwise.learn.policy import Policy
from turnwise.learn.tiny import build_tokenizer
from turnwise.plan.rows import in_rows


@pytest.fixture(scope="module")
def page():
    return runpy.run_path(str(DOCS / "make_models.py"))


def hybrid(page, name):
    """A layer of either kind: linear attention, which hands a state on, and full attention."""
    model = page["small_model"](name)
    assert model.config.layer_types == ["linear_attention", "full_attention"]
    return model


def all_logprobs(policy, turns, tokens_per_pass):
    """Of every turn, in order; graphs of all passes are kept."""
    found = [None] * len(turns)
    for plan in in_rows(turns, tokens_per_pass):
        [(_, logprobs, _)] = policy.passes(plan)
        for turn, part in zip(plan.turns, logprobs.tensor_split(plan.offsets[1:-1].tolist()), strict=True):
            found[turn] = part
    return found


@pytest.mark.parametrize(
    ("name", "tokens_per_pass"),
    [
        ("qwen3_next", 80),
        pytest.param("qwen3_next", 1000, marks=pytest.mark.slow),
        ("qwen3_5_text", 80),
        pytest.param("qwen3_5_moe_text", 80, marks=pytest.mark.slow),
        pytest.param("kimi_linear", 80, marks=pytest.mark.slow),
    ],
)
def test_gradients_in_rows_are_those_of_rows_alone_and_of_padded_rows(page, name, tokens_per_pass):
    """Both are transformers' own."""
    model = hybrid(page, name).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    growing = make_turn(range(3, 12), range(20, 25)), make_turn([*range(3, 12), *range(20, 25), 30, 31], range(40, 46))
    turns = [*page["some_turns"]()[4:], *growing]
    with page["Wide"]():
        model.set_attn_implementation("eager")
        padded = page["gradient"](model, page["padded"](model, turns))
        alone = page["gradient"](model, [page["padded"](model, [turn])[0] for turn in turns])
        policy = Policy(model, dtype=torch.float64, layout=in_rows)
        found = page["gradient"](model, all_logprobs(policy, turns, tokens_per_pass))
    assert sum(len(plan.turns) for plan in in_rows(turns, tokens_per_pass)) == len(turns)
    assert float((alone - padded).norm() / padded.norm()) < 1e-12
    assert float((found - alone).norm() / alone.norm()) < 1e-12


def test_recomputed_layers_have_the_same_gradient(page):
    turns = page["some_turns"]()
    found = []
    for checkpointing in (False, True):
        model = hybrid(page, "qwen3_next")
        policy = Policy(model, layout=in_rows, checkpointing=checkpointing)
        found.append(page["gradient"](model, [x.double() for x in all_logprobs(policy, turns, 60)]))
    assert torch.equal(*found)


def test_a_model_with_attention_only_may_be_computed_in_rows(page):
    """And an engine that shares the module finds its own attention again."""
    model, turns = make_model(dtype="float64"), page["some_turns"]()
    found = page["gradient"](model, all_logprobs(Policy(model, dtype=torch.float64, layout=in_rows), turns, 60))
    tree = Policy(model, dtype=torch.float64)
    wanted = page["gradient"](model, page["laid_out"](tree, turns, page["cut"]))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-12


def test_a_model_that_padding_changes_is_refused(page, monkeypatch):
    """Here one whose hidden states are moved by the width of the batch."""
    honest = model_checks.row_states  # type: ignore[attr-defined]
    monkeypatch.setattr(model_checks, "row_states", lambda model, plan: honest(model, plan) * 1.01)
    with pytest.raises(ValueError, match=r"^Qwen3NextForCausalLM computes something else for rows that are padded"):
        Policy(hybrid(page, "qwen3_next"), layout=in_rows)


def test_the_slot_engine_cannot_sample_from_such_a_model(page):
    model, tokenizer = hybrid(page, "qwen3_next"), build_tokenizer(["go"])
    with pytest.raises(ValueError, match=r'layers.* not by the slot engine either; set engine.name = "vllm"$'):
        check_model(recipe_of(layout="rows"), model, tokenizer)
    check_model(recipe_of(layout="rows", engine={"name": "vllm"}), model, tokenizer)


def test_a_run_says_that_nothing_is_shared_and_why(page):
    [line] = told_of_layout(recipe_of(layout="rows", engine={"name": "vllm"}), hybrid(page, "qwen3_next"))
    assert line == (
        "layout: rows, padded; no prefix is shared between attempts or with a changed history, because this model has "
        "linear_attention layers, and only full attention is computed in trees and packed turns"
    )
    [line] = told_of_layout(recipe_of(layout="rows"), make_model())
    assert line.endswith('as layout = "rows" asks; "tree" would share them')
    assert told_of_layout(recipe_of(), make_model()) == []


def test_a_row_must_fit_in_a_pass():
    with pytest.raises(ValueError, match=r"max_tokens_per_microbatch = 100 cannot hold a turn of"):
        recipe_of(layout="rows", max_tokens_per_microbatch=100)


@pytest.mark.parametrize("other", [{"cluster": {"cp": 2}}, {"model": {"router_replay": True}}])
def test_what_rows_do_not_compute_is_refused(other):
    with pytest.raises(ValueError, match=r'is not computed with layout = "rows"; remove it, or set layout = "tree"$'):
        recipe_of(layout="rows", **other)


def test_a_model_whose_own_code_fails_is_refused_in_one_line():
    model = make_model()

    def forward(*inputs, **named):
        raise KeyError(1)

    model.model.layers[1].forward = forward
    with pytest.raises(
        ValueError, match=r"^Qwen3ForCausalLM fails in transformers' own code .*\(KeyError: 1\); check its"
    ):
        Policy(model, layout=in_rows)
