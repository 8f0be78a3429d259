"""Text-to-SQL: prompts from Spider, BIRD and verl rows, and the reward: does the query give the gold query's result?

A row is one of
- verl's: `prompt` (chat messages), `reward_model.ground_truth` = {db_id, gold_sql, cmp_method};
- Spider's or BIRD's own: `question`, `db_id`, `query` or `SQL` (and `evidence`); the prompt is then built from the
  database's schema. Other column names: [data] fields = {prompt = "...", answer = "..."}.
Databases lie under [data] db_root. The answer is the last ```sql block; with strict = false a response without one
counts from its first SELECT or WITH on. Execution and comparison are in sqlite.py, and happen in a worker process.
"""

import re
from typing import TYPE_CHECKING, Any

from dph.tasks.sqlite import ResultCache, has_order, same_result

if TYPE_CHECKING:
    pass

INSTRUCTION = "\n\nWrite one SQLite query that answers the question, in a ```sql block."
GRACE = 0.5  # seconds beyond the query's own limit before its worker is killed

_BLOCK = re.compile(r"```[ \t]*sql\b[ \t]*\r?\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_START = re.compile(r"\b(?:SELECT|WITH)\b", re.IGNORECASE)

_cache = ResultCache()  # of this process; a worker's holds gold results and repeated predictions


def judge(job: dict[str, Any]) -> dict[str, Any]:
    """Grades one query; runs in a worker, or anywhere.

    Args:
        job: {database, gold, query, match (bird, spider or bag), seconds}.

    Returns:
        {outcome: right, wrong, timeout or data_error, detail: the error of a query that failed, or None}.
    """
    seconds = job["seconds"]
    try:
        gold = _cache.execute(job["database"], job["gold"], seconds)
    except FileNotFoundError as error:
        return {"outcome": "data_error", "detail": str(error), "seconds": 0.0}
    if gold.error is not None:
        return {"outcome": "data_error", "detail": gold.error, "seconds": gold.seconds}
    result = _cache.execute(job["database"], job["query"], seconds)
    if result.error is not None:
        return {"outcome": "timeout" if result.timeout else "wrong", "detail": result.error, "seconds": result.seconds}
    same = same_result(gold.rows, result.rows, job["match"], has_order(job["gold"]))
    return {"outcome": "right" if same else "wrong", "detail": None, "seconds": result.seconds}
