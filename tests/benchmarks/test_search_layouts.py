"""The layouts of benchmarks/search_layouts.py: one gradient, and widths and tokens that are counted by hand."""

import numpy as np
import pytest

from support.acting import renderer
from support.scripts import scripts_by_name
from turnwise.learn.policy import Policy
from turnwise.messages import Message
from turnwise.types import Trajectory, Turn


@pytest.fixture(scope="module")
def modules():
    with scripts_by_name():
        import search_batches
        import search_layouts

        yield search_batches, search_layouts


def turn(prompt, action):
    size = len(action)
    said = Message("assistant", "go")
    return Turn(prompt, action, [-1.0] * size, [0] * size, "end_token", 0.0, said, (Message("user", "on"),))


def attempt(*actions):
    """Each turn's prompt is all before it and one token of an observation."""
    turns, text = [], [1, 2, 3]
    for action in actions:
        turns.append(turn(list(text), action))
        text += [*action, 9]
    return Trajectory(tuple(turns), "finished")


def groups():
    return [[attempt([4, 5], [6]), attempt([4, 5], [7, 8])], [attempt([5])]]


def test_tokens_are_counted_by_layout(modules):
    batches, _ = modules
    found = batches.measure(renderer(), groups())
    heard = len(renderer().encode("on"))
    assert found["width"]["observations"] == 6 + 2 + heard
    assert found["width"]["actions"] == 6 + 2
    assert found["width"]["trajectories"] == 3 + 5
    rows = {name: found["tokens"][name] for name in ("observations", "actions", "trajectories")}
    assert rows == {"observations": 5 * (8 + heard), "actions": 5 * 8, "trajectories": 3 * 8}
    assert found["tokens"]["packed"] == 5 + 7 + 5 + 8 + 4
    assert found["tokens"]["merged"] == 7 + 8 + 4
    assert found["tokens"]["tree"] == (3 + 2 + 1 + 1 + 2) + 4
    assert batches.unique_to(found["tokens"])["tree"] == 1.0


def test_every_layout_has_the_same_gradient(modules):
    batches, layouts = modules
    policy = Policy(layouts.make_model())
    widths = batches.sides(renderer(), groups())
    found = {}
    for name, (passes, share) in layouts.layouts(groups(), widths, policy).items():
        assert share == 1.0
        _, found[name] = layouts.timed(policy.model, passes, 1)
    norm = float(found["tree"].norm())
    assert norm > 0
    assert {name: float((one - found["tree"]).norm()) / norm < 1e-4 for name, one in found.items()} == dict.fromkeys(
        found, True
    )


def test_of_padded_rows_one_pass_is_computed(modules, monkeypatch):
    batches, layouts = modules
    widths = batches.sides(renderer(), groups())
    monkeypatch.setattr(layouts, "BUDGET", 2 * sum(widths["actions"]))
    found = layouts.layouts(groups(), widths, Policy(layouts.make_model()), whole=False)
    assert {name: share for name, (_, share) in found.items() if name not in ("observations", "trajectories")} == {
        "actions": 2 / 5,
        "packed": 1.0,
        "merged": 1.0,
        "tree": 1.0,
    }


def test_folded_attempts_have_tokens_of_the_small_vocabulary(modules):
    batches, _ = modules
    [[one]] = batches.folded([[attempt([100, 101], [102])]], 16)
    assert [np.asarray(turn.action).tolist() for turn in one.turns] == [[4, 5], [6]]
    assert one.turns[1].prompt.tolist() == [1, 2, 3, 4, 5, 9]
