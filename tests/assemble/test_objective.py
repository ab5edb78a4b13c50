"""What a recipe's names come to, and what is refused with its reason."""

import numpy as np
import pytest

from support.making import make_group, make_trajectory
from turnwise.assemble import objective as choices
from turnwise.assemble.checks import check
from turnwise.learn.teacher import forward, reverse
from turnwise.recipe.parse import parse_recipe
from turnwise.types import Group, Status


def recipe(**changes):
    return parse_recipe({"env": {"name": "hops"}, **changes}, "test.toml")


TAUGHT = {"distill": {"coefficient": 1.0}, "teacher": "."}
ALONE = {"credit": {"name": "none"}, **TAUGHT}
REFUSED = [
    ({"correction": {"truncate": "token"}, "loss": {"name": "ppo_clip", "anchor": "engine"}}, "count the ratio twice"),
    ({"loss": {"name": "gspo"}}, 'loss gspo needs loss.scope = "turn" or "trajectory"'),
    ({"loss": {"name": "gspo", "scope": "row"}}, 'needs loss.scope = "turn" or "trajectory"'),
    ({"loss": {"name": "ppo_clip", "scope": "turn"}}, "loss.scope: loss ppo_clip takes no such setting"),
    ({"loss": {"name": "reinforce", "anchor": "engine"}}, "loss.anchor would be ignored: reinforce has no ratio"),
    ({"loss": {"name": "ppo_clip", "anchor": "learner"}, "max_lag": 1}, "max_lag would be ignored"),
    ({"loss": {"name": "ppo_clip", "anchor": "learner", "clip_low": 0.1}}, "loss.clip_low would be ignored"),
    ({"loss": {"name": "ppo_clip", "clip_low": -1.0}}, "loss.clip_low of ppo_clip must be 0 or more"),
    ({"kl": {"coefficient": 0.1, "divergence": "k1"}}, "k1 as a loss has an expected gradient of zero"),
    ({"kl": {"divergence": "k2"}}, "divergence is ignored without a coefficient"),
    ({"kl": {"coefficient": 0.1, "place": "reward", "divergence": "k2"}}, "the charge is k1"),
    ({"kl": {"coefficient": 0.1, "place": "reward"}, "credit": {"name": "maxrl"}}, "which a KL charge does not leave"),
    (
        {"kl": {"coefficient": 0.1, "place": "reward"}, "filter": {"name": "zero_variance"}},
        "would drop groups that carry signal",
    ),
    ({"kl": {"coefficient": 0.1, "reference": "nowhere"}}, "no model folder at nowhere; set kl.reference"),
    ({"credit": {"name": "reinforce_pp", "kl": 0.1}}, "credit.kl: credit reinforce_pp takes no such setting"),
    ({"credit": {"name": "distill"}}, "credit distill needs teacher = FOLDER"),
    ({"teacher": "."}, "credit grpo would ignore the teacher"),
    ({"distill": {"coefficient": 1.0}}, "distill.coefficient needs teacher = FOLDER"),
    ({"distill": {"coefficient": 1.0}, "teacher": "nowhere"}, "no model folder at nowhere; set teacher"),
    ({"distill": {"top_k": 4}}, "top_k is ignored without a coefficient"),
    ({"distill": {"direction": "forward"}, "teacher": "."}, "direction is ignored without a coefficient"),
    ({"distill": {"coefficient": 1.0, "top_k": 0}, "teacher": "."}, "top_k"),
    ({"distill": {"coefficient": -1.0}, "teacher": "."}, "coefficient"),
    ({"distill": {"coefficient": 1.0, "direction": "both"}, "teacher": "."}, "direction"),
    ({**TAUGHT, "filter": {"name": "zero_variance"}}, "would drop groups whose tokens the teacher still has something"),
    ({"credit": {"name": "none"}}, "credit none gives nothing to learn by itself; set distill.coefficient"),
    ({**ALONE, "filter": {"name": "zero_variance"}}, "still carry signal for none"),
    ({**ALONE, "loss": {"name": "ppo_clip", "clip_low": 0.1}}, "[loss] would be ignored"),
    ({**ALONE, "loss": {"name": "reinforce"}}, "[loss] would be ignored"),
    ({**ALONE, "correction": {"truncate": "token"}}, "[correction] would be ignored"),
    ({**ALONE, "kl": {"coefficient": 0.1, "place": "reward"}}, "credit none looks at no reward"),
    ({**ALONE, "rollout": {"truncated": "zero"}}, 'rollout.truncated = "zero" would be ignored: credit none'),
    (
        {"credit": {"name": "distill"}, "teacher": ".", "rollout": {"truncated": "zero"}},
        'rollout.truncated = "zero" would be ignored: credit distill',
    ),
    ({"critic": {"clip": 0.1}}, "credit grpo would ignore the critic"),
    ({"correction": {"cap": 3.0}}, 'cap is ignored with truncate = "off"'),
    ({"correction": {"truncate": "token", "scope": "turn"}}, "scope is ignored without"),
    ({"correction": {"token_band": [2.0, 0.5]}}, "write two bounds, 0 <= low < high"),
    ({"rollout": {"on_failure": {"name": "drop", "value": 1.0}}}, "rollout.on_failure.value"),
    ({"rollout": {"on_failure": {"name": "pray"}}}, "rollout.on_failure.name = 'pray' does not exist"),
    ({"entropy": -0.1}, "entropy"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_would_not_mean_what_it_says_is_refused_in_one_line(changes, says):
    with pytest.raises(ValueError) as raised:
        check(recipe(**changes))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


FINE = [
    {"loss": {"name": "gspo", "scope": "trajectory"}},
    {"loss": {"name": "gspo", "scope": "turn", "anchor": "learner"}, "groups_per_update": 4},
    {"loss": {"name": "reinforce"}},
    {"correction": {"truncate": "token"}},
    {"correction": {"truncate": "sequence", "scope": "turn", "sequence_band": [0.5, 2.0]}, "max_lag": 2},
    {"correction": {"token_band": [0.5, 5.0]}, "loss": {"name": "reinforce"}},
    {"kl": {"coefficient": 0.1}},
    {"kl": {"coefficient": 0.1, "place": "reward"}, "credit": {"name": "reinforce_pp"}},
    {"rollout": {"on_failure": {"name": "pay", "value": -1.0}}},
    {"entropy": 0.01, "loss": {"name": "dppo", "divergence": "kl"}},
    TAUGHT,
    {**TAUGHT, "distill": {"coefficient": 0.1, "top_k": 64, "direction": "forward"}, "credit": {"name": "distill"}},
    {**TAUGHT, "loss": {"name": "cispo"}, "correction": {"truncate": "token"}, "max_lag": 1},
    ALONE,
    {**ALONE, "kl": {"coefficient": 0.1}, "entropy": 0.01, "max_lag": 1, "rollout": {"truncated": "mask"}},
    {**ALONE, "groups_per_step": 1, "rollout": {"attempts": 1, "min_attempts": 1}},
]


@pytest.mark.parametrize("changes", FINE)
def test_what_means_something_is_taken(changes):
    check(recipe(**changes))


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, set()),
        ({"groups_per_update": 4}, set()),  # anchored on the engine: its logprobs are recorded
        ({"loss": {"name": "ppo_clip", "anchor": "learner"}}, set()),  # the only update is its own old policy
        ({"loss": {"name": "ppo_clip", "anchor": "learner"}, "epochs": 2}, {"old"}),
        ({"correction": {"truncate": "token"}}, {"old"}),
        ({"kl": {"coefficient": 0.1}}, {"reference"}),
        ({"credit": {"name": "distill"}, "teacher": "."}, {"teacher"}),
        (TAUGHT, {"buckets"}),
        (ALONE, {"buckets"}),
        ({**TAUGHT, "credit": {"name": "distill"}}, {"buckets", "teacher"}),
    ],
)
def test_nothing_is_scored_that_nobody_needs(changes, needed):
    assert choices.needs(recipe(**changes)) == needed


def test_paying_for_failure_comes_before_filters_and_credit():
    crashed = make_trajectory([(1, 2)], status=Status.failed)
    group = make_group([1.0, 1.0])
    group = Group(group.task, group.trajectories, (crashed,))
    paying = recipe(
        rollout={"on_failure": {"name": "pay", "value": 0.0}}, filter={"name": "zero_variance"}, credit={"name": "rloo"}
    )
    assert not choices.keep_of(paying)(group)
    settled = choices.failure_of(paying)(group)
    assert choices.keep_of(paying)(settled)
    credit = choices.estimate_of(paying)([settled], {})
    assert [values[0] for values in credit] == [0.5, 0.5, -1.0]


@pytest.mark.parametrize("name", ["grpo", "reward_to_go", "reinforce_pp"])
def test_a_charge_in_the_reward_lowers_the_credit_of_what_strayed(name):
    groups = [make_group([1.0, 1.0, 0.0])]
    sizes = [2, 2, 2]
    scores = {
        "old": [np.full(size, -1.0) for size in sizes],
        "reference": [np.full(sizes[0], -5.0), np.full(sizes[1], -1.0), np.full(sizes[2], -1.0)],
    }
    charging = recipe(credit={"name": name}, kl={"coefficient": 0.05, "place": "reward"})
    strayed, stayed, _ = choices.estimate_of(charging)(groups, scores)
    assert strayed[0] < stayed[0]
    free, same, _ = choices.estimate_of(recipe(credit={"name": name}))(groups, scores)
    assert free[0] == same[0]


def test_gap_limits():
    assert choices.gap_limit_of(recipe()) == 1e-3
    assert choices.gap_limit_of(recipe(model={"dtype": "bfloat16"})) == 0.1
    assert choices.gap_limit_of(recipe(gap_limit=0.5)) == 0.5


def test_the_teacher_is_in_the_objective_only_where_a_recipe_says_so():
    assert choices.objective_of(recipe()).distill == 0.0
    taught = choices.objective_of(recipe(teacher=".", distill={"coefficient": 0.3, "direction": "forward"}))
    assert (taught.distill, taught.direction) == (0.3, forward)
    assert choices.objective_of(recipe(**TAUGHT)).direction is reverse
