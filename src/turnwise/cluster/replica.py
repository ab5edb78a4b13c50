"""Engine replicas as actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from turnwise.cluster.lost import why_lost
from turnwise.cluster.placement import Site
from turnwise.engines.base import Completion, Engine, EngineFailure, Sampling, can_sleep, checked_prompt
from turnwise.engines.remote.router import Router
from turnwise.tokens import Tokens
from turnwise.weights.manifest import Outline
from turnwise.weights.object_store import AssembledWeights, ObjectStore, StoredPart, StoredWeights

MakeEngine = Callable[[], Engine]


class ReplicaActor:
    """The actor: a process of the cluster with an engine."""

    def __init__(self, make: MakeEngine, gpus: Sequence[str] | None = None) -> None:
        if gpus is not None:  # which Ray counts for ranks; CUDA reads this when it is first used
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self.engine = make()

    async def check(self) -> float:
        return self.engine.seconds

    async def generate(self, prompt: Tokens, sampling: Sampling, session: str, seed: int) -> tuple[Completion, float]:
        completion = await self.engine.generate(prompt, sampling, session=session, seed=seed)
        return completion, self.engine.seconds

    async def load(self, outline: Outline, version: int, *stored: Sequence[StoredPart]) -> None:
        """Load weights from the parts that the processes of a learner have put into the object store."""
        await self.engine.load(AssembledWeights(outline, stored), version)

    async def open(self) -> None:
        await self.engine.open()

    async def sleep(self) -> None:
        if can_sleep(self.engine):
            await self.engine.sleep()

    async def abort(self, session: str) -> None:
        await self.engine.abort(session)

    async def forget(self) -> None:
        await self.engine.forget()

    async def pause(self) -> None:
        await self.engine.pause()

    async def resume(self) -> None:
        await self.engine.resume()


class RayReplica:
    """`Engine` in an actor that the constructor starts. If the actor's process dies, its calls fail with an
    EngineFailure."""

    shares_weights = False

    def __init__(self, site: Site, number: int, make_reference: Any, *, context: int, sleeps: bool = False) -> None:
        """`make_reference` refers to a `MakeEngine` in the object store; `sleeps`: whether that engine does."""
        import ray

        # Calls wait in the engine, which schedules them.
        options = {**site.replica_options(number), "max_concurrency": 100_000}
        self.actor = ray.remote(ReplicaActor).options(**options).remote(make_reference, site.shared_gpus(number))
        self.name = f"engine replica {number}"
        self.context = context
        self.sleeps = sleeps
        self.seconds = 0.0
        """Seconds inside the model, from the actor's last completion or health check."""
        self.closed = False

    async def open(self) -> None:
        await self.answer(self.actor.open.remote())

    async def check(self) -> None:
        self.seconds = max(self.seconds, await self.answer(self.actor.check.remote()))

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        tokens = checked_prompt(prompt, seed, context=self.context)
        call = self.actor.generate.remote(tokens, sampling, session, seed)
        try:
            completion: Completion
            completion, seconds = await self.answer(call)
        except asyncio.CancelledError:
            self.actor.abort.remote(session)
            raise
        self.seconds = max(self.seconds, seconds)
        return completion

    async def abort(self, session: str) -> None:
        await self.answer(self.actor.abort.remote(session))

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        put = ObjectStore().publish
        stored = weights if isinstance(weights, StoredWeights) else await asyncio.to_thread(put, weights, version)
        await self.answer(self.actor.load.remote(stored.outline, version, *stored.references))

    async def sleep(self) -> None:
        await self.answer(self.actor.sleep.remote())

    async def forget(self) -> None:
        await self.answer(self.actor.forget.remote())

    async def pause(self) -> None:
        await self.answer(self.actor.pause.remote())

    async def resume(self) -> None:
        await self.answer(self.actor.resume.remote())

    async def close(self) -> None:
        import ray

        if not self.closed:
            self.closed = True
            ray.kill(self.actor)

    async def answer(self, call: Any) -> Any:
        """The result of a call to the actor. Failures are raised as EngineFailure."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return await call
        except RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, (EngineFailure, ValueError)) else EngineFailure(str(cause)) from None
        except RayError as error:
            raise EngineFailure(f"{self.name} is gone: {why_lost(error)}") from None


def open_replicas(
    site: Site, make: MakeEngine, *, context: int, dtype: torch.dtype | None = None, sleeps: bool = False
) -> Router:
    """An engine over one replica at each replica placement of a site; a replica that dies is started again there. With
    a `dtype` weights travel in it."""
    import ray

    make_reference = ray.put(make)

    def start(number: int) -> RayReplica:
        return RayReplica(site, number, make_reference, context=context, sleeps=sleeps)

    seconds = site.config.answer_seconds
    return Router(start, site.config.replicas, ObjectStore(dtype), answer_seconds=seconds)
