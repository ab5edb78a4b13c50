"""The learner's logprobs and entropies of trained tokens, where a recipe asks for them."""

import numpy as np
import pytest

from support.running import micro_recipe, train, untimed
from turnwise.inspect.attempts import AttemptKey
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.archive import read_step, step_path
from turnwise.types import turns_of

SHORT = ("steps=2", "groups_per_update=2", "evaluation.every=0", "evaluation.final_tasks=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(a run that recorded scores, the same without)."""
    folder = tmp_path_factory.mktemp("runs")
    both = []
    for name, asked in (("with", "true"), ("without", "false")):
        (folder / name).mkdir()
        train(micro_recipe(folder / name, *SHORT, f"archive.scores={asked}"))
        both.append(RunReader.open(next((folder / name).rglob("config.json")).parent))
    return both


def records(run, step):
    return read_step(step_path(run.folder.archive, step))


def test_they_are_the_learners_before_the_first_update(runs):
    for step in (1, 2):
        for record in records(runs[0], step):
            turns = list(turns_of([record.group]))
            assert len(record.learner_logprobs) == len(record.entropies) == len(turns) > 0
            for turn, logprobs, entropies in zip(turns, record.learner_logprobs, record.entropies, strict=True):
                np.testing.assert_allclose(logprobs, turn.logprobs, atol=1e-4)  # it sampled them itself, at lag 0
                assert (entropies >= 0).all()
                assert (entropies <= np.log(1000)).all()
                assert entropies.any()


def test_they_change_nothing_that_is_learned(runs):
    first, second = (untimed(run.folder.metrics) for run in runs)
    assert first == second


def test_an_attempt_has_them_only_where_they_were_recorded(runs):
    key = AttemptKey("train", 2, 1, 0)
    seen, unseen = (run.attempt(key) for run in runs)
    assert len(seen.learner_logprobs) == len(seen.entropies) == len(seen.trajectory.turns)
    assert [len(values) for values in seen.entropies] == [len(turn.action) for turn in seen.trajectory.turns]
    assert unseen.learner_logprobs == unseen.entropies == ()
    assert all(record.entropies == () for record in records(runs[1], 1))
