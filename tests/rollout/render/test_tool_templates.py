"""Real chat templates with rollout.tools = "auto": the rows of docs/reference/tools.md, and pairs that cannot work."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest

from support.paths import DOCS
from turnwise.messages import Message, ToolCall
from turnwise.rollout.render.renderer import Renderer

MAKE = SimpleNamespace(**runpy.run_path(str(DOCS / "make_tools.py")))
PAGE = DOCS / "reference" / "tools.md"
TEMPLATES = MAKE.TEMPLATES.templates()
ROWS = [name for name in TEMPLATES if not name.endswith("_training")]
FORMATS = {
    "qwen3": "hermes",
    "qwen3_5_think": "qwen_xml",
    "nemotron_3_nano": "qwen_xml",
    "glm4moe": "glm",
    "gemma4": "gemma",
    "gemma3": "hermes",
    "lfm2_2_5": "lfm2",
    "deepseekv3": "deepseek",
    "llama3_1": "llama",
    "gptoss": "harmony",
}


def renderer(name: str, tools: str) -> Renderer:
    return Renderer(MAKE.TEMPLATES.tokenizer_for(TEMPLATES[name], seed=0), tools=tools)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FORMATS else pytest.mark.slow) for name in ROWS]
)
def test_the_page_says_how_a_template_fares(name):
    fare = MAKE.fare_of(TEMPLATES[name])
    assert fare.row(name, "trl") in PAGE.read_text(), "run: python docs/make_tools.py"
    if name in FORMATS:
        assert fare.tools == FORMATS[name]
    assert fare.refused or (fare.result != "missing" and fare.cut == "fault")


def test_the_page_has_no_attempt_that_fails():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `") and line.count("|") == 10]
    works = [row for row in rows if "refused at the start" not in row]
    assert len(works) >= 60
    assert not [row for row in works if "missing" in row]
    assert {row.split("|")[3].strip() for row in works} >= {
        "mistral",
        "kimi_k2",
        "kimi_k3",
        "minimax",
        "dsml",
        "granite",
    }


@pytest.mark.parametrize(("name", "tools", "hint"), [("gptoss", "hermes", "harmony"), ("qwen3", "mistral", "hermes")])
def test_a_pair_that_cannot_work_is_refused_at_the_start(name, tools, hint):
    with pytest.raises(ValueError, match=f'as rollout.tools = "{tools}"; set it to "{hint}"') as refused:
        renderer(name, tools)
    assert "\n" not in str(refused.value)


def test_calls_in_no_known_format_are_refused_at_the_start():
    with pytest.raises(ValueError, match="writes tool calls in no known format") as refused:
        renderer("muse_glimmer", "auto")
    assert "\n" not in str(refused.value)


def test_results_are_questions_where_the_template_knows_none():
    render = renderer("gemma3", "hermes")
    call = Message("assistant", "", calls=(ToolCall("get", {"name": "amber"}),))
    heard = (Message("tool", "cedar"), Message("tool", "jade"), Message("user", "go on"))
    text = render.decode(render.first((*MAKE.QUESTION, call, *heard), MAKE.TOOLS).tokens)
    assert "<tool_response>\ncedar\n</tool_response>\n<tool_response>\njade\n</tool_response>\ngo on" in text


def test_values_get_the_types_of_the_tools_that_a_turn_was_offered():
    render = renderer("qwen3_5_think", "auto")
    call = ToolCall("get", {"count": 3, "name": "3"})
    prompt, action = (
        render.first(MAKE.QUESTION, MAKE.TOOLS).tokens,
        render.action(Message("assistant", "", calls=(call,))),
    )
    assert render.said(prompt, action, MAKE.TOOLS).calls == (call,)
    assert render.said(prompt, action).calls == (ToolCall("get", {"count": "3", "name": "3"}),)
