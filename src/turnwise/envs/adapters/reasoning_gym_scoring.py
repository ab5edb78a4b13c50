"""Scores of reasoning-gym for answers that are hostile input.

Some of the library's scorers evaluate the answer as Python (`eval`, sympy's `parse_expr`). Here an answer is data:
those scorers get functions that accept literals and plain formulas only, so that code in an answer is a wrong answer.
What is left to an answer is to be expensive (`9**9**9**9`): each one is scored in a process with little time and
memory, without most system calls.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import math
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from turnwise.envs.isolation.user_environment import limit_memory
from turnwise.envs.math.jail import MACHINES, Refused, filter_calls, libc

EVALUATING = (
    "algorithmic.binary_matrix",
    "algorithmic.number_sorting",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
"""Modules whose scorers call `eval` with literals."""
PARSING = ("games.countdown", "games.puzzle24")
"""Modules that have sympy's `parse_expr` as a name of their own."""
FORMULA = re.compile(r"[\w\s+\-*/^().,=]*", re.ASCII)
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
ATTRIBUTE = re.compile(r"[A-Za-z_)]\s*\.|\.\s*[A-Za-z_]", re.ASCII)
KNOWN = frozenset(
    "sin cos tan cot sec csc asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs pi Rational "
    "Integer Float erf Si Ci Ei li".split()
)
"""Names in a formula besides single letters: functions that compute a number from numbers, and pi."""
LONGEST = 4000
SECONDS, PATIENCE = 5, 30.0
"""CPU time and wall time that scoring an answer may take."""
MEMORY = 512
"""MiB that scoring an answer may allocate."""
DIE_WITH_PARENT, NO_NEW_PRIVILEGES = 1, 38


def read_as_data(library: str = "reasoning_gym") -> None:
    """Make the scorers of this process read answers as data. Called once, before the first attempt."""
    sympy: Any = importlib.import_module("sympy")
    for name in EVALUATING:
        vars(importlib.import_module(f"{library}.{name}"))["eval"] = ast.literal_eval
    parse = careful(sympy.parse_expr)
    sympy.parse_expr = parse
    for name in PARSING:
        vars(importlib.import_module(f"{library}.{name}"))["parse_expr"] = parse


def careful(parse: Callable[..., Any]) -> Callable[..., Any]:
    """sympy's parser for formulas; ValueError for anything else, which it would run as Python."""

    @wraps(parse)
    def parse_formula(text: str, *arguments: Any, **settings: Any) -> Any:
        if not is_formula(text):
            raise ValueError("this is no formula")
        return parse(text, *arguments, **settings)

    return parse_formula


def is_formula(text: Any) -> bool:
    """Whether a text has nothing but numbers, operators, single letters and known functions. Without quotes, brackets
    and attributes, and without the names of Python, nothing of it can be run but arithmetic."""
    if not isinstance(text, str) or len(text) > LONGEST or FORMULA.fullmatch(text) is None:
        return False
    names = NAME.findall(re.sub(r"\d[\d_]*(\.\d*)?([eE][+-]?\d+)?", "1", text))
    return ATTRIBUTE.search(text) is None and all((len(name) == 1 and name != "_") or name in KNOWN for name in names)


def score_apart(score: Callable[[], Any]) -> tuple[float, bool]:
    """(what a function returns, whether it had to be stopped), computed in a fork with limits. A score that is not a
    number from 0 to 1, an error and a process that is stopped are 0: the answer could not be read, so it is wrong."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reader)
            lock_up()
            os.write(writer, repr(plain_score(score())).encode())
        except BaseException:
            with suppress(OSError):
                os.write(writer, b"0.0")
        finally:
            os._exit(0)
    os.close(writer)
    try:
        said = read_until(reader, time.monotonic() + PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reader)
    try:
        return plain_score(float(said)), False
    except ValueError:
        return 0.0, True


def plain_score(given: Any) -> float:
    score = float(given)
    return score if math.isfinite(score) and 0.0 <= score <= 1.0 else 0.0


def read_until(reader: int, end: float) -> bytes:
    """What the other side writes before it ends; empty if it does not end in time."""
    said = b""
    while (left := end - time.monotonic()) > 0 and len(said) < 64:
        if not select.select([reader], [], [], left)[0]:
            break
        part = os.read(reader, 64)
        if not part:
            return said
        said += part
    return b""


def lock_up() -> None:
    """Limits of this process: time, memory, no new files and, where the kernel has such filters, no other programs and
    no network."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    limit_memory(MEMORY)
    if not sys.platform.startswith("linux") or os.uname().machine not in MACHINES:
        return
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if libc.prctl(NO_NEW_PRIVILEGES, ctypes.c_ulong(1), 0, 0, 0) == 0:
        with suppress(Refused):
            filter_calls()
