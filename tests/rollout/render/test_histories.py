from hypothesis import given
from hypothesis import strategies as st

from turnwise.messages import Message
from turnwise.rollout.render.histories import Histories
from turnwise.rollout.render.renderer import stand_in

ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
CONVERSATIONS = st.lists(st.tuples(ROLES, st.sampled_from("ab")), max_size=9)


def skeleton_of(message):
    """Only whose message it is."""
    return Message(message.role, "x")


def histories(max_bytes=1 << 20):
    return Histories(skeleton_of, max_bytes)


def messages_of(drawn):
    return tuple(Message(role, text) for role, text in drawn)


@given(st.lists(st.tuples(CONVERSATIONS, st.integers(0, 9)), max_size=12), st.sampled_from([0, 900, 1 << 20]))
def test_equal_numbers_are_equal_skeletons_and_nothing_else_is(drawn, max_bytes):
    own = histories(max_bytes)
    seen = {}
    for conversation, split in drawn:
        messages = messages_of(conversation)
        shown = messages[:split]
        addition = own.addition(shown, messages)
        assert addition.skeleton == tuple(map(skeleton_of, messages))
        assert addition.shown == tuple(map(skeleton_of, shown))
        assert addition.more == tuple(map(skeleton_of, messages[len(shown) :]))
        assert seen.setdefault(addition.skeleton, addition.number) == addition.number
        assert own.num_bytes == sum(history.num_bytes for history in own.kept.values()) <= max_bytes
    assert len(set(seen.values())) == len(seen)


def test_a_conversation_that_goes_on_reads_its_new_messages_only():
    read = []
    own = Histories(lambda message: read.append(message.content) or message, 1 << 20)
    shown: tuple[Message, ...] = (Message("user", "0"),)
    for turn in range(1, 9):
        messages = (*shown, Message("assistant", f"a{turn}"), Message("user", f"{turn}"))
        own.addition(shown, messages)
        shown = messages
    assert read == ["0", *(text for turn in range(1, 9) for text in (f"a{turn}", f"{turn}"))]
    assert len(own.kept) == 1


def test_another_conversation_at_the_same_address_is_not_taken_for_the_first():
    own = histories()
    shown = (Message("user", "0"),)
    messages = (*shown, Message("assistant", "1"))
    own.addition(shown, messages)
    kept = own.kept.pop(id(messages))
    other = (Message("tool", "2"), Message("tool", "3"))
    own.kept[id(other)] = kept  # as if the first had gone, and its address were used again
    assert own.addition(other, (*other, Message("user", "4"))).shown == tuple(map(skeleton_of, other))


def slow_stand_in(shown):
    """By definition: the last question, and the last answer after it with what follows."""
    questions = [index for index, message in enumerate(shown) if message.role == "user"]
    if not questions:
        return shown
    tail = shown[questions[-1] :]
    last = max((index for index, message in enumerate(tail) if message.role == "assistant"), default=1)
    return (tail[0], *tail[last:])


@given(CONVERSATIONS)
def test_a_stand_in_has_the_last_question_and_the_last_answer(drawn):
    messages = messages_of(drawn)
    assert stand_in(messages) == slow_stand_in(messages)
