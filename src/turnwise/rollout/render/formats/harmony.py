"""The harmony format of gpt-oss: messages in channels, each with a header and a body.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.get <|constrain|>json<|message|>{"name": "amber"}

The prompt ends with <|start|>assistant, and the token that ends the action is not part of its text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.toolcalls import Fault, Format, make_call, read_json

CONTROL = re.compile(r"<\|[a-z_]+\|>")
CLOSING = re.compile(r"<\|(?:end|call|return)\|>")
UNSTARTED = re.compile(r"(<\|(?:end|call|return)\|>[^<]{0,2000})(?=<\|channel\|>)")
"""A message that follows another one without <|start|>."""
RECIPIENT = re.compile(r"\bto=(\S+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTIONS = "functions."
TAGS = frozenset({"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"})
"""Control tokens within an action."""
HELP = (
    "write an analysis message and then either one message in the final channel, or a call: a message in the "
    "commentary channel to=functions.NAME whose body is one JSON object"
)


def read_harmony(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
    """The message of an action. Analysis is thinking, commentary to a function is a call, final is content. Other
    commentary is content, or thinking if a call follows, because templates accept only one of them with a call. A
    message that cannot be read beside calls that can is told as a fault; without calls the whole action is at fault."""
    said: dict[str, list[str]] = {"analysis": [], "commentary": [], "final": []}
    calls: list[ToolCall] = []
    faults: list[Fault] = []
    first, *parts = UNSTARTED.sub(r"\1<|start|>assistant", text).split("<|start|>")
    if not parts or CONTROL.search(first):
        parts = [f"assistant{first}", *parts]
    elif first.strip():
        said["commentary"].append(first.strip())
    for part in parts:
        try:
            channel, body, after = read_part(part)
            if channel.startswith("to="):
                calls.append(read_call(channel.removeprefix("to="), body))
            else:
                said[channel].append(body)
            said["commentary"] += [after] if after else []
        except Fault as fault:
            faults.append(fault)
            said["commentary"].append(without_control(part))
    if faults and not calls:
        raise faults[0]
    if not calls and not said["final"] and not said["commentary"]:
        raise Fault(f"there is nothing after the analysis; {HELP}")
    if calls:
        thinking = "\n".join([*said["analysis"], *said["commentary"], *said["final"]])
        return Message("assistant", "", thinking, tuple(calls), fault=str(faults[0]) if faults else "")
    return Message("assistant", "\n".join([*said["commentary"], *said["final"]]), "\n".join(said["analysis"]))


def read_part(part: str) -> tuple[str, str, str]:
    """(channel or "to=" and recipient, body, text after the closing token) of what follows <|start|>."""
    header, tag, rest = part.partition("<|message|>")
    if not tag:
        raise Fault(f"a message has no body; {HELP}")
    if not header.startswith("assistant"):
        raise Fault(f"only the assistant speaks here; {HELP}")
    closing = CLOSING.search(rest)
    body = rest[: closing.start()] if closing else rest
    after = CLOSING.sub("", rest[closing.start() :]).strip() if closing else ""
    if CONTROL.search(body) or CONTROL.search(after):
        raise Fault(f"a message has control tokens in its body; {HELP}")
    channel = CHANNEL.search(header)
    recipient = RECIPIENT.search(CONTROL.sub(" ", header))
    if channel is not None and recipient is not None:
        return f"to={recipient[1]}", body, after
    if channel is None or channel[1] not in ("analysis", "commentary", "final"):
        raise Fault(f"a message needs a channel: analysis, commentary or final; {HELP}")
    return channel[1], body, after


def read_call(recipient: str, body: str) -> ToolCall:
    if not recipient.startswith(FUNCTIONS):
        raise Fault(f"a call goes to=functions.NAME; {HELP}")
    try:
        value, end = read_json(body, 0)
        if end != len(body):
            raise Fault("nothing may follow the arguments of a call")
        if not isinstance(value, dict):
            raise Fault("the arguments of a call are one JSON object")
        return make_call(recipient.removeprefix(FUNCTIONS), value, "arguments")
    except Fault as fault:
        raise Fault(f"a tool call could not be read: {fault}; {HELP}") from None


def without_control(text: str) -> str:
    """The text of all channels without headers and control tokens, which gpt-oss's template refuses."""
    bodies = [part.partition("<|message|>")[2] or part for part in text.split("<|start|>")]
    return "\n".join(CONTROL.sub("", body) for body in bodies)


HARMONY = Format(read_harmony, clean=without_control, tags=TAGS, ends=frozenset({"<|call|>", "<|return|>"}))
