"""Can bisection be found from random guesses at all? The game `guess` with the smallest policy there is.

    python benchmarks/guess_alone.py [--quick] [--seeds 0 1 2] [--cases NAME ...] [--json PATH]

Numbers up to 32, four guesses, demonstrations that guess at random within the bounds, as in
docs/explanation/learning.md, but without language: the policy sees the two bounds and the guesses that are left as
three embeddings and has two hidden layers. No prompt has to be read, no number spelled, no turn remembered, so what
fails here is credit, luck or exploration, and what works here and fails with a language model is not. A fifth of the
pairs of bounds is held out, as in the environment. Cases differ in the updates of the warm start, in credit and in the
number of attempts:

    grpo     an attempt's outcome against the mean of its group of 8, over its deviation, for all of its guesses
    critic   one-step advantages from a critic that sees the same state: no luck of later guesses

Printed are greedy and sampled success on held-out bounds, before and after so many attempts, and what guessing at
random within the bounds and bisection find there.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

HIGH, GUESSES, GROUP = 32, 4, 8
WIDTH = 192


@dataclass(frozen=True, slots=True)
class Case:
    warm_updates: int
    credit: str = "grpo"
    steps: int = 120
    attempts: int = 256
    """In a step."""


CASES = {
    "300 warm updates, grpo": Case(300),
    "60 warm updates, grpo": Case(60),
    "20 warm updates, grpo": Case(20),
    "300 warm updates, critic": Case(300, "critic"),
    "300 warm updates, grpo, four times the attempts": Case(300, steps=480),
}


class Network(nn.Module):
    """A function of the bounds and of the guesses that are left."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(HIGH + GUESSES + 2, 64)
        self.body = nn.Sequential(nn.Linear(3 * 64, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, state: Tensor) -> Tensor:  # [N, 3] -> [N, outputs]
        return self.head(self.body(self.embedding(state).flatten(1)))


@dataclass(frozen=True, slots=True)
class Guessed:
    """Attempts; every field is [attempts, guesses], and `made` says which guesses were made."""

    states: Tensor
    guesses: Tensor
    logprobs: Tensor
    made: Tensor
    hit: Tensor

    @property
    def outcomes(self) -> Tensor:
        return self.hit.any(1).float()


def is_heldout(low: Tensor, high: Tensor) -> Tensor:
    """A fifth of the pairs of bounds."""
    return (low * 7919 + high * 104729) % 5 == 0


def draw(count: int, random: torch.Generator, heldout: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(low, high, secret) of so many tasks."""
    pair = torch.rand(count * 12, HIGH, generator=random).topk(2, dim=1).indices + 1
    low, high = pair.min(1).values, pair.max(1).values
    chosen = is_heldout(low, high) == heldout
    low, high = low[chosen][:count], high[chosen][:count]
    secret = low + (torch.rand(len(low), generator=random) * (high - low + 1)).long()
    return low, high, torch.minimum(secret, high)


@torch.no_grad()
def play(choose: Any, low: Tensor, high: Tensor, secret: Tensor) -> Guessed:
    """Attempts in which choose(state) says the guesses and their logprobs."""
    going = torch.ones(len(low), dtype=torch.bool)
    rows: list[tuple[Tensor, ...]] = []
    for left in range(GUESSES, 0, -1):
        state = torch.stack([low, high, torch.full_like(low, HIGH + left)], 1)
        guess, logprob = choose(state)
        hit = going & (guess == secret)
        rows.append((state, guess, logprob, going, hit))
        going = going & ~hit
        low = torch.where(going & (guess < secret), torch.maximum(low, guess + 1), low)
        high = torch.where(going & (guess > secret), torch.minimum(high, guess - 1), high)
    return Guessed(*(torch.stack(column, 1) for column in zip(*rows, strict=True)))


def at_random(state: Tensor) -> tuple[Tensor, Tensor]:
    low, high = state[:, 0], state[:, 1]
    guess = low + (torch.rand(len(low)) * (high - low + 1)).long()
    return torch.minimum(guess, high), torch.zeros(len(low))


def in_the_middle(state: Tensor) -> tuple[Tensor, Tensor]:
    return (state[:, 0] + state[:, 1]) // 2, torch.zeros(len(state))


def sampled(policy: Network) -> Any:
    def choose(state: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = functional.log_softmax(policy(state), -1)
        guess = torch.multinomial(logprobs.exp(), 1)
        return guess[:, 0], logprobs.gather(1, guess)[:, 0]

    return choose


def greedy(policy: Network) -> Any:
    return lambda state: (policy(state).argmax(-1), torch.zeros(len(state)))


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def imitate(policy: Network, updates: int, random: torch.Generator) -> None:
    """Learn from 32 random attempts an update."""
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for update in range(updates):
        shown = play(at_random, *draw(32, random, heldout=False))
        loss = functional.cross_entropy(policy(shown.states[shown.made]), shown.guesses[shown.made])
        take_step(optimizer, loss, 3e-3 * 0.5 * (1 + np.cos(np.pi * update / updates)))


def advantages_of(made: Guessed, critic: Network, optimizer: torch.optim.Optimizer, credit: str) -> Tensor:
    """[attempts, guesses]; the critic, where there is one, learns from the same attempts."""
    if credit == "grpo":
        outcomes = made.outcomes.reshape(-1, GROUP)
        deviation = outcomes.std(1, unbiased=False, keepdim=True)
        return ((outcomes - outcomes.mean(1, keepdim=True)) / (deviation + 1e-6)).reshape(-1, 1).expand(-1, GUESSES)
    values = critic(made.states.flatten(0, 1)).reshape(-1, GUESSES)
    known = values.detach() * made.made
    target = made.hit.float() + torch.cat([known[:, 1:], torch.zeros(len(known), 1)], 1)
    take_step(optimizer, (values - target)[made.made].square().mean(), 1e-3)
    advantages = target - known
    return (advantages - advantages[made.made].mean()) / advantages[made.made].std()


def train(case: Case, seed: int) -> dict[str, Any]:
    """The figures of a seed."""
    torch.manual_seed(seed)
    random, began = torch.Generator().manual_seed(seed), time.process_time()
    tasks = draw(1000, torch.Generator().manual_seed(12345), heldout=True)
    policy = Network(HIGH + 1)
    imitate(policy, case.warm_updates, random)

    def success() -> dict[str, float]:
        return {
            name: float(play(make(policy), *tasks).outcomes.mean())
            for name, make in (("greedy", greedy), ("sampled", sampled))
        }

    found: dict[str, Any] = {"before": success()}
    critic = copy.deepcopy(policy)
    critic.head = nn.Linear(WIDTH, 1)
    optimizer, of_critic = (torch.optim.AdamW(each.parameters(), weight_decay=0.0) for each in (policy, critic))
    for step in range(case.steps):
        drawn = draw(case.attempts // GROUP, random, heldout=False)
        made = play(sampled(policy), *(part.repeat_interleave(GROUP) for part in drawn))
        advantages = advantages_of(made, critic, of_critic, case.credit)
        logprobs = functional.log_softmax(policy(made.states.flatten(0, 1)), -1)
        now = logprobs.gather(1, made.guesses.flatten()[:, None]).reshape(-1, GUESSES)
        ratio = (now - made.logprobs).exp()  # 1: there is one update a step
        take_step(optimizer, -(ratio * advantages)[made.made].mean(), 1e-3 * (1 - step / case.steps))
    found |= {"after": success(), "attempts": case.steps * case.attempts, "cpu_seconds": time.process_time() - began}
    for name, choose in (("random", at_random), ("bisection", in_the_middle)):
        found[name] = float(play(choose, *tasks).outcomes.mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="one seed and few updates: shows that it runs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, list[dict[str, Any]]] = {}
    for name in chosen.cases:
        case = Case(5, CASES[name].credit, steps=3) if chosen.quick else CASES[name]
        print(name, flush=True)
        for seed in chosen.seeds[:1] if chosen.quick else chosen.seeds:
            found = train(case, seed)
            runs.setdefault(name, []).append(found)
            before, after = found["before"], found["after"]
            print(
                f"  seed {seed}: greedy {before['greedy']:.3f} -> {after['greedy']:.3f}, sampled "
                f"{before['sampled']:.3f} -> {after['sampled']:.3f}; {found['attempts']:,} attempts, "
                f"{found['cpu_seconds']:.0f} CPU seconds; at random {found['random']:.3f}, bisection "
                f"{found['bisection']:.3f}",
                flush=True,
            )
    if chosen.json:
        chosen.json.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
