import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.rollout.limits import Limits


@pytest.mark.parametrize(
    ("prompt", "context", "room"),
    [
        (1, 1000, 50),
        (100, 1000, 20),  # what is left of the trajectory
        (101, 1000, 0),
        (80, 1000, 40),
        (80, 95, 15),  # what is left of the context
        (80, 80, 0),
        (80, 70, 0),
    ],
)
def test_room_for_an_action(prompt, context, room):
    bounds = Limits(max_turns=1, max_prompt_tokens=100, max_action_tokens=50, max_trajectory_tokens=120)
    assert bounds.room_for_action(prompt, context) == room


@given(*(st.integers(1, 60),) * 5)
def test_room_is_the_most_that_every_limit_allows(max_prompt, max_action, max_trajectory, prompt, context):
    room = Limits(1, max_prompt, max_action, max_trajectory).room_for_action(prompt, context)

    def allowed(size):
        whole = prompt + size
        return prompt <= max_prompt and size <= max_action and whole <= max_trajectory and whole <= context

    assert room >= 0
    assert not allowed(room + 1)
    assert room == 0 or allowed(room)
