import json
import pickle

import pytest

from support.acting import byte_tokenizer
from support.making import make_model
from turnwise.learn.contents import check_contents
from turnwise.learn.learner import save_policy
from turnwise.learn.policy import load_model, load_tokenizer


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def folder(tmp_path):
    save_policy(make_model(), byte_tokenizer(), tmp_path / "model")
    return tmp_path / "model"


def change(path, **settings):
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder / "ran")))
    with pytest.raises(ValueError, match="save them as safetensors") as refused:
        load_model(folder)
    assert "\n" not in str(refused.value)
    assert not (folder / "ran").exists()


def test_a_pickle_that_says_it_is_tensors_is_not_read(folder):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Evil(folder / "ran")))
    with pytest.raises(Exception):  # noqa: B017 - whatever safetensors says of it
        load_model(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("where", ["attn_implementation", "_attn_implementation", "text_config"])
def test_a_kernel_of_a_hub_is_refused(folder, where):
    named = "somebody/attention"
    change(folder / "config.json", **{where: {"attn_implementation": named} if where == "text_config" else named})
    with pytest.raises(ValueError, match=f"code to fetch and run .*{named}"):
        check_contents(folder)


def test_code_in_the_folder_is_left_alone(folder):
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    named = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil.Any")
    change(folder / "config.json", auto_map=named)
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Any", None]})
    load_model(folder)
    load_tokenizer(folder)
    assert not (folder / "ran").exists()
