"""Settings of weights and of engines' processes that would be ignored are refused."""

import pytest

from turnwise.recipe.parse import parse_recipe

ENV = {"name": "hops"}


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ({"weight_check": {"every": 5}}, "weight_check.every is ignored with max_lag = 0"),
        ({"engine": {"name": "vllm", "processes": 2}}, 'processes is ignored with name = "vllm"'),
        (
            {"engine": {"processes": 2}, "cluster": {"placement": "colocated"}},
            "engine.processes is ignored on a Ray cluster",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(recipe, reason):
    with pytest.raises(ValueError, match=reason):
        parse_recipe({"env": ENV, **recipe}, "test")


@pytest.mark.parametrize(
    ("recipe", "shared"),
    [
        ({}, True),
        ({"max_lag": 1}, False),
        ({"engine": {"processes": 1}}, False),
        ({"engine": {"name": "vllm"}}, False),
        ({"cluster": {"fsdp": 2}}, False),
    ],
)
def test_weights_are_shared_in_one_process_without_lag_only(recipe, shared):
    assert parse_recipe({"env": ENV, **recipe}, "test").engine_shares_weights is shared
