r"""Texts that a reader of TOML or JSON has damaged: it takes the backslash of "\frac" for the start of an escape.

"\boxed" between double quotes becomes a backspace and "oxed", "\frac" a form feed and "rac", "\text" a tab and "ext".
Such a text is valid, so nothing stops it: the prompt asks for a wrong thing, the gold answer can never be right. The
control characters that are left behind betray it, but newline, tab and carriage return are also what people write.
"""

import re

# A carriage return belongs to the end of a line, and a tab after a word, a mark or a blank. What follows the tab must
# not be the rest of a TeX command that begins with t, nor what follows a newline that of one with n.
_DAMAGED = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
    r"|\r(?![\r\n]|\Z)"
    r"|(?:\A|(?<=[${(\[^_]))\t(?=[a-z])"
    r"|\t(?=(?:ext(?:bf|it|rm|sf|tt)?|imes|heta|frac|au|riangle|ilde|binom|herefore|anh)(?![A-Za-z]))"
    r"|\n(?=(?:eq|abla|otin)(?![A-Za-z.]))"
)
_NAMES = {"\b": "backspace", "\f": "form feed", "\t": "tab", "\r": "carriage return", "\n": "newline"}
REMEDY = r"""write TeX between single quotes in TOML ('\frac') and with doubled backslashes in JSON ("\\frac")"""


def no_unicode(text: str) -> str | None:
    """What is wrong with a text that no file and no tokenizer takes; None for any other."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"holds half a surrogate pair, or a byte that is not UTF-8, at character {error.start + 1}"
    return None


def damage(text: str) -> str | None:
    r"""What shows that `text` lost a backslash, or is no text at all, with the remedy; None where all is well.

    Taken are newlines, tabs after words and blanks, and carriage returns at the ends of lines; not the other control
    characters of ASCII.
    """
    if (wrong := no_unicode(text)) is not None:
        return wrong
    found = _DAMAGED.search(text)
    if found is None:
        return None
    character = found.group()
    name = _NAMES.get(character, "control character")
    remedy = REMEDY if character in _NAMES else "leave it out"
    rest = text[found.end() :][:12]
    return f"holds a {name} (U+{ord(character):04X}) before {rest!r}; {remedy}"
