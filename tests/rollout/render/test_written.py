"""The tokens that a transcript trains are those that the template writes, in all templates that trl ships."""

import copy
import runpy
from contextlib import suppress
from types import SimpleNamespace

import pytest

from support.acting import byte_tokenizer
from support.paths import DOCS
from turnwise.interop.transcripts.transcript import Transcript
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.demonstrate import RecordedDemonstrations
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.render.written import written_action

MAKE = SimpleNamespace(**runpy.run_path(str(DOCS / "make_templates.py")))
TALK = (
    Message("user", "one?"),
    Message("assistant", "the first "),
    Message("user", "two?"),
    Message("assistant", "second"),
)
GET = ToolSpec("get", "Where a name leads.", {"type": "object", "properties": {"name": {"type": "string"}}})
CALLED = (
    Message("user", "where?"),
    Message("assistant", "", calls=(ToolCall("get", {"name": "amber"}),)),
    Message("tool", "cedar"),
    Message("assistant", "cedar"),
)


WITHOUT_CALLS = ("cohere", "gemma", "llava_next", "muse_glimmer")
"""Templates that refuse tool results."""


def turns(renderer, messages, tools=()):
    trained = tuple(message.role == "assistant" for message in messages)
    recorded = RecordedDemonstrations(renderer, [Transcript(messages, trained, tools)], "talks")
    return recorded.group(recorded.tasks[0]).trajectories[0].turns


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE.templates())
def test_a_turn_is_what_the_template_writes(name):
    tokenizer = MAKE.tokenizer_for(MAKE.templates()[name], 0)
    renderer = Renderer(tokenizer)
    for place, turn in zip((1, 3), turns(renderer, TALK), strict=True):
        whole = renderer.template.render(TALK[: place + 1], opening=False).text
        prompt = renderer.decode(renderer.first(TALK[:place]).tokens.tolist())
        text = renderer.decode(turn.action.tolist())
        if whole.startswith(prompt):  # otherwise the prompt opens thinking
            assert whole.startswith(prompt + text)
        assert TALK[place].content.strip() in text
        ends = sum(token in renderer.end_tokens for token in turn.action.tolist())
        assert ends == 1 or not renderer.template.ends()
        assert turn.stop == ("end_token" if ends else "length")


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE.templates())
def test_calls_are_read_as_the_calls_that_were_written(name):
    read = 0
    for renderer in MAKE.renderers_for(MAKE.tokenizer_for(MAKE.templates()[name], 0)).values():
        with suppress(ValueError):  # a template or a format that has no calls, or no results
            first, _ = turns(renderer, CALLED, (GET,))
            assert renderer.said(first.prompt, first.action).calls == CALLED[1].calls
            read += 1
    assert read or name.startswith(WITHOUT_CALLS)


OPENS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENS += "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
WITHOUT_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WITHOUT_END += "{% if add_generation_prompt %}assistant: {% endif %}"
TRIMS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
TRIMS += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def with_template(source):
    tokenizer = copy.deepcopy(byte_tokenizer())  # which other tests share
    tokenizer.chat_template = source
    return Renderer(tokenizer)


def test_an_end_token_is_trained_where_the_template_writes_one():
    plain = with_template(WITHOUT_END)
    assert plain.decode(written_action(plain, TALK[:2])) == "the first \n"
    trimmed = with_template(TRIMS)
    assert trimmed.decode(written_action(trimmed, TALK[:2])) == "the first<|im_end|>"


def test_thinking_that_the_prompt_opens_is_closed():
    renderer = with_template(OPENS)
    (turn,) = turns(renderer, TALK[:2])
    assert renderer.decode(turn.prompt).endswith("<think>\n")
    assert renderer.decode(turn.action) == "</think>\n\nthe first <|im_end|>"
