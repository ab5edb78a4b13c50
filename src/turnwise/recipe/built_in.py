"""The environments that come with turnwise, by the name that a recipe uses."""

BUILT_IN = {
    "guess": "turnwise.envs.guess:Guess",
    "hops": "turnwise.envs.hops:Hops",
    "math": "turnwise.envs.math.env:Math",
    "search": "turnwise.envs.search.env:Search",
    "sql": "turnwise.envs.sql.env:Sql",
    "verl": "turnwise.envs.verl:Verl",
}
