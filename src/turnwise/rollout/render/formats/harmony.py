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
    commentary is content, or thinking if a call follows, because templates accept only one of them with a call."""
    thoughts: list[str] = []
    spoken: list[str] = []
    preamble: list[str] = []
    calls: list[ToolCall] = []
    for number, part in enumerate(text.split("<|start|>")):
        header, tag, body = part.partition("<|message|>")
        if not tag:
            raise Fault(f"a message has no body; {HELP}")
        if number and not header.startswith("assistant"):
            raise Fault(f"only the assistant speaks here; {HELP}")
        body = closed(body)
        channel = CHANNEL.search(header)
        recipient = RECIPIENT.search(CONTROL.sub(" ", header))
        if recipient:
            calls.append(read_call(recipient[1], body))
        elif channel is None or channel[1] not in ("analysis", "commentary", "final"):
            raise Fault(f"a message needs a channel: analysis, commentary or final; {HELP}")
        else:
            {"analysis": thoughts, "commentary": preamble, "final": spoken}[channel[1]].append(body)
    if not calls and not spoken and not preamble:
        raise Fault(f"there is nothing after the analysis; {HELP}")
    if calls:
        return Message("assistant", "", "\n".join([*thoughts, *preamble, *spoken]), tuple(calls))
    return Message("assistant", "\n".join([*preamble, *spoken]), "\n".join(thoughts))


def closed(body: str) -> str:
    """The body of a message without its closing token, which the last message does not have."""
    for token in ("<|end|>", "<|call|>", "<|return|>"):
        body = body.removesuffix(token)
    if CONTROL.search(body):
        raise Fault(f"a message has control tokens in its body; {HELP}")
    return body


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
