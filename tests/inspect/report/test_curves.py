"""Which curves a run has."""

from support.reported import check_page, recorded_run
from turnwise.inspect.held_out import held_out_of
from turnwise.inspect.report.curves import PLAIN, STAGES, curves, meaning, reward_chart, success_chart
from turnwise.inspect.report.markup import document
from turnwise.inspect.run_reader import RunReader
from turnwise.inspect.training_groups import spreads_of
from turnwise.runs.folder import RunFolder
from turnwise.runs.interval import clustered, wilson
from turnwise.runs.metric_names import metric_of
from turnwise.runs.tracker import JsonLines


def read(run):
    run.refresh()
    return run


def spreads(run):
    return {spread.step: spread for spread in spreads_of(run)}


def test_success_has_its_intervals(tmp_path):
    run = read(recorded_run(tmp_path / "run", {"e": [1.0], "f": [1.0], "g": [1.0], "h": [0.0]}))
    training, smoothed, held_out = success_chart(run, spreads(run), held_out_of(run)).lines
    assert [(point.step, point.value) for point in training.points] == [(1, 0.5), (2, 0.75)]
    low, high = clustered([(1, 2), (1, 2)])
    assert (training.points[0].low, training.points[0].high) == (low, high)
    assert training.faint
    assert len(smoothed.points) == 2
    assert held_out.marked
    assert [(p.step, p.value, p.low, p.high) for p in held_out.points] == [
        (0, 0.25, *wilson(1, 4)),
        (2, 0.75, *wilson(3, 4)),
    ]


def test_steps_that_the_archive_has_lost_have_no_interval(tmp_path):
    run = recorded_run(tmp_path / "run")
    (run.folder.archive / "step-000001.parquet").unlink()
    first, second = reward_chart(read(run), spreads(run)).lines[0].points
    assert not first.has_interval
    assert second.has_interval


def test_what_does_not_change_is_listed_below(tmp_path):
    run = read(recorded_run(tmp_path / "run"))
    seen = check_page(document("page", curves(run, held_out_of(run))))
    assert "The same at every step: ratio of new to old probability 1" in seen.text
    assert seen.elements.count("svg") == 3  # success, reward, entropy
    assert seen.text.count("seconds per stage") == 1


def test_a_run_that_has_only_begun(tmp_path):
    run = read(RunReader(RunFolder.create(tmp_path / "run", {})))
    assert "No metrics are recorded yet." in curves(run, {})
    JsonLines(run.folder.metrics).log(1, {"success": 0.5, "entropy": float("nan")})
    assert curves(read(run), {}).count("<svg") == 1


def test_metrics_that_are_drawn_exist():
    names = [*(name for _, names in PLAIN for name in names), *(f"seconds/{stage}" for stage in STAGES)]
    assert [name for name in names if metric_of(name) is None] == []
    assert meaning("entropy") == "Mean entropy of the policy at sampled tokens (nats)"
    assert meaning("no such metric") == ""
