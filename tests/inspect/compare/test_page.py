"""A comparison as a page."""

from support.reported import CONFIG, check_page, recorded_run
from turnwise.inspect.compare.page import METRICS, comparison_page
from turnwise.inspect.compare.run_comparison import RunComparison
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.folder import RunFolder
from turnwise.runs.metric_names import metric_of

EVIL = "<script>alert(1)</script>"


def test_two_runs_with_their_curves_over_each_other(tmp_path):
    one = recorded_run(tmp_path / "one", {"e": [0.0], "f": [0.0]})
    two = recorded_run(tmp_path / "two", {"e": [1.0], "f": [1.0]}, {**CONFIG, "seed": EVIL})
    seen = check_page(comparison_page(RunComparison.of([one, two])))
    assert [value for name, value in seen.attributes if name == "id"] == [
        "success-and-cost",
        "curves",
        "recipes",
        "missing-or-unreadable",
    ]
    assert "sampled: two against one: +100.0 points" in seen.text
    assert f'seed-"{EVIL}"' in seen.text
    assert "held-out success" in seen.text
    assert seen.elements.count("svg") == 4  # held out, training, reward, entropy
    assert "two: machine.json is not there" in seen.text


def test_runs_with_nothing_in_them(tmp_path):
    runs = [RunReader(RunFolder.create(tmp_path / name, {})) for name in ("a", "b")]
    seen = check_page(comparison_page(RunComparison.of(runs)))
    assert "The recipes do not differ." in seen.text
    assert "No metrics are recorded yet." in seen.text


def test_metrics_that_are_drawn_exist():
    assert [name for name in METRICS if metric_of(name) is None] == []
