import pytest

from turnwise.envs.math.calculator import calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("7 / 2", "3.5"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.3333333333"),
        ("1 / 3 * 3", "1"),
        ("-4 - -7", "3"),
        ("2 ^ 10", "1024"),
        ("2 ** -1", "0.5"),
        ("7 // 2", "3"),
        ("-7 % 3", "2"),
        ("6 × 7", "42"),
        ("9 ÷ 3 − 1", "2"),
        ("round(2.567, 1)", "2.6"),
        ("round(2.5)", "2"),
        ("max(3, 4) + min(1, 2) + abs(-2)", "7"),
        ("floor(2.7) + ceil(2.1)", "5"),
        ("sqrt(16)", "4"),
        ("12345678901234567890 * 98765432109876543210", "1219326311370217952237463801111263526900"),
        ("1e3", "1000"),
    ],
)
def test_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "x",
        "1 +",
        "1, 2",
        "True",
        "'a' * 9",
        "[1]",
        "__import__('os')",
        "(1).__class__",
        "abs.__call__(1)",
        "print(1)",
        "max()",
        "max(1, key=2)",
        "abs(*[1])",
        "lambda: 1",
        "1 if 1 else 2",
        "1 < 2",
        "1 / 0",
        "0 ** -1",
        "9 ** 9 ** 9",
        "9 ** 199 ** 2",
        "10 ** 61",
        "2 ** 0.5 ** 9e9",
        "1e999",
        "1j",
        "sqrt(-1)",
        "(-8) ** 0.5",
        "round(1, 10 ** 9)",
        "round(1.5, 'a')",
        "(" * 500 + "1" + ")" * 499,
        "-" * 990 + "1",
        "1" * 1001,
        "1 << 99999999",
        "f'{1}'",
        "\0",
    ],
)
def test_anything_else_is_refused_in_a_line(expression):
    with pytest.raises(ValueError) as refused:
        calculate(expression)
    assert "\n" not in str(refused.value)
    assert str(refused.value)
