"""The key that clients of `turnwise serve` have to send, and where it comes from."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "TURNWISE_KEY"
LARGEST_FILE = 4096


@dataclass(frozen=True, slots=True)
class Key:
    """A key, and where clients' people find it.

    Example:
        Key("k3y", "the contents of /run/secrets/key")
    """

    text: str
    shown: str
    """What is said of it on the screen: itself, only where it was made up and nobody knows it yet."""


def find_key(given: str, file: str) -> Key:
    """From the command line, a file, the environment, or made up, in this order. What a command line says, everyone on
    the machine can read."""
    if given and file:
        raise ValueError("--key and --key-file both give a key; remove one of them")
    if given:
        return checked(given, "--key")
    if file:
        return checked(contents(Path(file)), f"--key-file {file}", f"the contents of {file}")
    if VARIABLE in os.environ:
        return checked(os.environ[VARIABLE].strip(), VARIABLE, f"the value of {VARIABLE}")
    made = secrets.token_urlsafe(24)
    return Key(made, made)


def contents(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            raw = opened.read(LARGEST_FILE + 1)
        if len(raw) > LARGEST_FILE:
            raise ValueError(f"--key-file {file} has more than {LARGEST_FILE} bytes; it should hold a key and no more")
        return raw.decode().strip()
    except OSError as error:
        raise ValueError(f"cannot read --key-file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--key-file {file} is no text in UTF-8") from None


def checked(text: str, where: str, shown: str = "the one that was given") -> Key:
    if not text or not text.isprintable() or any(character.isspace() for character in text):
        raise ValueError(f"{where}: a key is one word without spaces, and not empty; write another")
    return Key(text, shown)
