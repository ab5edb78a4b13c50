"""Malformed replies for tests: hostile values, what of them stands in which field, and whole answers by kind.

All is drawn from a `random.Random`, because hypothesis would take minutes for ten thousand.
"""

import asyncio
import itertools
from collections import UserDict
from collections.abc import Mapping
from dataclasses import fields
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from support.acting import user
from turnwise.envs.base import Reply
from turnwise.envs.raised import Raised
from turnwise.messages import Message, ToolSpec

FIELDS = tuple(field.name for field in fields(Reply))
ERRORS = [ValueError, TypeError, RuntimeError, KeyError, AttributeError, RecursionError, MemoryError, OverflowError]
HOOKS = """__len__ __float__ __int__ __index__ __bool__ __eq__ __hash__ __repr__ __str__ __format__ __array__ __lt__
__contains__ __getattr__ __complex__ __call__ __add__ __radd__ __mul__ __reduce_ex__""".split()


# ---------------------------------------------------------------- values


class Unspeakable(Exception):
    """An exception that cannot be shown."""

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class Exiting(Exception):
    def __str__(self):
        raise SystemExit(4)


class Nobody(Exception):
    @property  # type: ignore[misc]
    def __class__(self):
        raise KeyError("no class")


class Panic(BaseException):
    """As extension modules raise it: no Exception."""


class Unnamed(type):
    @property
    def __name__(cls):  # type: ignore[override]
        raise RuntimeError("no name")


def hook(random):
    """A method that raises, or returns nonsense."""
    error = random.choice([*ERRORS, Unspeakable, None, None])
    nonsense = random.choice([None, -1, "x", float("nan"), True, (), NotImplemented, 10**400])

    def method(*_):
        if error is not None:
            raise error("hook")
        return nonsense

    return method


def hostile(random, base=object, *names):
    """An object of a subclass of `base` in which `names` and some other methods misbehave."""
    hooked = {name: hook(random) for name in (*names, *random.sample(HOOKS, random.randint(1, 5)))}
    if "__class__" in hooked:
        hooked["__class__"] = property(hooked["__class__"])
    return type("Hostile", (base,), hooked)()


def nested(depth):
    value: Any = "core"
    for _ in range(depth):
        value = [value]
    return value


DEEP = nested(20_000)
WITHIN_ITSELF = ["x"]
WITHIN_ITSELF.append(WITHIN_ITSELF)


def half_way(*first):
    yield from first
    raise RuntimeError("half way")


def garbage(random):
    """Anything but None, a bool, a finite number, a Message or a Reply, and nothing that iterates to nothing."""
    return random.choice(
        [
            lambda: random.choice([float("nan"), float("inf"), 10**400, -(10**400), 1j, Decimal("1.5")]),
            lambda: random.choice(["", "text", "\ud800", "x" * 10_000, b"bytes", bytearray(b"ab"), memoryview(b"ab")]),
            lambda: random.choice([np.array(1.0), np.arange(3), np.array([None]), np.datetime64(1, "D"), np.bool_(1)]),
            lambda: random.choice([object(), Reply, Message, dict, len, NotImplemented, ..., range(3), asyncio]),
            lambda: random.choice([{"role": "user", "content": "x"}, {"x": 1.0}, {1}, {"messages": []}]),
            lambda: random.choice([DEEP, WITHIN_ITSELF, [DEEP], {"x": WITHIN_ITSELF}]),
            lambda: hostile(random),
            lambda: hostile(random, object, "__iter__", "__len__"),
            lambda: hostile(random, object, "__class__"),
            lambda: hostile(random, str),
            lambda: Unnamed("Anonymous", (), {})(),
            lambda: (one for one in ("x", 3)),
            lambda: [garbage(random) for _ in range(random.randint(1, 3))],
            lambda: (garbage(random), 3),
            lambda: {"x": garbage(random)},
            lambda: lambda *_: "x",
        ]
    )()


def liar(kind, **attributes):
    """An object that says it is of a kind."""
    return type("Liar", (), {"__class__": kind, **attributes})()


# ---------------------------------------------------------------- what does not belong in a field


class LooseMessage(Message):
    """A message that skips its check."""

    __slots__ = ()

    def __post_init__(self):
        pass


def spoilt_message(name, value):
    message = Message("user", "x")
    object.__setattr__(message, name, value)
    return message


def bad_message(random):
    """No message, though some look like one."""
    part = random.choice(["role", "content"])
    return random.choice(
        [
            lambda: random.choice([None, 3, True, "user", ("user", "x"), SimpleNamespace(role="user", content="x")]),
            lambda: garbage(random),
            lambda: LooseMessage(**{"role": "user", "content": "x", part: random.choice([None, 3, b"x", ["x"]])}),
            lambda: spoilt_message(part, random.choice([None, 3, b"x", object()])),
            lambda: object.__new__(Message),
            lambda: liar(Message, **{name: getattr(Message("user", "x"), name) for name in Message.__slots__}),
        ]
    )()


def bad_messages(random):
    """No messages at all, or some with one among them that is none."""
    some = [Message("user", "on")] * random.randint(0, 2)
    return random.choice(
        [
            lambda: random.choice([3, 1.5, True, Message("user", "x"), object(), iter, itertools.count()]),
            lambda: garbage(random),
            lambda: [*some, bad_message(random)],
            lambda: (*some, bad_message(random), Message("user", "x")),
            lambda: iter([*some, bad_message(random)]),
            lambda: half_way(*some),
            lambda: np.array([*some, None], object),
            lambda: hostile(random, random.choice([list, tuple, dict]), "__iter__"),
        ]
    )()


def bad_number(random):
    lie = random.choice([float("nan"), float("inf"), None, "3", 10**400, 1j])
    return random.choice(
        [
            lambda: random.choice([None, True, False, "1", "", "nan", b"1", [1.0], {}, (), Message("user", "1")]),
            lambda: random.choice([Fraction(10**400), np.float32("nan"), np.float64("inf"), np.longdouble("1e4000")]),
            lambda: liar(float, __float__=lambda self: 1.0),
            lambda: type("Lying", (random.choice([int, float]),), {"__float__": lambda self: lie})(1),
            lambda: garbage(random),
        ]
    )()


class Sealed(Mapping):
    """A mapping that can be neither listed nor read."""

    def __iter__(self):
        raise RuntimeError("no names")

    def __len__(self):
        return 1

    def __getitem__(self, name):
        raise RuntimeError("no value")


class Listless(dict):
    def items(self):
        raise KeyError("no items")


def bad_marks(random):
    return random.choice(
        [
            lambda: random.choice([None, 3, "marks", [], (), set(), [("x", 1.0)], {("x", 1.0)}]),
            lambda: random.choice([Sealed(), Listless(x=1.0), MappingProxyType({3: 1.0}), {"x": {"y": 1.0}}]),
            lambda: SimpleNamespace(items=lambda: [("x", 1.0)], keys=lambda: ["x"], values=lambda: [1.0]),
            lambda: {"fine": 1.0, "x": bad_number(random)},
            lambda: UserDict({"x": bad_number(random)}),
            lambda: {random.choice([None, 3, 1.5, b"x", ("x",), object(), Reply]): 1.0},
            lambda: [garbage(random)],
        ]
    )()


def bad_flag(random):
    return random.choice(
        [
            lambda: random.choice([None, 0, 1, "yes", "", np.True_, np.False_, (), [], 1.0]),
            lambda: liar(bool),
            lambda: hostile(random, object, "__bool__"),
            lambda: garbage(random),
        ]
    )()


def bad_stop(random):
    bad = random.choice([None, 3, "", b"</a>", ["</a>"], object(), Message("user", "x"), True, liar(str)])
    return random.choice(
        [
            lambda: random.choice([None, 3, "", "</a>", True, object(), itertools.count()]),
            lambda: [bad],
            lambda: iter(["</a>", bad]),
            lambda: half_way("</a>"),
            lambda: hostile(random, list, "__iter__"),
            lambda: hostile(random, object, "__class__"),
        ]
    )()


class LooseTool(ToolSpec):
    """A tool that skips its check."""

    __slots__ = ()

    def __post_init__(self):
        pass


def bad_tools(random):
    fine = ToolSpec("get", "Where a name leads.")
    bad = random.choice(
        [
            lambda: random.choice([None, 3, "get", fine.schema, SimpleNamespace(name="get"), Message("user", "x")]),
            lambda: garbage(random),
            lambda: LooseTool(random.choice(["", "no name", "x" * 200, None, 3, b"get", "get\n"])),
            lambda: LooseTool("get", random.choice([None, 3, b"x", ["x"]])),
            lambda: LooseTool("get", "", random.choice([None, 3, [], {}, {"type": "object", "x": {1}}, Sealed()])),
            lambda: object.__new__(ToolSpec),
            lambda: liar(ToolSpec, name="get", description="", parameters=fine.parameters),
        ]
    )
    return random.choice(
        [
            lambda: random.choice([3, "get", True, fine, fine.schema, object(), itertools.count()]),
            lambda: [bad()],
            lambda: iter([fine, bad()]),
            lambda: (fine, fine),
            lambda: half_way(fine),
            lambda: hostile(random, list, "__iter__"),
        ]
    )()


def bad_raised(random):
    fine = Raised("KeyError", "shop.py:3", "'plum'", "Traceback ...")
    bad = random.choice(
        [
            lambda: random.choice([None, 3, "KeyError", KeyError("plum"), SimpleNamespace(kind="KeyError"), [fine]]),
            lambda: garbage(random),
            lambda: Raised("KeyError", "shop.py:3", "", random.choice([None, 3, b"x", ["x"]])),
            lambda: object.__new__(Raised),
            lambda: liar(Raised, where="", text="", traceback=""),
        ]
    )
    return random.choice(
        [
            lambda: random.choice([None, 3, "KeyError", True, fine, {"kind": "KeyError"}, object(), itertools.count()]),
            lambda: [bad()],
            lambda: iter([fine, bad()]),
            lambda: half_way(fine),
            lambda: hostile(random, list, "__iter__"),
        ]
    )()


def bad_seats(random):
    fine = Reply(user("on"))
    bad = random.choice(
        [
            lambda: random.choice([None, 3, "seat", user("on"), SimpleNamespace(seats=()), [fine]]),
            lambda: garbage(random),
            lambda: Reply(seats=(fine, fine)),
            lambda: object.__new__(Reply),
            lambda: liar(Reply, seats=(), messages=()),
        ]
    )
    return random.choice(
        [
            lambda: random.choice([None, 3, "seat", True, fine, {"seat": fine}, object(), itertools.count()]),
            lambda: [bad()],
            lambda: [fine, bad()],
            lambda: half_way(fine),
            lambda: hostile(random, list, "__iter__"),
        ]
    )()


def bad_seat_number(random):
    return random.choice(
        [
            lambda: random.choice([None, -1, 1, 2**70, True, False, 0.0, "0", np.int64(0), (), object()]),
            lambda: liar(int),
            lambda: hostile(random, object, "__index__"),
        ]
    )()


BAD = {
    "messages": lambda random: bad_messages(random) if random.random() < 0.9 else None,
    "reward": bad_number,
    "outcome": bad_number,
    "finished": bad_flag,
    "marks": bad_marks,
    "history": bad_messages,
    "stop": bad_stop,
    "tools": bad_tools,
    "raised": bad_raised,
    "seats": bad_seats,
    "moves_next": bad_seat_number,
}


# ---------------------------------------------------------------- malformed answers: functions that give or raise

EXCEPTIONS = [
    *(lambda error=error: error("x") for error in (*ERRORS, Unspeakable, Exiting, Nobody, Panic, StopAsyncIteration)),
    lambda: GeneratorExit(),
    lambda: SystemExit(0),
    lambda: SystemExit("bye"),
    lambda: asyncio.CancelledError(),
    lambda: asyncio.CancelledError("mine"),
    lambda: StopIteration(3),
    lambda: TimeoutError("database"),
    lambda: OSError(5, "disk"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    lambda: ExceptionGroup("two", [ValueError("x"), KeyError("y")]),
    lambda: BaseExceptionGroup("two", [GeneratorExit(), SystemExit(1)]),
    lambda: Exception("two\nlines and half a character \ud800"),
    lambda: Exception("x" * 100_000),
    lambda: type("Broken", (Exception,), {"__init__": lambda self: 1 / 0}),
    lambda: "no exception at all",
]


def raising(random):
    make = random.choice(EXCEPTIONS)

    def answer():
        raise make()

    def recursing():
        return recursing()

    misspelled: Any = Reply
    return random.choice([answer] * 60 + [recursing, lambda: misspelled(score=1.0), lambda: Message("user", None)])


def no_reply(random):
    made = random.choice([3, True, 1.5, "", [], {}, Message("user", "x"), Reply]) if random.random() < 0.3 else None
    made = garbage(random) if made is None else made
    return lambda: made


def lookalike(random):
    """What has all the fields of a reply and is none."""
    given = {name: getattr(Reply(user("on")), name) for name in FIELDS}
    made = random.choice(
        [lambda: SimpleNamespace(**given), lambda: given, lambda: liar(Reply, **given), lambda: MagicMock(spec=Reply)]
    )()
    return lambda: made


def spoilt_fields(random):
    """All fields of a reply, one or two of which are wrong, and the names of these."""
    wrong = random.sample(FIELDS, random.choice([1, 1, 1, 2]))
    return {**complete(), **{name: BAD[name](random) for name in wrong}}, wrong


def complete(**given):
    reply = Reply(user("on"), marks={"x": 1.0})
    return {name: given.get(name, getattr(reply, name)) for name in FIELDS}


class LooseReply(Reply):
    """A reply that skips its check."""

    __slots__ = ()

    def __post_init__(self):
        pass


def loose(random):
    given, _ = spoilt_fields(random)
    return lambda: LooseReply(**given)


def filled(kind, given):
    """A reply that was never born, only filled."""
    reply = object.__new__(kind)
    for name, value in given.items():
        object.__setattr__(reply, name, value)
    return reply


def tampered(random):
    given, wrong = spoilt_fields(random)
    if random.random() < 0.1:
        del given[wrong[0]]
    return lambda: filled(Reply, given)


def with_property(name, get, given):
    """A reply of a subclass in which a field is computed whenever it is read."""
    kind = type("Computed", (Reply,), {"__slots__": (), name: property(get)})
    return filled(kind, {other: value for other, value in given.items() if other != name})


def computed(random):
    name, error = random.choice(FIELDS), random.choice(ERRORS)
    value = BAD[name](random)

    def fail(self):
        raise error("computed")

    get = random.choice([lambda self: value, lambda self: value, fail])
    return lambda: with_property(name, get, complete())


def no_text(random):
    """Messages that no tokenizer can encode."""
    bad = Message("user", random.choice(["\ud800", "a\udfffb", "\udc80" * 9]))
    given = random.choice([{"messages": (bad,)}, {"messages": [*user("x"), bad]}, {"history": (bad,)}])
    return lambda: Reply(**given)


def awaitable(random):
    async def inner():
        return Reply(user("on"))

    async def many():
        yield Reply(user("on"))

    class Promise:
        def __await__(self):
            return inner().__await__()

    return random.choice([inner, many, Promise])


async def many_replies(*_):
    yield Reply(user("on"))


def no_method(random):
    """What stands in the place of a method and cannot be called as one."""
    reply = Reply(user("on"))
    no_methods = [None, 3, "step", many_replies, lambda: reply, lambda one, two, three: reply, object(), Reply]
    return random.choice([*no_methods, hostile(random)])


# ---------------------------------------------------------------- good values, however odd


class Role(StrEnum):
    user = "user"
    tool = "tool"


class OddMessage(Message):
    __slots__ = ()


def odd_text(random, text, *, hashable=False):
    """A string that is more than one, and is fine for all that."""
    names = ["__str__", "__repr__", "__len__", "__iter__", "encode", "__contains__", "__format__", "__reduce_ex__"]
    names += [] if hashable else ["__eq__", "__hash__"]
    return type("Text", (str,), {name: hook(random) for name in random.sample(names, 3)})(text)


def odd_number(random, number):
    """A number of another type."""

    def own(kind):
        names = ["__eq__", "__bool__", "__hash__", "__repr__", "__add__", "__radd__", "__lt__", "__abs__", "__int__"]
        return type("Amount", (kind,), {name: hook(random) for name in random.sample(names, 3)})

    kinds = [float, np.float32, np.float64, np.float16, Fraction] + [int, np.int64] * number.is_integer()
    kind = random.choice(kinds)
    return (own(kind) if kind in (float, int) and random.random() < 0.2 else kind)(number)


def odd_message(random, message):
    role = Role(message.role) if message.role in ("user", "tool") and random.random() < 0.2 else message.role
    text = odd_text(random, message.content) if random.random() < 0.1 else message.content
    return random.choice([Message, OddMessage])(role, text)
