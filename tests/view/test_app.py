"""The questions of the page, asked over HTTP."""

import json

import pytest
from starlette.testclient import TestClient

from support.making import make_turn
from support.viewing import HOSTILE, SCRIPT, make_hostile_run, make_run
from turnwise.messages import Message
from turnwise.runs.archive import Record, write_step
from turnwise.types import Group, Status, Task, Trajectory
from turnwise.view.app import make_app
from turnwise.view.watched_run import WatchedRuns


def client_of(*paths):
    runs = WatchedRuns.open([str(path) for path in paths])
    runs.read_all()
    return TestClient(make_app(runs), base_url="http://127.0.0.1:8765")


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    make_run(path / "one")
    make_run(path / "two", steps=2, recipe={"optimizer": {"rate": 0.2}}, finished=False)
    return client_of(path / "one", path / "two")


def get(client, path):
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_runs_and_how_they_stand(client):
    one, two = get(client, "/api/runs")["runs"]
    assert (one["name"], one["finished"], one["step"], one["steps"], one["attempts"]) == ("one", True, 3, 3, 21)
    assert (two["name"], two["finished"], two["waiting_files"], two["trouble"]) == ("two", False, 0, [])


def test_curves_have_steps_seconds_and_values(client):
    names = {metric["name"]: metric for metric in get(client, "/api/metrics")}
    assert names["success"]["unit"] == "share"
    assert "Attempts whose total reward" in names["success"]["meaning"]
    curves = get(client, "/api/curves?names=loss%0Asuccess%0Anothing")
    assert curves["loss"]["one"] == {"step": [1, 2, 3], "seconds": [2, 4, 6], "value": [1, 0.5, 0.333333], "total": 3}
    assert curves["nothing"] == {}


def test_recipes_say_what_differs(client):
    table = get(client, "/api/recipes")
    assert table["runs"] == ["one", "two"]
    differing = {row["key"]: row["values"] for row in table["rows"] if row["differs"]}
    assert differing == {"steps": ["3", "2"], "optimizer.rate": ["0.1", "0.2"]}


def test_attempts_are_filtered_sorted_and_paged(client):
    table = get(client, "/api/one/attempts?kind=train&order=reward&limit=2")
    assert table["total"] == 18
    assert [row["key"] for row in table["rows"]] == ["train/3/0/0", "train/3/1/0"]
    assert table["choices"]["status"] == {"finished": 14, "too_long": 7}
    row = get(client, "/api/one/attempts?status=too_long&first_step=2&last_step=2&descending=0&max_turns=1")["rows"][0]
    assert (row["key"], row["turns"], row["action_tokens"], row["status"]) == ("train/2/0/2", 1, 2, "too_long")
    assert get(client, "/api/one/attempts?kind=train&offset=16")["rows"][-1]["key"] == "train/1/1/2"
    groups = get(client, "/api/one/groups?kind=train&order=reward")
    assert (groups["total"], groups["rows"][0]["key"]) == (6, "train/3/0")


@pytest.mark.parametrize("parameters", ["order=size", "first_step=x", "min_reward=nan", "limit=1e9", "offset=٣"])
def test_a_filter_that_is_none_is_refused(client, parameters):
    answer = client.get(f"/api/one/attempts?{parameters}")
    assert answer.status_code == 404
    assert answer.json()["error"]


def test_an_attempt_is_a_conversation(client):
    page = get(client, "/api/one/attempt/train/2/1/0")
    assert (page["reward"], page["trained"], page["task"]["id"], page["marks"]) == (
        1.02,
        True,
        "task-2-1",
        {"lookups": 1},
    )
    assert page["opening"]["text"] == "<|im_start|>user\n cedar"
    first, second = page["turns"]
    assert first["said"]["calls"][0]["name"] == "get"
    assert first["heard"][0]["content"]["text"] == "leads to cedar"
    assert first["timing"] == {"queued": 0.01, "prefill": 0.2, "decode": 0.3, "environment": 0.05}
    assert (second["known_tokens"], second["prompt_tokens"], second["credit"], second["versions"]) == (7, 10, 1, [2, 2])
    assert [one["reward"] for one in page["group"]] == [1.02, 0.02, 0]
    assert {channel["name"]: channel["scale"] for channel in page["channels"]} == {
        "credit": "diverging",
        "logprob": "sequential",
        "weight": "sequential",
        "version": "steps",
    }
    assert [channel["name"] for channel in get(client, "/api/one/attempt/greedy/3/0/0")["channels"]] == [
        "logprob",
        "version",
    ]


def test_tokens_come_in_the_order_in_which_the_model_saw_them(client):
    page = get(client, "/api/one/tokens/train/2/1/0")
    assert page["next"] is None
    assert [(part["turn"], part["sampled"], part["start"], part["texts"]) for part in page["stretches"]] == [
        (0, False, 0, ["<|im_start|>", "user", "\n", " cedar"]),
        (0, True, 0, [" get", " amber", "<|im_end|>"]),
        (1, False, 7, ["\n", "<|im_start|>", "assistant"]),
        (1, True, 0, [" answer", " cedar", "<|im_end|>"]),
    ]
    assert page["stretches"][1]["values"] == {
        "credit": [1, 1, 1],
        "logprob": [-0.1, -2, -0.01],
        "weight": [0.25, 0.25, 0.25],
        "version": [2, 2, 2],
    }


def test_the_tree_of_a_group_and_its_texts(client):
    tree = get(client, "/api/one/tree/train/2/1")
    assert (tree["unique_tokens"], tree["chain_tokens"], tree["turn_tokens"]) == (17, 32, 46)
    assert [chain["attempt"] for chain in tree["chains"]] == [0, 1, 2]
    root = tree["nodes"][0]
    assert (root["count"], root["attempts"], root["uses"], root["sampled"]) == (4, 3, 5, False)
    assert root["text"] == "<|im_start|>user\n cedar"
    text = get(client, "/api/one/node/train/2/1?attempt=0&turn=1&from=8&to=12")
    assert text["texts"] == ["<|im_start|>", "assistant", " answer", " cedar"]


def test_two_attempts_part_at_a_token(client):
    found = get(client, "/api/one/difference/train/2/1/0/1")
    assert (found["turn"], found["shared"], found["sampled"], found["same"]) == (1, 11, True, False)


@pytest.mark.parametrize(
    "path",
    [
        "/api/three/attempts",
        "/api/one/attempt/train/9/0/0",
        "/api/one/attempt/train/2/9/0",
        "/api/one/attempt/train/2/0/9",
        "/api/one/attempt/..%2f..%2fx/2/0/0",
        f"/api/one/attempt/train/{'9' * 300}/0/0",
        "/api/one/text/train/2/0/0?part=turns.0.said.__class__",
        "/api/one/text/train/2/0/0?part=turns.7.said.content",
        "/api/one/text/train/2/0/0?part=",
        "/api/one/span/train/2/0/0?turn=0&from=0&to=99",
        "/api/one/node/train/2/0?attempt=9",
        "/api/%2e%2e/attempts",
        "/../config.json",
        "/%2e%2e/%2e%2e/app.py",
        "/vendor/../../app.py",
        "/..%2f..%2fconfig.json",
        "//etc/passwd",
        "/page/index.html",
    ],
)
def test_what_is_not_there_is_no_answer(client, path):
    assert client.get(path).status_code == 404


def test_an_answer_that_the_browser_has_is_not_sent_again(client):
    first = client.get("/api/runs")
    assert client.get("/api/runs", headers={"if-none-match": first.headers["etag"]}).status_code == 304
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert client.get("/main.js", headers={"if-none-match": client.get("/main.js").headers["etag"]}).status_code == 304


def test_the_page_follows_a_run(tmp_path):
    folder = make_run(tmp_path / "run", finished=False)
    runs = WatchedRuns.open([tmp_path / "run"])
    client = TestClient(make_app(runs), base_url="http://localhost")
    runs.read_all()
    before = client.get("/api/runs")
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "loss": 7}\n')
    runs.read_all()
    after = client.get("/api/runs", headers={"if-none-match": before.headers["etag"]})
    assert after.status_code == 200
    assert after.json()["runs"][0]["step"] == 4
    assert get(client, "/api/curves?names=loss")["loss"]["run"]["value"][-1] == 7


def test_hostile_text_comes_through_as_text_and_damaged_files_are_named(tmp_path):
    make_hostile_run(tmp_path / "run")
    client = client_of(tmp_path / "run")
    run = get(client, "/api/runs")["runs"][0]
    assert (run["num_unreadable_files"], run["num_unreadable_lines"], run["finished"]) == (2, 3, False)
    assert "step-000003.parquet" in " ".join(run["trouble"])
    assert get(client, "/api/run/attempts?task=script")["total"] == 2
    page = get(client, "/api/run/attempt/train/1/0/0")
    heard = page["turns"][0]["heard"][0]
    assert heard["content"]["text"].startswith(HOSTILE)
    assert (len(heard["content"]["text"]), heard["content"]["length"]) == (20_000, 200_000 + len(HOSTILE))
    rest = get(client, f"/api/run/text/train/1/0/0?part={heard['content']['part']}&from=20000")
    assert (len(rest["text"]), rest["end"]) == (180_000 + len(HOSTILE), rest["length"])
    assert heard["role"] == SCRIPT
    for part in ("said.thinking", "said.fault", "said.calls.0"):
        assert get(client, f"/api/run/text/train/1/0/0?part=turns.0.{part}")["text"]
    assert page["turns"][1]["lost_tokens"] == 3
    assert get(client, "/api/run/attempt/train/1/0/1")["failure"]["text"] == HOSTILE
    assert get(client, "/api/run/tree/train/1/0")["chains"][1]["broke"] == "template"
    assert client.get("/api/run/attempt/train/3/0/0").status_code == 404
    assert get(client, "/api/curves?names=loss")["loss"] == {}
    assert json.loads(client.get("/api/recipes").content)["rows"]


def test_a_folder_that_goes_away_is_no_end(tmp_path):
    folder = make_run(tmp_path / "run")
    client = client_of(tmp_path / "run")
    (folder.archive / "step-000002.parquet").unlink()
    folder.config.unlink()
    assert client.get("/api/run/attempt/train/2/0/0").status_code == 404
    assert get(client, "/api/run/attempts")["total"] == 21
    assert get(client, "/api/recipes")["rows"] == []


def test_long_prompts_are_cut_in_the_middle_and_long_actions_are_sent_in_parts(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    long = make_turn([3] * 3000, [5] * 9000, said=Message("assistant", "x"))
    after = make_turn([*([3] * 3000), *([5] * 9000), 1], [6])
    group = Group(Task("long", "hops"), (Trajectory((long, after), Status.finished, 0.0),))
    write_step(folder.archive, 2, [Record(group, False)])
    client = client_of(tmp_path / "run")
    first = get(client, "/api/run/tokens/train/2/0/0?turn=0&from=0")
    given, last, action = first["stretches"]
    assert (len(given["tokens"]), given["left_out"], last["start"], len(last["tokens"])) == (600, 2200, 2800, 200)
    span = get(client, "/api/run/span/train/2/0/0?turn=0&from=600&to=2800")
    assert (len(span["tokens"]), span["left_out"], span["start"]) == (2200, 0, 600)
    seen, place = list(action["tokens"]), first["next"]
    while place:
        page = get(client, f"/api/run/tokens/train/2/0/0?turn={place['turn']}&from={place['from']}")
        for part in page["stretches"]:
            if part["turn"] == 0:
                assert (part["sampled"], part["start"]) == (True, len(seen))
                seen += part["tokens"]
        place = page["next"]
    assert seen == [5] * 9000
    assert [part["tokens"] for part in page["stretches"] if part["turn"] == 1] == [[1], [6]]
