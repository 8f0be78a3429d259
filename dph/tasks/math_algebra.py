r"""What only algebra decides, by math-verify: expressions, relations, matrices, unions. It runs in a worker process.

math-verify reads expressions and compares relations and sets. Constants are compared here: exactly where both are
rational, however large, else in forty digits; math-verify takes two numbers below 1e-15 for equal. It would also strip
what it takes for a unit ("more", "c", "th"), and is told not to: units have been taken off before.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dph.tasks.math_equality import decimals, equal
from dph.tasks.math_notation import REPEATING, repeating_value
from dph.tasks.math_parts import expressions

DIGITS = 40  # in which two constants that are not rational must agree

_FUNCTIONS = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(r"(\d++(?:\.\d++)?) ?\^ ?(?:\\circ|\{ ?\\circ ?\})")
_POWER_OF_TEN = re.compile(r"(?<=\d)[eE]([-+]?\d{1,3})(?![\w.])")


def judge(job: list[str]) -> str:
    """Whether the answer is right, by algebra too; runs in a worker.

    Args:
        job: [gold, answer, match]; with the gold answer as answer, whether algebra can judge that at all.
    """
    gold, answer, match = job
    if gold == answer:
        return "right" if all(by_algebra(expression, expression) for expression in expressions(gold)) else "wrong"
    return "right" if equal(gold, answer, "value" if match == "value" else "number", by_algebra) else "wrong"


def load() -> None:
    """Imports what `judge` needs; a worker does so before its clock runs."""
    judge(["x+1", "1+x", "number"])


def by_algebra(gold: str, answer: str) -> bool:
    """Whether two expressions are equal. Raises what math-verify and SymPy raise."""
    from math_verify import verify
    from sympy import Basic

    expected, given = _parse(gold), _parse(answer)
    if all(found and isinstance(found[0], Basic) and _is_constant(found[0]) for found in (expected, given)):
        return _same_constants(expected[0], given[0])
    # The worker has a limit of its own; math-verify's uses SIGALRM.
    return bool(
        verify(
            expected,
            given,
            numeric_precision=10 * DIGITS,
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
    )


@lru_cache(maxsize=1024)
def _parse(text: str) -> list[Any]:
    """Expressions that math-verify reads in the whole of the answer, not in a part of it; units have been taken off."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    text = _POWER_OF_TEN.sub(r"\\times 10^{\1}", REPEATING.sub(_as_fraction, text))
    degrees = r"(\\frac{\1\\pi}{180})" if _FUNCTIONS.search(text) else r"\1"
    text = _DEGREES.sub(degrees, text)
    reading = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    found: list[Any] = parse(
        f"${text}$",
        [LatexExtractionConfig(normalization_config=reading)],
        extraction_mode="first_match",
        parsing_timeout=None,
        raise_on_error=True,
    )
    return found


def _as_fraction(match: re.Match[str]) -> str:
    value = repeating_value(match)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _is_constant(expression: Any) -> bool:
    return bool(getattr(expression, "is_number", False)) and not expression.is_Relational


def _same_constants(gold: Any, answer: Any) -> bool:
    """Whether two numbers of SymPy are equal: exactly where both are rational, rounded where one is a decimal."""
    from sympy import Float, nan, simplify, zoo

    first, second = gold.doit(), answer.doit()
    if first in (nan, zoo):
        raise ValueError("the gold answer has no value")
    if first == second:
        return True
    if first.is_finite is False or second.is_finite is False or second in (nan, zoo):
        return False
    if first.has(Float) or second.has(Float):
        return _same_rounded(first, second)
    if first.is_Rational and second.is_Rational:
        return False
    one, other = first.evalf(2 * DIGITS), second.evalf(2 * DIGITS)
    size = max(abs(one), abs(other))
    if abs(one - other) <= size * Fraction(1, 10**DIGITS):
        return True
    return bool(size < Fraction(1, 10**DIGITS)) and simplify(first - second) == 0


def _same_rounded(gold: Any, answer: Any) -> bool:
    value = gold.evalf(DIGITS)
    places = decimals(Fraction(str(value))) if value.is_Float and abs(value) > 1e-300 else 6
    return bool(abs(value - answer.evalf(DIGITS)) <= Fraction(1, 2 * 10**places))
