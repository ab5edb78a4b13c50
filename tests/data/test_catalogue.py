from pathlib import Path

import pytest

from turnwise.cli.commands import main
from turnwise.data.catalogue import CATALOGUE, model_folder
from turnwise.data.package import Package
from turnwise.runs.checksums import write_checksums


def test_every_entry_is_under_its_own_name_and_can_be_checked():
    for name, entry in CATALOGUE.items():
        assert name == entry.name
        assert isinstance(entry.package, Package)
        assert len(entry.package.sha256) == 64
        assert entry.licence


def test_a_model_is_a_folder_or_one_that_was_fetched(tmp_path):
    assert model_folder(tmp_path) == tmp_path
    assert model_folder("factbook") == Path("factbook")  # which is no model
    with pytest.raises(ValueError, match="run: turnwise data smollm2-135m"):
        model_folder("smollm2-135m")
    made = CATALOGUE["smollm2-135m"].folder
    made.mkdir(parents=True)
    write_checksums(made)
    assert model_folder("smollm2-135m") == made


def test_the_list_says_which_data_is_present(capsys):
    CATALOGUE["minilm"].folder.mkdir(parents=True)
    assert main(["data"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in CATALOGUE)
    assert str(CATALOGUE["minilm"].folder) in shown
    assert shown.count("not here") == len(CATALOGUE) - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["facbook"], "there is no facbook to fetch; did you mean factbook?"),
        (["--from", "x"], "--from goes with the name of what the file holds; see turnwise data --help"),
        (["factbook", "--from", "/nowhere/x"], "cannot read /nowhere/x: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert main(["data", *arguments]) == 2
    assert capsys.readouterr().err == f"turnwise: {message}\n"


def test_training_fetches_nothing(tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "smollm2-135m"\n[[env]]\nname = "guess"\n')
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}"]) == 2
    assert "run: turnwise data smollm2-135m" in capsys.readouterr().err
    recipe.write_text('[[env]]\nname = "search"\n')
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}"]) == 2
    assert "run: turnwise data factbook" in capsys.readouterr().err
