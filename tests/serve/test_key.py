import asyncio
import hmac
import http.client
import json
from urllib.parse import urlsplit

import pytest

from serve.malformed import CHAT
from serve.serving import chat_body, make_session
from support.acting import run
from turnwise.cli.commands import main
from turnwise.cli.parser import parsed
from turnwise.serve.dialects.ask import Refusal
from turnwise.serve.endpoint import Endpoint
from turnwise.serve.key import VARIABLE, find_key
from turnwise.serve.registry import Registry


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def test_a_key_comes_from_the_command_line_a_file_the_environment_or_is_made_up(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text("from a file\u00fc\n".replace(" ", "-"))
    first, second = find_key("", ""), find_key("", "")
    assert first.text == first.shown != second.text
    assert len(first.text) >= 24
    monkeypatch.setenv(VARIABLE, "from-the-environment")
    assert find_key("", "").text == "from-the-environment"
    assert find_key("", str(file)).text == "from-a-file\u00fc"
    assert find_key("given", "").text == "given"


def test_a_given_key_is_not_printed(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("hidden")
    monkeypatch.setenv(VARIABLE, "hidden")
    for key in (find_key("hidden", ""), find_key("", str(tmp_path / "key")), find_key("", "")):
        assert key.text == "hidden"
        assert "hidden" not in key.shown


@pytest.mark.parametrize("raw", [b"", b"\n", b"two words", b"a\nb", b"\xff", b"a\x00b", b"x" * 5000])
def test_a_file_that_holds_no_key_is_refused_in_one_line(raw, tmp_path, capsys):
    (tmp_path / "key").write_bytes(raw)
    assert main(["serve", str(tmp_path), "--key-file", str(tmp_path / "key")]) == 2
    said = capsys.readouterr().err.strip()
    assert "key" in said
    assert "\n" not in said


def test_mistakes_with_keys_are_one_line(tmp_path, capsys, monkeypatch):
    for arguments, words in [
        (["--key-file", str(tmp_path / "nowhere")], "cannot read --key-file"),
        (["--key-file", str(tmp_path)], "cannot read --key-file"),
        (["--key", "a", "--key-file", "b"], "remove one of them"),
        (["--key", "two words"], "one word without spaces"),
    ]:
        assert main(["serve", str(tmp_path), *arguments]) == 2
        said = capsys.readouterr().err.strip()
        assert words in said
        assert "\n" not in said
    monkeypatch.setenv(VARIABLE, "")
    assert main(["serve", str(tmp_path)]) == 2
    assert VARIABLE in capsys.readouterr().err
    assert parsed(["serve", "x"]).key_file == ""


def test_keys_are_compared_in_constant_time_and_stored_under_secret_hashes(monkeypatch):
    compared, same = [], hmac.compare_digest

    def compare(one, other):
        compared.append((one, other))
        return same(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    session, other = object(), object()
    here, there = Registry(10), Registry(10)
    for own in (here, there):
        own.add("schlüssel", session)
        own.add("k", other)
    assert here.find("schlüssel".encode()) is session
    assert here.find("schlüssel".encode("latin-1")) is session
    assert here.find(b"k") is other
    for wrong in (b"", b"schl", "schlüssel ".encode(), "schlüsse".encode(), b"\xff\xfe", b"K"):
        with pytest.raises(Refusal, match="this key is unknown"):
            here.find(wrong)
    assert len(compared) == 9
    assert set(here.sessions).isdisjoint(there.sessions)
    here.end("schlüssel")
    with pytest.raises(Refusal, match="over"):
        here.find("schlüssel".encode())


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_key_of_other_letters_opens_its_session(encoding):
    async def work():
        endpoint = Endpoint()
        session = make_session()
        try:
            address = endpoint.open(session, "clé-ü")
            return await asyncio.to_thread(ask, address, encoding)
        finally:
            session.end()
            endpoint.close()

    def ask(address, encoding):
        parts = urlsplit(address.base_url)
        found = []
        for header, key in (("authorization", "Bearer clé-ü"), ("x-api-key", "clé-ü"), ("x-api-key", "clé-u")):
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
            connection.request("POST", CHAT, json.dumps(chat_body()), {header: key.encode(encoding)})
            found.append(connection.getresponse().status)
            connection.close()
        return found

    assert run(work()) == [200, 200, 401]
