"""Slots for calls to a server: so many are under way at once, and the others wait in their order."""

from __future__ import annotations

import asyncio
from collections import deque


class CallSlots:
    """A call asks with a future of its own, by which it can be given up while it waits.

    Example:
        admitted = loop.create_future()
        if await slots.allocate(admitted):
            try: ...
            finally: slots.release()
    """

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots
        self.waiting: deque[asyncio.Future[bool]] = deque()

    async def allocate(self, admitted: asyncio.Future[bool]) -> bool:
        """Wait for a slot; False where the call was given up first."""
        if self.num_free and not self.waiting:
            self.num_free -= 1
            return True
        self.waiting.append(admitted)
        try:
            return await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled() and admitted.result():
                self.release()
            raise

    def release(self) -> None:
        """Give a slot to the next waiting call."""
        while self.waiting:
            admitted = self.waiting.popleft()
            if not admitted.done():
                admitted.set_result(True)
                return
        self.num_free += 1

    def give_up(self, admitted: asyncio.Future[bool]) -> None:
        """Let a call that waits go without a slot."""
        if admitted in self.waiting and not admitted.done():
            admitted.set_result(False)
