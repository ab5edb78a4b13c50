"""A connection that is closed while a call is under way."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.engines.remote.connection import Connection, ServerFailure

pytest.importorskip("aiohttp")


async def asking(connection: Connection) -> asyncio.Task[object]:
    """A call that waits for the address of its server, for ever."""
    looked_up = asyncio.Event()

    async def look_up(*_: object, **__: object) -> object:
        looked_up.set()
        return await asyncio.get_running_loop().create_future()

    setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)  # noqa: B010
    await connection.open()
    call = asyncio.create_task(connection.get("health"))
    await looked_up.wait()
    return call


def test_a_call_whose_connection_is_closed_fails_and_nobody_is_cancelled() -> None:
    async def scene() -> None:
        connection = Connection("http://server:1")
        call = await asking(connection)
        await connection.close()
        with pytest.raises(ServerFailure, match="http://server:1 is not connected any more"):
            await call

    asyncio.run(asyncio.wait_for(scene(), 60.0))


def test_a_call_that_is_cancelled_is_cancelled() -> None:
    async def scene() -> None:
        connection = Connection("http://server:1")
        call = await asking(connection)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await connection.close()

    asyncio.run(asyncio.wait_for(scene(), 60.0))
