import logging
from dataclasses import replace

from support.logged import recipe_with, run_of
from turnwise.runs.why.table import CHECKS
from turnwise.runs.why.watcher import Watcher


def feed(watcher, lines):
    for line in lines:
        watcher.log(line["step"], {name: value for name, value in line.items() if name != "step"})


def test_each_cause_is_said_once(caplog):
    feed(Watcher(recipe_with()), run_of(9, stop_length=0.9, failure_rate=[0.0] * 4 + [0.5] * 5))
    said = [(record.finding.name, record.finding.step) for record in caplog.records]
    assert said == [("token_limit", 3), ("failures", 7)]
    assert caplog.records[0].always_shown
    assert caplog.messages[0].startswith("step 3: Actions end at the token limit: 90% of the turns")


def test_a_healthy_run_is_watched_in_silence(caplog):
    feed(Watcher(recipe_with()), run_of(30))
    assert not caplog.records


def test_a_check_that_raises_does_not_reach_the_run(caplog):
    def broken(evidence):
        raise RuntimeError("a mistake in the check")

    watcher = Watcher(recipe_with(), checks=(replace(CHECKS[0], find=broken), *CHECKS[1:]))
    feed(watcher, run_of(3, stop_length=0.9))
    assert [record.finding.name for record in caplog.records] == ["token_limit"]


def test_metrics_that_cannot_be_read_do_not_reach_the_run(caplog):
    class Hostile:
        def items(self):
            raise RuntimeError

        keys = items

    Watcher(recipe_with()).log(1, Hostile())
    Watcher(recipe_with()).log(1, {"groups/kept": "many", "stop/length": None})
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_run_that_goes_on_knows_what_was_before(caplog):
    lines = run_of(3, stop_length=0.9)
    feed(Watcher(recipe_with(), lines[:-1]), lines[-1:])
    assert [record.finding.name for record in caplog.records] == ["token_limit"]
