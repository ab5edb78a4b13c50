import pytest

from support.running import micro_recipe


def test_the_laptop_is_the_default(tmp_path):
    own = micro_recipe(tmp_path).cluster
    assert not own.is_spread
    assert not own.on_ray


@pytest.mark.parametrize(
    ("overrides", "spread", "on_ray"),
    [
        (["cluster.ranks=2"], True, False),
        (["cluster.placement=colocated"], True, True),
        (["cluster.placement=disaggregated", "cluster.gpus=1", "model.device=cuda"], True, True),
    ],
)
def test_one_setting_goes_to_a_cluster(tmp_path, overrides, spread, on_ray):
    own = micro_recipe(tmp_path, *overrides).cluster
    assert (own.is_spread, own.on_ray) == (spread, on_ray)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.replicas=2"], 'replicas is ignored with placement = "local"'),
        (["cluster.gpus=1"], 'gpus is ignored with placement = "local"'),
        (["cluster.placement=colocated", "model.device=cuda"], "cluster.gpus = 0 decides"),
        (["cluster.placement=colocated", "cluster.gpus=1", "model.device=cpu"], "cluster.gpus = 1 decides"),
        (["env.0.concurrency.actors=2"], "env.concurrency.actors needs a Ray cluster"),
        (["cluster.ranks=0"], "cluster.ranks"),
        (["lora.targets=['q_proj']"], "targets is ignored without a rank"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        micro_recipe(tmp_path, *overrides)


def test_actors_and_batched_calls_exclude_each_other(tmp_path):
    from turnwise.cluster.remote_envs import RemoteEnvironments

    class Many:
        @classmethod
        def step_many(cls, environments, messages):
            return []

    with pytest.raises(ValueError, match=r"Many combines calls in step_many, which env.concurrency.actors prevents"):
        RemoteEnvironments(Many, actors=2, cluster=micro_recipe(tmp_path).cluster)
