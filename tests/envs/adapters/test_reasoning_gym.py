import pytest

from support.acting import run
from support.adapting import check_independence, played, tasks_for, texts, total
from turnwise.assemble.environments import environment_class

SUM = "reasoning_gym:chain_sum"


@pytest.mark.parametrize("name", [SUM, "reasoning_gym:word_sorting", "reasoning_gym:countdown"])
def test_the_generators_own_answers_are_right(name):
    for split in ("train", "heldout"):
        for task in tasks_for(name, split, 2):
            replies = run(played(name, task, "expert"))
            assert len(replies) == 2
            assert total(replies) == 1.0
            assert replies[-1].marks == {"correct": 1}


def test_a_little_pay_is_no_success():
    (task,) = tasks_for(SUM)
    (_, wrong) = run(played(SUM, task, ["<answer>no idea</answer>"]))
    assert wrong.finished
    assert wrong.outcome < 1
    assert wrong.marks == {"correct": 0}


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
