import hashlib
import os
import stat
import sys
from dataclasses import replace

import pytest

from turnwise.data.entry import Entry
from turnwise.data.package import Package

CONTENT = b"what was published"
NPM = Package("npm", "thing", "1.0.0", "thing-1.0.0.tgz", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
PIP = replace(NPM, registry="pip", file="thing-1.0.0-py3-none-any.whl")


def pretend(monkeypatch, folder, code):
    """An npm that runs some Python code, with its arguments in `given`."""
    command = folder / "npm"
    command.write_text(f"#!{sys.executable}\nimport sys\ngiven = sys.argv[1:]\n{code}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_file_of_the_registry_is_fetched_by_its_own_command(monkeypatch, tmp_path):
    pretend(
        monkeypatch,
        tmp_path,
        f"assert given[:2] == ['pack', 'thing@1.0.0']; open(given[3] + '/{NPM.file}', 'wb').write({CONTENT!r})",
    )
    with NPM.fetched() as path:
        assert path.read_bytes() == CONTENT
    assert not path.exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"open(given[3] + '/{NPM.file}', 'wb').write(b'tampered')", "is not thing-1.0.0.tgz as it was published"),
        ("sys.exit('npm warn old\\nnpm error 404 Not Found')", "npm pack could not get thing-1.0.0.tgz: npm error 404"),
        ("pass", "npm pack could not get thing-1.0.0.tgz: no message"),
    ],
)
def test_what_can_go_wrong_is_one_line(monkeypatch, tmp_path, code, message):
    pretend(monkeypatch, tmp_path, code)
    with pytest.raises(ValueError) as error, NPM.fetched():
        pass
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_command_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(ValueError, match=r"with the command npm, which is not installed; .* --from FILE"),
        NPM.fetched(),
    ):
        pass


def test_pip_fetches_a_wheel_and_nothing_it_depends_on(tmp_path):
    command = PIP.command(tmp_path)
    assert command[1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "thing==1.0.0"


def test_a_given_file_is_checked_and_stays(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    with PIP.fetched(tmp_path / "file") as path:
        assert path == tmp_path / "file"
    assert path.exists()
    (tmp_path / "file").write_bytes(b"other")
    with pytest.raises(ValueError, match="expected " + NPM.sha256), PIP.fetched(path):
        pass


def copy(file, folder):
    (folder / "copy").write_bytes(file.read_bytes())


def test_an_entry_is_made_once_and_only_by_fetching(tmp_path):
    entry = Entry("thing", "a thing", "none", NPM, copy)
    with pytest.raises(ValueError, match="^thing is not on this machine yet; run: turnwise data thing$"):
        entry.located()
    (tmp_path / "file").write_bytes(CONTENT)
    assert (entry.fetch(tmp_path / "file") / "copy").read_bytes() == CONTENT
    (tmp_path / "file").unlink()
    assert entry.fetch(tmp_path / "file") == entry.located()


def test_an_entry_says_which_extra_it_needs(tmp_path):
    entry = Entry("thing", "a thing", "none", NPM, copy, needs=("no_such_module", "thingy"))
    with pytest.raises(ValueError, match=r'^thing needs no_such_module: pip install "turnwise\[thingy\]"$'):
        entry.fetch(tmp_path / "file")


def test_what_was_fetched_and_is_damaged_is_named_and_fetched_again(tmp_path, caplog):
    entry = Entry("thing", "a thing", "none", NPM, copy)
    (tmp_path / "file").write_bytes(CONTENT)
    (entry.fetch(tmp_path / "file") / "copy").write_bytes(CONTENT.upper())
    with pytest.raises(ValueError, match="copy does not match its checksum; fetch it again: turnwise data thing$"):
        entry.located()
    assert (entry.fetch(tmp_path / "file") / "copy").read_bytes() == CONTENT
    assert caplog.messages == [f"{entry.folder} is damaged: copy does not match its checksum; it is made again"]
    assert entry.located() == entry.folder
