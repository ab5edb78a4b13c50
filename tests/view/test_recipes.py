from turnwise.view.recipes import flattened


def test_every_leaf_has_a_key():
    config = {"a": 1, "b": {"c": [1, 2], "d": {}}, "env": [{"name": "x", "tasks": {"n": 1}}, {"name": "y"}], "e": None}
    assert dict(flattened(config)) == {
        "a": "1",
        "b.c": "[1, 2]",
        "b.d": "{}",
        "env[0].name": '"x"',
        "env[0].tasks.n": "1",
        "env[1].name": '"y"',
        "e": "null",
    }
    assert dict(flattened({})) == {}
