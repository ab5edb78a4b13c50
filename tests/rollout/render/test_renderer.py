import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.acting import Puppet, attempted, byte_tokenizer, renderer, run, user
from support.running import micro_recipe
from turnwise.assemble.engines import engine_of
from turnwise.assemble.model import renderer_of
from turnwise.envs.base import Reply
from turnwise.learn.tiny import CHATML, build_model, build_tokenizer
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.render.template import FORMATS
from turnwise.types import Break, Status, StopReason, Turn

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

TRIMS = "{% for message in messages %}{% set text = message.content | trim %}" + f"{LINE}{{% endfor %}}{GENERATION}"
"""Cuts white space off what was said."""

NO_END = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def turn(render, prompt, action, stop=StopReason.end_token):
    size = len(action)
    said = render.said(prompt.tokens, action)
    return Turn(prompt.tokens, action, [-0.5] * size, [0] * size, stop, 0.0, said)


def after(render, said, heard):
    """(the turn in which something was said, the whole conversation after it, its prompt)."""
    action = said if isinstance(said, np.ndarray) else action_of(render, said)
    before = turn(render, render.first(user("go")), action)
    messages = (*user("go"), before.said, *heard)
    return before, messages, render.next(before, user("go"), messages)


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
        before = turn(render, prompt, action_of(render, said))
        shown, messages = messages, (*messages, before.said, *heard)
        prompt = render.next(before, shown, messages)
        assert prompt.broke is Break.none
        assert_extends(prompt, before)
        if not said.endswith("<|im_end|>"):
            assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()


def test_an_action_keeps_its_tokens_where_text_would_be_tokenised_anew():
    """Field bug: a trained token that the engine never sampled."""
    render = Renderer(WORDS)
    letters = np.concatenate([render.encode(letter) for letter in "get amber"])
    assert len(render.encode("get amber")) < len(letters)
    before, messages, extended = after(render, np.append(letters, render.end_token), user("leads to jade"))
    assert extended.broke is Break.none
    assert_extends(extended, before)
    assert render.decode(extended.tokens) == render.decode(render.first(messages).tokens)
    anew = Renderer(WORDS, "rerender").next(before, user("go"), messages)
    assert anew.broke is Break.retokenised
    assert anew.tokens.tolist() == render.first(messages).tokens.tolist()


def test_bytes_that_are_no_text_stay_as_they_were_sampled():
    render = renderer()
    half = render.encode("é")[:1]
    action = np.concatenate([half, action_of(render, "!")])
    before, messages, prompt = after(render, action, user("on"))
    assert before.said.content == "\ufffd!"
    assert prompt.broke is Break.none
    assert_extends(prompt, before)
    anew = renderer("rerender").next(before, user("go"), messages)
    assert anew.broke is Break.retokenised


def test_a_rerender_that_only_grew_is_no_break():
    render = renderer("rerender")
    _, messages, prompt = after(render, "hi", user("on"))
    assert prompt.broke is Break.none
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()


@pytest.mark.parametrize("said", ["", "cut sho", "two\nlines"])
def test_an_action_without_an_end_token_is_closed_by_the_next_prompt(said):
    render = renderer()
    before, messages, prompt = after(render, action_of(render, said, ended=False), user("on"))
    assert prompt.broke is Break.none
    assert_extends(prompt, before)
    rest = prompt.tokens[len(before.prompt) + len(before.action) :]
    assert render.decode(rest) == "<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()


def test_a_sampled_end_token_is_not_doubled():
    render = renderer()
    before, _, prompt = after(render, "hi", user("on"))
    rest = prompt.tokens[len(before.prompt) + len(before.action) :]
    assert render.decode(rest) == "\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"


def test_an_end_token_in_the_middle_of_an_action_does_not_close_it():
    render = renderer()
    action = np.concatenate([action_of(render, "hi"), render.encode("more")])
    _, _, prompt = after(render, action, user("on"))
    assert render.decode(prompt.tokens).endswith(
        "hi<|im_end|>more<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    )


def test_nothing_new_still_opens_a_turn():
    render = renderer()
    _, _, prompt = after(render, "hi", ())
    assert render.decode(prompt.tokens).endswith("hi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("history", ["extend", "rerender", "managed"])
@pytest.mark.parametrize(
    ("template", "said"),
    [
        (STRIPS, "<think>\nhm\n</think>\n\nhi"),
        (QWEN3, "<think>\nhm\n</think>\n\nhi"),
        (COUNTS, "hi"),
        (NO_END, "hi"),
        (TRIMS, "hi "),
    ],
)
def test_a_template_that_changes_old_turns_is_obeyed_and_named(template, said, history):
    render = renderer(history, template)
    _, messages, prompt = after(render, said, user("on"))
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()
    assert prompt.broke is Break.template


@pytest.mark.parametrize(("template", "said"), [(STRIPS, "hi"), (CHATML, "hi"), (TRIMS, "hi"), (CHATML, " hi\n")])
def test_a_template_that_keeps_the_action_extends_it(template, said):
    render = renderer(template=template)
    before, messages, prompt = after(render, said, user("on"))
    assert prompt.broke is Break.none
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()
    assert_extends(prompt, before)


def test_a_generation_prompt_that_old_turns_lack_is_a_break():
    """DeepSeek's and QwQ's begin the thinking in the generation prompt and drop it later."""
    render = renderer(template=STRIPS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    _, messages, prompt = after(render, "hm\n</think>\n\nhi", user("on"))
    assert prompt.broke is Break.template
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()


def test_thinking_that_the_prompt_opened_is_shown_whole():
    """The first tag of the thinking is in the prompt and not in the action, and old turns must have both."""
    render = renderer(template=CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    before, messages, prompt = after(render, "hm\n</think>\n\nhi", user("on"))
    assert before.said.content == "hm\n</think>\n\nhi"
    assert prompt.broke is Break.none
    assert "assistant\n<think>\nhm\n</think>\n\nhi<|im_end|>" in render.decode(prompt.tokens)
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
        before = turn(render, prompt, action_of(render, said))
        shown, messages = messages, (*messages, before.said, *heard)
        prompt = render.next(before, shown, messages)
        assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()
        assert prompt.broke is broke


# ---------------------------------------------------------------- histories that the environment chooses


@pytest.mark.parametrize("history", ["extend", "rerender", "managed"])
def test_a_history_chosen_by_the_environment_is_shown(history):
    render = renderer(history)
    before, _, _ = after(render, "hi", ())
    window = (*user("go"), *user("last"))
    prompt = render.next(before, user("go"), window)
    assert prompt.broke is Break.history
    assert prompt.tokens.tolist() == render.first(window).tokens.tolist()


@pytest.mark.parametrize("history", ["extend", "managed"])
def test_a_chosen_history_that_goes_on_from_the_whole_one_is_an_extension(history):
    render = Renderer(WORDS, history)
    letters = np.concatenate([render.encode(letter) for letter in "get amber"])
    before = turn(render, render.first(user("go")), np.append(letters, render.end_token))
    equal_but_not_the_same = (Message("user", "go"), Message("assistant", "get amber"), Message("user", "on"))
    prompt = render.next(before, user("go"), equal_but_not_the_same)
    assert prompt.broke is Break.none
    assert_extends(prompt, before)


def test_a_history_with_the_action_in_other_words_is_an_edit():
    render = renderer()
    before, _, _ = after(render, "hi", ())
    edited = (*user("go"), Message("assistant", "hello"), *user("on"))
    prompt = render.next(before, user("go"), edited)
    assert prompt.broke is Break.history
    assert prompt.tokens.tolist() == render.first(edited).tokens.tolist()


def test_a_managed_history_is_the_environments_to_hand_over(caplog):
    render = renderer("managed")
    window = (*user("go"), *user("last"))
    hands_over = Puppet(Reply(history=window), Reply(history=window), Reply(finished=True))
    made = run(attempted(hands_over, render=render))
    assert made.status is Status.finished
    assert [turn.broke for turn in made.turns] == [Break.none, Break.history, Break.history]
    assert all(turn.prompt.tolist() == render.first(window).tokens.tolist() for turn in made.turns[1:])
    with caplog.at_level("WARNING", "turnwise"):
        made = run(attempted(Puppet(Reply(history=window), Reply(user("on"))), render=render))
    assert made.status is Status.failed
    assert len(made.turns) == 2
    (line,) = (record.getMessage() for record in caplog.records)
    assert 'return Reply(history=...), or set rollout.history = "extend"' in line
    assert "\n" not in line


def test_a_managed_environment_that_only_appends_is_extended():
    class Appends(Puppet):
        async def open(self, task):
            self.all = user("go")
            return Reply(self.all)

        async def step(self, message):
            self.all = (*self.all, message, *user("on"))
            return Reply(history=self.all, finished=len(self.all) > 6)

    made = run(attempted(Appends(), render=renderer("managed")))
    assert len(made.turns) == 3
    assert {turn.broke for turn in made.turns} == {Break.none}


# ---------------------------------------------------------------- end tokens

HEADERS = (
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Llama 3's: closes with a token that is not its tokenizer's eos."""

NEXT_ROLE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""GLM's: a message ends where the next begins."""

RETURNS = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)
"""gpt-oss's: what ends a turn is not what closes it later."""


def with_tokens(template, *added, **settings):
    """A renderer whose tokenizer knows more tokens."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": [*added]} if added else {})
    tokenizer.chat_template = template
    return Renderer(tokenizer, **settings)


def names(render, tokens):
    return render.tokenizer.convert_ids_to_tokens(list(tokens))


def test_the_template_says_what_ends_an_action():
    tags = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
    render = with_tokens(HEADERS, *tags)
    assert names(render, render.end_tokens) == ["<|eot_id|>", "<|im_end|>"]
    assert names(render, [render.end_token]) == ["<|eot_id|>"]
    more = render.tokenizer.convert_tokens_to_ids(["<|eom_id|>", "<|eot_id|>"])
    render = with_tokens(HEADERS, *tags, end_tokens=more)
    assert names(render, render.end_tokens) == ["<|eot_id|>", "<|im_end|>", "<|eom_id|>"]
    for end in render.end_tokens:
        action = np.append(render.encode("hi"), end).astype(np.int32)
        assert render.said(np.zeros(0, np.int32), action).content == "hi"


@pytest.mark.parametrize("named", [None, 0, [0, 2]])
def test_the_engine_ends_at_whatever_the_model_names(tmp_path, named):
    tokenizer = byte_tokenizer()
    model = build_model(tokenizer, hidden=32, layers=1, context=64, seed=0)
    model.generation_config.eos_token_id = named
    recipe = micro_recipe(tmp_path)
    render = renderer_of(recipe, model, tokenizer)
    expected = {tokenizer.eos_token_id, *([named] if isinstance(named, int) else named or [])}
    assert set(render.end_tokens) == expected
    assert render.end_token == tokenizer.eos_token_id
    engine: Any = engine_of(recipe, model, render, 0)
    assert set(engine.model.end_tokens.tolist()) == expected


def test_an_end_token_of_another_kind_stays_and_the_templates_own_follows():
    """What was sampled is never exchanged for what was not."""
    render = with_tokens(HEADERS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    action = np.append(render.encode("hi"), render.tokenizer.eos_token_id).astype(np.int32)
    before, messages, prompt = after(render, action, user("on"))
    assert prompt.broke is Break.none
    assert_extends(prompt, before)
    text = render.decode(prompt.tokens)
    assert "hi<|im_end|><|eot_id|><|start_header_id|>user" in text
    assert text.replace("<|im_end|>", "") == render.template.render(messages).text
    again = turn(render, prompt, action_of(render, "ho"))
    assert_extends(render.next(again, messages, (*messages, again.said, *user("x"))), again)
    render.history = "rerender"
    anew = render.next(before, user("go"), messages)
    assert anew.broke is Break.template
    assert anew.tokens.tolist() == render.first(messages).tokens.tolist()


def test_a_turn_may_end_with_the_token_that_opens_the_next():
    render = with_tokens(NEXT_ROLE, "<|user|>", "<|assistant|>", "<|tool|>", end_tokens=[])
    assert names(render, render.end_tokens) == ["<|im_end|>"]
    opens = render.tokenizer.convert_tokens_to_ids("<|user|>")
    render = Renderer(render.tokenizer, end_tokens=[opens])
    before, messages, prompt = after(render, np.append(render.encode("hi"), opens).astype(np.int32), user("on"))
    assert prompt.broke is Break.none
    assert_extends(prompt, before)
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()
    # It was to be a tool that answers: the sampled token cannot stay, and the template has none to close with.
    _, messages, prompt = after(render, np.append(render.encode("hi"), opens).astype(np.int32), (Message("tool", "4"),))
    assert prompt.broke is Break.template
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()


def test_what_ends_a_turn_may_differ_from_what_closes_it_later():
    render = with_tokens(RETURNS, "<|start|>", "<|message|>", "<|end|>", "<|return|>")
    assert names(render, render.end_tokens) == ["<|return|>", "<|im_end|>"]  # <|end|> may come within an action
    before, _, prompt = after(render, "hi", user("on"))
    assert_extends(prompt, before)
    assert "hi<|return|><|end|><|start|>user" in render.decode(prompt.tokens)
    _, messages, prompt = after(render, action_of(render, "hi", ended=False), user("on"))
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()


def test_a_template_without_end_tokens_extends_what_was_cut_off():
    render = renderer(template=NO_END)
    assert names(render, render.end_tokens) == ["<|im_end|>"]
    before, messages, prompt = after(render, action_of(render, "hi", ended=False), user("on"))
    assert prompt.broke is Break.template  # it writes a space before an old answer that its opening lacks
    before, messages, prompt = after(render, action_of(render, " hi", ended=False), user("on"))
    assert prompt.broke is Break.template
    render = renderer(template=NO_END.replace(": {{", ":{{"))
    before, messages, prompt = after(render, action_of(render, "hi", ended=False), user("on"))
    assert prompt.broke is Break.none
    assert_extends(prompt, before)
    assert render.decode(prompt.tokens) == render.template.render(messages).text


def test_the_message_is_the_action_without_its_end_token():
    render = renderer()
    end, nothing = render.end_token, np.zeros(0, np.int32)
    assert render.said(nothing, action_of(render, "hé\n")) == Message("assistant", "hé\n")
    assert render.said(nothing, render.encode("cut")) == Message("assistant", "cut")
    assert render.said(nothing, nothing) == Message("assistant", "")
    assert render.said(nothing, np.array([end, end], np.int32)).content == "<|im_end|>"
    assert render.said(nothing, action_of(render, "<|im_start|>x")).content == "<|im_start|>x"


def test_tokens_are_int32_and_any_text_round_trips():
    render = renderer()
    for text in ("", "héllo 本日🙂", "a  b\n\n\tc", "<|im_end|><|endoftext|>", "it 's , so . no n't"):
        tokens = render.encode(text)
        assert tokens.dtype == np.int32
        assert tokens.ndim == 1
        assert render.decode(tokens) == text


def test_nothing_is_tidied_up_when_tokens_become_text():
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.clean_up_tokenization_spaces = True
    render = Renderer(tokenizer)
    assert render.decode(render.encode("so . it 's")) == "so . it 's"


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(("lacks", "says"), [("chat_template", "chat template"), ("eos_token", "eos token")])
def test_a_tokenizer_that_lacks_something_is_refused_in_one_line(lacks, says):
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = NO_END
    setattr(tokenizer, lacks, None)
    with pytest.raises(ValueError, match=f"has no {says}; set") as raised:
        Renderer(tokenizer)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_without_eos_ends_as_the_template_does():
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.eos_token = None
    render = Renderer(tokenizer)
    assert names(render, render.end_tokens) == ["<|im_end|>"]


def test_a_template_that_shows_no_text_is_refused():
    with pytest.raises(ValueError, match="does not render the content of a message"):
        renderer(template="{% for message in messages %}{{ message.role }}<|im_end|>{% endfor %}")


def test_content_in_parts_where_the_template_wants_parts():
    parts = (
        "{% for message in messages %}{{ message.role }}:"
        "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    render = renderer(template=parts)
    before, _, prompt = after(render, "hi", user("on"))
    assert render.decode(prompt.tokens) == "user:go<|im_end|>assistant:hi<|im_end|>user:on<|im_end|>assistant:"
    assert_extends(prompt, before)


REFUSES = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% endfor %}" + CHATML
)


def test_a_template_that_raises_is_a_mistake_with_its_words():
    render = renderer(template=REFUSES)
    tool = (Message("tool", "4"),)
    with pytest.raises(ValueError, match="refuses this conversation: no tools here"):
        render.first(tool)
    with pytest.raises(ValueError, match="no tools here"):
        after(render, "hi", tool)
    before, _, prompt = after(render, "hi", user("on"))
    assert prompt.broke is Break.none
    with pytest.raises(ValueError, match="no tools here"):
        render.next(before, user("go"), tool)


def test_an_empty_conversation_is_a_mistake():
    with pytest.raises(ValueError, match="refuses this conversation"):
        renderer().first(())


# ---------------------------------------------------------------- work


class Counted:
    """A tokenizer that notes how many messages each rendering had."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.rendered = []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *arguments, **settings):
        return self.tokenizer(*arguments, **settings)

    def apply_chat_template(self, messages, **settings):
        self.rendered.append(len(messages))
        return self.tokenizer.apply_chat_template(messages, **settings)


def converse(render, name, turns=12):
    """A long conversation in which everybody says something else each time."""
    messages, prompt = user(f"{name} go"), render.first(user(f"{name} go"))
    for number in range(turns):
        before = turn(render, prompt, action_of(render, f"{name} says {number}"))
        shown, messages = messages, (*messages, before.said, *user(f"{name} hears {number}"))
        prompt = render.next(before, shown, messages)
        assert prompt.broke is Break.none
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()


def test_an_extension_renders_no_long_history_that_looks_like_one_before():
    tokenizer = Counted(byte_tokenizer())
    render = Renderer(tokenizer)
    converse(render, "amber")
    tokenizer.rendered.clear()
    converse(render, "cedar")
    long = [size for size in tokenizer.rendered if size > 3]
    assert long == [25]  # the one that the test itself compares with
    assert len(tokenizer.rendered) <= 2 * 12 + 2


def test_what_was_rendered_once_is_not_rendered_again():
    tokenizer = Counted(byte_tokenizer())
    render = Renderer(tokenizer)
    converse(render, "amber")
    tokenizer.rendered.clear()
    converse(render, "amber")
    assert tokenizer.rendered == []


DISGUISED = (
    "{% set last = namespace(user=-1) %}{% for message in messages %}"
    "{% if message.role == 'user' and not message.content.startswith('<result>') %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set text = message.content %}"
    "{% if loop.index0 < last.user %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    f"{LINE}{{% endfor %}}{GENERATION}"
)
"""Keeps thinking until a question, and tells questions from results by their text, as Qwen3's does."""


def test_what_a_template_reads_in_the_text_of_messages_counts():
    """Conversations that look alike but for such text must not be taken for each other."""
    render = renderer(template=DISGUISED)
    for result, broke in (("4", ["template", "none", "none"]), ("<result>4", ["none", "template", "none"])):
        messages, prompt = user("go"), render.first(user("go"))
        found = []
        for said, heard in (("<think>hm</think>look", user(result)), ("and", user("so?")), ("then", user("x"))):
            before = turn(render, prompt, action_of(render, said))
            shown, messages = messages, (*messages, before.said, *heard)
            prompt = render.next(before, shown, messages)
            assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()
            found.append(prompt.broke)
        assert found == broke


# ---------------------------------------------------------------- tools

GET = ToolSpec("get", "Where a name leads.", {"type": "object", "properties": {"name": {"type": "string"}}})
ANSWER = ToolSpec("answer", "Ends it.")
CALL = '<tool_call>\n{"name": "get", "arguments": {"name": "amber"}}\n</tool_call>'
AT_THE_TOP = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
WRITES_CALLS = (
    "{% for message in messages %}{% set text = message.content %}"
    "{% for call in message.tool_calls or [] %}{% set text = text + '<tool_call>\n' + "
    '\'{"name": "\' + call.function.name + \'", "arguments": \' + (call.function.arguments | tojson) + '
    "'}\n</tool_call>' %}<|im_start|>{{ message.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if not message.tool_calls %}" + LINE + "{% endif %}{% endfor %}" + GENERATION
)
BEFORE_THE_LAST = WRITES_CALLS.replace(
    "{% set text = message.content %}",
    "{% set text = message.content %}{% if tools and loop.last %}<tools>{{ tools | tojson }}</tools>{% endif %}",
)
"""Tells the tools where the conversation ends, as Mistral's do: old prompts lose them."""


def tooled(template=CHATML, history="extend", tools="hermes"):
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = template
    return Renderer(tokenizer, history, tools)


def test_the_template_tells_of_tools_where_it_can():
    render = tooled(AT_THE_TOP + WRITES_CALLS)
    assert render.template.form.calls == "mapping"
    text = render.decode(render.first(user("go"), (GET, ANSWER)).tokens)
    assert text.startswith('<tools>[{"type": "function", "function": {"name": "get", "description": "Where a name')
    assert render.decode(render.first(user("go")).tokens) == "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("tools", ["hermes", "llama"])
def test_a_template_without_these_tool_calls_describes_tools_in_the_system_message(tools):
    for render in (tooled(tools=tools), tooled(AT_THE_TOP + CHATML, tools=tools)):
        system = Message("system", "Be brief.")
        text = render.decode(render.first((system, *user("go")), (GET,)).tokens)
        assert text.startswith("<|im_start|>system\nBe brief.\n\n")
        assert text.count("Where a name leads.") == 1
        assert ("<tool_call>" in text) == (tools == "hermes")
        text = render.decode(render.first(user("go"), (GET,)).tokens)
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith("<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_without_system_messages_describes_tools_in_the_question():
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    render = tooled(refuses + CHATML)
    text = render.decode(render.first(user("go"), (GET,)).tokens)
    assert text.startswith("<|im_start|>user\n# Tools")
    assert text.endswith("</tool_call>\n\ngo<|im_end|>\n<|im_start|>assistant\n")


def test_tools_that_cannot_be_described_are_refused_in_one_line():
    with pytest.raises(ValueError, match='set rollout.tools = "auto"') as refused:
        renderer().first(user("go"), (GET,))
    assert "\n" not in str(refused.value)
    shows = renderer(template=AT_THE_TOP + CHATML)  # an environment may read calls by itself
    assert "Where a name leads." in shows.decode(shows.first(user("go"), (GET,)).tokens)


@pytest.mark.parametrize("history", ["extend", "rerender"])
@pytest.mark.parametrize("template", [CHATML, AT_THE_TOP + WRITES_CALLS])
def test_a_conversation_with_tools_is_extended(template, history):
    render = tooled(template, history)
    messages, prompt = user("go"), render.first(user("go"), (GET,))
    for number in range(4):
        before = turn(render, prompt, action_of(render, CALL))
        assert before.said.calls
        shown, messages = messages, (*messages, before.said, Message("tool", f"result {number}"))
        prompt = render.next(before, shown, messages, (GET,), (GET,))
        assert prompt.broke is Break.none
        assert_extends(prompt, before)
        assert prompt.tokens.tolist() == render.first(messages, (GET,)).tokens.tolist()


def test_other_tools_are_an_edit_of_the_history():
    render = tooled(AT_THE_TOP + WRITES_CALLS)
    before = turn(render, render.first(user("go"), (GET,)), action_of(render, CALL))
    messages = (*user("go"), before.said, Message("tool", "cedar"))
    for tools in ((), (ANSWER,), (GET, ANSWER)):
        prompt = render.next(before, user("go"), messages, tools, (GET,))
        assert prompt.broke is Break.history
        assert prompt.tokens.tolist() == render.first(messages, tools).tokens.tolist()
    same = (ToolSpec(GET.name, GET.description, GET.parameters),)
    assert render.next(before, user("go"), messages, same, (GET,)).broke is Break.none


def test_other_tools_that_the_template_does_not_show_are_no_edit():
    shows_nobody = renderer(template="{% for tool in tools or [] if tool.function.name == 'zebra' %}zebra quagga"
                            "{% endfor %}" + CHATML)  # fmt: skip
    render = shows_nobody
    assert render.template.offers
    before = turn(render, render.first(user("go"), (GET,)), action_of(render, "hi"))
    prompt = render.next(before, user("go"), (*user("go"), before.said, *user("on")), (ANSWER,), (GET,))
    assert prompt.broke is Break.none


def test_tools_that_move_to_the_end_of_the_conversation_break_it():
    render = tooled(BEFORE_THE_LAST)
    assert render.template.offers
    before = turn(render, render.first(user("go"), (GET,)), action_of(render, CALL))
    messages = (*user("go"), before.said, Message("tool", "cedar"))
    prompt = render.next(before, user("go"), messages, (GET,), (GET,))
    assert prompt.broke is Break.template
    assert prompt.tokens.tolist() == render.first(messages, (GET,)).tokens.tolist()


def test_conversations_that_differ_by_their_tools_are_not_taken_for_each_other():
    """Every cache is asked for both, in either order."""
    ends = "{% if tools and add_generation_prompt %}{{ tools[0].function.name }}?{% endif %}"
    render = tooled(AT_THE_TOP + WRITES_CALLS + ends)
    for tools in ((GET,), (ANSWER,), (), (GET,)):
        before = turn(render, render.first(user("go"), tools), action_of(render, "hi"))
        messages = (*user("go"), before.said, *user("on"))
        prompt = render.next(before, user("go"), messages, tools, tools)
        assert prompt.tokens.tolist() == render.first(messages, tools).tokens.tolist()
        assert render.decode(prompt.tokens).endswith(f"{tools[0].name}?" if tools else "assistant\n")


def test_tools_cost_no_long_renderings():
    tokenizer = Counted(byte_tokenizer())
    render = Renderer(tokenizer, tools="hermes")

    def talk(name):
        messages, prompt = user(name), render.first(user(name), (GET,))
        for number in range(12):
            before = turn(render, prompt, action_of(render, f"{name} {number}"))
            shown, messages = messages, (*messages, before.said, *user(f"{number} {name}"))
            prompt = render.next(before, shown, messages, (GET,), (GET,))
            assert prompt.broke is Break.none

    talk("amber")
    tokenizer.rendered.clear()
    talk("cedar")
    assert max(tokenizer.rendered) <= 4  # with the system message that tells of the tools
    assert len(tokenizer.rendered) <= 2 * 12 + 2


def test_an_action_is_what_the_template_writes_for_a_message():
    get = Message("assistant", "", calls=(ToolCall("get", {"name": "amber"}),))
    for render in (tooled(), tooled(AT_THE_TOP + WRITES_CALLS), tooled(tools="llama")):
        for message in (get, Message("assistant", "It is 4."), Message("assistant", "", "hm", get.calls)):
            if message.thinking and render.template.format is FORMATS["llama"]:
                continue  # which has no way to write it
            action = render.action(message)
            assert action[-1] == render.end_token
            assert render.said(np.zeros(0, np.int32), action) == message
    assert tooled().decode(tooled().action(get)) == CALL + "<|im_end|>"
    with pytest.raises(ValueError, match="rollout.tools"):
        renderer().action(get)
