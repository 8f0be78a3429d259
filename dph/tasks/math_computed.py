r"""Whether an answer leaves something to compute: 48+48/2 for 72, \sqrt{242} for 11\sqrt{2}.

An answer copied from the question is often equal to the gold answer, and rewards no work. With math_match = "number":
- a gold number wants a number (math_equality.py sees to that before);
- a gold answer without a variable wants no operation more often than it has it, fractions, products, powers and simple
  roots apart;
- a solved relation or set (x > 3, [-2, 7]) wants another one, not the inequality that it solves.
What holds a variable is not judged: (x+1)^2 and x^2+2x+1 are each other's answer, whichever was asked for.
"""

import re
from collections import Counter

from dph.tasks.math_notation import read_quantity
from dph.tasks.math_parts import is_closed, is_relation, is_solved

_OPERATION = re.compile(
    r"\\(?:sum|prod|int|[dt]?binom|choose|log|ln|lg|exp|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|gcd|lcm|max|min"
    r"|lim|lfloor|lceil|bmod|operatorname|det|phi|varphi|sigma|div)(?![A-Za-z])|[!|]|(?<=[\w})!]) ?[+-]"
)
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_ROOT_SIGN = re.compile(r"\\sqrt(?![A-Za-z])")
_ROOT = re.compile(r"\\sqrt ?(?:\[ ?(\d{1,2}) ?\])? ?(?:\{ ?([^{}]+?) ?\}|(\w))")
LARGEST = 10**6  # radicand that is looked through for squares


def is_computed(gold: str, answer: str) -> bool:
    """Whether the answer leaves no more to compute than the gold answer does (see the file's head).

    Args:
        gold, answer: expressions without units, of which one at least is no number.
    """
    quantity = read_quantity(gold)
    if quantity is not None and quantity.number.computed:
        return False
    if is_solved(gold) and is_relation(answer):
        return is_solved(answer)
    if not is_closed(_IMAGINARY.sub("", _OPERATION.sub("", gold))):
        return True
    return operations(answer) <= operations(gold) and open_roots(answer) <= open_roots(gold)


def operations(text: str) -> Counter[str]:
    """How often a text adds or subtracts, and each operation beyond roots, fractions, products and powers."""
    found = (operation.strip() for operation in _OPERATION.findall(text))
    return Counter("+" if operation == "-" else operation for operation in found)


def open_roots(text: str) -> set[str]:
    r"""The radicands in a text that leave something to compute: all but whole numbers without a square to take out.

    Of a cube root the cubes, and so on: \sqrt{242} and \sqrt{4+9} are open, 11\sqrt{2} and \sqrt{13} are not.
    """
    found = set()
    for sign in _ROOT_SIGN.finditer(text):
        root = _ROOT.match(text, sign.start())
        if root is None:
            found.add("a radicand with braces of its own")
            continue
        radicand, index = root[2] or root[3], int(root[1] or 2)
        if not radicand.isdecimal() or len(radicand) > len(str(LARGEST)) or _has_power(int(radicand), index):
            found.add(radicand)
    return found


def _has_power(number: int, index: int) -> bool:
    """Whether a number is divisible by the index-th power of one above 1."""
    base = 2
    while index and base**index <= number:
        if number % base**index == 0:
            return True
        base += 1
    return False
