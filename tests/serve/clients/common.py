"""What the client scripts share: the address they are given, the tool, and the line they answer with."""

import json
import os
import sys
from importlib.metadata import version

BASE, KEY, MODEL = os.environ["CLIENT_BASE_URL"], os.environ["CLIENT_KEY"], os.environ["CLIENT_MODEL"]
MODE = sys.argv[1]
QUESTION = "Where does amber lead, after two links?"
LINKS = {"amber": "cedar", "cedar": "jade"}
CALLED = []
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def follow(name: str) -> str:
    """Tell where a name leads.

    Args:
        name: The name to follow.
    """
    CALLED.append(name)
    return LINKS[name]


def done(package, answer):
    """Report the version of the client, the calls that it made and the answer that it got."""
    print(json.dumps({"package": package, "version": version(package), "called": CALLED, "answer": str(answer)}))
