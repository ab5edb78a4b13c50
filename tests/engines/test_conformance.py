"""What every engine must do, whatever it is made of. Engines are named in `conformance.py`."""

import asyncio
import math
import re

import numpy as np
import pytest

from engines.conformance import (
    CONTEXT,
    END,
    KINDS,
    LETTERS,
    POISON,
    VOCABULARY,
    Stage,
    continued_logprobs,
    full_logits,
    guidance,
    joined,
    prompts,
    stock,
    tokenizer_of_letters,
)
from turnwise.engines.base import EngineFailure
from turnwise.engines.grammar import Grammar, GrammarKind
from turnwise.engines.guidance import follow
from turnwise.types import StopReason

LONG = 90
SHAPES = (
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 3},
    {"top_p": 0.7},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 20},
)


QUICK = [pytest.param(kind, marks=pytest.mark.slow) if kind == "process" else kind for kind in KINDS]
"""The router's engines are processes too."""


@pytest.fixture(scope="module", params=QUICK)
def started(request, tmp_path_factory):
    stage = Stage(KINDS[request.param], tmp_path_factory.mktemp("model"))
    yield stage
    stage.close()


@pytest.fixture
def stage(started):
    started.run(started.reset())
    return started


# ---------------------------------------------------------------- what is sampled


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_are_those_of_a_full_forward_under_what_was_drawn_from(stage, shape):
    stage.needs_model()
    asked = prompts(1, 30, 2, 17, 70, 41)
    for prompt, completion in zip(asked, stage.run(stage.ask_all(asked, 20, **shape)), strict=True):
        stage.check(prompt, completion, **shape)


def test_calls_of_every_shape_go_together(stage):
    stage.needs_model()
    asked = prompts(*range(5, 5 + len(SHAPES)))

    async def scene():
        calls = (stage.ask(p, 15, f"s{i}", i, **shape) for i, (p, shape) in enumerate(zip(asked, SHAPES, strict=True)))
        return await asyncio.gather(*calls)

    for prompt, shape, completion in zip(asked, SHAPES, stage.run(scene()), strict=True):
        stage.check(prompt, completion, **shape)


def test_a_temperature_of_zero_takes_the_likeliest_token(stage):
    stage.needs_model()
    prompt = prompts(9)[0]
    completion = stage.run(stage.ask(prompt, 20, temperature=0.0))
    likeliest = full_logits(stage.model, prompt, completion.tokens).argmax(-1)
    assert completion.tokens.tolist() == likeliest.tolist()
    assert (completion.logprobs == 0).all()


def test_completions_are_complete(stage):
    for completion in stage.run(stage.ask_all(prompts(4, 9))):
        arrays = completion.tokens, completion.logprobs, completion.versions
        assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32]
        assert len(set(map(len, arrays))) == 1
        assert (completion.versions == stage.version).all()
        timing = completion.timing
        assert min(timing.queued, timing.prefill, timing.decode) >= 0


def test_the_seed_decides_what_is_sampled(stage):
    prompt = prompts(10)[0]

    async def scene():
        alone = [await stage.ask(prompt, 30, seed=seed) for seed in (1, 2, 1, 2**64 - 1)]
        crowd = await asyncio.gather(*(stage.ask(prompt, 30, f"s{seed}", seed) for seed in range(12)))
        return [completion.tokens.tolist() for completion in (*alone, crowd[1], crowd[2])]

    first, second, again, last, first_of_many, second_of_many = stage.run(scene())
    assert first == again == first_of_many
    assert second == second_of_many
    assert len({tuple(first), tuple(second), tuple(last)}) == 3


def test_many_more_calls_than_are_served_at_once(stage):
    random = np.random.default_rng(0)
    asked = prompts(*random.integers(1, 60, 60).tolist())
    done = stage.run(stage.ask_all(asked, 25))
    for prompt, completion in zip(asked, done, strict=True):
        assert 1 <= len(completion.tokens) <= 25
        if stage.kind.has_model:
            stage.check(prompt, completion)


# ---------------------------------------------------------------- prefixes


def test_attempts_with_one_prompt_stay_exact(stage):
    stage.needs_model()
    prompt = prompts(50)[0]
    done = stage.run(stage.ask_all([prompt] * 12, 20))
    for completion in done:
        stage.check(prompt, completion)
    assert len({tuple(completion.tokens) for completion in done}) > 8


def test_conversations_stay_exact(stage):
    stage.needs_model()
    start = prompts(40)[0]

    async def talk(number):
        turns, prompt = [], start
        for turn, heard in enumerate(prompts(5, 1, 9, 3, seed=number)):
            completion = await stage.ask(prompt, 14, f"s{number}", 10 * number + turn)
            turns.append((prompt, completion))
            prompt = joined(prompt, completion.tokens, heard)
        return turns

    async def all_of_them():
        return await asyncio.gather(*(talk(number) for number in range(6)))

    for turns in stage.run(all_of_them()):
        for prompt, completion in turns:
            stage.check(prompt, completion)


def test_prompts_that_go_back_or_branch_off_stay_exact(stage):
    stage.needs_model()
    random = np.random.default_rng(3)

    async def scene():
        known, served = prompts(30), []
        for wave in range(8):
            asked = []
            for _ in range(4):
                base = known[random.integers(len(known))]
                kept = base[: random.integers(1, min(len(base), 100) + 1)]
                asked.append(joined(kept, prompts(random.integers(0, 4), seed=wave)[0]))
            for prompt, completion in zip(asked, await stage.ask_all(asked, 8), strict=True):
                served.append((prompt, completion))
                known.append(joined(prompt, completion.tokens))
        return served

    for prompt, completion in stage.run(scene()):
        stage.check(prompt, completion)


def test_forgetting_prefixes_changes_nothing(stage):
    prompt = prompts(60)[0]

    async def scene():
        first = await stage.ask(prompt, 20, seed=3)
        warm = await stage.ask(prompt, 20, seed=3)
        await stage.engine.forget()
        return [completion.tokens.tolist() for completion in (first, warm, await stage.ask(prompt, 20, seed=3))]

    first, warm, again = stage.run(scene())
    assert first == warm == again


# ---------------------------------------------------------------- grammars


def guided(regex):
    return Grammar(GrammarKind.regex, regex)


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_under_a_grammar_are_those_of_the_tokens_it_allows(stage, shape):
    stage.needs_grammars()
    grammar = guided("[a-f]{2,9}([.][0-9]){1,3}")
    asked = prompts(1, 30, 2, 17, 70, 41)

    async def scene():
        """Some calls have the grammar, and share their passes with others that have none."""
        grammars = [grammar if place % 3 else None for place in range(len(asked))]
        pairs = enumerate(zip(asked, grammars, strict=True))
        calls = (stage.ask(p, 30, f"s{i}", i, grammar=g, **shape) for i, (p, g) in pairs)
        return grammars, await asyncio.gather(*calls)

    grammars, completions = stage.run(scene())
    for prompt, given, completion in zip(asked, grammars, completions, strict=True):
        if given is None:
            assert completion.allowed is None
            stage.check(prompt, completion, **shape)
            continue
        text = spelled(completion.tokens)
        assert completion.stop is StopReason.end_token
        assert re.fullmatch(given.text, text), text
        allowed = completion.allowed.dense(VOCABULARY)
        wanted = follow(guidance(tokenizer_of_letters()), given, completion.tokens.tolist()).dense(VOCABULARY)
        assert (allowed == wanted).all()
        assert allowed[[0, -1], END].tolist() == [False, True]
        stage.check(prompt, completion, allowed=allowed, **shape)


def test_a_grammar_depends_on_nothing_but_the_seed(stage):
    stage.needs_grammars()
    grammar, [prompt] = guided("[a-z]{12}"), prompts(20)

    async def scene(others):
        calls = [stage.ask(prompt, 20, "one", 7, grammar=grammar)]
        calls += [stage.ask(p, 20, f"s{i}", i) for i, p in enumerate(prompts(*[9] * others))]
        return (await asyncio.gather(*calls))[0].tokens.tolist()

    assert stage.run(scene(0)) == stage.run(scene(5)) == stage.run(scene(0))


@pytest.mark.parametrize("limit", [1, 5])
def test_a_limit_leaves_the_beginning_of_what_a_grammar_asks_for(stage, limit):
    stage.needs_grammars()
    completion = stage.run(stage.ask(prompts(9)[0], limit, grammar=guided("abc[.]xyz[0-9]")))
    assert (spelled(completion.tokens), completion.stop) == ("abc.xyz1"[:limit], StopReason.length)
    assert len(completion.allowed.places) == limit
    np.testing.assert_allclose(completion.logprobs, 0.0)  # nothing else was allowed


def test_a_grammar_that_cannot_be_followed_is_a_mistake_and_fails_alone(stage):
    [prompt] = prompts(9)
    bad = [guided("(a|"), guided("[^\\s\\S]"), Grammar.of_schema({"type": "nosuch"}), Grammar(GrammarKind.lark, "x")]

    async def scene():
        calls = [stage.ask(prompt, 8, f"bad{i}", i, grammar=grammar) for i, grammar in enumerate(bad)]
        return await asyncio.gather(stage.ask(prompt, 8, "good", 1), *calls, return_exceptions=True)

    good, *refused = stage.run(scene())
    assert len(good.tokens)
    for error in refused:
        assert type(error) is ValueError
        assert len(str(error).splitlines()) == 1


def test_an_abort_keeps_what_was_allowed_so_far(stage):
    stage.needs_grammars()

    async def scene():
        call = asyncio.ensure_future(stage.ask(prompts(5)[0], CONTEXT, "a", 3, grammar=guided("[a-z]{200}")))
        while not call.done():
            await asyncio.sleep(0.002)
            await stage.engine.abort("a")
        return await call

    completion = stage.run(scene())
    assert completion.stop in (StopReason.abort, StopReason.end_token)
    if len(completion.tokens):
        assert completion.allowed.allows(completion.tokens).all()


def spelled(tokens):
    return "".join(LETTERS[token - 1] for token in tokens if token != END)


# ---------------------------------------------------------------- where sampling ends


def test_an_end_token_ends_the_action_and_is_part_of_it(stage):
    done = stage.run(stage.ask_all(prompts(*[8] * 40), 60))
    ended = [completion for completion in done if END in completion.tokens]
    assert 0 < len(ended) < len(done)
    for completion in done:
        assert END not in completion.tokens[:-1]
        if completion.tokens[-1] == END:
            assert completion.stop is StopReason.end_token
        else:
            assert completion.stop is StopReason.length
            assert len(completion.tokens) == 60


@pytest.mark.parametrize("shorter", [0, 1])
def test_an_end_token_at_the_limit_is_an_end_token(stage, shorter):
    async def scene():
        for seed in range(60):
            prompt = prompts(8, seed=seed)[0]
            free = await stage.ask(prompt, 60, seed=seed)
            if free.stop is StopReason.end_token and len(free.tokens) > 1:
                return free, await stage.ask(prompt, len(free.tokens) - shorter, seed=seed)
        raise AssertionError("no action ended by itself")

    free, limited = stage.run(scene())
    assert limited.tokens.tolist() == free.tokens.tolist()[: len(free.tokens) - shorter]
    assert limited.stop is (StopReason.length if shorter else StopReason.end_token)


def test_an_end_token_in_the_prompt_ends_nothing(stage):
    prompt = prompts(9)[0]
    prompt[3] = prompt[-1] = END
    assert len(stage.run(stage.ask(prompt, 10)).tokens) > 1


@pytest.mark.parametrize(("size", "max_tokens"), [(9, 1), (9, 3), (CONTEXT - 5, 50), (CONTEXT - 1, 50)])
def test_limits_end_the_action(stage, size, max_tokens):
    room = min(max_tokens, CONTEXT - size)
    completion = stage.run(stage.ask(prompts(size)[0], max_tokens))
    assert 1 <= len(completion.tokens) <= room
    if completion.tokens[-1] != END:
        assert len(completion.tokens) == room
        assert completion.stop is StopReason.length


@pytest.mark.parametrize("length", [1, 3])
def test_a_stop_string_ends_the_action_with_the_token_that_completes_it(stage, length):
    async def scene():
        asked = prompts(*[8] * 12)
        free = await stage.ask_all(asked, 25)
        said = ["".join(LETTERS[token - 1] for token in one.tokens if token != END) for one in free]
        long = [seed for seed in range(12) if len(said[seed]) >= 8 + length]
        stops = {seed: said[seed][5 : 5 + length] for seed in long}
        calls = (stage.ask(asked[seed], 25, f"s{seed}", seed, stop=("nowhere", stops[seed])) for seed in long)
        done = zip(long, await asyncio.gather(*calls, stage.ask(asked[0], 25, "other", 99)), strict=False)
        return [(free[seed], stopped, said[seed].index(stops[seed]) + length) for seed, stopped in done]

    found = stage.run(scene())
    assert len(found) >= 3
    for free, stopped, end in found:
        assert stopped.tokens.tolist() == free.tokens.tolist()[:end]
        assert stopped.stop is StopReason.stop_string


def test_a_stop_string_does_not_begin_in_the_prompt(stage):
    async def scene():
        for seed in range(60):
            prompt = prompts(8, seed=seed)[0]
            free = await stage.ask(prompt, 30, seed=seed)
            first, *others = free.tokens.tolist()
            if END not in (first, *others[:1]) and len(others) > 2:
                stop = LETTERS[prompt[-1] - 1] + LETTERS[first - 1]
                said = "".join(LETTERS[token - 1] for token in free.tokens if token != END)
                if stop not in said:
                    return free, await stage.ask(prompt, 30, seed=seed, stop=(stop,))
        raise AssertionError("nothing to try it on")

    free, stopped = stage.run(scene())
    assert stopped.tokens.tolist() == free.tokens.tolist()


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize("size", [0, CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_a_prompt_that_is_empty_or_leaves_no_room_is_a_mistake(stage, size):
    with pytest.raises(ValueError, match="prompt"):
        stage.run(stage.ask(np.ones(size, np.int32)))
    assert len(stage.run(stage.ask(prompts(5)[0])).tokens) > 0


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_has_64_bits(stage, seed):
    with pytest.raises(ValueError, match="64 bits"):
        stage.run(stage.ask(prompts(5)[0], seed=seed))


def test_calls_that_cannot_be_served_fail_alone(stage):
    """Each by itself, at once, and beside calls that sample and calls that wait: these get the same tokens as ever."""
    asked = prompts(*[8] * 24)

    async def poison(changes):
        given = {"prompt": prompts(5)[0], "session": "poison", **changes}
        return await stage.ask(given.pop("prompt"), **given)

    async def scene():
        whole = await stage.ask_all(asked, 30)
        calls = long_calls(stage, asked, max_tokens=30)
        refused = await asyncio.gather(*map(poison, POISON.values()), return_exceptions=True)
        for changes in POISON.values():
            await asyncio.sleep(0.002)
            refused += await asyncio.gather(poison(changes), return_exceptions=True)
        return whole, await asyncio.gather(*calls), refused, await stage.ask_all(asked, 30)

    whole, beside, refused, after = stage.run(scene())
    for name, error in zip(2 * list(POISON), refused, strict=True):
        assert isinstance(error, ValueError), (name, error)
        assert str(error), name
        assert "\n" not in str(error)
    for one, other, later in zip(whole, beside, after, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() == later.tokens.tolist()
        assert one.stop is other.stop is later.stop


def test_no_tokens_are_sampled_where_none_are_asked_for(stage):
    async def scene():
        calls = long_calls(stage, prompts(*[8] * 4), max_tokens=20)
        none = [await stage.ask(prompts(5)[0], 0, stop=stop) for stop in ((), ("x",))]
        return none, await asyncio.gather(*calls)

    none, others = stage.run(scene())
    for completion in none:
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) == 0
        assert completion.stop is StopReason.length
    assert all(len(completion.tokens) for completion in others)


# ---------------------------------------------------------------- abort, cancel, pause


def long_calls(stage, asked, seeds=None, max_tokens=LONG):
    """Calls under way that do not end soon, where there is a model."""
    seeds = seeds or range(len(asked))
    return [
        asyncio.create_task(stage.ask(prompt, max_tokens, f"s{i}", seed))
        for i, (prompt, seed) in enumerate(zip(asked, seeds, strict=True))
    ]


async def enduring(stage, num):
    """(prompts, seeds) of actions that have no end token before the limit."""
    asked = prompts(*[6] * 40)
    done = await stage.ask_all(asked, LONG)
    found = [seed for seed, completion in enumerate(done) if completion.stop is StopReason.length][:num]
    assert len(found) == num, "too many actions are short"
    return [asked[seed] for seed in found], found


def test_abort_returns_what_was_sampled_and_others_go_on(stage):
    async def scene():
        asked = prompts(8, 11, 6)
        whole = [(await stage.ask(prompt, 60, f"w{i}", i)) for i, prompt in enumerate(asked)]
        calls = long_calls(stage, asked, max_tokens=60)
        await asyncio.sleep(0)
        await stage.engine.abort("nobody")
        await stage.engine.abort("s1")
        return whole, [await call for call in calls]

    whole, done = stage.run(scene())
    for place in (0, 2):
        assert done[place].tokens.tolist() == whole[place].tokens.tolist()
    aborted = done[1].tokens.tolist()
    assert aborted == whole[1].tokens.tolist()[: len(aborted)]
    assert len(done[1].logprobs) == len(done[1].versions) == len(aborted)
    if len(aborted) < len(whole[1].tokens):
        assert done[1].stop is StopReason.abort


def test_an_abort_in_the_middle_keeps_the_beginning(stage):
    stage.needs_model()

    async def scene():
        [prompt], [seed] = await enduring(stage, 1)
        for wait in (0.03, 0.01, 0.003, 0.001, 0.1):
            [call] = long_calls(stage, [prompt], [seed])
            await asyncio.sleep(wait)
            await stage.engine.abort("s0")
            completion = await call
            if 0 < len(completion.tokens) < LONG:
                return prompt, completion
        raise AssertionError("no abort came in the middle")

    prompt, completion = stage.run(scene())
    assert completion.stop is StopReason.abort
    stage.check(prompt, completion)


def test_calls_that_wait_for_a_place_can_be_aborted(stage):
    async def scene():
        calls = long_calls(stage, prompts(*[8] * 60))
        await asyncio.sleep(0)
        await asyncio.gather(*(stage.engine.abort(f"s{i}") for i in range(60)))
        return await asyncio.gather(*calls)

    done = stage.run(scene())
    assert sum(completion.stop is StopReason.abort for completion in done) > 30
    assert len(stage.run(stage.ask(prompts(5)[0])).tokens) > 0


def test_cancelled_callers_leave_the_others_alone(stage):
    async def scene():
        asked = prompts(*[8] * 20)
        whole = await stage.ask_all(asked, 40)
        calls = long_calls(stage, asked, max_tokens=40)
        await asyncio.sleep(0.005)
        for place in (0, 3, 19):
            calls[place].cancel()
        return whole, await asyncio.gather(*calls, return_exceptions=True)

    whole, done = stage.run(scene())
    for place, (one, other) in enumerate(zip(whole, done, strict=True)):
        if place not in (0, 3, 19):
            assert one.tokens.tolist() == other.tokens.tolist()
    assert any(isinstance(other, asyncio.CancelledError) for other in done)


def test_nothing_ends_while_paused_and_all_goes_on_after(stage):
    async def scene():
        asked = prompts(8, 11, 6)
        whole = await stage.ask_all(asked, 40)
        calls = long_calls(stage, asked, max_tokens=40)
        await asyncio.sleep(0)
        await stage.engine.pause()
        before = [call.done() for call in calls]
        late = asyncio.create_task(stage.ask(asked[0], 40, "late", 0))
        await asyncio.sleep(0.1)
        assert [call.done() for call in calls] == before
        assert not late.done()
        await stage.engine.resume()
        return whole, [*(await asyncio.gather(*calls)), await late]

    whole, done = stage.run(scene())
    assert [c.tokens.tolist() for c in done] == [c.tokens.tolist() for c in (*whole, whole[0])]


def test_a_deadline_on_a_call_that_waits_for_a_resume(stage):
    async def scene():
        await stage.engine.pause()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await stage.ask(prompts(5)[0])
        await stage.engine.resume()
        return await stage.ask(prompts(5)[0])

    assert len(stage.run(scene()).tokens) > 0


# ---------------------------------------------------------------- loads


def test_versions_are_those_of_the_weights(stage):
    async def scene():
        prompt = prompts(9)[0]
        first = await stage.ask(prompt)
        await stage.load(1)
        return prompt, first, await stage.ask(prompt)

    prompt, first, second = stage.run(scene())
    assert (first.versions == stage.version - 1).all()
    assert (second.versions == stage.version).all()
    if stage.kind.has_model:
        stage.check(prompt, second)


def test_a_prefix_that_older_weights_computed_is_not_reused(stage):
    stage.needs_model()

    async def scene():
        prompt = prompts(60)[0]
        first = await stage.ask(prompt)
        await stage.load(1)
        longer = joined(prompt, first.tokens)
        return [(given, await stage.ask(given, seed=7)) for given in (prompt, longer, prompt)]

    for prompt, completion in stage.run(scene()):
        stage.check(prompt, completion)


async def loaded_in_flight(stage, num):
    """(prompts, completions that saw both weights) of calls during which weights were loaded."""
    asked, seeds = await enduring(stage, num)
    for wait in 3 * (0.03, 0.01, 0.003, 0.001, 0.1, 0.3, 1.0):  # a busy machine needs some luck
        calls = long_calls(stage, asked, seeds)
        await asyncio.sleep(wait)
        await stage.load(1)
        done = await asyncio.gather(*calls)
        if all(len(set(completion.versions.tolist())) == 2 for completion in done):
            return asked, done
        await stage.reset()
    raise AssertionError("no load came in the middle")


def test_a_load_in_flight_shows_in_the_versions_and_is_exact(stage):
    """Tokens after it are those of the new weights, over the keys and values of the old ones where these are kept."""
    stage.needs_model()
    asked, done = stage.run(loaded_in_flight(stage, 3))
    for prompt, completion in zip(asked, done, strict=True):
        num_old = int((completion.versions == stage.version - 1).sum())
        size = len(completion.tokens)
        assert completion.versions.tolist() == [stage.version - 1] * num_old + [stage.version] * (size - num_old)
        expected = continued_logprobs(stock(0), stock(1), prompt, completion, num_old, stage.kind.keeps_keys)
        np.testing.assert_allclose(completion.logprobs, expected, atol=stage.kind.tolerance, rtol=0)


def test_what_a_load_in_flight_leaves_behind_is_not_reused(stage):
    stage.needs_model()

    async def scene():
        asked, done = await loaded_in_flight(stage, 2)
        longer = [joined(prompt, completion.tokens[:50]) for prompt, completion in zip(asked, done, strict=True)]
        return [(prompt, await stage.ask(prompt, seed=5)) for prompt in (*asked, *longer)]

    for prompt, completion in stage.run(scene()):
        stage.check(prompt, completion)


def test_weights_can_be_loaded_while_paused(stage):
    stage.needs_model()

    async def scene():
        prompt = prompts(9)[0]
        await stage.engine.pause()
        call = asyncio.create_task(stage.ask(prompt, 20))
        await asyncio.sleep(0.01)
        await stage.load(1)
        await stage.engine.resume()
        return prompt, await call

    prompt, completion = stage.run(scene())
    assert (completion.versions == stage.version).all()
    stage.check(prompt, completion)


# ---------------------------------------------------------------- opening, time and the end


def test_an_open_engine_can_be_opened_again_and_answers(stage):
    async def scene():
        await stage.engine.open()
        await stage.engine.open()
        return await stage.ask(prompts(9)[0])

    assert len(stage.run(scene()).tokens) > 0


def test_seconds_grow_with_work_and_are_finite(stage):
    async def scene():
        before = stage.engine.seconds
        await stage.ask_all(prompts(9, 20))
        between = stage.engine.seconds
        await stage.ask_all(prompts(9, 20, seed=1))
        return before, between, stage.engine.seconds

    before, between, after = stage.run(scene())
    assert 0 <= before < between < after < math.inf


@pytest.mark.parametrize("kind", QUICK)
def test_an_engine_can_be_closed_twice_and_keeps_its_seconds(kind, tmp_path):
    stage = Stage(KINDS[kind], tmp_path)

    async def scene():
        await stage.engine.open()
        await stage.ask(prompts(9)[0])
        worked = stage.engine.seconds
        await stage.engine.close()
        await stage.engine.close()
        return worked

    worked = stage.run(scene())
    assert 0 < worked <= stage.engine.seconds < math.inf
    stage.close()


@pytest.mark.parametrize("kind", KINDS)
def test_close_fails_what_is_in_flight(kind, tmp_path):
    stage = Stage(KINDS[kind], tmp_path)

    async def scene():
        calls = long_calls(stage, prompts(*[8] * 20))
        await asyncio.sleep(0)
        await stage.engine.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    assert any(isinstance(result, EngineFailure) for result in stage.run(scene()))
    stage.close()
