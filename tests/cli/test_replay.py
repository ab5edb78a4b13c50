"""train --from and sft --from as a person meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.replaying import copied, of_somebody_else, record_run, same_weights
from support.running import mistake, untimed
from turnwise.assemble.provenance import fingerprint
from turnwise.cli.commands import main
from turnwise.learn.learner import Learner
from turnwise.recipe.parse import load_recipe
from turnwise.runs.archive import read_step, step_path
from turnwise.types import turns_of


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded"))


# ---------------------------------------------------------------- train --from


def test_a_run_is_replayed_by_its_own_recipe_beside_it(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(recorded, tmp_path)
    assert main(["train", "--from", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "nothing is evaluated" in printed
    assert "held-out" not in printed
    assert printed.splitlines()[-1] == "all 3 steps have the recorded numbers, bit for bit"
    out = Path(f"{run}-replay")
    assert same_weights(recorded, out, 3)
    assert not (out / "evaluations").exists()
    assert "exists already" in mistake(capsys, "train", "--from", str(run))
    assert main(["train", "--resume", str(out)]) == 0


def test_another_recipe_or_override_shows_the_first_difference(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "other"
    recipe = str(recorded.parent / "micro.toml")
    model = [f"model={{path='{recorded.parent / 'warm'}', threads=1}}", "sft.updates=0", "filter.name=dynamic_sampling"]
    given = [*model, "optimizer.learning_rate=0.01", "steps=2", f"out={out}"]
    assert main(["train", "--from", str(recorded), recipe, *given]) == 0
    assert "step 1 is the first that differs from the recorded run, in learning_rate" in capsys.readouterr().out
    assert len(untimed(out / "metrics.jsonl")) == 3


def test_mistakes_of_a_replay_are_one_line(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["train", "--from", str(recorded), f"out={tmp_path / 'no'}"]
    assert "would be ignored: a replay has no engine" in mistake(capsys, *start, "evaluation.every=3")
    for override in ("env.0.settings.link_reward=1", "rollout.max_turns=2", "guards.max_logprob_gap=1"):
        assert "paid already" in mistake(capsys, *start, override)
    assert "remove --from" in mistake(capsys, *start, "--resume", str(recorded))
    assert "not the folder of a run" in mistake(capsys, "train", "--from", str(tmp_path / "nowhere"))
    recipe = str(recorded.parent / "micro.toml")
    assert "the one that you give is yours" in mistake(capsys, *start[:3], recipe, start[3], "--trust")
    run = copied(recorded, tmp_path)
    path = step_path(run / "archive", 2)
    path.write_bytes(path.read_bytes()[:100] + b"?" + path.read_bytes()[101:])
    assert "step-000002.parquet is damaged" in mistake(capsys, "train", "--from", str(run), f"out={tmp_path / 'no'}")
    assert not (tmp_path / "no").exists()


def test_a_run_of_somebody_else_runs_nothing_it_names_unless_trusted(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = of_somebody_else(recorded, tmp_path)
    for command in ("train", "sft"):
        printed = mistake(capsys, command, "--from", str(run), f"out={tmp_path / 'no'}", "sft.updates=1")
        assert 'env.name = "support.rescoring:Generous"' in printed
        assert "--trust" in printed
    assert main(["train", "--from", str(run), f"out={tmp_path / 'yes'}", "--trust", "steps=1"]) == 0


# ---------------------------------------------------------------- sft --from


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(actions, token weights, loss) of each update that a learner makes."""
    seen: list[Any] = []
    update = Learner.update

    def watched(self: Learner, plans: Any, credit: Any, weights: Any, *rest: Any) -> Any:
        metrics, logprobs = update(self, plans, credit, weights, *rest)
        actions = [plan.tokens[plan.action_nodes].tolist() for plan in plans]
        seen.append((actions, [weight.tolist() for weight in weights], metrics["loss"]))
        return metrics, logprobs

    monkeypatch.setattr(Learner, "update", watched)
    return seen


def best_of(run: Path, least: float) -> dict[str, list[list[int]]]:
    """By task: the actions of an attempt that was paid most."""
    best: dict[str, tuple[float, list[list[int]]]] = {}
    for path in sorted((run / "archive").iterdir()):
        for record in read_step(path):
            for attempt in record.group.trajectories:
                if attempt.total >= max(least, best.get(record.group.task.id, (least,))[0]):
                    best[record.group.task.id] = attempt.total, [turn.action.tolist() for turn in attempt.turns]
    return {task: actions for task, (_, actions) in best.items()}


def test_the_best_attempts_are_imitated_token_by_token(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], trained_on: list[Any]
) -> None:
    out = tmp_path / "best"
    given = ["sft.updates=8", "sft.batch=64", "sft.optimizer.learning_rate=3e-3", f"out={out}"]
    assert main(["sft", "--from", str(recorded), "--best", *given]) == 0
    printed = capsys.readouterr().out
    wanted = best_of(recorded, 0.25)
    assert f"at {len(wanted)} tasks: at most 1 each, paid 0.25 or more" in printed

    [*records] = read_step(out / "attempts.parquet")
    assert {record.group.task.id for record in records} == set(wanted)
    chosen = {tuple(turn.action.tolist()) for turn in turns_of([record.group for record in records])}
    assert len(trained_on) == 8
    for actions, weights, _ in trained_on:
        tokens = [token for of_plan in actions for token in of_plan]
        assert set(tokens) <= {token for action in chosen for token in action}
        assert sum(map(sum, weights)) == pytest.approx(1.0)
        assert len({round(weight, 9) for of_turn in weights for weight in of_turn}) == 1  # as demonstrations
        assert {len(of_turn) for of_turn in weights} <= {len(action) for action in chosen}
    losses = [loss for _, _, loss in trained_on]
    assert losses[-1] < losses[0]

    made = json.loads((out / "warm_start.json").read_text())["of"]
    assert made["from"]["run"] == str(recorded)
    assert set(made["from"]["digests"]) == {"1", "2", "3"}
    assert made["files"][str(out / "attempts.parquet")]


def test_the_imitation_does_better_at_the_tasks_it_has_seen_done(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, recipe = tmp_path / "best", str(recorded.parent / "micro.toml")
    given = ["sft.updates=30", "sft.batch=16", "sft.optimizer.learning_rate=3e-3", f"out={out}"]
    assert main(["sft", "--from", str(recorded), *given]) == 0
    tasks = [record.group.task for record in read_step(out / "attempts.parquet")]
    lines = [json.dumps({"id": task.id, "dataset": "hops", "data": task.data}) for task in tasks]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    settings = ["env.0.settings.link_reward=0.25", "rollout.success_threshold=0.25", "--attempts", "4"]
    rates = []
    for model in (recorded.parent / "warm", out):
        where = ["--tasks", str(tmp_path / "tasks.jsonl"), "--out", str(tmp_path / f"eval-{model.name}")]
        assert main(["eval", str(model), "--recipe", recipe, *settings, *where]) == 0
        printed = capsys.readouterr().out.splitlines()
        [line] = [line for line in printed if line.startswith("sampled") and " to " in line]
        rates.append(float(line.split()[1]))
    assert rates[1] > rates[0] + 0.2


def test_a_file_of_attempts_is_a_warm_start_that_the_cache_knows_by_its_content(
    recorded: Path, tmp_path: Path, trained_on: list[Any]
) -> None:
    out = tmp_path / "best"
    assert main(["sft", "--from", str(recorded), "sft.updates=1", f"out={out}"]) == 0
    start = f"model={{path='{recorded.parent / 'warm'}', threads=1}}"
    sft = f"sft={{updates=2, batch=4, data='{out / 'attempts.parquet'}'}}"
    given = [start, sft, "steps=1", "evaluation.tasks=1", "evaluation.final_tasks=1"]
    trained_on.clear()
    assert main(["train", str(recorded.parent / "micro.toml"), f"out={tmp_path / 'run'}", *given]) == 0
    chosen = {
        token
        for record in read_step(out / "attempts.parquet")
        for turn in turns_of([record.group])
        for token in turn.action
    }
    for actions, _, _ in trained_on[:2]:
        assert {token for of_plan in actions for token in of_plan} <= chosen
    recipe = load_recipe(recorded.parent / "micro.toml", given)
    before = fingerprint(recipe)
    assert fingerprint(recipe) == before
    [*records] = read_step(out / "attempts.parquet")
    from turnwise.runs.archive import write_records

    write_records(out / "attempts.parquet", 1, records[1:])
    assert fingerprint(recipe) != before


def test_mistakes_of_an_imitation_are_one_line(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["sft", "--from", str(recorded), f"out={tmp_path / 'no'}"]
    assert "was paid 99 or more; lower --min-reward" in mistake(capsys, *start, "sft.updates=1", "--min-reward", "99")
    assert "sft.updates is 0" in mistake(capsys, *start)
    assert "has no step 77" in mistake(capsys, *start, "sft.updates=1", "--step", "77")
    recipe = str(recorded.parent / "micro.toml")
    assert "--best x: write a number" in mistake(capsys, *start[:3], recipe, start[3], "--best", "x")
    assert "no recipe at nowhere" in mistake(capsys, *start, "--best", "nowhere")
    assert "choose at least one" in mistake(capsys, *start, "sft.updates=1", "--best", "0")
    assert "--best goes with --from RUN" in mistake(capsys, "sft", recipe, "--best", "2")
    assert "--min-reward goes with --from RUN" in mistake(capsys, "sft", recipe, "--min-reward", "2")
    assert "--trust goes with --from" in mistake(capsys, "sft", recipe, "--trust")
    assert "name a recipe" in mistake(capsys, "sft")
    small = "model={path='tiny', hidden=32, layers=1, threads=1}"
    printed = mistake(capsys, *start, "sft.updates=1", small, "env.0.tasks={count=64, links=[9, 12]}")
    assert "attempts.parquet, task hops-" in printed
    assert not (tmp_path / "no").exists()
