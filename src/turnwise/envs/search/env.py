"""search: answer questions of one to three hops with a search engine, in the way of Search-R1."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, ClassVar, Literal

from turnwise.data.factbook import FACTBOOK
from turnwise.envs.base import Reply
from turnwise.envs.search.questions import Question, read_atlas
from turnwise.envs.search.retrieval.corpus import corpus_file
from turnwise.envs.search.retrieval.server import LONGEST_QUERY, MOST_PASSAGES
from turnwise.envs.search.retrieval.service import Passage, SearchService, service_of
from turnwise.envs.split import SPLITS
from turnwise.messages import Message
from turnwise.types import Task

SYSTEM = (
    "Answer the question. Think inside <think> and </think>. Search by <search> query </search>; what is found comes "
    "between <information> and </information>. Search as often as you need. Then answer in a few words inside "
    "<answer> and </answer>, for example <answer> Paris </answer>."
)
INVALID = (
    "That was neither a search nor an answer. To search, put the query between <search> and </search>. To answer, put "
    "the answer between <answer> and </answer>."
)
COMMAND = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
ARTICLE = re.compile(r"\b(a|an|the)\b")
STOP = ("</search>", "</answer>")


class Search:
    """An attempt: a question, and a search engine over a corpus.

    Example:
        user: What is the internet country code of the country whose capital is Suva?
        assistant: <think>I need the country whose capital is Suva.</think><search>Capital Suva</search>
        user: <information>Doc 1(Title: "Fiji: Capital") name: Suva ...</information>
        assistant: ... <search>Fiji Internet country code</search>
        user: <information>Doc 1(Title: "Fiji: Internet country code") .fj ...</information>
        assistant: <think>It is .fj.</think><answer>.fj</answer>      -> outcome 1
    """

    idempotent = True
    """A failed search may be repeated: it changes nothing before its result arrives."""
    task_fields: ClassVar[dict[str, Any]] = {"question": str, "answers": list[str]}

    def __init__(
        self,
        topk: int = 3,
        characters: int = 2000,
        retriever: Literal["bm25", "dense"] = "bm25",
        corpus: str = FACTBOOK.name,
        url: str = "",
        found_reward: float = 0.0,
    ) -> None:
        """topk: passages per search. characters: the length of all of them together; each gets an equal share.
        retriever, corpus: for a server that the run starts. url: a server that already runs. found_reward: paid once
        for each step towards the answer that a search finds."""
        if not 1 <= topk <= MOST_PASSAGES or characters < topk:
            raise ValueError(
                f"topk = {topk} and characters = {characters}: set topk from 1 to {MOST_PASSAGES}, and at least one "
                "character for each passage"
            )
        if url and (retriever, corpus) != ("bm25", FACTBOOK.name):
            raise ValueError("retriever and corpus are settings of the server at url; remove them, or remove url")
        self.topk = topk
        self.characters = characters
        self.service: SearchService = service_of(url, "" if url else str(corpus_file(corpus)), retriever)
        self.found_reward = found_reward

    @classmethod
    def check_settings(cls, **settings: Any) -> None:
        """Refuse settings that an attempt could not use, before the run starts."""
        cls(**settings)

    @staticmethod
    def tasks(split: str, seed: int, count: int = 2048, hops: tuple[int, int] = (1, 3)) -> Iterator[Task]:
        """Different questions, at most `count`. Each number of hops between the two bounds is equally likely as long as
        it has questions left. No training question involves a country that a held-out question asks about."""
        low, high = hops
        if not 1 <= low <= high <= 3:
            raise ValueError(f"hops = {list(hops)}: write two bounds, 1 <= low <= high <= 3")
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}; choose one of {', '.join(SPLITS)}")
        random = Random(f"search/{split}/{seed}")
        atlas = read_atlas(FACTBOOK.located())
        stacks: list[list[Question]] = []
        for number in range(low, high + 1):
            stacks.append(list(atlas.questions(split, number)))
            random.shuffle(stacks[-1])
        for _ in range(min(count, sum(map(len, stacks)))):
            question = random.choice([stack for stack in stacks if stack]).pop()
            digest = hashlib.blake2b(question.text.encode(), digest_size=8).hexdigest()
            yield Task(f"search-{digest}", "search", question.to_json())

    def open(self, task: Task) -> Reply:
        self.question, self.answers, self.steps = read_task(task)
        self.searches = 0
        self.reached = 0
        self.queries: list[str] = []
        return Reply((Message("system", SYSTEM), Message("user", f"Question: {self.question}")), stop=STOP)

    @classmethod
    def step_many(cls, environments: Sequence[Search], messages: Sequence[Message]) -> list[Reply | Exception]:
        """One call per search engine for all environments that use it."""
        commands = [parse(message.content) for message in messages]
        by_service: dict[tuple[SearchService, int], list[int]] = {}
        for index, (verb, _) in enumerate(commands):
            if verb == "search":
                environment = environments[index]
                by_service.setdefault((environment.service, environment.topk), []).append(index)
        passages: dict[int, list[Passage] | Exception] = {}
        for (service, topk), indices in by_service.items():
            try:
                passages.update(
                    zip(indices, service.search([commands[index][1] for index in indices], topk), strict=True)
                )
            except (ConnectionError, ValueError) as error:
                passages.update(dict.fromkeys(indices, error))
        return [
            environment.reply(*commands[index], passages.get(index, []))
            for index, environment in enumerate(environments)
        ]

    def step(self, message: Message) -> Reply:
        [reply] = self.step_many([self], [message])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def reply(self, verb: str, text: str, passages: list[Passage] | Exception) -> Reply | Exception:
        if isinstance(passages, Exception):
            return passages
        if verb == "answer":
            right = float(is_right(text, self.answers))
            return Reply(finished=True, outcome=right, marks=self.marks())
        if verb != "search":
            return Reply((Message("user", INVALID),), stop=STOP)
        self.searches += 1
        self.queries.append(text)
        text_shown = passages_text(passages, self.characters // self.topk)
        new = self.reached < len(self.steps) and contains_words(text_shown, self.steps[self.reached]["found"])
        self.reached += new
        observation = Message("user", f"<information>\n{text_shown}</information>")
        return Reply((observation,), reward=self.found_reward * new, marks=self.marks(), stop=STOP)

    def marks(self) -> dict[str, float]:
        return {"searches": self.searches, "steps_found": self.reached / max(1, len(self.steps))}

    async def close(self) -> None:
        return None

    def demonstrate(self, noise: float, random: Random) -> str:
        """The next message of an expert, who answers only from search results; with probability `noise` a mistake."""
        conclusion = f"It is {self.steps[self.reached - 1]['means']}. " if self.reached else ""
        if self.reached == len(self.steps):
            answer = self.answers[0]
            if random.random() < noise:
                answer = random.choice([str(random.randint(1, 999)), *self.question.split()])
            return f"<think>{conclusion.strip()}</think>\n<answer>{answer}</answer>"
        step = self.steps[self.reached]
        query = step["query"]
        if random.random() < noise:
            query = " ".join(random.sample(self.question.split(), 2))
        elif query in self.queries:  # its result was not in the passages
            return "<think>I cannot find it.</think>\n<answer>unknown</answer>"
        return f"<think>{conclusion}I need {step['need']}.</think>\n<search>{query}</search>"


def read_task(task: Task) -> tuple[str, list[str], list[dict[str, str]]]:
    """(question, answers, steps) of a task, which may come from a user's file."""
    question, answers, steps = (task.data.get(name) for name in ("question", "answers", "steps"))
    if not isinstance(question, str) or not question:
        raise ValueError(f"task {task.id}: question: must be a text that is not empty")
    if not isinstance(answers, (list, tuple)) or not answers or not all(isinstance(one, str) for one in answers):
        raise ValueError(f"task {task.id}: answers: must be a list of one or more texts")
    return question, list(answers), [dict(step) for step in steps or ()]


def parse(text: str) -> tuple[str, str]:
    """Verb and argument of the first command in a text; empty strings if there is none."""
    match = COMMAND.search(text)
    if match is None or not match[2].strip():
        return "", ""
    return match[1], " ".join(match[2].split())[:LONGEST_QUERY]


def passages_text(passages: Sequence[Passage], characters: int) -> str:
    """Passages as the model sees them, each cut after `characters` characters."""
    lines = (f'Doc {number}(Title: "{passage.title}") {passage.text}' for number, passage in enumerate(passages, 1))
    return "".join(line[:characters] + "\n" for line in lines) or "nothing found\n"


def contains_words(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def is_right(answer: str, answers: Sequence[str]) -> bool:
    return normalised(answer) in {normalised(one) for one in answers}


def normalised(text: Any) -> str:
    """A text in lower case, without punctuation, articles and extra space: the usual form for comparing answers."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(ARTICLE.sub(" ", plain).split())
