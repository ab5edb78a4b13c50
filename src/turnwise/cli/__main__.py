"""`python -m turnwise.cli`."""

from turnwise.cli.parser import program

program()
