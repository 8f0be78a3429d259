"""SQLite for queries that a model wrote: execution that can only read, and the field's ways to compare two results.

`execute` opens the file read-only and immutable on a fresh connection, lets an authorizer refuse all but reading,
and bounds time, rows and memory. One SQLite function on a huge text can outlast the time limit, which is checked
between steps of SQLite's program: a run that must not hang executes in a worker (workers.py), which is killed.
Not supported: a write-ahead log beside the file is not read (check-point a database before it is used here), and
virtual tables (full-text search) are refused, JSON's excepted.

Comparison (`same_result`), after BIRD's and Spider's official scripts (docs/graders.md says where it departs):
- bird: equal sets of rows, columns in order.
- spider: equal bags of rows under some permutation of the columns; where the gold query's outermost statement has
  ORDER BY, rows must also come in its order.
- bag: equal bags of rows, columns in order.
Values are equal as Python has them (1 = 1.0, NULL = NULL, '1' is not 1), and numbers of which one is a float also
within TOLERANCE, relative or absolute.
"""

import hashlib
import itertools
import math
import os
import re
import sqlite3
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

Rows = list[tuple[Any, ...]]

TOLERANCE = 1e-9
MAX_ROWS = 100_000
MAX_VALUE = 1_000_000  # bytes of one text or blob, and of a query
MAX_RESULT = 64 << 20  # bytes of one result, all in all
MAX_HEAP = 512 << 20  # bytes that SQLite may hold in this process
MAX_CACHE = 256 << 20  # bytes of the results that a cache holds
VALUE, ROW = 32, 64  # bytes that a value and a row count for, beside the length of texts and blobs

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_HARMLESS_PRAGMAS = {"table_info", "table_xinfo", "table_list", "foreign_key_list", "index_list", "index_info"}
_FORBIDDEN_FUNCTIONS = {"load_extension", "fts3_tokenizer"}


@dataclass(frozen=True)
class Result:
    """What a query gave: its rows, or an error (rows is then empty); `timeout` if the error is the time limit."""

    rows: Rows
    error: str | None = None
    timeout: bool = False
    seconds: float = 0.0
    size: int = 0  # bytes, about


def execute(database: str | Path, query: str, seconds: float = 3.0, reverse: bool = False) -> Result:
    """Runs one query on a database file and returns its rows or its error; it raises only if the file is missing.

    Args:
        database: the file.
        query: one statement; more than one, or one that does not merely read, is an error.
        seconds: its time limit.
        reverse: read tables backwards, as SQLite may: an undefined order then shows (see `nondeterministic`).
    """
    if not os.path.isfile(database):
        raise FileNotFoundError(f"{database}: no such database")
    start = time.perf_counter()
    try:
        try:
            rows, size = _run(database, query, start + seconds, reverse, str)
        except sqlite3.OperationalError as error:
            if "Could not decode to UTF-8" not in str(error):
                raise
            rows, size = _run(database, query, start + seconds, reverse, lossless)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        timeout = isinstance(error, sqlite3.OperationalError) and str(error) == "interrupted"
        message = f"over {seconds:g} s" if timeout else str(error) or type(error).__name__
        return Result([], message, timeout, time.perf_counter() - start)
    return Result(rows, None, False, time.perf_counter() - start, size)


def _run(database: str | Path, query: str, deadline: float, reverse: bool, text: Any) -> tuple[Rows, int]:
    _bound_heap()
    uri = f"file:{quote(os.path.abspath(database))}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    try:
        connection.execute("PRAGMA temp_store = MEMORY")  # no file is written, and MAX_HEAP bounds sorting too
        if reverse:
            connection.execute("PRAGMA reverse_unordered_selects = 1")
        if "json_" in query.lower():  # these two read JSON as tables; once known they need no leave of the authorizer
            connection.execute("SELECT 1 FROM json_each('[]'), json_tree('[]')")
        connection.text_factory = text
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(_authorize)
        connection.set_progress_handler(lambda: time.perf_counter() > deadline, 10_000)
        return _fetch(connection.execute(query))
    finally:
        connection.close()


@lru_cache(maxsize=1)
def _bound_heap() -> None:
    """Limits the memory of all of SQLite in this process."""
    connection = sqlite3.connect(":memory:")
    connection.execute(f"PRAGMA hard_heap_limit = {MAX_HEAP}")
    connection.close()


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    allowed = (
        action in _READING
        or (action == sqlite3.SQLITE_FUNCTION and second not in _FORBIDDEN_FUNCTIONS)
        or (action == sqlite3.SQLITE_PRAGMA and first in _HARMLESS_PRAGMAS)
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _fetch(cursor: sqlite3.Cursor) -> tuple[Rows, int]:
    if cursor.description is None:  # no statement at all, or one that gives no rows
        raise ValueError("not a query")
    rows: Rows = []
    size = 0
    for row in cursor:
        rows.append(row)
        size += ROW + VALUE * len(row) + sum(len(value) for value in row if isinstance(value, str | bytes))
        if len(rows) > MAX_ROWS:
            raise ValueError(f"over {MAX_ROWS} rows")
        if size > MAX_RESULT:
            raise ValueError(f"over {MAX_RESULT} bytes")
    return rows, size


def hash_databases(files: Iterable[str | Path]) -> str:
    """SHA-256 of the names and contents of database files, in their order; where they lie does not count."""
    digest = hashlib.sha256()
    for file in files:
        path = Path(file)
        stat = path.stat()
        content = _content_hash(path.absolute(), stat.st_size, stat.st_mtime_ns)
        digest.update(f"{content}  {path.name}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@cache
def _content_hash(path: Path, size: int, changed: int) -> str:
    """Of one file; size and time of change are there so that a file is read once until it changes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lossless(data: bytes) -> str:
    """Text that is not UTF-8, different for different bytes."""
    return data.decode("utf-8", "surrogateescape")


def quoted(name: str) -> str:
    """A name as SQL takes any."""
    return '"' + name.replace('"', '""') + '"'


class ResultCache:
    """Results of `execute` by (database, its time stamp, query), least recently used ones dropped first.

    Args:
        limit: bytes of results that it holds.
    """

    def __init__(self, limit: int = MAX_CACHE) -> None:
        self.free = limit
        self.results: OrderedDict[tuple[str, int, str], Result] = OrderedDict()

    def execute(self, database: str | Path, query: str, seconds: float = 3.0) -> Result:
        """As the function `execute`; a result over the time limit is not kept."""
        try:
            stamp = os.stat(database).st_mtime_ns
        except FileNotFoundError:
            raise FileNotFoundError(f"{database}: no such database") from None
        key = (str(database), stamp, query)
        if key in self.results:
            self.results.move_to_end(key)
            return self.results[key]
        result = execute(database, query, seconds)
        if not result.timeout:
            self.results[key] = result
            self.free -= self._size(key, result)
            while self.free < 0:
                self.free += self._size(*self.results.popitem(last=False))
        return result

    @staticmethod
    def _size(key: tuple[str, int, str], result: Result) -> int:
        return 1000 + len(key[2]) + result.size


def same_result(gold: Rows, rows: Rows, match: str, ordered: bool = False) -> bool:
    """Whether two results are equal.

    Args:
        gold: rows of the gold query.
        rows: rows of the query to judge.
        match: bird, spider or bag (see the file's head).
        ordered: with spider, whether the order of rows counts (`has_order`).
    """
    assert match in ("bird", "spider", "bag"), f"unknown comparison {match!r}"
    if not gold or not rows:
        return not gold and not rows
    if len(gold[0]) != len(rows[0]) or (match != "bird" and len(gold) != len(rows)):
        return False
    if _same(gold, rows, match, ordered):
        return True
    merged = _merge_floats(gold, rows)
    return merged is not None and _same(merged[0], merged[1], match, ordered)


def _same(gold: Rows, rows: Rows, match: str, ordered: bool) -> bool:
    if match == "bird":
        return set(gold) == set(rows)
    if match == "bag":
        return Counter(gold) == Counter(rows)
    columns, others = list(zip(*gold, strict=True)), list(zip(*rows, strict=True))
    if ordered:
        return Counter(columns) == Counter(others)
    return Counter(gold) == Counter(rows) or _permutes(columns, others)


def _permutes(gold: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> bool:
    """Whether some order of `other`'s columns makes its bag of rows that of `gold`.

    Columns are matched one by one; what stands so far sorts the rows into classes, and a column fits only if both
    results' classes stay equally large. Columns of different colour (`_colours`) cannot match, and of equal columns
    one is tried, so that neither 26 equal columns nor many alike ones are tried in all orders.
    """
    colours, other_colours = _colours(gold), _colours(other)
    if Counter(colours) != Counter(other_colours):
        return False
    kinds = {column: number for number, column in enumerate(other)}
    kind = [kinds[column] for column in other]

    def match(place: int, classes: list[int], other_classes: list[int], free: list[int]) -> bool:
        if place == len(gold):
            return True
        refined = list(zip(classes, gold[place], strict=True))
        sizes = Counter(refined)
        number = {key: i for i, key in enumerate(sizes)}
        tried = set()
        for j in free:
            if other_colours[j] != colours[place] or kind[j] in tried:
                continue
            tried.add(kind[j])
            candidate = list(zip(other_classes, other[j], strict=True))
            if Counter(candidate) == sizes and match(
                place + 1,
                [number[key] for key in refined],
                [number[key] for key in candidate],
                [k for k in free if k != j],
            ):
                return True
        return False

    return match(0, [0] * len(gold[0]), [0] * len(gold[0]), list(range(len(gold))))


def _colours(columns: list[tuple[Any, ...]]) -> list[int]:
    """A number for each column that depends on neither the order of rows nor that of columns.

    Colour refinement: a row's colour comes from its values and their columns' colours, a column's from its values
    and their rows' colours, three times over.
    """
    colours = [0] * len(columns)
    rows = list(zip(*columns, strict=True))
    for _ in range(3):
        row_colours = [hash(frozenset(Counter(zip(colours, row, strict=True)).items())) for row in rows]
        colours = [hash(frozenset(Counter(zip(row_colours, column, strict=True)).items())) for column in columns]
    return colours


def _merge_floats(*results: Rows) -> list[Rows] | None:
    """The results with numbers within TOLERANCE of each other made one; None if there are no such numbers.

    Neighbours in the sorted list of all numbers are joined, so equality stays transitive and rows stay hashable.
    Two integers are never joined.
    """
    numbers = sorted({value for rows in results for row in rows for value in row if isinstance(value, int | float)})
    merged: dict[float, float] = {}
    for number, after in itertools.pairwise(numbers):
        if (isinstance(number, float) or isinstance(after, float)) and math.isclose(
            number, after, rel_tol=TOLERANCE, abs_tol=TOLERANCE
        ):
            merged[after] = merged.get(number, number)
    if not merged:
        return None
    return [
        [tuple(merged.get(value, value) if isinstance(value, int | float) else value for value in row) for row in rows]
        for rows in results
    ]


_TOKEN = re.compile(
    r"--[^\n]*|/\*.*?(?:\*/|\Z)"  # comments
    r"|'(?:[^']|'')*+(?:'|\Z)|\"(?:[^\"]|\"\")*+(?:\"|\Z)|`(?:[^`]|``)*+(?:`|\Z)|\[[^\]]*(?:\]|\Z)"  # strings, names
    r"|[\w$]+|\S",
    re.DOTALL,
)


@dataclass(frozen=True)
class Token:
    """One token of a query: its text in capitals, how many parentheses are open around it, where it starts."""

    text: str
    depth: int
    start: int


def tokens(query: str) -> list[Token]:
    """The query's tokens without comments; a string or quoted name is one token."""
    found = []
    depth = 0
    for match in _TOKEN.finditer(query):
        text = match.group().upper()
        if text.startswith(("--", "/*")):
            continue
        depth -= text == ")"
        found.append(Token(text, depth, match.start()))
        depth += text == "("
    return found


def first_statement(text: str) -> str:
    """A text up to its first semicolon outside strings and comments."""
    for match in _TOKEN.finditer(text):
        if match.group() == ";":
            return text[: match.start()]
    return text


@lru_cache(maxsize=4096)
def has_order(query: str) -> bool:
    """Whether the outermost statement has ORDER BY: not one in a subquery, a window, a string or a comment."""
    outer = [token.text for token in tokens(query) if token.depth == 0]
    return ("ORDER", "BY") in itertools.pairwise(outer)


def nondeterministic(database: str | Path, query: str, match: str, seconds: float = 3.0, tries: int = 8) -> bool:
    """Whether the result depends on an order that the query leaves open: above all ties under a LIMIT.

    The query runs with its tables read backwards, then `tries` times with random() as the last key of every ORDER BY
    (as the only one of a LIMIT without); where SQLite takes no such key (after UNION), the first test stands alone.
    Results are compared as `match` compares them. A tie of two rows escapes with probability 2^-tries.
    """
    first = execute(database, query, seconds)
    others = [execute(database, query, seconds, reverse=True)]
    others += [execute(database, shuffled(query), seconds) for _ in range(tries)]
    ordered = has_order(query)
    return first.error is None and any(
        other.error is None and not same_result(first.rows, other.rows, match, ordered) for other in others
    )


def shuffled(query: str) -> str:
    """The query with random() as the last key of the ORDER BY of each SELECT, at every depth."""
    inserts: list[tuple[int, str]] = []
    scopes = ["select"]  # for each open parenthesis: select, order (its ORDER BY is being read) or other (a window ...)
    found = tokens(query)
    for token, after in zip(found, [*found[1:], Token("", 0, len(query))], strict=True):
        if token.text == "(":
            scopes.append("select" if after.text in ("SELECT", "WITH") else "other")
        elif (token.text, after.text, scopes[-1]) == ("ORDER", "BY", "select"):
            scopes[-1] = "order"
        elif token.text == "LIMIT" and scopes[-1] == "select":
            inserts.append((token.start, " ORDER BY random() "))
        elif scopes[-1] == "order" and token.text in ("LIMIT", ")", ";"):
            inserts.append((token.start, ", random() "))
            scopes[-1] = "select"
        if token.text == ")" and len(scopes) > 1:
            scopes.pop()
    if scopes[-1] == "order":
        inserts.append((len(query), "\n, random()"))
    for start, text in reversed(inserts):
        query = query[:start] + text + query[start:]
    return query
