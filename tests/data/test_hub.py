"""Models by name: from a cache, and from a mirror of the Hub on this machine."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from support.hub_mirror import TOKEN, Mirror, point_to, running_mirror, variables
from turnwise.data.catalogue import model_folder
from turnwise.data.hub import HubName, base_name, is_whole
from turnwise.data.named_models import named_models, with_commits
from turnwise.recipe.parse import parse_recipe

HTTP_ERROR = vars(errors)["HTTPError"]
"""Of the library that huggingface_hub makes its calls with."""
MODEL = {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "tokenizer.json": b'{"a": 1}'}
REST = {
    "pytorch_model.bin": b"a pickle",
    "modeling_evil.py": b"code",
    "original/model.safetensors": b"twice",
    "consolidated.safetensors": b"twice",
    "README.md": b"words",
    "onnx/config.json": b"{}",
}


@pytest.fixture(scope="module")
def server():
    with running_mirror() as mirror:
        yield mirror


@pytest.fixture
def mirror(server: Mirror, tmp_path, monkeypatch):
    """An empty Hub, and an empty cache."""
    server.__dict__.update({**Mirror().__dict__, "url": server.url})
    point_to(monkeypatch, server, tmp_path / "home")
    return server


def quiet(text):
    return None


def fetched(text):
    return HubName.parse(text).fetched(quiet)


def refused(text):
    with pytest.raises(ValueError) as caught:
        fetched(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1", HubName("Qwen/Qwen3-0.6B", "v1")),
        ("hf:Qwen/Qwen3-0.6B@refs/pr/1", HubName("Qwen/Qwen3-0.6B", "refs/pr/1")),
        ("hf:models/warm", HubName("models/warm")),
        *((text, None) for text in ("tiny", "models/warm", "/abs/path", "./a/b", "a/b/c", "../a", "~/a", "a/..", "")),
        *((text, None) for text in ("a/b@../../x", "runs/quickstart", "recipes/x", "mine/recipe.toml", "here/b")),
    ],
)
def test_what_is_a_name(text, name, tmp_path, monkeypatch):
    """A folder that exists wins, and so does a folder in which one was meant."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert HubName.parse(text) == name


def test_an_existing_folder_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert HubName.parse("Qwen/Qwen3-0.6B") is None
    assert model_folder("Qwen/Qwen3-0.6B") == Path("Qwen/Qwen3-0.6B")


# ---------------------------------------------------------------- the cache


def fake_cache(folder: Path, files=MODEL, commit="a" * 40, repo="models--org--tiny"):
    """A cache as an older huggingface_hub has left it, which keeps no listing."""
    place = folder / "hub" / repo
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    (place / "blobs").mkdir()
    for name, data in files.items():
        (place / "blobs" / name).write_bytes(data)
        link = place / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(place / "blobs" / name)
    return place / "snapshots" / commit


def test_a_cached_model_is_found_offline(tmp_path, monkeypatch):
    point_to(monkeypatch, None, tmp_path / "home", offline=True)
    folder = fake_cache(tmp_path / "home")
    assert fetched("org/tiny") == (HubName("org/tiny", "a" * 40), folder)
    assert fetched(f"org/tiny@{'a' * 40}")[1] == model_folder("org/tiny") == folder
    assert "HF_HUB_OFFLINE is set; unset it" in refused("org/absent")
    assert "hf download org/tiny --revision v2" in refused("org/tiny@v2")
    with pytest.raises(ValueError, match="org/absent@main is not in the Hub cache"):
        model_folder("org/absent")


def test_a_cache_that_lacks_a_part_is_not_used(tmp_path, monkeypatch):
    point_to(monkeypatch, None, tmp_path / "home", offline=True)
    index = json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}).encode()
    parts = {"config.json": b"{}", "model.safetensors.index.json": index, "model-1-of-2.safetensors": b"1"}
    folder = fake_cache(tmp_path / "home", parts)
    assert not is_whole(folder)
    assert "only partly" in refused("org/tiny")
    (folder / "model-2-of-2.safetensors").write_bytes(b"2")
    assert fetched("org/tiny")[1] == folder


# ---------------------------------------------------------------- the mirror


def test_only_what_a_model_needs_is_fetched_and_the_commit_is_kept(mirror):
    shown = {"additional_chat_templates/rag.jinja": b"{{ a }}", "chat_template.jinja": b"{{ b }}"}
    commit = mirror.put("org/tiny", {**MODEL, **REST, **shown})
    said: list[str] = []
    name, folder = HubName.parse("org/tiny").fetched(said.append)
    assert name == HubName("org/tiny", commit)
    assert name.key == f"hf:org/tiny@{commit}"
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == {**MODEL, **shown}
    assert said == [f"org/tiny: fetching from {mirror.url} (main)", f"org/tiny: commit {commit}, in {folder}"]
    assert model_folder(name.key) == folder


def test_a_branch_moves_and_a_commit_does_not(mirror):
    old = mirror.put("org/tiny", MODEL)
    pinned, folder = fetched("org/tiny")
    new = mirror.put("org/tiny", {**MODEL, "model.safetensors": b"other"})
    assert fetched("org/tiny")[0].revision == new
    mirror.asked.clear()
    assert fetched(str(pinned)) == (pinned, folder)
    assert pinned.revision == old
    assert mirror.asked == []
    mirror.put("org/tiny", MODEL, branch="v1")
    assert fetched("org/tiny@v1")[0].revision == old


def test_a_hub_that_cannot_be_reached_leaves_the_cache(mirror, tmp_path, monkeypatch):
    commit = mirror.put("org/tiny", MODEL)
    fetched("org/tiny")
    mirror.broken = True
    assert fetched("org/tiny")[0].revision == commit
    assert "cannot be reached (HfHubHTTPError: Server error '500" in refused("org/other")
    point_to(monkeypatch, None, tmp_path / "home")
    assert fetched("org/tiny")[0].revision == commit
    assert "cannot be reached (ConnectError" in refused("org/other")


def test_what_cannot_be_had_is_one_line(mirror, monkeypatch):
    for repo in ("org/gated", "org/private", "org/tiny"):
        mirror.put(repo, MODEL)
    mirror.put("org/pickles", {"config.json": b"{}", **REST})
    mirror.gated.add("org/gated")
    mirror.needs_token.add("org/private")
    assert f"org/none is neither a folder here nor a model at {mirror.url}; check the name" in refused("org/none")
    assert "set HF_TOKEN if it is private" in refused("org/private")
    assert f"accept its conditions at {mirror.url}/org/gated and set HF_TOKEN" in refused("org/gated")
    assert "org/tiny has no revision v9" in refused("org/tiny@v9")
    assert "org/pickles@main has no weights as safetensors, and pickles are not read" in refused("org/pickles")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for repo in ("org/gated", "org/private"):
        assert fetched(repo)[1].is_dir()
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "does not accept the token" in refused("org/absent")


def test_a_connection_that_ends_is_taken_up_again(mirror, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    mirror.put("org/tiny", MODEL)
    mirror.cut.add("model.safetensors")
    _, folder = fetched("org/tiny")
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


def test_failures_of_the_download(mirror, monkeypatch):
    def failing(error):
        def download(*arguments, local_files_only=False, **settings):
            raise errors.LocalEntryNotFoundError("none") if local_files_only else error

        return download

    for error in (HTTP_ERROR("peer closed connection\nand more"), errors.XetDownloadError("peer closed connection")):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(error))
        found = refused("org/tiny")
        assert "the download of org/tiny@main was interrupted (peer closed connection); run the same command" in found
    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(OSError(errno.ENOSPC, "full", "/cache/x")))
    with pytest.raises(OSError) as caught:  # which the command line answers with its own exit code
        fetched("org/tiny")
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        fetched("org/tiny")


def test_a_download_keeps_nobody_from_ending(mirror, monkeypatch):
    """It is in a thread that a process does not wait for, and Ctrl-C is heard in another."""
    threads = []

    def download(*arguments, local_files_only=False, **settings):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("none")
        threads.append(threading.current_thread())
        raise HTTP_ERROR("enough")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    refused("org/tiny")
    (thread,) = threads
    assert thread.daemon
    assert thread is not threading.current_thread()


def test_adapters_bring_the_model_that_they_are_for(mirror):
    base = mirror.put("org/base", MODEL)
    settings = {"base_model_name_or_path": "org/base", "revision": base}
    files = {"adapter_config.json": json.dumps(settings).encode(), "adapter_model.safetensors": b"a"}
    mirror.put("org/adapters", files)
    _, folder = fetched("org/adapters")
    assert base_name(folder) == HubName("org/base", base)
    assert model_folder(base_name(folder).key).name == base


def test_every_place_that_takes_a_model_takes_names(mirror):
    commit = mirror.put("org/tiny", MODEL)
    tree = {"env": [{"name": "hops"}], "model": "org/tiny", "kl": {"coefficient": 0.1, "reference": "org/tiny@main"}}
    recipe = with_commits(parse_recipe({**tree, "teacher": "org/tiny"}, "test"), quiet)
    pinned = f"hf:org/tiny@{commit}"
    assert (recipe.model.path, recipe.kl.reference, recipe.teacher) == (pinned,) * 3
    mirror.asked.clear()
    assert with_commits(recipe, quiet) == recipe
    assert mirror.asked == []
    assert list(named_models(parse_recipe({"env": "hops"}, "test"))) == []


def test_the_usual_environment_variables_hold(mirror, tmp_path):
    """In a process of its own: huggingface_hub reads them when it is imported."""
    commit = mirror.put("org/private", MODEL)
    mirror.needs_token.add("org/private")
    code = "from turnwise.data.hub import HubName; print(HubName.parse('org/private').fetched(print)[1])"
    home = tmp_path / "elsewhere"
    given = {**os.environ, **variables(mirror, home), "HF_TOKEN": TOKEN, "HF_HUB_CACHE": str(tmp_path / "own")}
    printed = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == str(tmp_path / "own" / "models--org--private" / "snapshots" / commit)
