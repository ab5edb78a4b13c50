import gc
import weakref

from turnwise.schedule.garbage import collecting_only_new


class Node:
    def __init__(self):
        self.itself = self


def test_only_what_is_new_is_collected_and_later_everything():
    old = Node()
    there = weakref.ref(old)
    with collecting_only_new():
        new = weakref.ref(Node())
        del old
        gc.collect()
        assert new() is None
        assert there() is not None
    gc.collect()
    assert there() is None
    assert gc.get_freeze_count() == 0


def test_what_is_left_out_is_that_of_a_process():
    before = len(gc.get_objects())
    with collecting_only_new():
        assert len(gc.get_objects()) < before / 10
