"""The JSON of prompts that grow is that of json, whatever was asked for before."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from turnwise.engines.prompt_text import PromptTexts

TOKENS = st.lists(st.integers(0, 200_000), max_size=6)


@given(st.lists(st.tuples(st.sampled_from("ab"), TOKENS, st.booleans()), max_size=12), st.integers(1, 60))
def test_bodies_are_those_of_json(asked: list[tuple[str, list[int], bool]], most: int) -> None:
    texts, before = PromptTexts(most_bytes=most), {"a": [], "b": []}
    for session, tokens, goes_on in asked:
        prompt = [*before[session], *tokens] if goes_on else tokens
        rest = {"seed": 1, "stop": ["x"]} if tokens else {}
        assert json.loads(texts.body(session, rest, "token_ids", np.array(prompt, np.int32))) == {
            **rest,
            "token_ids": prompt,
        }
        before[session] = prompt
        assert texts.num_bytes == sum(len(text) for _, text in texts.kept.values())


def test_only_new_tokens_are_written_and_old_conversations_go() -> None:
    texts = PromptTexts(most_bytes=1000)
    texts.body("a", {}, "t", np.arange(100, dtype=np.int32))
    kept = texts.kept["a"][1]
    texts.body("a", {}, "t", np.arange(101, dtype=np.int32))
    assert texts.kept["a"][1] == kept + b", 100"
    texts.body("b", {}, "t", np.arange(200, dtype=np.int32))
    assert list(texts.kept) == ["b"]
