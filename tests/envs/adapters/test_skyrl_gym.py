import json
import sqlite3

import pytest

from support.acting import run
from support.adapting import check_independence, played, texts, total
from turnwise.assemble.environments import environment_class, tasks_of
from turnwise.envs.adapters.skyrl_gym import SkyRLGym
from turnwise.messages import Message
from turnwise.recipe.parse import parse_recipe
from turnwise.types import Task


def sums(count=40):
    return [
        {"prompt": [{"role": "user", "content": f"{n} + 3?"}], "reward_spec": {"ground_truth": str(n + 3)}}
        for n in range(count)
    ]


def recipe_on(folder, rows, name="skyrl_gym:gsm8k", **entry):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return parse_recipe({"env": [{"name": name, "data": str(path), **entry}]}, "here")


@pytest.fixture
def flights(tmp_path):
    """A database where text2sql looks for one."""
    folder = tmp_path / "spider" / "database" / "flights"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "flights.sqlite") as connection:
        connection.execute("create table flight (number int, goal text)")
        connection.executemany("insert into flight values (?, ?)", [(n, goal) for n, goal in enumerate("ABCDEFGH" * 4)])
    return tmp_path


def sql_task():
    spec = {"ground_truth": "select count(*) from flight where goal = 'A'"}
    prompt = [{"role": "user", "content": "How many flights go to A?"}]
    return Task("t", "sql", {"prompt": prompt, "reward_spec": spec, "db_id": "flights", "data": "spider"})


def test_rows_are_tasks_and_the_expert_solves_them(tmp_path):
    recipe = recipe_on(tmp_path, sums())
    environment_class("skyrl_gym:gsm8k").check_settings()
    train, heldout = (tasks_of(recipe, split)["gsm8k"] for split in ("train", "heldout"))
    assert len({task.id for task in (*train, *heldout)}) == len(train) + len(heldout) == 40
    for task in (train[0], heldout[0]):
        replies = run(played("skyrl_gym:gsm8k", task, "expert"))
        assert replies[-1].finished
        assert total(replies) == 1.0


def test_turns_are_paid_and_measured(tmp_path):
    name = "skyrl_gym:gsm8k_multi_turn"
    environment_class(name).check_settings()
    task = tasks_of(recipe_on(tmp_path, sums(), name), "train")["gsm8k_multi_turn"][0]
    replies = run(played(name, task, ["hm", "#### 1000", "#### 1000", "x"], max_turns=3))
    assert [reply.reward for reply in replies[1:]] == pytest.approx([0.0, 0.2 / 3, 0.2 / 3])
    assert "#### ANSWER" in texts(replies)[1]
    assert replies[-1].finished
    assert replies[-1].marks == {"steps": 3}


def test_a_database_is_asked_and_answered(flights):
    name = "skyrl_gym:text2sql"
    environment_class(name).check_settings(config={"db_path": str(flights)})
    script = [
        "<think>look</think><sql>select goal, count(*) from flight group by goal</sql>",
        "<think>now</think><solution>select count(*) from flight where goal = 'A'</solution>",
    ]
    replies = run(played(name, sql_task(), script, config={"db_path": str(flights)}))
    assert "<observation>" in texts(replies)[1]
    assert [reply.reward for reply in replies] == [0, 0, 1]
    again = run(played(name, sql_task(), script, config={"db_path": str(flights)}))
    assert texts(again) == texts(replies)  # rows come from a set: the order is the same in every process
    wrong = run(played(name, sql_task(), ["<solution>select 1</solution>"], config={"db_path": str(flights)}))
    assert wrong[-1].reward == -1  # no thinking: bad form


def test_attempts_of_a_group_are_independent(flights):
    name = "skyrl_gym:text2sql"
    environment_class(name).check_settings(config={"db_path": str(flights)})
    scripts = (
        ["<sql>delete from flight</sql>", "<sql>select count(*) from flight</sql>", "<solution>x</solution>"],
        ["<sql>select count(*) from flight</sql>", "<sql>select goal from flight</sql>", "nothing"],
    )
    run(check_independence(name, sql_task(), scripts, config={"db_path": str(flights)}))


def test_an_action_that_is_rewritten_is_shown_rewritten():
    class Game:
        def step(self, action):
            heard = [{"role": "user", "content": "go on"}]
            return {"observations": heard, "reward": 0.5, "done": False, "postprocessed_action": action.split("!")[0]}

    environment = SkyRLGym()
    environment.game, environment.conversation = Game(), [Message("user", "begin")]
    reply = environment.step(Message("assistant", "yes! and more"))
    assert reply.history == (Message("user", "begin"), Message("assistant", "yes"), Message("user", "go on"))
    assert reply.reward == 0.5
    assert environment.step(Message("assistant", "no")).history is None


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gsm9k", {}, "skyrl_gym has no environment gsm9k; did you mean gsm8k?"),
        (
            "text2sql",
            {"config": {"dbpath": "x"}},
            "config: text2sql has no setting dbpath; did you mean db_path?",
        ),
    ],
)
def test_names_and_settings_that_cannot_work_are_refused_at_the_start(name, settings, message):
    with pytest.raises(ValueError) as error:
        environment_class(f"skyrl_gym:{name}").check_settings(**settings)
    assert message in str(error.value)


def test_rows_are_needed_and_checked(tmp_path):
    with pytest.raises(ValueError, match="comes without tasks; set env.data"):
        tasks_of(parse_recipe({"env": [{"name": "skyrl_gym:gsm8k"}]}, "here"), "train")
    with pytest.raises(ValueError, match="reward_spec"):
        tasks_of(recipe_on(tmp_path, [{"prompt": [{"role": "user", "content": "x"}]}]), "train")
    with pytest.raises(ValueError, match="prompt"):
        tasks_of(recipe_on(tmp_path, [{"prompt": "x", "reward_spec": {}}]), "train")


def verl_rows(count=40):
    return [
        {
            "data_source": "aime",
            "prompt": [{"role": "user", "content": f"{n} + 3?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": n + 3},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(count)
    ]


def test_aime_reads_rows_of_verl(tmp_path):
    environment_class("skyrl_gym:aime").check_settings()
    task = tasks_of(recipe_on(tmp_path, verl_rows(), "skyrl_gym:aime"), "train")["aime"][0]
    right = task.data["reward_model"]["ground_truth"]
    paid = [total(run(played("skyrl_gym:aime", task, [f"So it is.\n\nAnswer: {said}"]))) for said in (right, right + 1)]
    assert paid == [1.0, -1.0]


@pytest.mark.parametrize("name", ["gsm8k", "aime"])
@pytest.mark.parametrize("form", ["reward_spec", "reward_model"])
def test_each_environment_reads_both_forms(tmp_path, name, form):
    row = {"prompt": [{"role": "user", "content": "2 + 3?"}], form: {"ground_truth": "5"}}
    said = "#### 5" if name == "gsm8k" else "Answer: 5"
    assert total(run(played(f"skyrl_gym:{name}", Task("t", name, row), [said]))) == 1.0


def test_a_row_without_an_answer_is_named(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "2 + 3?"}], "reward": 1}]
    with pytest.raises(ValueError, match="row 1: reward_spec or reward_model: is missing"):
        tasks_of(recipe_on(tmp_path, rows), "train")
