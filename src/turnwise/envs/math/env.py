"""math: problems of reasoning-gym, with a calculator and a sandboxed Python."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from random import Random
from typing import Any, ClassVar

from turnwise.envs.base import Reply
from turnwise.envs.math.calculator import calculate
from turnwise.envs.math.sandbox import Sandbox, check_sandbox
from turnwise.envs.split import draw_tasks
from turnwise.envs.tools import Tool, ToolEnvironment, ToolError, tool
from turnwise.messages import Message, ToolCall
from turnwise.types import Task

SYSTEM = "Solve the problem. Use the tools where you need them. Then say the result and nothing else."
SANDBOX = Sandbox(patience=60.0)
PROBLEMS = ("chain_sum", "gsm_symbolic")
RESULT = re.compile(r"####|\banswer\s*(?:is|:|=)+", re.IGNORECASE)
EQUATION = re.compile(r"(\d[\d\s.()]*(?:[-+*/×][\d\s.()]+)+)=\s*-?[\d.]*\d")


class Math(ToolEnvironment):
    """An attempt: a problem, a calculator, and Python.

    Example:
        user: State the final answer to the following arithmetic problem: 4 - 1 - 7 =
        assistant: calculator(expression="4 - 1 - 7")
        tool: -4
        assistant: -4      -> outcome 1
    """

    system = SYSTEM
    task_fields: ClassVar[dict[str, Any]] = {"problem": str, "seed": int}

    def __init__(self, python: bool = True, threshold: float = 1.0) -> None:
        """python: whether the model may run programs, in a sandbox. threshold: answers with at least this score are
        right; some generators give wrong answers a small score."""
        if not 0.0 < threshold <= 1.0:
            raise ValueError(f"threshold = {threshold}: must be above 0 and at most 1")
        self.has_python = python
        self.threshold = threshold

    @classmethod
    def check_settings(cls, **settings: Any) -> None:
        """Refuse a machine without a sandbox, before the run starts."""
        reasoning_gym()
        if cls(**settings).has_python:
            check_sandbox()

    @staticmethod
    def tasks(
        split: str,
        seed: int,
        count: int = 2048,
        problems: tuple[str, ...] = PROBLEMS,
        options: dict[str, dict[str, Any]] = {},  # noqa: B006
    ) -> Iterator[Task]:
        """Different problems of some generators. options: arguments of a generator, by its name. No training task asks
        a held-out problem, whatever the seed."""
        library = reasoning_gym()
        for name in (*problems, *options):
            if name not in library.factory.DATASETS:
                raise ValueError(
                    f"reasoning-gym has no {name}; there are {', '.join(sorted(library.factory.DATASETS))}"
                )
        if unused := [name for name in options if name not in problems]:
            raise ValueError(f"options.{unused[0]} is ignored: {unused[0]} is not among the problems; remove it")

        def draw(random: Random) -> dict[str, Any]:
            data: dict[str, Any] = {"problem": random.choice(problems), "seed": random.getrandbits(32)}
            if arguments := options.get(data["problem"]):
                data["options"] = arguments
            return {**data, "question": problem_of(data)[1]["question"]}

        def problem_and_question(data: Mapping[str, Any]) -> Any:
            return [data["problem"], data["question"]]

        return draw_tasks("math", split, count, seed, draw, problem_and_question, problem_and_question)

    def offered(self) -> dict[str, Tool]:
        return {name: each for name, each in self.tools().items() if self.has_python or name != "python"}

    async def open(self, task: Task) -> Reply:
        self.dataset, self.entry = problem_of(task.data)
        self.uses = 0
        self.expressions = expressions_of(self.entry)
        return await super().open(task)

    def question(self, task: Task) -> str:
        return str(self.entry["question"])

    def score(self, answer: str) -> float:
        """1 if the generator accepts the answer as right, else 0."""
        scored = float(self.dataset.score_answer(answer=result_in(answer), entry=self.entry))
        return float(scored >= self.threshold)

    async def step(self, message: Message) -> Reply:
        self.uses += len(message.calls)
        reply = await super().step(message)
        return Reply(finished=True, outcome=reply.outcome, marks={"uses": self.uses}) if reply.finished else reply

    @tool
    def calculator(self, expression: str) -> str:
        """The value of an arithmetic expression.

        Args:
            expression: For example 3 * (4 + 5) / 2.
        """
        try:
            return calculate(expression)
        except ValueError as error:
            raise ToolError(str(error)) from None

    @tool(seconds=120.0)
    def python(self, code: str) -> str:
        """Run a Python program and see what it prints. It has the standard library, no files and no network.

        Args:
            code: The program.
        """
        result = SANDBOX.run(code)
        return "\n".join(
            part for part in (result.output.rstrip("\n"), f"error: {result.why}" if result.why else "") if part
        ) or ("the program printed nothing")

    def demonstrate(self, noise: float, random: Random) -> Message:
        """A calculator call for each expression, then the result; with probability `noise` a wrong result."""
        right = str(self.entry["answer"])
        if random.random() < noise:
            return Message("assistant", str(random.randint(-99, 99)))
        if not self.expressions:
            return Message("assistant", right)
        return Message("assistant", "", calls=(ToolCall("calculator", {"expression": self.expressions.pop(0)}),))


@cache
def reasoning_gym() -> Any:
    """The library. It is imported late because the import takes seconds."""
    try:
        import reasoning_gym as library
    except ImportError:
        raise ValueError('the math environment needs reasoning-gym: pip install "turnwise[math]"') from None
    return library


def problem_of(data: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """(the generator, the problem that it makes from a seed)."""
    generator = reasoning_gym().create_dataset(data["problem"], size=1, seed=data["seed"], **data.get("options", {}))
    return generator, generator[0]


def result_in(answer: str) -> str:
    """The result in a message: the text after "the answer is" or ####, otherwise the whole message."""
    *before, last = RESULT.split(answer)
    result = last.strip().partition("\n")[0] if before else last
    return result.strip(" \n*$").removesuffix(".").rstrip()


def expressions_of(entry: Mapping[str, Any]) -> list[str]:
    """The expressions that an expert would calculate: the problem itself, or the equations of its solution."""
    metadata = entry["metadata"]
    if isinstance(metadata.get("expression"), str):
        return [metadata["expression"]]
    equations = (expression.strip() for expression in EQUATION.findall(str(metadata.get("answer_cot", ""))))
    return list(dict.fromkeys(equations))[:3]
