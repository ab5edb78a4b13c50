"""Who is let in, and with which headers a page is sent."""

import pytest
from starlette.testclient import TestClient

from support.viewing import make_run
from turnwise.view.app import make_app
from turnwise.view.gate import Gate, host_of, is_this_machine
from turnwise.view.watched_run import WatchedRuns


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    make_run(path, steps=1)
    found = WatchedRuns.open([path])
    found.read_all()
    return found


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8765", "localhost", "localhost:1", "[::1]:8765", "127.8.8.8", "LOCALHOST."]
)
def test_names_of_this_machine_are_answered(runs, host):
    assert TestClient(make_app(runs), base_url="http://127.0.0.1").get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "192.168.1.5:8765", "localhost.evil", "[::2]"]
)
def test_another_name_is_refused_for_it_may_be_rebound(runs, host):
    client = TestClient(make_app(runs), base_url="http://127.0.0.1")
    for path in ("/", "/api/runs"):
        assert client.get(path, headers={"host": host}).status_code == 403


def test_nothing_can_be_written_and_other_sites_cannot_ask(runs):
    client = TestClient(make_app(runs), base_url="http://127.0.0.1")
    assert client.post("/api/runs").status_code == 405
    assert (
        client.get("/api/runs", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}).status_code == 403
    )
    answer = client.get("/api/runs", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert client.get("/" + "x" * 2000).status_code == 414


def test_the_browser_is_told_to_run_nothing_else(runs):
    client = TestClient(make_app(runs), base_url="http://127.0.0.1")
    for path in ("/", "/main.js", "/api/runs", "/nowhere"):
        headers = client.get(path).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_others_need_the_token(runs):
    client = TestClient(make_app(runs, "s3cret"), base_url="http://example.com", follow_redirects=False)
    for path in ("/", "/main.js", "/api/runs", "/?token=wrong", "/?token="):
        assert client.get(path).status_code == 401
    assert client.get("/api/runs", headers={"authorization": "Bearer s3cret"}).status_code == 200
    assert client.get("/api/runs", headers={"authorization": "Bearer s3cre"}).status_code == 401
    assert client.get("/api/runs", headers={"cookie": "turnwise-view=no; ="}).status_code == 401
    first = client.get("/?token=s3cret")
    assert first.status_code == 303
    assert "s3cret" not in first.headers["location"]
    assert "HttpOnly; SameSite=Lax" in first.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200  # by the cookie
    assert "s3cret" not in first.headers["set-cookie"]


def test_a_token_may_have_any_letters(runs):
    client = TestClient(make_app(runs, "é;&= x"), base_url="http://example.com", follow_redirects=False)
    first = client.get("/", params={"token": "é;&= x", "other": "1"})
    assert (first.status_code, first.headers["location"]) == (303, "?other=1")
    assert client.get("/").status_code == 200


def test_hosts():
    assert host_of("[::1]:80") == "::1"
    assert host_of("a:80") == "a"
    assert is_this_machine("::1")
    assert not is_this_machine("0.0.0.0")


def test_cookies_of_others_do_not_hide_ours(runs):
    gates = [Gate(lambda *_: None, token) for token in ("one", "two")]
    assert gates[0].cookie != gates[1].cookie
    client = TestClient(make_app(runs, "one"), base_url="http://example.com")
    mine = f"{gates[0].cookie}={gates[0].mark}"
    for others in ('prefs={"a":1}', "a[b]=1", f"{gates[1].cookie}={gates[1].mark}", "=", ";;"):
        assert client.get("/api/runs", headers={"cookie": f"{others}; {mine}"}).status_code == 200
        assert client.get("/api/runs", headers={"cookie": others}).status_code == 401
