"""The miniature as a task: its prompt sets, its rewards, and how widely answers spread over the styles.

What it is: `miniature:train`, `validation` and `test` are questions about the four databases that RL sees, `cross`
about two that it never does; `arithmetic` is out of domain. A question's text decides its split, so none stands in two
sets, and only those of `train` are in the base model's corpus. Choose settings on `validation`. A query earns 1 when
its rows equal the gold query's as bags, arithmetic when its answer is exact. The seed makes the world: the databases,
written as SQLite files into FOLDER/miniature-seedS/, the split, the gold styles and the questions.

Simplified: queries run in this process, as no words of the world can make SQLite outlast its time limit.

How to read it: the questions come from `miniature_world.py`; this file draws the sets, judges and counts styles.
"""

import math
import os
import random
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dph.config import DataConfig
from dph.errors import UserError
from dph.tasks.base import Prompt, Reward, Row, Task, chat, known_options, whole_number
from dph.tasks.miniature_world import (
    CROSS,
    DATABASES,
    TRAINED,
    Database,
    Question,
    draw_question,
    draw_sum,
    final_number,
    gold_query,
    gold_style,
    joined,
    make_rows,
    recognise,
    split_of,
    sum_of,
    write_database,
)
from dph.tasks.sqlite import ResultCache, Rows, execute, same_result

COUNTS = {"train": 600, "validation": 200, "test": 200, "cross": 100, "arithmetic": 100}
PATIENCE = 10_000  # draws without a new question before a set counts as exhausted


class MiniatureTask(Task):
    """One prompt set of the miniature.

    Args:
        where: a name of COUNTS.
        options: `count`, how many questions.
        data: its grader_timeout bounds a query; system and instruction must be empty.
        seed: of the world.
        folder: the runs' folder, where the databases lie.
        stored: as in load_task; `answer` is the gold query or number, `database` the place's name, `seed` the world's.

    Raises:
        UserError: an unknown set, option or value.
    """

    def __init__(
        self,
        where: str,
        options: dict[str, str],
        data: DataConfig,
        seed: int,
        folder: Path,
        stored: Sequence[Row] | None = None,
    ) -> None:
        source = f"miniature:{where}"
        if where not in COUNTS:
            raise UserError(f"source {source!r}: unknown set {where!r}; known: {', '.join(COUNTS)}")
        known_options(source, options, ("count",))
        count = whole_number(source, options, "count", COUNTS[where], 1, 100_000)
        for name in ("system", "instruction"):
            if value := getattr(data, name):
                raise UserError(f"data.{name} = {value!r} should be empty: the miniature knows no words but its own")
        self.seconds, self.cache = data.grader_timeout, ResultCache()
        self.seed, self.databases = seed, write_databases(folder, seed)
        super().__init__(source)
        if stored is not None:
            self.items = [self._stored(index, row) for index, row in enumerate(stored)]
            return
        for question in self._questions(where, seed):
            self.items.append(self._prompt(len(self.items), question, seed))
            if len(self.items) == count:
                return
        raise UserError(f"source {source!r}: count = {count} is more than its {len(self.items)} different questions")

    def _questions(self, where: str, seed: int) -> Iterator[Question]:
        """Yields different questions of the set whose gold result is not empty, until few new ones are left."""
        rng = random.Random(f"{seed}|{where}")
        split = where if where in ("train", "validation") else "test"
        seen: set[str] = set()
        misses = 0
        while misses < PATIENCE:
            if where == "arithmetic":
                question = draw_sum(rng)
            else:
                question = draw_question(rng, CROSS if where == "cross" else TRAINED)
            misses += 1
            if question.text in seen or split_of(seed, question.text) != split:
                continue
            seen.add(question.text)
            if where == "arithmetic" or self._gold_rows(question, seed) not in ([], [(0,)]):
                misses = 0
                yield question

    def _gold_rows(self, question: Question, seed: int) -> Rows:
        result = execute(self.databases[question.database], joined(gold_query(question, seed)))
        assert result.error is None, f"{question.text}: {result.error}"
        return result.rows

    def _prompt(self, index: int, question: Question, seed: int) -> Prompt:
        meta: dict[str, Any] = {"family": question.family, "database": question.database}
        meta["difficulty"] = "hard" if question.hard else "easy"
        if question.database == "arithmetic":
            return Prompt(index, chat(question.text, "", ""), sum_of(question), meta)
        meta |= {"style": gold_style(question, seed)}
        return Prompt(index, chat(question.text, "", ""), joined(gold_query(question, seed)), meta)

    def _stored(self, index: int, row: Row) -> Prompt:
        database = row.text("database")
        if database not in (*self.databases, "arithmetic"):
            raise row.error(f"database = {database!r} should be arithmetic or one of {', '.join(self.databases)}")
        gold = row.integer("answer") if database == "arithmetic" else row.text("answer")
        return Prompt(index, (), gold, {"database": database})

    def record(self, prompt: Prompt) -> dict[str, Any]:
        """The world's seed, the database's name there, and the gold query or number."""
        return {"seed": self.seed, "database": prompt.meta["database"], "answer": prompt.gold}

    def rewards(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        """1 for equal bags of rows or an exact number, else 0; `extracted` is the query or the number."""
        return self.counted(
            [self._sum(*pair) if pair[0].meta["database"] == "arithmetic" else self._query(*pair) for pair in pairs]
        )

    def _sum(self, prompt: Prompt, text: str) -> Reward:
        number = final_number(text)
        if number is None:
            return Reward.of("no_answer")
        return Reward.of("right" if number == prompt.gold else "wrong", str(number))

    def _query(self, prompt: Prompt, text: str) -> Reward:
        query = joined(" ".join(text.split()))
        if not query.startswith("SELECT "):
            return Reward.of("no_answer")
        database = self.databases[prompt.meta["database"]]
        gold, result = (self.cache.execute(database, each, self.seconds) for each in (prompt.gold, query))
        if gold.error is not None:
            return Reward.of("data_error", gold.error)
        if result.timeout:
            return Reward.of("timeout", query)
        right = result.error is None and same_result(gold.rows, result.rows, "bag")
        return Reward.of("right" if right else "wrong", query)

    def vote(self, prompt: Prompt, text: str, reward: Reward) -> str | None:
        """The number, or the query's rows in any order; a query that fails does not vote."""
        if reward.extracted is None or prompt.meta["database"] == "arithmetic":
            return super().vote(prompt, text, reward)
        result = self.cache.execute(self.databases[prompt.meta["database"]], reward.extracted, self.seconds)
        return None if result.error is not None or result.timeout else repr(sorted(result.rows, key=repr))


def write_databases(folder: Path, seed: int) -> dict[str, Path]:
    """Writes the six databases of a seed, unless they are there, and returns their files by name."""
    home = folder / f"miniature-seed{seed}"
    home.mkdir(parents=True, exist_ok=True)
    files = {database.name: home / f"{database.name}.sqlite" for database in DATABASES}
    for database in DATABASES:
        file = files[database.name]
        if _holds(file, database, seed):
            continue
        with tempfile.TemporaryDirectory(prefix=".database-", dir=home) as scratch:
            made = Path(scratch) / file.name
            connection = sqlite3.connect(made)
            write_database(database, seed, connection)
            connection.close()
            os.replace(made, file)
    return files


def _holds(file: Path, database: Database, seed: int) -> bool:
    """Returns whether the file holds just the rows that this seed makes."""
    parents, children = make_rows(database, seed)
    tables = ((database.parent, parents), (database.child, children))
    return file.is_file() and all(
        execute(file, f"SELECT * FROM {table} ORDER BY id").rows == rows for table, rows in tables
    )


def style_of(prompt: Prompt, text: str) -> int | None:
    """Returns which style of its prompt's family an answer uses, right or wrong, or None where it uses none of them."""
    return recognise(prompt.meta["family"], text)


def style_spread(styles: Sequence[int | None]) -> tuple[float, float]:
    """Returns the entropy, in bits, and the top style's share of one question's answers; None is left out."""
    counts = Counter(style for style in styles if style is not None)
    if not counts:
        return math.nan, math.nan
    shares = [count / counts.total() for count in counts.values()]
    return -sum(share * math.log2(share) for share in shares), max(shares)
