import json
import math

import pytest

from turnwise.inspect.same_steps import compare_steps
from turnwise.runs.tracker import JsonLines


def written(path, *lines, first=0):
    tracker = JsonLines(path)
    for step, line in enumerate(lines, first):
        tracker.log(step, line)
    tracker.close()
    return path


def line(**changes):
    return {"loss": 0.5, "gradient_norm": 2.0, "gap/mean": math.nan, "seconds/train": 1.0, **changes}


def test_steps_with_the_same_numbers_are_the_same_whatever_the_clock_says(tmp_path):
    one = written(tmp_path / "a", {}, line(), line(), line(**{"eval/sampled/success": 1.0}))
    other = written(tmp_path / "b", {}, line(**{"seconds/train": 9.0}), line(), line())
    assert compare_steps(one, other, 1) == ["all 3 steps have the recorded numbers, bit for bit"]


@pytest.mark.parametrize("change", [{"loss": 0.5 + 1e-12}, {"gap/mean": 1e-6}])
def test_the_first_difference_is_named(tmp_path, change):
    one, other = written(tmp_path / "a", {}, line(), line()), written(tmp_path / "b", {}, line(), line(**change))
    first, second = compare_steps(one, other, 1)
    assert first == f"step 2 is the first that differs from the recorded run, in {next(iter(change))}"
    assert second.startswith(next(iter(change)))


def test_many_differences_are_counted(tmp_path):
    one = written(tmp_path / "a", {}, {f"m{n}": 0.0 for n in range(9)})
    other = written(tmp_path / "b", {}, {f"m{n}": 1.0 for n in range(9)})
    assert compare_steps(one, other, 1)[0].endswith("in m0, m1, m2, m3, m4 and 4 more")


def test_a_replay_of_later_steps_is_compared_with_those(tmp_path):
    one = written(tmp_path / "a", {}, line(loss=1.0), line(loss=2.0), line(loss=3.0))
    other = written(tmp_path / "b", {}, line(loss=2.0), line(loss=3.0))
    assert compare_steps(one, other, 2) == ["all 2 steps have the recorded numbers, bit for bit"]


def test_without_lines_nothing_is_compared(tmp_path):
    other = written(tmp_path / "b", {}, line())
    assert "nothing is compared" in compare_steps(tmp_path / "nowhere", other, 1)[0]
    assert json.loads((tmp_path / "b").read_text().splitlines()[1])["loss"] == 0.5
