"""Routes in answers of a played vLLM: what is asked for, what is read, and what is refused. Needs no vLLM."""

import asyncio
import base64
import io

import numpy as np
import pytest

from engines.vllm.test_engine import Played, engine_on, run  # type: ignore[attr-defined]
from engines.vllm.test_engine import ask as asked_of
from support.acting import until
from turnwise.assemble import checks
from turnwise.engines.base import EngineFailure
from turnwise.engines.remote.connection import Connection, ServerFailure
from turnwise.engines.vllm.local import LocalSettings, engine_arguments, vllm_variables
from turnwise.engines.vllm.server import VllmServer, array_of
from turnwise.engines.vllm.service import Span, VllmAnswer
from turnwise.recipe.parse import parse_recipe

LAYERS = (1, 2)
"""Of three; the first has no router."""


def routes(count, layers=3):
    return np.random.default_rng(0).integers(0, 8, (count, layers, 2)).astype(np.uint8)


def completed(given, start=0, tokens=(1, 2), **how):
    """(what vLLM was asked, the completion) of a call after three tokens."""

    async def scene():
        service = Played()
        engine = engine_on(service, version=0, **{"route_layers": LAYERS, **how})
        call = asked_of(engine, routes=start)
        await until(lambda: service.calls or call.done())
        if call.done():
            return None, await call
        [asked] = service.asked
        [(_, future)] = service.calls.values()
        spans = [Span(service.version, 0, len(tokens))] if tokens else []
        finish = "length" if tokens else "abort"
        future.set_result(VllmAnswer(tokens, [-0.5] * len(tokens), spans, finish, None, routes=given))
        return asked, await call

    return run(scene())


def test_new_routes_are_asked_for_and_layers_without_a_router_are_left_out():
    given = routes(3)
    asked, completion = completed(given, start=1)
    assert asked.sampling["routed_experts_prompt_start"] == 1
    np.testing.assert_array_equal(completion.routes, given[:, LAYERS])
    assert not completion.routes.flags.writeable


@pytest.mark.parametrize("given", [None, routes(2), routes(5), routes(4)[:, :2], routes(4)[0]])
def test_routes_that_are_not_those_of_the_call_are_a_failure(given):
    with pytest.raises(EngineFailure, match=r"the routes of 4 tokens; start it with --enable-return-routed-experts"):
        completed(given)


def test_a_call_that_was_aborted_at_once_has_none():
    assert completed(None, tokens=())[1].routes is None


def test_nothing_new_is_no_failure():
    """vLLM leaves an empty array out."""
    assert completed(None, start=3, tokens=(1,))[1].routes is None


def test_an_engine_without_routes_refuses_the_call():
    with pytest.raises(ValueError, match=r"set model.router_replay = true"):
        completed(None, route_layers=None)


def test_a_call_that_asks_for_none_says_nothing_of_routes():
    assert "routed_experts_prompt_start" not in completed(None, start=None)[0].sampling


def test_a_servers_routes_are_an_array_in_base64():
    given, file = routes(4).astype(np.uint16), io.BytesIO()
    np.save(file, given)
    np.testing.assert_array_equal(array_of(base64.b64encode(file.getvalue()).decode()), given)
    assert array_of(None) is None
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        array_of(base64.b64encode(pickled.getvalue()).decode())


@pytest.mark.parametrize("config", [{}, {"aux_output_config": {"enable_return_routed_experts": False}}])
def test_a_server_without_routes_is_refused_at_the_start(config, monkeypatch):
    server = VllmServer(Connection("http://x"), routes=True)
    info = {"logprobs_mode": "processed_logprobs", "max_model_len": 100}

    async def get(route, **query):
        return {"vllm_config": {"model_config": info, **config}}

    monkeypatch.setattr(server.connection, "get", get)
    with pytest.raises(ServerFailure, match="start it with --enable-return-routed-experts"):
        asyncio.run(server.check(10))


def test_a_local_vllm_is_started_with_routes_where_they_are_asked_for():
    settings = LocalSettings(4, "float32", "cuda", 1, routes=True)
    assert engine_arguments(settings, 100)["enable_return_routed_experts"] is True
    assert vllm_variables(settings)["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    plain = LocalSettings(4, "float32", "cuda", 1)
    assert "enable_return_routed_experts" not in engine_arguments(plain, 100)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in vllm_variables(plain)


def test_a_vllm_on_a_cpu_without_triton_is_refused_from_the_recipe_alone(monkeypatch):
    recipe = parse_recipe(
        {"env": [{"name": "hops"}], "engine": {"name": "vllm"}, "model": {"router_replay": True, "device": "cpu"}},
        "a test",
    )
    there = {"vllm"}
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: object() if name in there else None)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="vLLM gives routes with Triton only"):
        checks.check_packages(recipe)
    there.add("triton")
    checks.check_packages(recipe)
