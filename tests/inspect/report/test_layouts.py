"""The layouts of a recorded step, counted."""

from support.making import make_turn
from support.recorded import record
from turnwise.inspect.report import layouts
from turnwise.inspect.report.layouts import layout_table
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.archive import step_path, write_step
from turnwise.runs.folder import RunFolder
from turnwise.types import Status, Trajectory


def make_run(tmp_path, config=None):
    folder = RunFolder.create(tmp_path / "run", config or {"max_tokens_per_microbatch": 100})
    one = Trajectory((make_turn([7, 8], [9]), make_turn([7, 8, 9, 4], [5, 6])), Status.finished, 1.0)
    write_step(folder.archive, 4, [record("a", one)])
    return RunReader(folder)


def test_two_turns_by_hand(tmp_path):
    text = layout_table(make_run(tmp_path))
    assert "Step 4 in each layout: 2 turns with 6 unique tokens, at most 100 tokens a pass" in text
    assert "<th>padded rows</th><td>1</td><td>12</td><td>2.00</td>" in text
    assert "<th>packed</th><td>1</td><td>9</td><td>1.50</td>" in text
    assert "<th>tree</th><td>1</td><td>6</td><td>1.00</td>" in text


def test_a_recipe_without_a_limit_has_the_default(tmp_path):
    assert "at most 16,384 tokens a pass" in layout_table(make_run(tmp_path, {"max_tokens_per_microbatch": "x"}))


def test_a_large_step_is_left_out(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    monkeypatch.setattr(layouts, "MOST_BYTES", 10)
    assert "Layouts are not compared" in layout_table(run)


def test_a_step_that_cannot_be_read_is_left_out(tmp_path):
    run = make_run(tmp_path)
    path = step_path(run.folder.archive, 4)
    path.write_bytes(path.read_bytes()[:-100])
    assert layout_table(run) == ""
    path.unlink()
    assert layout_table(run) == ""
