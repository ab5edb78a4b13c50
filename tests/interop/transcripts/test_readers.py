"""What rows of each format mean, and how those that cannot be read are named."""

import json

import pytest

from support.transcribed import CALL, GET, TALK
from turnwise.interop.transcripts.cell import ReadingNotes
from turnwise.interop.transcripts.formats import FORMATS, read_row, write_row
from turnwise.messages import Message, ToolCall

ASK = {"role": "user", "content": "where?"}
SAY = {"role": "assistant", "content": "cedar"}
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "get", "arguments": '{"name": "amber"}'}},
    {"id": "b", "type": "function", "function": {"name": "get", "arguments": '{"name": "cedar"}'}},
]
CALLING = {"role": "assistant", "content": None, "tool_calls": CALLS}


def read(row, how="auto", **notes):
    (found,) = read_row(("talks.jsonl, row 3", row), how, ReadingNotes(**notes))
    return found


def chat(*messages, **more):
    return {"messages": list(messages), **more}


def result(content, id=None):
    return {"role": "tool", "content": content, **({"tool_call_id": id} if id else {})}


def refusal(row, how="auto"):
    with pytest.raises(ValueError) as raised:
        read_row(("talks.jsonl, row 3", row), how)
    assert "\n" not in str(raised.value)
    return str(raised.value).removeprefix("talks.jsonl, row 3: ")


# ---------------------------------------------------------------- OpenAI


def test_calls_with_null_content_and_results_by_id_in_any_order():
    made = read(chat(ASK, CALLING, result("elm", "b"), result("cedar", "a"), SAY, tools=[GET.schema]))
    assert made.messages[1] == Message("assistant", "", calls=(CALL, ToolCall("get", {"name": "cedar"})))
    assert [message.content for message in made.messages[2:]] == ["cedar", "elm", "cedar"]
    assert made.tools == (GET,)
    assert made.trained == (False, True, False, False, True)


def test_results_without_ids_are_in_order():
    made = read(chat(ASK, CALLING, result("one"), result("two"), SAY))
    assert [message.content for message in made.messages[2:4]] == ["one", "two"]


def test_a_conversation_may_end_with_calls():
    assert read(chat(ASK, CALLING)).trained == (False, True)


def test_parts_refusals_thinking_and_weights():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    made = read(
        chat(
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "weight": 0},
            ASK,
            {"role": "assistant", "content": None, "refusal": "I cannot", "weight": 1},
            ASK,
            {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        )
    )
    assert made.messages[0] == Message("system", "be brief")
    assert made.messages[1].content == "ab"
    assert made.messages[2].content == "no"
    assert made.messages[4].content == "I cannot"
    assert made.messages[6].thinking == "hm"
    assert made.trained == (False, False, False, False, True, False, True)


def test_fields_that_are_not_read_are_noted():
    notes = ReadingNotes()
    row = chat({**ASK, "name": "eve", "mood": "good"}, SAY, user="u-1", parallel_tool_calls=True)
    read_row(("x, row 1", row), "auto", notes)
    assert dict(notes.ignored) == {"user": 1, "messages[].name": 1, "messages[].mood": 1}


def test_nulls_of_parquet_are_not_arguments():
    call = {"id": "a", "function": {"name": "get", "arguments": {"name": "amber", "other": None}}}
    row = chat(ASK, {"role": "assistant", "content": None, "tool_calls": [call], "weight": None})
    assert read(row, columnar=True).messages[1].calls == (CALL,)
    assert read(row).messages[1].calls == (ToolCall("get", {"name": "amber", "other": None}),)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (chat(), "has no message of the assistant to train on"),
        (chat(ASK), "has no message of the assistant to train on"),
        (chat(SAY, ASK), "has no message of the assistant to train on"),
        (chat(ASK, {**SAY, "weight": 0}), "has no message of the assistant to train on"),
        ({"messages": "hello"}, "messages: is not JSON"),
        ({"messages": 3}, "messages: needs to be a list, got a number"),
        (chat(["user", "hi"]), "messages[0]: needs to be an object, got a list"),
        (chat({"content": "x"}), "messages[0]: has no role"),
        (chat(ASK, {"role": "robot", "content": "x"}), "messages[1].role: 'robot' is unknown; there are system, "),
        (
            chat(ASK, {**SAY, "content": None}),
            "messages[1]: has nothing to train: no text and no call; give it weight 0",
        ),
        (chat(ASK, {**SAY, "content": 3}), "messages[1].content: needs to be a list, got a number"),
        (chat(ASK, {**SAY, "weight": 0.5}), "messages[1].weight: needs to be 0 or 1"),
        (chat({**ASK, "weight": 1}, SAY), "messages[0].weight: only messages of the assistant are trained"),
        (
            chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, SAY),
            "messages[0].content[0]: a part of the type 'image_url' cannot be read: only text can",
        ),
        (chat(ASK, CALLING, SAY), "messages[1]: call 1 (get) has no result"),
        (chat(ASK, CALLING, result("x", "a"), SAY), "messages[1]: call 2 (get) has no result"),
        (chat(ASK, CALLING, result("x", "a"), result("y", "a"), SAY), "messages[3]: a call has two results"),
        (chat(ASK, CALLING, result("x", "z"), SAY), "messages[2]: tool_call_id names no call of the message before"),
        (chat(ASK, SAY, result("x", "a"), SAY), "messages[2]: tool_call_id names no call of the message before"),
        (
            chat(ASK, {**SAY, "tool_calls": [{"function": {"name": "get", "arguments": "{"}}]}),
            "messages[1].tool_calls[0].function.arguments: is not JSON",
        ),
        (
            chat(ASK, {**SAY, "tool_calls": [{"function": {"name": "get", "arguments": "[1]"}}]}),
            "messages[1].tool_calls[0].function.arguments: needs to be an object, got a list",
        ),
        (
            chat(ASK, {**SAY, "tool_calls": [{"type": "custom", "custom": {}}]}),
            "messages[1].tool_calls[0].type: only calls of functions can be read",
        ),
        (chat(ASK, {**SAY, "content": "\ud800"}), "messages[1].content: has half of a surrogate pair"),
        (chat(ASK, SAY, tools={"a": 1}), "tools: needs to be a list, got an object"),
        (chat(ASK, SAY, tools=[{"function": {"name": "no name"}}]), "tools[0].function: the name of a ToolSpec is"),
        (
            chat({**ASK, "tool_calls": CALLS}, SAY),
            "messages[0]: is the user's, and only the assistant thinks and calls",
        ),
    ],
)
def test_what_cannot_be_read_is_named(row, says):
    assert refusal(row).startswith(says)


# ---------------------------------------------------------------- the others


def test_trl_as_text_and_as_conversations():
    text = read({"prompt": "2 + 2 =", "completion": " 4"})
    assert text.messages == (Message("user", "2 + 2 ="), Message("assistant", " 4"))
    talk = read({"prompt": [ASK, SAY, ASK], "completion": [SAY]})
    assert talk.trained == (False, False, False, True)
    assert refusal({"prompt": "a", "chosen": "b", "rejected": "c"}).startswith("chosen and rejected are preferences")
    assert refusal({"text": "abc"}).startswith("text does not say which part")


def test_sharegpt_of_llama_factory_and_axolotl():
    value = json.dumps({"name": "get", "arguments": {"name": "amber"}})
    row = {
        "system": "be brief",
        "tools": json.dumps([{"name": "get", "description": GET.description, "parameters": dict(GET.parameters)}]),
        "conversations": [
            {"from": "human", "value": "where?"},
            {"from": "gpt", "value": "let me see"},
            {"from": "function_call", "value": value},
            {"from": "observation", "value": "cedar"},
            {"from": "gpt", "value": "cedar", "weight": 0},
        ],
    }
    made = read(row)
    assert made.messages[0] == Message("system", "be brief")
    assert made.messages[2] == Message("assistant", "let me see", calls=(CALL,))
    assert made.trained == (False, False, True, False, False)
    assert made.tools == (GET,)
    with_roles = read({"conversations": [ASK, SAY]})
    assert with_roles.messages[1].content == "cedar"
    assert refusal({"conversations": [{"from": "bob", "value": "x"}]}).startswith(
        "conversations[0].from: 'bob' is unknown"
    )
    assert (
        refusal({"conversations": [{"from": "function_call", "value": "x"}]}) == "conversations[0].value: is not JSON"
    )


def test_verl_rows_with_and_without_responses():
    row = {"data_source": "openai/gsm8k", "prompt": [ASK], "reward_model": {"style": "rule", "ground_truth": "4"}}
    assert "is a task" in refusal(row)
    made = read_row(("x, row 1", {**row, "responses": ["a", "b"]}))
    assert [one.messages[-1].content for one in made] == ["a", "b"]
    assert read({**row, "response": "c"}).messages == (Message("user", "where?"), Message("assistant", "c"))


def test_verifiers_results_with_calls_as_text_and_traces():
    calling = {"role": "assistant", "content": "", "tool_calls": [json.dumps(CALLS[0])]}
    row = {"example_id": 3, "prompt": [ASK], "completion": [calling, result("cedar", "a"), SAY], "reward": 0.5}
    made = read({**row, "metrics": {"turns": 2, "odd": None}, "info": {"oai_tools": [GET.schema]}})
    assert (made.reward, dict(made.marks), made.name, made.tools) == (0.5, {"turns": 2.0}, "3", (GET,))
    assert made.messages[1].calls == (CALL,)
    flat = {"id": "a", "type": "function", "name": "get", "arguments": '{"name": "amber"}'}
    nodes = [
        {"message": ASK},
        {"parent": 0, "sampled": True, "message": {"role": "assistant", "content": None, "tool_calls": [flat]}},
        {"parent": 1, "message": result("cedar", "a")},
        {"parent": 2, "sampled": True, "message": SAY},
        {"parent": 0, "sampled": True, "message": {**SAY, "content": "other"}},
    ]
    trace = {"id": "t", "task": {}, "nodes": nodes, "rewards": {"right": {"value": 1.0, "weight": 0.5}, "none": None}}
    long, short = read_row(("x, row 1", trace))
    assert long.trained == (False, True, False, True)
    assert short.messages[-1].content == "other"
    assert (long.reward, long.name) == (0.5, "t")
    nodes[1]["parent"] = 4
    assert refusal(trace) == "nodes[1].parent: needs to be the number of an earlier node"


def test_art_choices_logs_and_groups():
    choice = {"finish_reason": "stop", "index": 0, "logprobs": None, "message": SAY}
    made = read({"messages_and_choices": [ASK, SAY, ASK, choice], "reward": 1.0, "metrics": {"ok": True}})
    assert made.trained == (False, False, False, True)
    assert (made.reward, dict(made.marks)) == (1.0, {"ok": 1.0})
    calls = json.dumps(CALLS[:1])
    logged = chat(
        {**ASK, "trainable": False, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": calls, "trainable": True},
        reward=0.25,
        tools=json.dumps([GET.schema]),
        metrics=None,
        logs=None,
    )
    assert read(logged).messages[1].calls == (CALL,)
    assert read(logged).reward == 0.25
    more = {"messages_and_choices": [ASK, choice], "additional_histories": [{"messages_and_choices": [ASK, choice]}]}
    assert len(read_row(("x, row 1", {"trajectories": [more, more]}))) == 4


def test_atif_steps_observations_and_context():
    steps = [
        {"step_id": 1, "source": "user", "message": "where?"},
        {"step_id": 2, "source": "agent", "message": "copied", "is_copied_context": True},
        {"step_id": 3, "source": "agent", "message": "", "reasoning_content": "hm", "metrics": {"cost_usd": 1.0}},
        {"step_id": 4, "source": "agent", "message": [{"type": "text", "text": "ls"}]},
    ]
    steps[2]["tool_calls"] = [{"tool_call_id": "a", "function_name": "get", "arguments": {"name": "amber"}}]
    steps[2]["observation"] = {"results": [{"source_call_id": "a", "content": "cedar"}]}
    steps[3]["observation"] = {"results": [{"content": "no such file"}]}
    row = {"schema_version": "ATIF-v1.4", "session_id": "s", "agent": {"name": "x", "version": "1"}, "steps": steps}
    made = read({**row, "extra": {"reward": 1}})
    assert made.messages == (
        Message("user", "where?"),
        Message("assistant", "copied"),
        Message("assistant", "", thinking="hm", calls=(CALL,)),
        Message("tool", "cedar"),
        Message("assistant", "ls"),
        Message("user", "no such file"),
    )
    assert made.trained == (False, False, True, False, True, False)
    assert (made.reward, made.name) == (1.0, "s")
    steps[3]["observation"]["results"] = [{"subagent_trajectory_ref": [{"session_id": "x"}]}]
    assert refusal(row) == "steps[3].observation.results[0]: has no content; what a subagent did is not read"
    steps[3]["source"] = "robot"
    assert refusal(row).startswith("steps[3].source: 'robot' is unknown")


def test_a_format_that_is_named_is_the_one_that_is_read():
    assert refusal(chat(ASK, SAY), "sharegpt") == "has no conversation"
    assert refusal(write_row(TALK, "sharegpt"), "openai") == "has no messages"
    assert refusal({"questions": 3}).startswith("is no transcript: ")
    assert set(FORMATS) == {"openai", "trl", "sharegpt", "verl", "verifiers", "art", "atif"}
