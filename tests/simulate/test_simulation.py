"""The simulator by cases that can be computed by hand, and what every order keeps."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from turnwise.assemble.run import settings_of
from turnwise.preflight.attempt_shape import AttemptShape
from turnwise.recipe.parse import load_recipe
from turnwise.simulate.pace import LearnerPace, MeasuredPace
from turnwise.simulate.simulation import Setup, simulate
from turnwise.simulate.workload import LognormalDelay, RedrawnGroups, ShapedGroups, SimulatedTurn

PACE = MeasuredPace(fixed=0.01, sequence=0.001, prompt=0.0005)
NO_LEARNING = LearnerPace(0.0, 0.0, 0.0, 0.0)


def settings(*overrides):
    return settings_of(load_recipe(Path("hops"), ["steps=8", "groups_per_step=2", *overrides]))


def groups(*turns, attempts=2, delay=0.0):
    """Groups of equal attempts with the given (prompt, action) of each turn."""
    attempt = [SimulatedTurn(prompt, action, 0.0) for prompt, action in turns]
    return RedrawnGroups([[attempt] * attempts], lambda random: delay)


def test_a_synchronous_step_is_the_sum_of_its_parts():
    """Two groups of two attempts: 2 first prompts of 20, 10 iterations of four, replies of 6 and 4 iterations more."""
    setup = Setup(PACE, LearnerPace(0.5, 0.001, 0.25, 0.125), groups((20, 10), (6, 4), delay=3.0))
    outcome = simulate(setup, settings())
    sampling = 2 * 20 * 0.0005 + 10 * 0.014 + 4 * 6 * 0.0005 + 4 * 0.014
    tokens = 2 * (20 + 2 * (10 + 6 + 4))
    assert outcome.tokens_per_step == tokens
    assert outcome.seconds_per_step == pytest.approx(sampling + 2 * 3.0 + 0.5 + 0.001 * tokens + 0.25 + 0.125)
    assert outcome.engines_busy == pytest.approx(sampling / outcome.seconds_per_step)
    assert outcome.learner_busy == pytest.approx((0.75 + 0.001 * tokens) / outcome.seconds_per_step)
    assert outcome.lags == {0: 1.0}
    assert outcome.fair_turns == 1.0


def test_with_lag_a_step_takes_as_long_as_its_slowest_part():
    learner = LearnerPace(5.0, 0.0, 0.0, 0.0)
    outcome = simulate(Setup(PACE, learner, groups((20, 10), delay=1.0)), settings("max_lag=2"))
    assert outcome.seconds_per_step == pytest.approx(5.0, rel=0.01)
    assert outcome.learner_busy == pytest.approx(1.0, rel=0.01)
    assert outcome.limit == "learner"
    assert max(outcome.lags) == 2


def test_engines_pause_while_they_load():
    """A second of decoding, interrupted by a load of two."""
    busy = groups((1, 100), attempts=1)
    fast = simulate(Setup(PACE, NO_LEARNING, busy), settings("max_lag=1"))
    paused = simulate(Setup(PACE, LearnerPace(0.0, 0.0, 0.0, 2.0), busy), settings("max_lag=1"))
    assert paused.seconds_per_step - fast.seconds_per_step == pytest.approx(2.0, rel=0.1)


def test_calls_beyond_the_memory_of_a_replica_wait():
    """Room for two texts of 30 tokens: four of them are decoded two by two."""
    work = groups((20, 10))
    wide = simulate(Setup(PACE, NO_LEARNING, work), settings())
    narrow = simulate(Setup(PACE, NO_LEARNING, work, room=61), settings())
    fewer = simulate(Setup(PACE, NO_LEARNING, work, max_sequences=2), settings())
    assert wide.seconds_per_step == pytest.approx(40 * 0.0005 + 10 * 0.014)
    assert narrow.seconds_per_step == pytest.approx(fewer.seconds_per_step)
    assert fewer.seconds_per_step == pytest.approx(40 * 0.0005 + 2 * 10 * 0.012)


def test_a_text_that_fits_in_no_replica_is_an_error():
    with pytest.raises(ValueError, match=r"^a text of 30 tokens fits in no replica: 25 do$"):
        simulate(Setup(PACE, NO_LEARNING, groups((20, 10)), room=25), settings())


def test_keys_that_were_evicted_are_computed_again():
    """Each attempt waits for its environment while others need the room."""
    work = groups((20, 5), (5, 5), attempts=4, delay=1.0)
    kept = simulate(Setup(PACE, NO_LEARNING, work), settings())
    evicted = simulate(Setup(PACE, NO_LEARNING, work, room=8 * 25 + 1), settings())
    assert evicted.seconds_per_step > kept.seconds_per_step


def test_one_agent_loop_serves_turns_one_after_the_other():
    work = groups((1, 1), attempts=4)
    outcome = simulate(Setup(MeasuredPace(0.0, 0.0, 0.0), NO_LEARNING, work, turn_seconds=0.5), settings())
    assert outcome.seconds_per_step == pytest.approx(8 * 0.5)
    assert outcome.limit == "agent loop"
    twice = simulate(Setup(MeasuredPace(0.0, 0.0, 0.0), NO_LEARNING, work, turn_seconds=0.5, drivers=2), settings())
    assert twice.seconds_per_step == pytest.approx(4 * 0.5)


def test_replicas_share_the_attempts():
    work = groups((1, 100), attempts=4)
    one = simulate(Setup(PACE, NO_LEARNING, work), settings())
    two = simulate(Setup(PACE, NO_LEARNING, work, replicas=2), settings())
    assert one.seconds_per_step == pytest.approx(100 * 0.018, rel=0.01)
    assert two.seconds_per_step == pytest.approx(100 * 0.014, rel=0.01)


def test_orders_under_heavy_tails():
    """`due` with the same lag on average is faster than `started`, keeps its bound, drops nothing, favours nobody."""
    shape = AttemptShape(prompt=8, action=4, reply=4, turns=4, group=4)
    setup = Setup(
        MeasuredPace(1e-4, 1e-6, 0.0), LearnerPace(1.0, 0.0, 0.0, 0.0), ShapedGroups(shape, LognormalDelay(0.2, 1.0))
    )
    found = {
        order: simulate(setup, settings("steps=30", "groups_per_step=4", f"max_lag={lag}", f"schedule.order={order}"))
        for order, lag in (("started", 2), ("due", 4))
    }
    assert found["due"].steps_per_hour > 1.1 * found["started"].steps_per_hour
    assert found["due"].mean_lag <= found["started"].mean_lag + 0.1
    assert max(found["due"].lags) <= 4
    assert found["due"].dropped == 0
    assert found["due"].fair_turns == pytest.approx(1.0, abs=0.02)


def test_the_same_seed_is_the_same_simulation():
    shape = AttemptShape(prompt=8, action=4, reply=4, turns=4, group=2)
    setup = Setup(PACE, NO_LEARNING, ShapedGroups(shape, LognormalDelay(0.2, 1.0)))
    first, again, other = (simulate(setup, settings("max_lag=1"), seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_shaped_attempts_stay_within_their_shape():
    shape = AttemptShape(prompt=8, action=6, reply=4, turns=5, group=3)
    for seed in range(50):
        made = ShapedGroups(shape, sigma=2.0)(Random(seed))
        assert len(made) == 3
        assert all(1 <= len(attempt) <= 5 for attempt in made)
        assert all(1 <= turn.action <= 6 for attempt in made for turn in attempt)
        assert {attempt[0].prompt for attempt in made} == {8}


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match=r"^2 steps leave none after the first 3, in which the pipeline fills$"):
        simulate(Setup(PACE, NO_LEARNING, groups((1, 1))), replace(settings("max_lag=2"), steps=2))
