"""Grading without a model: stored answers once more, and gold answers that make no good teacher.

A stored answer is one row of a JSON Lines file: a `response`, and columns that tell the gold answer, as in any data set
of math.py or sql.py; the question may be missing. So is each row of a run's samples.jsonl: `source` names its task, and
`Task.record` gave it the columns. Rewards are a run's with the same [data] settings.
"""

import json
import sys
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from dph.tasks import TASKS, load_task
from dph.tasks.base import Outcome, Reward, Row, parse_source, read_rows

if TYPE_CHECKING:
    from dph.config import DataConfig

Report = tuple[list[dict[str, Any]], dict[str, Any]]  # one entry a row, and a summary


def regrade(path: Path, task: str | None, data: "DataConfig", seed: int, folder: Path) -> Report:
    """Grades the rows of a file, in their order; the summary counts outcomes and has the mean reward.

    Args:
        path: the file.
        task: math or sql; with None each row's `source` tells.
        data: as for a run; `fields` names columns of a file of one's own, and is not used where `task` is None.
        seed, folder: as for a run.

    Raises:
        DataError: a row without response, source or gold answer. A gold query that fails is an outcome: data_error.
    """
    groups: defaultdict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in read_rows(path):
        row.response()
        groups[(f"{task}:{path}", seed) if task else _origin(row, seed)].append(row)
    graded: dict[int, Reward] = {}
    for (source, world), rows in groups.items():
        with closing(load_task(source, data if task else replace(data, fields={}), world, folder, rows)) as judge:
            judge.most_errors = 1.0  # what would stop a run is what this is to show
            pairs = [(prompt, row.values["response"]) for prompt, row in zip(judge.prompts(), rows, strict=True)]
            graded |= zip((row.line for row in rows), judge.rewards(pairs), strict=True)
    counts = Counter(reward.outcome for reward in graded.values())
    summary = {"answers": len(graded), "mean_reward": sum(reward.value for reward in graded.values()) / len(graded)}
    return [
        {"line": line, "reward": reward.value, "extracted": reward.extracted, "outcome": reward.outcome}
        for line, reward in sorted(graded.items())
    ], {**summary, **{outcome: counts[outcome] for outcome in get_args(Outcome)}}


def _origin(row: Row, seed: int) -> tuple[str, int]:
    """The row's source, and the seed of the world that it is about, where it names one."""
    source = row.values.get("source")
    if not isinstance(source, str) or source.partition(":")[0] not in TASKS:
        raise row.error(f"source = {source!r} should name a task, as in a run's samples.jsonl; else give --task")
    parse_source(source)
    return source, row.integer("seed") if "seed" in row.values else seed


def check(source: str, data: "DataConfig", seed: int, folder: Path) -> Report:
    """Reads a source and its gold answers as a run does; the entries are the prompts whose gold result is open."""
    with closing(load_task(source, data, seed, folder)) as task:
        found = task.nondeterministic()
        entries = [{"line": prompt.meta["line"], **task.record(prompt)} for prompt in found]
        return entries, {"prompts": len(task.prompts()), "nondeterministic": len(found)}


def show(report: Report) -> None:
    """Prints the entries as JSON lines on standard output, then the summary as one on standard error."""
    entries, summary = report
    print("".join(json.dumps(entry) + "\n" for entry in entries), end="", flush=True)
    print(json.dumps(summary), file=sys.stderr)
