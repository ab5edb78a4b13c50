import pytest

from support.acting import run
from support.adapting import begun, check_independence, played, tasks_for, texts, total
from turnwise.assemble.environments import environment_class
from turnwise.envs.adapters.bfcl import read_calls
from turnwise.messages import Message, ToolCall

BASE = "bfcl:multi_turn_base"


@pytest.mark.parametrize("name", [BASE, "bfcl:multi_turn_miss_func", "bfcl:multi_turn_long_context"])
@pytest.mark.parametrize("calls", ["python", "tools"])
def test_the_right_calls_are_right(name, calls):
    for split in ("train", "heldout"):
        for task in tasks_for(name, split, 3):
            replies = run(played(name, task, "expert", calls=calls))
            assert replies[-1].finished
            assert total(replies) == 1.0


def test_calling_nothing_is_wrong():
    for task in tasks_for(BASE, count=3):
        replies = run(played(BASE, task, ["done"] * 20))
        assert replies[-1].finished
        assert total(replies) == 0.0
        assert replies[-1].marks == {"calls": 0}


def test_splits_share_no_conversation_and_hold_them_all():
    train, heldout = (tasks_for(BASE, split, 1000) for split in ("train", "heldout"))
    names = [task.data["entry"] for task in (*train, *heldout)]
    assert len(names) == len(set(names)) == 200
    assert len(heldout) > 20
    assert [task.id for task in tasks_for(BASE, "train", 1000, seed=1)] != [task.id for task in train]


def test_questions_follow_each_other_and_results_are_shown():
    (task,) = [task for task in tasks_for(BASE, "train", 200) if task.data["entry"] == "multi_turn_base_1"]
    heard = texts(run(played(BASE, task, ["[ls(a=True)]", "done", "nothing more"])))
    assert "I am alex." in heard[0]
    assert '"name": "ls"' in heard[0]
    assert "workspace" in heard[1]
    assert heard[2].startswith("Go to workspace directory")


def test_calls_that_came_as_structure_are_taken():
    (task,) = [task for task in tasks_for(BASE, "train", 200) if task.data["entry"] == "multi_turn_base_1"]
    call = Message("assistant", "", calls=(ToolCall("ls", {"a": True}), ToolCall("pwd", {})))
    opening, reply = run(played(BASE, task, [call], calls="tools"))
    assert {"ls", "pwd"} <= {tool.name for tool in opening.tools}
    assert [message.role for message in reply.messages] == ["tool", "tool"]
    (_, wrong) = run(played(BASE, task, [Message("assistant", "", calls=(ToolCall("fly", {}),))], calls="tools"))
    assert texts([wrong]) == ["There is no function fly."]


FUNCTIONS = {"ls": {}, "cd": {}, "echo": {}}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[ls(a=True)]", ["ls(a=True)"]),
        (" [cd(folder='x y'), ls()] ", ["cd(folder='x y')", "ls()"]),
        ("[cd('x')]", ["cd('x')"]),
        ("[echo(content={'a': [1, -2.5]})]", ["echo(content={'a': [1, -2.5]})"]),
        ("I am done.", []),
        ("", []),
        ("[]", []),
    ],
)
def test_calls_are_read(text, calls):
    assert read_calls(text, FUNCTIONS) == calls


@pytest.mark.parametrize(
    "text",
    [
        "[__import__('os').system('true')]",
        "[ls(__import__('os').system('true'))]",
        "[ls(a=open('/etc/passwd').read())]",
        "[ls(**{'a': 1})]",
        "[ls(a=[x for x in ()])]",
        "[ls.__globals__]",
        "[(lambda: 1)()]",
        "[1]",
        "[eval('1')]",
        "[ls(",
        "[" * 500,
        "[ls(a='\0')]",
        "[ls(a=" + "(" * 300 + "1" + ")" * 300 + ")]",
    ],
)
def test_code_that_is_no_plain_call_never_reaches_the_library(text):
    answer = read_calls(text, FUNCTIONS)
    assert isinstance(answer, str)
    assert "\n" not in answer


def test_attempts_of_a_group_are_independent():
    (task,) = [task for task in tasks_for(BASE, "train", 200) if task.data["entry"] == "multi_turn_base_1"]
    scripts = (
        ["[cd(folder='workspace'), mkdir(dir_name='mine')]", "[ls(a=True)]", "done", "[pwd()]"],
        ["[ls(a=True)]", "[cd(folder='workspace')]", "[ls(a=True)]", "[mkdir(dir_name='mine')]"],
    )
    run(check_independence(BASE, task, scripts))


def test_attempts_have_names_of_their_own_too():
    """The library keys its state by the model's name: also two attempts in one process would not meet."""
    from turnwise.envs.adapters.bfcl import Bfcl

    kind = type("Here", (Bfcl,), {"name": "multi_turn_base"})
    (task,) = [task for task in tasks_for(BASE, "train", 200) if task.data["entry"] == "multi_turn_base_1"]
    first, second = kind(), kind()
    for one in (first, second):
        one.open(task)
    first.step(Message("assistant", "[cd(folder='workspace'), mkdir(dir_name='mine')]"))
    seen = second.step(Message("assistant", "[cd(folder='workspace'), ls(a=True)]"))
    assert "mine" not in texts([seen])[0]


def test_a_category_without_turns_is_refused():
    with pytest.raises(ValueError, match="bfcl has no multi-turn category simple_python"):
        environment_class("bfcl:simple_python").check_settings()


def test_what_was_opened_is_closed():
    async def play():
        (task,) = tasks_for(BASE)
        environment, _ = await begun(BASE, task)
        await environment.close()
        return environment.line

    assert run(play()) is None
