"""A taskset of verifiers for the tests: a number is guessed over several turns. Rows of another kind misbehave."""

import os
import time

import verifiers.v1 as vf


class Row(vf.TaskData):
    secret: int
    kind: str = "guess"


class Guess(vf.Task[Row]):
    @vf.reward(weight=2.0)
    async def found(self, trace: vf.Trace) -> float:
        if self.data.kind == "raise":
            raise ZeroDivisionError("no reward")
        if self.data.kind == "nan":
            return float("nan")
        return float(trace.last_reply == str(self.data.secret))

    @vf.reward(weight=-0.5)
    async def silence(self, trace: vf.Trace) -> float:
        return float(not trace.last_reply)

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @vf.metric
    async def odd(self, trace: vf.Trace) -> float:
        return float("nan")


class Rows(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        for place in range(60):
            secret = place % 50  # the last ten say what the first ten say
            prompt = f"Guess a number below 50. Hint {secret * 7919 % 50}."
            yield Guess(Row(prompt=prompt, system_prompt="You guess.", secret=secret), self.config.task)


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=6)


class Game(vf.Env[GameConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            heard = await talk.turn()
            misbehave(task.data.kind)
            while not heard.terminated and heard.last_reply != str(task.data.secret):
                number = int(heard.last_reply) if heard.last_reply.isdecimal() else -1
                heard = await talk.turn("higher" if number < task.data.secret else "lower")


def misbehave(kind):
    if kind == "print":
        print('{"id": 1, "answer": {"reward": 9.0, "marks": {}}}', flush=True)
        os.write(1, b"\xff\n{}\n")
    if kind == "exit":
        os._exit(3)
    if kind == "block":
        time.sleep(600)


__all__ = ["Game", "Rows"]
