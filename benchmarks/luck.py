"""How much of the reward in a guessing game is luck, exactly, for an agent that guesses at random within the bounds.

    python benchmarks/luck.py

The variance of the outcome is split: what the secret decides, which all attempts of a group share; what the first guess
decides, which is what the agent could learn from; how well that guess happens to suit that secret, which is luck; and
the guesses that follow.
"""

from __future__ import annotations

from functools import cache

import numpy as np

GAMES = ((16, 4), (31, 5), (63, 6))
"""(numbers between the bounds, guesses)"""


@cache
def success(numbers: int, guesses: int, secret: int) -> float:
    """The chance to find the secret, which is so many numbers above the lower bound."""
    if not guesses:
        return 0.0
    return sum(success_after(numbers, guesses, secret, guess) for guess in range(numbers)) / numbers


def success_after(numbers: int, guesses: int, secret: int, guess: int) -> float:
    """The chance after a first guess."""
    if guess == secret:
        return 1.0
    if secret < guess:
        return success(guess, guesses - 1, secret)
    return success(numbers - 1 - guess, guesses - 1, secret - guess - 1)


def main() -> None:
    print("numbers guesses  success   middle first   edge first   secret   first guess   luck   later guesses")
    for numbers, guesses in GAMES:
        places = range(numbers)
        table = np.array([[success_after(numbers, guesses, secret, guess) for guess in places] for secret in places])
        mean, by_guess = table.mean(), table.mean(axis=0)
        whole = mean * (1 - mean)
        of_secret, of_guess = table.mean(axis=1).var() / whole, by_guess.var() / whole
        luck = table.var() / whole - of_secret - of_guess
        print(
            f"{numbers:7} {guesses:7}  {mean:7.3f}   {by_guess[numbers // 2]:12.3f}   {by_guess[0]:10.3f}   "
            f"{of_secret:6.3f}   {of_guess:11.3f}   {luck:.3f}   {1 - of_secret - of_guess - luck:13.3f}"
        )


if __name__ == "__main__":
    main()
