from support.viewing import make_run
from turnwise.view import group_page
from turnwise.view.group_page import tree_page
from turnwise.view.watched_run import WatchedRuns


def test_a_large_tree_is_cut_far_from_its_root(tmp_path, monkeypatch):
    make_run(tmp_path / "run", steps=1)
    run = WatchedRuns.open([tmp_path / "run"])["run"]
    whole = tree_page(run, "train", 1, 0)
    assert whole["left_out"] == 0
    monkeypatch.setattr(group_page, "LARGEST_TREE", 3)
    part = tree_page(run, "train", 1, 0)
    assert (len(part["nodes"]), part["left_out"]) == (3, len(whole["nodes"]) - 3)
    assert part["unique_tokens"] == whole["unique_tokens"]
    assert all(node["parent"] < place for place, node in enumerate(part["nodes"]))
    assert max(node["start"] for node in part["nodes"]) <= min(
        node["start"] for node in whole["nodes"] if node not in part["nodes"]
    )
