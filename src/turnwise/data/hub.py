"""Models by their names on the Hugging Face Hub: found in its cache, or fetched by huggingface_hub.

Its environment variables hold: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN. Nothing here reaches out
unless a person has named a model of the Hub. What is fetched is what a model needs and never a pickle or code.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise import disk

PREFIX = "hf:"
NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w./-]{1,128}))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
ALLOWED = [
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tekken.json", "spiece.model"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
]
IGNORED = ["*/*.safetensors", "*/*.json", "consolidated*.safetensors", "optimizer*.safetensors"]
"""Weights of other formats that some repositories have beside those of transformers."""
OWN_FOLDERS = ("runs", "models", "recipes")
"""Folders that recipes and docs name, which need not exist yet."""
FILES = (".toml", ".json", ".jsonl", ".parquet")
INDEX, ADAPTERS = "model.safetensors.index.json", "adapter_config.json"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HubName:
    """The name of a model on the Hub, at a revision.

    Example:
        HubName.parse("Qwen/Qwen3-0.6B@main") == HubName("Qwen/Qwen3-0.6B", "main")
    """

    repo: str
    revision: str = "main"
    """A branch, a tag or a commit."""

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """The name that a text is; None for what exists here, and for what can only be a path. `hf:` before a name says
        that it is one. Without it a path that is mistyped would be looked for on the Hub, so that models/warm and a/b
        are no names, the second where there is a folder a."""
        is_marked = text.startswith(PREFIX)
        match = NAME.fullmatch(text.removeprefix(PREFIX))
        if match is None or ".." in text:
            return None
        first = text.partition("/")[0]
        is_path = first in OWN_FOLDERS or text.endswith(FILES) or Path(text).exists() or Path(first).is_dir()
        if is_path and not is_marked:
            return None
        return cls(match["repo"], match["revision"] or "main")

    @property
    def is_pinned(self) -> bool:
        """Whether it can never mean other files."""
        return COMMIT.fullmatch(self.revision) is not None

    @property
    def key(self) -> str:
        """As a run folder records it: a name whatever folders there are."""
        return f"{PREFIX}{self}"

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"

    # ------------------------------------------------------------ folders

    def located(self) -> Path:
        """Its folder in the cache; nothing is fetched."""
        if (folder := self.cached()) is None:
            raise ValueError(f"{self} is not in the Hub cache ({cache()}); fetch it: {self.command}")
        return folder

    def cached(self) -> Path | None:
        """Its folder in the cache, where all of it is there."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            found = snapshot_download(
                self.repo,
                revision=self.revision,
                local_files_only=True,
                allow_patterns=ALLOWED,
                ignore_patterns=IGNORED,
            )
        except LocalEntryNotFoundError:
            return None
        folder = Path(found)
        return folder if is_whole(folder) else None

    def fetched(self, say: Say) -> tuple[HubName, Path]:
        """(the same name at its commit, its folder). A commit that is in the cache is not asked for again; of a branch
        or a tag the Hub is asked what it is now, and where that cannot be reached, the cache."""
        folder = self.cached() if self.is_pinned else None
        if folder is None:
            here = self.cached()
            say(f"{self.repo}: {'asking' if here else 'fetching from'} {endpoint()} ({self.revision})")
            folder = Path(self.downloaded())
        if not any(folder.glob("*.safetensors")):
            raise ValueError(
                f"{self} has no weights as safetensors, and pickles are not read; choose another revision or model"
            )
        if not is_whole(folder):
            raise ValueError(f"{self} is only partly in {folder}; run the same command again with a network")
        pinned = HubName(self.repo, folder.name)
        if (base := pinned.base) is not None:
            base.fetched(say)
        say(f"{pinned.repo}: commit {pinned.revision}, in {folder}")
        return pinned, folder

    def downloaded(self) -> str:
        """Its folder, as huggingface_hub makes it; every failure but one of the disk is a ValueError of one line."""
        from huggingface_hub import errors, snapshot_download

        try:
            with disk.named_failures(Path(cache())):
                return interruptible(
                    lambda: snapshot_download(
                        self.repo, revision=self.revision, allow_patterns=ALLOWED, ignore_patterns=IGNORED
                    )
                )
        except (OSError, RuntimeError, errors.HTTPError, errors.XetDownloadError) as error:  # type: ignore[attr-defined]
            if isinstance(error, OSError) and disk.is_failure(error):
                raise
            raise ValueError(self.explained(error)) from None

    @property
    def base(self) -> HubName | None:
        """The model that it adds adapters to, where it is of adapters and that is one of the Hub."""
        folder = self.cached()
        return None if folder is None else base_name(folder)

    @property
    def command(self) -> str:
        """What fetches it by hand."""
        return f"hf download {self.repo} --revision {self.revision}"

    # ------------------------------------------------------------ what goes wrong

    def explained(self, error: BaseException) -> str:
        """What is wrong and what to do, in a line."""
        from huggingface_hub import errors

        where, reason = endpoint(), first_line(error)
        if isinstance(error, errors.GatedRepoError):
            return f"{self} is gated; accept its conditions at {where}/{self.repo} and set HF_TOKEN, or: hf auth login"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{self.repo} has no revision {self.revision} at {where}; see {where}/{self.repo}/tree/main"
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"{self.repo} is neither a folder here nor a model at {where}; check the name, or set HF_TOKEN if it "
                "is private"
            )
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
            return f"{where} does not accept the token; set HF_TOKEN to another one, or unset it ({self})"
        if is_offline():
            return (
                f"{self} is not in the Hub cache ({cache()}), and HF_HUB_OFFLINE is set; unset it, or fetch it "
                f"elsewhere and copy the cache: {self.command}"
            )
        if isinstance(error, errors.IncompleteSnapshotError):
            return f"{self} is only partly in the Hub cache, and {where} cannot be reached; try again with a network"
        if isinstance(error, errors.LocalEntryNotFoundError):
            return (
                f"{self} is not in the Hub cache ({cache()}), and {where} cannot be reached ({reason}); check the "
                "network, set HF_ENDPOINT to a mirror, or give a folder"
            )
        return f"the download of {self} was interrupted ({reason}); run the same command again, it goes on from there"


def interruptible(work: Callable[[], str]) -> str:
    """The result of work in a thread of its own. A download finishes the files that it has begun, and Ctrl-C
    must not wait for these."""
    done: Future[str] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="hub download", daemon=True).start()
    return done.result()


def base_name(folder: Path) -> HubName | None:
    """The model of the Hub that the adapters in a folder are for; None where there are none, or it is a folder."""
    try:
        settings: dict[str, Any] = json.loads((folder / ADAPTERS).read_text())
        text, revision = str(settings["base_model_name_or_path"]), settings.get("revision")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if (folder / text).is_dir():
        return None
    return HubName.parse(PREFIX + (f"{text}@{revision}" if revision else text))


def is_whole(folder: Path) -> bool:
    """Whether a folder of the cache has its settings and all parts of its weights. A listing of the repository is in
    the cache only where a recent huggingface_hub has put it there."""
    if not (folder / "config.json").exists() and not (folder / ADAPTERS).exists():
        return False
    try:
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / name).exists() for name in names)


def first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].strip()[:200].removeprefix("Got: ").rstrip(".:")


def cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.is_offline_mode())
