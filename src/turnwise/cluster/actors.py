"""Ranks as actors of a Ray cluster."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from turnwise.cluster.life import TICK, Silence, silent_for
from turnwise.cluster.lost import why_lost
from turnwise.cluster.mesh import MeshShape
from turnwise.cluster.placement import Site
from turnwise.cluster.rank import MakeLearner, Rank, RankAddress, join
from turnwise.schedule.stopping import LearnerLost
from turnwise.weights.object_store import ObjectStore
from turnwise.weights.parted import PartedWeights

LIFE = "life"
"""The concurrency group of `RankActor.alive`, which has a thread of its own."""


class RankActor:
    """A process of the cluster that holds a `Rank`."""

    rank: Rank

    def meeting(self) -> str:
        """A free address on this actor's node, where the ranks can meet."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def gpus(self) -> list[str]:
        """The numbers of this actor's GPUs on its node."""
        import ray

        return [str(number) for number in ray.get_gpu_ids()]

    def start(self, address: RankAddress, shape: MeshShape, make: MakeLearner) -> None:
        join(address)
        self.rank = Rank(address, shape, make)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.rank, method)(*arguments)

    def alive(self) -> None:
        """Returns at once, also while a call is under way."""


class ActorRanks:
    """`Ranks` as actors on a site. The site stays open when they end."""

    def __init__(self, site: Site, make: MakeLearner, *, device: str, threads: int) -> None:
        import ray

        self.shape = MeshShape.of(site.config)
        size = self.shape.ranks
        actor = ray.remote(concurrency_groups={LIFE: 1})(RankActor)
        self.actors = [actor.options(**site.rank_options(rank)).remote() for rank in range(size)]
        self.silence = Silence(inf, ())  # a start may take any time
        self.asked: dict[int, Any] = {}
        """Ranks that were asked for a sign of life and have not answered."""
        site.rank_gpus = ray.get([actor.gpus.remote() for actor in self.actors])
        meeting = ray.get(self.actors[0].meeting.remote())
        address = RankAddress(0, size, meeting, device, threads, on_host=site.config.offload)
        make_reference = ray.put(make)
        self.answers(
            [
                a.start.remote(replace(address, rank=rank), self.shape, make_reference)
                for rank, a in enumerate(self.actors)
            ]
        )
        self.silence = Silence(site.config.answer_seconds, range(size))

    def call(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        return self.answers(
            [a.call.remote(method, *(x[rank] for x in arguments)) for rank, a in enumerate(self.actors)]
        )

    def read(self, weights: PartedWeights) -> Mapping[str, Any]:
        """Every rank puts its part into the object store."""
        return ObjectStore().publish(weights, 0)

    def answers(self, calls: list[Any]) -> list[Any]:
        """The answers of all ranks. They may arrive in any order."""
        import ray
        from ray.exceptions import RayError

        if not calls:
            raise LearnerLost("the ranks of the learner have ended")
        answers: dict[int, Any] = {}
        waiting = {reference: rank for rank, reference in enumerate(calls)}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=TICK)
            if not ready and (silent := self.silent(waiting.values())) is not None:
                self.close()
                raise LearnerLost.by(silent, silent_for(self.silence.limit))
            for done in ready:
                rank = waiting.pop(done)
                try:
                    answers[rank] = ray.get(done)
                except RayError as error:
                    self.close()
                    raise LearnerLost.by(rank, why_lost(error)) from None
        return [answers[rank] for rank in range(len(calls))]

    def silent(self, waiting: Collection[int]) -> int | None:
        """A rank among those waited for that has given no sign of life for too long. Each is asked again once it has
        answered; that of a dead one fails, as its call does."""
        import ray

        for rank in waiting:
            if rank not in self.asked:
                self.asked[rank] = self.actors[rank].alive.options(concurrency_group=LIFE).remote()
        answered, _ = ray.wait(list(self.asked.values()), num_returns=len(self.asked), timeout=0)
        heard = {rank for rank, question in self.asked.items() if question in answered}
        for rank in heard:
            del self.asked[rank]
        return self.silence.look(heard, waiting)

    def close(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
