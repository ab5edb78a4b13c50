"""textarena: games in text, for one player, or for two of whom the other one plays at random.

The library's default wrappers repeat the whole conversation every turn; here the model hears what is new. It pays when
the game is over, player by player. It draws from Python's global generator, so attempts have processes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any, Literal

from turnwise.envs.adapters.adapter import Registered, heard
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.types import Task

MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
ROLE = re.compile(r"\[(GAME|Player( \d+)?)\]")
"""How the library marks who speaks, which is no move."""


class TextArena(Registered):
    """A game.

    Example:
        user: You are playing Guess The Number...     assistant: [10]
        user: The target number is lower.             assistant: [5]      -> outcome 1
    """

    library = "textarena"
    example = "textarena:GuessTheNumber-v0"

    def __init__(
        self, options: Mapping[str, Any] | None = None, player: int = 0, pays: Literal["reward", "win"] = "reward"
    ) -> None:
        """options: arguments of the game, in place of those it is registered with. player: which of two the model is;
        player 0 begins in most games. pays: what the game does, which for many is a little less for a near miss, or 1
        for a game that was won and 0 otherwise."""
        self.options = dict(options or {})
        self.player = player
        self.pays = pays

    @classmethod
    def demonstrates(cls) -> bool:
        return cls.name.startswith("GuessTheNumber-")

    def check(self) -> None:
        super().check()
        self.open(Task("check", self.name, {"seed": 0}))
        if self.players == 2:  # whoever begins, the other one's first move must be readable
            type(self)(self.options, 1 - self.player).open(Task("check", self.name, {"seed": 0}))

    def open(self, task: Task) -> Reply:
        seed = task.data["seed"]
        self.start(seed)
        self.opponent = Random(f"{self.name}/{seed}/opponent")
        if self.let_others_play(over=False):
            raise RuntimeError(f"the other player of {self.name} ended the game before the first turn")
        return Reply(heard(self.news()))

    def start(self, seed: int) -> None:
        """Make the game without the wrappers that repeat observations, and keep those that rewrite actions."""
        import textarena

        for players in (1, 2):
            game = textarena.make(self.name, **self.options)
            self.rewriters = []
            while isinstance(game, textarena.Wrapper):
                if isinstance(game, textarena.core.ActionWrapper):
                    self.rewriters.append(game)
                game = game.env
            try:
                game.reset(num_players=players, seed=seed)
                break
            except (AssertionError, ValueError):  # how games refuse a number of players
                continue
        else:
            raise ValueError(f"{self.name} is not for one player or two; choose another game")
        if not isinstance(game.state, (textarena.SinglePlayerState, textarena.TwoPlayerState)):
            raise ValueError(f"{self.name} is not for one player or two; choose another game")
        if not 0 <= self.player < players:
            raise ValueError(f"env.settings.player = {self.player}: {self.name} has {players} of them, from 0")
        self.game, self.players = game, players

    def step(self, message: Message) -> Reply:
        action = message.content
        for rewriter in self.rewriters:
            action = rewriter.action(action)
        over, _ = self.game.step(action)
        if not self.let_others_play(over):
            return Reply(heard(self.news()))
        rewards, about = self.game.close()
        reward, mine = float(rewards[self.player]), about[self.player]
        marks = {"turns": mine["turn_count"], "invalid_move": float(mine["invalid_move"])}
        outcome = float(reward >= 1) if self.pays == "win" else reward
        return Reply(heard(str(mine.get("reason", ""))), outcome=outcome, finished=True, marks=marks)

    def close(self) -> None:
        return None

    def let_others_play(self, over: bool) -> bool:
        """Moves of the other player until it is the model's turn; whether the game is over."""
        while not over and self.game.state.current_player_id != self.player:
            other = self.game.state.current_player_id
            _, news = self.game.get_observation()
            over, _ = self.game.step(self.choose(news))
            if over and self.game.state.game_info[other]["invalid_move"]:
                raise RuntimeError(f"the other player of {self.name}, who plays at random, made no legal move")
        return bool(over)

    def choose(self, news: list[Any]) -> str:
        """One of the moves in square brackets that the game has named last."""
        for _, text, kind in reversed(news):
            moves = [move for move in MOVE.findall(text) if not ROLE.fullmatch(move)]
            if moves and kind.name != "PLAYER_ACTION":
                return str(self.opponent.choice(moves))
        raise ValueError(f"{self.name} names no moves in square brackets for a second player; choose another game")

    def news(self) -> str:
        """What the model has not heard yet, without the echo of its own words."""
        _, observations = self.game.get_observation()
        lines = []
        for speaker, text, kind in observations:
            if speaker == self.player and kind.name == "PLAYER_ACTION":
                continue
            lines.append(text if speaker < 0 else f"Player {speaker}: {text}")
        return "\n".join(lines)

    def demonstrate(self, noise: float, random: Random) -> str:
        """Bisection; with probability `noise` any number."""
        low, high = self.game.min_number, self.game.max_number
        if random.random() < noise:
            return f"[{random.randint(low, high)}]"
        for guess, hint in self.game.state.game_state["guess_history"]:
            low, high = (max(low, guess + 1), high) if hint == "higher" else (low, min(high, guess - 1))
        return f"[{(low + high) // 2}]"
