from random import Random

import pytest

from support.acting import byte_tokenizer, limits, run
from turnwise.envs.math import env as own
from turnwise.envs.math.env import Math, expressions_of, result_in
from turnwise.envs.math.sandbox import Ran, Sandbox
from turnwise.messages import Message, ToolCall
from turnwise.rollout.demonstrate import Demonstrator
from turnwise.rollout.render.renderer import Renderer
from turnwise.types import Task

pytest.importorskip("reasoning_gym")
ROOMY = {"max_prompt_tokens": 9000, "max_action_tokens": 900, "max_trajectory_tokens": 9900, "attempt_seconds": 100.0}
SUM = Task("s", "math", {"problem": "chain_sum", "seed": 1})


@pytest.fixture(scope="module")
def tasks():
    return list(Math.tasks("heldout", 0, count=40))


def said(content="", *calls):
    return Message("assistant", content, calls=tuple(ToolCall(name, arguments) for name, arguments in calls))


async def played(task, *messages, **settings):
    environment = Math(**settings)
    opening = await environment.open(task)
    return opening, *[await environment.step(message) for message in messages]


# ---------------------------------------------------------------- tasks


def test_splits_share_no_question():
    """Seeds differ where questions may not: small sums come again and again."""
    small = {"problems": ("chain_sum",), "options": {"chain_sum": {"max_terms": 2, "max_digits": 2}}}
    train, heldout = (
        [task.data["question"] for task in Math.tasks(split, seed, count=200, **small)]
        for split, seed in (("train", 3), ("heldout", 4))
    )
    assert len(set(train)) == len(set(heldout)) == 200
    assert not set(train) & set(heldout)


def test_a_task_is_the_same_problem_again(tasks):
    for task in tasks:
        assert run(played(task))[0].messages[-1].content == task.data["question"]
    assert {task.data["problem"] for task in tasks} == {"chain_sum", "gsm_symbolic"}
    assert [task.id for task in tasks] == [task.id for task in Math.tasks("heldout", 0, count=40)]


def test_generators_are_chosen_by_name():
    (task,) = Math.tasks("train", 0, count=1, problems=("products",), options={"products": {"max_digits": 2}})
    assert task.data["problem"] == "products"
    with pytest.raises(ValueError, match="reasoning-gym has no sums; there are "):
        Math.tasks("train", 0, problems=("sums",))
    with pytest.raises(ValueError, match="options.products is ignored"):
        Math.tasks("train", 0, options={"products": {}})


# ---------------------------------------------------------------- attempts


def test_an_expert_scores_one_and_guesses_nothing(tasks):
    render = Renderer(byte_tokenizer(), tools="hermes")
    expert = Demonstrator({"math": lambda: Math(python=False)}, render, limits(**ROOMY), 0, 0.0)
    made = [run(expert.group(task, 0), 100.0).trajectories[0] for task in tasks[:15]]
    assert [trajectory.total for trajectory in made] == [1.0] * 15
    assert any(turn.said.calls for trajectory in made for turn in trajectory.turns)
    random = Random(0)
    for task in tasks:
        guess = random.choice(
            ("", "7", "no idea", "the answer is", "0.5", "-1", "[]", "x" * 5000, "\ud800", "nan", "1/0")
        )
        reply = run(played(task, said(guess)))[1]
        assert reply.finished
        assert reply.outcome == 0.0


def test_what_a_generator_pays_for_wrong_answers_is_no_success(tasks):
    task = next(task for task in tasks if task.data["problem"] == "gsm_symbolic")
    environment = Math()
    run(environment.open(task))
    assert 0.0 < environment.dataset.score_answer("1", environment.entry) < 0.5
    assert environment.score("1") == 0.0
    with pytest.raises(ValueError, match="threshold"):
        Math(threshold=0.0)


def test_tools_are_used_and_then_the_problem_is_answered():
    opening, *replies = run(
        played(
            SUM,
            said("", ("calculator", {"expression": "4 - 1 - 7"}), ("calculator", {"expression": "os"})),
            said("", ("python", {"code": "print(4 - 1 - 7)"})),
            said("The answer is: -4."),
        ),
        100.0,
    )
    assert [tool.name for tool in opening.tools] == ["calculator", "python"]
    assert opening.messages[1].content.endswith("4 - 1 - 7 =")
    assert [message.content for message in replies[0].messages] == [
        "-4",
        "error: the calculator knows numbers, + - * / // % **, brackets and a few functions",
    ]
    assert replies[1].messages[0].content == "-4"
    assert replies[2].outcome == 1.0
    assert replies[2].marks == {"uses": 3.0}


def test_without_python_there_is_none():
    opening, reply = run(played(SUM, said("", ("python", {"code": "1"})), python=False))
    assert [tool.name for tool in opening.tools] == ["calculator"]
    assert reply.messages[0].content == "error: there is no such tool; there are calculator"


@pytest.mark.parametrize(
    ("ran", "heard"),
    [
        (Ran("3\n"), "3"),
        (Ran(""), "the program printed nothing"),
        (Ran("a\n", failed=True, why="stopped after 5 seconds"), "a\nerror: stopped after 5 seconds"),
        (Ran("line 1: KeyError: 3\n", failed=True), "line 1: KeyError: 3"),
    ],
)
def test_the_model_sees_output_and_error_of_a_program(monkeypatch, ran, heard):
    monkeypatch.setattr(Sandbox, "run", lambda self, code: ran)
    assert run(played(SUM, said("", ("python", {"code": "x"}))))[1].messages[0].content == heard


def test_a_hostile_program_does_not_end_the_attempt():
    _, hostile, answered = run(
        played(
            SUM, said("", ("python", {"code": "import os\nos.kill(os.getppid(), 9)\nopen('/etc/passwd')"})), said("-4")
        ),
        100.0,
    )
    assert "No such file" in hostile.messages[0].content
    assert answered.outcome == 1.0


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ("-4", "-4"),
        (" 288\n", "288"),
        ("The answer is 288.", "288"),
        ("3 + 4 = 7\nAnswer: 7", "7"),
        ("so\n#### 12", "12"),
        ("answer is 3, no: the answer is **5**", "5"),
        ("3.50", "3.50"),
        ("the answer is 4\nbecause", "4"),
        ("**5.**", "5"),
        ("the answer is", ""),
    ],
)
def test_the_result_in_a_message(answer, result):
    assert result_in(answer) == result


def test_experts_calculate_what_there_is_to_calculate():
    assert expressions_of({"metadata": {"expression": "1 + 2"}}) == ["1 + 2"]
    cot = "So James responds to 160-48=112 emails per day\nIn a week, 112*5=560 emails\nHe has 48=48"
    assert expressions_of({"metadata": {"answer_cot": cot}}) == ["160-48", "112*5"]
    assert expressions_of({"metadata": {}}) == []


def test_a_machine_without_a_sandbox_is_refused_before_a_run(monkeypatch):
    def refuse():
        raise ValueError("no namespaces; set env.settings.python = false")

    monkeypatch.setattr(own, "check_sandbox", refuse)
    with pytest.raises(ValueError, match="python = false"):
        Math.check_settings()
    Math.check_settings(python=False)
