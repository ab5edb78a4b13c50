"""Servers of a recipe are refused in one line each, before a run makes its folder."""

import asyncio
import datetime
import ipaddress
import socket
import ssl

import pytest

from engines.vllm.playing import CONTEXT, played
from support.acting import renderer, run, tiny_model
from support.running import SilentScreen
from turnwise.assemble import run as running
from turnwise.assemble.engines import vllm_engine
from turnwise.assemble.servers import check_access, check_servers
from turnwise.recipe.parse import parse_recipe

KEY = "a-key-of-many-characters"


def recipe(*urls, out="", **vllm):
    limits = {"max_trajectory_tokens": CONTEXT, "max_prompt_tokens": CONTEXT // 2, "max_action_tokens": 8}
    tree = {"env": {"name": "hops"}, "engine": {"name": "vllm", "vllm": {"servers": list(urls), **vllm}}}
    return parse_recipe({**tree, "rollout": limits, **({"out": out} if out else {})}, "test")


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
        ({"hf_text_config": "Qwen3Config {"}, "server_info is not what vLLM 0.32 answers"),
        ({"hf_text_config": [1]}, "server_info is not what vLLM 0.32 answers"),
    ],
)
def test_a_server_with_other_settings_is_refused(config, text):
    assert text in refused(played(config=config))


@pytest.mark.parametrize("answer", [{}, [], None, {"vllm_config": 3}, "text", {"vllm_config": {"model_config": None}}])
def test_an_answer_of_somebody_else_is_refused(answer):
    server = played()
    server.instead["/server_info"] = answer
    assert "server_info is not what vLLM 0.32 answers" in refused(server)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ('Qwen3Config {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 62}', "vocab_size = 61 and 62"),
        ('LlamaConfig {"architectures": ["LlamaForCausalLM"], "vocab_size": 61}', "serve different models"),
    ],
)
def test_servers_with_different_models_are_refused(config, text):
    assert text in refused(played(), played(config={"hf_text_config": config}))


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
        router = vllm_engine(recipe("http://a:1/", "http://b:2"), tiny_model(), renderer(), 3)
        try:
            return [(slot.replica.name, slot.replica.version, set(slot.replica.first_weights)) for slot in router.slots]
        finally:
            await router.close()

    names = set(tiny_model().state_dict())
    assert run(scene()) == [("http://a:1", 3, names), ("http://b:2", 3, names)]
