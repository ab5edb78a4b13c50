import pytest

from support.acting import run
from support.adapting import check_independence, played, tasks_for, texts, total
from turnwise.assemble.environments import environment_class
from turnwise.envs.adapters import reasoning_gym_scoring
from turnwise.envs.adapters.reasoning_gym_scoring import is_formula, score_apart

SUM = "reasoning_gym:chain_sum"


@pytest.mark.parametrize("name", [SUM, "reasoning_gym:word_sorting", "reasoning_gym:countdown"])
def test_the_generators_own_answers_are_right(name):
    for split in ("train", "heldout"):
        for task in tasks_for(name, split, 2):
            replies = run(played(name, task, "expert"))
            assert len(replies) == 2
            assert total(replies) == 1.0
            assert replies[-1].marks == {"correct": 1, "stopped": 0}


def test_a_little_pay_is_no_success():
    (task,) = tasks_for(SUM)
    (_, wrong) = run(played(SUM, task, ["<answer>no idea</answer>"]))
    assert wrong.finished
    assert wrong.outcome < 1
    assert wrong.marks == {"correct": 0, "stopped": 0}


def test_the_last_answer_in_tags_counts_and_plain_text_will_do():
    (task,) = tasks_for(SUM)
    environment = environment_class(SUM)
    (_, expert) = run(played(SUM, task, "expert"))
    assert expert.outcome == 1
    right = run(answer_of(environment, task))
    for said in (right, f" {right}\n", f"<answer>0.5</answer> no: <answer>{right}</answer>"):
        assert run(played(SUM, task, [said]))[-1].outcome == 1.0


async def answer_of(kind, task):
    from random import Random

    environment = kind()
    await environment.open(task)
    said = environment.demonstrate(0.0, Random(0))
    await environment.close()
    return said.removeprefix("<answer>").removesuffix("</answer>")


def test_system_prompts_and_options_are_chosen_by_name():
    (task,) = tasks_for(SUM)
    (opening,) = run(played(SUM, task, [], prompt="", options={"min_terms": 6, "max_terms": 6}))
    assert [message.role for message in opening.messages] == ["user"]
    assert sum(texts([opening])[0].count(sign) for sign in "+-") >= 5
    with pytest.raises(ValueError, match="reasoning_gym has no prompt defalt; did you mean default?"):
        run(played(SUM, task, [], prompt="defalt"))


def test_attempts_of_a_group_are_independent():
    (task,) = tasks_for(SUM)
    run(check_independence(SUM, task, (["<answer>3</answer>"], [run(answer_of(environment_class(SUM), task))])))


def test_seeds_ask_different_things():
    asked = {texts(run(played(SUM, task, [])))[0] for task in tasks_for(SUM, count=4)}
    assert len(asked) == 4


def test_a_name_that_is_not_there():
    with pytest.raises(ValueError, match="reasoning_gym has no generator chain_sums; did you mean chain_sum?"):
        environment_class("reasoning_gym:chain_sums").check_settings()


HOSTILE = {
    "spiral_matrix": "[__import__('os').system('touch {file}')]",
    "string_insertion": "[open('{file}', 'w').write('x')]",
    "binary_matrix": "__import__('pathlib').Path('{file}').touch()",
    "n_queens": "exec('import os; os.mkdir(\\'{file}\\')')",
    "puzzle24": "__import__('os').system('touch {file}') + 24",
    "countdown": "(lambda: open('{file}', 'w'))()",
    "simple_integration": "__import__('os').system('touch {file}')",
    "polynomial_multiplication": "eval('__import__(chr(111)+chr(115)).mkdir(\"{file}\")')",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_code_in_an_answer_is_a_wrong_answer_and_does_not_run(name, tmp_path):
    (task,) = tasks_for(f"reasoning_gym:{name}")
    said = HOSTILE[name].replace("{file}", str(tmp_path / "made"))
    (_, reply) = run(played(f"reasoning_gym:{name}", task, [f"<answer>{said}</answer>"]))
    assert reply.finished
    assert reply.outcome < 0.1
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("puzzle24", "[setattr(__import__('sympy'), 'x', 1), 24][1]"),
        ("countdown", "float.__class__.__mro__"),
        ("spiral_matrix", "[c for c in ().__class__.__base__.__subclasses__()]"),
        ("n_queens", "__import__('os').write(3, b'1.0')"),
        ("polynomial_multiplication", "().__class__"),
    ],
)
def test_no_answer_can_forge_its_score(name, said):
    (task,) = tasks_for(f"reasoning_gym:{name}")
    (_, reply) = run(played(f"reasoning_gym:{name}", task, [f"<answer>{said}</answer>"]))
    assert reply.outcome < 0.1
    assert reply.marks["correct"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["puzzle24", "countdown"])
def test_a_bomb_is_stopped_and_wrong(name):
    (task,) = tasks_for(f"reasoning_gym:{name}")
    (_, reply) = run(played(f"reasoning_gym:{name}", task, ["<answer>9**9**9**9</answer>"]))
    assert reply.finished
    assert reply.outcome < 0.1


def test_a_score_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(reasoning_gym_scoring, "SECONDS", 1)

    def for_ever():
        while True:
            pass

    assert score_apart(for_ever) == (0.0, True)


@pytest.mark.parametrize(
    ("score", "expected"),
    [(lambda: 0.25, 0.25), (lambda: 7.0, 0.0), (lambda: float("nan"), 0.0), (lambda: 1 / 0, 0.0), (lambda: "1.0", 1.0)],
)
def test_only_numbers_from_0_to_1_are_scores(score, expected):
    assert score_apart(score) == (expected, False)


def test_formulas_are_told_from_code():
    for text in ("3 * (4 + 2)", "x**2/2 + C", "2.5e-3*sin(x) - exp(2*x)", "-1/3", "a*b + 3*y^2", "1.*x"):
        assert is_formula(text), text
    for text in (
        "exec(1)",
        "(chr)(1)",
        "x.y",
        "().a",
        "__import__",
        "'a'",
        "[1]",
        "lambda: 1",
        "_",
        "Symbol(x)",
        "1" * 5000,
    ):
        assert not is_formula(text), text


def test_the_right_answers_of_evaluating_generators_are_still_right():
    for name in HOSTILE:
        (task,) = tasks_for(f"reasoning_gym:{name}")
        assert total(run(played(f"reasoning_gym:{name}", task, "expert"))) == 1.0
