"""The stack of a thread, as another thread reads it."""

from __future__ import annotations

import sys
import threading

from turnwise.rollout.blame import stack_of


def test_a_stack_is_read_whole_from_its_innermost_frame_on() -> None:
    found = stack_of(threading.get_ident())
    frame, walked = found[0], []
    while frame is not None:
        walked.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    assert found == walked
    assert sys._getframe() in found
    assert found[-1].f_back is None


def test_a_thread_that_has_ended_has_no_stack() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert stack_of(thread.ident or 0) == []
