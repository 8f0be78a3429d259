r"""Math word problems: data sets as they are published, and the reward: is the answer equal to the gold answer?

A row is read by the columns it has (`_question`, `_answer`): GSM8K, SVAMP, MultiArith, MATH and its kin (AIME24, AMC23,
College Math), Minerva, OlympiadBench, verl's; others through [data] fields = {prompt = "...", answer = "..."}.
Which answer a response gives is math_extraction.py's, whether it is right math_equality.py's. Numbers, words and lists
of them are compared in this process at once; the rest by algebra (math_algebra.py) in a worker process (workers.py).
"""

import math
from collections.abc import Sequence
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
from dph.tasks.math_equality import LONGEST, Match, quick
from dph.tasks.math_extraction import extract, last_box
from dph.tasks.math_notation import clean, plain
from dph.tasks.math_parts import expressions
from dph.tasks.math_units import read_unit, unwrapped
from dph.tasks.workers import GraderPool

if TYPE_CHECKING:
    from dph.config import DataConfig

Pair = tuple[str, str]  # gold answer, answer


class MathTask(Task):
    """Questions of one JSON Lines file.

    Args:
        where: the file.
        options: none but `limit`.
        data: system, instruction, fields, strict, math_match, grader_timeout, grader_workers.
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
        self.path = Path(where)
        for index, row in enumerate(read_rows(self.path) if stored is None else stored):
            messages = _question(row, data) if stored is None else ()
            unit = row.values.get("unit")
            meta = {"line": row.line, **({"unit": unit.strip()} if isinstance(unit, str) and unit.strip() else {})}
            self.items.append(Prompt(index, messages, _answer(row, data), meta))
        self.strict = data.strict
        self.match: Match = "value" if data.math_match == "value" else "number"
        self.judgeable: dict[str, bool] = {}  # of the gold answers that take algebra
        self.pool = GraderPool("dph.tasks.math_algebra:judge", data.grader_workers, data.grader_timeout)

    def check(self) -> None:
        """Compares every gold answer that takes algebra with itself; a DataError names the first that fails."""
        self._try([prompt.gold for prompt in self.items])
        for prompt in self.items:
            if not self.judgeable.get(prompt.gold, True):
                row = Row(self.path, prompt.meta["line"], {})
                raise row.error(f"the gold answer {prompt.gold!r} cannot be judged: it has no value that algebra reads")

    def _try(self, golds: Sequence[str]) -> None:
        """Notes of the gold answers that only algebra compares whether it can; each is tried once."""
        untried = [gold for gold in dict.fromkeys(golds) if gold not in self.judgeable and expressions(gold)]
        verdicts = self.pool.run([(gold, gold, self.match) for gold in untried])
        for gold, verdict in zip(untried, verdicts, strict=True):
            self.judgeable[gold] = verdict.value == "right"

    def rewards(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        """Grades a batch; only what neither texts nor numbers decide goes to the workers, and once each."""
        answers = [extract(text, self.strict) for _, text in pairs]
        jobs = [
            None if answer is None else _with_unit(prompt, answer)
            for (prompt, _), answer in zip(pairs, answers, strict=True)
        ]
        outcomes = self._outcomes([job for job in dict.fromkeys(jobs) if job is not None])
        rewards = []
        for job, answer in zip(jobs, answers, strict=True):
            rewards.append(Reward.of("no_answer") if job is None else Reward.of(outcomes[job], answer))
        return self.counted(rewards)

    def _outcomes(self, jobs: Sequence[Pair]) -> dict[Pair, Outcome]:
        """The outcome of each pair of gold answer and answer."""
        self._try([gold for gold, _ in jobs])
        outcomes: dict[Pair, Outcome] = {}
        undecided = []
        for gold, answer in jobs:
            right = quick(gold, answer, self.match)
            if not self.judgeable.get(gold, True):
                outcomes[gold, answer] = "data_error"
            elif right is None:
                undecided.append((gold, answer))
            else:
                outcomes[gold, answer] = "right" if right else "wrong"
        verdicts = self.pool.run([(gold, answer, self.match) for gold, answer in undecided])
        for job, verdict in zip(undecided, verdicts, strict=True):
            outcomes[job] = verdict.value if verdict.outcome == "ok" else verdict.outcome
        return outcomes

    def record(self, prompt: Prompt) -> dict[str, Any]:
        """Gold answer and unit, if any."""
        return {"answer": prompt.gold, **({"unit": prompt.meta["unit"]} if "unit" in prompt.meta else {})}

    def close(self) -> None:
        """Ends the workers."""
        self.pool.close()


def _with_unit(prompt: Prompt, answer: str) -> Pair:
    """Gold answer and answer, with the unit of the row (OlympiadBench), if it has one."""
    unit = prompt.meta.get("unit")
    if unit is None or len(answer) > LONGEST:
        return prompt.gold, answer
    bare = without_unit(answer, unit)
    is_known = bare == answer and read_unit(f" {clean(unit)}")
    return (f"{prompt.gold} \\text{{{unwrapped(clean(unit))}}}" if is_known else prompt.gold), bare


def without_unit(answer: str, unit: str) -> str:
    r"""The answer without the row's unit at its end, be it 5 cm or 5 \mathrm{~cm}; unchanged where it has another."""
    bare = " ".join(unwrapped(clean(unit)).split())
    text = " ".join(unwrapped(clean(answer)).split())
    head = text.removesuffix(bare).strip()
    return head if bare and head and head != text else answer


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
    if isinstance(value, float) and not math.isfinite(value):
        raise row.error(f"{field} = {value!r} should be a finite number")
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else row.undamaged(field, str(value))
    hashes, text = text.rpartition("####")[1:]
    if (boxed := last_box(text)) is not None:
        text = boxed
    elif field == "solution" and not hashes:
        raise row.error("solution holds no \\boxed answer, and there is no field answer")
    if not plain(text):  # nothing, as would be an answer of nothing
        raise row.error(f"{field} = {value!r} holds no answer")
    return text.strip()
