import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acting import byte_tokenizer, renderer, user
from turnwise.learn.tiny import CHATML, build_tokenizer
from turnwise.rollout.render import Break, Renderer
from turnwise.types import Message, StopReason, Turn

LINE = "<|im_start|>{{ message.role }}\n{{ text }}<|im_end|>\n"
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

STRIPS = (
    "{% for message in messages %}{% set text = message.content %}"
    "{% if message.role == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    f"{LINE}{{% endfor %}}{GENERATION}"
)
"""Drops thinking from all but the last message; says nothing where there is none."""

QWEN3 = (
    "{% for message in messages %}{% set text = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if message.role == 'assistant' and loop.last %}"
    "{% set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in "
    "message.content else '' %}"
    "{% set text = '<think>\n' + thought + '\n</think>\n\n' + text %}{% endif %}"
    f"{LINE}{{% endfor %}}{GENERATION}"
)
"""Drops old thinking and writes an empty one into a last message without."""

COUNTS = (
    "{% for message in messages %}{% set text = message.content %}"
    "{{ loop.index }}/{{ messages | length }}" + f"{LINE}{{% endfor %}}{GENERATION}"
)
"""Writes into old turns how many messages there are."""

NO_END = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def turn(prompt, action, stop=StopReason.end_token):
    size = len(action)
    return Turn(prompt.tokens, action, [-0.5] * size, [0] * size, stop, 0.0, Message("assistant", ""))


def action_of(render, text, ended=True):
    return np.append(render.encode(text), render.end_token).astype(np.int32) if ended else render.encode(text)


def assert_extends(prompt, before):
    known = np.concatenate([before.prompt, before.action])
    assert prompt.tokens[: len(known)].tolist() == known.tolist()


WORDS = build_tokenizer(["get amber cedar jade leads to answer"] * 50)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
MESSAGE = st.builds(Message, st.sampled_from(["user", "tool", "system"]), TEXT)
HEARD = st.lists(MESSAGE, max_size=3).map(tuple)
TOKENIZERS = [byte_tokenizer(), WORDS]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([0, 1]), MESSAGE, HEARD, st.lists(st.tuples(TEXT, HEARD), min_size=1, max_size=4))
def test_an_extension_is_exact_and_what_the_template_renders(which, start, more, exchanges):
    render = Renderer(TOKENIZERS[which])
    messages = (start, *more)
    prompt = render.first(messages)
    for said, heard in exchanges:
        before = turn(prompt, action_of(render, said))
        messages = (*messages, Message("assistant", said), *heard)
        prompt = render.next(before, messages, heard, replaced=False)
        assert prompt.broke is Break.none
        assert_extends(prompt, before)
        if not said.endswith("<|im_end|>"):
            assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()


def test_an_action_keeps_its_tokens_where_text_would_be_tokenised_anew():
    """Field bug: a trained token that the engine never sampled."""
    render = Renderer(WORDS)
    letters = np.concatenate([render.encode(letter) for letter in "get amber"])
    assert len(render.encode("get amber")) < len(letters)
    before = turn(render.first(user("go")), np.append(letters, render.end_token))
    messages = (*user("go"), Message("assistant", "get amber"), *user("leads to jade"))
    extended = render.next(before, messages, user("leads to jade"), replaced=False)
    assert extended.broke is Break.none
    assert_extends(extended, before)
    assert render.decode(extended.tokens) == render.decode(render.first(messages).tokens)
    anew = Renderer(WORDS, "rerender").next(before, messages, user("leads to jade"), replaced=False)
    assert anew.broke is Break.rerender
    assert anew.tokens.tolist() == render.first(messages).tokens.tolist()


def test_a_rerender_that_only_grew_is_no_break():
    render = renderer("rerender")
    before = turn(render.first(user("go")), action_of(render, "hi"))
    messages = (*user("go"), Message("assistant", "hi"), *user("on"))
    prompt = render.next(before, messages, user("on"), replaced=False)
    assert prompt.broke is Break.none
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()


@pytest.mark.parametrize("said", ["", "cut sho", "two\nlines"])
def test_an_action_without_an_end_token_is_closed_by_the_next_prompt(said):
    render = renderer()
    before = turn(render.first(user("go")), action_of(render, said, ended=False), StopReason.length)
    messages = (*user("go"), Message("assistant", said), *user("on"))
    prompt = render.next(before, messages, user("on"), replaced=False)
    assert prompt.broke is Break.none
    assert_extends(prompt, before)
    rest = prompt.tokens[len(before.prompt) + len(before.action) :]
    assert render.decode(rest) == "<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()


def test_a_sampled_end_token_is_not_doubled():
    render = renderer()
    before = turn(render.first(user("go")), action_of(render, "hi"))
    messages = (*user("go"), Message("assistant", "hi"), *user("on"))
    prompt = render.next(before, messages, user("on"), replaced=False)
    rest = prompt.tokens[len(before.prompt) + len(before.action) :]
    assert render.decode(rest) == "\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"


def test_an_end_token_in_the_middle_of_an_action_does_not_close_it():
    render = renderer()
    action = np.concatenate([action_of(render, "hi"), render.encode("more")])
    before = turn(render.first(user("go")), action, StopReason.length)
    prompt = render.next(before, (), user("on"), replaced=False)
    assert render.decode(prompt.tokens).endswith(
        "hi<|im_end|>more<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    )


def test_nothing_new_still_opens_a_turn():
    render = renderer()
    before = turn(render.first(user("go")), action_of(render, "hi"))
    prompt = render.next(before, (*user("go"), Message("assistant", "hi")), (), replaced=False)
    assert render.decode(prompt.tokens).endswith("hi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        pytest.param(STRIPS, "<think>\nhm\n</think>\n\nhi"),
        (QWEN3, "<think>\nhm\n</think>\n\nhi"),
        (COUNTS, "hi"),
        (NO_END, "hi"),
    ],
)
def test_a_template_that_changes_old_turns_is_obeyed_and_named(template, said):
    render = renderer(template=template)
    before = turn(render.first(user("go")), action_of(render, said))
    messages = (*user("go"), Message("assistant", said), *user("on"))
    prompt = render.next(before, messages, user("on"), replaced=False)
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()
    assert prompt.broke is Break.template


@pytest.mark.parametrize("template", [STRIPS, QWEN3, COUNTS, NO_END])
def test_rerender_obeys_every_template(template):
    render = renderer("rerender", template)
    said = "<think>\nhm\n</think>\n\nhi"
    before = turn(render.first(user("go")), action_of(render, said))
    messages = (*user("go"), Message("assistant", said), *user("on"))
    prompt = render.next(before, messages, user("on"), replaced=False)
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()
    assert prompt.broke is Break.rerender


@pytest.mark.parametrize("template", [STRIPS, CHATML])
def test_without_thinking_a_stripping_template_extends(template):
    render = renderer(template=template)
    before = turn(render.first(user("go")), action_of(render, "hi"))
    messages = (*user("go"), Message("assistant", "hi"), *user("on"))
    prompt = render.next(before, messages, user("on"), replaced=False)
    assert prompt.broke is Break.none
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()
    assert_extends(prompt, before)


def test_a_generation_prompt_that_old_turns_lack_is_a_break():
    """DeepSeek's and QwQ's begin the thinking in the generation prompt and drop it later."""
    render = renderer(template=STRIPS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    before = turn(render.first(user("go")), action_of(render, "hm\n</think>\n\nhi"))
    messages = (*user("go"), Message("assistant", "hm\n</think>\n\nhi"), *user("on"))
    prompt = render.next(before, messages, user("on"), replaced=False)
    assert prompt.broke is Break.template
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()


AFTER_QUESTION = (
    "{% set last = namespace(user=-1) %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set text = message.content %}"
    "{% if loop.index0 < last.user %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    f"{LINE}{{% endfor %}}{GENERATION}"
)
"""Keeps thinking until the next message of the user, as Qwen3's does: results of tools do not end it."""


def test_thinking_may_stay_while_tools_answer_and_go_with_the_next_question():
    render = renderer(template=AFTER_QUESTION)
    messages, prompt = user("go"), render.first(user("go"))
    exchanges = [
        ("<think>\nhm\n</think>\n\nlook", (Message("tool", "4"),), Break.none),
        ("no thinking here", (Message("tool", "5"),), Break.none),
        ("it is 5", user("and now?"), Break.template),  # the first thought goes, two turns late
        ("again", user("and then?"), Break.none),
    ]
    for said, heard, broke in exchanges:
        before = turn(prompt, action_of(render, said))
        messages = (*messages, Message("assistant", said), *heard)
        prompt = render.next(before, messages, heard, replaced=False)
        assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()
        assert prompt.broke is broke


@pytest.mark.parametrize("history", ["extend", "rerender"])
def test_a_history_chosen_by_the_environment_is_shown(history):
    render = renderer(history)
    before = turn(render.first(user("go")), action_of(render, "hi"))
    window = (*user("go"), *user("last"))
    prompt = render.next(before, window, user("last"), replaced=True)
    assert prompt.broke is Break.history
    assert prompt.tokens.tolist() == render.first(window).tokens.tolist()


def test_a_chosen_history_that_is_the_whole_one_is_no_break():
    render = renderer()
    before = turn(render.first(user("go")), action_of(render, "hi"))
    messages = (*user("go"), Message("assistant", "hi"), *user("on"))
    assert render.next(before, messages, user("on"), replaced=True).broke is Break.none


def test_what_was_said_is_the_action_without_its_end_token():
    render = renderer()
    end = render.end_token
    assert render.said(action_of(render, "hé\n")) == Message("assistant", "hé\n")
    assert render.said(render.encode("cut")) == Message("assistant", "cut")
    assert render.said(np.zeros(0, np.int32)) == Message("assistant", "")
    assert render.said(np.array([end, end], np.int32)).content == "<|im_end|>"
    assert render.said(action_of(render, "<|im_start|>x")).content == "<|im_start|>x"


def test_tokens_are_int32_and_any_text_round_trips():
    render = renderer()
    for text in ("", "héllo 本日🙂", "a  b\n\n\tc", "<|im_end|><|endoftext|>"):
        tokens = render.encode(text)
        assert tokens.dtype == np.int32
        assert tokens.ndim == 1
        assert render.decode(tokens) == text


@pytest.mark.parametrize(("lacks", "says"), [("chat_template", "chat template"), ("eos_token", "eos token")])
def test_a_tokenizer_that_lacks_something_is_refused_in_one_line(lacks, says):
    tokenizer = copy.deepcopy(byte_tokenizer())
    setattr(tokenizer, lacks, None)
    with pytest.raises(ValueError, match=f"has no {says}; set") as raised:
        Renderer(tokenizer)
    assert "\n" not in str(raised.value)


REFUSES = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% endfor %}" + CHATML
)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_template_that_raises_is_a_mistake_with_its_words(replaced):
    render = renderer(template=REFUSES)
    tool = (Message("tool", "4"),)
    with pytest.raises(ValueError, match="refuses this conversation: no tools here"):
        render.first(tool)
    before = turn(render.first(user("go")), action_of(render, "hi"))
    with pytest.raises(ValueError, match="no tools here"):
        render.next(before, (*user("go"), *tool), tool, replaced=replaced)
    assert render.next(before, user("go"), user("on"), replaced=False).broke is Break.none


def test_an_empty_conversation_is_a_mistake():
    with pytest.raises(ValueError, match="refuses this conversation"):
        renderer().first(())
