"""Further databases of one schema, so that a query right by chance on one file is wrong on another.

A constant (SELECT 15), a join that loses nothing here, a comparison that no row decides: each gives the gold result on
one file. Spider's remedy is the test suite: several files of one schema, on all of which gold result and result must
agree. It is applied in two ways:
- `neighbours`: where a database lies in a folder of its own name, as Spider's and BIRD's do, the other .sqlite files of
  that folder belong to it, as in Spider's published test suites;
- `make_variants`: copies of the file with rows dropped and values exchanged within their columns. They follow from the
  file and the seed alone, so that stored answers are graded again on the same ones.
Keys stay as they are, so joins still find their rows; what a dropped row leaves behind shows which join was meant.
"""

import hashlib
import os
import random
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dph.tasks.sqlite import lossless, quoted

DROPPED = 0.2  # of the rows of a table
EXCHANGED = 0.2  # of the values of a column, for others of the same column
SHIFTED = 0.1  # of the numbers of a column, by one
ROUNDED = 0.1  # of the numbers of a column, to one digit: questions compare with round numbers
EMPTIED = 0.03  # of the values of a column that may be NULL
MOST_ROWS = 20_000  # of a table that are looked at; a larger table keeps the rest as it is
VERSION = 1  # of the way in which they are made


def neighbours(database: str) -> list[str]:
    """The other .sqlite files in the database's folder, if the folder has its name; else none."""
    path = Path(database)
    if path.parent.name != path.stem:
        return []
    return [str(other) for other in sorted(path.parent.glob("*.sqlite")) if other != path]


def make_variants(database: str, count: int, seed: int, folder: Path) -> list[str]:
    """Changed copies of a database; those that are there from an earlier call are not made again.

    Args:
        database: the file.
        count: how many.
        seed: of what is changed.
        folder: where they are kept.

    Raises:
        sqlite3.DatabaseError: the file is no database.
    """
    if not count:
        return []
    with open(database, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    home = folder / "sql_variants" / f"{Path(database).stem}-{digest}-{VERSION}"
    home.mkdir(parents=True, exist_ok=True)
    made = []
    for number in range(count):
        path = home / f"{seed}-{number}.sqlite"
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}")
            shutil.copyfile(database, unfinished)
            _change(unfinished, random.Random(f"{seed} {number} {digest}"))
            os.replace(unfinished, path)
        made.append(str(path))
    return made


def _change(path: Path, source: random.Random) -> None:
    """Drops rows and exchanges values in every table of a file."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.text_factory = lossless
    try:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for (trigger,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {quoted(trigger)}")
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%' ORDER BY name"
        tables = [name for (name,) in connection.execute(query)]
        connection.execute("BEGIN")
        for table in tables:
            if not table.startswith("sqlite_"):
                _change_table(connection, table, source)
        connection.execute("COMMIT")
    finally:
        connection.close()


def _change_table(connection: sqlite3.Connection, table: str, source: random.Random) -> None:
    name = quoted(table)
    columns = connection.execute(f"PRAGMA table_info({name})").fetchall()  # (number, name, type, not null, ..., key)
    references = {row[3] for row in connection.execute(f"PRAGMA foreign_key_list({name})").fetchall()}
    try:
        rows = connection.execute(f"SELECT rowid, * FROM {name} ORDER BY rowid LIMIT {MOST_ROWS}").fetchall()
    except sqlite3.OperationalError:  # a table WITHOUT ROWID keeps its rows
        return
    dropped = [row[0] for row in rows[1:] if source.random() < DROPPED]
    connection.executemany(f"DELETE FROM {name} WHERE rowid = ?", [(rowid,) for rowid in dropped])
    gone = set(dropped)
    kept = [row for row in rows if row[0] not in gone]
    for place, (_, column, _, not_null, _, key) in enumerate(columns, start=1):
        if key:
            continue
        values = [row[place] for row in rows]
        may_be_empty = not not_null and column not in references
        changes = []
        for row in kept:
            value = _changed(row[place], values, may_be_empty, column in references, source)
            if value != row[place] and _is_storable(value):
                changes.append((value, row[0]))
        # A value that must be unique stays where another row has the new one.
        connection.executemany(f"UPDATE OR IGNORE {name} SET {quoted(column)} = ? WHERE rowid = ?", changes)


def _is_storable(value: Any) -> bool:
    """Whether a value can be written back: not text that is not UTF-8."""
    return not isinstance(value, str) or value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _changed(value: Any, values: Sequence[Any], may_be_empty: bool, is_reference: bool, source: random.Random) -> Any:
    """A value, or another one of its column, the number beside it, a round one, or NULL."""
    chance = source.random()
    if chance < EXCHANGED:
        return source.choice(values)
    chance -= EXCHANGED
    if isinstance(value, int | float) and not is_reference:
        if chance < SHIFTED:
            return value + source.choice((-1, 1))
        if chance < SHIFTED + ROUNDED:
            return type(value)(float(f"{value:.0e}"))
    if may_be_empty and 1 - EXCHANGED - chance < EMPTIED:
        return None
    return value
