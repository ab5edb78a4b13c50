"""The tables of a report."""

import json

import pytest

from support.reported import CONFIG, check_page, recorded_run
from turnwise.inspect.overview import RunOverview
from turnwise.inspect.report.markup import document
from turnwise.inspect.report.tables import (
    cost_tables,
    duration,
    events_list,
    machine_table,
    recipe_table,
    share_words,
    status_table,
)
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.folder import RunFolder
from turnwise.runs.machine import record_machine
from turnwise.runs.tracker import JsonLines

EVIL = "<script>alert(1)</script>"


def nested(depth):
    return {"a": nested(depth - 1), "b": [[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]} if depth else {}


def text_of(markup):
    return check_page(document("", markup)).text


@pytest.fixture
def run(tmp_path):
    found = recorded_run(tmp_path / "run")
    found.refresh()
    return found


def recipe_of(path, config):
    return recipe_table(RunReader(RunFolder.create(path / "recipe", config)))


def test_the_recipe_shows_what_is_not_a_default_and_all_of_it_folded(tmp_path):
    text = text_of(recipe_of(tmp_path, {**CONFIG, "seed": 7, EVIL: EVIL, "rollout": {"max_turns": 8}}))
    changed, whole = text.split("The whole recipe")
    assert "seed70" in changed.replace("\n", "")
    assert f'{EVIL}"{EVIL}"' in changed
    assert "max_turns" not in changed
    assert '"max_turns": 8' in whole


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"env": 3},
        {"env": []},
        {"env": [{}]},
        {"a": {"b": {"c": [{}, {"d": None}]}}},
        {"x": "y" * 10**6},
        nested(300),
    ],
)
def test_any_recipe_can_be_shown(tmp_path, config):
    page = document("", recipe_of(tmp_path, config))
    check_page(page)
    assert len(page) < 100_000


def test_the_machine(run):
    assert "machine.json is not there" in text_of(machine_table(run))
    record_machine(run.folder.machine, 0, [])
    assert "torch" in text_of(machine_table(run))
    assert "from step" not in text_of(machine_table(run))
    record_machine(run.folder.machine, 5, [EVIL])
    text = text_of(machine_table(run))
    assert "from step 0from step 5" in text
    assert EVIL in text


@pytest.mark.parametrize(
    "entry",
    [{}, {"packages": [1], "gpus": 3, "memory": 10**400, "cpu": None}, {"packages": {EVIL: EVIL}, "gpus": [{}]}],
)
def test_a_machine_that_makes_no_sense_is_shown_as_it_is(run, entry):
    run.folder.machine.write_text(json.dumps([{"step": 0, **entry}]))
    text_of(machine_table(run))


def test_statuses_over_time(run):
    text = status_table(run)
    assert ">finished<" in text
    assert ">too long<" in text
    assert ">failed<" not in text  # no attempt did
    assert "<th>all</th><td>6 (75.0%)</td><td>2 (25.0%)</td><td>8</td>" in text


def test_many_steps_are_ten_rows(tmp_path):
    folder = RunFolder.create(tmp_path / "many", {})
    log = JsonLines(folder.metrics)
    for step in range(1, 96):
        log.log(step, {"status/finished": 2.0, "status/failed": float(step == 95)})
    run = RunReader(folder)
    run.refresh()
    text = status_table(run)
    assert text.count("<tr>") == 1 + 10 + 1
    assert "<th>91 to 95</th><td>10 (90.9%)</td>" not in text  # columns are sorted by name
    assert "<th>91 to 95</th><td>1 (9.1%)</td><td>10 (90.9%)</td><td>11</td>" in text


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "0.0%"), (1e-5, "< 0.1%"), (0.5, "50.0%"), (0.9999, "> 99.9%"), (1.0, "100.0%")]
)
def test_a_share_is_all_or_nothing_only_where_it_is(share, words):
    assert share_words(share) == words


def test_costs_are_sums_over_the_run(run):
    text = cost_tables(run, RunOverview.of(run))
    assert "<th>sampled</th><td>32</td>" in text
    assert "<th>computed</th><td>80</td>" in text
    assert "<th>shared</th><td>48</td>" in text  # 2 steps of 8 turns with 8 tokens, less those computed
    assert "37.5% of the 128" in text
    assert "<th>steps</th><td>4 s</td><td>100.0%</td>" in text
    assert "<th>– waiting for groups</th><td>3 s</td><td>75.0%</td>" in text
    assert "8 tokens per second" in text


def test_a_step_with_dropped_groups_says_nothing_about_sharing(tmp_path):
    run = RunReader(RunFolder.create(tmp_path / "dropped", {}))
    JsonLines(run.folder.metrics).log(
        1, {"turn/count": 8.0, "turn/prompt_tokens": 6.0, "tokens/planned": 9.0, "groups/dropped": 1.0}
    )
    run.refresh()
    assert "shared" not in cost_tables(run, RunOverview.of(run))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (94.3, "94.3 s"),
        (238.0, "3.97 min"),
        (3590.0, "1 h 0 min"),
        (5025.0, "1 h 24 min"),
        (36e5, "1,000 h 0 min"),
    ],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_events_are_cut_and_escaped(run):
    assert "there is no events.log" in events_list(run)
    run.folder.events.write_bytes(b"")
    assert "events.log is empty" in events_list(run)
    lines = [f"2026-01-01 {EVIL} \x1b[2J {number} {'x' * 1000}" for number in range(5000)]
    run.folder.events.write_bytes(b"\xff\n" + "\n".join(lines).encode())
    page = document("", events_list(run))
    text = check_page(page).text
    assert len(page) < 200_000
    assert "The last 100 lines" in text
    assert " 4999 " in text
    assert " 4899 " not in text
    assert f"{EVIL} ␛[2J" in text
