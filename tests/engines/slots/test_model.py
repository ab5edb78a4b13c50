import asyncio

import numpy as np
import pytest
import torch

from support.acting import CONTEXT, VOCABULARY, full_logprobs, run, served, slot_engine, tiny_model, until
from support.making import make_model
from turnwise.engines.base import Sampling
from turnwise.engines.slots.model import SlotModel, cache_tokens
from turnwise.engines.slots.scheduler import WORTH_SHARING
from turnwise.types import StopReason

TOKEN = 2 * 2 * 2 * 8 * 4
"""Bytes of one token's keys and values in `tiny_model`."""


def prompts(*sizes, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, size).astype(np.int32) for size in sizes]


def check(model, prompt, completion, temperature=1.0):
    np.testing.assert_allclose(
        completion.logprobs, full_logprobs(model, prompt, completion.tokens, temperature), atol=1e-5, rtol=0
    )


async def together(engine, asked, lengths, first_seed=0):
    return await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(length), session=f"{first_seed}/{i}", seed=first_seed + i)
            for i, (prompt, length) in enumerate(zip(asked, lengths, strict=True))
        )
    )


def limited(model, tokens, **settings):
    """An engine with room for so many tokens."""
    engine = slot_engine(served(model), **settings)
    engine.scheduler.radix.capacity = tokens
    return engine


# ---------------------------------------------------------------- sharing


@pytest.mark.parametrize("num_slots", [8, 3, 1])
def test_a_groups_prompt_is_computed_once(num_slots):
    """Also where all eight come in one pass, and where there are fewer slots than attempts."""
    model = tiny_model()
    engine = slot_engine(served(model), slots=num_slots)
    prompt = prompts(60)[0]
    done = run(together(engine, [prompt] * 8, range(4, 20, 2)))
    for completion in done:
        check(model, prompt, completion)
    assert len({tuple(completion.tokens[:4]) for completion in done}) > 4
    assert engine.model.prefilled_tokens == 59 + 8  # and each its last token, whose logits it needs


def test_prompts_that_begin_alike_are_computed_once_up_to_where_they_part():
    model = tiny_model()
    engine = slot_engine(served(model), slots=8)
    system, first, second, third = prompts(40, 10, 12, 1)
    asked = [np.concatenate(parts) for parts in ((system, first), (system, second), (system, third), (system,))]
    for prompt, completion in zip(asked, run(together(engine, asked, [6] * 4)), strict=True):
        check(model, prompt, completion)
    # The last prompt ends within the beginning that all share: it computes its last token itself.
    assert engine.model.prefilled_tokens == 40 + 10 + 12 + 1 + 1


def test_sessions_of_a_group_share_their_prompt_in_later_turns_too():
    model = tiny_model()
    engine = slot_engine(served(model), slots=8)
    prompt = prompts(WORTH_SHARING + 5)[0]
    shared = []
    forward = engine.model.forward

    def watched(batch):
        for read in (read for level in batch.levels for read in level):
            if ((read.start <= batch.slot_index) & (batch.slot_index < read.end)).sum() > 1:
                shared.append(len(read.node.tokens))
        return forward(batch)

    engine.model.forward = watched

    async def talk(number):
        random = np.random.default_rng(number)
        history, turns = prompt, []
        for turn in range(3):
            length = int(random.integers(3, 9))
            done = await engine.generate(history, Sampling(length), session=f"s{number}", seed=10 * number + turn)
            turns.append((history, done))
            if turn == 1:
                shared.clear()  # so that what is left is of the last turns
            history = np.concatenate([history, done.tokens, random.integers(0, VOCABULARY, 4).astype(np.int32)])
        return turns

    async def all_of_them():
        return await asyncio.gather(*(talk(number) for number in range(6)))

    talks = run(all_of_them())
    for turns in talks:
        for given, completion in turns:
            check(model, given, completion)
    assert engine.model.prefilled_tokens == len(prompt) - 1 + 6 + 6 * 2 * 5
    assert set(shared) == {len(prompt) - 1}


@pytest.mark.parametrize("shared", [0, WORTH_SHARING + 5])
def test_a_turn_attends_to_as_many_nodes_after_many_turns_as_after_few(shared):
    """In a chain of nodes, two for each turn, every turn would cost more than the one before."""
    model = tiny_model()
    engine = slot_engine(served(model), slots=4, context=192)
    beginning = prompts(shared)[0]
    levels, forward = [], engine.model.forward

    def watched(batch):
        levels.append(len(batch.levels))
        return forward(batch)

    engine.model.forward = watched

    async def talk(number):
        random = np.random.default_rng(number)
        history, turns = np.append(beginning, np.array([number, 8, 9], np.int32)), []
        for turn in range(12):
            done = await engine.generate(history, Sampling(3), session=f"s{number}", seed=100 * number + turn)
            turns.append((history, done))
            history = np.concatenate([history, done.tokens, random.integers(0, VOCABULARY, 4).astype(np.int32)])
        return turns

    async def all_of_them():
        return await asyncio.gather(*(talk(number) for number in range(4)))

    for turns in run(all_of_them()):
        for given, completion in turns:
            check(model, given, completion)
    assert max(levels) == 1 + bool(shared)
    assert len(list(engine.scheduler.radix.nodes())) == 4 + bool(shared)
    assert engine.model.prefilled_tokens == shared + 4 * 3 + 4 * 11 * 5


def test_the_same_attempt_alone_and_in_a_batch_of_64():
    model = tiny_model()
    random = np.random.default_rng(5)
    sizes = random.integers(1, 40, 64)
    asked = prompts(*sizes.tolist())
    lengths = random.integers(1, 50, 64).tolist()
    for place in range(0, 64, 8):  # groups of three, and others that begin alike
        asked[place + 1] = asked[place + 2] = asked[place]
        asked[place + 3] = np.concatenate([asked[place][: sizes[place] // 2 + 1], asked[place + 3]])[:40]
    batch = run(together(slot_engine(served(model), slots=64), asked, lengths))
    crowded = run(together(slot_engine(served(model), slots=9, pass_tokens=31), asked, lengths))
    for place in range(64):
        engine = slot_engine(served(model), slots=1)
        alone = run(engine.generate(asked[place], Sampling(lengths[place]), session="other", seed=place))
        for other in (batch[place], crowded[place]):
            assert alone.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(alone.logprobs, other.logprobs, atol=1e-5)


# ---------------------------------------------------------------- memory


def live_tokens(engine):
    """What is really held: by nodes of the tree and by rows."""
    rows = engine.scheduler.rows
    held = sum(node.states[0].shape[-2] for node in engine.scheduler.radix.nodes() if node.states is not None)
    return held + sum(rows.row_size(slot) for slot in rows.location)


def test_room_is_accounted_for_and_given_back():
    model = tiny_model()
    engine = limited(model, 400, slots=6)
    step = engine.model.step
    spent = []

    def counted():
        done = step()
        radix, rows = engine.scheduler.radix, engine.scheduler.rows
        reserved = sum(slot not in rows.location for slot in engine.scheduler.running)
        assert radix.num_allocated == live_tokens(engine) + reserved * rows.bucket_size(1)
        spent.append(radix.num_allocated)
        return done

    engine.model.step = counted

    async def scene():
        for wave in range(4):
            asked = prompts(*np.random.default_rng(wave).integers(2, 60, 9).tolist(), seed=wave)
            for prompt, completion in zip(
                asked, await together(engine, asked, [7, 30, 2, 33, 12, 5, 36, 20, 1], 100 * wave), strict=True
            ):
                check(model, prompt, completion)

    run(scene())
    assert 300 < max(spent) <= 400
    assert engine.scheduler.radix.make_room(400)
    assert engine.scheduler.radix.num_allocated == 0
    assert list(engine.scheduler.radix.nodes()) == []


def test_little_room_makes_requests_wait_or_begin_anew_and_never_fails_them():
    """Room for two contexts, batch is the least, and eight long requests at once."""
    model = tiny_model()
    asked = prompts(*[20] * 8)
    lengths = [70, 60, 75, 50, 70, 70, 76, 40]
    plenty = run(together(slot_engine(served(model), slots=8), asked, lengths))
    engine = limited(model, 2 * CONTEXT, slots=8)
    preempted = []
    preempt = engine.scheduler.preempt

    def counted(request):
        preempted.append(request.session)
        preempt(request)

    engine.scheduler.preempt = counted
    for prompt, one, other in zip(asked, plenty, run(together(engine, asked, lengths)), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert other.stop is StopReason.length
        check(model, prompt, other)
    assert preempted


def test_what_was_used_longest_ago_is_computed_again():
    model = tiny_model()
    engine = limited(model, 3 * CONTEXT, slots=1)
    old, middle, new = prompts(80, 80, 80)

    async def ask(prompt):
        before = engine.model.prefilled_tokens
        check(model, prompt, await engine.generate(prompt, Sampling(3), session="s", seed=1))
        return engine.model.prefilled_tokens - before

    async def scene():
        return [await ask(prompt) for prompt in (old, middle, middle, new, middle, old)]

    assert run(scene()) == [80, 80, 1, 80, 1, 80]


def test_a_load_in_flight_with_little_room():
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    engine = limited(old, 2 * CONTEXT, slots=4)

    async def scene():
        calls = asyncio.create_task(together(engine, prompts(20, 30, 20, 10), [60, 50, 70, 60]))
        await until(lambda: engine.model.sampled_tokens > 30)
        await engine.load(new.state_dict(), 1)
        return await calls

    for completion, length in zip(run(scene()), [60, 50, 70, 60], strict=True):
        assert len(completion.tokens) == length
        assert np.isfinite(completion.logprobs).all()
        assert (np.diff(completion.versions) >= 0).all()
    assert engine.scheduler.radix.make_room(2 * CONTEXT)
    assert engine.scheduler.radix.num_allocated == 0


def test_the_cache_has_a_size_in_mib_and_one_that_is_too_small_is_refused():
    assert cache_tokens(0, 1000, 1 << 10) == 1 << 20
    assert cache_tokens(0, 1 << 20, 1 << 10) == 4 << 20
    assert cache_tokens(64, 1000, 1 << 10) == 64 << 10
    assert cache_tokens(2, 1000, 1 << 10) == 2048
    with pytest.raises(
        ValueError, match=r"^engine.memory.kv_cache = 1 MiB cannot .* of 1000 tokens each; set it to 2 or more"
    ):
        cache_tokens(1, 1000, 1 << 10)
    settings = {"slots": 2, "end_tokens": [], "decode": str, "dtype": torch.float32}
    with pytest.raises(ValueError, match="^engine.memory.kv_cache = 1 MiB"):
        SlotModel(served(tiny_model()), context=(1 << 20) // TOKEN, cache=1, **settings)
    assert (
        SlotModel(served(tiny_model()), context=100, cache=1, **settings).scheduler.radix.capacity == (1 << 20) // TOKEN
    )


def test_a_pass_must_have_room_for_prompts():
    with pytest.raises(
        ValueError, match="^engine.memory.max_num_batched_tokens = 4 must be more than engine.max_num_seqs = 4$"
    ):
        slot_engine(served(tiny_model()), slots=4, pass_tokens=4)


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize("keep_cache", [False, True])
def test_prefixes_are_kept_over_a_load_where_that_is_asked_for(keep_cache):
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    engine = slot_engine(served(old), keep_cache=keep_cache)
    prompt = prompts(30)[0]

    async def scene():
        await engine.generate(prompt, Sampling(3), session="a", seed=0)
        await engine.load(new.state_dict(), 1)
        before = engine.model.prefilled_tokens
        done = await engine.generate(prompt, Sampling(6), session="a", seed=1)
        prefilled = engine.model.prefilled_tokens - before
        await engine.forget()
        await engine.generate(prompt, Sampling(6), session="a", seed=1)
        return done, prefilled, engine.model.prefilled_tokens - before - prefilled

    completion, prefilled, forgotten = run(scene())
    assert (completion.versions == 1).all()
    assert prefilled == (1 if keep_cache else 30)
    assert forgotten == 30
    # The new weights over the keys and values of the old ones.
    whole = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
    with torch.inference_mode():
        cached = (old if keep_cache else new)(input_ids=whole[:, :29], use_cache=True).past_key_values
        positions = torch.arange(29, whole.shape[1])[None]
        logits = new(input_ids=whole[:, 29:], past_key_values=cached, position_ids=positions).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(1, whole[0, 30:, None])[:, 0].numpy()
    np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-5)


def test_a_load_while_a_prompt_is_filled_in():
    """It begins anew: a turn whose tokens are all of one version has keys and values of that version too."""
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    engine = slot_engine(served(old), slots=4, pass_tokens=10)
    prompt = prompts(60)[0]

    async def scene():
        calls = asyncio.create_task(together(engine, [prompt] * 2, [5, 5]))
        await until(lambda: engine.model.prefilled_tokens > 25)
        assert engine.model.sampled_tokens == 0
        await engine.load(new.state_dict(), 1)
        late = await engine.generate(prompt, Sampling(5), session="late", seed=9)
        return [*(await calls), late]

    for completion in run(scene()):
        assert (completion.versions == 1).all()
        check(new, prompt, completion)
    assert engine.scheduler.radix.make_room(engine.scheduler.radix.capacity)
    assert engine.scheduler.radix.num_allocated == 0


def test_a_window_shorter_than_the_context_is_refused():
    def model():
        return served(make_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1))

    SlotModel(model(), slots=2, context=8, end_tokens=[], decode=str, dtype=torch.float32)
    with pytest.raises(ValueError, match="has layers that see 8 tokens, and the slot engine computes no windows"):
        SlotModel(model(), slots=2, context=9, end_tokens=[], decode=str, dtype=torch.float32)
