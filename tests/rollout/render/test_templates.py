"""Every chat template that trl ships, under every policy, in the conversations of docs/reference/templates.md: the
prompt is the template's rendering, or an exact extension whose text is, or a break with its cause. There is no third
outcome."""

from __future__ import annotations

import runpy
from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from support.paths import DOCS
from turnwise.messages import Message, ToolSpec
from turnwise.rollout.render.renderer import Renderer
from turnwise.types import Break, StopReason, Turn

PAGE = DOCS / "reference" / "templates.md"
MAKE = SimpleNamespace(**runpy.run_path(str(DOCS / "make_templates.py")))
TEMPLATES = MAKE.templates()
SOME = [pytest.param(name, marks=() if place % 3 == 0 else pytest.mark.slow) for place, name in enumerate(TEMPLATES)]
"""All of them, of which every third is quick."""


def check(renderer, asked, exchange):
    """One exchange, judged from whole renderings and whole texts."""
    turn, prompt = exchange.turn, exchange.prompt
    whole = renderer.template.render(exchange.messages, asked.offered)
    known = [*turn.prompt.tolist(), *turn.action.tolist()]
    extends = prompt.tokens[: len(known)].tolist() == known
    assert extends == (prompt.broke is Break.none)
    if asked.policy == "rerender" or not extends:
        assert prompt.tokens.tolist() == renderer.encode(whole).tolist()
    else:
        shown = renderer.decode(prompt.tokens)
        for foreign in ("<eos>", "<|return|>"):  # a sampled end token that is not what the template writes there stays
            shown = shown.replace(foreign, "") if foreign not in whole.text else shown
        assert shown == whole.text
    goes_on = exchange.messages[: len(exchange.shown) + 1] == (*exchange.shown, turn.said)
    before = renderer.template.render(exchange.shown, asked.offered).text
    grew = whole.text.startswith(before + renderer.decode(turn.action))
    if not extends:
        assert (prompt.broke is Break.history) == (not goes_on)
        assert (prompt.broke is Break.retokenised) == (goes_on and grew)
        assert asked.policy == "rerender" or not goes_on or not grew  # who keeps tokens breaks only where the text does


@pytest.mark.parametrize("name", SOME)
def test_a_prompt_is_exact_or_its_break_has_a_cause(name):
    tokenizer = MAKE.tokenizer_for(TEMPLATES[name], seed=0)
    found = [MAKE.had(renderer, asked, check) for renderer, asked in MAKE.conversations(tokenizer)]
    for one in found:
        assert one.refused or len(one.broke) == MAKE.TURNS - 1
        assert not one.refused or one.system or one.kind in ("results", "calls")
    assert f"\n{MAKE.row(name, found)}\n" in PAGE.read_text(), "run: python docs/make_templates.py"


TOOLS = (
    ToolSpec("get", "Where a name leads.", {"type": "object", "properties": {"name": {"type": "string"}}}),
    ToolSpec("sleep", "Waits <|im_end|> a while."),
)


@pytest.mark.parametrize("name", SOME)
def test_tools_are_described_and_change_nothing_else(name):
    """By the template, or in words of our own where it knows of no tools or of other calls."""
    tokenizer = MAKE.tokenizer_for(TEMPLATES[name], seed=0)
    had = Counter()
    for renderer, plain in MAKE.conversations(tokenizer):
        if plain.kind not in ("calls", "apart") or plain.policy == "managed" or plain.tools == "none":
            continue
        asked = replace(plain, offered=TOOLS)
        one = MAKE.had(renderer, asked, check)
        assert one.refused == MAKE.had(renderer, plain).refused
        if one.refused:
            continue
        had[one.policy] += 1
        assert one.broke == MAKE.had(renderer, plain).broke
        shown = renderer.decode(next(MAKE.play(renderer, asked)).turn.prompt)
        assert all(shown.count(word) == 1 for word in ("Where a name leads.", "Waits <|im_end|> a while."))
        assert "sleep" in shown
    if set(MAKE.renderers_for(tokenizer)) != {"none"}:  # a template of calls that no format reads
        assert had["extend"] >= 1
        assert had["rerender"] >= 1


PIECES = (
    "<think>", "</think>", "<tool_response>", "</tool_response>", "<tool_call>", "</tool_call>", "<|im_end|>",
    "<|channel>", "<channel|>", "/nothink", "CONTINUE_FINAL_MESSAGE_TAG ", "\n", "\n\n", " ", "x", "é", "{}",
)  # fmt: skip


def anything(random):
    return "".join(random.choices(PIECES, k=random.randrange(6)))


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma4_v5", "deepseekv3", "glm4moe_training", "lfm2_2_5"])
@pytest.mark.parametrize("tools", ["none", "hermes"])
def test_text_that_templates_look_for_changes_nothing(name, tools):
    """Conversations are compared by their skeletons, which must keep all that the template may decide by."""
    random = Random(name)
    renderer = Renderer(MAKE.tokenizer_for(TEMPLATES[name], seed=0), tools=tools)
    asked = MAKE.Conversation("extend", "hostile", False, tools)
    outcomes = Counter()
    for _ in range(25):
        messages: tuple[Message, ...] = (Message("user", f"go {anything(random)}"),)
        prompt = renderer.first(messages)
        for _ in range(5):
            said = random.choice(("a", "<think>\nt\n</think>\n\na", "<tool_call>\n{}\n</tool_call>", anything(random)))
            action = np.append(renderer.encode(said), renderer.end_token).astype(np.int32)[: random.choice((99, -1))]
            size = len(action)
            message = renderer.said(prompt.tokens, action)
            turn = Turn(prompt.tokens, action, [-1.0] * size, [0] * size, StopReason.length, 0.0, message)
            heard = Message(random.choice(("user", "tool")), anything(random))
            shown, messages = messages, (*messages, message, heard)
            prompt = renderer.next(turn, shown, messages)
            check(renderer, asked, MAKE.Exchange(turn, shown, messages, prompt))
            outcomes[prompt.broke] += 1
    assert set(outcomes) == {Break.none, Break.template}


def test_the_page_has_all_templates():
    page = PAGE.read_text()
    assert page.startswith(MAKE.head()), "run: python docs/make_templates.py"
    assert page.removeprefix(MAKE.head()).count("\n") == len(TEMPLATES)
    assert len(TEMPLATES) > 60
