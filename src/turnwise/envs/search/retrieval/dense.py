"""Dense retrieval: finds the passages with the most similar meaning, by vectors of a sentence encoder."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.data.cache import cache_folder, made_once
from turnwise.data.minilm import MINILM
from turnwise.envs.search.retrieval.corpus import Corpus
from turnwise.envs.search.retrieval.index import Found, best
from turnwise.pretrained import import_models

log = logging.getLogger(__name__)
VECTORS = "vectors.npy"
LONGEST = 256
"""How many tokens of a text the encoder reads."""


class Encoder:
    """Encodes texts as vectors of length 1: the mean of a model's last hidden states."""

    def __init__(self, folder: Path) -> None:
        import_models()
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging as own_logging

        own_logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).eval()

    def encode(self, texts: Sequence[str]) -> Any:
        """[texts, width] float32"""
        import torch

        inputs = self.tokenizer(list(texts), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        with torch.inference_mode():
            states = self.model(**inputs).last_hidden_state
            mask = inputs["attention_mask"][..., None].to(states.dtype)
            means = (states * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(means, dim=-1).numpy()


class Dense:
    """An index by meaning."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        self.vectors = np.load(folder / VECTORS, mmap_mode="r")  # [passages, width]
        self.encoder = encoder

    @classmethod
    def of(cls, corpus: Corpus, encoder_folder: Path | None = None, *, make: bool = True) -> Dense:
        """The index of a corpus. If it is not in the cache, it is made (some 70 passages per second and core); with
        `make` false, this is a ValueError."""
        folder = encoder_folder or MINILM.located()
        index_folder = cache_folder() / f"dense-{corpus.mark()}"
        if not make and not index_folder.is_dir():
            raise ValueError(
                f"there is no dense index of {corpus.path.name} yet, and it takes minutes to make; run: "
                f"turnwise retrieve {corpus.path} --retriever dense --only-index"
            )
        encoder = Encoder(folder)
        return cls(made_once(index_folder, lambda aside: write_vectors(corpus, encoder, aside / VECTORS)), encoder)

    def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        scores = self.encoder.encode(queries) @ self.vectors.T if queries else []
        return [best(row, topk, above=-np.inf) for row in scores]


def write_vectors(corpus: Corpus, encoder: Encoder, path: Path) -> None:
    """Encode a corpus, in batches of texts with similar lengths."""
    texts = list(corpus.texts())
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    vectors: Any = None
    for batch, numbers in enumerate(chunks(order, 32)):
        encoded = encoder.encode([texts[number] for number in numbers])
        if vectors is None:
            vectors = np.lib.format.open_memmap(path, "w+", np.float32, (len(texts), encoded.shape[1]))
        vectors[numbers] = encoded
        if batch % 32 == 31:
            log.info("encoded %d of %d passages", (batch + 1) * 32, len(texts))
    vectors.flush()


def chunks(numbers: Iterable[int], size: int) -> Iterator[list[int]]:
    left = iter(numbers)
    while some := list(islice(left, size)):
        yield some
