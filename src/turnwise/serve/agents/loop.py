"""The event loop of agents that are coroutine functions, in a separate thread.

An agent that blocks the loop delays other agents, but not the server or the run. There is one loop per process, and it
never ends: objects that an agent keeps between attempts, such as a client with its connections, are bound to the loop
in which they were made.
"""

from __future__ import annotations

import asyncio
import threading
from functools import cache


@cache
def agent_loop() -> asyncio.AbstractEventLoop:
    """The loop, which starts with the first call of this function."""
    loop = asyncio.new_event_loop()

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()

    threading.Thread(target=work, name="agents", daemon=True).start()
    return loop
