"""A rank: one of the processes that hold a learner together, each with its part of the weights and of the plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh

from turnwise.cluster.shard import reduce_sums, shard, whole
from turnwise.learn.learner import Learner
from turnwise.learn.objective import Objective
from turnwise.learn.perturbation import Change
from turnwise.learn.policy import Policy
from turnwise.learn.stepper import Reduce
from turnwise.plan.plan import Plan
from turnwise.pretrained import ChatTokenizer

MakeLearner = Callable[[Callable[[Policy], Policy], Reduce], Learner]
"""(what is done with every policy once it is made, how sums are added up over ranks) -> a learner."""

Share = Mapping[int, NDArray[Any]]
"""Arrays of some turns of a mini-batch, by turn: those that a rank computes."""

NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank one is, and where all of them meet.

    Example:
        Place(rank=1, ranks=4, meeting="tcp://10.0.0.7:29500")
    """

    rank: int
    ranks: int
    meeting: str
    device: str = "cpu"
    """gloo carries what ranks on cpu say to each other, NCCL what those on cuda do."""
    threads: int = 1
    """CPU threads of this rank."""
    patience: float = 1800.0
    """Seconds after which a rank gives up waiting for the others."""


def join(place: Place) -> None:
    """Meet the other ranks; returns when all are there."""
    torch.set_num_threads(place.threads)
    if place.device == "cuda":
        torch.cuda.set_device(place.rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if place.device == "cuda" else "gloo",
        init_method=place.meeting,
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=place.patience),
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Rank:
    """A learner whose policies are spread over all ranks that have joined. Every method is called on all of them, in
    the same order."""

    def __init__(self, place: Place, make: MakeLearner) -> None:
        mesh = init_device_mesh(place.device, (place.ranks,))
        self.is_first = place.rank == 0
        self.learner = make(partial(shard, mesh=mesh), reduce_sums)

    def score(self, plans: Sequence[Plan], num_turns: int, name: str) -> Share:
        return share_of(plans, self.learner.score(plans, num_turns, name))

    def update(
        self,
        plans: Sequence[Plan],
        num_turns: int,
        credit: Share,
        weights: Share,
        scores: Mapping[str, Share],
        objective: Objective,
    ) -> tuple[dict[str, float], Share]:
        """The metrics of all ranks, and the logprobs of this one's turns."""
        told = {name: listed(share, num_turns) for name, share in scores.items()}
        metrics, logprobs = self.learner.update(
            plans, listed(credit, num_turns), listed(weights, num_turns), told, objective
        )
        return metrics, share_of(plans, logprobs)

    def update_critic(
        self, plans: Sequence[Plan], num_turns: int, targets: Share, weights: Share, old: Share
    ) -> dict[str, float]:
        return self.learner.update_critic(plans, *(listed(share, num_turns) for share in (targets, weights, old)))

    def count(self) -> tuple[dict[str, float], int]:
        """(seconds by stage, updates skipped in a row)."""
        return self.learner.seconds, self.learner.num_skipped_in_a_row

    def publish(self) -> dict[str, NDArray[Any]] | None:
        """All weights, gathered tensor by tensor, adapters added to them; on the first rank only. As arrays: tensors
        would go to another process by a file descriptor each."""
        weights = self.weights()
        return None if weights is None else arrays_of(self.learner.plain(weights))

    def disturb(self, change: Change) -> int:
        return self.learner.disturb(change)

    def undisturb(self) -> None:
        self.learner.undisturb()

    def gradients(self) -> dict[str, NDArray[Any]] | None:
        """The gradient of the last update, gathered; on the first rank only."""
        found = self.learner.policy.model.named_parameters()
        whole_ones = self.gathered({name: p.grad for name, p in found if p.grad is not None})
        return None if whole_ones is None else arrays_of(whole_ones)

    def weights(self) -> dict[str, torch.Tensor] | None:
        return self.gathered(self.learner.policy.model.state_dict(keep_vars=True))

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        seen: dict[int, torch.Tensor] = {}  # tied weights are gathered once
        for tensor in tensors.values():
            if id(tensor) not in seen:
                complete = whole(tensor)
                seen[id(tensor)] = complete.cpu() if self.is_first else complete.new_empty(0)
        return {name: seen[id(tensor)] for name, tensor in tensors.items()} if self.is_first else None

    def save(self, folder: Path, tokenizer: ChatTokenizer) -> None:
        """A checkpoint like that of any learner: the first rank writes the weights, and each its part of the rest."""
        weights = self.weights()
        if weights is not None:
            self.learner.save_weights(folder, tokenizer, weights)
        self.learner.save_state(folder)

    def restore(self, folder: Path) -> None:
        self.learner.restore(folder)


def arrays_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def listed(share: Share, num_turns: int) -> list[NDArray[Any]]:
    """One array per turn of the mini-batch, nothing for those that other ranks compute."""
    return [share.get(turn, NOTHING) for turn in range(num_turns)]


def share_of(plans: Sequence[Plan], per_turn: Sequence[NDArray[Any]]) -> dict[int, NDArray[Any]]:
    """What belongs to the turns of some plans."""
    return {turn: per_turn[turn] for plan in plans for turn in plan.turns.tolist()}
