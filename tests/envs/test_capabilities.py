"""What a class of environments offers is asked in one place."""

from typing import ClassVar

import pytest

from turnwise.envs import capabilities
from turnwise.envs.hops import Hops
from turnwise.types import Task


class Bare:
    """An environment that offers nothing."""


class Full:
    """An environment that offers everything."""

    task_fields: ClassVar = {"question": str}
    reads_calls = True
    idempotent = True
    costs_process = True

    @classmethod
    def tasks(cls, split, seed):
        return [Task("t", "full")]

    @classmethod
    def check_settings(cls, **settings):
        if "wrong" in settings:
            raise ValueError("no wrong")

    @classmethod
    def agent_for(cls, **settings):
        return lambda task: "answer"

    @classmethod
    def step_many(cls, environments, messages):
        return []

    @classmethod
    def close_many(cls, environments):
        return []

    def demonstrate(self, noise, random):
        return "expert"


QUESTIONS = [
    capabilities.makes_tasks,
    capabilities.can_demonstrate,
    capabilities.reads_calls,
    capabilities.brings_agent,
    capabilities.steps_many,
    capabilities.closes_many,
    capabilities.is_batchable,
    capabilities.is_idempotent,
    capabilities.costs_process,
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.__name__)
def test_a_class_offers_what_it_has_and_nothing_else(question):
    assert question(Full)
    assert not question(Bare)


@pytest.mark.parametrize("name", ["idempotent", "costs_process", "reads_calls"])
def test_a_flag_that_is_false_offers_nothing(name):
    kind = type("Kind", (), {name: False})
    assert not capabilities.is_idempotent(kind)
    assert not capabilities.costs_process(kind)
    assert not capabilities.reads_calls(kind)


@pytest.mark.parametrize("name", ["tasks", "demonstrate", "agent_for", "step_many", "close_many"])
def test_a_method_that_is_none_offers_nothing(name):
    kind = type("Kind", (Full,), {name: None})
    asks = {
        "tasks": capabilities.makes_tasks,
        "demonstrate": capabilities.can_demonstrate,
        "agent_for": capabilities.brings_agent,
        "step_many": capabilities.steps_many,
        "close_many": capabilities.closes_many,
    }
    assert not asks[name](kind)


def test_fields_and_settings():
    assert capabilities.task_fields_of(Full) == {"question": str}
    assert capabilities.task_fields_of(Bare) == {}
    capabilities.check_settings(Bare, {"wrong": 1})
    capabilities.check_settings(Full, {"right": 1})
    with pytest.raises(ValueError, match="no wrong"):
        capabilities.check_settings(Full, {"wrong": 1})


def test_an_environment_is_asked_like_its_class():
    assert capabilities.can_demonstrate(Hops())
    assert capabilities.can_demonstrate(Hops)


def test_the_table_names_every_protocol():
    protocols = [name for name, value in vars(capabilities).items() if getattr(value, "_is_runtime_protocol", False)]
    assert len(protocols) == 12
    assert [name for name in protocols if f" {name} " not in (capabilities.__doc__ or "")] == []
