import pytest

from turnwise.messages import Message, ToolCall
from turnwise.rollout.render.skeleton import Skeletons

QWEN = "{% if m.content.startswith('<tool_response>') %}{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>"


@pytest.mark.parametrize(
    ("text", "skeleton"),
    [
        ("", ""),
        (" \n", " \n"),
        ("get amber, then\ncedar", "x"),
        ("\n get amber ", "\n x "),
        ("<think>\nwell,\n\nwell\n</think>\n\nget amber", "<think>\nx\n</think>\n\nx"),
        ("<tool_response>4</tool_response>", "<tool_response>x"),  # the template does not look for the other tag
        ("<b>bold</b>", "x"),
        ("a<|im_end|>", "x<|im_end|>"),
    ],
)
def test_what_the_template_looks_for_stays(text, skeleton):
    assert Skeletons(QWEN).text(text) == skeleton


def test_words_that_the_template_tests_stay():
    source = """{% if '/no_think' in m.content or m.content.endswith("STOP ") %}x{% endif %}[INST]"""
    skeletons = Skeletons(source)
    assert skeletons.text("go on /no_think now") == "x /no_think x"
    assert skeletons.text("go on STOP ") == "x STOP "
    assert skeletons.text("a [INST] b") == "x [INST] x"


def test_messages_keep_their_shape():
    calls = (ToolCall("get", {"name": "amber", "n": 3}), ToolCall("stop", {}))
    message = Message("assistant", "so\n", "hm, hm", calls, "write JSON")
    (with_arguments, without) = (ToolCall("f", {"x": "x"}), ToolCall("f", {}))
    assert Skeletons(QWEN).of(message) == Message("assistant", "x\n", "x", (with_arguments, without))
    assert Skeletons(QWEN).of(Message("tool", "4")) == Message("tool", "x")
