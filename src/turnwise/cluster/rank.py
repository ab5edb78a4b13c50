"""A rank: one of the processes that share a learner. Each has a part of the weights and of the plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from turnwise.cluster.mesh import Mesh, MeshShape
from turnwise.cluster.spread import Spread
from turnwise.learn.learner import Learner
from turnwise.learn.objective import Objective
from turnwise.learn.perturbation import Change
from turnwise.learn.staged import Staged
from turnwise.plan.plan import Plan
from turnwise.pretrained import ChatTokenizer
from turnwise.weights.manifest import Outline
from turnwise.weights.object_store import stored_parts
from turnwise.weights.parted import write_parts
from turnwise.weights.share import WeightShare, whole_tensor
from turnwise.weights.vllm_native import NativeSender, Route

MakeLearner = Callable[[Spread], Learner]
"""(what loads models that are spread over ranks) -> a learner."""

Share = Mapping[int, NDArray[Any]]
"""Arrays by turn, for the turns of a mini-batch that one rank computes."""

NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class RankAddress:
    """The number of a rank, and the address where all ranks meet.

    Example:
        RankAddress(rank=1, ranks=4, meeting="tcp://10.0.0.7:29500")
    """

    rank: int
    ranks: int
    meeting: str
    device: str = "cpu"
    """Ranks on cpu communicate with gloo, ranks on cuda with NCCL."""
    threads: int = 1
    """CPU threads of this rank."""
    patience: float = 1800.0
    """Seconds that a rank waits for the others."""
    on_host: bool = False
    """Whether ranks on cuda also communicate with gloo what they have in the memory of the host."""

    @property
    def backend(self) -> str:
        if self.device != "cuda":
            return "gloo"
        return "cpu:gloo,cuda:nccl" if self.on_host else "nccl"


def join(address: RankAddress) -> None:
    """Join the process group; returns when all ranks have joined."""
    torch.set_num_threads(address.threads)
    # It warns where a weight is divided along two dimensions of the mesh, and is gathered along one after the other.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if address.device == "cuda":
        torch.cuda.set_device(address.rank % torch.cuda.device_count())
    dist.init_process_group(
        address.backend,
        init_method=address.meeting,
        rank=address.rank,
        world_size=address.ranks,
        timeout=timedelta(seconds=address.patience),
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Rank:
    """A learner whose policies are sharded over all ranks. Every method must be called on all ranks, in the same
    order."""

    def __init__(self, address: RankAddress, shape: MeshShape, make: MakeLearner) -> None:
        assert address.ranks == shape.ranks
        self.number = address.rank
        self.is_first = address.rank == 0
        self.learner = make(Spread(Mesh(shape, address.device)))
        self.sender: NativeSender | None = None
        """To a vLLM that gets weights by its own transfer."""
        self.staged: Staged | None = None
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.writers = dist.new_group(backend="gloo", timeout=timedelta(seconds=address.patience))
        """The group in which checkpoints are written, apart from that of training, which goes on meanwhile."""
        self.writing: Future[None] | None = None

    def score(self, plans: Sequence[Plan], num_turns: int, name: str) -> Share:
        return share_of(plans, self.learner.score(plans, num_turns, name))

    def update(
        self,
        plans: Sequence[Plan],
        num_turns: int,
        credit: Share,
        token_weights: Share,
        scores: Mapping[str, Share],
        objective: Objective,
    ) -> tuple[dict[str, float], Share]:
        """The metrics over all ranks, and the logprobs of this rank's turns."""
        scores_by_turn = {name: as_list(share, num_turns) for name, share in scores.items()}
        metrics, logprobs = self.learner.update(
            plans, as_list(credit, num_turns), as_list(token_weights, num_turns), scores_by_turn, objective
        )
        return metrics, share_of(plans, logprobs)

    def update_critic(
        self, plans: Sequence[Plan], num_turns: int, targets: Share, token_weights: Share, old: Share
    ) -> dict[str, float]:
        return self.learner.update_critic(
            plans, *(as_list(share, num_turns) for share in (targets, token_weights, old))
        )

    def count(self) -> tuple[dict[str, float], int]:
        """(seconds by stage, updates skipped in a row)."""
        return self.learner.seconds, self.learner.num_skipped_in_a_row

    def publish(self) -> dict[str, NDArray[Any]] | None:
        """All weights with merged adapters, gathered tensor by tensor; None on all ranks but the first. They are arrays
        because each tensor would need a file descriptor to get to another process."""
        weights = self.weights()
        return None if weights is None else arrays_of(self.learner.plain(weights))

    # ------------------------------------------------------------ what transports ask for

    def outline(self) -> Outline:
        """What weights there are."""
        return self.share().outline

    def write(self, path: Path) -> int:
        return write_parts(self.share(), path)

    def put(self, dtype: torch.dtype | None) -> Any:
        import ray

        return ray.put(stored_parts(self.share(), dtype))

    def send(self, route: Route, version: int) -> None:
        if self.sender is None or self.sender.route != route:
            self.sender = NativeSender(route, self.number, self.share())
        self.sender.send(self.share(), version)

    def share(self) -> WeightShare:
        """This rank's share of the weights as a model without adapters has them. Every rank computes all that adapters
        add to a weight and adds its own part of that: what a rank has is then the same, bit for bit, as if one process
        had merged the whole weight, and no weight but those of adapters travels between ranks."""
        adapters, parameters = self.learner.adapters, self.parameters()
        if adapters is None:
            return WeightShare(parameters)
        names = adapters.plain_names(parameters)

        def added(name: str) -> torch.Tensor | None:
            return adapters.added(names[name], lambda parameter: whole_tensor(parameters[parameter]))

        return WeightShare({name: parameters[own] for name, own in names.items()}, added)

    def parameters(self) -> dict[str, Any]:
        weights: dict[str, Any] = self.learner.policy.model.state_dict(keep_vars=True)
        return weights

    def disturb(self, change: Change) -> int:
        return self.learner.disturb(change)

    def undisturb(self) -> None:
        self.learner.undisturb()

    def release(self) -> None:
        self.learner.release()

    def gradients(self) -> dict[str, NDArray[Any]] | None:
        """The gathered gradient of the last update; None on all ranks but the first."""
        parameters = self.learner.policy.model.named_parameters()
        gradients = self.gathered(
            {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}
        )
        return None if gradients is None else arrays_of(gradients)

    def weights(self) -> dict[str, torch.Tensor] | None:
        return self.gathered(self.parameters())

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        gathered_by_id: dict[int, torch.Tensor] = {}  # tied weights are gathered once
        for tensor in tensors.values():
            if id(tensor) not in gathered_by_id:
                complete = whole_tensor(tensor)
                gathered_by_id[id(tensor)] = complete.cpu() if self.is_first else complete.new_empty(0)
        return {name: gathered_by_id[id(tensor)] for name, tensor in tensors.items()} if self.is_first else None

    def stage(self, tokenizer: ChatTokenizer) -> None:
        """Copy this rank's part of a checkpoint to host memory."""
        self.staged = self.learner.stage(tokenizer)

    def begin_write(self, folder: Path) -> None:
        """Begin to write what is staged, in a thread: the rank goes on meanwhile."""
        assert self.staged is not None
        self.writing = self.writer.submit(self.staged.write, folder, self.writers)
        self.staged = None

    def writing_result(self) -> tuple[bool, OSError | RuntimeError | None]:
        """(whether the writing has ended, what went wrong)."""
        assert self.writing is not None
        if not self.writing.done():
            return False, None
        error = self.writing.exception()
        if error is None or isinstance(error, OSError):
            return True, error
        return True, RuntimeError(str(error))  # of a type that every process knows

    def restore(self, folder: Path) -> None:
        self.learner.restore(folder)


def arrays_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def as_list(share: Share, num_turns: int) -> list[NDArray[Any]]:
    """One array per turn of the mini-batch, empty for turns of other ranks."""
    return [share.get(turn, NOTHING) for turn in range(num_turns)]


def share_of(plans: Sequence[Plan], per_turn: Sequence[NDArray[Any]]) -> dict[int, NDArray[Any]]:
    """The arrays of the turns of some plans."""
    return {turn: per_turn[turn] for plan in plans for turn in plan.turns.tolist()}
