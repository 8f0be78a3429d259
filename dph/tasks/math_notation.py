r"""How an answer is written: notation made one, numbers with their units, digits in a base, lists, plain words.

`clean` brings what models write (Unicode, Markdown, LaTeX's ways to say one thing) to one notation. The `read_*`
functions each say what a whole text is, or None. All of it runs in the process that trains: time grows in proportion
to the text.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from dph.tasks.math_units import WRAPPER, read_scale, read_unit, unwrapped

MOST_BRACKETS = 4  # around one another, that mean nothing
MAX_NUMBER = 1000  # characters; Python itself reads no integer of more than 4300 digits

# ---- one notation ------------------------------------------------------------------------------------------------

_UNICODE = {
    **dict.fromkeys("−–‐‑‒", "-"),
    **dict.fromkeys("×✕", r"\times "),
    **dict.fromkeys("·⋅∙", r"\cdot "),
    **{"÷": "/", "⁄": "/", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in "},
    **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv ", "±": r"\pm ", "∓": r"\mp "},
    **{"π": r"\pi ", "θ": r"\theta ", "√": r"\sqrt ", "°": r"^\circ ", "º": r"^\circ ", "\n": " ", "\t": " "},
}
_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,?\\! ?|\\,)(?=\d{3}(?!\d))")
_SPACES = re.compile(r"(?<!\\)\\(?:[,;:! ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|~")
_DELIMITERS = re.compile(
    r"(?<!\\)\\[()\[\]]|(?<!\\)\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?|\\(?:displaystyle|limits)(?![A-Za-z])"
)
_FRAC = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_STYLED = re.compile(WRAPPER[:-1] + r"|boldsymbol|bm|underline)\s*+\{([^{}A-Za-z\\]*+)\}")  # of digits and signs
_ALL_TEXT = re.compile(WRAPPER + r"\s*+\{([^{}]*+)\}")
_APPROXIMATELY = re.compile(r"(?:\\(?:approx|simeq|sim|doteq)(?![A-Za-z])|=) ?")


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    r"""The answer in one notation: no delimiters, Markdown, digit groups, \left or \dfrac; LaTeX for Unicode."""
    if not text.isascii():
        text = "".join(map(_character, text))
    text = _SPACES.sub(" ", _GROUPS.sub("", text))
    text = " ".join(_without_dollars(_trimmed(text)).split())
    text = _STYLED.sub(r"\1", _FRAC.sub(r"\\frac", _DELIMITERS.sub("", text)))
    text = " ".join(_trimmed(text).split())
    if (whole := _ALL_TEXT.fullmatch(text)) is not None:
        text = whole[1].strip()
    if (approximately := _APPROXIMATELY.match(text)) is not None:
        text = text[approximately.end() :]
    return _trimmed(text)


def _character(character: str) -> str:
    """One character in ASCII where there is a way: ¾ is a fraction, ² a power, a zero-width space nothing."""
    if character in _UNICODE:
        return _UNICODE[character]
    if character.isascii():
        return character
    kind, _, parts = unicodedata.decomposition(character).partition(" ")
    if kind == "<fraction>":
        top, bottom = unicodedata.normalize("NFKC", character).split("⁄")
        return rf"\frac{{{top}}}{{{bottom}}}"
    if kind == "<super>":
        return f"^{{{unicodedata.normalize('NFKC', character)}}}"
    if kind == "<wide>":
        return chr(int(parts, 16))
    category = unicodedata.category(character)
    return "" if category == "Cf" else " " if category == "Zs" else character


def _trimmed(text: str) -> str:
    """The text without Markdown's quotes and stars around it and punctuation behind it."""
    text = text.strip().rstrip(".,;:").strip("` ")
    while len(text) > 1 and text[0] == text[-1] == "*":
        text = text[1:-1].strip()
    return text.rstrip(".,;: ")


def _without_dollars(text: str) -> str:
    r"""The text without the $ that delimit mathematics; \$ and a $ without its like are dollars and stay, as $."""
    if text.replace(r"\$", "").count("$") % 2 == 0:
        text = text.replace(r"\$", "\0").replace("$", "").replace("\0", r"\$")
    return text.replace(r"\$", "$")


_BETWEEN_NO_DIGITS = re.compile(r"(?<!\d) | (?!\d)")


@lru_cache(maxsize=4096)
def plain(text: str) -> str:
    r"""The text without \text and spaces, but for those between digits: equal plain texts are equal answers."""
    return _BETWEEN_NO_DIGITS.sub("", " ".join(unwrapped(clean(text)).split()))


def unbracketed(text: str) -> str:
    r"""The text without brackets around all of it: (5), [5], {5}, \{5\}; around a list they are part of the answer."""
    for _ in range(MOST_BRACKETS):
        found = brackets(text)
        if found is None or "," in text:
            break
        text = text[len(found[0]) : len(text) - len(found[1])].strip()
    return text


def brackets(text: str) -> tuple[str, str] | None:
    r"""The opening and the closing bracket around all of a text, if they are one pair; of intervals they may differ."""
    opening = r"\{" if text.startswith(r"\{") else text[:1]
    closing = r"\}" if text.endswith(r"\}") else text[-1:]
    if opening not in ("(", "[", "{", r"\{") or closing not in (")", "]", "}", r"\}") or len(text) < 3:
        return None
    if (opening in ("(", "[")) != (closing in (")", "]")) or (opening == "{") != (closing == "}"):
        return None
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += 1 if match.group()[-1] in "([{" else -1
        if depth == 0:
            return (opening, closing) if match.end() == len(text) else None
    return None


_BRACKET = re.compile(r"\\?[()\[\]{}]")

# ---- numbers -----------------------------------------------------------------------------------------------------

_WHOLE = r"(?:\d{1,3}(?:,\d{3})++(?![\d,])|\d{1,3}(?: \d{3})++(?!\d| \d)|\d++)"
_PART = r"(?:\{ ?([-+]?\d++) ?\}|(\d))"  # of a \frac
_HEAD = re.compile(r"([-+]?) ?(\$|€|£|¥|₹|\\pounds|\\euro)? ?([-+]?) ?")
_REPEATING = re.compile(r"(\d{0,99})\.(\d{0,99})\\(?:overline|bar|dot) ?\{?(\d{1,99})\}?")
_FRACTION = re.compile(rf"(?:(\d++) ?)?\\frac ?{_PART} ?{_PART}|(?:(\d++) )?(\d++) ?/ ?(\d++)(?![\d.])")
_DECIMAL = re.compile(
    rf"((?:{_WHOLE}(?:\.\d*+)?)|\.\d++)"
    r"(?: ?(?:\\times|\\cdot|\*) ?10 ?\^ ?(?:\{ ?([-+]?\d{1,3}) ?\}|([-+]?\d{1,3}))|[eE]([-+]?\d{1,3})(?!\w))?"
)
_CURRENCIES = {r"\pounds": "£", r"\euro": "€"}


@dataclass(frozen=True)
class Number:
    """A number as written: its value, whether it is a decimal (27.0, 4.5e33), and whether it leaves nothing to compute.

    A fraction is computed if it is in lowest terms; \\frac{144}{2} is a quotient still to be taken.
    """

    value: Fraction
    decimal: bool = False
    computed: bool = True


@dataclass(frozen=True)
class Quantity:
    """A number with its unit (read_unit); "" where there is none."""

    number: Number
    unit: str = ""


@lru_cache(maxsize=4096)
def read_quantity(text: str) -> Quantity | None:
    r"""The number, with unit or without, that a whole text is: 1,000 or 2 3/4 or 4.5\times 10^{33} or $18 or 5 km/h."""
    text = unbracketed(clean(text))
    if len(text) > MAX_NUMBER or (head := _HEAD.match(text)) is None:
        return None
    first, currency, second = head.groups()
    found = _repeating(text, head.end()) or _fraction(text, head.end()) or _decimal(text, head.end())
    if found is None or (first and second):
        return None
    number, end = found
    scale, rest = read_scale(text[end:])
    unit = read_unit(rest)
    if currency:
        symbol = _CURRENCIES.get(currency, currency)
        unit = read_unit(f" {symbol}{rest}" if rest.strip() else symbol)
    if unit is None:
        return None
    value = number.value * scale * (-1 if "-" in (first, second) else 1)
    return Quantity(Number(value, number.decimal, number.computed), unit)


def number(text: str) -> Number | None:
    """The number that a text is, without a unit."""
    quantity = read_quantity(text)
    return quantity.number if quantity is not None and not quantity.unit else None


def _repeating(text: str, start: int) -> tuple[Number, int] | None:
    match = _REPEATING.match(text, start)
    return None if match is None else (Number(repeating_value(match)), match.end())


def repeating_value(match: re.Match[str]) -> Fraction:
    r"""The value of a match of REPEATING: 1.2\overline{3}."""
    whole, fixed, repeated = match.groups()
    nines = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return Fraction(f"{whole or 0}.{fixed or 0}") + Fraction(int(repeated), nines)


REPEATING = _REPEATING


def _fraction(text: str, start: int) -> tuple[Number, int] | None:
    match = _FRACTION.match(text, start)
    if match is None:
        return None
    whole = match[1] or match[6]
    top = int(match[2] or match[3] or match[7])
    bottom = int(match[4] or match[5] or match[8])
    if bottom == 0 or (whole is not None and (top < 0 or bottom < 0)):
        return None
    part = Fraction(top, bottom)
    lowest = part.denominator == abs(bottom) > 1
    if whole is None:
        return Number(part, computed=lowest), match.end()
    return Number(int(whole) + part, computed=lowest and part < 1), match.end()


def _decimal(text: str, start: int) -> tuple[Number, int] | None:
    match = _DECIMAL.match(text, start)
    if match is None:
        return None
    digits = match[1].replace(",", "").replace(" ", "")
    power = match[2] or match[3] or match[4]
    value = Fraction(digits) * Fraction(10) ** int(power or 0)
    return Number(value, "." in digits or power is not None), match.end()


# ---- other kinds -------------------------------------------------------------------------------------------------

_BASES = {
    **{"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10},
    **{"eleven": 11, "twelve": 12, "sixteen": 16},
}
_BASED = re.compile(r"\(?([0-9A-Fa-f]*+)\)? ?_ ?\{? ?\(?([a-z]++|\d{1,2})\)? ?\}?")
_NO_SOLUTION = {"varnothing", "nosolution", "nosolutions", "norealsolution", "norealsolutions", "theemptyset"}


def read_based(text: str) -> tuple[str, int] | None:
    r"""Digits and base of 204_5 or 1010_{\text{two}}."""
    match = _BASED.fullmatch(" ".join(unwrapped(clean(text)).split()))
    if match is None or not any(digit.isdigit() for digit in match[1]):
        return None
    if match[2].isdigit():
        return match[1].upper(), int(match[2])
    return (match[1].upper(), _BASES[match[2]]) if match[2] in _BASES else None


def read_words(text: str) -> str | None:
    r"""The letters of a text without mathematics, of at least two: case, spaces and punctuation do not count.

    "no solution" and its like are the empty set's words, as \emptyset and \{\} are.
    """
    bare = clean(text)
    if bare.replace(" ", "") in (r"\emptyset", r"\varnothing", r"\{\}"):
        return "emptyset"
    letters = re.sub(r"[ .,'\"\-?!]", "", unwrapped(unbracketed(bare))).casefold()
    if len(letters) < 2 or not letters.isalpha():
        return None
    return "emptyset" if letters in _NO_SOLUTION else letters


def split_modulus(text: str) -> tuple[str, str]:
    r"""A text without its modulus, and that: "3 \pmod 7" gives "3" and "7"; "" where it has none."""
    head, found, tail = text.rpartition("mod")
    modulus = tail.strip("{}() ")
    if not found or not modulus.isdigit():
        return text, ""
    head = head.rstrip("( ").removesuffix(r"\p").removesuffix(r"\b").removesuffix("\\").rstrip("( ")
    return head, modulus
