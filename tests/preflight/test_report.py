"""The report, and what it says where a rank does not fit."""

from dataclasses import replace
from pathlib import Path

import pytest

from turnwise.cli.commands import main
from turnwise.plan.cut import cut
from turnwise.preflight.attempt_shape import AttemptShape, full_plan
from turnwise.preflight.brief import brief
from turnwise.preflight.card import CARDS, GB, Card, known_card
from turnwise.preflight.fit import advice, fit
from turnwise.preflight.flight import preflight
from turnwise.preflight.model_config import PUBLISHED, config_at
from turnwise.recipe.parse import load_recipe

BIG = ["model.path=Qwen/Qwen3-0.6B", "model.device=cuda", "model.dtype=bfloat16", "cluster.fsdp=4"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def flown():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return preflight(load_recipe(Path("search"), BIG), layers=1)


def test_the_report_has_every_part(flown):
    text = "\n".join(flown.describe())
    for part in ("masters", "moments", "gradients", "gathered layers", "activations", "keys and values", "peak"):
        assert f"\n  {part} " in text, part
    for card in CARDS:
        assert card.name in text
    assert "as published" in text
    assert "rehearsed, not run" in text
    assert "4 ranks (fsdp 4) on cuda, bfloat16" in text
    assert "seconds of a step, predicted" in text


def test_parts_at_the_peak_are_the_peak(flown):
    assert sum(flown.found.at_peak.values()) == flown.found.peak


@pytest.mark.parametrize(
    ("overrides", "gigabytes", "key"),
    [
        (["model.dtype=float32"], 1, "model.dtype"),
        (["model.gradient_checkpointing=false"], 3, "model.gradient_checkpointing"),
        ([], 4.5, "max_tokens_per_microbatch"),
    ],
)
def test_what_does_not_fit_is_said_with_a_key(flown, overrides, gigabytes, key):
    recipe = load_recipe(Path("search"), [*BIG, "max_tokens_per_microbatch=16384", *overrides])
    found = replace(
        flown.found,
        checkpoints="model.gradient_checkpointing=false" not in overrides,
        num_tokens=16384,
        peak=int(6 * GB),
        at_peak={"masters": int(1 * GB), "moments": int(1 * GB), "activations": int(4 * GB)},
    )
    card = Card("small", gigabytes * GB + 4 * GB, 1.0, 1.0, 1.0)
    result = fit(recipe, found, card)
    assert not result.fits
    assert key in result.advice
    assert fit(recipe, found, CARDS[0]).fits


def test_where_weights_alone_do_not_fit_more_ranks_are_advised(flown):
    recipe = load_recipe(Path("search"), BIG)
    at_peak = {"masters": int(20 * GB), "moments": int(40 * GB), "activations": int(4 * GB)}
    found = replace(flown.found, checkpoints=True, num_tokens=4608, peak=int(64 * GB), at_peak=at_peak)
    assert advice(recipe, found, 36 * GB) == "raise cluster.fsdp to 8"


def test_cards_are_known_by_what_drivers_call_them():
    assert known_card("NVIDIA H100 80GB HBM3", 85_000_000_000).flops == CARDS[0].flops
    assert known_card("NVIDIA A100-SXM4-40GB", 42_300_000_000).name == "NVIDIA A100-SXM4-40GB"
    assert known_card("NVIDIA GeForce RTX 4090", 25_300_000_000).link == 25e9
    assert known_card("NVIDIA T4", 15_000_000_000) is None


def test_published_sizes_have_the_published_number_of_parameters():
    billions = {"Qwen/Qwen3-0.6B": 0.596, "Qwen/Qwen3-4B": 4.022, "Qwen/Qwen3-8B": 8.191, "Qwen/Qwen3-30B-A3B": 30.532}
    from turnwise.preflight.blank_model import blank

    for name, wanted in billions.items():
        config = config_at(name).config
        assert sum(each.numel() for each in blank(config).parameters()) / 1e9 == pytest.approx(wanted, abs=1e-3)
    assert set(billions) <= set(PUBLISHED)


def test_nobody_is_asked_for_published_sizes(monkeypatch, tmp_path):
    def asked(*address):
        raise AssertionError(f"{address} was asked")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.getaddrinfo", asked)
    named = config_at("Qwen/Qwen3-4B")
    assert (named.config.hidden_size, named.origin) == (2560, "as published; it is not in the Hub cache")


def test_a_model_that_nobody_has_published_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"nobody/nothing.*preflight needs its config\.json alone"):
        config_at("nobody/nothing")


@pytest.mark.parametrize(("turns", "longest"), [(1, 64), (4, 768), (8, 240), (50, 60)])
def test_attempts_are_as_long_as_the_recipe_lets_them_be(turns, longest):
    sizes = [f"rollout.max_turns={turns}", f"rollout.max_trajectory_tokens={longest}"]
    recipe = load_recipe(
        Path("search"), [*sizes, f"rollout.max_prompt_tokens={longest - 1}", "rollout.max_action_tokens=64"]
    )
    shape = AttemptShape.of(recipe)
    assert 0.8 * longest <= shape.num_tokens <= longest
    plan, made = full_plan(shape, cut, 2048, 1000)
    assert 0.8 * 2048 < plan.num_tokens <= 2048
    assert len(plan.action_nodes) == sum(len(turn.action) for turn in made)


def test_the_command_says_what_a_small_recipe_needs(capsys):
    assert main(["preflight", "quickstart", "--layers", "1", "max_tokens_per_microbatch=512"]) == 0
    said = capsys.readouterr().out
    assert "learner: one process on cpu, float32" in said
    assert "this machine has" in said


def test_a_run_of_a_tiny_model_is_not_told(capsys):
    assert list(brief(load_recipe(Path("quickstart")))) == []


def test_a_run_of_a_larger_model_is_told_in_a_line():
    lines = list(brief(load_recipe(Path("search"), [*BIG, "max_tokens_per_microbatch=4608"])))
    assert len(lines) == 1
    assert lines[0].startswith("596.05M parameters; 4 ranks, each ")
