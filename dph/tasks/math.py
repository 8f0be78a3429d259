r"""Math word problems: data sets as they are published, and the reward: is the answer equal to the gold answer?

A row is read by the columns it has (`_read`): GSM8K, SVAMP, MultiArith, MATH and its kin (AIME24, AMC23, College
Math), Minerva, OlympiadBench, verl's; others through [data] fields = {prompt = "...", answer = "..."}.
The answer of a response is its last closed `\boxed{...}` (or `\fbox`, `\framebox`, `\boxed 2`), else what follows its
last `####`. With strict = false also what follows the last "answer is" or "Answer:", else its last number.

Equality is math-verify's, in a worker process (workers.py). What needs no algebra is decided here, at once: equal
texts, and numbers. Numbers are also where math-verify errs: it takes 1\,000 for 0, 4.5e33 for 4.5 e 33, 2 3/4 for 5/4,
0.\overline{3} for 0, 18 dollars for a product of letters, and two numbers below 1e-6 for equal. Here two whole numbers
or fractions are equal if they are; with a decimal among them, if they agree in six decimals, or in six significant
digits where the gold number is below 1.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dph.tasks.base import (
    Outcome,
    Prompt,
    Reward,
    Row,
    Task,
    chat,
    chat_messages,
    ground_truth,
    known_options,
    read_rows,
)
from dph.tasks.workers import GraderPool

if TYPE_CHECKING:
    from dph.config import DataConfig


class MathTask(Task):
    """Questions of one JSON Lines file.

    Args:
        where: the file.
        options: none but `limit`.
        data: system, instruction, fields, strict, grader_timeout, grader_workers.
        seed, folder: not used.
        stored: as in load_task; the columns of the gold answer are those of any data set.
    """

    def __init__(
        self,
        where: str,
        options: dict[str, str],
        data: "DataConfig",
        seed: int = 0,
        folder: Path = Path(),
        stored: Sequence[Row] | None = None,
    ):
        known_options(f"math:{where}", options, ())
        super().__init__(f"math:{where}")
        for index, row in enumerate(read_rows(Path(where)) if stored is None else stored):
            messages = _question(row, data) if stored is None else ()
            gold, unit = _answer(row, data), row.values.get("unit")
            unit = {"unit": unit.strip()} if isinstance(unit, str) and unit.strip() else {}
            self.items.append(Prompt(index, messages, gold, {"line": row.line, **unit}))
        self.strict = data.strict
        self.pool = GraderPool("dph.tasks.math:judge", data.grader_workers, data.grader_timeout)

    def rewards(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        """Grades a batch; only what neither texts nor numbers decide goes to the workers, and once each."""
        jobs = [(prompt.gold, self._extract(prompt, text)) for prompt, text in pairs]
        outcomes: dict[tuple[str, str | None], Outcome] = {}
        undecided = []
        for gold, answer in dict.fromkeys(jobs):
            known = False if answer is None else quick(gold, answer)
            if known is None:
                undecided.append((gold, answer))
            else:
                outcomes[gold, answer] = "no_answer" if answer is None else "right" if known else "wrong"
        for job, verdict in zip(undecided, self.pool.run(undecided), strict=True):
            outcomes[job] = verdict.value if verdict.outcome == "ok" else verdict.outcome
        return self.counted([Reward.of(outcomes[job], job[1]) for job in jobs])

    def record(self, prompt: Prompt) -> dict[str, Any]:
        """Gold answer and unit, if any."""
        return {"answer": prompt.gold, **({"unit": prompt.meta["unit"]} if "unit" in prompt.meta else {})}

    def _extract(self, prompt: Prompt, text: str) -> str | None:
        answer, unit = extract(text, self.strict), prompt.meta.get("unit")
        return without_unit(answer, unit) if answer and unit else answer

    def close(self) -> None:
        """Ends the workers."""
        self.pool.close()


# ---- rows --------------------------------------------------------------------------------------------------------


def _question(row: Row, data: "DataConfig") -> tuple[dict[str, str], ...]:
    """Messages of a row, whichever data set it is of."""
    values = row.values
    if data.fields:
        return _messages(row, data.fields.get("prompt", "prompt"), data)
    if "reward_model" in values:
        return _messages(row, "prompt", data)
    if "Body" in values:  # SVAMP
        body = row.text("Body").strip()
        question = f"{body if body.endswith(('.', '?', '!')) else body + '.'} {row.text('Question').strip()}"
        return chat(question, data.system, data.instruction)
    if "target" in values:  # MultiArith
        return _messages(row, "input", data)
    field = "problem" if "problem" in values else "question"
    if "final_answer" in values and values.get("context"):  # OlympiadBench
        return chat(f"{row.text('context')}\n{row.text(field)}", data.system, data.instruction)
    return _messages(row, field, data)


def _answer(row: Row, data: "DataConfig") -> str:
    """Gold answer of a row, whichever data set it is of; it needs no question."""
    values = row.values
    if data.fields:
        field = data.fields.get("answer", "answer")
        return _gold(row, field, values.get(field))
    if "reward_model" in values:
        return _gold(row, "reward_model.ground_truth", ground_truth(row))
    if "final_answer" in values:  # OlympiadBench: a list, of more than one text where several answers are asked
        answers = values["final_answer"]
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise row.error(f"final_answer = {answers!r} should be a list of texts")
        return _gold(row, "final_answer", ", ".join(answers))
    # MultiArith has a target, SVAMP an Answer; Minerva and the original MATH have none of its own.
    field = next((name for name in ("target", "answer", "Answer", "solution") if name in values), "answer")
    return _gold(row, field, values.get(field))


def _messages(row: Row, field: str, data: "DataConfig") -> tuple[dict[str, str], ...]:
    if isinstance(row.values.get(field), list):
        return chat_messages(row, field, data.system)
    return chat(row.text(field), data.system, data.instruction)


def _gold(row: Row, field: str, value: Any) -> str:
    """The gold answer of a text or number: what follows its ####, if any, and of that the last box, if any."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise row.error(f"{field} = {value!r} should be a text or a number")
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else row.undamaged(field, str(value))
    hashes, text = text.rpartition("####")[1:]
    if (boxed := last_box(text)) is not None:
        text = boxed
    elif field == "solution" and not hashes:
        raise row.error("solution holds no \\boxed answer, and there is no field answer")
    if not plain(text):  # nothing, as would be an answer of nothing
        raise row.error(f"{field} = {value!r} holds no answer")
    return text.strip()


# ---- extraction --------------------------------------------------------------------------------------------------

_BRACES = re.compile(r"\\+(?:boxed|fbox|framebox)(?![A-Za-z])\s*|\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[-+]?[\d.\\][^$\s]*")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]+)")
_SAYS = re.compile(r"answer\**(?:\s+is\b\s*:?|\s*[:=])\**\s*([^\n]+)", re.IGNORECASE)
_NUMERAL = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def extract(text: str, strict: bool) -> str | None:
    """The answer that a response gives (see the file's head), or None."""
    found = last_box(text)
    if found is None and (hashes := _HASHES.findall(text)):
        found = str(hashes[-1]).strip()
    if found is None and not strict:
        if says := _SAYS.findall(text):
            found = re.split(r"\.(?:\s|\Z)", says[-1].replace("*", ""))[0].strip()
        elif numerals := _NUMERAL.findall(text):
            found = str(numerals[-1])
    return found or None


def without_unit(answer: str, unit: str) -> str:
    r"""The answer without the row's unit at its end, be it 5 cm or 5 \mathrm{~cm}."""
    bare = re.escape(_SPACES.sub("", _TEXT.sub(r"\1", unit.replace("$", ""))))
    return re.sub(rf"(?:\\ |\\,|~|\s)*(?:\\[a-z]+\s*\{{(?:~|\s)*{bare}\s*\}}|{bare})\s*\$*\Z", "", answer) or answer


def last_box(text: str) -> str | None:
    r"""The content of the last box that is closed and not empty; braces are balanced, \{ and \} are none."""
    last: tuple[int, str] | None = None
    opened: list[int | None] = []  # for each open brace where its box's content starts, None if it is no box's
    box_end = -1
    for match in _BRACES.finditer(text):
        token, found = match.group(), None
        if token == "{":
            opened.append(match.end() if match.start() == box_end else None)
        elif token == "}":
            start = opened.pop() if opened else None
            found = None if start is None else (start, text[start : match.start()])
        elif len(token) > 2:
            box_end = match.end()
            bare = _BARE.match(text, box_end)
            found = (box_end, bare.group().rstrip(".,;:")) if bare else None
        if found and found[1].strip() and (last is None or found[0] > last[0]):
            last = found
    return last[1].strip() if last else None


# ---- equality ----------------------------------------------------------------------------------------------------

_DELIMITERS = re.compile(r"\\?\$|(?<!\\)\\[()\[\]]|(?<!\\)\\(?:left|right)(?![A-Za-z])\.?")
_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,?\\!|\\,)(?=\d{3}(?!\d))")
_COMMAS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_DECIMAL = re.compile(
    r"([-+]?(?:\d+\.?\d*|\.\d+))(?:(?:[eE]|\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^)\s*\{?([-+]?\d{1,3})\}?)?"
)
_POWER = re.compile(r"(?<=\d)[eE]([-+]?\d{1,3})(?![\w.])")
_REPEATING = re.compile(r"(\d{0,99})\.(\d{0,99})\\overline\{(\d{1,99})\}")
_FRAC = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))")
_FRACTION = re.compile(r"([-+]?)\s*(?:(\d+)\s+)?(-?\d+)\s*/\s*(\d+)")
_WORD = re.compile(r"(.*?\d)(?:\s|\\ |\\,|~)*([A-Za-z]{3,})")
_NO_UNIT = re.compile(r"hundred|thousand|.*llion|dozen|per|percent|half|thirds?|quarters?|squared|cubed", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[,;:! ]|~|\s|\\displaystyle(?![A-Za-z])")
_LETTERS = str.maketrans({"−": "-", "²": "^2", "³": "^3", "√": r"\sqrt ", "½": r"\frac{1}{2}", "\n": " "})


@dataclass(frozen=True)
class Number:
    """A number as written: its exact value, and whether it is a decimal (27.0, 4.5e33), hence perhaps rounded."""

    value: Fraction
    decimal: bool


def clean(text: str) -> str:
    r"""The answer without math delimiters, currency signs, \left, digit grouping by spaces and a last full stop."""
    text = _GROUPS.sub("", _DELIMITERS.sub("", text.translate(_LETTERS))).strip()
    return text.rstrip(".").rstrip()


def number(text: str) -> Number | None:
    r"""The number that a text is: 1,000 or 27.0 or 4.5\times 10^{33} or \frac{1}{2} or 2 3/4 or 0.\overline{3}."""
    text = clean(text)
    if len(text) > 200:  # Python reads no integer of thousands of digits
        return None
    if _COMMAS.fullmatch(text):
        text = text.replace(",", "")
    if match := _DECIMAL.fullmatch(text):
        digits, power = match.groups()
        return Number(Fraction(digits) * Fraction(10) ** int(power or 0), "." in digits or power is not None)
    if match := _REPEATING.fullmatch(text):
        return Number(_repeating(match), False)
    match = _FRACTION.fullmatch(_FRAC.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]}", text).strip())
    if match is None or not int(match[4]) or (match[2] and match[3].startswith("-")):
        return None
    value = int(match[2] or 0) + Fraction(int(match[3]), int(match[4]))
    return Number(-value if match[1] == "-" else value, False)


def _repeating(match: re.Match[str]) -> Fraction:
    whole, fixed, repeated = match.groups()
    nines = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return Fraction(f"{whole or 0}.{fixed or 0}") + Fraction(int(repeated), nines)


def quick(gold: str, answer: str) -> bool | None:
    """Whether the answer is right, where equal texts or two numbers tell; None where algebra has to."""
    expected, given = number(gold), number(answer)
    if expected and not given and len(answer) < 200 and (match := _WORD.fullmatch(clean(answer))):  # 18 dollars
        given = None if _NO_UNIT.fullmatch(match[2]) else number(match[1])
    if expected and given:
        distance = abs(expected.value - given.value)
        rounded = expected.decimal or given.decimal
        return distance <= (Fraction(1, 2 * 10 ** _decimals(expected.value)) if rounded else 0)
    return True if plain(gold) == plain(answer) else None


def plain(text: str) -> str:
    r"""The text without \text, spaces and delimiters: equal plain texts are equal answers."""
    text = _TEXT.sub(r"\1", clean(text)).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    return _SPACES.sub("", text).rstrip(".")


def _decimals(gold: Fraction) -> int:
    """How many decimals have to agree: six, or six significant digits of a gold number below 1."""
    size = abs(gold)
    if not size or size >= 1:
        return 6
    exponent = len(str(size.numerator)) - len(str(size.denominator))
    return 5 - exponent + (size < Fraction(10) ** exponent)


def judge(job: list[str]) -> str:
    """Whether the answer equals the gold answer by algebra: right or wrong; runs in a worker.

    Args:
        job: [gold, answer].
    """
    from math_verify import verify

    gold, answer = _parse(job[0]), _parse(job[1])
    # The worker has a limit of its own; math-verify's uses SIGALRM.
    same = verify(gold, answer, float_rounding=_rounding(gold), timeout_seconds=None, raise_on_error=True)
    return "right" if same else "wrong"


def load() -> None:
    """Imports what `judge` needs; a worker does so before its clock runs."""
    judge(["x+1", "1+x"])


@lru_cache(maxsize=1024)
def _parse(text: str) -> list[Any]:
    """Expressions that math-verify reads in the whole of the answer, not in a part of it."""
    from math_verify import LatexExtractionConfig, parse

    text = _POWER.sub(r"\\times 10^{\1}", clean(text))
    text = _REPEATING.sub(lambda m: rf"\frac{{{(value := _repeating(m)).numerator}}}{{{value.denominator}}}", text)
    found: list[Any] = parse(
        f"${text}$", [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None, raise_on_error=True
    )
    return found


def _rounding(gold: list[Any]) -> int:
    """Decimals in which math-verify compares floats: more than its six where the gold number is below 1."""
    if not gold or not getattr(gold[0], "is_number", False):
        return 6
    value = gold[0].evalf()
    return _decimals(Fraction(str(value))) if value.is_Float and abs(value) > 1e-300 else 6
