"""A policy whose logprobs are numbers in a table, one leaf per turn, so that whole training steps can be compared in
float64 by their gradients with respect to logprobs. Everything else is the real thing: recipe, stages, learner, loop.
"""

import numpy as np
import torch

from support.making import make_turn
from turnwise.assemble import objective as choices
from turnwise.learn.learner import Learner
from turnwise.learn.stepper import OptimizerSettings
from turnwise.learn.ulysses import Alone
from turnwise.plan.pack import lay_out
from turnwise.recipe.parse import parse_recipe
from turnwise.schedule.take import Taken
from turnwise.training.loop import Settings, Stages, train_step
from turnwise.types import Group, Status, Task, Trajectory, turns_of

LIMIT = 10_000


class Table(torch.nn.Module):
    """One row of logprobs and entropies per turn."""

    def __init__(self, sizes, random, spread):
        super().__init__()
        self.rows = torch.nn.ParameterList(
            torch.nn.Parameter(torch.tensor(-1.0 + spread * random.standard_normal((2, size)))) for size in sizes
        )


class TablePolicy:
    """Looks a turn up by the first token of its prompt, which is its number."""

    device = "cpu"
    context = Alone()

    def __init__(self, model):
        self.model = model

    def passes(self, plan):
        roots = [plan.tokens[np.flatnonzero(plan.parent[: node + 1] < 0)[-1]] for node in plan.action_nodes]
        numbers = [roots[start] for start in plan.offsets[:-1]]
        rows = torch.cat([self.model.rows[number] for number in numbers], dim=1)
        yield plan.stretches[0].picked, rows[0], rows[1].square()

    def backward(self, total, is_last):
        total.backward()

    def tensor(self, array, dtype=None):
        return torch.as_tensor(array).to(dtype)


def random_groups(seed, *, max_groups=4):
    """Groups of ragged attempts, some cut short, some with empty turns; every turn's prompt begins with its number."""
    random = np.random.default_rng(seed)
    groups, number = [], 0
    for place in range(random.integers(1, max_groups + 1)):
        attempts = []
        for _ in range(random.integers(2, 5)):
            turns = []
            for size in random.integers(0, 5, random.integers(1, 5)):
                logprobs = np.minimum(-1.0 + 0.2 * random.standard_normal(size), 0.0)
                turns.append(
                    make_turn([number], range(1, size + 1), reward=random.integers(0, 3) / 4, logprobs=logprobs)
                )
                number += 1
            status = random.choice([Status.finished, Status.finished, Status.too_long])
            attempts.append(Trajectory(tuple(turns), Status(status), random.integers(0, 3) / 2))
        groups.append(Group(Task(f"task-{place}", "test"), tuple(attempts)))
    return groups


def recipe_of(estimator, loss, **changes):
    """A recipe; a loss may be given with its scope, as in "gspo/turn"."""
    name, _, scope = loss.partition("/")
    given = {"name": name, **({"scope": scope} if scope else {})}
    return parse_recipe({"env": {"name": "hops"}, "credit": {"name": estimator}, "loss": given, **changes}, "test")


def rows(turns, deal):
    """Plans of the turns that have actions, dealt into passes."""
    return [lay_out(turns, np.array(hand)) for hand in deal([i for i, turn in enumerate(turns) if len(turn.action)])]


def step(recipe, groups, deal, *, seed=0, updates=1, learning_rate=0.0):
    """(loss metrics, gradients of every turn's logprobs and entropies, table after the step) of one training step."""
    numbers = sorted((int(turn.prompt[0]), len(turn.action)) for turn in turns_of(groups))
    assert [number for number, _ in numbers] == list(range(len(numbers)))
    sizes, random = [size for _, size in numbers], np.random.default_rng(seed)
    table = Table(sizes, random, 0.3)
    others = {name: TablePolicy(Table(sizes, random, 0.3)) for name in ("reference", "teacher", "values")}
    learner = Learner(TablePolicy(table), OptimizerSettings(learning_rate, clip_norm=1e9), lambda update: 1.0, others)
    stages = Stages(
        make_group=None,
        keep=None,
        plan=lambda turns: rows(turns, deal),
        estimate=choices.estimate_of(recipe),
        correct=choices.correct_of(recipe),
        targets=None,
        weigh=choices.weighting_of(recipe),
        anchor=choices.ratio_of(recipe).compare,
        objective=choices.objective_of(recipe),
        run=None,
    )
    settings = Settings(
        steps=1,
        max_lag=0,
        groups_per_step=len(groups),
        groups_per_update=len(groups) // updates,
        epochs=1,
        anchor=choices.ratio_of(recipe).anchor,
        needs=choices.needs(recipe)
        | ({"old"} if updates > 1 and choices.ratio_of(recipe).anchor == "learner" else set()),
        success_at=1.0,
        max_nonfinite_updates=3,
        max_dropped_groups=1,
        order="started",
        slots=len(groups),
        stale="drop_group",
        patience=60.0,
        max_logprob_gap=LIMIT,
    )
    metrics, _ = train_step(settings, stages, learner, Taken(tuple(groups), ()), 1)
    gradients = [torch.zeros_like(row) if row.grad is None else row.grad.clone() for row in table.rows]
    told = ("loss", "entropy", "ratio", "clipped", "kl", "gradient_norm", "correction/mean")
    return (
        {name: metrics[name] for name in told if name in metrics},
        [gradient.numpy() for gradient in gradients],
        [row.detach().numpy().copy() for row in table.rows],
    )
