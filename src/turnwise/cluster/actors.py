"""Ranks as actors of a Ray cluster."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from turnwise.cluster.placement import Site
from turnwise.cluster.rank import MakeLearner, Place, Rank, join
from turnwise.schedule.stopping import LearnerLost
from turnwise.weights.object_store import StoredWeights


class RankActor:
    """A process of the cluster with a `Rank` in it."""

    rank: Rank

    def meeting(self) -> str:
        """Where the ranks can meet: at this one's node."""
        import ray

        with socket.socket() as found:
            found.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"

    def start(self, place: Place, make: MakeLearner) -> None:
        join(place)
        self.rank = Rank(place, make)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.rank, method)(*arguments)

    def publish(self) -> tuple[None, dict[str, NDArray[Any]] | None]:
        """(nothing, by which one sees that it is done, and the weights)."""
        return None, self.rank.publish()


class ActorRanks:
    """`Ranks` as actors at the places of a site, which is left as it is when they end."""

    def __init__(self, site: Site, make: MakeLearner, *, device: str, threads: int) -> None:
        import ray

        self.size = site.own.ranks
        actor = ray.remote(RankActor)
        self.actors = [actor.options(**site.options(site.of_ranks, rank)).remote() for rank in range(self.size)]
        place = Place(0, self.size, ray.get(self.actors[0].meeting.remote()), device, threads)
        made = ray.put(make)
        self.answers([a.start.remote(replace(place, rank=rank), made) for rank, a in enumerate(self.actors)])

    def call(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        return self.answers(
            [a.call.remote(method, *(x[rank] for x in arguments)) for rank, a in enumerate(self.actors)]
        )

    def publish(self) -> StoredWeights:
        """All weights, left where the first rank has put them."""
        asked = [actor.publish.options(num_returns=2).remote() for actor in self.actors]
        self.answers([done for done, _ in asked])
        return StoredWeights(asked[0][1])

    def answers(self, asked: list[Any]) -> list[Any]:
        """What every rank says, in whichever order they say it."""
        import ray
        from ray.exceptions import RayError

        if not asked:
            raise LearnerLost("the ranks of the learner have ended")
        found: dict[int, Any] = {}
        waiting = {reference: rank for rank, reference in enumerate(asked)}
        while waiting:
            [done], _ = ray.wait(list(waiting), num_returns=1)
            rank = waiting.pop(done)
            try:
                found[rank] = ray.get(done)
            except RayError as error:
                self.close()
                raise LearnerLost.by(rank, str(error)) from None
        return [found[rank] for rank in range(len(asked))]

    def close(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
