"""verl: the rows of verl's Parquet files as tasks, with one answer that is scored by the row's ground truth."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn

from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.types import Task

LONGEST = 1 << 16
"""Characters of an answer that are scored: its end, where answers are."""
AFTER_HASHES = re.compile(r"####\s*(-?[0-9][0-9.,]*)")
NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+")
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ARTICLES = re.compile(r"\b(a|an|the)\b")
ROLES = ("system", "user", "assistant")


class Verl:
    """An attempt at a row: its prompt, one answer, and a score.

    Example:
        user: How many legs do 3 cats have? Output the final answer after "####".
        assistant: 3 * 4 = 12. #### 12      -> outcome 1
    """

    task_fields: ClassVar[dict[str, Any]] = {"prompt": list[dict[str, Any]] | str, "reward_model": dict[str, Any]}

    def __init__(self, scorer: str = "auto") -> None:
        """scorer: how an answer is scored. "gsm8k" compares the number after ####, "boxed" what \\boxed{} holds,
        "number" the last number, "search" what <answer> holds with any of the targets, "exact" the whole answer; "auto"
        chooses by the row's data_source; "module:function" names a function with the parameters of verl's
        compute_score: data_source, solution_str, ground_truth, extra_info."""
        self.scorer = scorer
        self.function = None if scorer in (*SCORERS, "auto") else function_named(scorer)

    @staticmethod
    def tasks(split: str, seed: int) -> Iterator[Task]:
        raise ValueError(
            'verl has no tasks of its own; set env.data = "train.parquet" and env.heldout = "test.parquet"'
        )

    async def open(self, task: Task) -> Reply:
        self.task = task
        if self.function is None:
            source = str(task.data.get("data_source", ""))
            self.rule = SCORERS[scorer_for(source) if self.scorer == "auto" else self.scorer]
        return Reply(prompt_of(task.data["prompt"]))

    async def step(self, message: Message) -> Reply:
        paid = await asyncio.to_thread(self.score, message.content)
        return Reply(finished=True, **paid)

    async def close(self) -> None:
        return None

    def score(self, answer: str) -> dict[str, Any]:
        """What an answer is paid, and named parts of it."""
        data = self.task.data
        model, source = data["reward_model"], str(data.get("data_source", ""))
        if self.function is None:
            return {"outcome": self.rule(answer[-LONGEST:], model.get("ground_truth"))}
        found = self.function(
            data_source=source,
            solution_str=answer,
            ground_truth=model.get("ground_truth"),
            extra_info=data.get("extra_info") or {},
        )
        if isinstance(found, Mapping):
            marks = {str(k): float(v) for k, v in found.items() if isinstance(v, (bool, int, float)) and k != "score"}
            finite = {name: value for name, value in marks.items() if math.isfinite(value)}
            return {"outcome": float(found["score"]), "marks": finite}
        return {"outcome": float(found[0] if isinstance(found, (list, tuple)) else found)}


def prompt_of(prompt: Any) -> tuple[Message, ...]:
    """The messages of a row's prompt; a text is the user's question."""
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    messages = []
    for entry in prompt:
        role, content = entry.get("role"), entry.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(f"prompt: a message has a role ({', '.join(ROLES)}) and text; images cannot be read")
        messages.append(Message(role, content))
    return tuple(messages)


def function_named(name: str) -> Callable[..., Any]:
    """The user's function of a name."""
    module, colon, attribute = name.partition(":")
    if not colon:
        unknown(name)
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f'scorer = "{name}": {error}; is the module on PYTHONPATH?') from None
    if inspect.iscoroutinefunction(function) or not callable(function):
        raise ValueError(f'scorer = "{name}" needs to be a plain function')
    return function  # type: ignore[no-any-return]


def unknown(name: str) -> NoReturn:
    raise ValueError(f'scorer = "{name}" is unknown; choose auto, {", ".join(SCORERS)}, or write "module:function"')


# ---------------------------------------------------------------- scorers


def scorer_for(source: str) -> str:
    """The scorer for a data source, by the names that verl uses."""
    if source == "openai/gsm8k":
        return "gsm8k"
    if source.startswith("searchR1_"):
        return "search"
    if source.startswith(("math", "aime", "lighteval/MATH", "DigitalLearningGmbH/MATH", "HuggingFaceH4/MATH")):
        return "boxed"
    raise ValueError(
        f"no scorer is known for data_source {source[:80]!a}; set env.settings.scorer to one of "
        f'{", ".join(SCORERS)}, or to "module:function"'
    )


def score_gsm8k(answer: str, truth: Any) -> float:
    """1 if the last number after #### is the truth."""
    found = AFTER_HASHES.findall(answer)
    return float(bool(found) and plain_number(found[-1]) == plain_number(str(truth)))


def score_number(answer: str, truth: Any) -> float:
    """1 if the last number of the answer is the truth."""
    found = NUMBER.findall(answer)
    return float(bool(found) and plain_number(found[-1]) == plain_number(str(truth)))


def score_boxed(answer: str, truth: Any) -> float:
    """1 if the last \\boxed{} holds the truth; spaces, $ and the size of brackets do not count."""
    found = last_boxed(answer)
    return float(found is not None and plain_math(found) == plain_math(str(truth)))


def score_search(answer: str, truth: Any) -> float:
    """1 if the last <answer> is one of the targets; case, articles and punctuation do not count."""
    targets = truth.get("target", truth) if isinstance(truth, Mapping) else truth
    listed = [targets] if isinstance(targets, str) else list(targets or ())
    found = TAGGED.findall(answer)
    return float(bool(found) and plain_words(found[-1]) in {plain_words(str(target)) for target in listed})


def score_exact(answer: str, truth: Any) -> float:
    """1 if the whole answer is the truth, but for spaces around it."""
    return float(answer.strip() == str(truth).strip())


SCORERS: Mapping[str, Callable[[str, Any], float]] = {
    "gsm8k": score_gsm8k,
    "boxed": score_boxed,
    "number": score_number,
    "search": score_search,
    "exact": score_exact,
}


def plain_number(text: str) -> str:
    """A number without commas, and without a point or zeros at its end that say nothing."""
    text = text.strip().replace(",", "").replace("$", "").rstrip(".")
    return text.rstrip("0").rstrip(".") if "." in text else text


def plain_math(text: str) -> str:
    for word in ("\\left", "\\right", "\\!", "\\,", "\\;", "$", "\\$", "dfrac", "tfrac", " "):
        text = text.replace(word, "frac" if word in ("dfrac", "tfrac") else "")
    return plain_number(text)


def plain_words(text: str) -> str:
    kept = "".join(character for character in text.lower() if character.isalnum() or character.isspace())
    return " ".join(ARTICLES.sub(" ", kept).split())


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, with its own brackets; None where there is none or it does not end."""
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place]
    return None
