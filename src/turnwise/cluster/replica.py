"""Engine replicas as actors of a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from turnwise.cluster.placement import Site
from turnwise.engines.base import Completion, Engine, EngineFailure, Sampling, checked_prompt
from turnwise.engines.remote.router import Router
from turnwise.types import Tokens
from turnwise.weights.object_store import ObjectStore, Parcel, opened

MakeEngine = Callable[[], Engine]


class ReplicaActor:
    """A process of the cluster with an engine in it."""

    def __init__(self, make: MakeEngine) -> None:
        self.engine = make()

    async def check(self) -> float:
        return self.engine.seconds

    async def generate(self, prompt: Tokens, sampling: Sampling, session: str, seed: int) -> tuple[Completion, float]:
        completion = await self.engine.generate(prompt, sampling, session=session, seed=seed)
        return completion, self.engine.seconds

    async def load(self, arrays: Mapping[str, np.ndarray], version: int) -> None:
        await self.engine.load(opened(arrays), version)

    async def call(self, method: str, *arguments: Any) -> None:
        await getattr(self.engine, method)(*arguments)


class Replica:
    """`Engine` in an actor, which starts here. Whatever happens to its process is an EngineFailure of the calls it
    had."""

    shares_weights = False

    def __init__(self, site: Site, place: int, made: Any, *, context: int) -> None:
        """`made` refers to what makes the engine, in the object store."""
        import ray

        # Calls wait in the engine, which knows best which of them to serve.
        options = {**site.options(site.of_replicas, place), "max_concurrency": 100_000}
        self.actor = ray.remote(ReplicaActor).options(**options).remote(made)
        self.name = f"engine replica {place}"
        self.context = context
        self.seconds = 0.0
        """Seconds inside the model, as the actor said with its last completion or health check."""
        self.closed = False

    async def open(self) -> None:
        await self.answer(self.actor.call.remote("open"))

    async def check(self) -> None:
        self.seconds = max(self.seconds, await self.answer(self.actor.check.remote()))

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        tokens = checked_prompt(prompt, seed, context=self.context)
        asked = self.actor.generate.remote(tokens, sampling, session, seed)
        try:
            completion: Completion
            completion, seconds = await self.answer(asked)
        except asyncio.CancelledError:
            self.actor.call.remote("abort", session)
            raise
        self.seconds = max(self.seconds, seconds)
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

        if not self.closed:
            self.closed = True
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


def open_replicas(site: Site, make: MakeEngine, *, context: int) -> Router:
    """An engine at every place of a site that is one for replicas; one that dies is started again at its place."""
    import ray

    made = ray.put(make)
    return Router(lambda place: Replica(site, place, made, context=context), site.own.replicas, ObjectStore())
