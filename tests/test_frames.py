import asyncio
import socket
import threading

import pytest

from turnwise.frames import HEAD, framed, length_of, receive_exactly, receive_exactly_async

LARGE = bytes(range(256)) * 20_000


def in_thread(line, body):
    def send():
        with line:
            line.sendall(body)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("body", [b"", b"x", LARGE])
def test_a_frame_arrives_as_it_was_sent(body):
    here, there = socket.socketpair()
    with here:
        thread = in_thread(there, framed(body) + framed(b"next"))
        assert receive_exactly(here, length_of(receive_exactly(here, HEAD))) == body
        assert receive_exactly(here, length_of(receive_exactly(here, HEAD))) == b"next"
        thread.join()


@pytest.mark.parametrize("body", [b"", b"x", LARGE])
def test_a_frame_arrives_in_an_event_loop(body):
    async def receive():
        return await receive_exactly_async(here, length_of(await receive_exactly_async(here, HEAD)))

    here, there = socket.socketpair()
    with here:
        here.setblocking(False)
        thread = in_thread(there, framed(body))
        assert asyncio.run(receive()) == body
        thread.join()


def test_a_side_that_has_gone_is_the_end():
    here, there = socket.socketpair()
    with here:
        in_thread(there, framed(b"whole")[:-1]).join()
        size = length_of(receive_exactly(here, HEAD))
        with pytest.raises(EOFError):
            receive_exactly(here, size)


def test_an_impossible_length_is_refused():
    head = framed(LARGE)[:HEAD]
    assert length_of(head) == length_of(head, len(LARGE)) == len(LARGE)
    with pytest.raises(ValueError, match="longer than any that is sent"):
        length_of(head, len(LARGE) - 1)
