"""Legal moves of a textarena game, found by trying: the library has no list of them.

Games name moves in square brackets, at least as examples (`[0 3]`). Candidates are those texts and others of the same
shape. A candidate is legal if a copy of the game accepts it.
"""

from __future__ import annotations

import copy
import pickle
import random as global_random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from random import Random
from string import ascii_uppercase
from typing import Any

MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
ROLE = re.compile(r"\[(GAME|Player( \d+)?)\]")
"""How the library marks the speaker. This is not a move, although it is in square brackets."""
SLOT = re.compile(r"\d+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
"""A part of a move that may vary: a number, or a letter by itself."""
NUMBERS = {1: 31, 2: 10, 3: 6, 4: 4}
"""How many numbers, from 0 on, each part of a move is tried with, by how many parts vary."""
LETTERS = {1: 26, 2: 10, 3: 6, 4: 4}


def named_moves(text: str) -> list[str]:
    """The texts in square brackets that may be moves."""
    return [move for move in MOVE.findall(text) if not ROLE.fullmatch(move)]


def candidates(named: Iterable[str]) -> list[str]:
    """The named texts, and all texts of the same shape with other small numbers or letters, each once."""
    found: dict[str, None] = {}
    shapes: dict[str, None] = {}
    for move in named:
        found[move] = None
        shapes[SLOT.sub(lambda part: "0" if part[0].isdigit() else "a" if part[0].islower() else "A", move)] = None
    for shape in shapes:
        found.update(dict.fromkeys(of_shape(shape)))
    return list(found)


def of_shape(shape: str) -> Iterator[str]:
    slots = SLOT.findall(shape)
    if not 0 < len(slots) <= max(NUMBERS):
        return
    pieces = SLOT.split(shape)
    count = len(slots)
    choices = [values_of(slot, count) for slot in slots]
    for values in product(*choices):
        yield pieces[0] + "".join(value + piece for value, piece in zip(values, pieces[1:], strict=True))


def values_of(slot: str, count: int) -> Sequence[str]:
    if slot.isdigit():
        return [str(number) for number in range(NUMBERS[count])]
    letters = ascii_uppercase[: LETTERS[count]]
    return letters.lower() if slot.islower() else letters


def copies_of(game: Any) -> Callable[[], Any]:
    """Makes copies of a game as it is now. Pickle is much faster than deepcopy, but not every game can be pickled."""
    try:
        packed = pickle.dumps(game)
    except Exception:
        return lambda: copy.deepcopy(game)
    return lambda: pickle.loads(packed)


def is_legal(trial: Any, move: str) -> bool:
    """Whether the player whose turn it is may make the move, tried on a copy of a game."""
    trial.state.error_allowance = 0
    player = trial.state.current_player_id
    try:
        trial.step(move)
    except Exception:  # a game that breaks on a move does not take it
        return False
    return not trial.state.game_info[player]["invalid_move"]


def random_legal(game: Any, named: Iterable[str], random: Random) -> str:
    """A legal move, each candidate as likely as the others; empty if no candidate is legal. Neither the game nor the
    global generator changes."""
    moves, copied = candidates(named), copies_of(game)
    random.shuffle(moves)
    state = global_random.getstate()
    try:
        return next((move for move in moves if is_legal(copied(), move)), "")
    finally:
        global_random.setstate(state)
