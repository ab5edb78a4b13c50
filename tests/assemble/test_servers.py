"""Servers of a recipe are refused in one line each, before a run makes its folder."""

import asyncio
import datetime
import ipaddress
import socket
import ssl
from typing import Any

import pytest

from engines.vllm.playing import played, run
from support.acting import CONTEXT, renderer, tiny_model
from support.running import SilentScreen
from turnwise.assemble import run as running
from turnwise.assemble.checks import check_gpus
from turnwise.assemble.engines import vllm_engine
from turnwise.assemble.servers import check_access, check_servers
from turnwise.recipe.parse import parse_recipe

KEY = "a-key-of-many-characters"


def recipe(*urls, out="", model=None, **vllm):
    limits = {"max_trajectory_tokens": CONTEXT, "max_prompt_tokens": CONTEXT // 2, "max_action_tokens": 8}
    tree = {"env": {"name": "hops"}, "engine": {"name": "vllm", "vllm": {"servers": list(urls), **vllm}}}
    more = {name: value for name, value in (("out", out), ("model", model)) if value}
    return parse_recipe({**tree, "rollout": limits, **more}, "test")


def refused(server, *others, **vllm):
    """Why a recipe with these servers is refused."""

    async def scene():
        async with server:
            for other in others:
                await other.listen()
            try:
                with pytest.raises(ValueError) as caught:
                    await check_servers(recipe(server.url, *(other.url for other in others), **vllm))
            finally:
                for other in others:
                    await other.vanish()
            return str(caught.value)

    text = run(scene())
    assert "\n" not in text
    return text


def test_servers_that_can_be_used_are_not_refused():
    async def scene():
        async with played() as first, played() as second:
            await check_servers(recipe(first.url, second.url))
            return first.asked

    assert "server_info" in run(scene())


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("/server_info", "has no /server_info; start vLLM 0.32 with VLLM_SERVER_DEV_MODE=1"),
        ("/weight_info", "has no /weight_info; start vLLM 0.32 with VLLM_SERVER_DEV_MODE=1"),
        ("/inference/v1/abort_requests", "--enable-scale-out"),
    ],
)
def test_a_server_without_a_route_is_refused(missing, text):
    server = played()
    server.missing.add(missing)
    assert text in refused(server)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
        ({"max_model_len": CONTEXT - 1}, f"start it with --max-model-len {CONTEXT}"),
        ({"max_model_len": "many"}, "server_info is not what vLLM 0.32 answers"),
    ],
)
def test_a_server_with_other_settings_is_refused(config, text):
    assert text in refused(played(config=config))


@pytest.mark.parametrize("answer", [{}, [], None, {"vllm_config": 3}, "text", {"vllm_config": {"model_config": None}}])
def test_an_answer_of_somebody_else_is_refused(answer):
    server = played()
    server.instead["/server_info"] = answer
    assert "server_info is not what vLLM 0.32 answers" in refused(server)


def test_servers_with_different_models_are_refused():
    other, third = played(), played()
    other.model = {**other.model, "vocab_size": 62}
    third.model = {**third.model, "model_type": "llama"}
    assert "serve different models (vocab_size = 61 and 62)" in refused(played(), other)
    assert "serve different models (model_type = qwen3 and llama)" in refused(played(), played(), third)


def test_a_server_with_another_vocabulary_than_the_recipes_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 77}')
    model = {"path": str(tmp_path)}
    assert "has a model of 61 tokens, and the recipe's has 77" in refused(played(), model=model)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"results": []}, "collective_rpc is not what vLLM 0.32 answers"),
        ({"results": ["no method"]}, "collective_rpc is not what vLLM 0.32 answers"),
        ("text", "collective_rpc is not what vLLM 0.32 answers"),
    ],
)
def test_workers_that_say_something_else_are_refused(answer, text):
    server = played()
    server.instead["/collective_rpc"] = answer
    assert text in refused(server)


def test_a_server_without_the_extension_is_refused():
    from aiohttp import web

    async def fail(request):
        return web.json_response({"error": {"message": "'Worker' object has no attribute"}}, status=500)

    server = played()
    server.instead["/collective_rpc"] = fail
    assert "--worker-extension-cls turnwise.engines.vllm.worker.Extension" in refused(server)


def test_a_server_that_nobody_started_is_refused_and_leaves_no_folder(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    out = tmp_path / "run"

    async def scene():
        async with running.training(recipe(url, out=str(out)), SilentScreen(), asyncio.Event()):
            return

    with pytest.raises(ValueError, match=rf"{url} cannot be reached") as caught:
        run(scene())
    assert "\n" not in str(caught.value)
    assert not out.exists()


# ---------------------------------------------------------------- keys and certificates


def test_a_key_is_taken_from_the_environment_and_shown_to_nobody(monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)

    async def scene(server, **vllm):
        async with server:
            await check_servers(recipe(server.url, **vllm))
            return server.asked

    assert run(scene(played(key=KEY, guards_all=True), api_key_variable="MY_KEY"))
    assert "asks for a key" in refused(played(key=KEY))
    monkeypatch.setenv("MY_KEY", "another-key")
    assert "refused the key" in refused(played(key=KEY), api_key_variable="MY_KEY")
    assert KEY not in str(recipe("http://a", api_key_variable="MY_KEY").model_dump())


def test_a_server_that_repeats_the_key_does_not_put_it_into_a_message(monkeypatch):
    from aiohttp import web

    monkeypatch.setenv("MY_KEY", KEY)

    async def repeat(request):
        return web.Response(text=f"wrong: {request.headers['Authorization']}", status=500)

    server = played()
    server.instead["/server_info"] = repeat
    text = refused(server, api_key_variable="MY_KEY")
    assert "wrong: Bearer ***" in text
    assert KEY not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "the environment has no MY_KEY"),
        ("", "has no MY_KEY"),
        ("a\nb", "characters that no key"),
    ],
)
def test_a_key_that_is_none_is_refused(monkeypatch, value, text):
    monkeypatch.delenv("MY_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(ValueError, match=text):
        check_access(recipe("http://a", api_key_variable="MY_KEY"))


def test_certificates_that_are_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no file at"):
        check_access(recipe("https://a", ca_file=str(tmp_path / "none.pem")))
    (tmp_path / "text.pem").write_text("hello")
    with pytest.raises(ValueError, match="no certificates in PEM form"):
        check_access(recipe("https://a", ca_file=str(tmp_path / "text.pem")))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(file of a certificate for localhost, context of a server that has it)."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    hosts = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(hosts, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "ca.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / "key.pem").write_bytes(private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.pem", folder / "key.pem")
    return str(folder / "ca.pem"), context


def test_an_https_server_is_known_by_its_own_certificate(certificate):
    ca_file, context = certificate

    async def scene():
        async with played(tls=context) as server:
            await check_servers(recipe(server.url, ca_file=ca_file))
            return server.url

    assert run(scene()).startswith("https://")
    assert "cannot be reached" in refused(played(tls=context))
    assert "certificate verify failed" in refused(played(tls=context)).lower()


# ---------------------------------------------------------------- the recipe


@pytest.mark.parametrize(
    ("vllm", "text"),
    [
        ({"servers": ["a:8000"]}, "is no address of a server"),
        ({"servers": ["ftp://a"]}, "is no address of a server"),
        ({"servers": ["http://"]}, "is no address of a server"),
        ({"servers": ["http://a:99999"]}, "is no address of a server"),
        ({"servers": ["http://a/?x=1"]}, "is no address of a server"),
        ({"servers": ["http://me:secret@a"]}, "api_key_variable"),
        ({"servers": ["http://a", "http://a/"]}, "names http://a twice"),
        ({"api_key_variable": "X"}, "api_key_variable is ignored without servers"),
        ({"servers": ["http://a"], "ca_file": "x"}, "ca_file is ignored where no server is https"),
        ({"server": "http://a"}, "engine.vllm.server is called engine.vllm.servers now"),
    ],
)
def test_addresses_that_lead_nowhere_are_refused(vllm, text):
    tree = {"env": {"name": "hops"}, "engine": {"name": "vllm", "vllm": vllm}}
    with pytest.raises(ValueError, match=text) as caught:
        parse_recipe(tree, "test")
    assert "secret" not in str(caught.value)


def test_a_recipe_makes_an_engine_per_server_that_has_the_first_weights():
    async def scene():
        router: Any = vllm_engine(recipe("http://a:1/", "http://b:2"), tiny_model(), renderer(), 3)
        try:
            return [(slot.replica.name, slot.replica.version, set(slot.replica.first_weights)) for slot in router.slots]
        finally:
            await router.close()

    names = set(tiny_model().state_dict())
    assert run(scene()) == [("http://a:1", 3, names), ("http://b:2", 3, names)]


# ---------------------------------------------------------------- sleep


def test_a_server_that_cannot_sleep_is_refused_where_it_shall():
    assert "start it with --enable-sleep-mode" in refused(played(), sleep=True)

    async def scene():
        async with played(config={"enable_sleep_mode": True}) as server:
            await check_servers(recipe(server.url, sleep=True))
            return server.asked

    assert run(scene())


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"max_lag": 1}, "with max_lag = 1 sampling goes on"),
        ({"cluster": {"placement": "disaggregated"}}, "vLLM has GPUs of its own"),
        ({"cluster": {"placement": "separate_nodes"}}, "vLLM has GPUs of its own"),
        ({"engine": {"name": "slots"}}, 'vllm.sleep is ignored with name = "slots"'),
        ({"engine": {"memory": {"keep_cache": True}}}, "memory.keep_cache is ignored with vllm.sleep"),
        ({"schedule": {"overlap_evaluations": True}, "evaluation": {"every": 1}}, "evaluates while the learner works"),
    ],
)
def test_sleep_is_refused_where_nobody_could_use_the_memory(tree, text):
    engine = {"name": "vllm", "vllm": {"sleep": True}, **tree.get("engine", {})}
    with pytest.raises(ValueError, match=text):
        parse_recipe({"env": {"name": "hops"}, **tree, "engine": engine}, "test")


def test_sleep_needs_a_gpu():
    with pytest.raises(ValueError, match=r"engine.vllm.sleep = True needs a GPU; remove it"):
        check_gpus(recipe("http://a", sleep=True))
