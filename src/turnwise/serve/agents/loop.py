"""Where agents that are coroutine functions run: one event loop of the process, in a thread of its own.

One that blocks holds up the others, but neither the server that it may be waiting for nor the run. It is one loop for
all that a process does, and it never ends: what an agent keeps between attempts, such as a client with its connections,
is bound to the loop it was made in.
"""

from __future__ import annotations

import asyncio
import threading
from functools import cache


@cache
def agent_loop() -> asyncio.AbstractEventLoop:
    """The loop, which runs from the first time that it is asked for."""
    loop = asyncio.new_event_loop()

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()

    threading.Thread(target=work, name="agents", daemon=True).start()
    return loop
