from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from turnwise.cli.terminal import PlainScreen, RichScreen, headline, open_screen, print_line
from turnwise.runs.screen import table
from turnwise.runs.transcript import Styled

METRICS = {"reward/mean": 0.5, "success": 0.25, "loss": 1.0, "speed/tokens_per_second": 12345.6, "lag/max": 2.0}


def test_the_headline_shows_the_available_metrics() -> None:
    assert headline(METRICS) == "reward 0.500  success 0.250  tok/s 12,346  lag 2"
    assert headline({"loss": 1.0}) == "loss 1.000"
    assert headline({}) == ""


def test_plain_lines_are_not_more_than_one_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    screen = PlainScreen(seconds=1000.0)
    screen.begin("training", total=10)
    screen.last = 0.0
    for done in range(1, 11):
        screen.show(done, METRICS | ({"eval/sampled/success": 0.75} if done == 5 else {}))
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[1] for line in lines]
    assert "5/10" in shown
    assert shown[-1] == "10/10"
    assert len(shown) <= 3
    assert any("held-out 0.750" in line for line in lines)


def test_a_terminal_gets_a_bar_with_the_headline() -> None:
    screen = RichScreen()
    screen.console = Console(file=io.StringIO(), force_terminal=True, width=140)
    screen.begin("training", total=4, done=1)
    screen.show(3, METRICS)
    screen.say("[not markup]")
    screen.end()
    screen.end()
    file: Any = screen.console.file
    printed = file.getvalue()
    assert "3/4" in printed
    assert "success 0.250" in printed
    assert "[not markup]" in printed


def test_output_to_a_pipe_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert isinstance(open_screen(), PlainScreen)


def test_a_table_is_aligned() -> None:
    rows = [("tree", "1", ""), ("packed", "12,345", "x")]
    assert table(("layout", "tokens", "is"), rows) == ["layout  tokens  is", "tree         1", "packed  12,345   x"]
    assert table(("layout", "tokens"), []) == ["layout  tokens"]


def test_words_that_the_output_cannot_encode_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", output)
    PlainScreen().say("── 漢 :heart:")
    print_line((Styled("→"),))
    output.flush()
    assert output.buffer.getvalue() == b"\\u2500\\u2500 \\u6f22 :heart:\n\\u2192\n"


def test_a_terminal_shows_words_as_they_are_written() -> None:
    screen = RichScreen()
    output = io.StringIO()
    screen.console = Console(file=output, force_terminal=True, width=140)
    screen.say(":heart: [bold]")
    assert ":heart: [bold]" in output.getvalue()
