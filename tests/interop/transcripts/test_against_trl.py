"""TRL's own helpers agree with how its formats are read: which rows are conversations, and what is trained."""

import json

import pytest

from support.acting import byte_tokenizer
from support.transcribed import TALK, sample
from turnwise.interop.transcripts.formats import read_row, write_row
from turnwise.messages import Message
from turnwise.rollout.demonstrate import RecordedDemonstrations
from turnwise.rollout.render.renderer import Renderer

pytestmark = pytest.mark.slow
data_utils = pytest.importorskip("trl.data_utils")

ROWS = {
    "text": {"prompt": "2 + 2 =", "completion": " 4"},
    "talk": write_row(sample(), "trl"),
    "long": write_row(sample(messages=TALK.messages[:2] + TALK.messages[-1:], trained=(False, False, True)), "trl"),
    "messages": write_row(sample(), "openai"),
}


@pytest.mark.parametrize("name", ROWS)
def test_which_rows_are_conversations(name):
    row = ROWS[name]
    (read,) = read_row(("x, row 1", row))
    roles = [message.role for message in read.messages]
    if data_utils.is_conversational(row):
        given = row.get("messages") or [*row["prompt"], *row["completion"]]
        assert roles == [message["role"] for message in given]
    else:
        assert roles == ["user", "assistant"]


@pytest.mark.parametrize("name", ["talk", "long"])
def test_the_prompt_and_the_action_are_those_of_trl(name):
    """TRL renders the prompt and the whole, and trains what comes after; it trains the line feed after the end too."""
    row, tokenizer = ROWS[name], byte_tokenizer()
    theirs = data_utils.apply_chat_template(row, tokenizer)
    render = Renderer(tokenizer)
    recorded = RecordedDemonstrations(render, read_row(("x, row 1", row)), "talks")
    (turn,) = recorded.group(recorded.tasks[0]).trajectories[0].turns
    assert render.decode(turn.prompt) == theirs["prompt"]
    assert theirs["completion"] == render.decode(turn.action) + "\n"


def test_calls_of_trl_are_calls_of_a_template():
    """TRL hands objects of arguments to templates; the same text is trained."""
    row, tokenizer = write_row(TALK, "trl"), byte_tokenizer()
    assert json.loads(json.dumps(row))["completion"][0]["tool_calls"][0]["function"]["arguments"] == {"name": "amber"}
    (read,) = read_row(("x, row 1", row))
    assert read.messages == TALK.messages
    assert data_utils.is_conversational(row)
    assert read.messages[-1] == Message("assistant", "elm")
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    render = Renderer(tokenizer, tools="hermes")
    recorded = RecordedDemonstrations(render, [read], "talks")
    first, _ = recorded.group(recorded.tasks[0]).trajectories[0].turns
    assert render.said(first.prompt, first.action).calls == TALK.messages[2].calls
