r"""Generated arithmetic: sums, differences and products, a task that needs no data file and grades in microseconds.

`arithmetic:train?ops=+*&digits=1&shots=4&count=300`: `count` distinct questions whose operands have `digits` digits
each, behind `shots` solved ones as earlier turns of the chat. A hash of the sum itself, not of its wording nor of its
operands' order, decides whether it belongs to `train` (four fifths) or `test`, so the two share nothing at any seed.
The answer is the number in the last box, else the last number of the response; it must be exactly right.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dph.errors import UserError
from dph.tasks.base import Prompt, Reward, Row, Task, chat, known_options, whole_number
from dph.tasks.math_extraction import last_box
from dph.tasks.math_notation import number

if TYPE_CHECKING:
    from dph.config import DataConfig

SPLITS = ("train", "test")
WORDINGS = ("What is {}?", "Calculate {}.", "{} = ?")
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
PATIENCE = 10_000  # draws without a new question before there are no more

_NUMERAL = re.compile(r"(?<![\d.])[-−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


class ArithmeticTask(Task):
    """Generated questions.

    Args:
        where: train or test.
        options: ops (some of + - *), digits (1 to 9), count, shots; by default +-*, 2, 300, 0.
        data: system, instruction.
        seed: of the questions drawn.
        folder: not used.
        stored: as in load_task; `answer` is the gold number.
    """

    def __init__(
        self,
        where: str,
        options: dict[str, str],
        data: "DataConfig",
        seed: int,
        folder: Path = Path(),
        stored: Sequence[Row] | None = None,
    ):
        source = f"arithmetic:{where}"
        known_options(source, options, ("ops", "digits", "count", "shots"))
        if where not in SPLITS:
            raise UserError(f"source {source!r}: {where!r} should be one of {', '.join(SPLITS)}")
        ops = options.get("ops", "+-*")
        if not ops or set(ops) - set(OPERATIONS):
            raise UserError(f"source {source!r}: ops = {ops!r} should be some of {''.join(OPERATIONS)}")
        digits = whole_number(source, options, "digits", 2, 1, 9)
        count = whole_number(source, options, "count", 300, 1, 1_000_000)
        shots = whole_number(source, options, "shots", 0, 0, 100)
        super().__init__(source)
        if stored is not None:
            self.items = [Prompt(index, (), row.integer("answer"), {}) for index, row in enumerate(stored)]
            return
        # Every prompt has the same solved examples before it; they are training questions, and asked nowhere.
        taken: set[str] = set()
        examples: list[Question] = []
        for shot in range(shots):
            examples += draw(random.Random(f"shot {shot} {seed}"), ops, digits, "train", 1, taken)
            taken.add(sum_of(*examples[-1][1:]))
        questions = draw(random.Random(f"{where} {seed}"), ops, digits, where, count, taken)
        answer = "\\boxed{{{}}}" if "\\boxed" in data.instruction else "{}"
        before = [
            turn
            for wording, a, op, b in examples
            for turn in (
                {"role": "user", "content": wording.format(f"{a} {op} {b}") + data.instruction},
                {"role": "assistant", "content": answer.format(OPERATIONS[op](a, b))},
            )
        ]
        for index, (wording, a, op, b) in enumerate(questions):
            *system, last = chat(wording.format(f"{a} {op} {b}"), data.system, data.instruction)
            self.items.append(Prompt(index, (*system, *before, last), OPERATIONS[op](a, b), {"operation": op}))

    def rewards(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        """Grades a batch, in this process."""
        return self.counted([grade(prompt.gold, text) for prompt, text in pairs])


Question = tuple[str, int, str, int]  # wording, operand, operation, operand


def draw(source: random.Random, ops: str, digits: int, split: str, count: int, taken: set[str]) -> list[Question]:
    """`count` distinct questions of a split, none of them a sum in `taken`."""
    low, high = (0, 9) if digits == 1 else (10 ** (digits - 1), 10**digits - 1)
    found: dict[Question, None] = {}
    idle = 0
    while len(found) < count:
        question = (source.choice(WORDINGS), source.randint(low, high), source.choice(ops), source.randint(low, high))
        idle += 1
        if question not in found and sum_of(*question[1:]) not in taken and split_of(*question[1:]) == split:
            found[question] = None
            idle = 0
        if idle > PATIENCE:
            raise UserError(
                f"source 'arithmetic:{split}': count = {count} should be at most {len(found)}, all there are of "
                f"ops = {ops}, digits = {digits}"
            )
    return list(found)


def sum_of(a: int, op: str, b: int) -> str:
    """What a question is about, however worded; a + b and b + a are one, and so are a - b and b - a."""
    return f"{min(a, b)}{op}{max(a, b)}"


def split_of(a: int, op: str, b: int) -> str:
    """Whether a sum is for training or a test question."""
    return "test" if hashlib.sha256(sum_of(a, op, b).encode()).digest()[0] < 256 // 5 else "train"


def grade(gold: int, text: str) -> Reward:
    """The reward of a response: is its last number, or its box's, the gold one?"""
    answer = last_box(text) or (numerals[-1] if (numerals := _NUMERAL.findall(text)) else None)
    if answer is None:
        return Reward.of("no_answer")
    given = number(answer)
    return Reward.of("right" if given is not None and given.value == gold else "wrong", answer)
