"""textarena: text games for one player, or for two players, where `opponent` says who the other one is.

The library's default wrappers repeat the whole conversation every turn; here the model gets only the new text. The
library pays each player when the game is over. It draws from Python's global generator, so each attempt has a process.

In a game in which a model plays both sides (`opponent` is "self" or "frozen"), a reply says what each seat hears, and
whose turn it is. Held-out attempts have one seat, and their opponent is `evaluation_opponent`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from random import Random
from typing import Any, Literal

from turnwise.envs.adapters.adapter import Registered, user_message
from turnwise.envs.adapters.textarena_moves import named_moves, random_legal
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.types import Task

OPENINGS = 20
"""How many openings of a task are tried before one leaves the model a turn."""
CHECKED_MOVES = 200
"""Moves after which the start-up check leaves a game."""


class TextArena(Registered):
    """A game.

    Example:
        user: You are playing Guess The Number...     assistant: [10]
        user: The target number is lower.             assistant: [5]      -> outcome 1
    """

    library = "textarena"
    example = "textarena:GuessTheNumber-v0"

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        player: int | Literal["alternate"] = 0,
        pays: Literal["reward", "win"] = "reward",
        opponent: str = "random",
        evaluation_opponent: str = "random",
        opening: int = 0,
        view: Literal["all", "board"] = "all",
    ) -> None:
        """options: arguments of the game; they replace the registered ones. player: the number of the model's player;
        player 0 begins in most games, and "alternate" lets the task decide. pays: "reward" pays the game's reward (many
        games pay partial rewards), "win" pays 1 for a win and 0 otherwise.

        opponent: "random" makes legal moves at random; "module:function" is called with the new text, the player's
        number and a random generator, and returns a move; "self" is the policy itself, and the turns of both sides
        train; "frozen" is the model that training started from, "frozen:FOLDER" the one of a checkpoint.
        evaluation_opponent: the same for held-out attempts, "random" or "module:function". opening: how many random
        legal moves are made before the first turn, so that tasks differ. view: "all" shows all new text, "board" only
        the board as it is now."""
        self.options = dict(options or {})
        self.player = player
        self.pays = pays
        self.opponent = opponent
        self.opening = opening
        self.view = view
        self.evaluation_opponent = evaluation_opponent

    # ---------------------------------------------------------------- what the class says of its settings

    @classmethod
    def demonstrates(cls) -> bool:
        return True

    @classmethod
    def models(cls, **settings: Any) -> tuple[str, ...]:
        """Which model plays each seat."""
        opponent = settings.get("opponent", "random")
        if opponent != "self" and opponent.partition(":")[0] != "frozen":
            return ("policy",)
        other = "policy" if opponent == "self" else opponent
        if settings.get("player", 0) == "alternate" and other != "policy":
            raise ValueError('env.settings.player = "alternate" does not go with a frozen opponent; choose 0 or 1')
        return (other, "policy") if settings.get("player", 0) == 1 else ("policy", other)

    @classmethod
    def heldout_settings(cls, **settings: Any) -> dict[str, Any]:
        """The settings of held-out attempts and of demonstrations: one seat, against a named opponent."""
        named = settings.get("evaluation_opponent", "random")
        if named != "random" and (":" not in named or named.startswith("frozen:")):
            raise ValueError(
                f'env.settings.evaluation_opponent = "{named}": write "random", or "module:function" for your own'
            )
        return {**settings, "opponent": named}

    def check(self) -> None:
        """Play whole games, from each side: the opponent must have moves in every position that it meets."""
        super().check()
        if self.opponent not in ("random", "self", "frozen") and ":" not in self.opponent:
            raise ValueError(
                f'env.settings.opponent = "{self.opponent}": write "random", "self", "frozen", "frozen:FOLDER" or '
                '"module:function"'
            )
        if self.opening < 0:
            raise ValueError(f"env.settings.opening = {self.opening}: write 0 or more")
        self.start(0)
        if self.players == 1:
            if self.opponent != "random":
                raise ValueError(f"env.settings.opponent would be ignored: {self.name} is for one player; remove it")
            self.open(Task("check", self.name, {"seed": 0}))
            return
        if self.has_seats:
            self.open(Task("check", self.name, {"seed": 0}))
            return  # models play; whether there are legal moves to be found is the opponent's of held-out attempts
        for seed, player in ((0, 0), (1, 1)):
            one = type(self)(self.options, player, self.pays, self.opponent, "random", self.opening, self.view)
            one.play_through(seed)

    def play_through(self, seed: int) -> None:
        """A game in which the model's side plays at random too."""
        reply = self.open(Task("check", self.name, {"seed": seed}))
        random, moves = Random(seed), 0
        while not reply.finished and moves < CHECKED_MOVES:
            reply, moves = self.step(Message("assistant", self.demonstrate(0.0, random))), moves + 1

    # ---------------------------------------------------------------- an attempt

    @property
    def has_seats(self) -> bool:
        return self.opponent == "self" or self.opponent.partition(":")[0] == "frozen"

    def open(self, task: Task) -> Reply:
        seed = task.data["seed"]
        self.scripted = None if self.opponent == "random" or self.has_seats else function_of(self.opponent)
        for again in range(OPENINGS):
            self.start(seed)
            self.seat = self.player if isinstance(self.player, int) else seed % self.players
            self.random = Random(f"{self.name}/{seed}/opponent/{again}")
            if self.comes_to_first_turn():
                return self.answer()
        raise ValueError(
            f"{self.name} was over before the first turn in {OPENINGS} openings; lower env.settings.opening, or choose "
            "another opponent"
        )

    def comes_to_first_turn(self) -> bool:
        """Play the opening and the opponent's first moves; return whether the game goes on."""
        for _ in range(self.opening):
            self.hear(self.game.state.current_player_id)
            if self.game.step(self.random_move())[0]:
                return False
        return self.has_seats or not self.let_others_play(over=False)

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
        if isinstance(self.player, int) and not 0 <= self.player < players:
            raise ValueError(
                f"env.settings.player = {self.player}: {self.name} has {players} players; choose 0 to {players - 1}"
            )
        self.game, self.players = game, players
        self.named: list[dict[str, None]] = [{} for _ in range(players)]
        """Texts in square brackets that each player has read."""
        self.boards = [""] * players

    def step(self, message: Message) -> Reply:
        action = message.content
        for rewriter in self.rewriters:
            action = rewriter.action(action)
        over, _ = self.game.step(action)
        if over if self.has_seats else self.let_others_play(over):
            return self.result()
        return self.answer()

    def close(self) -> None:
        return None

    def answer(self) -> Reply:
        """What the player hears whose turn it is."""
        moves_next = self.game.state.current_player_id
        heard = self.hear(moves_next)
        reply = (
            Reply(user_message(heard)) if self.view == "all" else Reply((shown := user_message(heard)), history=shown)
        )
        if not self.has_seats:
            return reply
        return Reply(seats=tuple(reply if seat == moves_next else Reply() for seat in range(2)), moves_next=moves_next)

    def result(self) -> Reply:
        """The end of the game, with the outcome of each seat."""
        rewards, infos = self.game.close()
        if not self.has_seats:
            return self.result_of(self.seat, rewards, infos)
        seats = tuple(self.result_of(seat, rewards, infos) for seat in range(2))
        return Reply(seats=seats, finished=True)

    def result_of(self, seat: int, rewards: Mapping[int, float], infos: Mapping[int, Mapping[str, Any]]) -> Reply:
        reward, info = float(rewards[seat]), infos[seat]
        marks = {"turns": info["turn_count"], "invalid_move": float(info["invalid_move"])}
        if self.players == 2:
            marks |= {"player": float(seat), "won": float(reward >= 1), "drawn": float(reward == 0)}
        outcome = float(reward >= 1) if self.pays == "win" else reward
        return Reply(user_message(str(info.get("reason", ""))), outcome=outcome, finished=True, marks=marks)

    def let_others_play(self, over: bool) -> bool:
        """Play the opponent's moves until it is the model's turn; return whether the game is over."""
        while not over and self.game.state.current_player_id != self.seat:
            other = self.game.state.current_player_id
            heard = self.hear(other)
            move = self.random_move() if self.scripted is None else str(self.scripted(heard, other, self.random))
            over, _ = self.game.step(move)
            if over and self.game.state.game_info[other]["invalid_move"]:
                raise RuntimeError(f'the opponent of {self.name} ("{self.opponent}") made no legal move: {move[:80]}')
        return bool(over)

    def random_move(self) -> str:
        """A random legal move of the player whose turn it is."""
        player = self.game.state.current_player_id
        if move := random_legal(self.game, self.named[player], self.random):
            return move
        raise ValueError(
            f"{self.name} names no legal moves in square brackets for a player that plays at random; choose another "
            'game, or "module:function" as the opponent'
        )

    def hear(self, player: int) -> str:
        """The new text for the player whose turn it is, without the echo of its own message."""
        _, observations = self.game.get_observation()
        lines, asides = [], []
        for speaker, text, kind in observations:
            if speaker == player and kind.name == "PLAYER_ACTION":
                continue
            if kind.name != "PLAYER_ACTION":
                self.named[player] |= dict.fromkeys(named_moves(text))
            lines.append(text if speaker < 0 else f"Player {speaker}: {text}")
            if kind.name == "GAME_BOARD":
                self.boards[player] = text
            elif kind.name == "GAME_ADMIN":
                asides.append(text)
        if self.view == "all":
            return "\n".join(lines)
        if not self.boards[player]:
            raise ValueError(f'env.settings.view = "board": {self.name} shows no board; use view = "all"')
        return "\n".join([f"Player {player}", self.boards[player], *asides])

    def demonstrate(self, noise: float, random: Random) -> str:
        """A random legal move; in GuessTheNumber bisection, and with probability `noise` a random number."""
        if not self.name.startswith("GuessTheNumber-"):
            player = self.game.state.current_player_id
            return random_legal(self.game, self.named[player], random)
        low, high = self.game.min_number, self.game.max_number
        if random.random() < noise:
            return f"[{random.randint(low, high)}]"
        for guess, hint in self.game.state.game_state["guess_history"]:
            low, high = (max(low, guess + 1), high) if hint == "higher" else (low, min(high, guess - 1))
        return f"[{(low + high) // 2}]"


def function_of(name: str) -> Any:
    """The function that a recipe names as an opponent."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f'env.settings.opponent = "{name}": {error}; is the module on PYTHONPATH?') from None
