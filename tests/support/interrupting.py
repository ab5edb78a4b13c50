"""Runs that an error or a Ctrl-C ends at a chosen moment."""

import asyncio

from support.running import SilentScreen
from turnwise.assemble import run as assembly
from turnwise.assemble.run import training
from turnwise.evaluation.evaluator import Evaluator
from turnwise.training.run import Run
from turnwise.training.weight_check import WeightCheck

MOMENTS = {
    "engines open": (assembly, "opened"),
    "weights are checked": (WeightCheck, "begin"),
    "first evaluation": (Evaluator, "evaluate_together"),
    "training": (Run, "after"),
    "closing": (Evaluator, "stop"),
}
"""What is called at each of them."""
SMALL = ["sft.updates=0", "steps=1", "groups_per_step=1", "rollout.group_size=2", "evaluation.final_tasks=1"]


class Injected(Exception):
    """The error of this test."""


def break_at(monkeypatch, moment, how, look, calls):
    """Have the call of a moment fail, or be interrupted, once it has done its work. `calls` then has what `look` saw
    at that moment."""
    where, name = MOMENTS[moment]
    whole = getattr(where, name)

    def go_wrong():
        calls.append(look())
        if how == "error":
            raise Injected
        asyncio.current_task().cancel()

    async def later(*arguments, **named):
        result = await whole(*arguments, **named)
        if len(calls) == 0:
            go_wrong()
            await asyncio.sleep(0)
        return result

    class Opened:
        def __init__(self, engine):
            self.context = whole(engine)

        async def __aenter__(self):
            engine = await self.context.__aenter__()
            try:
                if len(calls) == 0:
                    go_wrong()
                    await asyncio.sleep(0)
            except BaseException as error:
                await self.context.__aexit__(type(error), error, error.__traceback__)
                raise
            return engine

        async def __aexit__(self, *error):
            return await self.context.__aexit__(*error)

    replacement = Opened if name == "opened" else later
    monkeypatch.setattr(where, name, replacement)


async def go(recipe):
    stop = asyncio.Event()
    async with training(recipe, SilentScreen(), stop) as run:
        return await run.to_end(stop)
