"""verl's rows as tasks: what is shown, and what answers are paid."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.acting import run
from turnwise.assemble.environments import tasks_of
from turnwise.envs.verl import Verl, scorer_for
from turnwise.messages import Message
from turnwise.recipe.parse import parse_recipe
from turnwise.runs.trust import named_in
from turnwise.types import Task


def row(truth, source="openai/gsm8k", **more):
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}]
    return {"data_source": source, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}, **more}


def paid(answer, data, **settings):
    environment = Verl(**settings)
    opened = run(environment.open(Task("a", "verl", data)))
    assert opened.messages[-1] == Message("user", "2 + 2?")
    reply = run(environment.step(Message("assistant", answer)))
    assert reply.finished
    return reply.outcome, dict(reply.marks)


@pytest.mark.parametrize(
    ("scorer", "answer", "truth", "right"),
    [
        ("auto", "so #### 1,024", "1024", 1.0),
        ("auto", "so 1024", "1024", 0.0),
        ("gsm8k", "#### 3\n#### 4.0", "4", 1.0),
        ("gsm8k", "#### 5", "4", 0.0),
        ("gsm8k", "", "4", 0.0),
        ("number", "first 3, then -4.50", "-4.5", 1.0),
        ("number", "none", "4", 0.0),
        ("boxed", r"\boxed{1} or \boxed{\frac{1}{2}}", r"\dfrac{1}{2}", 1.0),
        ("boxed", r"\boxed{\left( 3, 4 \right)}", "(3,4)", 1.0),
        ("boxed", r"\boxed{1", "1", 0.0),
        ("boxed", "4", "4", 0.0),
        ("search", "<answer>The Suva.</answer>", {"target": ["Fiji", "suva"]}, 1.0),
        ("search", "<answer>Nadi</answer>", ["Suva"], 0.0),
        ("search", "Suva", "Suva", 0.0),
        ("exact", " yes ", "yes", 1.0),
    ],
)
def test_scorers(scorer, answer, truth, right):
    assert paid(answer, row(truth), scorer=scorer) == (right, {})


def test_a_function_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "their_scores.py").write_text(
        "def half(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 0.5 * (solution_str == ground_truth), 'length': len(solution_str), 'note': 'x'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert paid("yes", row("yes", source="mine"), scorer="their_scores:half") == (0.5, {"length": 3.0})


def test_mistakes():
    assert {scorer_for(name) for name in ("math_dapo", "aime24", "HuggingFaceH4/MATH-500")} == {"boxed"}
    assert scorer_for("searchR1_nq") == "search"
    with pytest.raises(ValueError, match="no scorer is known for data_source 'mine'"):
        paid("x", row("x", source="mine"))
    with pytest.raises(ValueError, match='scorer = "boxd" is unknown; choose auto, gsm8k, boxed'):
        Verl("boxd")
    with pytest.raises(ValueError, match="is the module on PYTHONPATH"):
        Verl("no_such_module:f")
    with pytest.raises(ValueError, match="verl has no tasks of its own; set env.data"):
        Verl.tasks("train", 0)
    picture = {**row("x"), "prompt": [{"role": "user", "content": [{"type": "image"}]}]}
    with pytest.raises(ValueError, match="images cannot be read"):
        run(Verl().open(Task("a", "verl", picture)))


def test_a_parquet_file_of_verl_is_a_table_of_tasks(tmp_path):
    rows = [row(str(n), extra_info={"index": n, "split": "train"}, ability="math") for n in range(30)]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    recipe = parse_recipe({"env": [{"name": "verl", "data": str(path)}]}, "here")
    train, heldout = (tasks_of(recipe, split)["verl"] for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 30
    assert json.loads(json.dumps(train[0].data))["extra_info"]["split"] == "train"
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"prompt": [{"role": "user", "content": "x"}]}))
    recipe = parse_recipe({"env": [{"name": "verl", "data": str(bad)}]}, "here")
    with pytest.raises(ValueError, match="row 1: reward_model: is missing"):
        tasks_of(recipe, "train")


def test_code_that_a_recipe_names_is_asked_about():
    entry = {"name": "verl", "data": "train.parquet", "settings": {"scorer": "mine:score"}}
    recipe = parse_recipe({"env": [entry], "sft": {"data": "mine:rows", "updates": 1}}, "here")
    assert named_in(recipe) == ['env.settings.scorer = "mine:score"', 'sft.data = "mine:rows"']
    plain = parse_recipe({"env": [{**entry, "settings": {"scorer": "boxed"}}]}, "here")
    assert named_in(plain) == []
