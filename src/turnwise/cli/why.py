"""turnwise why: print what keeps a run from learning."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def why_command(chosen: argparse.Namespace) -> int:
    """Exit code 0 if nothing was found, 1 if something was."""
    from turnwise.inspect.why import diagnose

    diagnosis = diagnose(Path(chosen.run))
    if chosen.json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    else:
        print("\n".join(diagnosis.describe()))
    return 1 if diagnosis.findings else 0
