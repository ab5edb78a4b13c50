"""Runs beside each other."""

import pytest

from support.reported import CONFIG, recorded_run
from turnwise.inspect.compare.run_comparison import AgainstFirst, RunComparison, contrast_line
from turnwise.inspect.held_out import Contrast
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.folder import RunFolder

LITTLE = {name: [0.0] for name in "abcdefgh"}
MUCH = {**{name: [1.0] for name in "abcdefg"}, "h": [0.0]}


def make(tmp_path, *afters):
    runs = [
        recorded_run(tmp_path / f"run-{place}", after, {**CONFIG, "seed": place}) for place, after in enumerate(afters)
    ]
    return RunComparison.of(runs)


def test_two_runs_task_by_task(tmp_path):
    found = make(tmp_path, LITTLE, MUCH)
    assert found.recipes == {"seed": (0, 1)}
    [one] = found.against_first
    assert (one.kind, one.name, one.overlap) == ("sampled", "run-1", False)
    assert (one.found.paired_tasks, one.found.better, one.found.worse) == (8, 7, 0)
    assert one.found.p_value == pytest.approx(2 / 2**7)
    assert one.found.change == pytest.approx(0.875)
    lines = found.describe()
    assert lines[0].split() == ["recipe", "run-0", "run-1"]
    assert lines[1].split() == ["seed", "0", "1"]
    [before] = [line for line in lines if line.startswith("sampled, before")]
    assert before.count("25.0% (4.6% to 69.9%)") == 2
    assert lines[-1].startswith("sampled: run-1 against run-0: +87.5 points (")
    assert "p = 0.016, differs; intervals do not overlap; paired over 8 tasks: 7 better, 0 worse" in lines[-1]


def test_the_same_run_does_not_differ(tmp_path):
    run = recorded_run(tmp_path / "run", MUCH)
    found = RunComparison.of([run, RunReader.open(run.folder.path)])
    assert found.names == (str(run.folder.path), f"{run.folder.path} (2)")
    assert found.describe()[0] == "recipes: no difference"
    [one] = found.against_first
    assert (one.found.p_value, one.found.change, one.overlap) == (1.0, 0.0, True)
    assert "no clear difference" in found.describe()[-1]


def test_other_tasks_are_not_paired(tmp_path):
    found = make(tmp_path, LITTLE, {f"other-{name}": [1.0] for name in "abcd"})
    [one] = found.against_first
    assert one.found.paired_tasks == 0
    assert "unpaired" in found.describe()[-1]


def test_a_run_without_an_evaluation_after_training(tmp_path):
    found = make(tmp_path, MUCH, None)
    assert found.describe()[-1].endswith("an evaluation after training, or its attempts, are not there")
    [after] = [line for line in found.describe() if line.startswith("sampled, after")]
    assert after.endswith("-")
    [steps] = [line for line in found.describe() if line.startswith("steps")]
    assert steps.split() == ["steps", "2", "so", "far", "2", "so", "far"]


def test_three_runs_are_compared_with_the_first(tmp_path):
    found = make(tmp_path, LITTLE, MUCH, MUCH)
    assert [one.name for one in found.against_first] == ["run-1", "run-2"]


def test_a_folder_with_nothing_in_it(tmp_path):
    empty = RunReader(RunFolder.create(tmp_path / "empty", {}))
    found = RunComparison.of([empty, recorded_run(tmp_path / "run", MUCH)])
    assert "env.0.name" in found.recipes
    assert found.describe()


def test_values_cannot_move_the_cursor(tmp_path):
    one = recorded_run(tmp_path / "a\x1b[2J", None, {**CONFIG, "teacher": "\x1b[2J\n" + "x" * 500})
    two = recorded_run(tmp_path / "b", None, CONFIG)
    text = "".join(RunComparison.of([one, two]).describe())
    assert "\x1b" not in text
    assert "\n" not in text
    assert "x" * 60 not in text


@pytest.mark.parametrize(("overlap", "said"), [(True, "intervals overlap"), (False, "intervals do not overlap")])
def test_intervals_are_spoken_of_where_they_are_known(overlap, said):
    change = Contrast(0.1, 0.0, 0.2, 0.3, paired_tasks=0)
    assert said in contrast_line(AgainstFirst("sampled", "b", change, overlap), "a")
    assert "overlap" not in contrast_line(AgainstFirst("sampled", "b", change, None), "a")
