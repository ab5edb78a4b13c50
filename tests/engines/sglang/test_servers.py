"""Played SGLang servers behind one engine: loads, aborts, what goes on, and what happens when one is lost."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.sglang.playing import END, engine_on, one_engine, played, router_on, run, serving, until, weights_of
from support.acting import full_logprobs, tiny_model
from training.checking import check_of, learner_of
from turnwise.engines.base import EngineFailure, Sampling
from turnwise.engines.sglang.params import sampling_params
from turnwise.types import StopReason
from turnwise.weights.served_files import ServedFiles

PROMPT = np.arange(1, 12, dtype=np.int32)
CHARACTERS = {"decode": lambda tokens: "".join(chr(64 + token) for token in tokens)}


def ask(engine, session="s", seed=3, tokens=10, **sampling):
    call = engine.generate(PROMPT, Sampling(tokens, **sampling), session=session, seed=seed)
    return asyncio.create_task(call)


async def ask_all(engine, num):
    return await asyncio.gather(*(ask(engine, f"s{number}", number) for number in range(num)))


def check(completion, seed):
    expected = full_logprobs(tiny_model(seed=seed, tied=True), PROMPT, completion.tokens)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


async def all_ready(router):
    await until(lambda: all(slot.ready.is_set() for slot in router.slots))


def without_checks(asked):
    return [route for route in asked if route not in ("health", "model_info", "server_info")]


# ---------------------------------------------------------------- every day


def test_each_server_is_loaded_from_a_folder_and_attempts_stay_on_one(tmp_path):
    async def scene():
        async with serving(tmp_path) as (servers, router):
            first = await ask_all(router, 6)
            num_calls = [len(server.calls) for server in servers]
            await router.load(weights_of(1), 1)
            again = await ask_all(router, 6)
            folders = [load["model_path"] for server in servers for load in server.loads]
        return first, again, num_calls, folders

    first, again, num_calls, folders = run(scene())
    assert num_calls == [3, 3]
    for version, completions in enumerate((first, again)):
        for completion in completions:
            check(completion, version)
            assert set(completion.versions.tolist()) == {version}
    assert len(set(folders)) == 4
    assert not any(Path(folder).exists() for folder in folders)
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_prefixes_of_other_weights_have_another_key_and_nothing_is_flushed(tmp_path):
    async def scene():
        async with one_engine(tmp_path) as (server, engine):
            first = [await ask(engine), await ask(engine)]
            await engine.load(weights_of(1), 1)
            second = await ask(engine)
            await engine.forget()
            await ask(engine)
            return first, second, [call["extra_key"] for call in server.calls], server.loads

    first, second, keys, loads = run(scene())
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert [completion.cached for completion in first] == [0, len(PROMPT)]
    assert second.cached == 0
    assert not any(load["flush_cache"] for load in loads)
    check(second, 1)


def test_a_cache_that_is_kept_keeps_its_key(tmp_path):
    async def scene():
        async with one_engine(tmp_path, keep_cache=True) as (server, engine):
            await ask(engine)
            await engine.load(weights_of(1), 1)
            return await ask(engine), [call["extra_key"] for call in server.calls]

    completion, keys = run(scene())
    assert keys[0] == keys[1]
    assert completion.cached == len(PROMPT)


def test_a_call_in_flight_goes_on_with_the_new_weights_from_what_was_sampled(tmp_path):
    async def scene():
        async with one_engine(tmp_path, end_tokens=[]) as (server, engine):
            server.own_ends = set()
            call = ask(engine, tokens=60)
            await until(lambda: server.running and len(server.running[0].output) > 3)
            await engine.load(weights_of(1), 1)
            return await call, server.calls, without_checks(server.asked)

    completion, calls, asked = run(scene())
    num_old = int((completion.versions == 0).sum())
    assert 3 < num_old < 60 == len(completion.tokens)
    assert completion.versions.tolist() == [0] * num_old + [1] * (60 - num_old)
    assert calls[1]["input_ids"] == [*PROMPT.tolist(), *completion.tokens[:num_old].tolist()]
    assert calls[1]["sampling_params"]["max_new_tokens"] == 60 - num_old
    assert asked.index("abort_request") < len(asked) - asked[::-1].index("update_weights_from_disk")
    for seed, part in ((0, slice(0, num_old)), (1, slice(num_old, 60))):
        expected = full_logprobs(tiny_model(seed=seed, tied=True), PROMPT, completion.tokens)[part]
        np.testing.assert_allclose(completion.logprobs[part], expected, atol=1e-5, rtol=0)


def test_an_action_that_ends_with_its_abort_does_not_go_on(tmp_path):
    """SGLang samples one more token for an aborted request, and calls that an abort whatever the token is."""

    async def scene():
        async with one_engine(tmp_path) as (server, engine):
            server.held = True
            call = ask(engine)
            await until(lambda: server.waiting)
            load = asyncio.create_task(engine.load(weights_of(1), 1))
            entry = server.waiting[0]
            server.waiting.remove(entry)
            entry.output, entry.logprobs, entry.cut_logprobs = [5, END], [-0.5, -0.1], [-0.5, -0.1]
            server.finish(entry, {"type": "abort", "message": "Aborted"})
            server.held = False
            await load
            return await call, len(server.calls)

    completion, num_calls = run(scene())
    assert (completion.tokens.tolist(), completion.stop) == ([5, END], StopReason.end_token)
    assert num_calls == 1


def test_a_stop_string_may_begin_before_a_load_and_end_after_it(tmp_path):
    async def scene():
        async with one_engine(tmp_path, server=played(own_ends=[], **CHARACTERS), **CHARACTERS) as (server, engine):
            engine.end_tokens = frozenset()
            whole = (await ask(engine, tokens=40)).tokens.tolist()
            stop = CHARACTERS["decode"](whole[4:6])
            call = ask(engine, tokens=40, stop=(stop,))
            await until(lambda: server.running)
            server.held = True
            entry = server.running[0]
            while len(entry.output) < 5:
                server.step()
            entry.ended = {"type": "abort", "message": "Aborted"}
            del entry.output[5:], entry.logprobs[5:], entry.cut_logprobs[5:]
            engine.num_holds += 1  # as a load would
            server.finish(entry, entry.ended)
            server.held = False
            server.work.set()
            return whole, stop, await call

    whole, stop, completion = run(scene())
    first = CHARACTERS["decode"](whole).index(stop) + 2
    assert completion.tokens.tolist() == whole[:first]
    assert completion.stop is StopReason.stop_string


def test_an_end_token_of_the_models_own_settings_ends_nothing(tmp_path):
    async def scene():
        async with one_engine(tmp_path, server=played(own_ends=range(0, 61, 2)), end_tokens=[]) as (server, engine):
            return await ask(engine, tokens=20), len(server.calls)

    completion, num_calls = run(scene())
    assert (len(completion.tokens), completion.stop) == (20, StopReason.length)
    assert num_calls > 3
    check(completion, 0)


def test_a_pause_waits_on_this_side_and_an_abort_meanwhile_returns_the_beginning(tmp_path):
    async def scene():
        async with one_engine(tmp_path, end_tokens=[]) as (server, engine):
            server.own_ends = set()
            calls = [ask(engine, f"s{number}", number, tokens=60) for number in range(2)]
            await until(lambda: len(server.running) == 2 and len(server.running[1].output) > 2)
            await engine.pause()
            left = len(server.running) + len(server.waiting)
            await engine.abort("s0")
            aborted = await calls[0]
            await asyncio.sleep(0.05)
            waits = not calls[1].done()
            await engine.resume()
            return left, aborted, waits, await calls[1]

    left, aborted, waits, whole = run(scene())
    assert left == 0
    assert 0 < len(aborted.tokens) < 60
    assert aborted.stop is StopReason.abort
    assert waits
    assert len(whole.tokens) == 60
    check(whole, 0)


def test_words_of_sglang():
    sampling = Sampling(8, temperature=0.7, stop=("x",))
    given = sampling_params(sampling, [0, 2], 5, 2**64 - 1, 61)
    assert given["max_new_tokens"] == 5
    assert (given["top_k"], given["top_p"], given["ignore_eos"]) == (-1, 1.0, False)
    assert 0 <= given["sampling_seed"] < 2**63
    assert sampling_params(Sampling(8, top_p=0.5), [], 8, None, 61)["top_k"] == 61
    assert "sampling_seed" not in sampling_params(sampling, [], 8, None, 61)
    greedy = sampling_params(Sampling(8, temperature=0.0, top_p=0.5, top_k=3), [], 8, 1, 61)
    assert (greedy["temperature"], greedy["top_k"], greedy["top_p"]) == (0.0, -1, 1.0)


# ---------------------------------------------------------------- faults


def test_a_server_that_is_gone_is_left_out_and_comes_back_with_the_present_weights(tmp_path):
    async def scene():
        async with serving(tmp_path) as (servers, router):
            expected = await ask_all(router, 6)
            servers[0].held = True  # its calls are under way when it goes
            calls = [ask(router, f"s{number}", number) for number in range(6)]
            await until(lambda: len(servers[0].waiting) == 3)
            await servers[0].vanish()
            found = await asyncio.gather(*calls)
            await router.load(weights_of(1), 1)
            without = await ask_all(router, 6)
            servers[0].held = False
            servers[0].work.set()
            servers[0].asked.clear()
            await servers[0].listen()
            await all_ready(router)
            back = await ask_all(router, 12)
            return expected, found, without, back, servers[0].asked

    expected, found, without, back, asked = run(scene())
    assert [one.tokens.tolist() for one in found] == [one.tokens.tolist() for one in expected]
    for completion in [*without, *back]:
        check(completion, 1)
        assert set(completion.versions.tolist()) == {1}
    assert asked.index("update_weights_from_disk") < asked.index("generate")


@pytest.mark.parametrize("how", ["started again", "another run"])
def test_what_a_server_samples_with_weights_that_it_was_not_given_is_refused(tmp_path, how):
    async def scene():
        async with serving(tmp_path, check_seconds=60.0) as (servers, router):
            await router.load(weights_of(1), 1)
            if how == "started again":
                await servers[0].start_again(tiny_model(seed=5, tied=True))
            else:
                other = router_on([servers[0]], tmp_path / "other", check_seconds=60.0)
                await other.load(weights_of(5), 1)  # by the same number
                await other.close()
            return await ask_all(router, 6), router.slots[0].num_starts

    completions, num_starts = run(scene())
    for completion in completions:
        check(completion, 1)
    assert num_starts == 2


def test_a_server_that_cannot_load_is_left_out_and_loaded_again(tmp_path):
    async def scene():
        async with serving(tmp_path) as (servers, router):

            async def refuse(request):
                from aiohttp import web

                del servers[1].instead["/update_weights_from_disk"]
                return web.json_response({"success": False, "message": "Failed to\nupdate weights"}, status=400)

            servers[1].instead["/update_weights_from_disk"] = refuse
            await router.load(weights_of(1), 1)
            was_ready = router.slots[1].ready.is_set()
            await all_ready(router)
            return was_ready, await ask_all(router, 6), [server.weight_version[-2:] for server in servers]

    was_ready, completions, names = run(scene())
    assert not was_ready
    assert names == [".1", ".1"]
    for completion in completions:
        check(completion, 1)


def test_a_load_that_lacks_tensors_or_fits_no_model_is_a_failure_in_one_line(tmp_path):
    async def scene():
        async with one_engine(tmp_path) as (_, engine):
            with pytest.raises(EngineFailure, match="lacks 1 tensors, for instance model.norm.weight"):
                await engine.load({k: v for k, v in weights_of(1).items() if k != "model.norm.weight"}, 1)
            wide = {**weights_of(1), "model.norm.weight": torch.zeros(3)}
            with pytest.raises(EngineFailure, match="could not load version 1") as caught:
                await engine.load(wide, 1)
            waiting = ask(engine)
            await asyncio.sleep(0.05)
            waited = not waiting.done()
            await engine.load(weights_of(2), 2)
            return str(caught.value), waited, await waiting

    text, waited, completion = run(scene())
    assert "\n" not in text
    assert waited
    check(completion, 2)


def test_a_call_before_the_first_load_fails(tmp_path):
    async def scene():
        async with played() as server:
            engine = engine_on(server, ServedFiles(torch.float32, tmp_path))
            with pytest.raises(EngineFailure, match="has got no weights yet"):
                await ask(engine)
            await engine.close()

    run(scene())


def test_grammars_and_routes_are_refused(tmp_path):
    from turnwise.engines.grammar import Grammar, GrammarKind

    async def scene():
        async with one_engine(tmp_path) as (_, engine):
            with pytest.raises(ValueError, match="cannot follow a grammar"):
                await ask(engine, grammar=Grammar(GrammarKind.regex, "a+"))
            with pytest.raises(ValueError, match="without routes"):
                await ask(engine, routes=0)

    run(scene())


def test_the_check_of_loads_asks_every_server_and_names_the_one_that_kept_old_weights(tmp_path):
    async def scene():
        async with serving(tmp_path) as (servers, router):
            learner = learner_of(tiny_model(seed=0, tied=True))
            weight_check = check_of(router, learner)
            start = await weight_check.begin(0)
            asked = [len(server.calls) for server in servers]
            with torch.no_grad():
                for tensor in learner.policy.model.parameters():
                    tensor.mul_(1.2)
            servers[1].lost = ("model.layers.1.mlp.up_proj.weight",)
            await router.load(learner.publish(), 1)
            return start, asked, await weight_check.arrived(1), servers[1].url

    start, asked, found, url = run(scene())
    assert start.problem == ""
    assert asked[0] == asked[1] > 0
    assert f"{url}'s logprobs differ from the learner's" in found.problem


def test_logits_that_are_no_numbers_fail_the_call(tmp_path):
    async def scene():
        async with one_engine(tmp_path) as (_, engine):
            await engine.load({**weights_of(0), "model.norm.weight": torch.full((32,), torch.nan)}, 1)
            with pytest.raises(EngineFailure, match="could not sample a token: the model's logits are no numbers"):
                await ask(engine)

    run(scene())


# ---------------------------------------------------------------- answers that are none

META = {
    "finish_reason": {"type": "length", "length": 2},
    "weight_version": "MARK.0",
    "output_token_logprobs": [[-0.5, 5, None], [-1.0, 6, None]],
}


def broken(tokens=(5, 6), **parts):
    return {"output_ids": list(tokens), "meta_info": {**META, **parts}}


def pairs(*logprobs, token=5):
    return {"tokens": [token] * len(logprobs), "output_token_logprobs": [[value, token, None] for value in logprobs]}


def without(name):
    return {"output_ids": [5, 6], "meta_info": {key: value for key, value in META.items() if key != name}}


HOSTILE = {
    "nothing": {},
    "no object": [1, 2],
    "null": None,
    "text": "<html>",
    "no meta_info": {"output_ids": [5, 6]},
    "no tokens": {"meta_info": META},
    "a token of the vocabulary's end": broken(**pairs(-1.0, -1.0, token=61)),
    "a token below 0": broken(**pairs(-1.0, -1.0, token=-1)),
    "a token that is a word": broken(**pairs(-1.0, -1.0, token="6")),
    "a token that is true": broken(**pairs(-1.0, -1.0, token=True)),
    "more tokens than were asked for": broken(**pairs(*[-1.0] * 99)),
    "fewer tokens than were asked for": broken(),
    "no logprobs": without("output_token_logprobs"),
    "too few logprobs": broken(output_token_logprobs=[[-0.5, 5, None]]),
    "logprobs of other tokens": broken(output_token_logprobs=[[-0.5, 5, None], [-0.5, 7, None]]),
    "a logprob that is no number": broken(**pairs("x", None)),
    "a logprob of nan": broken(**pairs(float("nan"), -1.0)),
    "a logprob of -inf": broken(**pairs(float("-inf"), -1.0)),
    "a logprob above 0": broken(**pairs(0.5, -1.0)),
    "a logprob that is no pair": broken(output_token_logprobs=[1, 2]),
    "no version": without("weight_version"),
    "another's version": broken(weight_version="default"),
    "a version of the future": broken(weight_version="MARK.7"),
    "a version that is a list": broken(weight_version=["MARK.0"]),
    "no finish": without("finish_reason"),
    "a finish that is null": broken(finish_reason=None),
    "a finish that nobody knows": broken(finish_reason={"type": "error"}),
    "a finish that is a list": broken(finish_reason={"type": [1]}),
    "an abort that nobody asked for": broken(finish_reason={"type": "abort", "message": "no\nmemory"}),
    "an end without a token": broken(**pairs(), finish_reason={"type": "stop", "matched": 3}),
    "a token after the end": broken(**pairs(-1.0, -1.0, token=END)),
    "a token in place of none": broken(finish_reason={"type": "stop", "matched": "NaN happened"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_answer_that_no_sglang_gives_fails_its_call_alone(tmp_path, name):
    async def scene():
        async with one_engine(tmp_path) as (server, engine):
            text = json.dumps(HOSTILE[name]).replace("MARK", engine.service.mark)
            server.instead["/generate"] = json.loads(text)
            with pytest.raises(EngineFailure) as caught:
                await ask(engine)
            server.instead.clear()
            return str(caught.value), server.url, await ask(engine)

    text, url, completion = run(scene())
    check(completion, 0)
    assert url in text
    assert "\n" not in text
    assert len(text) < 700


def test_a_good_answer_passes_so_that_the_others_fail_for_their_own_reason(tmp_path):
    async def scene():
        async with one_engine(tmp_path) as (server, engine):
            server.instead["/generate"] = broken(weight_version=f"{engine.service.mark}.0")
            return await ask(engine, tokens=2)

    assert run(scene()).tokens.tolist() == [5, 6]


def test_an_answer_without_the_logprobs_after_a_cut_is_refused(tmp_path):
    async def scene():
        async with one_engine(tmp_path) as (server, engine):
            server.instead["/generate"] = broken(weight_version=f"{engine.service.mark}.0")
            with pytest.raises(EngineFailure, match="no finite logprob each"):
                await ask(engine, tokens=2, top_p=0.5)

    run(scene())


def test_an_error_of_the_server_is_said_in_one_line(tmp_path):
    async def scene():
        from aiohttp import web

        async def fail(request):
            return web.json_response({"detail": "out of\nmemory"}, status=503)

        async with one_engine(tmp_path) as (server, engine):
            server.instead["/generate"] = fail
            with pytest.raises(EngineFailure, match="answered 503") as caught:
                await ask(engine)
            return str(caught.value)

    assert "\n" not in run(scene())
