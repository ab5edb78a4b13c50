"""Ranks that stop without ending: nobody closes their connection, and only missing signs of life tell."""

import multiprocessing
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from turnwise.cluster import life
from turnwise.cluster.life import BEAT, BeatingLine, Silence
from turnwise.cluster.mesh import MeshShape
from turnwise.cluster.processes import ProcessRanks
from turnwise.schedule.stopping import LearnerLost


@pytest.fixture
def clock(monkeypatch):
    """A clock that somebody turns."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def looks(clock, silence, times, heard, seconds=1.0):
    """What a number of looks finds, some seconds apart."""
    found = []
    for _ in range(times):
        clock[0] += seconds
        found.append(silence.look(heard, [0, 1]))
    return found


def test_a_silent_rank_is_found_after_the_limit_and_others_never(clock):
    assert looks(clock, Silence(10.0, [0, 1]), 11, heard=[0]) == [None] * 10 + [1]


def test_a_sign_of_life_begins_a_new_count(clock):
    silence = Silence(10.0, [0, 1])
    assert looks(clock, silence, 9, heard=[0]) == [None] * 9
    assert looks(clock, silence, 1, heard=[1]) == [None]
    assert looks(clock, silence, 10, heard=[0]) == [None] * 10
    assert looks(clock, silence, 1, heard=[0]) == [1]


def test_a_rank_counts_from_its_first_sign_on(clock):
    silence = Silence(10.0, [])
    assert looks(clock, silence, 1000, heard=[0]) == [None] * 1000
    looks(clock, silence, 1, heard=[1])
    assert looks(clock, silence, 11, heard=[0])[-1] == 1


def test_time_in_which_the_run_itself_was_stopped_does_not_count(clock):
    assert looks(clock, Silence(10.0, [0, 1]), 5, heard=[], seconds=3600.0) == [None] * 5


def test_a_line_says_that_it_lives_between_answers(monkeypatch):
    monkeypatch.setattr(life, "TICK", 0.001)
    ours, theirs = socket.socketpair()
    line = multiprocessing.connection.Connection(ours.detach())
    beating = BeatingLine(theirs.detach())
    assert [line.recv() for _ in range(3)] == [BEAT] * 3
    sender = threading.Thread(target=beating.send, args=(np.zeros(1 << 20),))  # larger than the socket holds
    sender.start()
    time.sleep(0.05)
    said = [line.recv() for _ in range(200)]
    sender.join()
    assert sum(one is not BEAT for one in said) == 1
    line.close()
    beating.close()


@pytest.mark.parametrize("act", [lambda line: line.recv(), lambda line: line.send(np.zeros(1 << 20))])
def test_a_line_has_ended_where_the_other_end_was_closed_with_signs_of_life_unread(monkeypatch, act):
    monkeypatch.setattr(life, "TICK", 0.001)
    ours, theirs = socket.socketpair()
    beating = BeatingLine(theirs.detach())
    ours.recv(1, socket.MSG_PEEK)  # now there is one
    ours.close()
    with pytest.raises(EOFError):
        act(beating)
    beating.close()


class Stops:
    """Makes no learner: stops its process, as a debugger or a machine out of memory does."""

    def __init__(self, rank):
        self.rank = rank

    def __call__(self, spread):
        import torch.distributed as dist

        if dist.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        return spread


@pytest.mark.slow
def test_a_stopped_rank_ends_the_learner_and_leaves_no_process():
    with pytest.raises(LearnerLost, match=r"rank 1 of the learner failed: .* no sign of life for 5 s"):
        ProcessRanks(MeshShape(fsdp=2), Stops(1), answer_seconds=5.0)
