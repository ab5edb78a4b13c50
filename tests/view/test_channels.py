import numpy as np

from support.making import make_trajectory
from turnwise.inspect.recorded_attempt import RecordedAttempt
from turnwise.types import Task
from turnwise.view.channels import CHANNELS, channels_of, values_of


def attempt(credit=()):
    trajectory = make_trajectory([(3, 2), (1, 2)])
    return RecordedAttempt(Task("a", "b"), trajectory, bool(credit), tuple(credit), tuple(credit))


def test_an_attempt_has_the_channels_whose_numbers_it_has():
    trained = attempt([np.array([1.0, np.nan], np.float32), np.array([-2.0, 0.5], np.float32)])
    found = {channel["name"]: channel for channel in channels_of(trained)}
    assert list(found) == ["credit", "logprob", "weight", "version"]
    assert (found["credit"]["low"], found["credit"]["high"], found["credit"]["centre"]) == (-2, 1, 0)
    assert [channel["name"] for channel in channels_of(attempt())] == ["logprob", "version"]
    assert values_of(trained, 0, 0, 2)["credit"] == [1.0, None]
    assert values_of(trained, 1, 1, 2)["credit"] == [0.5]
    assert set(values_of(attempt(), 0, 0, 2)) == {"logprob", "version"}


def test_recorded_scores_of_the_learner_are_channels():
    trajectory = make_trajectory([(3, 2), (1, 2)])
    logprobs = tuple(turn.logprobs + np.float32(0.5) for turn in trajectory.turns)
    entropies = (np.array([0.25, 2.0]), np.array([0.0, 1.0]))
    scored = RecordedAttempt(Task("a", "b"), trajectory, True, (), (), logprobs, entropies)
    assert [channel["name"] for channel in channels_of(scored)] == ["logprob", "entropy", "gap", "ratio", "version"]
    values = values_of(scored, 1, 0, 2)
    assert values["entropy"] == [0.0, 1.0]
    np.testing.assert_allclose(values["gap"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(values["ratio"], np.exp(0.5), rtol=1e-6)


def test_a_ratio_beyond_all_bounds_is_a_number():
    trajectory = make_trajectory([(3, 2)])
    far = (trajectory.turns[0].logprobs + np.float32(1e4),)
    scored = RecordedAttempt(Task("a", "b"), trajectory, True, (), (), far)
    np.testing.assert_allclose(values_of(scored, 0, 0, 2)["ratio"], np.exp(50.0), rtol=1e-4)


def test_an_attempt_without_turns_has_none():
    empty = RecordedAttempt(Task("a", "b"), make_trajectory([], status="failed"), False, (), ())
    assert channels_of(empty) == []


def test_names_differ_and_scales_are_known():
    assert len({channel.name for channel in CHANNELS}) == len(CHANNELS)
    assert {channel.scale for channel in CHANNELS} <= {"diverging", "sequential", "steps"}
