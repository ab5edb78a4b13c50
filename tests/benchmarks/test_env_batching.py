"""The arms of benchmarks/env_batching.py: calls are counted, results agree, and the judge over HTTP judges."""

import asyncio

import pytest

from support.acting import renderer
from support.scripts import script_module
from turnwise.testing import clock


@pytest.fixture(scope="module")
def script():
    with script_module("env_batching") as module:
        yield module


def regime(script, letter):
    (found,) = [regime for regime in script.REGIMES if regime.name.startswith(letter)]
    return found


def figures(script, own, *policies, seed=0):
    workload = script.Workload(own, seed)
    serving = [script.Asleep(service) for service in own.services]
    rendered = renderer()
    work = {policy: script.measure(own, workload, policy, seed, rendered, serving) for policy in policies}
    return script.agreed({policy: clock.run(one) for policy, one in work.items()})


def calls_of_each(script, own, seed):
    """A call for every turn."""
    return sum(task.data["turns"] for task in script.Workload(own, seed).tasks)


@pytest.mark.parametrize("letter", "ABDF")
def test_by_default_there_are_at_most_a_quarter_of_the_calls(script, letter):
    own = regime(script, letter)
    for policy, found in figures(script, own, *script.DEFAULTS.values()).items():
        assert 4 * found.calls <= calls_of_each(script, own, 0), policy


@pytest.mark.parametrize("letter", "ACEFGIJ")
def test_no_policy_is_quicker_than_the_bound_or_comes_to_other_results(script, letter):
    own = regime(script, letter).scaled(1.0, 40)
    bound = script.Workload(own, 1).bound(own)
    found = figures(script, own, *script.POLICIES, seed=1)
    for policy, one in found.items():
        assert one.makespan >= bound - 1e-6, policy
        assert len(set(one.outcome)) > 1
    assert found["per attempt"].calls == (40 if letter == "J" else calls_of_each(script, own, 1))


def test_lockstep_is_the_sum_of_the_slowest(script):
    """What a loop with a barrier takes, computed by hand."""
    own = regime(script, "F").scaled(1.0, 30)
    workload = script.Workload(own, 2)
    actions, expected = list(workload.seconds.values()), 0.0
    for turn in range(own.max_turns):
        under_way = [seconds[turn] for seconds in actions if len(seconds) > turn]
        expected += max(under_way) + 4.0 + 0.002 * len(under_way)
    found = figures(script, own, "lock-step", seed=2)["lock-step"]
    assert found.makespan == pytest.approx(expected)
    assert found.calls == own.max_turns


def test_a_figure_that_misses_is_called_so(script):
    row = {policy: {"makespan": 100.0, "calls": 10} for policy in script.POLICIES} | {"lower bound": 90.0}
    rows = {"F 8 turns": row, "A 1 turn": row}
    assert [holds for _, holds in script.checks(rows)] == [True, False, False] * 2
    row["wait 0"] = {"makespan": 104.0, "calls": 2}
    row["lock-step"] = {"makespan": 400.0, "calls": 10}
    assert [holds for _, holds in script.checks(rows)] == [False, True, True, True, True, False]


@pytest.mark.parametrize("letter", "DJ")
def test_the_judge_over_http_comes_to_the_same_results(script, letter):
    own = regime(script, letter).scaled(100.0, 8)
    workload = script.Workload(own, 0)
    expected = figures(script, own, "per attempt")["per attempt"].outcome
    with script.judge(own.services[0]) as port:
        for policy in ("lock-step", "wait 0"):
            serving = [script.OverHttp(port)]
            found = asyncio.run(script.measure(own, workload, policy, 0, renderer(), serving))
            assert found.outcome == expected


def test_repeats_on_the_wall_clock_are_one_figure_and_seeds_are_several(script):
    def run(seed, repeat, makespan):
        row = {policy: {"makespan": makespan, "calls": 1, "cpu": 0.1} for policy in script.POLICIES}
        cell = {"clock": "wall", "regime": "A", "seed": seed, "repeat": repeat}
        return {"cell": cell, "found": {**row, "lower bound": 1.0}}

    runs = [run(0, 0, 2.0), run(0, 1, 90.0), run(0, 2, 3.0), run(1, 0, 5.0)]
    [rows] = script.rows_of(runs, "wall").values()
    assert [row["wait 0"]["makespan"] for row in rows] == [3.0, 5.0]
    assert script.rows_of(runs, "virtual") == {}
