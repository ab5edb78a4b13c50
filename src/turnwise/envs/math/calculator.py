"""A calculator: the value of an arithmetic expression, within limits. It evaluates no other Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

LONGEST = 1000
"""The longest expression, in characters."""
LARGEST = 10**60
"""The largest integer, numerator or denominator."""

Number = Fraction | float
OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def rounded(value: Number, digits: Number = Fraction(0)) -> Any:
    if abs(float(digits)) > 20:
        raise ValueError("a calculator has at most 20 digits behind the point")
    return round(value, int(digits))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "ceil": math.ceil, "floor": math.floor, "max": max, "min": min, "round": rounded, "sqrt": math.sqrt,
}  # fmt: skip


def calculate(expression: str) -> str:
    """The value of an expression such as "3 * (4 + 5) / 2". It is exact if the expression has no roots."""
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    plain = expression.replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**").strip()
    try:
        tree = ast.parse(plain, mode="eval")
        return number_text(value_of(tree.body))
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is no arithmetic expression; write one like 3 * (4 + 5) / 2") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (OverflowError, TypeError) as error:
        raise ValueError(f"this has no value that a calculator shows: {error}") from None


def value_of(node: ast.AST) -> Number:
    """The value of a part of an expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and type(node.value) is not bool:
        return bounded(Fraction(str(node.value)) if math.isfinite(node.value) else node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = value_of(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = value_of(node.left), value_of(node.right)
        if isinstance(node.op, ast.Pow):
            return power(left, right)
        if type(node.op) in OPERATORS:
            return bounded(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in FUNCTIONS:
            return bounded(FUNCTIONS[node.func.id](*map(value_of, node.args)))
        raise ValueError(f"the calculator knows the functions {', '.join(FUNCTIONS)}")
    raise ValueError("the calculator knows numbers, + - * / // % **, brackets and a few functions")


def power(base: Number, exponent: Number) -> Number:
    if abs(float(exponent)) > 200:
        raise ValueError("the power is too large")
    is_integer = isinstance(exponent, Fraction) and exponent.denominator == 1
    value = base ** int(exponent) if is_integer else float(base) ** float(exponent)
    if isinstance(value, complex):
        raise ValueError("the root of a negative number is no number here")
    return bounded(value)


def bounded(value: Any) -> Number:
    """The value; ValueError if it is too large."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("the number is too large")
        return value
    fraction = Fraction(value)
    if abs(fraction.numerator) > LARGEST or fraction.denominator > LARGEST:
        raise ValueError("the number is too large")
    return fraction


def number_text(value: Number) -> str:
    """A number in the usual notation: an integer, or up to ten digits after the decimal point."""
    if isinstance(value, Fraction) and value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10f}".rstrip("0").rstrip(".") if abs(float(value)) < 1e15 else f"{float(value):.10g}"
