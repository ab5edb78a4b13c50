"""Writes docs/reference/templates.md: how the chat templates that trl ships fare under each policy for history.

python docs/make_templates.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.renderer import Prompt, Renderer
from turnwise.rollout.render.skeleton import TAG
from turnwise.rollout.render.template import FORMATS
from turnwise.rollout.render.toolcalls import join_thinking
from turnwise.types import Break, StopReason, Turn

POLICIES = ("extend", "rerender", "managed")
KINDS = ("plain", "thinking", "apart", "results", "calls", "eos")
TURNS = 5
HEAD = """# Chat templates

How the chat templates that [trl](https://github.com/huggingface/trl) {version} ships fare under each policy for history
(`rollout.history`). This page is made by `python docs/make_templates.py`, and the tests play the same conversations.

Each template gets a separate tokenizer, with the template's tags as tokens and a random vocabulary otherwise, and
conversations of five turns, with and without a system message (for `managed` and *eos* only without). A cell shows the
share of prompts after the first that began with exactly the tokens of the previous turn (prompt and action), and why
the others did not:

* *template*: the template writes the previous turn differently when messages follow. It drops thinking, trims white
  space, or opens a new answer differently from an old one.
* *retokenised*: the text only grew, but the action was sampled in other tokens than the tokenizer makes of that text.
  On this page about every second action is of this kind, which `rerender` cannot keep. A trained model mostly samples
  the tokens that its tokenizer would make.
* *history*: the environment did not show the whole conversation. Under `managed` it does so once on this page, with a
  window over the last exchange; otherwise it returns the whole conversation, which is extended.

Every prompt in every cell is exact. Either it is the previous turn plus the tokens that complete the template's
rendering of the conversation, or it is that rendering, and the break is recorded with its cause. A break costs tokens,
because the computation of the previous turn cannot be reused. `turnwise breaks RUN` lists what a run has lost. A dash
stands for conversations that the template refuses, or for calls in a format that is not parsed; the last column quotes
the refusal.

The kinds of conversation:

* *plain*: answers, one of them cut off at the token limit. The next prompt closes it with the template's tokens.
* *thinking*: answers after `<think>...</think>`, all of which is the message's content.
* *apart*: the same with `rollout.tools = "hermes"`, which separates thinking from the content and passes it to the
  template in its field for thinking.
* *results*: plain answers, to which tools reply with tool messages.
* *calls*: calls as the template writes them, with the `rollout.tools` of the second column, each answered by a result.
  One of them is sloppy JSON, which the template writes neatly.
* *eos*: answers that end with the tokenizer's eos token though the template closes them with another. The sampled token
  stays, and the template's follows as context that is never trained.

`rollout.tools` says how the model writes calls; [tools](tools.md) has every format and the rule for hard cases. The
second column is the format that "auto" finds. Environments get calls and thinking as structure. A template that takes
calls in another format, or none, gets them in the content, as the model writes them.
"""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of a template under a policy."""

    policy: str
    kind: str
    system: bool
    tools: str
    offered: tuple[ToolSpec, ...] = ()
    """What may be called."""
    broke: tuple[Break, ...] = ()
    """Of the prompts after the first."""
    refused: str = ""
    """The template's words, where it refuses."""


def templates() -> dict[str, str]:
    """The templates by name. trl is heavy and is not imported for that."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        raise ValueError('trl is not installed; run: pip install --constraint constraints.txt --editable ".[dev]"')
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def tokenizer_for(source: str, seed: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that knows the template's tags and merges random pieces of what is said below."""
    random = Random(seed)
    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: dict[tuple[str, str], None] = {}
    for word in " ".join(answer(turn) + heard_text(turn) for turn in range(TURNS)).split() * 3:
        spelled = "".join(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(word))
        start = random.randrange(len(spelled))
        piece = spelled[start]
        for letter in spelled[start + 1 : start + 1 + random.randrange(5)]:
            merges.setdefault((piece, letter))
            piece += letter
            vocabulary.setdefault(piece, len(vocabulary))
    core = Tokenizer(models.BPE(vocabulary, list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tags = sorted({*TAG.findall(source), "<think>", "</think>"})
    core.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in ("<bos>", "<eos>", *tags)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>", chat_template=source
    )


def renderers_for(tokenizer: Any) -> dict[str, Renderer]:
    """By the format of calls: none, hermes, and the one that the template writes; without those that it refuses."""
    made = {"none": Renderer(tokenizer)}
    for name in ("hermes", "auto"):
        with suppress(ValueError):
            renderer = Renderer(tokenizer, tools=name)
            made.setdefault(renderer.template.tools, renderer)
    return made


# ---------------------------------------------------------------- what is said


def answer(turn: int) -> str:
    return ("Looking for amber é.", "It leads to cedar,\nI think", "two  spaces", "So: jade & 本", "answer jade")[turn]


def heard_text(turn: int) -> str:
    return ("amber leads to cedar", "cedar:\n\n  jade", "<b>go</b> on", "wrong", "right")[turn]


def spoken(renderer: Renderer, kind: str, tools: str, turn: int, opened: str) -> str:
    """What the model writes in a turn, after a prompt that may have opened its thinking."""
    thought = f"maybe {turn}\nor not" if kind in ("thinking", "apart") else ""
    call = Message("assistant", "", calls=(ToolCall("get", {"name": answer(turn)}),))
    if tools == "harmony":
        analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        if kind == "calls":
            return f" to=functions.get<|channel|>commentary json<|message|>{call.calls[0].text}"
        return f"{analysis}<|channel|>final<|message|>{answer(turn)}"
    text = answer(turn)
    form = FORMATS[tools]
    if kind == "calls" and form is not None and form.write is None:
        return renderer.decode(renderer.without_end(renderer.action(call)).tolist())
    if kind == "calls" and form is not None and form.write is not None:
        text = form.write(call)
        text = text.replace(": ", ":") if turn == 2 else text
    if thought or opened:
        written = join_thinking(thought, text) if thought else f"<think>\n\n</think>\n\n{text}"
        return written.removeprefix(opened)
    return text


def sampled(renderer: Renderer, text: str, turn: int, kind: str, random: Random) -> tuple[np.ndarray, StopReason]:
    """Tokens of a text: the tokenizer's own in every second turn, else of pieces cut at random."""
    places = sorted(random.sample(range(len(text) + 1), len(text) // 2)) if turn % 2 else []
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    encoded = [renderer.tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
    tokens = np.array([token for piece in encoded for token in piece], np.int32)
    if kind == "plain" and turn == 2:
        return tokens, StopReason.length
    ends = {"calls": renderer.end_of_call, "eos": renderer.tokenizer.eos_token_id}
    return np.append(tokens, np.int32(ends.get(kind, renderer.end_token))), StopReason.end_token


# ---------------------------------------------------------------- conversations


@dataclass(frozen=True, slots=True)
class Exchange:
    """A turn, what it saw, what is to be seen next, and the next prompt."""

    turn: Turn
    shown: tuple[Message, ...]
    messages: tuple[Message, ...]
    prompt: Prompt


def play(renderer: Renderer, asked: Conversation) -> Iterator[Exchange]:
    """Every exchange of a conversation."""
    random = Random(asked.kind)
    start = (Message("system", "Follow the links."),) if asked.system else ()
    messages = (*start, Message("user", "start amber, links 2"))
    prompt = renderer.first(messages, asked.offered)
    for number in range(TURNS - 1):
        text = spoken(renderer, asked.kind, asked.tools, number, renderer.opened(prompt.tokens))
        action, stop = sampled(renderer, text, number, asked.kind, random)
        size = len(action)
        said = renderer.said(prompt.tokens, action, asked.offered)
        turn = Turn(prompt.tokens, action, [-1.0] * size, [0] * size, stop, 0.0, said, broke=prompt.broke)
        role = "tool" if asked.kind in ("results", "calls") else "user"
        heard = Message(role, heard_text(number))
        shown = messages
        messages = (*shown, said, heard)
        if asked.policy == "managed" and number == 2:
            messages = (*start, Message("user", "start amber, links 2"), said, heard)
        prompt = renderer.next(turn, shown, messages, asked.offered, asked.offered)
        yield Exchange(turn, shown, messages, prompt)


def conversations(tokenizer: Any) -> Iterator[tuple[Renderer, Conversation]]:
    """Every conversation to be had with a template, and who renders it."""
    renderers = renderers_for(tokenizer)
    own = next((name for name, made in renderers.items() if made.template.form.calls != "content"), "none")
    for policy, kind, system in product(POLICIES, KINDS, (False, True)):
        tools = own if own == "harmony" or kind == "calls" else "hermes" if kind == "apart" else "none"
        if (kind == "calls" and own == "none") or (system and (policy == "managed" or kind == "eos")):
            continue
        if tools not in renderers:
            continue
        renderer = copy(renderers[tools])  # they differ by nothing else, and to find out all the rest takes long
        renderer.history = policy
        yield renderer, Conversation(policy, kind, system, tools)


def had(
    renderer: Renderer, asked: Conversation, check: Callable[[Renderer, Conversation, Exchange], None] | None = None
) -> Conversation:
    """A conversation with what came of it; `check` looks at every exchange."""
    broke: list[Break] = []
    try:
        for exchange in play(renderer, asked):
            if check is not None:
                check(renderer, asked, exchange)
            broke.append(exchange.prompt.broke)
    except ValueError as error:
        return replace(asked, refused=str(error).partition("conversation: ")[2] or str(error))
    return replace(asked, broke=tuple(broke))


# ---------------------------------------------------------------- the page


def cell(found: list[Conversation]) -> str:
    """How many prompts extend, and why the others do not."""
    broke = [cause for one in found for cause in one.broke]
    if not broke:
        return "–"
    causes = Counter(str(cause) for cause in broke if cause is not Break.none)
    why = ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items()))
    share = f"{100 * broke.count(Break.none) / len(broke):.0f} %"
    return f"{share}: {why}" if why else share


def refusals(found: list[Conversation]) -> str:
    """What the template refuses, in its own words."""
    reasons: dict[str, None] = {}
    for one in found:
        if one.refused:
            reasons.setdefault(" ".join(one.refused.split())[:80].replace("|", "\\|").replace("<", "&lt;"))
    return "; ".join(reasons)


def row(name: str, found: list[Conversation]) -> str:
    """The line of a template, from its conversations."""
    own = next((one.tools for one in found if one.kind == "calls"), "none")
    cells = [cell([one for one in found if (one.policy, one.kind) == ("extend", kind)]) for kind in KINDS]
    cells += [cell([one for one in found if one.policy == policy]) for policy in POLICIES[1:]]
    return f"| {' | '.join([f'`{name}`', own, *cells, refusals(found)])} |"


def head() -> str:
    """The page down to the first template."""
    columns = ["template", "calls as", *(f"extend: {kind}" for kind in KINDS), *POLICIES[1:], "refuses"]
    text = HEAD.format(version=importlib.metadata.version("trl"))
    return f"{text}\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"


def page() -> str:
    lines = []
    for name, source in templates().items():
        found = [had(renderer, asked) for renderer, asked in conversations(tokenizer_for(source, seed=0))]
        lines.append(row(name, found))
    return head() + "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "reference" / "templates.md").write_text(page())
