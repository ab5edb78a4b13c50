"""How near is the gradient of one step to the true one, by the estimator that gave the credit?

    python benchmarks/which_gradient.py [--data benchmarks/data/which-gradient.jsonl] [--draws 30] [--only-report]

Explains what which_credit.py finds. On each of its walks a policy is trained for a third of a run (credit gae, a pilot
seed) and then stays as it is; a critic learns from it for as many steps, paid as the attempts are. Steps of attempts
are drawn, and for each the gradient by every estimator is computed. The true gradient is taken to be the mean over ten
times as many other steps by rloo, which is unbiased. Printed are the cosine of a step's gradient with it, and that of
the mean over all steps: the first falls with the noise, the second with the bias.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matrix import Cell, Trainer, finished, flat, make, recipe_of
from torch import Tensor
from walk import Played, Policy, World, groups_of, play, ways_of
from which_credit import ESTIMATORS, GROUPS, PAYS, PILOTS, STEPS, TOTALS, WORLDS

from turnwise.types import Group

DATA = Path(__file__).parent / "data" / "which-gradient.jsonl"
Attempts = tuple[tuple[Group, ...], Played]


def steps_of(world: World, policy: Policy, draws: int, first: int) -> Iterator[Attempts]:
    """The attempts of some steps; those with another `first` are others."""
    for number in range(draws):
        random = np.random.default_rng([PILOTS[0], first + number])
        played = play(world, policy, ways_of(world, GROUPS[world.turns], random).repeat(8, 0), random)
        yield groups_of(world, played, 0, 8), played


def trainer_of(world: World, estimator: str, rate: float = 1e-2) -> Trainer:
    groups = (f"groups_per_step={GROUPS[world.turns]}", f"groups_per_update={GROUPS[world.turns] // 2}")
    rates = [f"optimizer.learning_rate={rate}"]
    if estimator == "gae":
        rates.append("critic.optimizer.learning_rate=1e-2")
    settings = (f"credit.name={estimator}", *ESTIMATORS[estimator], f"steps={STEPS}", *groups, *rates)
    return Trainer(recipe_of(*settings), world, PILOTS[0])


@cache
def on_the_way(world: World) -> Trainer:
    """A policy a third of the way, and a critic of it."""
    trainer = trainer_of(replace(world, pay="turns"), "gae")
    for number in range(STEPS // 3):
        for groups, played in steps_of(replace(world, pay="turns"), trainer.snapshot(number), 1, number):
            trainer.step(groups, played)
    of_critic = trainer_of(world, "gae", rate=1e-12)
    of_critic.policy.load_state_dict(trainer.policy.state_dict())
    for groups, played in steps_of(world, of_critic.snapshot(0), STEPS // 3, STEPS):
        of_critic.step(groups, played)
    trainer.critic = of_critic.critic
    return trainer


def gradient_of(trainer: Trainer, groups: Sequence[Group], played: Played) -> Tensor:
    """That of one update on all attempts."""
    lived = played.lived
    prompts, words = torch.from_numpy(played.prompts[lived]), torch.from_numpy(played.words[lived])
    values = {"values": list(trainer.values(prompts, words).detach().numpy())}
    credit = flat(trainer.estimate(groups, values))
    now, entropies = trainer.logprobs(prompts, words)
    old = flat(list(played.logprobs[lived]))
    terms, _ = trainer.objective(now.flatten(), entropies.flatten(), old, credit, None)
    trainer.stepper.clear()
    (terms * flat(trainer.weigh(groups))).sum().backward()
    found = [one.grad.flatten() for one in trainer.policy.parameters() if one.grad is not None]
    return torch.cat(found)


@cache
def truth(world: World, draws: int) -> Tensor:
    return torch.stack(list(gradients(world, "rloo", 10 * draws, 1 << 20))).mean(0)


def gradients(world: World, estimator: str, draws: int, first: int) -> Iterator[Tensor]:
    between, trainer = on_the_way(world), trainer_of(world, estimator)
    trainer.policy.load_state_dict(between.policy.state_dict())
    trainer.critic.load_state_dict(between.critic.state_dict())
    for groups, played in steps_of(world, between.snapshot(0), draws, first):
        yield gradient_of(trainer, groups, played)


def run_cell(cell: Cell) -> dict[str, Any]:
    began = time.process_time()
    world = replace(WORLDS[cell["world"]], pay=cell["pay"])
    found = torch.stack(list(gradients(world, cell["estimator"], cell["draws"], 1 << 10)))
    right = truth(replace(world, pay="turns"), cell["draws"])
    cosines = torch.cosine_similarity(found, right[None]).tolist()
    mean = float(torch.cosine_similarity(found.mean(0), right, dim=0))
    return {"step": statistics.fmean(cosines), "mean": mean, "cpu_seconds": time.process_time() - began}


def cells(draws: int) -> list[Cell]:
    return [
        {"world": world, "pay": pay, "estimator": name, "draws": draws}
        for world in WORLDS
        for pay in PAYS
        for name in ESTIMATORS
        if pay == "turns" or name not in TOTALS
    ]


def report(runs: Sequence[Mapping[str, Any]]) -> None:
    found = {(run["cell"]["world"], run["cell"]["pay"], run["cell"]["estimator"]): run for run in runs}
    print("cosine with the true gradient: of one step's, of the mean over all steps")
    for world in WORLDS:
        print(f"\n{world:28} paid by turn     paid at the end")
        for name in ESTIMATORS:
            line = [found.get((world, "turns" if name in TOTALS else pay, name)) for pay in PAYS]
            print(f"{name:28} {'     '.join(map(cosines, line))}")


def cosines(run: Mapping[str, Any] | None) -> str:
    return f"{run['step']:.3f} {run['mean']:.3f}" if run else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="what was measured, as JSON lines")
    parser.add_argument("--draws", type=int, default=30, help="steps of attempts for each estimator")
    parser.add_argument("--only-report", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if not chosen.only_report:
        make(cells(chosen.draws), chosen.data, run_cell)
    report(finished(chosen.data))


if __name__ == "__main__":
    main()
