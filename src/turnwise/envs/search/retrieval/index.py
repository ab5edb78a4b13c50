"""Indexes: find the best passages of a corpus for a query. An index is made once and memory-mapped from the cache."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from turnwise.data.cache import cache_folder, made_once
from turnwise.envs.search.retrieval.corpus import Corpus

Found = list[tuple[int, float]]
"""Numbers of passages and their scores, best first."""
WORD = re.compile(r"\w+")
TITLE = 3
"""How many times the words of a title count."""
SHORTNESS = 0.4
"""BM25's b: how much a short passage gains, between 0 and 1."""


class Index(Protocol):
    """The interface that a server uses."""

    def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        """Up to `topk` passages for each query; fewer if fewer match it."""
        ...


def words(text: str) -> list[str]:
    """The words of a text. There are no stop words: "no" and "in" are codes of countries."""
    return WORD.findall(text.lower())


def weighed_words(contents: str) -> list[str]:
    """The words of a passage; those of its title occur several times."""
    title, _, text = contents.partition("\n")
    return words(title) * TITLE + words(text)


class Bm25:
    """An index by words in common."""

    def __init__(self, folder: Path) -> None:
        import bm25s

        self.model = bm25s.BM25.load(str(folder), mmap=True)

    @classmethod
    def of(cls, corpus: Corpus) -> Bm25:
        """The index of a corpus; it is made if it is not in the cache."""
        if importlib.util.find_spec("bm25s") is None:
            raise ValueError('retrieval by words needs bm25s: pip install "turnwise[search]"')

        def make(folder: Path) -> None:
            import bm25s

            model = bm25s.BM25(b=SHORTNESS)
            model.index([weighed_words(text) for text in corpus.texts()], show_progress=False)
            model.save(str(folder), show_progress=False)

        return cls(made_once(cache_folder() / f"bm25-{corpus.mark()}-{TITLE}-{SHORTNESS}", make))

    def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        return [self.best(words(query), topk) for query in queries]

    def best(self, query: list[str], topk: int) -> Found:
        token_ids = self.model.get_tokens_ids(query)
        return best(self.model.get_scores_from_ids(token_ids), topk) if token_ids else []


def best(scores: Any, topk: int, above: float = 0.0) -> Found:
    """The passages with the highest scores, best first; among equal scores, the earlier passage first."""
    topk = min(topk, len(scores))
    limit = np.partition(scores, len(scores) - topk)[len(scores) - topk] if topk else np.inf
    numbers = np.flatnonzero(scores >= limit)
    numbers = numbers[np.argsort(-scores[numbers], kind="stable")][:topk]
    return [(int(number), float(scores[number])) for number in numbers if scores[number] > above]
