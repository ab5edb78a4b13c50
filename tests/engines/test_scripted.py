import asyncio
import math

import numpy as np
import pytest

from support.acting import run
from turnwise.engines.base import Sampling
from turnwise.engines.scripted import UNKNOWN, ScriptedEngine
from turnwise.types import StopReason


def engine(script, **settings):
    return ScriptedEngine(script, lambda text: [ord(letter) for letter in text], end_token=2, **settings)


def ask(engine, prompt=(5, 6), max_tokens=100, session="s", seed=7):
    return run(engine.generate(np.array(prompt, np.int32), Sampling(max_tokens), session=session, seed=seed))


def test_it_says_the_script_and_an_end_token():
    said = ask(engine(lambda prompt, session, seed: f"{prompt.tolist()}{session}{seed}", logprob=-0.25))
    assert "".join(map(chr, said.tokens[:-1])) == "[5, 6]s7"
    assert said.tokens[-1] == 2
    assert said.stop is StopReason.end_token
    assert said.logprobs.tolist() == [-0.25] * len(said.tokens)
    assert said.tokens.dtype == np.int32
    assert said.logprobs.dtype == np.float32


def test_a_script_may_take_its_time():
    async def script(prompt, session, seed):
        await asyncio.sleep(0)
        return "late"

    assert len(ask(engine(script)).tokens) == 5


@pytest.mark.parametrize(
    ("max_tokens", "context", "size", "stop"),
    [
        (5, 99, 5, StopReason.end_token),
        (4, 99, 4, StopReason.length),
        (99, 7, 5, StopReason.end_token),
        (99, 6, 4, StopReason.length),
        (99, 3, 1, StopReason.length),
    ],
)
def test_limits_cut_the_script(max_tokens, context, size, stop):
    said = ask(engine(lambda *_: "four", context=context), max_tokens=max_tokens)
    assert (len(said.tokens), said.stop) == (size, stop)
    assert (said.tokens[-1] == 2) == (stop is StopReason.end_token)


def test_versions_are_those_loaded():
    scripted = engine(lambda *_: "a")
    assert ask(scripted).versions.tolist() == [0, 0]
    run(scripted.load({}, 3))
    assert ask(scripted).versions.tolist() == [3, 3]


def test_prompts_are_remembered_as_they_came():
    scripted = engine(lambda *_: "a")
    ask(scripted, (1, 2))
    ask(scripted, (3,))
    assert [prompt.tolist() for prompt in scripted.prompts] == [[1, 2], [3]]


@pytest.mark.parametrize("prompt", [(), (1,) * 8, (1,) * 9])
def test_a_prompt_that_cannot_be_served_is_a_mistake(prompt):
    scripted = engine(lambda *_: "a", context=8)
    with pytest.raises(ValueError, match="prompt of"):
        ask(scripted, prompt)
    assert scripted.prompts == []


def test_the_unknown_logprob_is_not_a_number():
    assert math.isnan(UNKNOWN)


@pytest.mark.parametrize("stop", [("</a>",), ("</b>", "</a>"), ("never", "</a>")])
def test_the_first_stop_string_ends_the_action(stop):
    scripted = engine(lambda *_: "x</a> and y</b> and more")
    said = run(scripted.generate(np.array([1]), Sampling(100, stop=stop), session="s", seed=0))
    assert "".join(map(chr, said.tokens)) == "x</a>"
    assert said.stop is StopReason.stop_string
    cut = run(scripted.generate(np.array([1]), Sampling(3, stop=stop), session="s", seed=0))
    assert "".join(map(chr, cut.tokens)) == "x</"
    assert cut.stop is StopReason.length
