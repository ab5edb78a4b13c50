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
    """A search that failed is made again: nothing has changed before its result is there."""
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
        """topk: passages per search. characters: of all of them, shared out evenly. retriever, corpus: what a server
        that the run starts itself finds passages by, and where. url: a server that runs already. found_reward: paid
        once for each step towards the answer that a search finds."""
        if not 1 <= topk <= MOST_PASSAGES or characters < topk:
            raise ValueError(f"topk = {topk} and characters = {characters}: need 1 to {MOST_PASSAGES} passages of some")
        if url and (retriever, corpus) != ("bm25", FACTBOOK.name):
            raise ValueError("retriever and corpus are settings of the server at url; remove them, or remove url")
        self.topk = topk
        self.characters = characters
        self.service: SearchService = service_of(url, "" if url else str(corpus_file(corpus)), retriever)
        self.found_reward = found_reward

    @classmethod
    def check_settings(cls, **settings: Any) -> None:
        """Refuse, before anything starts, what an attempt could not use."""
        cls(**settings)

    @staticmethod
    def tasks(split: str, seed: int, count: int = 2048, hops: tuple[int, int] = (1, 3)) -> Iterator[Task]:
        """Different questions, at most `count`, as many of each number of hops between the two bounds as there are. No
        question for training has to do with a country that held-out ones ask about."""
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
        self.asked: list[str] = []
        return Reply((Message("system", SYSTEM), Message("user", f"Question: {self.question}")), stop=STOP)

    @classmethod
    def step_many(cls, environments: Sequence[Search], messages: Sequence[Message]) -> list[Reply | Exception]:
        """One call of the search engine for all that search the same one."""
        said = [parse(message.content) for message in messages]
        together: dict[tuple[SearchService, int], list[int]] = {}
        for place, (verb, _) in enumerate(said):
            if verb == "search":
                own = environments[place]
                together.setdefault((own.service, own.topk), []).append(place)
        found: dict[int, list[Passage] | Exception] = {}
        for (service, topk), places in together.items():
            try:
                found.update(zip(places, service.search([said[place][1] for place in places], topk), strict=True))
            except (ConnectionError, ValueError) as error:
                found.update(dict.fromkeys(places, error))
        return [own.reply(*said[place], found.get(place, [])) for place, own in enumerate(environments)]

    def step(self, message: Message) -> Reply:
        [reply] = self.step_many([self], [message])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def reply(self, verb: str, text: str, found: list[Passage] | Exception) -> Reply | Exception:
        if isinstance(found, Exception):
            return found
        if verb == "answer":
            right = float(is_right(text, self.answers))
            return Reply(finished=True, outcome=right, marks=self.marks())
        if verb != "search":
            return Reply((Message("user", INVALID),), stop=STOP)
        self.searches += 1
        self.asked.append(text)
        shown = shown_passages(found, self.characters // self.topk)
        new = self.reached < len(self.steps) and says(shown, self.steps[self.reached]["found"])
        self.reached += new
        observation = Message("user", f"<information>\n{shown}</information>")
        return Reply((observation,), reward=self.found_reward * new, marks=self.marks(), stop=STOP)

    def marks(self) -> dict[str, float]:
        return {"searches": self.searches, "steps_found": self.reached / max(1, len(self.steps))}

    async def close(self) -> None:
        return None

    def demonstrate(self, noise: float, random: Random) -> str:
        """What an expert says now, who answers only what was found; with probability `noise` a mistake."""
        known = f"It is {self.steps[self.reached - 1]['means']}. " if self.reached else ""
        if self.reached == len(self.steps):
            answer = self.answers[0]
            if random.random() < noise:
                answer = random.choice([str(random.randint(1, 999)), *self.question.split()])
            return f"<think>{known.strip()}</think>\n<answer>{answer}</answer>"
        step = self.steps[self.reached]
        query = step["query"]
        if random.random() < noise:
            query = " ".join(random.sample(self.question.split(), 2))
        elif query in self.asked:  # and was not found
            return "<think>I cannot find it.</think>\n<answer>unknown</answer>"
        return f"<think>{known}I need {step['need']}.</think>\n<search>{query}</search>"


def read_task(task: Task) -> tuple[str, list[str], list[dict[str, str]]]:
    """(question, answers, steps) of a task, which may come from anywhere."""
    question, answers, steps = (task.data.get(name) for name in ("question", "answers", "steps"))
    if not isinstance(question, str) or not question:
        raise ValueError(f"task {task.id}: question: needs to be a text")
    if not isinstance(answers, (list, tuple)) or not answers or not all(isinstance(one, str) for one in answers):
        raise ValueError(f"task {task.id}: answers: needs to be a list of texts")
    return question, list(answers), [dict(step) for step in steps or ()]


def parse(text: str) -> tuple[str, str]:
    """Verb and argument of the first command in a text; empty strings where there is none."""
    found = COMMAND.search(text)
    if found is None or not found[2].strip():
        return "", ""
    return found[1], " ".join(found[2].split())[:LONGEST_QUERY]


def shown_passages(found: Sequence[Passage], characters: int) -> str:
    """Passages as the model sees them, each of up to so many characters."""
    lines = (f'Doc {place}(Title: "{one.title}") {one.text}' for place, one in enumerate(found, 1))
    return "".join(line[:characters] + "\n" for line in lines) or "nothing found\n"


def says(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def is_right(answer: str, answers: Sequence[str]) -> bool:
    return normalised(answer) in {normalised(one) for one in answers}


def normalised(text: Any) -> str:
    """A text in lower case, without punctuation, articles and surplus space, as question answering compares them."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(ARTICLE.sub(" ", plain).split())
