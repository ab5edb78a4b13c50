import numpy as np
import pytest

from support.making import make_group, make_trajectory, make_turn
from turnwise.messages import Message, ToolCall
from turnwise.runs.transcript import LONGEST_TEXT, best_and_worst, coloured, ground, milliseconds, transcript, visible
from turnwise.types import Break, Status, Trajectory, TurnTiming


def pieces(tokens):
    return [f"<{token}>" for token in tokens.tolist()]


def text_of(lines):
    return "\n".join("".join(span.text for span in line) for line in lines)


def attempt(*turns, **how):
    return Trajectory(turns, Status.finished, **how)


def test_an_attempt_reads_as_a_conversation():
    first = make_turn(
        [1, 2],
        [3, 4],
        reward=0.5,
        version=7,
        said=Message("assistant", "I look", thinking="where?", calls=(ToolCall("get", {"name": "amber"}),)),
        heard=(Message("tool", "amber: cedar"),),
        timing=TurnTiming(queued=0.002, decode=1.5),
    )
    second = make_turn(
        [9, 9], [5], said=Message("assistant", "[", fault="a call that could not be read"), broke=Break.template
    )
    lines = text_of(
        transcript(
            attempt(first, second, outcome=1.0, marks={"lookups": 2.0}),
            pieces,
            [np.array([0.25, 0.25]), np.array([-1.0])],
        )
    )
    assert lines.split("\n") == [
        "── prompt 2 tokens",
        "<1><2>",
        "── turn 1 2 tokens, end_token, reward +0.5, credit +0.250, version 7, queued 2 ms, decode 1.50 s",
        "where?",
        "I look",
        '→ get {"name": "amber"}',
        "── tool ",
        "amber: cedar",
        "── history rewritten (template): the prompt has 2 tokens",
        "── turn 2 1 tokens, end_token, credit -1.000, version 0",
        "[",
        "! a call that could not be read",
        "── end finished, reward 1.5, of which outcome 1, lookups 2",
    ]


def test_an_attempt_that_failed_says_why():
    lost = Trajectory((), Status.failed, failure="RuntimeError in step: the \x1b[31mstore")
    assert text_of(transcript(lost, pieces)) == "── end failed, reward 0: RuntimeError in step: the ␛[31mstore"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("a\rb\x00\x7f", "a␍b␀␡"),
        ("\x9b2J", "\\u009b2J"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud800", "\\ud800"),
        ("𝕏 ñ 漢", "𝕏 ñ 漢"),
    ],
)
def test_controls_are_made_visible(text, shown):
    assert visible(text) == shown
    shown.encode()


def test_long_texts_are_cut_unless_all_is_asked_for():
    turn = make_turn([1], [2], said=Message("assistant", "x" * (LONGEST_TEXT + 5)))
    assert "… 5 characters more (turnwise show --all)" in text_of(transcript(attempt(turn), pieces))
    assert "x" * (LONGEST_TEXT + 5) in text_of(transcript(attempt(turn), pieces, longest=None))


def test_tokens_are_coloured_by_the_sign_and_size_of_their_credit():
    lines = list(coloured(["a", "b\n", "c", "\x1b"], np.array([1.0, -0.5, 0.0, -1.0])))
    assert [[span.text for span in line] for line in lines] == [["a", "b⏎"], ["", "c", "␛"]]
    styles = [span.style for line in lines for span in line]
    assert styles[0] == ground(1.0) == "white on #2166ac"
    assert styles[1] == ground(-0.5)
    assert styles[3] == ground(0.0) == "black on #ffffff"
    assert styles[4] == ground(-1.0) == ground(-7.0) == "black on #e68228"
    assert {span.style for line in coloured(["a", "b"], None) for span in line} == {""}
    assert {span.style for line in coloured(["a", "b"], np.zeros(2)) for span in line} == {""}


def test_every_token_of_an_attempt_is_shown():
    trajectory = make_trajectory([(3, 4), (2, 3)])
    shown = text_of(transcript(trajectory, pieces, tokens=True))
    for turn in trajectory.turns:
        assert "".join(pieces(turn.action)) in shown


def test_the_best_and_the_worst_attempt_of_a_step():
    groups = [make_group([0.0, 0.5], name="a"), make_group([1.0, 0.25], name="b\x1b")]
    lines = list(best_and_worst(groups, lambda tokens: f"{len(tokens)} tokens"))
    assert [line for line in lines if not line.startswith("  ")] == ["best attempt, task b␛", "worst attempt, task a"]
    assert [line for line in lines if line.startswith("  ── end")] == [
        "  ── end finished, reward 1",
        "  ── end finished, reward 0",
    ]
    alike = list(best_and_worst([make_group([1.0, 1.0])], str))
    assert [line for line in alike if not line.startswith("  ")] == ["an attempt, task task"]
    assert list(best_and_worst([], str)) == []


def test_durations():
    assert [milliseconds(seconds) for seconds in (0.0001234, 0.25, 2.5, 12.34)] == [
        "0.123 ms",
        "250 ms",
        "2.50 s",
        "12.3 s",
    ]
