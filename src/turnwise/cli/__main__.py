"""`python -m turnwise.cli`."""

from turnwise.cli.commands import program

program()
