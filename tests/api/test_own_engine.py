"""The engine by itself: what it samples, with which weights, and for whom."""

import asyncio

import numpy as np
import pytest

import turnwise as tw
from support.making import make_model

SIZE = {"model": {"hidden": 16, "layers": 1}, "rollout": {"max_trajectory_tokens": 96, "max_prompt_tokens": 64}}


@pytest.fixture(scope="module")
def learner():
    return tw.Learner("tiny", optimizer={"learning_rate": 1e-2}, **SIZE)


@pytest.fixture(scope="module")
def engine(learner):
    with tw.Engine(learner) as engine:
        yield engine


def group_of(engine, prompts, completions):
    attempts = [
        tw.Trajectory((engine.turn(prompt, made),), tw.Status.finished, outcome=float(place % 2))
        for place, (prompt, made) in enumerate(zip(prompts, completions, strict=True))
    ]
    return tw.Group(tw.Task("t", "own"), tuple(attempts))


def test_its_logprobs_are_the_learners_and_loads_are_seen(learner, engine):
    prompts = ["say something"] * 4
    before = engine.generate(prompts, max_tokens=6, seed=1)
    group = group_of(engine, prompts, before)
    assert len({made.tokens.tobytes() for made in before}) > 1  # equal prompts, noise of their own
    assert np.concatenate(learner.score([group])) == pytest.approx(
        np.concatenate([made.logprobs for made in before]), abs=1e-4
    )
    version = learner.version
    metrics = learner.update([group])
    assert metrics["gap/mean"] < 1e-4

    # The update is not live here, and what is sampled says so.
    again = engine.generate(prompts, max_tokens=6, seed=1)
    assert [made.tokens.tolist() for made in again] == [made.tokens.tolist() for made in before]
    assert {int(number) for made in again for number in made.versions} == {version}

    engine.load(learner)
    after = engine.generate(prompts, max_tokens=6, seed=1)
    assert {int(number) for made in after for number in made.versions} == {version + 1} == {engine.version}
    assert np.concatenate(learner.score([group_of(engine, prompts, after)])) == pytest.approx(
        np.concatenate([made.logprobs for made in after]), abs=1e-4
    )


def test_prompts_are_text_messages_or_tokens(engine):
    text, messages = "hello", [tw.Message("user", "hello")]
    tokens = engine.render(messages)
    made = [engine.generate([prompt], max_tokens=4)[0].tokens.tolist() for prompt in (text, messages, tokens)]
    assert made[0] == made[1] == made[2]
    assert engine.generate([], max_tokens=4) == []
    assert engine.generate([tokens.tolist()], max_tokens=0)[0].stop is tw.StopReason.length
    turn = engine.turn(text, engine.generate([text], max_tokens=4)[0], reward=0.5)
    assert (turn.reward, turn.prompt.tolist()) == (0.5, tokens.tolist())
    assert engine.text(tokens).strip().startswith("user")


def test_a_running_loop_samples_and_goes_on(engine):
    async def both():
        return await asyncio.gather(
            *(engine.generate_async(["hello"], max_tokens=4, seed=seed) for seed in (3, 4)),
        )

    async def blocking():
        return engine.generate(["hello"], max_tokens=4, seed=3)

    [one], [other] = asyncio.run(both())
    assert asyncio.run(blocking())[0].tokens.tolist() == one.tokens.tolist()
    assert engine.generate(["hello"], max_tokens=4, seed=4)[0].tokens.tolist() == other.tokens.tolist()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompts": "hello"}, r"write \[prompt\] for a single one"),
        ({"prompts": [1, 2]}, r"write \[prompt\] for a single one"),
        ({"prompts": [tw.Message("user", "a")]}, r"write \[prompt\] for a single one"),
        ({"prompts": [[999999]]}, "has the token 999999"),
        ({"prompts": ["a"], "temperature": -1}, "temperature must be"),
        ({"prompts": ["a"], "stop": "x"}, "stop must be a tuple of strings"),
    ],
)
def test_what_cannot_be_sampled_is_refused(engine, arguments, said):
    with pytest.raises(ValueError, match=said):
        engine.generate(**arguments)


def test_an_engine_needs_a_tokenizer_and_a_plain_model():
    model = make_model()
    with pytest.raises(ValueError, match=r"give Engine\(model, tokenizer\)"):
        tw.Engine(model)
    adapted = tw.Learner("tiny", lora={"rank": 2}, **SIZE)
    with pytest.raises(ValueError, match="make the Engine of the model before"):
        tw.Engine(adapted)


def test_adapters_arrive_where_the_engine_was_made_first():
    model, tokenizer = tw.tiny_model(["hello there"], hidden=16, layers=1, context=96)
    with tw.Engine(model, tokenizer, **SIZE) as engine:
        learner = tw.Learner(model, tokenizer, lora={"rank": 2}, optimizer={"learning_rate": 0.1}, **SIZE)
        prompts = ["hello"] * 4
        learner.update([group_of(engine, prompts, engine.generate(prompts, max_tokens=6))])
        engine.load(learner)
        made = engine.generate(prompts, max_tokens=6)
        assert np.concatenate(learner.score([group_of(engine, prompts, made)])) == pytest.approx(
            np.concatenate([one.logprobs for one in made]), abs=1e-3
        )


def test_it_can_be_closed_twice():
    engine = tw.Engine("tiny", **SIZE)
    engine.close()
    engine.close()
    assert not engine.thread.thread.is_alive()
