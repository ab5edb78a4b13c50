"""Engine replicas as actors of a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from turnwise.cluster.parcel import Parcel, opened
from turnwise.cluster.site import Site
from turnwise.engines.base import Completion, Engine, EngineFailure, Sampling, check_call
from turnwise.types import Tokens

MakeEngine = Callable[[], Engine]


class ReplicaActor:
    """A process of the cluster with an engine in it."""

    def __init__(self, make: MakeEngine) -> None:
        self.engine = make()

    async def context(self) -> int:
        return self.engine.context

    async def generate(self, prompt: Tokens, sampling: Sampling, session: str, seed: int) -> Completion:
        return await self.engine.generate(prompt, sampling, session=session, seed=seed)

    async def load(self, arrays: Mapping[str, np.ndarray], version: int) -> None:
        await self.engine.load(opened(arrays), version)

    async def call(self, method: str, *arguments: Any) -> None:
        await getattr(self.engine, method)(*arguments)


class Replica:
    """`Engine` in an actor. Whatever happens to its process is an EngineFailure of the calls it had."""

    shares_weights = False

    def __init__(self, actor: Any, name: str) -> None:
        import ray

        self.actor = actor
        self.name = name
        self.context: int = ray.get(actor.context.remote())

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        check_call(prompt, self.context, seed)
        asked = self.actor.generate.remote(np.asarray(prompt, np.int32), sampling, session, seed)
        try:
            completion: Completion = await self.answer(asked)
        except asyncio.CancelledError:
            self.actor.call.remote("abort", session)
            raise
        return completion

    async def abort(self, session: str) -> None:
        await self.answer(self.actor.call.remote("abort", session))

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        await self.answer(self.actor.load.remote(Parcel.of(weights).reference, version))

    async def forget(self) -> None:
        await self.answer(self.actor.call.remote("forget"))

    async def pause(self) -> None:
        await self.answer(self.actor.call.remote("pause"))

    async def resume(self) -> None:
        await self.answer(self.actor.call.remote("resume"))

    async def close(self) -> None:
        import ray

        ray.kill(self.actor)

    async def answer(self, asked: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            return await asked
        except RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, (EngineFailure, ValueError)) else EngineFailure(str(cause)) from None
        except RayError as error:
            raise EngineFailure(f"{self.name} is gone: {error}") from None


def open_replicas(site: Site, make: MakeEngine) -> list[Replica]:
    """An engine at every place of a site that is one for replicas."""
    import ray

    kind, made = ray.remote(ReplicaActor), ray.put(make)
    actors = []
    for place in range(site.own.replicas):
        # Calls wait in the engine, which knows best which of them to serve.
        options = {**site.options(site.of_replicas, place), "max_concurrency": 100_000}
        actors.append(kind.options(**options).remote(made))
    return [Replica(actor, f"engine replica {place}") for place, actor in enumerate(actors)]
