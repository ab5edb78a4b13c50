"""How the played SGLang server draws tokens: the rules of SGLang's layers/sampler.py, on a real model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

GREEDY = 1e-6
"""SGLang takes lower temperatures for a top-k of 1."""


@dataclass(eq=False)
class Running:
    """A request that the server has."""

    rid: str
    prompt: list[int]
    params: dict
    extra_key: str
    future: object
    model: object = None
    """Whose logits it gets: that of older weights where it found a prefix of theirs."""
    cached: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cut_logprobs: list[float] = field(default_factory=list)
    ended: dict | None = None
    """Set by an abort; it is seen after one more token."""

    @property
    def tokens(self):
        return self.prompt + self.output


@torch.inference_mode()
def last_logits(model, rows):
    """[B, V] after the last token of each row, in one pass without a cache: what is beyond a row's end is behind it."""
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    hidden = model.model(input_ids=padded, use_cache=False).last_hidden_state
    ends = torch.tensor([len(tokens) - 1 for tokens in rows])
    return model.get_output_embeddings()(hidden[torch.arange(len(rows)), ends]).double().numpy()


def draw(logits, request, *, deterministic):
    """(token, logprob after temperature, logprob after top-p and top-k). The noise is a function of the seed and the
    position in the whole text."""
    params = request.params
    if params["temperature"] < GREEDY:
        logprobs = log_softmax(logits)
        token = int(logits.argmax())
        return token, float(logprobs[token]), 0.0
    logprobs = log_softmax(logits / params["temperature"])
    kept = support(np.exp(logprobs), params["top_p"], params["top_k"])
    place = [params["sampling_seed"], len(request.tokens)] if deterministic else None
    noise = np.random.default_rng(place).gumbel(size=len(logits))
    token = int(np.where(kept, logprobs + noise, -np.inf).argmax())
    cut = logprobs[token] - np.log(np.exp(logprobs[kept]).sum())
    return token, float(logprobs[token]), float(cut)


def support(probs, top_p, top_k):
    """The tokens that may be drawn: top-k and top-p cut the same probabilities."""
    order = np.argsort(-probs)
    ordered = probs[order]
    keep = (np.cumsum(ordered) - ordered) <= top_p
    if top_k != -1:
        keep[top_k:] = False
    kept = np.zeros(len(probs), bool)
    kept[order[keep]] = True
    return kept


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
