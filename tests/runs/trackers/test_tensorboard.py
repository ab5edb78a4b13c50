"""TensorBoard: event files of the real library, read by TensorBoard's reader."""

import json

import pytest

from support.tracking import RECIPE, ROWS, first_life, metrics_of, second_life
from turnwise.runs.folder import RunFolder
from turnwise.runs.trackers.tensorboard import literal, markdown_table

pytest.importorskip("tensorboardX")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(folder):
    events = accumulator.EventAccumulator(str(folder.trackers / "tensorboard"), size_guidance={"tensors": 0})
    return events.Reload()


def text_of(event):
    return event.tensor_proto.string_val[0].decode()


def test_a_resume_replaces_the_steps_that_come_again(tmp_path):
    folder = RunFolder(tmp_path / "quickstart")
    first_life(folder, ["tensorboard"])
    scalars = {event.step: event.value for event in read(folder).Scalars("reward/mean")}
    assert scalars == {step: pytest.approx(metrics_of(step, 1)["reward/mean"]) for step in range(4)}
    second_life(folder, ["tensorboard"])
    events = read(folder)
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (step, pytest.approx(metrics_of(step, 2 if step > 2 else 1)["reward/mean"])) for step in range(5)
    ]
    assert [event.value for event in events.Scalars("eval/sampled/pass_at_4")] == [0.5] * 5
    recipes = events.Tensors("recipe/text_summary")
    assert [event.step for event in recipes] == [0, 2]
    assert all(json.loads(text_of(event)) == RECIPE for event in recipes)
    tables = events.Tensors("attempts/text_summary")
    assert [(event.step, text_of(event)) for event in tables] == [
        (1, markdown_table(ROWS)),
        (4, markdown_table(ROWS[:1])),
    ]
    [curve] = events.Images("curve")
    assert (curve.step, curve.width, curve.height) == (4, 3, 2)


def test_what_a_model_wrote_stays_text_in_the_browser():
    plugin = pytest.importorskip("tensorboard.plugin_util")
    hostile = ROWS[0].text + "\n[a](javascript:alert(1)) | `x` <img src=x onerror=y> &amp; *b* __c__\n# d\n\n---"
    rows = [type(ROWS[0])("a|b", 0, "finished", 0.0, 1, hostile)]
    page = plugin.markdown_to_safe_html(markdown_table(rows))
    for tag in ("<img", "<a ", "<em", "<strong", "<code", "<h1", "<hr", "onerror=y>"):
        assert tag not in page
    assert page.count("<td") == 6
    assert plugin.markdown_to_safe_html("![x](http://127.0.0.1/x.png)").count("<img") == 1, "this test can fail"


def test_lines_stay_lines():
    assert literal("a_b\nc") == "a&#95;b<br>c"
