import threading

import numpy as np

from support.acting import byte_tokenizer, user
from turnwise.messages import Message
from turnwise.rollout.render.remembered import Remembered, size_of
from turnwise.rollout.render.renderer import Renderer


def test_what_was_computed_is_not_computed_again():
    asked = []
    remembered = Remembered(lambda text: asked.append(text) or text.upper(), max_bytes=10_000)
    assert [remembered(text) for text in ("a", "b", "a", "a")] == ["A", "B", "A", "A"]
    assert asked == ["a", "b"]


def test_the_oldest_goes_first_and_bytes_are_bounded():
    asked = []
    remembered = Remembered(lambda text: asked.append(text[0]) or len(text), max_bytes=8_000)
    for name in "abcdefghijklmnopqrst":
        remembered(name * 500)
        assert remembered.num_bytes <= 8_000
    remembered("t" * 500)
    assert asked == list("abcdefghijklmnopqrst")
    remembered("a" * 500)
    assert asked[-1] == "a"
    assert remembered.num_bytes == sum(size for _, size in remembered.results.values())


def test_a_large_result_is_not_kept_and_evicts_nothing():
    remembered = Remembered(lambda text: text, max_bytes=10_000)
    remembered("a")
    remembered("b" * 5_000)
    assert len(remembered.results) == 1


def test_sizes_are_those_of_texts_and_tokens():
    assert size_of("x" * 1000) > 1000
    assert size_of("本" * 1000) > 2000
    assert size_of(np.zeros(1000, np.int32)) >= 4000
    assert size_of((Message("user", "x" * 1000), None)) > 1000


def test_a_function_that_raises_keeps_nothing():
    remembered = Remembered(lambda number: 1 // number, max_bytes=10_000)
    for _ in range(2):
        try:
            remembered(0)
        except ZeroDivisionError:
            continue
        raise AssertionError
    assert (remembered.results, remembered.num_bytes) == ({}, 0)


def test_threads_agree():
    remembered = Remembered(lambda number: [number], max_bytes=2_000)
    wrong = []

    def work():
        wrong.extend(number for number in [*range(50)] * 20 if remembered(number) != [number])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert remembered.num_bytes == sum(size for _, size in remembered.results.values()) <= 2_000


def test_a_renderer_keeps_no_more_than_its_share(monkeypatch):
    monkeypatch.setattr("turnwise.rollout.render.renderer.MOST_KEPT", 200_000)
    renderer = Renderer(byte_tokenizer())
    for number in range(40):
        renderer.first(user(f"{number}" + "x" * 2_000))
    for kept in (renderer.whole, renderer.addition_after, renderer.treats_alike, renderer.can_show, renderer.text_of):
        assert kept.num_bytes <= 200_000
    assert 0 < len(renderer.whole.results) < 40
