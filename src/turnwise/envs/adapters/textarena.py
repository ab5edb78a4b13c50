"""textarena: text games for one player, or for two players, where the other one plays at random.

The library's default wrappers repeat the whole conversation every turn; here the model gets only the new text. The
library pays each player when the game is over. It draws from Python's global generator, so each attempt has a process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any, Literal

from turnwise.envs.adapters.adapter import Registered, user_message
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.types import Task

MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
ROLE = re.compile(r"\[(GAME|Player( \d+)?)\]")
"""How the library marks the speaker. This is not a move, although it is in square brackets."""


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
        """options: arguments of the game; they replace the registered ones. player: the number of the model's player;
        player 0 begins in most games. pays: "reward" pays the game's reward (many games pay partial rewards), "win"
        pays 1 for a win and 0 otherwise."""
        self.options = dict(options or {})
        self.player = player
        self.pays = pays

    @classmethod
    def demonstrates(cls) -> bool:
        return cls.name.startswith("GuessTheNumber-")

    def check(self) -> None:
        super().check()
        self.open(Task("check", self.name, {"seed": 0}))
        if self.players == 2:  # the opponent may begin, and its first moves must be readable
            type(self)(self.options, 1 - self.player).open(Task("check", self.name, {"seed": 0}))

    def open(self, task: Task) -> Reply:
        seed = task.data["seed"]
        self.start(seed)
        self.opponent = Random(f"{self.name}/{seed}/opponent")
        if self.let_others_play(over=False):
            raise RuntimeError(f"the other player of {self.name} ended the game before the first turn")
        return Reply(user_message(self.news()))

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
            except (AssertionError, ValueError):  # the game is not for this number of players
                continue
        else:
            raise ValueError(f"{self.name} is not for one player or two; choose another game")
        if not isinstance(game.state, (textarena.SinglePlayerState, textarena.TwoPlayerState)):
            raise ValueError(f"{self.name} is not for one player or two; choose another game")
        if not 0 <= self.player < players:
            raise ValueError(
                f"env.settings.player = {self.player}: {self.name} has {players} players; choose 0 to {players - 1}"
            )
        self.game, self.players = game, players

    def step(self, message: Message) -> Reply:
        action = message.content
        for rewriter in self.rewriters:
            action = rewriter.action(action)
        over, _ = self.game.step(action)
        if not self.let_others_play(over):
            return Reply(user_message(self.news()))
        rewards, infos = self.game.close()
        reward, info = float(rewards[self.player]), infos[self.player]
        marks = {"turns": info["turn_count"], "invalid_move": float(info["invalid_move"])}
        outcome = float(reward >= 1) if self.pays == "win" else reward
        return Reply(user_message(str(info.get("reason", ""))), outcome=outcome, finished=True, marks=marks)

    def close(self) -> None:
        return None

    def let_others_play(self, over: bool) -> bool:
        """Play the opponent's moves until it is the model's turn; return whether the game is over."""
        while not over and self.game.state.current_player_id != self.player:
            other = self.game.state.current_player_id
            _, news = self.game.get_observation()
            over, _ = self.game.step(self.choose(news))
            if over and self.game.state.game_info[other]["invalid_move"]:
                raise RuntimeError(f"the other player of {self.name}, who plays at random, made no legal move")
        return bool(over)

    def choose(self, news: list[Any]) -> str:
        """A random move among those in square brackets in the game's latest text."""
        for _, text, kind in reversed(news):
            moves = [move for move in MOVE.findall(text) if not ROLE.fullmatch(move)]
            if moves and kind.name != "PLAYER_ACTION":
                return str(self.opponent.choice(moves))
        raise ValueError(f"{self.name} names no moves in square brackets for a second player; choose another game")

    def news(self) -> str:
        """The new text since the last call, without the echo of the model's message."""
        _, observations = self.game.get_observation()
        lines = []
        for speaker, text, kind in observations:
            if speaker == self.player and kind.name == "PLAYER_ACTION":
                continue
            lines.append(text if speaker < 0 else f"Player {speaker}: {text}")
        return "\n".join(lines)

    def demonstrate(self, noise: float, random: Random) -> str:
        """Bisection; with probability `noise` a random number."""
        low, high = self.game.min_number, self.game.max_number
        if random.random() < noise:
            return f"[{random.randint(low, high)}]"
        for guess, hint in self.game.state.game_state["guess_history"]:
            low, high = (max(low, guess + 1), high) if hint == "higher" else (low, min(high, guess - 1))
        return f"[{(low + high) // 2}]"
