"""The key that clients of `turnwise serve` must send, and its source."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "TURNWISE_KEY"
LARGEST_FILE = 4096


@dataclass(frozen=True, slots=True)
class Key:
    """A key, and the text that tells the user where it is.

    Example:
        Key("k3y", "the contents of /run/secrets/key")
    """

    text: str
    shown: str
    """The text on the screen. It contains the key only if the key is random, so that the user can read it."""


def find_key(key: str, file: str) -> Key:
    """The key from the command line, a file or the environment, in this order, or a random one. Every user of the
    machine can read a command line."""
    if key and file:
        raise ValueError("--key and --key-file both give a key; remove one of them")
    if key:
        return checked(key, "--key")
    if file:
        return checked(contents(Path(file)), f"--key-file {file}", f"the contents of {file}")
    if VARIABLE in os.environ:
        return checked(os.environ[VARIABLE].strip(), VARIABLE, f"the value of {VARIABLE}")
    random_key = secrets.token_urlsafe(24)
    return Key(random_key, random_key)


def contents(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            raw = opened.read(LARGEST_FILE + 1)
        if len(raw) > LARGEST_FILE:
            raise ValueError(f"--key-file {file} has more than {LARGEST_FILE} bytes; it must contain only the key")
        return raw.decode().strip()
    except OSError as error:
        raise ValueError(f"cannot read --key-file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--key-file {file} is not UTF-8 text; write the key as UTF-8") from None


def checked(text: str, where: str, shown: str = "the one that was given") -> Key:
    if not text or not text.isprintable() or any(character.isspace() for character in text):
        raise ValueError(f"{where}: the key is empty or has spaces; choose one word without spaces")
    return Key(text, shown)
