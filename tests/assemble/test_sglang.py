"""SGLang servers of a recipe are refused in one line each, before a run makes its folder, and so is what they would
ignore."""

from typing import Any

import pytest

from engines.sglang.playing import played, run
from support.acting import CONTEXT, renderer, tiny_model
from turnwise.assemble.checks import check_packages
from turnwise.assemble.engines import sglang_engine
from turnwise.assemble.servers import check_access, check_servers
from turnwise.recipe.parse import parse_recipe

KEY = "a-key-of-many-characters"


def recipe(*urls, model=None, **sglang):
    limits = {"max_trajectory_tokens": CONTEXT, "max_prompt_tokens": CONTEXT // 2, "max_action_tokens": 8}
    tree = {"env": {"name": "hops"}, "engine": {"name": "sglang", "sglang": {"servers": list(urls), **sglang}}}
    return parse_recipe({**tree, "rollout": limits, **({"model": model} if model else {})}, "test")


def refused(server, *others, **sglang):
    """Why a recipe with these servers is refused."""

    async def scene():
        async with server:
            for other in others:
                await other.listen()
            try:
                with pytest.raises(ValueError) as caught:
                    await check_servers(recipe(server.url, *(other.url for other in others), **sglang))
            finally:
                for other in others:
                    await other.close()
            return str(caught.value)

    text = run(scene())
    assert "\n" not in text
    return text


def test_servers_that_can_be_used_are_not_refused():
    async def scene():
        async with played() as first, played() as second:
            await check_servers(recipe(first.url, second.url))
            return first.asked

    assert run(scene()) == ["server_info", "model_info"]


@pytest.mark.parametrize("route", ["/server_info", "/model_info"])
def test_a_server_without_a_route_is_refused(route):
    server = played()
    server.missing.add(route)
    assert f"has no {route}; is it an SGLang server?" in refused(server)


@pytest.mark.parametrize("route", ["/server_info", "/model_info"])
@pytest.mark.parametrize("answer", [{}, [], None, "text", {"max_req_input_len": "many"}])
def test_an_answer_of_somebody_else_is_refused(route, answer):
    server = played()
    server.instead[route] = answer
    assert f"{route} is not what SGLang answers" in refused(server)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_req_input_len": CONTEXT - 1}, f"start it with --context-length {CONTEXT + 6}"),
        ({"enable_deterministic_inference": False}, "start it with --enable-deterministic-inference"),
        ({"disaggregation_mode": "decode"}, "was started with --disaggregation-mode; start it without"),
        ({"preferred_sampling_params": {"min_p": 0.1}}, "was started with --preferred-sampling-params"),
        ({"skip_tokenizer_init": True}, "was started with --skip-tokenizer-init"),
        ({"speculative_algorithm": "EAGLE"}, "was started with --speculative-algorithm"),
        ({"tokenizer_worker_num": 2}, "was started with --tokenizer-worker-num"),
    ],
)
def test_a_server_with_other_settings_is_refused(settings, text):
    assert text in refused(played(settings=settings))


def test_a_server_that_ignores_seeds_is_taken_where_nobody_needs_them():
    async def scene():
        async with played(settings={"enable_deterministic_inference": False}) as server:
            await check_servers(recipe(server.url, seeds=False))

    run(scene())


def test_servers_with_other_models_are_refused(tmp_path):
    other = played()
    other.model.config.model_type = "llama"
    assert "serve different models (model_type = qwen3 and llama)" in refused(played(), other)
    (tmp_path / "config.json").write_text('{"vocab_size": 61, "model_type": "gemma3"}')
    model = {"path": str(tmp_path)}
    assert "has a model of type qwen3, and the recipe's is gemma3" in refused(played(), model=model)


def test_a_key_is_taken_from_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)

    async def scene():
        async with played(key=KEY) as server:
            await check_servers(recipe(server.url, api_key_variable="MY_KEY"))

    run(scene())
    assert "asks for a key" in refused(played(key=KEY))
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match=r"engine.sglang.api_key_variable: the environment has no MY_KEY"):
        check_access(recipe("http://a", api_key_variable="MY_KEY"))


SERVED = {"name": "sglang", "sglang": {"servers": ["http://a"]}}


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"engine": {"name": "sglang"}}, "name them in sglang.servers"),
        ({"engine": {**SERVED, "processes": 2}}, 'processes is ignored with name = "sglang"'),
        ({"engine": {**SERVED, "name": "vllm"}}, 'sglang.servers is ignored with name = "vllm"'),
        ({"engine": {**SERVED, "name": "slots"}}, 'sglang.servers is ignored with name = "slots"'),
        ({"engine": {**SERVED, "vllm": {"sleep": True}}}, 'vllm.sleep is ignored with name = "sglang"'),
        ({"engine": {**SERVED, "memory": {"kv_cache": 64}}}, "memory.kv_cache is a setting of the servers themselves"),
        ({"engine": {**SERVED, "sglang": {"servers": ["a:1"]}}}, "is no address of a server"),
        ({"engine": {**SERVED, "sglang": {"transfer": "nccl"}}}, "transfer"),
        ({"engine": SERVED, "cluster": {"placement": "disaggregated", "replicas": 2}}, "engine.sglang.servers"),
        (
            {"engine": SERVED, "schedule": {"overlap_evaluations": True}, "evaluation": {"every": 1}},
            "engine.sglang.servers have one version of them",
        ),
    ],
)
def test_settings_that_would_be_ignored_are_refused(tree, text):
    with pytest.raises(ValueError, match=text):
        parse_recipe({"env": {"name": "hops"}, **tree}, "test")


def test_routes_are_refused():
    with pytest.raises(ValueError, match=r'model.router_replay needs routes, which engine.name = "sglang" does not'):
        check_packages(recipe("http://a", model={"router_replay": True}))


def test_a_recipe_makes_an_engine_per_server_that_has_the_first_weights():
    async def scene():
        router: Any = sglang_engine(recipe("http://a:1/", "http://b:2"), tiny_model(), renderer(), 3)
        try:
            replicas = [slot.replica for slot in router.slots]
            return [(one.name, one.first_weights.version, set(one.first_weights)) for one in replicas]
        finally:
            await router.close()

    names = set(tiny_model().state_dict())
    assert run(scene()) == [("http://a:1", 3, names), ("http://b:2", 3, names)]
