"""A checkpoint does not know how many ranks wrote it."""

import pytest
import torch

from cluster.pool import Made, learner
from cluster.test_ranked import MOVING, TIED, Batch, assert_same, updates
from properties.test_tree_layout import WORKLOADS
from support.acting import byte_tokenizer
from support.making import make_model
from turnwise.learn.policy import load_model

CRITIC = 2
"""Seed of the critic's model."""


def fresh(model):
    """A learner in this process, and what makes one over ranks."""
    how = {"critic": make_model(seed=CRITIC), "settings": MOVING}
    return Made(model, **how)


def in_process(made):
    return learner(made.model, **made.how)


def moments(learner):
    """What the optimizer keeps, by parameter."""
    return {name: tensor for name, tensor in learner.stepper.state().items() if "/" in name}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TIED)
def test_two_ranks_go_on_as_one_and_one_as_two(pool, tmp_path, kind):
    batch = Batch(WORKLOADS["single turns"]())
    two = pool.learner(fresh(make_model(kind)))
    updates(two, batch, count=2)
    two.save(tmp_path / "two", byte_tokenizer())
    next_of_two = updates(two, batch, count=1, start=2)

    one = in_process(fresh(load_model(tmp_path / "two")))
    assert_same(one.publish(), load_model(tmp_path / "two").state_dict(), 0.0)
    one.restore(tmp_path / "two")
    assert one.num_updates == 2
    one.save(tmp_path / "one", byte_tokenizer())
    next_of_one = updates(one, batch, count=1, start=2)
    assert next_of_one[0] == pytest.approx(next_of_two[0], rel=1e-4, abs=1e-6)
    assert_same(one.publish(), two.publish())

    again = pool.learner(fresh(load_model(tmp_path / "one")))
    again.restore(tmp_path / "one")
    again.save(tmp_path / "again", byte_tokenizer())
    third = in_process(fresh(load_model(tmp_path / "again")))
    third.restore(tmp_path / "again")
    kept = in_process(fresh(load_model(tmp_path / "two")))
    kept.restore(tmp_path / "two")
    assert moments(kept).keys() == moments(third).keys()
    assert all(torch.equal(moments(kept)[name], moments(third)[name]) for name in moments(kept))
    assert all(torch.equal(kept.critic.weights()[name], third.critic.weights()[name]) for name in kept.critic.weights())
    assert updates(again, batch, count=1, start=2)[0] == pytest.approx(next_of_two[0], rel=1e-4, abs=1e-6)
    assert_same(again.publish(), two.publish())
    two.close()
    again.close()


def test_a_checkpoint_before_the_first_update_is_one_too(pool, tmp_path):
    two = pool.learner(fresh(make_model()))
    two.save(tmp_path, byte_tokenizer())
    one = in_process(fresh(load_model(tmp_path)))
    one.restore(tmp_path)
    assert one.num_updates == 0
    assert moments(one) == {}
    two.restore(tmp_path)
    two.close()


def test_the_optimizer_of_another_model_is_refused(tmp_path):
    one = in_process(fresh(make_model()))
    updates(one, Batch(WORKLOADS["single turns"]()), count=1)
    one.save(tmp_path, byte_tokenizer())
    other = in_process(fresh(make_model(num_hidden_layers=1)))
    with pytest.raises(ValueError, match="another model"):
        other.restore(tmp_path)
