r"""Whether an answer is right: `equal` takes it apart, and algebra (math_algebra.py) decides what is left.

In this order, the gold answer's kind decides what the answer has to be:
- equal texts are equal answers;
- words (`read_words`) want the same words, whatever a product of letters they make;
- digits in a base want the same digits, and the same base or none;
- a number wants a number: exactly equal, or, where one of them is a rounded decimal and the other no finite one, equal
  in six decimals (six significant digits below 1). Of two units one may be missing; two must be the same;
- a list, set, tuple or interval wants as many parts: of a list in any order, of a tuple in its own;
- an assignment (x = 5) may stand for its value on either side; of an equation's sides the last is the answer, and
  those before it without a variable must be equal to it;
- the rest is an expression, a relation, a matrix, a union: algebra's, in a worker process (workers.py).
With math_match = "number" no answer may leave more to compute than the gold answer does (math_computed.py): neither
48+48/2 nor \frac{144}{2} is 72. With "value" they are.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

from dph.tasks.math_computed import is_computed
from dph.tasks.math_notation import (
    Number,
    clean,
    plain,
    read_based,
    read_quantity,
    read_words,
    split_modulus,
)
from dph.tasks.math_parts import Parts, is_closed, is_name, is_relation, sides, split_parts, split_unit

Match = Literal["number", "value"]
Algebra = Callable[[str, str], bool | None]

LONGEST = 2000  # characters of an answer that is read; no gold answer of the known sets has 300


def quick(gold: str, answer: str, match: Match = "number") -> bool | None:
    """Whether the answer is right, where that takes no algebra; None where it does."""
    return equal(gold, answer, match, lambda _gold, _answer: None)


def equal(gold: str, answer: str, match: Match, algebra: Algebra) -> bool | None:
    """Whether the answer is right (see the file's head).

    Args:
        gold, answer: as they stand in a data set and in a box.
        match: number, or value: [data] math_match.
        algebra: whether two expressions are equal; None is "not decided here", and makes this None too.
    """
    if len(answer) > LONGEST:
        return gold == answer
    if plain(gold) == plain(answer):
        return True
    gold, answer = clean(gold), clean(answer)
    if (words := read_words(gold)) is not None:
        return words == read_words(sides(answer)[-1])
    gold, modulus = split_modulus(gold)
    answer, other_modulus = split_modulus(answer)
    if modulus and other_modulus and int(modulus) != int(other_modulus):
        return False
    if (based := read_based(gold)) is not None:
        return _same_digits(based, sides(answer)[-1])
    if (decided := _quantities(gold, answer, match)) is not None:
        return decided
    gold_parts, parts = split_parts(gold), split_parts(answer)
    if gold_parts is not None and (parts is not None or not is_relation(answer)):
        return parts is not None and _same_parts(gold_parts, parts, match, algebra)
    if parts is not None and gold_parts is None and not is_relation(gold):
        return False
    return _equations(gold, answer, match, algebra)


# ---- bases and numbers -------------------------------------------------------------------------------------------


def _same_digits(gold: tuple[str, int], answer: str) -> bool:
    based = read_based(answer)
    return based == gold if based is not None else plain(answer).upper() == gold[0]


def _quantities(gold: str, answer: str, match: Match) -> bool | None:
    """Whether two numbers with their units are equal; None where one of the two texts is not read as a number."""
    expected, given = read_quantity(gold), read_quantity(answer)
    if expected is None or given is None:
        return None
    if match == "number" and expected.number.computed and not given.number.computed:
        return False
    if (expected.unit == "percent") != (given.unit == "percent"):  # 18%, 18 and 0.18 are one answer
        return _one_is_percent(expected.number, given.number, expected.unit, given.unit)
    return same_unit(expected.unit, given.unit) and same_number(expected.number, given.number)


def _one_is_percent(gold: Number, answer: Number, gold_unit: str, unit: str) -> bool:
    if gold_unit and unit:
        return False
    if same_number(gold, answer):
        return True
    if gold_unit:
        return same_number(Number(gold.value / 100, gold.decimal), answer)
    return same_number(gold, Number(answer.value / 100, answer.decimal))


def same_unit(gold: str, answer: str) -> bool:
    """Whether two units are one; either may be missing."""
    return not gold or not answer or gold == answer


def same_number(gold: Number, answer: Number) -> bool:
    """Whether two numbers are equal: exactly, or rounded where one cannot be written as a decimal."""
    if gold.value == answer.value:
        return True
    rounded = (gold.decimal and not _is_finite_decimal(answer.value)) or (
        answer.decimal and not _is_finite_decimal(gold.value)
    )
    return rounded and abs(gold.value - answer.value) <= Fraction(1, 2 * 10 ** decimals(gold.value))


def _is_finite_decimal(value: Fraction) -> bool:
    denominator = value.denominator
    return pow(10, denominator.bit_length(), denominator) == 0


def decimals(gold: Fraction) -> int:
    """How many decimals have to agree: six, or six significant digits of a gold number below 1."""
    size = abs(gold)
    if not size or size >= 1:
        return 6
    exponent = len(str(size.numerator)) - len(str(size.denominator))
    return 5 - exponent + (size < Fraction(10) ** exponent)


# ---- lists and equations ---------------------------------------------------------------------------------------


def _same_parts(gold: Parts, answer: Parts, match: Match, algebra: Algebra) -> bool | None:
    kind, expected = gold
    other, given = answer
    if len(expected) != len(given):
        return False
    unordered = {kind, other} <= {"", r"\{\}"}
    if not unordered and kind != other and not {kind, other} <= {"", "()"}:
        return False
    if unordered:
        return _same_in_some_order(expected, given, match, algebra)
    verdicts = [equal(first, second, match, algebra) for first, second in zip(expected, given, strict=True)]
    return False if False in verdicts else None if None in verdicts else True


def _same_in_some_order(gold: Sequence[str], answer: Sequence[str], match: Match, algebra: Algebra) -> bool | None:
    """Whether each gold part has an answer's part of its own; equality is transitive, so the first will do."""
    left = list(answer)
    undecided = False
    for part in gold:
        verdicts = [equal(part, other, match, algebra) for other in left]
        if True in verdicts:
            del left[verdicts.index(True)]
        elif None in verdicts:
            undecided = True
        else:
            return False
    return None if undecided else True


def _equations(gold: str, answer: str, match: Match, algebra: Algebra) -> bool | None:
    """Compares equations, assignments and values (see the file's head)."""
    expected, given = sides(gold), sides(answer)
    if len(expected) == 1 and len(given) > 1 and not is_relation(gold):
        verdicts = [equal(gold, given[-1], match, algebra)]
        verdicts += [equal(gold, side, "value", algebra) for side in given[:-1] if is_closed(side)]
        return False if False in verdicts else None if None in verdicts else True
    if len(expected) == 2 and is_name(expected[0]):
        if len(given) == 1 and not is_relation(answer):
            return equal(expected[1], answer, match, algebra)
        if len(given) == 2 and plain(given[0]) == plain(expected[0]):
            return equal(expected[1], given[1], match, algebra)
    return _expressions(gold, answer, match, algebra)


_SIDE_BY_SIDE = re.compile(r"(?<!frac \d)(?<!frac\d)(?<=\d) (?=\d)")


def _expressions(gold: str, answer: str, match: Match, algebra: Algebra) -> bool | None:
    gold, unit = split_unit(gold)
    answer, other_unit = split_unit(answer)
    if not same_unit(unit, other_unit):
        return False
    if plain(gold) == plain(answer):
        return True
    if _SIDE_BY_SIDE.search(answer) and not _SIDE_BY_SIDE.search(gold):
        return False
    if match == "number" and not is_computed(gold, answer):
        return False
    return algebra(gold, answer)
