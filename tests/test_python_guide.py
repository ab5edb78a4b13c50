"""The guide to the Python interface: every block runs, in order, in one session."""

import re

import pytest

from support.paths import DOCS

PAGE = DOCS / "guides" / "python.md"


def blocks():
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_every_block_compiles():
    assert len(blocks()) == 6
    for number, block in enumerate(blocks()):
        compile(block, f"block {number}", "exec")


@pytest.mark.slow
def test_every_block_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    session = {"__name__": "__main__"}
    for number, block in enumerate(blocks()):
        exec(compile(block, f"block {number}", "exec"), session)
    assert "step 2: reward" in capsys.readouterr().out
