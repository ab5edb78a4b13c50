"""turnwise: reinforcement learning for language-model agents, one turn at a time."""

__version__ = "0.1.0"
