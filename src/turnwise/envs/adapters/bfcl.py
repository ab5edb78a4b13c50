"""bfcl: the multi-turn part of the Berkeley function calling leaderboard, with the tools it simulates.

A user asks several questions in order. The model calls functions until it sends a message without a call; then the
next question comes. At the end the library's checker compares the state of the tools with the state after the gold
calls. The checker evaluates calls as Python, so only calls of the offered functions with literal arguments reach it. It
keeps the tools in module globals under the name of the model, so each attempt has a unique model name and a process.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal
from uuid import uuid4

from turnwise.envs.adapters.adapter import Adapter, unknown
from turnwise.envs.base import Reply
from turnwise.envs.split import draw_tasks
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.types import Task

CATEGORIES = ("multi_turn_base", "multi_turn_long_context", "multi_turn_miss_func", "multi_turn_miss_param")
STEPS = 20
"""How many messages with calls the leaderboard allows per question."""
SYSTEM = """You are an expert in composing functions. You are given a question and a set of possible functions. Based \
on the question, make one or more function calls. Write them as
[first(name=value), second(name=value)]
and nothing else. You then see what they returned. Once you have no more functions to call, say so without a call.

The functions, in JSON:
{functions}"""
MORE = "I have updated some more functions you can choose from. What about now?"
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""The library's names of types, and their names in JSON schemas."""


class Bfcl(Adapter):
    """A conversation with a simulated user who has tools.

    Example:
        user: Move 'log.txt' into 'archive'      assistant: [mv(source='log.txt', destination='archive')]
        user: {"result": ...}                    assistant: done      -> outcome 1 after the last question
    """

    library = "bfcl_eval"
    install = "pip install --no-deps bfcl-eval==2026.3.23"
    example = "bfcl:multi_turn_base"

    def __init__(self, calls: Literal["python", "tools"] = "python") -> None:
        """calls: "python" writes calls as the leaderboard does, "tools" as the chat template and rollout.tools do."""
        self.calls = calls

    @classmethod
    def warm(cls) -> None:
        from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

        importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
        if cls.name in CATEGORIES:
            for tool in {tool for entry, _ in entries(cls.name).values() for tool in entry["involved_classes"]}:
                importlib.import_module(CLASS_FILE_PATH_MAPPING[tool])

    @classmethod
    def tasks(cls, split: str, seed: int, count: int = 0) -> Iterator[Task]:
        """Conversations of the category; count = 0 takes the whole split, shuffled by the seed."""
        names = list(entries(cls.name))
        order = draw_tasks(cls.name, split, count or len(names), seed, lambda random: {"entry": random.choice(names)})
        return order if count else until_exhausted(order)

    def check(self) -> None:
        if self.name not in CATEGORIES:
            raise unknown("bfcl has no multi-turn category", self.name, CATEGORIES)

    def open(self, task: Task) -> Reply:
        self.entry, self.truth = entries(self.name)[task.data["entry"]]
        self.model = f"turnwise{uuid4().hex}"
        self.questions = self.entry["question"]
        self.calls_made: list[list[list[str]]] = [[] for _ in self.questions]
        self.turn = 0
        held_back = {name for names in self.entry.get("missed_function", {}).values() for name in names}
        self.all_functions = functions_of(self.entry)
        self.functions = {name: doc for name, doc in self.all_functions.items() if name not in held_back}
        if self.calls == "tools":
            return Reply(tuple(self.question()), tools=tuple(map(tool_of, self.functions.values())))
        system = Message("system", SYSTEM.format(functions=json.dumps(list(self.functions.values()))))
        return Reply((system, *self.question()))

    def question(self) -> Iterator[Message]:
        """The next question of the user, with the functions that were held back until this question."""
        held_back = self.entry.get("missed_function", {}).get(str(self.turn), ())
        for name in held_back:
            self.functions[name] = self.all_functions[name]
        for message in self.questions[self.turn]:
            yield Message(message["role"], message["content"])
        if held_back:
            docs = "" if self.calls == "tools" else json.dumps([self.functions[name] for name in held_back]) + "\n"
            yield Message("user", docs + MORE)

    def step(self, message: Message) -> Reply:
        calls = (
            as_python(message.calls, self.functions) if message.calls else read_calls(message.content, self.functions)
        )
        if isinstance(calls, str):
            return Reply((Message("user", calls),))
        if calls and len(self.calls_made[self.turn]) < STEPS:
            self.calls_made[self.turn].append(calls)
            results = self.execute(calls)
            if message.calls:
                return Reply(tuple(Message("tool", text) for text in results))
            return Reply((Message("user", "\n".join(results)),))
        self.turn += 1
        if self.turn == len(self.questions):
            return self.judged()
        messages = tuple(self.question())
        tools = tuple(map(tool_of, self.functions.values())) if self.calls == "tools" else None
        return Reply(messages, tools=tools)

    def execute(self, calls: list[str]) -> list[str]:
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

        results, _ = execute_multi_turn_func_call(
            calls,
            self.entry["initial_config"],
            self.entry["involved_classes"],
            self.model,
            self.entry["id"],
            long_context="long_context" in self.name,
        )
        return [str(result) for result in results]

    def judged(self) -> Reply:
        """The library's verdict: the right state of the tools, the right results, and no call where none was needed."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import (
            multi_turn_checker,
            multi_turn_irrelevance_checker,
        )

        verdict = multi_turn_checker(self.calls_made, self.truth, self.entry, self.name, self.model)
        valid = verdict["valid"] and multi_turn_irrelevance_checker(self.calls_made, self.truth)["valid"]
        calls = sum(len(step) for turn in self.calls_made for step in turn)
        return Reply(finished=True, outcome=float(valid), marks={"calls": calls})

    def close(self) -> None:
        return None

    def demonstrate(self, noise: float, random: Random) -> str | Message:
        """The gold calls of the current question in one message; with probability `noise` one call is missing."""
        right = list(self.truth[self.turn])
        if not right or self.calls_made[self.turn]:
            return "done"
        if random.random() < noise:
            right.pop(random.randrange(len(right)))
        if self.calls == "python" or not right:
            return f"[{', '.join(right)}]" if right else "done"
        return Message("assistant", "", calls=tuple(call_of(text, self.functions) for text in right))


def until_exhausted(tasks: Iterator[Task]) -> Iterator[Task]:
    try:
        yield from tasks
    except ValueError:  # the whole split was drawn
        return


# ---------------------------------------------------------------- the library's data files


@cache
def entries(category: str) -> dict[str, tuple[dict[str, Any], list[list[str]]]]:
    """Conversations by id, each with its gold calls."""
    data = folder()
    truths = {row["id"]: row["ground_truth"] for row in rows(data / "possible_answer" / f"BFCL_v4_{category}.json")}
    return {row["id"]: (row, truths[row["id"]]) for row in rows(data / f"BFCL_v4_{category}.json")}


def functions_of(entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Descriptions of the functions that a conversation may use, by name."""
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

    docs: dict[str, dict[str, Any]] = {}
    for tool in entry["involved_classes"]:
        for doc in rows(folder() / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[tool]):
            if doc["name"] not in entry.get("excluded_function", ()):
                docs[doc["name"]] = doc
    return docs


def folder() -> Path:
    """The library's data, found without importing it."""
    spec = importlib.util.find_spec("bfcl_eval")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


# ---------------------------------------------------------------- calls


def read_calls(text: str, functions: dict[str, Any]) -> list[str] | str:
    """The calls in a text that writes them as Python, each safe to evaluate. The list is empty if the text has no call.
    If the text has calls that cannot be parsed, returns an error message for the model instead."""
    start = text.strip()
    if not start.startswith("["):
        return []
    try:
        tree = ast.parse(start, mode="eval").body
        assert isinstance(tree, ast.List)
        return [checked_call(call, functions) for call in tree.elts]
    except ValueError as error:
        return str(error)
    except (SyntaxError, AssertionError, RecursionError, MemoryError):
        return "These calls cannot be read; write [first(name=value), second(name=value)]."


def checked_call(node: ast.expr, functions: dict[str, Any]) -> str:
    """A call as Python source, rebuilt from its name and its literal arguments; ValueError for anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("Write calls of functions and nothing else, like [first(name=value)].")
    if node.func.id not in functions:
        raise ValueError(f"There is no function {node.func.id}.")
    try:
        values = [repr(ast.literal_eval(value)) for value in node.args]
        values += [f"{one.arg}={ast.literal_eval(one.value)!r}" for one in node.keywords if one.arg is not None]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"The arguments of {node.func.id} must be plain values.") from None
    if any(one.arg is None for one in node.keywords):
        raise ValueError(f"The arguments of {node.func.id} must be named one by one.")
    return f"{node.func.id}({', '.join(values)})"


def as_python(calls: tuple[ToolCall, ...], functions: dict[str, Any]) -> list[str] | str:
    """Structured calls as Python source, or an error message for the model."""
    for call in calls:
        if call.name not in functions:
            return f"There is no function {call.name}."
        if not all(name.isidentifier() for name in call.arguments):
            return f"The arguments of {call.name} have impossible names."
    return [
        f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})" for call in calls
    ]


def call_of(text: str, functions: dict[str, Any]) -> ToolCall:
    """A call in Python source as a structured call; positional arguments get the names of the function's parameters."""
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    names = list(functions[node.func.id]["parameters"]["properties"])
    arguments = {name: ast.literal_eval(value) for name, value in zip(names, node.args, strict=False)}
    arguments |= {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
    return ToolCall(node.func.id, arguments)


def tool_of(doc: dict[str, Any]) -> ToolSpec:
    return ToolSpec(doc["name"], doc["description"], schema_of(doc["parameters"]))


def schema_of(value: Any) -> Any:
    """The library's description of parameters as a JSON schema."""
    if isinstance(value, dict):
        return {
            key: TYPES.get(inner, inner) if key == "type" and isinstance(inner, str) else schema_of(inner)
            for key, inner in value.items()
        }
    return [schema_of(inner) for inner in value] if isinstance(value, list) else value
