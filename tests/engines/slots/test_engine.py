import asyncio
import copy
import threading

import numpy as np
import pytest
import torch

from engines.conformance import continued_logprobs
from support.acting import (
    CONTEXT,
    VOCABULARY,
    Parrot,
    byte_tokenizer,
    full_logprobs,
    inline,
    run,
    served,
    slot_engine,
    tiny_model,
    until,
)
from turnwise.engines.base import EngineFailure, Sampling
from turnwise.engines.slots.attention import PassAttention
from turnwise.engines.slots.sample import BatchSampling, draw
from turnwise.seeds import uniforms
from turnwise.types import StopReason

KINDS = ("qwen3", "llama", "qwen2")


def prompts(*sizes, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, size).astype(np.int32) for size in sizes]


def check(model, prompt, completion, temperature=1.0):
    """The engine's logprobs are those of the stock model on the whole sequence."""
    assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions)
    np.testing.assert_allclose(
        completion.logprobs, full_logprobs(model, prompt, completion.tokens, temperature), atol=1e-5, rtol=0
    )


async def together(engine, asked, max_tokens=8, first_seed=0, **shape):
    """Completions of prompts asked for at once, in sessions of their own."""
    return await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(max_tokens, **shape), session=f"s{i}", seed=first_seed + i)
            for i, prompt in enumerate(asked)
        )
    )


# ---------------------------------------------------------------- what is sampled


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_slots", [1, 3, 16])
def test_logprobs_are_those_of_a_full_forward_for_ragged_requests(kind, num_slots):
    model = tiny_model(kind)
    asked = prompts(1, 30, 2, 17, 5, 41, 1, 9, 23)
    engine = slot_engine(served(model), slots=num_slots)

    async def all_of_them():
        return await asyncio.gather(
            *(
                engine.generate(prompt, Sampling(3 + 4 * i, temperature=0.6 + 0.2 * i), session=f"s{i}", seed=i)
                for i, prompt in enumerate(asked)
            )
        )

    for i, (prompt, completion) in enumerate(zip(asked, run(all_of_them()), strict=True)):
        assert len(completion.tokens) == 3 + 4 * i
        assert completion.stop is StopReason.length
        check(model, prompt, completion, temperature=0.6 + 0.2 * i)


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_reuse_their_prefix_and_stay_exact(kind):
    model = tiny_model(kind)
    engine = slot_engine(served(model), slots=3)

    async def talk(name, seed):
        random = np.random.default_rng(seed)
        prompt, turns = random.integers(0, VOCABULARY, 5 + 3 * seed).astype(np.int32), []
        for turn in range(4):
            completion = await engine.generate(prompt, Sampling(4 + seed), session=name, seed=10 * seed + turn)
            turns.append((prompt, completion))
            prompt = np.concatenate([prompt, completion.tokens, random.integers(0, VOCABULARY, 3).astype(np.int32)])
        return turns

    async def all_of_them():
        return await asyncio.gather(*(talk(f"s{seed}", seed) for seed in range(3)))

    talks = run(all_of_them())
    for turns in talks:
        for prompt, completion in turns:
            check(model, prompt, completion)
    # Of a later prompt only its new observation and the last sampled token were not cached.
    new = [len(turns[0][0]) + 4 * (len(turns) - 1) for turns in talks]
    assert engine.model.prefilled_tokens <= sum(new)
    assert engine.model.prefilled_tokens >= sum(new) - 3  # prompts may begin alike


def test_a_session_that_goes_on_does_not_push_out_another():
    engine = slot_engine(served(tiny_model()), slots=2)
    first, second, more = prompts(30, 20, 3)

    async def scene():
        said = {}
        for name, prompt in (("a", first), ("b", second), ("b", second), ("a", first)):
            if name in said:
                prompt = np.concatenate([prompt, said[name].tokens, more])
            said[name] = await engine.generate(prompt, Sampling(4), session=name, seed=1)

    run(scene())
    assert engine.model.prefilled_tokens <= 30 + 20 + 4 + 4


def test_any_mixture_of_histories_is_exact():
    """Prompts that extend, branch off or repeat earlier ones, in waves larger than the slots, with a load between."""
    models = [tiny_model(seed=seed) for seed in range(2)]
    engine = slot_engine(served(models[0]), slots=3, run=inline)
    random = np.random.default_rng(1)

    async def waves():
        known = [random.integers(0, VOCABULARY, 20).astype(np.int32)]
        asked = []
        for wave in range(12):
            model = models[wave // 6]
            if wave == 6:
                await engine.load(model.state_dict(), 1)
            chosen = []
            for _ in range(5):
                base = known[random.integers(len(known))]
                kept = base[: random.integers(1, min(len(base), 60) + 1)]
                chosen.append(
                    np.concatenate([kept, random.integers(0, VOCABULARY, random.integers(0, 4))]).astype(np.int32)
                )
            sessions = random.integers(0, 6, 5)
            completions = await asyncio.gather(
                *(
                    engine.generate(p, Sampling(int(random.integers(1, 9))), session=f"s{s}", seed=100 * wave + i)
                    for i, (p, s) in enumerate(zip(chosen, sessions, strict=True))
                )
            )
            for prompt, completion in zip(chosen, completions, strict=True):
                asked.append((model, prompt, completion))
                known.append(np.concatenate([prompt, completion.tokens]))
        return asked

    asked = run(waves())
    for model, prompt, completion in asked:
        check(model, prompt, completion)
    assert engine.model.prefilled_tokens < 0.6 * sum(len(prompt) - 1 for _, prompt, _ in asked)


def test_a_request_gives_the_same_alone_and_in_a_batch():
    model = tiny_model()
    asked = prompts(12, 3, 30, 7, 21)
    batch = run(together(slot_engine(served(model), slots=5), asked, 20))
    queued = run(together(slot_engine(served(model), slots=2), asked, 20))
    for i, prompt in enumerate(asked):
        engine = slot_engine(served(model), slots=1)
        alone = run(engine.generate(prompt, Sampling(20), session="other", seed=i))
        for other in (batch[i], queued[i]):
            assert alone.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(alone.logprobs, other.logprobs, atol=1e-5)


def test_a_run_repeats_to_the_bit():
    model = tiny_model()
    first, second = (run(together(slot_engine(served(model), slots=2), prompts(12, 3, 30), 20)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_the_seed_decides_what_is_sampled():
    engine = slot_engine(served(tiny_model()))
    same = prompts(10)[0]

    async def four():
        return [
            (await engine.generate(same, Sampling(12), session="s", seed=s)).tokens.tolist()
            for s in (1, 2, 1, 2**64 - 1)
        ]

    first, second, again, last = run(four())
    assert first == again
    assert first != second
    assert last not in (first, second)


def test_the_noise_of_a_token_is_that_of_its_seed_and_place_in_the_action():
    model = tiny_model()
    prompt, other = prompts(10, 30)
    seed = 2**63 + 12345

    async def scene():
        engine = slot_engine(served(model), slots=2)
        await engine.generate(prompt[:6], Sampling(3), session="a", seed=1)
        return await asyncio.gather(
            engine.generate(other, Sampling(12), session="b", seed=2),
            engine.generate(prompt, Sampling(12), session="a", seed=seed),
        )

    completion = run(scene())[1]
    whole = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = model(input_ids=whole).logits[0, len(prompt) - 1 : -1]
    noise = torch.from_numpy(uniforms(np.full(12, seed, np.uint64), np.arange(12)))
    assert completion.tokens.tolist() == draw(logits, BatchSampling(None, None, None), noise)[0].tolist()


def test_greedy_takes_the_likeliest_token_beside_sampled_neighbours():
    model = tiny_model()
    engine = slot_engine(served(model))
    prompt, other = prompts(9, 14)

    async def both():
        return await asyncio.gather(
            engine.generate(prompt, Sampling(10, temperature=0.0), session="a", seed=1),
            engine.generate(other, Sampling(10, temperature=0.7), session="b", seed=2),
        )

    greedy, sampled = run(both())
    whole = torch.from_numpy(np.concatenate([prompt, greedy.tokens]).astype(np.int64))[None]
    with torch.inference_mode():
        likeliest = model(input_ids=whole).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert greedy.tokens.tolist() == likeliest.tolist()
    assert (greedy.logprobs == 0).all()
    check(model, other, sampled, 0.7)


def test_top_k_and_top_p_shape_what_is_sampled():
    model = tiny_model()
    engine = slot_engine(served(model))
    prompt = prompts(9)[0]
    shaped = run(engine.generate(prompt, Sampling(30, top_k=3, top_p=0.9), session="a", seed=1))
    whole = torch.from_numpy(np.concatenate([prompt, shaped.tokens]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = model(input_ids=whole).logits[0, len(prompt) - 1 : -1]
    rank = (logits > logits.gather(1, whole[0, len(prompt) :, None])).sum(-1)
    assert rank.max() == 2
    kept = logits.topk(3).values.softmax(-1)
    kept = kept * (kept.cumsum(-1) - kept < 0.9)
    expected = (kept / kept.sum(-1, keepdim=True)).gather(1, rank[:, None])[:, 0].log()
    np.testing.assert_allclose(shaped.logprobs, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("pass_tokens", [6, 10, 33])
def test_a_small_pass_changes_nothing(pass_tokens):
    model = tiny_model()
    asked = [*prompts(12, 3, 30, 7, 21), *prompts(90)]
    asked[4][:15] = asked[2][:15]
    plenty = run(together(slot_engine(served(model), slots=5), asked, 6))
    engine = slot_engine(served(model), slots=5, pass_tokens=pass_tokens)
    sizes = []
    forward = engine.model.forward

    def counted(which):
        sizes.append((which.size, len(which.slots)))
        return forward(which)

    engine.model.forward = counted
    for one, other in zip(plenty, run(together(engine, asked, 6)), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    assert max(size for size, _ in sizes) == pass_tokens
    assert any(0 < rows < size for size, rows in sizes)  # prompts are filled in beside requests that sample


def test_timing_covers_the_call():
    async def timed():
        engine = slot_engine(served(tiny_model()), slots=1)
        began = asyncio.get_running_loop().time()
        done = await together(engine, prompts(5, 5), 10)
        return [c.timing for c in done], asyncio.get_running_loop().time() - began

    (first, second), total = run(timed())
    assert min(first.queued, first.prefill, first.decode, second.queued) > 0
    assert second.queued >= first.prefill + first.decode
    assert second.queued + second.prefill + second.decode <= total


# ---------------------------------------------------------------- where sampling ends


def recite(text, *, max_tokens=200, stop=(), context=400, prompt="p:", num=1):
    """What an engine gives whose model says `text`, then other bytes; the end token is written \\x00."""
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    encode = lambda part: tokenizer(part, add_special_tokens=False)["input_ids"]
    script = encode(prompt) + [token for part in text.split("\x00") for token in [*encode(part), end]][:-1]
    model = Parrot([*script, *encode("~" * 300)], len(tokenizer))
    engine = slot_engine(model, context=context, end_tokens=[end], decode=tokenizer.decode, slots=2)
    asked = np.array(encode(prompt), np.int32)

    async def ask():
        return await asyncio.gather(
            *(engine.generate(asked, Sampling(max_tokens, stop=stop), session=str(i), seed=i) for i in range(num))
        )

    completion = run(ask())[-1]
    return tokenizer.decode(completion.tokens.tolist()), completion


def test_an_end_token_ends_the_action_and_is_part_of_it():
    text, completion = recite("done\x00more")
    assert text == "done<|im_end|>"
    assert completion.stop is StopReason.end_token


def test_an_end_token_at_the_limit_is_an_end_token():
    _, completion = recite("done\x00more", max_tokens=5)
    assert len(completion.tokens) == 5
    assert completion.stop is StopReason.end_token


def test_an_end_token_in_the_prompt_ends_nothing():
    tokenizer = byte_tokenizer()
    text, _ = recite("ab\x00", prompt=f"x{tokenizer.eos_token}y")
    assert text == "ab<|im_end|>"


@pytest.mark.parametrize(("max_tokens", "context", "size"), [(7, 400, 7), (1, 400, 1), (200, 12, 10), (200, 3, 1)])
def test_limits_end_the_action(max_tokens, context, size):
    text, completion = recite("a long story", max_tokens=max_tokens, context=context)
    assert text == "a long story"[:size]
    assert completion.stop is StopReason.length


@pytest.mark.parametrize(
    ("said", "stop", "kept"),
    [
        ("so <b>x</b> and </answer> tail", ("</answer>",), "so <b>x</b> and </answer>"),
        ("one two three", ("three", "two"), "one two"),
        ("aab", ("ab",), "aab"),
        ("é and 本日 more", ("本日",), "é and 本日"),
        ("木本", ("本",), "木本"),
        ("x🙂y", ("🙂",), "x🙂"),
        ("日日🙂y", ("日🙂",), "日日🙂"),
        ("\n\nx", ("\n",), "\n"),
        ("  x", (" x",), "  x"),
    ],
)
def test_a_stop_string_ends_the_action_with_the_token_that_completes_it(said, stop, kept):
    text, completion = recite(said, stop=stop, num=3)
    assert text == kept
    assert completion.stop is StopReason.stop_string


def test_a_stop_string_does_not_begin_in_the_prompt():
    text, completion = recite("er> x </answer>", stop=("</answer>",), prompt="say </answ")
    assert text == "er> x </answer>"
    assert completion.stop is StopReason.stop_string


def test_a_stop_string_at_the_limit_is_a_stop_string():
    _, completion = recite("abc", stop=("c",), max_tokens=3)
    assert completion.stop is StopReason.stop_string
    _, completion = recite("abc", stop=("cd",), max_tokens=3)
    assert completion.stop is StopReason.length


def test_a_stop_string_within_a_token_of_many_letters():
    """The token that completes it is kept whole."""
    words = ["go", " left</", "stop> now", "!"]
    engine = slot_engine(Parrot([0, 0, 1, 2, 3, 3], 4), decode=lambda tokens: "".join(words[t] for t in tokens))
    completion = run(engine.generate(np.array([0]), Sampling(5, stop=("</stop>",)), session="s", seed=0))
    assert completion.tokens.tolist() == [0, 1, 2]
    assert completion.stop is StopReason.stop_string


def test_a_stop_string_with_a_leading_space_under_a_decoder_that_strips_it():
    words = [" a", " ", "b", " c"]
    engine = slot_engine(
        Parrot([0, 0, 1, 2, 3, 3], 4), decode=lambda tokens: "".join(words[t] for t in tokens).removeprefix(" ")
    )
    completion = run(engine.generate(np.array([0]), Sampling(4, stop=(" b",)), session="s", seed=0))
    assert completion.tokens.tolist() == [0, 1, 2]


# ---------------------------------------------------------------- abort, cancel, pause


def test_abort_returns_what_was_sampled():
    model = tiny_model()
    engine = slot_engine(served(model), slots=2)
    asked = prompts(8, 11, 6, 5, 9)
    names = ("long", "other", "waiting", "waiting", "patient")

    async def scene():
        calls = [
            asyncio.create_task(engine.generate(p, Sampling(80), session=name, seed=i))
            for i, (p, name) in enumerate(zip(asked, names, strict=True))
        ]
        await until(lambda: engine.model.sampled_tokens >= 10)
        await engine.abort("long")
        await engine.abort("waiting")
        await engine.abort("nobody")
        aborted = await calls[0], await calls[2], await calls[3]
        return aborted, (await calls[1], await calls[4])

    (running, *waiting), others = run(scene())
    assert running.stop is StopReason.abort
    assert 5 <= len(running.tokens) < 80
    check(model, asked[0], running)
    for completion in waiting:
        assert completion.stop is StopReason.abort
        assert len(completion.tokens) == 0
    for prompt, other in zip((asked[1], asked[4]), others, strict=True):
        assert other.stop is StopReason.length
        assert len(other.tokens) == 80
        check(model, prompt, other)


def test_abort_before_the_first_step():
    engine = slot_engine(served(tiny_model()))

    async def scene():
        call = asyncio.create_task(engine.generate(prompts(5)[0], Sampling(50), session="s", seed=0))
        await asyncio.sleep(0)
        await engine.abort("s")
        return await call

    completion = run(scene())
    assert completion.stop is StopReason.abort
    assert len(completion.tokens) <= 2


@pytest.mark.parametrize("in_thread", [False, True])
def test_cancelled_callers_free_their_slots_and_others_go_on(in_thread):
    model = tiny_model()
    engine = slot_engine(served(model), slots=2, run=asyncio.to_thread if in_thread else inline)
    asked = prompts(8, 11, 6, 5, 7)

    lengths = (80, 20, 80, 6, 7)

    async def scene():
        calls = [
            asyncio.create_task(engine.generate(p, Sampling(length), session=f"s{i}", seed=i))
            for i, (p, length) in enumerate(zip(asked, lengths, strict=True))
        ]
        await until(lambda: engine.model.sampled_tokens >= 6)
        calls[0].cancel()  # running
        calls[2].cancel()  # waiting
        late = asyncio.create_task(engine.generate(asked[0], Sampling(80), session="late", seed=9))
        await asyncio.sleep(0)
        late.cancel()  # not yet handed over
        before = engine.model.sampled_tokens
        results = await asyncio.gather(*calls, late, return_exceptions=True)
        await until(lambda: not engine.model.busy)
        await engine.close()
        return results, before

    results, before = run(scene())
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False, True, False, False, True]
    for i in (1, 3, 4):
        check(model, asked[i], results[i])
    # After the cancellation only the three others sample, beside one token of a step under way.
    assert engine.model.sampled_tokens <= before + 20 + 6 + 7 + 2


def test_a_deadline_on_a_call_is_a_cancelled_caller():
    engine = slot_engine(served(tiny_model()), slots=1)

    async def scene():
        await engine.pause()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await engine.generate(prompts(5)[0], Sampling(5), session="a", seed=0)
        await engine.resume()
        return await engine.generate(prompts(5)[0], Sampling(5), session="b", seed=0)

    assert len(run(scene()).tokens) == 5
    assert not engine.model.busy


def test_nothing_is_sampled_while_paused():
    model = tiny_model()
    engine = slot_engine(served(model), slots=2, run=asyncio.to_thread)
    asked = prompts(6, 9, 4)

    async def scene():
        calls = asyncio.create_task(together(engine, asked, 60))
        await until(lambda: engine.model.sampled_tokens >= 6)
        await engine.pause()
        before = engine.model.sampled_tokens
        await asyncio.sleep(0.05)
        assert engine.model.sampled_tokens == before
        assert not calls.done()
        await engine.resume()
        done = await calls
        await engine.close()
        return done

    for prompt, completion in zip(asked, run(scene()), strict=True):
        assert len(completion.tokens) == 60
        check(model, prompt, completion)


def test_weights_can_be_loaded_and_calls_aborted_while_paused():
    model, new = tiny_model(seed=0), tiny_model(seed=1)
    engine = slot_engine(served(model), slots=2)
    asked = prompts(6, 9)

    async def scene():
        calls = [
            asyncio.create_task(engine.generate(p, Sampling(40), session=f"s{i}", seed=i)) for i, p in enumerate(asked)
        ]
        await until(lambda: engine.model.sampled_tokens >= 6)
        await engine.pause()
        async with asyncio.timeout(2):
            await engine.load(new.state_dict(), 1)
            await engine.abort("s0")
            aborted = await calls[0]
        await engine.resume()
        return aborted, await calls[1]

    aborted, other = run(scene())
    assert aborted.stop is StopReason.abort
    assert set(aborted.versions.tolist()) == {0}
    assert len(other.tokens) == 40
    assert set(other.versions.tolist()) == {0, 1}


def test_a_pause_after_a_resume_holds():
    engine = slot_engine(served(tiny_model()), slots=2)

    async def scene():
        await engine.pause()
        call = asyncio.create_task(engine.generate(prompts(5)[0], Sampling(3), session="a", seed=0))
        await asyncio.sleep(0.01)  # the driver waits for the resume
        await engine.resume()
        await engine.pause()
        await asyncio.sleep(0.02)
        assert engine.model.sampled_tokens == 0
        await engine.resume()
        await call

    run(scene())


def test_a_resume_without_a_pause_is_harmless():
    engine = slot_engine(served(tiny_model()), run=asyncio.to_thread)

    async def scene():
        call = asyncio.create_task(engine.generate(prompts(5)[0], Sampling(10), session="a", seed=0))
        while not call.done():
            await engine.resume()
            await asyncio.sleep(0.001)
        return await call

    assert len(run(scene()).tokens) == 10


# ---------------------------------------------------------------- loads


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_in_flight_shows_in_the_versions_and_nothing_stops(kind):
    old, new = tiny_model(kind, 0), tiny_model(kind, 1)
    engine = slot_engine(served(old), slots=3, run=asyncio.to_thread)
    asked = prompts(8, 13, 5, 7)

    async def scene():
        calls = asyncio.create_task(together(engine, asked, 60))
        await until(lambda: engine.model.sampled_tokens >= 15)
        await engine.load(new.state_dict(), 7)
        done = await calls
        await engine.close()
        return done

    *in_flight, queued = run(scene())
    for prompt, completion in zip(asked, in_flight, strict=False):
        assert len(completion.tokens) == 60
        assert completion.stop is StopReason.length
        num_old = int((completion.versions == 0).sum())
        assert completion.versions.tolist() == [0] * num_old + [7] * (60 - num_old)
        assert 0 < num_old < 60
        expected = continued_logprobs(old, new, prompt, completion, num_old)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
    assert (queued.versions == 7).all()
    check(new, asked[3], queued)


def test_a_prefix_cached_by_old_weights_is_not_reused():
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    engine = slot_engine(served(old), slots=2)
    prompt, observation = prompts(20, 3)

    async def scene():
        first = await engine.generate(prompt, Sampling(6), session="a", seed=0)
        await engine.load(new.state_dict(), 1)
        longer = np.concatenate([prompt, first.tokens, observation])
        second = await engine.generate(longer, Sampling(6), session="a", seed=1)
        third = await engine.generate(longer, Sampling(6), session="b", seed=2)
        prefilled = engine.model.prefilled_tokens
        longest = np.concatenate([longer, second.tokens, observation])
        fourth = await engine.generate(longest, Sampling(6), session="a", seed=3)
        return [(longer, second), (longer, third), (longest, fourth)], engine.model.prefilled_tokens - prefilled

    asked, prefilled = run(scene())
    for given, completion in asked:
        check(new, given, completion)
        assert (completion.versions == 1).all()
    assert prefilled == len(observation) + 1  # what the new weights cached is reused


def test_a_call_that_saw_a_load_leaves_nothing_to_reuse():
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    engine = slot_engine(served(old), slots=2)
    prompt = prompts(20)[0]

    async def scene():
        call = asyncio.create_task(engine.generate(prompt, Sampling(40), session="a", seed=0))
        await until(lambda: engine.model.sampled_tokens >= 5)
        await engine.load(new.state_dict(), 1)
        during = await engine.generate(prompt, Sampling(6), session="b", seed=1)
        first = await call
        longer = np.concatenate([prompt, first.tokens])
        return first, [(prompt, during), (longer, await engine.generate(longer, Sampling(6), session="a", seed=2))]

    first, asked = run(scene())
    assert set(first.versions.tolist()) == {0, 1}
    for given, completion in asked:
        check(new, given, completion)


@pytest.mark.parametrize("how", ["forget", "load"])
def test_what_follows_does_not_depend_on_what_was_served_before(how):
    """To the bit: what shares a pass, and which prefix is reused, would show in the last digits."""
    model = tiny_model()

    async def serve(first):
        engine = slot_engine(served(tiny_model(seed=1) if how == "load" else model), slots=3)
        if first:
            await together(engine, prompts(*first, seed=1), 6)
        if how == "load":
            await engine.load(model.state_dict(), 1)
        else:
            await engine.forget()
        prefilled = engine.model.prefilled_tokens
        done = await together(engine, prompts(12, 3, 30, 17, 8), 9)
        return [(c.tokens.tobytes(), c.logprobs.tobytes()) for c in done], engine.model.prefilled_tokens - prefilled

    fresh = run(serve(()))
    assert fresh == run(serve((12, 3, 30, 17, 8))) == run(serve((40,)))


def test_forgetting_does_not_disturb_calls_in_flight():
    model = tiny_model()
    engine = slot_engine(served(model), slots=2)
    asked = prompts(6, 9, 12)

    async def scene():
        calls = asyncio.create_task(together(engine, asked, 30))
        await until(lambda: engine.model.sampled_tokens >= 8)
        await engine.forget()
        return await calls

    for prompt, completion in zip(asked, run(scene()), strict=True):
        assert len(completion.tokens) == 30
        check(model, prompt, completion)


def test_shared_weights_need_only_a_version():
    """At lag 0 the learner changes the module itself; what was cached before must not be reused."""
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    shared = served(old)
    engine = slot_engine(shared, shares_weights=True)
    prompt = prompts(20)[0]

    async def scene():
        first = await engine.generate(prompt, Sampling(6), session="a", seed=0)
        shared.load_state_dict(new.state_dict())
        await engine.load({"nonsense": torch.zeros(1)}, 1)
        return first, await engine.generate(prompt, Sampling(6), session="a", seed=0)

    first, second = run(scene())
    check(old, prompt, first)
    check(new, prompt, second)
    assert second.versions.tolist() == [1] * 6


def test_a_tied_head_is_loaded_too():
    old, new = tiny_model(seed=0, tied=True), tiny_model(seed=1, tied=True)
    engine = slot_engine(served(old))
    prompt = prompts(9)[0]

    async def scene():
        await engine.load(new.state_dict(), 1)
        return await engine.generate(prompt, Sampling(6), session="a", seed=0)

    check(new, prompt, run(scene()))


def test_a_load_copies():
    """The learner goes on changing the tensors it published."""
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    engine = slot_engine(served(old))
    weights = copy.deepcopy(new.state_dict())
    prompt = prompts(9)[0]

    async def scene():
        await engine.load(weights, 1)
        for tensor in weights.values():
            tensor.zero_()
        return await engine.generate(prompt, Sampling(6), session="a", seed=0)

    check(new, prompt, run(scene()))


def test_a_load_that_lacks_tensors_is_refused_and_changes_nothing():
    old = tiny_model(seed=0)
    engine = slot_engine(served(old))
    weights = tiny_model(seed=1).state_dict()
    del weights["lm_head.weight"]
    prompt = prompts(9)[0]

    async def scene():
        with pytest.raises(EngineFailure, match="lm_head"):
            await engine.load(weights, 1)
        return await engine.generate(prompt, Sampling(6), session="a", seed=0)

    completion = run(scene())
    check(old, prompt, completion)
    assert completion.versions.tolist() == [0] * 6


# ---------------------------------------------------------------- failures and mistakes


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_failing_forward_fails_the_calls_in_flight_and_no_others(in_thread):
    model = tiny_model()
    engine = slot_engine(served(model), slots=2, run=asyncio.to_thread if in_thread else inline)
    asked = prompts(8, 11, 6)
    forward = engine.model.forward
    broken = threading.Event()

    def flaky(slots):
        if engine.model.sampled_tokens >= 4 and not broken.is_set():
            broken.set()
            raise MemoryError("out of memory")
        return forward(slots)

    engine.model.forward = flaky

    async def scene():
        failed = await asyncio.gather(
            *(engine.generate(p, Sampling(50), session=f"s{i}", seed=i) for i, p in enumerate(asked)),
            return_exceptions=True,
        )
        after = await together(engine, asked, 9)
        await engine.close()
        return failed, after

    failed, after = run(scene())
    for error in failed:
        assert isinstance(error, EngineFailure)
        assert "out of memory" in str(error)
    for prompt, completion in zip(asked, after, strict=True):
        check(model, prompt, completion)


def test_what_a_failed_pass_cached_is_not_reused(monkeypatch):
    """A pass that dies after the first layer has overwritten part of the cache."""
    model = tiny_model()
    engine = slot_engine(served(model))
    prompt = prompts(20)[0]
    attend = PassAttention.__call__

    def die(attention, layer, *states):
        if layer == 1:
            raise RuntimeError("second layer")
        return attend(attention, layer, *states)

    async def scene():
        await engine.generate(prompt, Sampling(4), session="a", seed=0)
        monkeypatch.setattr(PassAttention, "__call__", die)
        other = prompt.copy()
        other[5:] = (other[5:] + 1) % VOCABULARY
        with pytest.raises(EngineFailure):
            await engine.generate(other, Sampling(4), session="a", seed=0)
        monkeypatch.undo()
        return [(p, await engine.generate(p, Sampling(4), session="a", seed=1)) for p in (other, prompt)]

    for given, completion in run(scene()):
        check(model, given, completion)


def test_a_decode_that_raises_fails_the_call():
    def decode(tokens):
        raise ValueError("no such token")

    engine = slot_engine(served(tiny_model()), decode=decode)
    with pytest.raises(EngineFailure, match="no such token"):
        run(engine.generate(prompts(4)[0], Sampling(5, stop=("x",)), session="a", seed=0))


def test_a_decode_that_raises_leaves_the_others_alone():
    model, asked = tiny_model(), prompts(6, 9, 4, 7)
    free = run(together(slot_engine(served(model)), asked, 13))

    def decode(tokens):
        if asked_for_stop(tokens):
            raise UnicodeDecodeError("utf-8", b"", 0, 1, "half a character")
        return "-"

    asked_for_stop = lambda tokens: tokens[-1:] == free[2].tokens.tolist()[3:4]
    engine = slot_engine(served(model), decode=decode)

    async def scene():
        calls = [
            engine.generate(prompt, Sampling(13, stop=("x",) if i == 2 else ()), session=f"s{i}", seed=i)
            for i, prompt in enumerate(asked)
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    done = run(scene())
    assert isinstance(done[2], EngineFailure)
    assert "half a character" in str(done[2])
    for place in (0, 1, 3):
        assert done[place].tokens.tolist() == free[place].tokens.tolist()
    assert not engine.model.busy
    assert sorted(engine.scheduler.free_slots) == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_whose_logits_are_no_numbers_fails_alone(temperature):
    """A model that has no numbers for one token: nothing of it is left in memory that others use afterwards."""
    model, bad = tiny_model(), VOCABULARY - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
        model.get_output_embeddings().weight[bad] = 0.0
    asked = [prompt % bad for prompt in prompts(40, 9, 4, 40, 33, 12)]
    alone = [
        run(slot_engine(served(model)).generate(p, Sampling(20), session="s", seed=i)) for i, p in enumerate(asked)
    ]
    engine = slot_engine(served(model))

    async def scene():
        found = []
        for size in (3, 30, 60):
            poisoned = prompts(size)[0] % bad
            poisoned[size // 2] = bad
            calls = [engine.generate(p, Sampling(20), session=f"s{i}", seed=i) for i, p in enumerate(asked)]
            calls.insert(1, engine.generate(poisoned, Sampling(20, temperature), session="poison", seed=0))
            found.append(await asyncio.gather(*calls, return_exceptions=True))
        return found

    for done in run(scene()):
        failed = done.pop(1)
        assert isinstance(failed, EngineFailure)
        assert "not numbers" in str(failed)
        for one, other in zip(alone, done, strict=True):
            sampled = [bad] if bad in one.tokens else []
            assert not sampled, "the prompts were to avoid it"
            assert other.tokens.tolist() == one.tokens.tolist()
    assert not engine.model.busy


def test_a_stop_string_between_tokens_that_are_nothing():
    words = ["<", "/s>", "", "."]
    script = [3, 3, 0, *[2] * 40, 1, 3, 3]
    engine = slot_engine(Parrot(script, 4), decode=lambda tokens: "".join(words[token] for token in tokens))
    completion = run(engine.generate(np.array([3]), Sampling(80, stop=("</s>",)), session="s", seed=0))
    assert completion.tokens.tolist() == [3, 0, *[2] * 40, 1]
    assert completion.stop is StopReason.stop_string


def test_a_request_that_cannot_be_admitted_does_not_hang():
    model = tiny_model()
    engine = slot_engine(served(model))
    allocate_path = engine.scheduler.radix.allocate_path

    def fails(*_):
        engine.scheduler.radix.allocate_path = allocate_path
        raise MemoryError("no room for a prefix")

    engine.scheduler.radix.allocate_path = fails
    prompt = prompts(4)[0]

    async def scene():
        with pytest.raises(EngineFailure, match="no room"):
            await engine.generate(prompt, Sampling(5), session="a", seed=0)
        return await engine.generate(prompt, Sampling(5), session="a", seed=0)

    check(model, prompt, run(scene(), seconds=5))


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_has_64_bits(seed):
    engine = slot_engine(served(tiny_model()))
    with pytest.raises(ValueError, match="64 bits"):
        run(engine.generate(prompts(4)[0], Sampling(5), session="a", seed=seed), seconds=5)


def test_an_empty_prompt_is_a_mistake():
    engine = slot_engine(served(tiny_model()))
    with pytest.raises(ValueError, match="at least one token"):
        run(engine.generate(np.zeros(0, np.int32), Sampling(5), session="a", seed=0))
    assert engine.driver is None


@pytest.mark.parametrize("size", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_a_prompt_without_room_for_an_action_is_a_mistake(size):
    engine = slot_engine(served(tiny_model()))
    with pytest.raises(ValueError, match=f"{size} tokens leaves no room in a context of {CONTEXT}"):
        run(engine.generate(np.zeros(size, np.int32), Sampling(5), session="a", seed=0))


def test_the_longest_prompt_has_room_for_one_token():
    model = tiny_model()
    engine = slot_engine(served(model))
    prompt = prompts(CONTEXT - 1)[0]
    completion = run(engine.generate(prompt, Sampling(5), session="a", seed=0))
    assert len(completion.tokens) == 1
    assert completion.stop is StopReason.length
    check(model, prompt, completion)


@pytest.mark.parametrize("in_thread", [False, True])
def test_close_fails_what_is_in_flight(in_thread):
    engine = slot_engine(served(tiny_model()), slots=1, run=asyncio.to_thread if in_thread else inline)

    async def scene():
        calls = [asyncio.create_task(engine.generate(p, Sampling(80), session="a", seed=0)) for p in prompts(4, 5)]
        await until(lambda: engine.model.sampled_tokens >= 3)
        calls.append(asyncio.create_task(engine.generate(prompts(4)[0], Sampling(80), session="c", seed=0)))
        await asyncio.sleep(0)
        await engine.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        await engine.close()
        return results, [task.get_name() for task in asyncio.all_tasks()]

    results, tasks = run(scene())
    assert all(isinstance(result, EngineFailure) and "closed" in str(result) for result in results)
    assert "slot engine" not in tasks
    assert not engine.model.busy


def test_closing_an_engine_that_served_nobody():
    run(slot_engine(served(tiny_model())).close())


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_samples_close_to_float32(kind):
    model = tiny_model(kind)
    engine = slot_engine(served(model), dtype=torch.bfloat16)
    prompt = prompts(10)[0]
    completion = run(engine.generate(prompt, Sampling(10), session="a", seed=0))
    gap = np.abs(completion.logprobs - full_logprobs(model, prompt, completion.tokens))
    assert 1e-4 < gap.mean() < 0.1
