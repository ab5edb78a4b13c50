import json

from turnwise.inspect.metric_log import MetricLog


def write(path, *lines, end="\n"):
    path.write_text("\n".join(json.dumps(line) for line in lines) + end)


def test_complete_lines_are_read_as_they_come(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    assert not log.refresh()
    write(path, {"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5, "reward/mean": 0.1}, end="")
    assert log.refresh()
    assert log.series("loss") == [(0, 1.0)]  # the second line is still being written
    write(path, {"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5, "reward/mean": 0.1})
    assert log.refresh()
    assert log.series("loss") == [(0, 1.0), (1, 0.5)]
    assert log.names == ["loss", "reward/mean"]
    assert not log.refresh()


def test_a_file_that_a_resume_cut_back_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    write(path, {"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5})
    log.refresh()
    write(path, {"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.25}, {"step": 2, "loss": 0.125})
    assert log.refresh()
    assert log.series("loss") == [(0, 1.0), (1, 0.25), (2, 0.125)]
    path.unlink()
    assert log.refresh()
    assert log.lines == []


def test_what_is_no_metric_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    odd = ["nonsense", "[1]", '{"loss": 1}', "9" * 5000, "[" * 100_000, '{"step": 3, "loss": NaN, "big": 1' + "0" * 400]
    path.write_bytes(
        "\n".join([*odd[:5], odd[5] + "}", '{"step": 4, "loss": true, "text": "x", "fine": 2}', ""]).encode()
    )
    log = MetricLog(path)
    assert log.refresh()
    assert log.num_unreadable == 5
    assert [log.series(name) for name in ("loss", "big", "text", "fine")] == [[], [], [], [(4, 2.0)]]
    assert log.names == ["fine"]
    assert log.finite_lines == [{"step": 3}, {"step": 4, "fine": 2}]


def test_a_step_that_no_picture_has_is_no_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 10**400, "loss": 1.0}, {"step": True, "loss": 1.0}, {"step": 1, "loss": 1.0})
    log = MetricLog(path)
    log.refresh()
    assert log.series("loss") == [(1, 1.0)]
    assert log.num_unreadable == 2


def test_a_step_that_no_curve_can_show_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": 1.0}, {"step": 10**30, "loss": 2.0})
    log = MetricLog(path)
    log.refresh()
    assert (log.series("loss"), log.num_unreadable) == ([(1, 1.0)], 1)
