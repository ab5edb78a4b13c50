"""Writes docs/reference/python.md from the public names: python docs/make_python.py"""

from __future__ import annotations

import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

import turnwise

HEAD = """# Python interface

The names of `import turnwise as tw`. [The guide](../guides/python.md) shows them at work. Whatever is not here may
change without notice. This page is made by `python docs/make_python.py`.

| in signatures | means |
|---|---|
| GivenRecipe | a `Recipe`, a TOML file, or the name of a recipe that comes with turnwise |
| GivenEnvironment | a class, a function that makes one environment, a name as in recipes, or these by dataset |
| GivenTarget | a run, the folder of a run or of a model, or a recipe |
| GivenTasks | how many held-out tasks of each dataset, a list of `Task`, or a file of tasks |
| GivenModel | a folder that transformers can load, a run, a causal model of transformers, or "tiny" |
| GivenPrompt | a message of the user as text, a list of `Message`, or tokens |
| GivenCredit | an estimator by name or as a table, one array per turn, or a function of groups and scores |
| GivenLoss | a loss by name or as a table, or a function `(logprobs, old, advantages) -> (terms, measurements)` |
| OnStep, OnEvaluation, OnCheckpoint | a function of what happened that returns None or `STOP` |
"""
SECTIONS = {
    "Runs": "Recipe train train_async evaluate evaluate_async load_run RunRecord STOP RunStopped",
    "What callbacks get": "StepDone Evaluation Checkpoint Record",
    "Evaluations": "EvaluationReport",
    "The learner and the engine": "Learner Engine tiny_model Completion Sampling Renderer",
    "Environments": "Environment Reply draw_tasks",
    "Values": "Task Turn Trajectory Group Status StopReason Message ToolCall ToolSpec",
}
ONLY = {"Renderer": "first next said action encode decode", "Learner": "score update weights save load"}
"""By class: its public members, where it has others."""


def page() -> str:
    """All of it."""
    parts = [
        f"\n## {title}\n\n" + "\n\n".join(entry(name) for name in names.split()) + "\n"
        for title, names in SECTIONS.items()
    ]
    return tidy(HEAD + "".join(parts)).rstrip() + "\n"


def entry(name: str) -> str:
    """The section of one name: its signature, what it is, and its public members."""
    value = getattr(turnwise, name)
    if not callable(value):
        return f"### {name}\n\nReturn it from a callback, and the run stops after this moment, with a checkpoint.\n"
    shown = "" if is_plain(value) else signature_of(name, value)
    members = [member(*one) for one in members_of(value)] if inspect.isclass(value) else []
    return "\n".join([f"### {name}", "", *([shown] if shown else []), prose(value), "", *filter(None, members)])


def is_plain(value: Any) -> bool:
    """Whether nobody makes one by calling it."""
    return inspect.isclass(value) and (issubclass(value, (Enum, Exception)) or getattr(value, "_is_protocol", False))


def signature_of(name: str, value: Any) -> str:
    return f"```\ntw.{name}{folded(inspect.signature(value))}\n```\n"


def folded(signature: inspect.Signature) -> str:
    """A signature on one line, or with a line for each parameter."""
    text = plain(str(signature))
    if len(text) <= 100:
        return text
    parts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(plain(str(parameter)))
    back = plain(f" -> {signature.return_annotation}") if signature.return_annotation is not signature.empty else ""
    return "(\n" + "".join(f"    {part},\n" for part in parts) + ")" + back


def plain(text: str) -> str:
    """A part of a signature without quotes around types, and without values that have no name."""
    return re.sub(r"<factory>|<function .*?>+(?: at 0x\w+>)?", "...", text).replace("'", "")


def prose(value: Any) -> str:
    """The docstring without its example, as paragraphs."""
    text = inspect.getdoc(value) or ""
    before, _, example = text.partition("Example:")
    block = f"\n\n```\n{inspect.cleandoc(example)}\n```" if example.strip() else ""
    return before.strip() + block


def members_of(value: type) -> list[tuple[str, Any]]:
    """Public methods and properties of a class of ours, in the order they are written."""
    if issubclass(value, (Enum, Exception)):
        return []
    found = [(name, member) for name, member in vars(value).items() if not name.startswith("_")]
    offered = [
        (name, one) for name, one in found if isinstance(one, (property, classmethod)) or inspect.isfunction(one)
    ]
    public = ONLY.get(turnwise.CALLED.get(value.__name__, value.__name__), "").split()
    return [(name, one) for name, one in offered if not public or name in public]


def member(name: str, one: Any) -> str:
    """A line on a method or a property; nothing where it says nothing of itself."""
    inner = one.fget if isinstance(one, property) else one.__func__ if isinstance(one, classmethod) else one
    text = " ".join((inspect.getdoc(inner) or "").split())
    if not text:
        return ""
    call = "" if isinstance(one, property) else "(...)" if len(inspect.signature(inner).parameters) > 1 else "()"
    return f"* `{name}{call}`: {text}"


def tidy(text: str) -> str:
    """Without empty lines in a row, and with the public names of classes."""
    for inside, public in turnwise.CALLED.items():
        text = re.sub(rf"\b{inside}\b", public, text)
    return re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    Path(__file__).with_name("reference").joinpath("python.md").write_text(page())
