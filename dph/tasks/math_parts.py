r"""The parts of an answer: those of a list or a tuple, the sides of an equation, an expression and its unit.

All of it looks at brackets and separators alone and runs in the process that trains, in time proportional to the text.
"""

import re

from dph.tasks.math_notation import brackets, clean, read_based, read_quantity, read_words, split_modulus
from dph.tasks.math_units import WRAPPER, read_unit

Parts = tuple[str, list[str]]  # the brackets, "" for a list without; and what stands between the commas


def _cut_at(separators: str) -> re.Pattern[str]:
    """Matches brackets, separators (the group `cut`) and commands, so that `_split` sees each as one."""
    either = r"(?P<open>\\?[(\[{])|(?P<close>\\?[)\]}])"
    return re.compile(rf"{either}|(?P<cut>{separators})|\\[A-Za-z]+|\\.", re.DOTALL)


_COMMA = _cut_at(r"[,;]")
_EQUALS = _cut_at(r"(?<![<>!])=|\\(?:equiv|in)(?![A-Za-z])")
_RELATION = _cut_at(r"[<>]?=|[<>]|\\(?:leq?|geq?|lt|gt|leqslant|geqslant|neq?|in|equiv)(?![A-Za-z])")
_UNION = _cut_at(r"\\(?:cup|cap)(?![A-Za-z])")
_AND = re.compile(r" ?,? ?(?:" + WRAPPER + r" ?\{ ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])) ?")


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """What stands between the separators outside brackets."""
    depth = start = 0
    parts = []
    for match in separator.finditer(text):
        if match["open"]:
            depth += 1
        elif match["close"]:
            depth -= 1
        elif match["cut"] and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def split_parts(text: str) -> Parts | None:
    r"""The parts of a list (1, 2 and 3; \pm 2), a set, a tuple or an interval; None for one expression."""
    around = brackets(text)
    if around is not None and around != ("{", "}"):
        inside = _split(text[len(around[0]) : len(text) - len(around[1])], _COMMA)
        if around[0] == r"\{":
            inside = _with_both_signs(inside)
        if len(inside) > 1 or around[0] == r"\{":
            return "".join(around), inside
    parts = _with_both_signs(_split(_AND.sub(",", text), _COMMA))
    return ("", parts) if len(parts) > 1 else None


def _with_both_signs(parts: list[str]) -> list[str]:
    r"""The parts with 1 + \sqrt{2} and 1 - \sqrt{2} in the place of 1 \pm \sqrt{2}."""
    found = []
    for part in parts:
        if part.count(r"\pm") == 1 and r"\{" not in part:
            found += [part.replace(r"\pm", "+"), part.replace(r"\pm", "-")]
        else:
            found.append(part)
    return found


def sides(text: str) -> list[str]:
    """The sides of an equation or a chain of them, 2+3 and 5 of 2+3=5; one where there is no equals sign."""
    return _split(text, _EQUALS)


def is_relation(text: str) -> bool:
    """Whether a text has =, <, an element sign or their like."""
    return len(_split(text, _RELATION)) > 1


# ---- what a part is ----------------------------------------------------------------------------------------------

_NAME = re.compile(r"\\?[A-Za-z]++(?:_\{?\w++\}?)?'?(?:\([A-Za-z]\))?")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_CONSTANTS = {r"\frac", r"\sqrt", r"\times", r"\cdot", r"\div", r"\pi", r"\circ", r"\infty", r"\overline"}


def is_name(text: str) -> bool:
    r"""Whether a text names an unknown: x, x_1, f(x), \theta."""
    return _NAME.fullmatch(text) is not None


def is_closed(text: str) -> bool:
    """Whether a text has no variable: no letters but those of commands for numbers."""
    letters = _COMMAND.sub("", text)
    return set(_COMMAND.findall(text)) <= _CONSTANTS and not any(letter.isalpha() for letter in letters)


def is_solved(text: str) -> bool:
    """Whether a set or a relation is one to read off: of names and constants, as -2 <= x <= 7 and [-2, 7] are."""
    compared = _split(text, _RELATION)
    if len(compared) == 1:
        return all(brackets(part) is not None and is_closed(part) for part in _split(text, _UNION))
    return all(is_name(side) or is_closed(side) for side in compared) and any(map(is_closed, compared))


_LAST_TEXT = re.compile(WRAPPER + r" ?\{[^{}]*\}(?: ?\^ ?\{?[23]\}?)?")


def split_unit(text: str) -> tuple[str, str]:
    r"""An expression and the unit behind it, or "": "2\sqrt{3}" and "centimeter" of 2\sqrt{3} \text{ cm}."""
    texts = list(_LAST_TEXT.finditer(text))
    if texts and texts[-1].end() == len(text) and texts[-1].start() > 0:
        unit = read_unit(f" {texts[-1].group()}")
        return (text[: texts[-1].start()].strip(), unit) if unit else (text, "")
    head, space, last = text.rpartition(" ")
    unit = read_unit(f" {last}") if space and len(last) > 1 and last.isalpha() else None
    return (head, unit) if unit else (text, "")


def expressions(gold: str) -> list[str]:
    """What of a gold answer only algebra compares: no numbers, no words, and of lists and assignments the values."""
    text, _ = split_modulus(clean(gold))
    if read_words(text) or read_based(text) or read_quantity(text):
        return []
    parts = split_parts(text)
    if parts is not None:
        return [expression for part in parts[1] for expression in expressions(part)]
    both = sides(text)
    if len(both) == 2 and is_name(both[0]):
        return expressions(both[1])
    return [split_unit(text)[0]]
