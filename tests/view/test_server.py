import http.client
import socket

import pytest

from support.viewing import make_run
from turnwise.view.server import ViewServer
from turnwise.view.watched_run import WatchedRuns


def test_the_page_is_served_on_this_machine(tmp_path):
    make_run(tmp_path / "run", steps=1)
    with WatchedRuns.open([tmp_path / "run"]) as runs, ViewServer(runs) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/"
        for path in ("/", "/api/runs", "/vendor/uPlot.esm.js"):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("GET", path)
            assert connection.getresponse().status == 200
            connection.close()


def test_others_are_let_in_only_with_a_token(tmp_path):
    make_run(tmp_path / "run", steps=1)
    runs = WatchedRuns.open([tmp_path / "run"])
    with pytest.raises(ValueError, match="needs a token"):
        ViewServer(runs, "0.0.0.0")
    assert ViewServer(runs, "10.0.0.7", 80, "abc").url == "http://10.0.0.7:80/?token=abc"


def test_a_port_that_is_taken_is_said(tmp_path):
    make_run(tmp_path / "run", steps=1)
    runs = WatchedRuns.open([tmp_path / "run"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot serve on 127.0.0.1:{port}"), ViewServer(runs, port=port):
            pass
