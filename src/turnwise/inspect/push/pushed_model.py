"""A checkpoint as a model folder for the Hub, and its upload by huggingface_hub."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from turnwise.data.hub import ADAPTERS, HubName, Say, endpoint, first_line, is_offline
from turnwise.inspect.push.model_card import CURVE, RECIPE, ModelCard, adapter_settings
from turnwise.inspect.push.recipe_file import public_recipe
from turnwise.recipe.parse import parse_recipe
from turnwise.recipe.schema import Recipe
from turnwise.runs import tracker
from turnwise.runs.checkpoint import (
    STATE,
    Checkpoint,
    checkpoint_path,
    latest_checkpoint,
    pointed_step,
    read_checkpoint,
)
from turnwise.runs.checksums import NAME as CHECKSUMS
from turnwise.runs.checksums import Damaged
from turnwise.runs.curve import draw_curve
from turnwise.runs.folder import RunFolder
from turnwise.runs.machine import read_machines

REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
LEFT_OUT = (STATE, CHECKSUMS)
TEMPLATES = "additional_chat_templates"
STALE = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json", "config.json"]
"""Files of an earlier push that the new one may not have."""


@dataclass(frozen=True, slots=True)
class PushedModel:
    """A checkpoint that is to be pushed, proven whole.

    Example:
        PushedModel.open(Path("runs/quickstart"), "org/name", None).write(Path("pushed"))
    """

    repo: str
    folder: RunFolder
    recipe: Recipe
    checkpoint: Checkpoint

    @classmethod
    def open(cls, path: Path, repo: str, step: int | None) -> PushedModel:
        """The checkpoint of a step, or the last one. ValueError where anything that the card is made of is damaged."""
        if not REPO.fullmatch(repo):
            raise ValueError(f'"{repo}" is no name of a model on the Hub; write ORG/NAME')
        folder = RunFolder.open(path)
        recipe = parse_recipe(folder.read_config(), str(folder.config), is_recorded=True)
        checkpoint = chosen_checkpoint(folder, step)
        tracker.check_seal(folder.metrics, checkpoint.state.get("metrics", {}))
        folder.check_reference(needed=bool(recipe.lora.rank))
        return cls(repo, folder, recipe, checkpoint)

    @property
    def base(self) -> HubName | None:
        """The model that training started from, where it is one of the Hub."""
        return HubName.parse(self.recipe.model.path)

    @property
    def is_adapter(self) -> bool:
        """Whether adapters alone are pushed: others need the model that they are for, as it was."""
        return bool(self.recipe.lora.rank) and self.base is not None and not self.recipe.sft.updates

    def write(self, folder: Path) -> None:
        """Fill a folder with the model, its tokenizer and templates, and the card."""
        if self.recipe.lora.rank and not self.is_adapter:
            self.write_merged(folder)
        else:
            for path in sorted(self.checkpoint.path.iterdir()):
                if path.is_file() and path.name not in LEFT_OUT:
                    shutil.copyfile(path, folder / path.name)
            if (self.checkpoint.path / TEMPLATES).is_dir():
                shutil.copytree(self.checkpoint.path / TEMPLATES, folder / TEMPLATES)
        if self.is_adapter and self.base is not None:
            settings = folder / ADAPTERS
            settings.write_text(adapter_settings(settings.read_text(), self.base))
        lines = tracker.read_metrics(self.folder.metrics)
        lines = [line for line in lines if line["step"] <= self.checkpoint.step]
        datasets = tuple(entry.label for entry in self.recipe.env)
        draw_curve(lines, folder / CURVE, f"{', '.join(datasets)}: success")
        recipe = public_recipe(self.recipe.model_dump(mode="json"))
        (folder / RECIPE).write_text(recipe)
        machines = [entry for entry in read_machines(self.folder.machine) if entry["step"] <= self.checkpoint.step]
        machine = machines[-1] if machines else {}
        card = ModelCard(self.repo, self.checkpoint.step, datasets, lines, recipe, machine, self.base, self.is_adapter)
        (folder / "README.md").write_text(card.text)

    def write_merged(self, folder: Path) -> None:
        """The model with its adapters added: nobody else has the one that they are for."""
        from turnwise.learn.learner import save_policy
        from turnwise.learn.policy import load_model, load_tokenizer

        save_policy(load_model(self.checkpoint.path), load_tokenizer(self.checkpoint.path), folder)

    def describe(self) -> str:
        what = f"adapters of {self.base}" if self.is_adapter else "the whole model"
        if self.recipe.lora.rank and not self.is_adapter:
            what = "the whole model, adapters added, because the model that they are for is not on the Hub"
        return f"step {self.checkpoint.step} of {self.folder.path}: {what}"


def chosen_checkpoint(folder: RunFolder, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the one that the pointer names. A damaged one is refused, whatever others there
    are: what is pushed is what a person believes it is."""
    if step is None and (step := pointed_step(folder.checkpoints)) is None:
        latest = latest_checkpoint(folder.checkpoints)  # which says where all of them are damaged
        if latest is None:
            raise ValueError(f"{folder.path} has no checkpoint yet; wait for one")
        return latest
    path = checkpoint_path(folder.checkpoints, step)
    if not path.is_dir():
        raise ValueError(f"{folder.path} has no checkpoint of step {step}; see {folder.checkpoints}")
    try:
        return read_checkpoint(path)
    except Damaged as error:
        raise Damaged(f"{error}; push another one with --checkpoint, or restore it from a copy") from None


# ---------------------------------------------------------------- upload


def token_or_refusal() -> str:
    """The token of this user."""
    from huggingface_hub import get_token

    if is_offline():
        raise ValueError("HF_HUB_OFFLINE is set; unset it to push, or write a folder with --dry-run DIR")
    if (token := get_token()) is None:
        raise ValueError(
            f"pushing needs a token that may write: make one at {endpoint()}/settings/tokens and set HF_TOKEN, or run: "
            "hf auth login"
        )
    return token


def upload(folder: Path, repo: str, message: str, token: str, *, private: bool, say: Say) -> str:
    """The address of the commit that the files of a folder are now. The repository is made where there is none."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with explained(repo):
        api.create_repo(repo, private=True if private else None, exist_ok=True)
        say(f"pushing to {endpoint()}/{repo}")
        made = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=list(STALE))
    return str(made.commit_url)


@contextmanager
def explained(repo: str) -> Iterator[None]:
    """Say what to do where a push fails, in a line."""
    from huggingface_hub import errors

    try:
        yield
    except (OSError, RuntimeError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
        reason = first_line(error)
        if status == 401:
            reason = "the token is not accepted; set HF_TOKEN to another one"
        elif status == 403:
            reason = f"the token may not write to {repo}; take one that may, or another ORG"
        raise ValueError(f"cannot push to {endpoint()}/{repo}: {reason}") from None
