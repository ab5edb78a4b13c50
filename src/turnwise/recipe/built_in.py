"""The environments that come with turnwise and the functions that a recipe chooses from, by their names."""

BUILT_IN = {
    "guess": "turnwise.envs.guess:Guess",
    "hops": "turnwise.envs.hops:Hops",
    "math": "turnwise.envs.math.env:Math",
    "search": "turnwise.envs.search.env:Search",
    "sql": "turnwise.envs.sql.env:Sql",
    "verl": "turnwise.envs.verl:Verl",
}

CHOICES = {
    "credit": (
        *("grpo", "rloo", "maxrl", "reinforce", "reinforce_pp", "reward_to_go", "turn_baseline", "gae", "gigpo"),
        *("distill", "none"),
    ),
    "filter": ("keep_all", "dynamic_sampling"),
    "loss": ("ppo_clip", "gspo", "reinforce", "cispo", "sapo", "dppo"),
    "rollout.failures.on_failure": ("drop", "pay"),
    "weighting": ("token_mean", "trajectory_mean", "group_mean", "turn_mean", "constant"),
}
"""The functions that a name chooses from, for those who must not import them; a test compares the lists."""
