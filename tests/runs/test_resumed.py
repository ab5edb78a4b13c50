"""What may change on a resume: the list, the refusals, and what the folder records."""

import json
from contextlib import suppress
from functools import partial

import pytest

from support.running import micro_recipe, mistake, train_once, untimed
from turnwise.atomic import write_atomically
from turnwise.cli.commands import main
from turnwise.recipe.keys import keys_of
from turnwise.recipe.parse import apply_override, parse_recipe
from turnwise.runs import resumed
from turnwise.runs.folder import RunFolder
from turnwise.runs.resumed import MAY_CHANGE, WHY_NOT, changes, check_changes, record_changes
from turnwise.runs.trust import is_own, recipe_of_run, stamp_where_asked


@pytest.fixture
def run(tmp_path):
    return train_once(tmp_path, "steps=2", "evaluation.every=0", "evaluation.final_tasks=4")


def with_overrides(recipe, *overrides):
    tree = recipe.model_dump(mode="json")
    for override in overrides:
        apply_override(tree, override)
    return parse_recipe(tree, "test")


def test_the_lists_name_keys_and_tables_of_a_recipe():
    keys = {f"{key.table}.{key.name}".lstrip(".") for key in keys_of()}
    known = {".".join(key.split(".")[:depth]) for key in keys for depth in range(1, 5)}
    assert set(MAY_CHANGE) <= known
    assert set(WHY_NOT) <= known
    assert not set(MAY_CHANGE) & set(WHY_NOT)


@pytest.mark.parametrize(
    "override",
    [
        *("steps=9", "trackers=tensorboard", "evaluation.every=1", "evaluation.sampling.temperature=0.5"),
        *("checkpoints.every=1", "archive.steps=3", "schedule.stall_warning_seconds=5", "guards.max_dropped_groups=3"),
        *("engine.max_num_seqs=2", "engine.memory.kv_cache=64", "model.threads=2", "env.0.concurrency.max_open=3"),
        *("cluster.fsdp=2", "rollout.limits.call_seconds=9", "layout=packed", "max_tokens_per_microbatch=4096"),
    ],
)
def test_what_the_state_does_not_depend_on_may_change(tmp_path, override):
    before = micro_recipe(tmp_path)
    after = with_overrides(before, override)
    assert changes(before, after)
    check_changes(before, after, made=4)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("optimizer.learning_rate=1", "were trained with it"),
        ("seed=3", "tasks and samples so far were drawn by it"),
        ("max_lag=2", "groups that wait"),
        ("sampling.temperature=0.5", "recorded logprobs"),
        ("env.0.tasks.count=3", "would not be comparable"),
        ("rollout.group_size=8", "would not be comparable"),
        ("model.dtype=bfloat16", "the checkpoint has the weights"),
        ("engine.memory.keep_cache=true", "recorded logprobs were computed with it"),
        ("schedule.order=finished", "groups that wait"),
        ("out=elsewhere", "move the folder"),
        ("sft.updates=9", "is made already"),
        ("credit=rloo", "were trained with it"),
        ("steps=1", "fewer than the 2 steps"),
    ],
)
def test_what_the_state_depends_on_is_refused_with_the_reason(tmp_path, override, reason):
    before = micro_recipe(tmp_path)
    if override.startswith("schedule."):  # which needs a lag
        before = with_overrides(before, "max_lag=1")
    with pytest.raises(ValueError, match=reason):
        check_changes(before, with_overrides(before, override), made=2)


def test_a_finished_run_goes_on_for_more_steps_and_says_so_in_its_folder(run, capsys):
    folder = RunFolder.open(run)
    first = untimed(folder.metrics)
    assert main(["train", "--resume", str(run), "steps=3", "archive.steps=2"]) == 0
    printed = capsys.readouterr().out
    assert "from step 2 on: steps = 3, which was 2" in printed
    assert "resuming" in printed
    assert "training 3/3" in printed
    lines = untimed(folder.metrics)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[:3] == first
    assert recipe_of_run(folder).steps == 3  # the checksum fits, too
    recorded = [json.loads(line) for line in folder.changes.read_text().splitlines()]
    assert recorded == [{"step": 2, "changes": {"steps": [2, 3], "archive.steps": [1000, 2]}}]
    assert json.loads(folder.summary.read_text())["updates"] == 3
    assert "steps=2 is fewer than the 3 steps" in mistake(capsys, "train", "--resume", str(run), "steps=2")
    assert "trained with it" in mistake(capsys, "train", "--resume", str(run), "optimizer.learning_rate=1")
    assert "remove recipes/x.toml" in mistake(capsys, "train", "--resume", str(run), "recipes/x.toml")
    assert "unknown key stepz" in mistake(capsys, "train", "--resume", str(run), "stepz=2")


@pytest.mark.slow
def test_the_longer_run_is_the_run_that_was_as_long_from_the_start(tmp_path, run):
    """Bit for bit: nothing in a step depends on how many follow, with a constant learning rate."""
    assert main(["train", "--resume", str(run), "steps=3"]) == 0
    (tmp_path / "whole").mkdir()
    whole = train_once(tmp_path / "whole", "steps=3", "evaluation.every=0", "evaluation.final_tasks=4")
    resumed, straight = (untimed(path / "metrics.jsonl")[-1] for path in (run, whole))
    assert resumed == straight


def test_a_schedule_that_ends_at_zero_is_said(tmp_path):
    before = micro_recipe(tmp_path, "optimizer.schedule=linear")
    folder = RunFolder.create(tmp_path / "run", before.model_dump(mode="json"))
    _, said = record_changes(folder, before, with_overrides(before, "steps=9"), 2)
    assert "optimizer.schedule = linear falls to zero at the new last step" in said


def test_a_run_of_ones_own_stays_ones_own(tmp_path):
    before = micro_recipe(tmp_path, "env.0.name=my_module:World")
    tree = before.model_dump(mode="json")
    folder = RunFolder.create(tmp_path / "run", tree, partial(stamp_where_asked, before))
    assert is_own(folder, folder.config.read_bytes())
    assert record_changes(folder, before, with_overrides(before, "steps=9"), 2) == ["steps = 9, which was 4"]
    assert is_own(folder, folder.config.read_bytes())
    assert recipe_of_run(folder).steps == 9
    assert record_changes(folder, before, before, 2) == []


def test_a_kill_while_changes_are_recorded_leaves_a_run_that_can_be_read(tmp_path, monkeypatch):
    before = micro_recipe(tmp_path)
    for survived in range(4):
        folder = RunFolder.create(tmp_path / f"run-{survived}", before.model_dump(mode="json"))
        writes = iter([True] * survived)

        def write(path, data, writes=writes):
            if not next(writes, False):
                raise KeyboardInterrupt
            write_atomically(path, data)

        monkeypatch.setattr(resumed, "write_atomically", write)
        with suppress(KeyboardInterrupt):
            record_changes(folder, before, with_overrides(before, "steps=9"), 2)
        assert recipe_of_run(folder).steps == (9 if survived > 1 else 4)
