"""Whole runs that train adapters."""

from itertools import product

import pytest

from learn.test_merged import KINDS, model_of
from support.acting import byte_tokenizer
from support.running import micro_recipe, resume, train, untimed
from turnwise.cli.commands import main
from turnwise.learn.learner import save_policy
from turnwise.learn.policy import load_model
from turnwise.runs.checkpoint import latest_checkpoint
from turnwise.runs.folder import RunFolder

pytest.importorskip("peft")
FEW = [
    "lora.rank=4",
    "entropy=0.1",  # which moves a policy that earns nothing
    "steps=2",
    "evaluation.final_tasks=4",
    "evaluation.every=0",
    "checkpoints.every=1",
    "sft.updates=1",
]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_trains_adapters_and_its_checkpoint_is_small(tmp_path, lag):
    recipe = micro_recipe(tmp_path, *FEW, "kl.coefficient=0.1", f"max_lag={lag}")
    assert train(recipe) is not None
    folder = RunFolder.open(recipe.out)
    lines = untimed(folder.metrics)
    assert all(line["gap/mean"] < 1e-4 for line in lines[1:] if "gap/mean" in line)
    assert lines[1]["gradient_norm"] > 0
    assert lines[1]["kl"] == pytest.approx(0.0, abs=1e-6)
    checkpoint = latest_checkpoint(folder.checkpoints)
    assert not (checkpoint.path / "model.safetensors").exists()
    assert (checkpoint.path / "adapter_model.safetensors").is_file()
    start, now = load_model(folder.reference), load_model(checkpoint.path)
    assert any((a != b).any() for a, b in zip(start.parameters(), now.parameters(), strict=True))


def test_a_run_with_adapters_resumes_where_it_was(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, halted = micro_recipe(tmp_path / "a", *FEW), micro_recipe(tmp_path / "b", *FEW)
    train(whole)
    train(halted)
    folder = RunFolder.open(halted.out)
    (folder.checkpoints / "latest").write_text("step-000001\n")  # as if it had been killed in the second step
    assert resume(folder.path) is not None
    assert untimed(folder.metrics) == untimed(RunFolder.open(whole.out).metrics)


def test_settings_of_no_adapter_are_refused(tmp_path):
    with pytest.raises(ValueError, match="alpha is ignored without a rank"):
        micro_recipe(tmp_path, "lora.alpha=4")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lag"), list(product(KINDS, (0, 1))))
def test_runs_of_experts_and_of_weights_turned_round_are_resumed_evaluated_and_verified(tmp_path, capsys, kind, lag):
    tokenizer = byte_tokenizer()
    save_policy(model_of(kind, len(tokenizer)), tokenizer, tmp_path / "model")
    model = f"model={{path='{tmp_path / 'model'}', threads=1}}"
    recipe = micro_recipe(tmp_path, model, *FEW, "groups_per_step=2", "sft.updates=0", f"max_lag={lag}")
    assert train(recipe) is not None
    folder = RunFolder.open(recipe.out)
    lines = untimed(folder.metrics)
    assert all(line["gap/mean"] < 1e-4 for line in lines[1:] if "gap/mean" in line)
    (folder.checkpoints / "latest").write_text("step-000001\n")  # as if it had been killed in the second step
    assert resume(folder.path) is not None
    if lag == 0:
        assert untimed(folder.metrics) == lines
    assert main(["eval", str(folder.path), "--tasks", "2"]) == 0
    assert main(["verify", str(folder.path)]) == 0
    assert main(["cost", str(folder.path)]) == 0
    capsys.readouterr()
