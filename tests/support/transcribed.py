"""Transcripts for tests: drawn ones, and samples of what a format may lose."""

from hypothesis import strategies as st

from turnwise.interop.transcripts.transcript import Transcript
from turnwise.messages import Message, ToolCall, ToolSpec

GET = ToolSpec("get", "Where a name leads.", {"type": "object", "properties": {"name": {"type": "string"}}})
CALL = ToolCall("get", {"name": "amber"})

texts = st.text(st.characters(codec="utf-8"), max_size=12)
words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(ToolCall, words, st.dictionaries(texts, values, max_size=2))
tools = st.builds(
    ToolSpec,
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
    texts,
    st.just({"type": "object", "properties": {"name": {"type": ["string", "null"]}}}),
)


@st.composite
def exchanges(draw):
    """A message of the assistant, the results of its calls, and whether it is trained."""
    asked = tuple(draw(st.lists(calls, max_size=2)))
    content = draw(texts if asked else words)
    said = Message("assistant", content, draw(st.just("") | words), asked, draw(st.sampled_from(["", "write JSON"])))
    return [said, *(Message("tool", draw(texts)) for _ in asked)], draw(st.booleans())


@st.composite
def transcripts(draw):
    """Conversations that every format can hold, but for what it loses."""
    opening = [Message("user", draw(texts))]
    if draw(st.booleans()):
        opening.insert(0, Message("system", draw(words)))
    messages, trained = opening, [False] * len(opening)
    for messages_of, is_trained in draw(st.lists(exchanges(), min_size=1, max_size=3)):
        messages = [*messages, *messages_of, Message("user", draw(texts))]
        trained += [is_trained, *(False for _ in messages_of[1:]), False]
    if not any(trained):
        trained[len(opening)] = True
    return Transcript(
        tuple(messages),
        tuple(trained),
        tuple({tool.name: tool for tool in draw(st.lists(tools, max_size=2))}.values()),
        draw(st.none() | st.floats(-1e6, 1e6)),
        draw(st.dictionaries(words, st.floats(-1e6, 1e6), max_size=2)),
        draw(texts),
    )


def sample(**changes):
    messages = (Message("user", "where?"), Message("assistant", "cedar"))
    return Transcript(**{"messages": messages, "trained": (False, True), **changes})


ANSWERS = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d"))
SAMPLES = {
    "name": sample(name="train/3/0/1"),
    "reward": sample(reward=0.5),
    "marks": sample(marks={"lookups": 2.0}),
    "weights": Transcript(ANSWERS, (False, True, False, False)),
    "thinking": sample(messages=(Message("user", "where?"), Message("assistant", "cedar", thinking="hm"))),
    "faults": sample(messages=(Message("user", "where?"), Message("assistant", "cedar", fault="write JSON"))),
    "results": sample(
        messages=(Message("user", "a"), Message("assistant", "get amber"), Message("tool", "cedar")),
        trained=(False, True, False),
    ),
}
"""By the name of a loss: a transcript that a format with this loss does not give back."""
TALK = Transcript(
    messages=(
        Message("system", "be brief"),
        Message("user", "where?"),
        Message("assistant", "let me see", calls=(CALL, ToolCall("get", {"name": "cedar"}))),
        Message("tool", "cedar"),
        Message("tool", "elm"),
        Message("assistant", "elm"),
    ),
    trained=(False, False, True, False, False, True),
    tools=(GET,),
    reward=1.0,
)
"""A conversation with parallel calls."""
