"""MLflow: a store of the real library in a file, read by its client."""

import json
import shutil
from pathlib import Path

import pytest

from support.tracking import RECIPE, ROWS, first_life, metrics_of, offline, opened, second_life
from turnwise.runs.folder import RunFolder
from turnwise.runs.trackers.attempts import COLUMNS, cells
from turnwise.runs.trackers.mlflow import flattened, safe_name

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")
__all__ = ["offline"]


def client_of(folder):
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.trackers / 'mlflow' / 'mlflow.db'}")


def test_a_resume_continues_the_run_without_the_steps_that_it_has(offline, tmp_path):
    first_life(offline, ["mlflow"])
    [id] = [json.loads((offline.trackers / "mlflow.json").read_text())["id"]]
    assert client_of(offline).get_run(id).info.status == "FINISHED"
    second_life(offline, ["mlflow"], RECIPE | {"steps": 5})
    client = client_of(offline)
    experiment = client.get_experiment_by_name("turnwise-tests")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (id, "quickstart", "FINISHED")
    assert run.data.params == dict(flattened(RECIPE))
    assert run.data.params["env.0.name"] == "hops"
    for name in ("reward/mean", "eval/sampled/pass@4"):
        found = [(each.step, each.value) for each in client.get_metric_history(id, safe_name(name))]
        assert found == [(step, metrics_of(step, 2 if step == 4 else 1)[name]) for step in range(5)]
    folder = offline.trackers / "mlflow" / "artifacts" / id / "artifacts"
    assert json.loads((folder / "recipe.json").read_text()) == RECIPE | {"steps": 5}
    for step, rows in ((1, ROWS), (4, ROWS[:1])):
        path = client.download_artifacts(id, f"attempts/step-{step:06d}.json", str(tmp_path))
        table = json.loads(Path(path).read_text())
        assert (table["columns"], table["data"]) == (list(COLUMNS), cells(rows))
    assert [table["path"] for table in json.loads(run.data.tags["mlflow.loggedArtifacts"])] == [
        "attempts/step-000001.json",
        "attempts/step-000004.json",
    ]
    assert (folder / "curve.png").read_bytes() == (offline.path / "curve.png").read_bytes()

    # A run folder that was moved, or made by somebody else, would have files written elsewhere.
    moved = RunFolder(tmp_path / "moved")
    shutil.copytree(offline.path, moved.path)
    with pytest.raises(
        ValueError, match=r"keeps its files in file://.*quickstart.*move the run folder back, or remove"
    ):
        opened(moved, ["mlflow"], 4)
    # A file that lacks the run which the folder remembers.
    record = json.loads((offline.trackers / "mlflow.json").read_text())
    (offline.trackers / "mlflow.json").write_text(json.dumps(record | {"id": "0" * 32}))
    with pytest.raises(ValueError, match=r"^mlflow cannot be opened \(MlflowException: .*not found"):
        opened(offline, ["mlflow"], 4)


def test_a_server_that_does_not_answer_is_refused_in_a_line(offline, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    offline.path.mkdir()
    with pytest.raises(ValueError, match=r"^mlflow cannot be opened \(.*\); check MLFLOW_TRACKING_URI, or") as refused:
        opened(offline, ["mlflow"])
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("reward/mean", "reward/mean"),
        ("eval/sampled/pass@4", "eval/sampled/pass_at_4"),
        ("mark/größe (m)", "mark/gr__e _m_"),
        ("/a", "_a"),
        ("a//b", "a__b"),
        ("../a", "___a"),
        ("a/", "a_"),
    ],
)
def test_names_as_mlflow_allows_them(name, safe):
    from mlflow.utils.validation import _validate_metric_name

    assert safe_name(name) == safe
    _validate_metric_name(safe)


def test_a_recipe_becomes_parameters():
    tree = {"a": {"b": [1, {"c": None}]}, "d": (), "e": "x" * 7000, "f": True}
    assert dict(flattened(tree)) == {"a.b.0": "1", "a.b.1.c": "null", "d": "[]", "e": "x" * 6000, "f": "true"}
