"""`turnwise view` as a process."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from support.viewing import make_run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_page_is_there_until_somebody_stops_it(tmp_path, number):
    make_run(tmp_path / "run", steps=1)
    command = [sys.executable, "-m", "turnwise.cli", "view", str(tmp_path / "run"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        name, _, url = process.stdout.readline().strip().partition(": ")
        assert name == "run"
        with urllib.request.urlopen(url + "api/runs", timeout=600) as answer:
            assert answer.status == 200
        process.send_signal(number)
        assert process.wait(timeout=600) == 0


def test_users_of_this_machine_need_the_token_of_a_file(tmp_path):
    make_run(tmp_path / "run", steps=1)
    (tmp_path / "key").write_text("s3cret\n")
    command = [sys.executable, "-m", "turnwise.cli", "view", str(tmp_path / "run"), "--port", "0"]
    command += ["--key-file", str(tmp_path / "key")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        base = line.split(": ")[1].split("?")[0]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(base + "api/runs", timeout=600)
        asked = urllib.request.Request(base + "api/runs", headers={"authorization": "Bearer s3cret"})
        with urllib.request.urlopen(asked, timeout=600) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=600)
    assert "s3cret" not in line


def test_others_get_a_token_that_is_not_shown_where_it_is_known(tmp_path):
    make_run(tmp_path / "run", steps=1)
    command = [sys.executable, "-m", "turnwise.cli", "view", str(tmp_path / "run"), "--port", "0", "--host", "0.0.0.0"]
    for variables, secret in (({}, None), ({"TURNWISE_KEY": "s3cret"}, "s3cret")):
        environment = {**os.environ, **variables}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            line = process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=600)
        assert "?token=" in line
        assert (secret is None) or secret not in line
        assert (secret is not None) or len(line.split("token=")[1].strip()) > 20
