"""Which models play the seats of a recipe's games, and where that is refused."""

import pytest

from turnwise.assemble.environments import seats_of
from turnwise.assemble.opponents import check_opponents, opponents_of
from turnwise.recipe.parse import parse_recipe


def recipe(opponent, **changes):
    env = {"name": "textarena:Nim-v0", "settings": {"opponent": opponent}}
    return parse_recipe({"env": [env], **changes}, "test.toml")


@pytest.mark.parametrize(
    ("opponent", "seats", "opponents"),
    [
        ("random", {}, []),
        ("self", {"Nim-v0": ("policy", "policy")}, []),
        ("frozen", {"Nim-v0": ("policy", "frozen")}, ["frozen"]),
    ],
)
def test_seats_have_models(opponent, seats, opponents):
    assert seats_of(recipe(opponent)) == seats
    assert opponents_of(recipe(opponent)) == opponents
    check_opponents(recipe(opponent))


def test_a_frozen_opponent_needs_an_engine_of_this_process():
    with pytest.raises(ValueError, match='use engine.name = "slots" without engine.processes') as error:
        check_opponents(recipe("frozen", engine={"processes": 2}, max_lag=1))
    assert "\n" not in str(error.value)
    check_opponents(recipe("self", engine={"processes": 2}, max_lag=1))


def test_a_frozen_folder_has_to_be_there(tmp_path):
    with pytest.raises(ValueError, match="there is no model folder at"):
        check_opponents(recipe(f"frozen:{tmp_path / 'nothing'}"))
