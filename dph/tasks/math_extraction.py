r"""Which answer a response gives: its last closed box, else what follows its last ####.

A box is `\boxed{...}`, `\fbox{...}`, `\framebox{...}` or `\boxed 2`. With strict = false also what follows the last
"answer is" or "Answer:" counts, else the last number. Responses are as long and as strange as a model likes, and they
are read in the process that trains: every scan here takes time in proportion to the text. Hence the possessive
quantifiers (`*+`), which give nothing back, and a box that is noted by its place and cut out once, at the end.
"""

import re

_BRACES = re.compile(r"(?<!\\)\\++(?:boxed|fbox|framebox)(?![A-Za-z])\s*+|\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[-+]?(?:\.?\d|\\[A-Za-z])[^$\s]*+")  # 2 of \boxed 2
_BARE_START = re.compile(r"[-+]?(?:\.?\d|\\[A-Za-z])")
_BLANK = re.compile(r"\s*+")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*+([^\n]++)")
_SAYS = re.compile(r"answer\*{0,4}(?:\s++is\b\s*+:?|\s*+[:=])\**+\s*+([^\n]++)", re.IGNORECASE)
_NUMERAL = re.compile(r"-?\d[\d,]*+(?:\.\d++)?")
_SENTENCE_END = re.compile(r"\.(?:\s|\Z)")


def extract(text: str, strict: bool) -> str | None:
    """The answer that a response gives, or None.

    Args:
        text: the response.
        strict: only a box or #### counts.
    """
    found = last_box(text)
    if found is None and (hashes := _HASHES.findall(text)):
        found = str(hashes[-1]).strip()
    if found is None and not strict:
        if says := _SAYS.findall(text):
            found = _SENTENCE_END.split(str(says[-1]).replace("*", ""), maxsplit=1)[0].strip()
        elif numerals := _NUMERAL.findall(text):
            found = str(numerals[-1])
    return found or None


def last_box(text: str) -> str | None:
    r"""The content of the last box that is closed and not empty; braces are balanced, \{ and \} are none."""
    last: tuple[int, int] | None = None  # where the content of the last box starts and ends
    opened: list[int | None] = []  # for each open brace where its box's content starts, None if it is no box's
    box_end = -1  # of the last command for a box
    for match in _BRACES.finditer(text):
        token = match.group()
        found: tuple[int, int] | None = None
        if token == "{":
            opened.append(match.end() if match.start() == box_end else None)
        elif token == "}":
            start = opened.pop() if opened else None
            if start is not None and _end_of_blank(text, start) < match.start():
                found = (start, match.start())
        elif len(token) > 2:
            box_end = match.end()
            if _BARE_START.match(text, box_end):
                found = (box_end, -1)
        if found is not None and (last is None or found[0] > last[0]):
            last = found
    if last is None:
        return None
    start, end = last
    if end >= 0:
        return text[start:end].strip()
    bare = _BARE.match(text, start)
    assert bare is not None, "a bare box was found by its first characters"
    return bare.group().rstrip(".,;:")


def _end_of_blank(text: str, start: int) -> int:
    blank = _BLANK.match(text, start)
    return blank.end() if blank else start
