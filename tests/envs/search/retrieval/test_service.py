import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from turnwise.envs.search.retrieval import service
from turnwise.envs.search.retrieval.service import Local, Passage, Remote


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "passages.jsonl"
    lines = (json.dumps({"id": str(n), "contents": f'"Title{n}"\nword{n} shared'}) for n in range(100))
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def local(corpus, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = Local(str(corpus), "bm25")
        made.running()
        yield made
        made.close()


def post(url, body):
    request = urllib.request.Request(f"{url}/retrieve", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def test_the_wire_format_is_that_of_search_r1(local):
    _, url = local.running()
    answer = post(url, {"queries": ["word7", "word8"], "topk": 3, "return_scores": True})
    assert [list(answer), len(answer["result"])] == [["result"], 2]
    [found] = answer["result"][0]
    assert found["document"] == {"id": "7", "contents": '"Title7"\nword7 shared'}
    assert found["score"] > 0
    assert post(url, {"queries": ["word7"]}) == {"result": [[found["document"]]]}
    assert len(post(url, {"queries": ["shared"], "topk": 5})["result"][0]) == 5


@pytest.mark.parametrize(
    "body",
    [{}, {"queries": "word7"}, {"queries": [1]}, {"queries": ["a"], "topk": 0}, {"queries": ["a"], "topk": 10**9}, 3],
)
def test_malformed_requests_are_refused_and_the_server_continues(local, body):
    _, url = local.running()
    with pytest.raises(urllib.error.HTTPError, match="422"):
        post(url, body)
    assert local.search(["word1"], 1)[0][0].title == "Title1"


def test_64_queries_are_one_call(local, monkeypatch):
    calls = []
    monkeypatch.setattr(service, "ask", lambda *given, ask=service.ask, **more: calls.append(1) or ask(*given, **more))
    found = local.search([f"word{n}" for n in range(64)], 3)
    assert [one[0].title for one in found] == [f"Title{n}" for n in range(64)]
    assert calls == [1]
    assert found[5] == [Passage("Title5", "word5 shared", found[5][0].score)]


def test_a_server_that_was_killed_starts_again(local):
    before = local.starts
    process, _ = local.running()
    process.kill()
    assert local.search(["word3"], 1)[0][0].title == "Title3"
    assert local.starts == before + 1


def test_a_kill_in_the_middle_of_searches_loses_none(local):
    found, errors = [], []

    def search(number):
        try:
            for _ in range(20):
                found.append(local.search([f"word{number}"], 1)[0][0].title == f"Title{number}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=search, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    process, _ = local.running()
    os.kill(process.pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert errors == []
    assert found == [True] * 160


def test_a_server_that_hangs_is_replaced(local, monkeypatch):
    monkeypatch.setattr(local, "seconds", 3.0)
    process, _ = local.running()
    os.kill(process.pid, signal.SIGSTOP)
    assert local.search(["word3"], 1)[0][0].title == "Title3"
    assert process.poll() is not None


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at /proc")
def test_the_server_dies_with_the_run_however_that_dies(corpus):
    code = (
        "import sys, time; from turnwise.envs.search.retrieval.service import Local; "
        "print(Local(sys.argv[1], 'bm25').running()[0].pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(corpus)], stdout=subprocess.PIPE, text=True) as run:
        server = int(run.stdout.readline())
        assert is_alive(server)
        run.kill()
    end = time.monotonic() + 600
    while is_alive(server) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(server)


def test_a_remote_server_is_asked_the_same_way(local):
    _, url = local.running()
    assert Remote(f"{url}/").search(["word2"], 1)[0][0].title == "Title2"
    with pytest.raises(ValueError, match=r"/retrieve answered 422"):
        Remote(url).search(["x"], 0)


def test_a_server_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(ConnectionError, match="no retrieval server answers at http://127.0.0.1:9"):
        Remote("http://127.0.0.1:9", seconds=1).search(["x"], 1)
    with pytest.raises(ValueError, match="write the address of a retrieval server"):
        Remote("localhost:8000")


def test_an_answer_of_another_form_is_refused():
    with pytest.raises(ValueError, match="does not have Search-R1's form"):
        service.passages_in({"result": [["text"]]})


def test_a_server_that_cannot_start_says_why(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("{\n")
    with pytest.raises(ValueError, match=r"x.jsonl, line 1: not JSON"):
        Local(str(path), "bm25").search(["x"], 1)
    path.write_text('{"contents": "x"}\n')
    with pytest.raises(ValueError, match="run: turnwise data minilm"):
        Local(str(path), "dense").search(["x"], 1)
