"""Text-to-SQL: prompts from Spider, BIRD and verl rows, and the reward: does the query give the gold query's result?

A row is one of
- verl's: `prompt` (chat messages), `reward_model.ground_truth` = {db_id, gold_sql, cmp_method};
- Spider's or BIRD's own: `question`, `db_id`, `query` or `SQL`, `evidence` or none; the prompt is then made of the
  database's schema. Other column names: [data] fields = {prompt = "...", answer = "..."}.
A database is DB_ID.sqlite, DB_ID/DB_ID.sqlite or the file DB_ID itself, under [data] db_root. Further files in a folder
DB_ID are its test suite: an answer must agree with the gold query on all of them, and with [data] sql_variants on as
many changed copies (sql_variants.py). The answer is the last ```sql or ```sqlite block that is not empty; with strict =
false a response without one counts from its first SELECT or WITH on. Execution and comparison are in sqlite.py and
happen in a worker process, which keeps the gold results.
"""

import os
import re
import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dph.errors import UserError
from dph.tasks.base import Prompt, Reward, Row, Task, chat, chat_messages, ground_truth, known_options, read_rows
from dph.tasks.sql_variants import make_variants, neighbours
from dph.tasks.sqlite import (
    ResultCache,
    execute,
    first_statement,
    has_order,
    hash_databases,
    nondeterministic,
    quoted,
    same_result,
)
from dph.tasks.workers import GraderPool, Verdict

if TYPE_CHECKING:
    from dph.config import DataConfig

INSTRUCTION = "\n\nWrite one SQLite query that answers the question, in a ```sql block."
GRACE = 0.5  # seconds beyond a query's own limit until its worker is killed
EXAMPLES = 2  # values shown of each column
EXAMPLE_LENGTH = 40  # letters of a shown text
MATCHES = ("bird", "spider")


class SQLTask(Task):
    """Questions of one JSON Lines file, each about a database.

    Args:
        where: the file.
        options: none but `limit`.
        data: system, instruction, fields, strict, db_root, sql_match (where a row has no cmp_method), sql_variants,
            grader_timeout, grader_workers.
        seed, folder: of the changed copies of databases, and where they are kept.
        stored: as in load_task; a row needs no question.
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
        known_options(f"sql:{where}", options, ())
        if not Path(data.db_root).is_dir() or not data.db_root:
            raise UserError(f"data.db_root = {data.db_root!r} should be the folder of the databases of sql:{where}")
        self.path, self.data = Path(where), data
        schemas: dict[str, str] = {}
        super().__init__(f"sql:{where}")
        for index, row in enumerate(read_rows(self.path) if stored is None else stored):
            gold = _gold(row, data)
            messages = _question(row, data, gold["database"], schemas) if stored is None else ()
            self.items.append(Prompt(index, messages, gold, {"line": row.line}))
        self.seed, self.folder = seed, folder
        self.suites: dict[str, tuple[list[str], list[str]]] = {}
        databases = {prompt.gold["database"] for prompt in self.items}
        files = 1 + data.sql_variants + max((len(neighbours(database)) for database in databases), default=0)
        # A worker may have to run the gold query on top of the answer's; `check` learns how long that takes.
        self.limit_of_answer = files * data.grader_timeout + GRACE
        self.pool = GraderPool("dph.tasks.sql:judge", data.grader_workers, 2 * self.limit_of_answer)

    def _suite(self, database: str) -> tuple[list[str], list[str]]:
        """The other files of a database's folder, and its changed copies, which are made when first asked for."""
        if database not in self.suites:
            try:
                made = make_variants(database, self.data.sql_variants, self.seed, self.folder)
            except sqlite3.DatabaseError as error:
                raise UserError(f"{database}: cannot be copied with rows changed: {error}") from None
            self.suites[database] = (neighbours(database), made)
        return self.suites[database]

    def check(self) -> None:
        """Runs every gold query; a DataError names the first row whose query fails or takes too long."""
        jobs = [self._job(prompt, prompt.gold["query"]) for prompt in self.items]
        slowest = 0.0
        for prompt, verdict in zip(self.items, self.pool.run(jobs), strict=True):
            if verdict.outcome != "ok" or verdict.value["outcome"] != "right":
                detail = verdict.value["detail"] if verdict.outcome == "ok" else verdict.value
                row = Row(self.path, prompt.meta["line"], {})
                raise row.error(f"the gold query fails on {prompt.gold['database']}: {detail}")
            slowest = max(slowest, verdict.value["seconds"])
        # A worker that replaces a killed one runs the gold query anew, on top of the answer's.
        self.pool.limit = self.limit_of_answer + 2 * slowest

    def rewards(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        """Grades a batch; the same query to the same prompt is run once."""
        asked = [(prompt, extract(text, self.data.strict)) for prompt, text in pairs]
        jobs = {(prompt.index, query): self._job(prompt, query) for prompt, query in asked if query is not None}
        verdicts: dict[tuple[int, str | None], Verdict] = {}
        verdicts.update(zip(jobs, self.pool.run(list(jobs.values())), strict=True))
        return self.counted([_reward(verdicts.get((prompt.index, query)), query) for prompt, query in asked])

    def record(self, prompt: Prompt) -> dict[str, Any]:
        """Database, its path taken from db_root, gold query and comparison; with changed copies also their seed."""
        database = os.path.relpath(prompt.gold["database"], self.data.db_root)
        found = {"db_id": database, "query": prompt.gold["query"], "cmp_method": prompt.gold["match"]}
        return {**found, "seed": self.seed} if self.data.sql_variants else found

    def content(self) -> dict[str, str]:
        """All databases: those of the prompts, the further files of their folders, the changed copies."""
        files: list[str] = []
        for database in sorted({prompt.gold["database"] for prompt in self.items}):
            further, made = self._suite(database)
            files += [database, *further, *made]
        return {"databases": hash_databases(files)}

    def nondeterministic(self) -> list[Prompt]:
        """The prompts whose gold result SQLite may give otherwise another day: ties under LIMIT, orders left open."""
        return [
            prompt
            for prompt in self.items
            if nondeterministic(
                prompt.gold["database"], prompt.gold["query"], prompt.gold["match"], self.data.grader_timeout
            )
        ]

    def close(self) -> None:
        """Ends the workers."""
        self.pool.close()

    def _job(self, prompt: Prompt, query: str) -> dict[str, Any]:
        also, made = self._suite(prompt.gold["database"])
        asked = {"gold": prompt.gold["query"], "query": query, "seconds": self.data.grader_timeout}
        return {**prompt.gold, **asked, "also": also, "variants": made}


def _reward(verdict: Verdict | None, query: str | None) -> Reward:
    if verdict is None:
        return Reward.of("no_answer")
    return Reward.of(verdict.value["outcome"] if verdict.outcome == "ok" else verdict.outcome, query)


# ---- grading -----------------------------------------------------------------------------------------------------

_BLOCK = re.compile(r"```[ \t]*sql(?:ite3?)?\b[ \t]*\r?\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_LINE_START = re.compile(r"^[ \t]*(?:SELECT|WITH)\b", re.MULTILINE | re.IGNORECASE)
_START = re.compile(r"\bSELECT\b", re.IGNORECASE)

_cache = ResultCache()  # of this process; a worker's holds gold results and what was asked before


def extract(text: str, strict: bool) -> str | None:
    """The query that a response gives (see the file's head), or None."""
    blocks = _BLOCK.findall(text)
    query = next((str(block) for block in reversed(blocks) if block.strip()), "")
    if not blocks and not strict and (start := _LINE_START.search(text) or _START.search(text)):
        query = first_statement(text[start.start() :].partition("```")[0])
    return query.strip() or None


def judge(job: dict[str, Any]) -> dict[str, Any]:
    """Grades one query on all files of its database; runs in a worker, or anywhere.

    Args:
        job: {database, gold, query, match (bird, spider or bag), seconds}; and, if there are any, `also`: further files
            that must agree; `variants`: changed copies, of which those count on which the gold query gives rows.

    Returns:
        {outcome: right, wrong, timeout or data_error, detail: the error of a query that failed or None, seconds: of all
        that ran}. The first file that disagrees decides.
    """
    verdict: dict[str, Any] = {"outcome": "right", "detail": None, "seconds": 0.0}
    spent = 0.0
    for database in (job["database"], *job.get("also", ())):
        verdict = _judge_on(database, job)
        spent += verdict["seconds"]
        if verdict["outcome"] != "right":
            return {**verdict, "seconds": spent}
    for database in job.get("variants", ()):
        gold = _cache.execute(database, job["gold"], job["seconds"])
        spent += gold.seconds
        if gold.rows:
            verdict = _judge_on(database, job)
            spent += verdict["seconds"]
        if verdict["outcome"] != "right":
            break
    return {**verdict, "seconds": spent}


def _judge_on(database: str, job: dict[str, Any]) -> dict[str, Any]:
    """Grades one query on one file."""
    try:
        gold = _cache.execute(database, job["gold"], job["seconds"])
    except FileNotFoundError as error:
        return {"outcome": "data_error", "detail": str(error), "seconds": 0.0}
    if gold.error is not None:
        return {"outcome": "data_error", "detail": gold.error, "seconds": gold.seconds}
    result = _cache.execute(database, job["query"], job["seconds"])
    if result.error is not None:
        return {"outcome": "timeout" if result.timeout else "wrong", "detail": result.error, "seconds": result.seconds}
    same = same_result(gold.rows, result.rows, job["match"], has_order(job["gold"]))
    return {"outcome": "right" if same else "wrong", "detail": None, "seconds": result.seconds}


# ---- rows --------------------------------------------------------------------------------------------------------


def _gold(row: Row, data: "DataConfig") -> dict[str, str]:
    """Database, query and comparison of a row; it needs no question."""
    values, answer = row.values, data.fields.get("answer") or ("query" if "query" in row.values else "SQL")
    if _is_verl(row, data):
        values, answer = ground_truth(row), "gold_sql"
        if not isinstance(values, dict):
            raise row.error(f"reward_model.ground_truth = {values!r} should be {{db_id, gold_sql, cmp_method}}")
    match = values.get("cmp_method", data.sql_match)
    if match not in MATCHES:
        raise row.error(f"cmp_method = {match!r} should be one of {', '.join(MATCHES)}")
    gold = Row(row.path, row.line, values)
    return {"query": gold.text(answer), "database": find_database(gold, data.db_root), "match": match}


def _question(row: Row, data: "DataConfig", database: str, schemas: dict[str, str]) -> tuple[dict[str, str], ...]:
    """Messages of a row, as they stand there or made of its database's schema, which `schemas` keeps."""
    prompt = "prompt" if _is_verl(row, data) else data.fields.get("prompt", "question")
    if _is_verl(row, data) or isinstance(row.values.get(prompt), list):
        return chat_messages(row, prompt, data.system)
    if database not in schemas:
        schemas[database] = schema(database)
    evidence = row.values.get("evidence")
    hint = f"\nHint: {row.undamaged('evidence', evidence)}" if isinstance(evidence, str) and evidence else ""
    question = f"Database schema (SQLite):\n{schemas[database]}\n\nQuestion: {row.text(prompt)}{hint}"
    return chat(question, data.system, data.instruction or INSTRUCTION)


def _is_verl(row: Row, data: "DataConfig") -> bool:
    return "reward_model" in row.values and not data.fields


def find_database(row: Row, db_root: str) -> str:
    """The database file of a row's db_id; it must lie under `db_root`, whatever the row says."""
    name = row.text("db_id")
    folder, stem = name.removesuffix(".sqlite"), Path(name).name.removesuffix(".sqlite")
    for candidate in (name, f"{name}.sqlite", f"{folder}/{stem}.sqlite", f"{stem}.sqlite", f"{stem}/{stem}.sqlite"):
        path = Path(os.path.normpath(Path(db_root, candidate)))
        if "\0" in name or Path(os.path.normpath(db_root)) not in path.parents:
            raise row.error(f"db_id = {name!r} leads out of data.db_root = {db_root!r}")
        if path.is_file():
            return str(path)
    raise row.error(f"db_id = {name!r}: no {stem}.sqlite under data.db_root = {db_root!r}")


def schema(database: str) -> str:
    """The database as CREATE TABLE statements, each column with example values."""
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND substr(name, 1, 7) <> 'sqlite_'"
    tables = execute(database, query)
    return "\n\n".join(_create_table(database, table) for (table,) in tables.rows)


def _create_table(database: str, table: str) -> str:
    columns = execute(database, f"PRAGMA table_info({quoted(table)})").rows  # (number, name, type, ..., place in key)
    lines = [(f"{_name(name)} {kind}".rstrip(), _examples(database, table, name)) for _, name, kind, *_ in columns]
    if keys := [_name(column[1]) for column in sorted(columns, key=lambda column: column[5]) if column[5]]:
        lines.append((f"PRIMARY KEY ({', '.join(keys)})", ""))
    foreign: dict[int, list[tuple[Any, ...]]] = {}  # key's number -> (number, place, other table, column, its column)
    for row in execute(database, f"PRAGMA foreign_key_list({quoted(table)})").rows:
        foreign.setdefault(row[0], []).append(row)
    for rows in foreign.values():
        own, target = (", ".join(_name(row[i]) for row in rows if row[i]) for i in (3, 4))
        reference = f"{_name(rows[0][2])} ({target})" if target else _name(rows[0][2])
        lines.append((f"FOREIGN KEY ({own}) REFERENCES {reference}", ""))
    body = [f"    {line}{',' if number < len(lines) - 1 else ''}{note}" for number, (line, note) in enumerate(lines)]
    return "\n".join([f"CREATE TABLE {_name(table)} (", *body, ");"])


def _examples(database: str, table: str, column: str) -> str:
    """A comment with the first few values of a column, none for blobs."""
    name = quoted(column)
    query = (
        f"SELECT DISTINCT {name} FROM (SELECT {name} FROM {quoted(table)} LIMIT 1000)"
        f" WHERE {name} IS NOT NULL AND typeof({name}) <> 'blob' LIMIT {EXAMPLES}"
    )
    values = [value for (value,) in execute(database, query).rows]
    texts = (value[:EXAMPLE_LENGTH].encode("utf-8", "replace").decode() for value in values if isinstance(value, str))
    shown = [next(texts) if isinstance(value, str) else value for value in values]
    return f" -- example: {shown}" if shown else ""


@lru_cache(maxsize=4096)
def _name(name: str) -> str:
    """The name as a query has to write it: quoted unless SQLite takes it bare."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        return quoted(name)
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute(f"CREATE TABLE {name} ({name})")
    except sqlite3.OperationalError:  # one of its keywords
        return quoted(name)
    finally:
        connection.close()
    return name
