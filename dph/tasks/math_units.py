r"""What may stand behind a number: a unit, a word for a multiple (5 million), or what makes the number another one.

A unit is one of the known abbreviations (cm, kg, mph) or any noun: 18 apples, 2 eggs per day. Nouns cannot be listed,
so the closed classes of words are: a word for a number, an operation or a comparison is no unit, and "5 or more",
"5 hundredths", "12 minus" and "5 factorial" are not read as numbers at all. A word has a vowel, and unless it is in a
\text{} or behind a space only a known abbreviation counts: 5xyz and 3abc are products of letters.
Two units are equal if they have the same words after abbreviations and plurals are resolved (`read_unit`).
"""

import re
from fractions import Fraction

SCALES = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}

# By the unit that each stands for. A plural s is taken off before a word is looked up.
_SPELLINGS = {
    "millimeter": "mm millimetre",
    "centimeter": "cm centimetre",
    "decimeter": "dm decimetre",
    "meter": "m metre mtr",
    "kilometer": "km kilometre",
    "inch": "in inche",
    "foot": "ft feet",
    "yard": "yd",
    "mile": "mi",
    "milligram": "mg",
    "gram": "g gm",
    "kilogram": "kg",
    "ounce": "oz",
    "pound": "lb",
    "milliliter": "ml millilitre",
    "liter": "l litre",
    "gallon": "gal",
    "second": "s sec",
    "minute": "min",
    "hour": "h hr",
    "year": "yr",
    "am": "a.m",
    "pm": "p.m",
    "mile per hour": "mph",
    "kilometer per hour": "kmh kph kmph",
    "revolution per minute": "rpm",
    "dollar": "$ usd buck",
    "euro": "€ eur",
    "pound sterling": "£ gbp",
    "yen": "¥ jpy",
    "rupee": "₹ rs inr",
    "cent": "¢",
    "percent": "% pct percentage",
    "degree": "deg",
    "celsius": "centigrade",
    "radian": "rad",
    "square": "sq",
    "cubic": "cu",
    "hertz": "hz",
    "kilowatt": "kw",
    "kilojoule": "kj",
    "pascal": "pa",
    "man": "men",
    "woman": "women",
    "child": "children",
    "person": "people",
}
_ABBREVIATIONS = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split()}
# Symbols that are also a variable's name: units only in a \text{} or \mathrm{}.
_SYMBOLS = {"N": "newton", "J": "joule", "W": "watt", "V": "volt", "A": "ampere", "K": "kelvin", "C": "coulomb"}
_ARTICLES = {"a", "an", "the"}
_BETWEEN = _ARTICLES | {"of", "per", "for", "each", "every", "in"}

_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety gross score half halve third quarter"
)
_ORDINALS = (
    "fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth "
    "seventeenth eighteenth nineteenth twentieth thirtieth fortieth fiftieth sixtieth hundredth thousandth millionth "
    "billionth"
)
_OPERATIONS = (
    "plus minus time times divided multiplied over factorial double triple squared cubed root power mod modulo choose "
    "raised negative positive infinity"
)
_COMPARISONS = (
    "is are was be not no nor never or and but if unless than more less fewer least most greater smaller "
    "larger bigger other another else only about around approximately nearly almost roughly maybe perhaps possibly "
    "wrong incorrect false to from until between either neither both respectively"
)
_NO_UNITS = frozenset(f"{_NUMBER_WORDS} {_ORDINALS} {_OPERATIONS} {_COMPARISONS}".split()) | frozenset(SCALES)

WRAPPER = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|rm|operatorname)"
_WRAPPED = re.compile(WRAPPER + r"\s*+\{([^{}]*+)\}")
_DEGREES = re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\})")
_DEGREE_LETTER = re.compile(r"\bdegrees? ([CF])\b")
_POWER = re.compile(r"([A-Za-z]+)\s?\^\s?\{?([23])\}?")
_LETTERS = re.compile(r"[A-Za-z]+(?:[ -][A-Za-z]+)*+")
_CURRENCY = re.compile(r"[$€£¥₹¢]")
_VOWEL = re.compile(r"[aeiou]")
LONGEST = 80  # letters of a unit
FEW_WORDS = 7


def unwrapped(text: str) -> str:
    r"""The text without \text{} and its kin, a space in the place of each."""
    return _WRAPPED.sub(r" \1", text)


def read_scale(text: str) -> tuple[Fraction, str]:
    r"""The multiple that a text behind a number starts with, and what follows: " million dollars", \text{ dozen}."""
    words = unwrapped(text).strip() if len(text) <= LONGEST else ""
    first, _, rest = words.partition(" ")
    scale = SCALES.get(first.lower().removesuffix("s"))
    if scale is None or text[:1] == first[:1]:  # glued to the number
        return Fraction(1), text
    return Fraction(scale), f" {rest}" if rest else ""


def read_unit(text: str) -> str | None:
    r"""The unit that a text behind a number is, in words of the singular: "square meter", "mile per hour".

    Args:
        text: what follows the number, space before it included: " cm", "\text{ square feet}", "^\circ C", "\%".

    Returns:
        The unit; "" where the text is blank; None where it is none.
    """
    if not text.strip():
        return ""
    if len(text) > LONGEST:
        return None
    in_text = _WRAPPED.search(text) is not None
    bare = _DEGREES.sub(" degree ", unwrapped(text)).replace("\\%", "%").replace("%", " percent ")
    bare = _CURRENCY.sub(lambda match: f" {_ABBREVIATIONS[match.group()]} ", bare)
    glued = bare[:1].isalpha() and not in_text
    bare = _DEGREE_LETTER.sub(_temperature, " ".join(bare.replace(".", "").split()))
    bare = _POWER.sub(lambda match: f"{'square' if match[2] == '2' else 'cubic'} {match[1]}", bare)
    bare = " ".join(bare.replace("/", " per ").split())
    if not _LETTERS.fullmatch(bare):
        return None
    words = bare.replace("-", " ").split()
    if len(words) > FEW_WORDS or words[0] in _BETWEEN or words[-1] in _BETWEEN:
        return None
    found = [_word(word, glued, in_text) for word in words]
    if None in found:
        return None
    return " ".join(word for word in found if word and word not in _ARTICLES)


def _temperature(match: re.Match[str]) -> str:
    return "degree celsius" if match[1] == "C" else "degree fahrenheit"


def _word(word: str, glued: bool, in_text: bool) -> str | None:
    """One word of a unit as it is compared, or None if it can be none."""
    if in_text and word in _SYMBOLS:
        return _SYMBOLS[word]
    lower = word.lower()
    if lower in _BETWEEN and not glued:
        return lower
    singular = _singular(lower)
    for spelling in (lower, singular):
        if spelling in _ABBREVIATIONS or spelling in _SPELLINGS:
            return _ABBREVIATIONS.get(spelling, spelling)
    is_noun = len(lower) > 2 and not glued and _VOWEL.search(lower) and not {lower, singular} & _NO_UNITS
    return singular if is_noun else None


def _singular(word: str) -> str:
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("xes", "ches", "shes", "sses")):
        return word[:-2]
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word
