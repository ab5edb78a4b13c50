"""Several vLLM servers behind one engine, played: who gets a call, and what happens when one is lost."""

import asyncio
import json

import numpy as np
import pytest
import torch

from engines.vllm.playing import END, engine_on, played, router_on, run, serving, until, weights_of
from support.acting import full_logprobs, tiny_model
from training.checking import check_of, learner_of
from turnwise.engines.base import EngineFailure, Sampling

PROMPT = np.arange(1, 12, dtype=np.int32)


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


# ---------------------------------------------------------------- every day


def test_each_server_is_loaded_and_attempts_stay_on_one(tmp_path):
    async def scene():
        async with serving(tmp_path) as (servers, router):
            first = await ask_all(router, 6)
            homes = [[call["request_id"] for call in server.calls] for server in servers]
            sessions = {name: slot.number for name, slot in router.session_slots.items()}
            await router.load(weights_of(1), 1)
            again = await ask_all(router, 6)
            stayed = {name: slot.number for name, slot in router.session_slots.items()} == sessions
            files = list(tmp_path.rglob("*.safetensors"))
        return first, again, homes, stayed, len(files), list(tmp_path.rglob("*.safetensors"))

    first, again, homes, stayed, num_files, left = run(scene())
    assert [len(names) for names in homes] == [3, 3]
    assert stayed
    for version, completions in enumerate((first, again)):
        for completion in completions:
            check(completion, version)
            assert set(completion.versions.tolist()) == {version}
    assert num_files == 1  # for both servers
    assert left == []


def test_a_load_pauses_and_resumes_each_server_by_itself(tmp_path):
    async def scene():
        async with serving(tmp_path) as (servers, router):
            for server in servers:
                server.asked.clear()
            await router.load(weights_of(1), 1)
            return [server.asked for server in servers]

    order = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]
    for asked in run(scene()):
        assert [route for route in asked if route not in ("health", "weight_info")] == order


# ---------------------------------------------------------------- faults


def test_a_server_that_is_gone_is_left_out_and_comes_back_with_the_present_weights(tmp_path):
    async def scene():
        async with serving(tmp_path) as (servers, router):
            expected = await ask_all(router, 6)
            await servers[0].engine.pause()  # its calls are under way when it goes
            calls = [ask(router, f"s{number}", number) for number in range(6)]
            await until(lambda: len(servers[0].sessions) == 3)
            await servers[0].vanish()
            found = await asyncio.gather(*calls)
            await router.load(weights_of(1), 1)
            without = await ask_all(router, 6)
            await servers[0].engine.resume()
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
    assert asked.index("finish_weight_update") < asked.index("inference/v1/generate")


def test_a_server_that_stalls_holds_up_neither_calls_nor_loads(tmp_path):
    async def scene():
        async with serving(tmp_path, answer_seconds=0.3) as (servers, router):
            expected = await ask_all(router, 6)
            servers[1].stalled.set()
            found = await ask_all(router, 6)
            servers[1].stalled.clear()
            await all_ready(router)
            servers[1].stalled.set()
            await router.load(weights_of(1), 1)
            after = await ask_all(router, 6)
            servers[1].stalled.clear()
            await all_ready(router)
            return expected, found, after, await ask_all(router, 12), router.slots[1].num_served

    expected, found, after, back, num_served = run(scene())
    assert [one.tokens.tolist() for one in found] == [one.tokens.tolist() for one in expected]
    for completion in [*after, *back]:
        check(completion, 1)
    assert num_served > 3


@pytest.mark.parametrize("how", ["started again", "another run"])
def test_what_a_server_samples_with_weights_that_it_was_not_given_is_refused(tmp_path, how):
    async def scene():
        async with serving(tmp_path, check_seconds=60.0) as (servers, router):
            await router.load(weights_of(1), 1)
            if how == "started again":
                await servers[0].start_again(weights_of(5))
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
                del servers[1].instead["/update_weights"]
                raise OSError("no such file")

            servers[1].instead["/update_weights"] = refuse
            await router.load(weights_of(1), 1)
            was_ready = router.slots[1].ready.is_set()
            await all_ready(router)
            return was_ready, await ask_all(router, 6), [server.names[server.version][-2:] for server in servers]

    was_ready, completions, names = run(scene())
    assert not was_ready
    assert names == [".1", ".1"]  # whose first load was never finished
    for completion in completions:
        check(completion, 1)


def test_a_load_that_no_server_can_do_is_a_failure(tmp_path):
    async def scene():
        async with serving(tmp_path) as (_, router):
            with pytest.raises(EngineFailure, match="lacks 1 tensors, for instance model.norm.weight"):
                await router.load({k: v for k, v in weights_of(1).items() if k != "model.norm.weight"}, 1)
            return [slot.num_starts for slot in router.slots]

    assert run(scene()) == [1, 1]


def test_all_servers_may_be_gone_for_a_while(tmp_path):
    async def scene():
        async with serving(tmp_path) as (servers, router):
            for server in servers:
                await server.vanish()
            await router.load(weights_of(1), 1)
            call = ask(router)
            await asyncio.sleep(0.1)
            waited = not call.done()
            await servers[1].listen()
            completion = await call
            return waited, completion

    waited, completion = run(scene())
    assert waited
    check(completion, 1)


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


# ---------------------------------------------------------------- answers that are none

GOOD = {
    "token_ids": [5, 6],
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]},
    "weight_versions": [],
    "finish_reason": "length",
    "stop_reason": None,
}


def broken(**parts):
    return {"choices": [{**GOOD, **parts}]}


def spans(**parts):
    return {"weight_versions": [{"version": "MARK.0", "start": 0, "end": 2, **parts}]}


HOSTILE = {
    "nothing": {},
    "no object": [1, 2],
    "null": None,
    "no choices": {"choices": []},
    "two choices": {"choices": [GOOD, GOOD]},
    "a token of the vocabulary's end": broken(token_ids=[5, 61], **spans()),
    "a token below 0": broken(token_ids=[5, -1], **spans()),
    "a token of 40 bits": broken(token_ids=[5, 2**40], **spans()),
    "a token that is a word": broken(token_ids=[5, "6"], **spans()),
    "a token that is true": broken(token_ids=[5, True], **spans()),
    "more tokens than were asked for": broken(
        token_ids=[5] * 99, logprobs={"content": [{"logprob": -1.0}] * 99}, **spans(end=99)
    ),
    "no logprobs": broken(logprobs=None, **spans()),
    "too few logprobs": broken(logprobs={"content": [{"logprob": -1.0}]}, **spans()),
    "a logprob that is no number": broken(logprobs={"content": [{"logprob": "x"}, {"logprob": None}]}, **spans()),
    "a logprob of -inf": broken(logprobs={"content": [{"logprob": float("-inf")}, {"logprob": -1.0}]}, **spans()),
    "a logprob above 0": broken(logprobs={"content": [{"logprob": 0.5}, {"logprob": -1.0}]}, **spans()),
    "no versions": broken(),
    "another's version": broken(**spans(version="default")),
    "a version of the future": broken(**spans(version="MARK.7")),
    "a version of many digits": broken(**spans(version="MARK." + "9" * 400)),
    "a version in other digits": broken(**spans(version="MARK.٣")),
    "a span that ends early": broken(**spans(end=1)),
    "a span that is no number": broken(**spans(end="x")),
    "a finish that nobody knows": broken(finish_reason="error", **spans()),
    "a finish that is a list": broken(finish_reason=[1], **spans()),
    "routes that are no array": broken(routed_experts="AAAA", **spans()),
    "text": "<html>",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_answer_that_no_vllm_gives_fails_its_call_alone(tmp_path, name):
    async def scene():
        async with played() as server:
            engine = engine_on(server, tmp_path)
            await engine.load(weights_of(0), 0)
            text = json.dumps(HOSTILE[name]).replace("MARK", engine.service.mark)
            server.instead["/inference/v1/generate"] = json.loads(text)
            with pytest.raises(EngineFailure) as caught:
                await ask(engine)
            server.instead.clear()
            completion = await ask(engine)
            await engine.close()
            return str(caught.value), server.url, completion

    text, url, completion = run(scene())
    check(completion, 0)
    assert url in text
    assert "\n" not in text
    assert len(text) < 700


def test_a_good_answer_passes_so_that_the_others_fail_for_their_own_reason(tmp_path):
    async def scene():
        async with played() as server:
            engine = engine_on(server, tmp_path)
            await engine.load(weights_of(0), 0)
            server.instead["/inference/v1/generate"] = broken(**spans(version=f"{engine.service.mark}.0"))
            completion = await ask(engine)
            await engine.close()
            return completion

    assert run(scene()).tokens.tolist() == [5, 6]


def test_an_answer_that_is_no_json_or_does_not_end_fails_its_call(tmp_path, monkeypatch):
    from aiohttp import web

    from turnwise.engines.remote import connection

    monkeypatch.setattr(connection, "MOST_BYTES", 1 << 20)

    async def nested(request):
        return web.Response(text="[" * 100_000, content_type="application/json")

    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * (1 << 16))

    async def elsewhere(request):
        raise web.HTTPFound("http://127.0.0.1:9/")

    async def scene():
        async with played() as server:
            engine = engine_on(server, tmp_path)
            await engine.load(weights_of(0), 0)
            found = []
            for answer in (nested, endless, elsewhere):
                server.instead["/inference/v1/generate"] = answer
                with pytest.raises(EngineFailure) as caught:
                    await ask(engine)
                found.append(str(caught.value))
            await engine.close()
            return found

    no_json, too_long, redirect = run(scene())
    assert "answered no JSON" in no_json
    assert "more than 1 MiB" in too_long
    assert "answered 302" in redirect


def test_an_end_token_is_named_as_one(tmp_path):
    async def scene():
        async with serving(tmp_path, 1) as ([server], router):
            await ask(router)
            return server.calls[0]["sampling_params"]["stop_token_ids"]

    assert run(scene()) == [END]


# ---------------------------------------------------------------- sleep


def test_servers_sleep_until_the_next_load_which_brings_weights_before_keys(tmp_path):
    async def scene():
        async with serving(tmp_path, sleeps=True) as (servers, router):
            before = await ask_all(router, 4)
            for server in servers:
                server.asked.clear()
            await router.sleep()
            late = ask(router)
            await asyncio.sleep(0.1)
            waited = not late.done()
            await router.load(weights_of(1), 1)
            asked = [[route for route in server.asked if route not in ("health", "weight_info")] for server in servers]
            return before, waited, [await late, *await ask_all(router, 4)], asked, [server.slept for server in servers]

    before, waited, after, asked, slept = run(scene())
    assert can_sleep_order(asked[0])
    assert waited
    assert slept == [[2], [2]]
    for completion in before:
        check(completion, 0)
    for completion in after:
        check(completion, 1)
        assert set(completion.versions.tolist()) == {1}


def can_sleep_order(asked):
    load = ["start_weight_update", "update_weights", "finish_weight_update"]
    return asked[:7] == ["sleep", "wake_up", *load, "wake_up", "resume"]


def test_a_server_that_comes_back_while_the_others_sleep_stays_out_until_the_load(tmp_path):
    """The learner has its memory meanwhile."""

    async def scene():
        async with serving(tmp_path, sleeps=True) as (servers, router):
            await router.sleep()
            await servers[0].vanish()
            await until(lambda: not router.slots[0].ready.is_set())
            servers[0].asked.clear()
            await servers[0].start_again(weights_of(9))
            await servers[0].listen()
            await until(lambda: router.slots[0].waits_for_load)
            loaded = "update_weights" in servers[0].asked
            await router.load(weights_of(1), 1)
            return loaded, [slot.ready.is_set() for slot in router.slots], await ask_all(router, 6)

    loaded, ready, completions = run(scene())
    assert not loaded
    assert ready == [True, True]
    for completion in completions:
        check(completion, 1)


def test_nothing_sleeps_while_a_call_is_under_way(tmp_path):
    async def scene():
        async with serving(tmp_path, 1, sleeps=True) as ([server], router):
            await server.engine.pause()
            call = ask(router)
            await until(lambda: server.sessions)
            with pytest.raises(EngineFailure, match="has 1 calls under way, and cannot sleep"):
                await router.sleep()
            await server.engine.resume()
            await call
            return server.slept

    assert run(scene()) == []


def test_a_call_that_waits_for_a_sleeper_can_be_aborted(tmp_path):
    async def scene():
        async with serving(tmp_path, 1, sleeps=True) as (_, router):
            await router.sleep()
            call = ask(router)
            await until(lambda: router.slots[0].replica.calls)
            await router.abort("s")
            return await call

    assert len(run(scene()).tokens) == 0


def test_a_load_that_fails_half_way_leaves_a_sleeper_that_the_next_load_wakes(tmp_path):
    async def scene():
        async with played() as server:
            engine = engine_on(server, tmp_path, sleeps=True)
            await engine.load(weights_of(0), 0)
            await engine.sleep()
            server.instead["/update_weights"] = None
            server.missing.add("/finish_weight_update")
            with pytest.raises(EngineFailure, match="has no /finish_weight_update"):
                await engine.load(weights_of(1), 1)
            server.missing.clear()
            server.instead.clear()
            await engine.load(weights_of(2), 2)
            completion = await ask(engine)
            await engine.close()
            return completion, server.asleep

    completion, asleep = run(scene())
    check(completion, 2)
    assert asleep == set()
