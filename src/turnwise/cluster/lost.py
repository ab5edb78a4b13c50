"""Why an actor of a Ray cluster is lost, in words that fit into a message of turnwise."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def why_lost(error: Any) -> str:
    """The reason of a RayError. What Ray says of a dead process has many lines of advice, which go to the log of who
    debugs; a traceback of what the actor ran stays whole."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

    log.debug("%s", error)
    if isinstance(error, ActorUnavailableError):
        return "its process cannot be reached"
    if isinstance(error, RayTaskError) or not isinstance(error, ActorDiedError) or error.actor_init_failed:
        return str(error)
    return "its node has ended" if "its node has died" in str(error) else "its process has ended"
