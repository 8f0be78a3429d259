"""What every task is: prompts with gold answers, and rewards for what a model writes. Also how data files are read.

Read top-down: `Prompt`, `Reward` and `Task` are the interface that presampling, training and evaluation use; `Source`
is how a config names a task; `read_rows` is the JSON Lines reader whose errors name file, line and field.
"""

import difflib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dph.errors import DataError, UserError
from dph.text import damage, no_unicode

Outcome = Literal["right", "wrong", "no_answer", "timeout", "grader_error", "data_error"]


@dataclass(frozen=True)
class Prompt:
    """One question, as chat messages and, once `dph.prompts.tokenize` has read it, as the tokens of a model."""

    index: int  # counts from 0 within its task
    messages: tuple[dict[str, str], ...] = ()
    gold: Any = None  # whatever the task's grader needs; no model sees it
    meta: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)  # the chat up to where the answer begins


@dataclass(frozen=True)
class Reward:
    """What one answer earned: value 1.0 if `outcome` is right, else 0.0; `extracted` is the answer that was judged."""

    value: float
    outcome: Outcome
    extracted: str | None

    @classmethod
    def of(cls, outcome: Outcome, extracted: str | None = None) -> "Reward":
        """The reward of an outcome: 1 when right, 0 in every other case."""
        return cls(1.0 if outcome == "right" else 0.0, outcome, extracted)


FAILED = ("timeout", "grader_error", "data_error")  # outcomes that say nothing about the answer
FEWEST = 200  # answers before an error rate counts


class Task:
    """A set of prompts and its grader. A subclass fills `items` and writes `rewards`."""

    most_errors = 0.05  # of the answers that the grader may fail to judge

    def __init__(self, name: str, items: Sequence[Prompt] = ()) -> None:
        self.name = name
        self.items: list[Prompt] = list(items)
        self.outcomes: Counter[str] = Counter()  # of all answers that went through `counted`

    def prompts(self) -> list[Prompt]:
        """All prompts, in the file's order."""
        return self.items

    def limit(self, count: int) -> None:
        """Keeps the first `count` prompts."""
        self.items = self.items[:count]

    def check(self) -> None:
        """Raises a DataError for a gold answer that cannot be judged; load_task calls it once, after `limit`."""

    def record(self, prompt: Prompt) -> dict[str, Any]:
        """The columns that, beside a response, are enough to grade it again (regrade.py)."""
        return {"answer": prompt.gold}

    def content(self) -> dict[str, str]:
        """What else the rewards depend on beside gold answers and settings: a name, such as databases, and its hash."""
        return {}

    def nondeterministic(self) -> list[Prompt]:
        """The prompts whose gold answer may come out otherwise another day."""
        return []

    def reward(self, prompt: Prompt, text: str) -> Reward:
        """Grades one answer, exactly as a batch would."""
        return self.rewards([(prompt, text)])[0]

    def rewards(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        """Grades a batch of (prompt, response), in order."""
        raise NotImplementedError

    def counted(self, rewards: list[Reward]) -> list[Reward]:
        """The rewards, counted by outcome.

        Raises:
            UserError: the grader itself fails too often to be a teacher, or a reward is no finite number.
        """
        for reward in rewards:
            if not math.isfinite(reward.value):
                raise UserError(f"{self.name}: the task gave the reward {reward.value}; it should be a finite number")
        self.outcomes.update(reward.outcome for reward in rewards)
        failed, judged = self.outcomes["grader_error"] + self.outcomes["data_error"], self.outcomes.total()
        if judged >= FEWEST and failed > self.most_errors * judged:
            raise UserError(
                f"{self.name}: the grader failed on {failed} of {judged} answers (at most {self.most_errors:.0%} may "
                "fail); evaluate.py --regrade shows which"
            )
        return rewards

    def vote(self, prompt: Prompt, text: str, reward: Reward) -> str | None:
        """What an answer votes for where the majority decides, None where it does not vote.

        Answers that mean the same should give the same text. Here that is the judged answer, in small letters and
        with single blanks; a task that knows more of its answers overrides this.

        Args:
            reward: what `rewards` gave for this answer.
        """
        if reward.extracted is None or reward.outcome in FAILED:
            return None
        return " ".join(reward.extracted.split()).casefold() or None

    def close(self) -> None:
        """Ends whatever processes the grader holds. The task may be used again; it then starts them anew."""


@dataclass(frozen=True)
class Source:
    """A task as a config names it: TASK:WHERE[?option=value&...], e.g. math:gsm8k/test.jsonl?limit=200."""

    text: str
    task: str
    where: str
    options: dict[str, str]


def parse_source(text: str) -> Source:
    """Reads a source; a UserError says what its form should be."""
    form = f"source {text!r} should read TASK:WHERE or TASK:WHERE?option=value&option=value"
    task, colon, rest = text.partition(":")
    where, question, query = rest.rpartition("?") if "?" in rest else (rest, "", "")
    if not (task and colon and where):
        raise UserError(form)
    options: dict[str, str] = {}
    for part in query.split("&") if question else []:
        name, equals, value = part.partition("=")
        if not (name and equals):
            raise UserError(f"{form}; {part!r} has no '='")
        if name in options:
            raise UserError(f"source {text!r}: option {name!r} stands there twice")
        options[name] = value
    return Source(text, task, where, options)


def known_options(source: str, options: Collection[str], known: Collection[str]) -> None:
    """Raises a UserError for an option that the task does not have."""
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join((*known, 'limit'))}"
            raise UserError(f"source {source!r}: unknown option {name!r}; {hint}")


def whole_number(source: str, options: dict[str, str], name: str, default: int, low: int, high: int) -> int:
    """Option `name` as a whole number from low to high, or its default."""
    text = options.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise UserError(f"source {source!r}: {name} = {text!r} should be a whole number from {low} to {high}")
    return int(text)


@dataclass(frozen=True)
class Row:
    """One row of a JSON Lines file, with its place."""

    path: Path
    line: int
    values: dict[str, Any]

    def error(self, message: str) -> DataError:
        """A DataError that names this row."""
        return DataError(self.path, self.line, message)

    def text(self, field: str) -> str:
        """The field, which must be there and hold a text that is neither blank nor damaged."""
        value = self.values.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"{field} = {_shown(self.values, field)} should be a text")
        return self.undamaged(field, value)

    def response(self) -> str:
        """The field `response`, which may hold whatever a model has written, nothing included."""
        value = self.values.get("response")
        if not isinstance(value, str):
            raise self.error(f"response = {_shown(self.values, 'response')} should be a text")
        if (wrong := no_unicode(value)) is not None:
            raise self.error(f"response {wrong}")
        return value

    def integer(self, field: str) -> int:
        """The field, which must be there and hold a whole number."""
        value = self.values.get(field)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(f"{field} = {_shown(self.values, field)} should be a whole number")
        return value

    def undamaged(self, field: str, value: str) -> str:
        """`value`, which must have kept its backslashes and be valid Unicode (dph/text.py)."""
        if (found := damage(value)) is not None:
            raise self.error(f"{field} {found}")
        return value


def _shown(values: dict[str, Any], field: str) -> str:
    if field not in values:
        return f"nothing (the row has {', '.join(map(repr, values)) or 'no field'})"
    shown = repr(values[field])
    return shown if len(shown) <= 80 else shown[:77] + "..."


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSON Lines file: UTF-8, one object a line.

    A byte order mark, CRLF and a missing last newline are taken; blank lines are skipped. Lines end at a newline
    byte alone: U+2028 within a string is text. Anything else wrong is a DataError with its line. NaN and
    Infinity, which JSON does not know and Python writes, are read; only a column that is used may not hold them.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(path, None, "no such file") from None
    except OSError as error:
        raise DataError(path, None, f"cannot be read: {error.strerror}") from None
    found = False
    for line, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        found = True
        yield Row(path, line, _parse_line(path, line, raw))
    if not found:
        raise DataError(path, None, "is empty; it should hold one JSON object a line")


def _parse_line(path: Path, line: int, raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(path, line, f"is not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise DataError(path, line, f"is not JSON at column {error.colno} ({error.msg})") from None
    except RecursionError:
        raise DataError(path, line, "is nested too deeply") from None
    except ValueError:  # an integer of more digits than Python reads
        raise DataError(path, line, "holds a number that is too long") from None
    if not isinstance(values, dict):
        raise DataError(path, line, f"should be a JSON object, one a line; found {type(values).__name__}")
    return values


def chat(question: str, system: str, instruction: str) -> tuple[dict[str, str], ...]:
    """Messages for a bare question: the system message, if any, and the question with the instruction appended."""
    user = {"role": "user", "content": question + instruction}
    return ({"role": "system", "content": system}, user) if system else (user,)


def chat_messages(row: Row, field: str, system: str) -> tuple[dict[str, str], ...]:
    """Ready chat messages of a row (verl's `prompt`); a system message is put first where the row has none."""
    value = row.values.get(field)
    if not isinstance(value, list) or not value:
        raise row.error(f"{field} = {_shown(row.values, field)} should be a list of chat messages")
    messages = []
    for number, message in enumerate(value):
        parts = message if isinstance(message, dict) else {}
        role, content = parts.get("role"), parts.get("content")
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise row.error(
                f"{field}[{number}] should be {{role, content}} with role system, user or assistant and a text"
            )
        messages.append({"role": role, "content": row.undamaged(f"{field}[{number}].content", content)})
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return tuple(messages)


def ground_truth(row: Row) -> Any:
    """verl's `reward_model.ground_truth`."""
    holder = row.values["reward_model"]
    if not isinstance(holder, dict) or "ground_truth" not in holder:
        raise row.error("reward_model should be an object with a ground_truth")
    return holder["ground_truth"]
