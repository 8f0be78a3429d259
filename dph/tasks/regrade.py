"""Grading without a model: stored answers once more, and gold answers that make no good teacher.

A stored answer is one row of a JSON Lines file: a `response`, and columns that tell the gold answer, as in any data set
of math.py or sql.py; the question may be missing. So is each row of a run's samples.jsonl: `source` names its task, and
`Task.record` gave it the columns. Rewards are a run's with the same [data] settings.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from dph.tasks import TASKS, Prompt, Reward, Task, load_task
from dph.tasks.base import Outcome, Row, parse_source, read_rows

if TYPE_CHECKING:
    from dph.config import DataConfig

Entry = dict[str, Any]
Report = tuple[list[Entry], dict[str, Any]]  # one entry a row, and a summary
Origin = tuple[str, int]  # a source, and the seed of its world
Judge = tuple[Task, Iterator[tuple[Prompt, Row]]]  # the task of an origin, and its rows that are not graded yet

CHUNK = 256  # rows graded at once


def regrade(
    path: Path,
    task: str | None,
    data: "DataConfig",
    seed: int,
    folder: Path,
    each: Callable[[Entry], None] = lambda entry: None,
) -> Report:
    """Grades the rows of a file, in their order; the summary counts outcomes and has the mean reward.

    Args:
        path: the file.
        task: math or sql; with None each row's `source` tells.
        data: as for a run; `fields` names columns of a file of one's own, and is not used where `task` is None.
        seed, folder: as for a run.
        each: is given each entry as soon as its row is graded.

    Raises:
        DataError: a row without response, source or gold answer, before any is graded. A gold query that fails is an
            outcome: data_error.
    """
    groups: defaultdict[Origin, list[Row]] = defaultdict(list)
    origins: list[Origin] = []
    for row in read_rows(path):
        row.response()
        origins.append((f"{task}:{path}", seed) if task else _origin(row, seed, data))
        groups[origins[-1]].append(row)
    entries: list[Entry] = []
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        judges = {}
        for (source, world), rows in groups.items():
            settings = data if task else replace(data, fields={})
            judge = stack.enter_context(closing(load_task(source, settings, world, folder, rows)))
            judge.most_errors = 1.0  # what would stop a run is what this is to show
            judges[source, world] = (judge, iter(zip(judge.prompts(), rows, strict=True)))
        for start in range(0, len(origins), CHUNK):
            for row, reward in _graded(origins[start : start + CHUNK], judges):
                entry = {"line": row.line, "reward": reward.value, "extracted": reward.extracted}
                entries.append({**entry, "outcome": reward.outcome})
                counts[reward.outcome] += 1
                each(entries[-1])
    summary = {"answers": len(entries), "mean_reward": sum(entry["reward"] for entry in entries) / len(entries)}
    return entries, {**summary, **{outcome: counts[outcome] for outcome in get_args(Outcome)}}


def _graded(origins: Sequence[Origin], judges: Mapping[Origin, Judge]) -> list[tuple[Row, Reward]]:
    """The next rows of a file and their rewards, in the file's order; each origin's rows are one batch of its task."""
    found: list[tuple[int, Row, Reward]] = []
    for origin, places in _places(origins).items():
        judge, rows = judges[origin]
        batch = [next(rows) for _ in places]
        rewards = judge.rewards([(prompt, row.values["response"]) for prompt, row in batch])
        found += [(place, row, reward) for place, (_, row), reward in zip(places, batch, rewards, strict=True)]
    return [(row, reward) for _, row, reward in sorted(found, key=lambda item: item[0])]


def _places(origins: Sequence[Origin]) -> dict[Origin, list[int]]:
    places: defaultdict[Origin, list[int]] = defaultdict(list)
    for place, origin in enumerate(origins):
        places[origin].append(place)
    return places


def _origin(row: Row, seed: int, data: "DataConfig") -> tuple[str, int]:
    """The row's source, and the seed of the world that it is about, where it names one. A row alone runs no code."""
    source = row.values.get("source")
    if not isinstance(source, str) or source.partition(":")[0] not in TASKS:
        raise row.error(f"source = {source!r} should name a task, as in a run's samples.jsonl; else give --task")
    if parse_source(source).task == "task" and source not in (data.train, *data.eval):
        raise row.error(f"source = {source!r} names code; it runs only with a CONFIG whose [data] names it, too")
    return source, row.integer("seed") if "seed" in row.values else seed


def check(source: str, data: "DataConfig", seed: int, folder: Path) -> Report:
    """Reads a source and its gold answers as a run does; the entries are the prompts whose gold result is open."""
    with closing(load_task(source, data, seed, folder)) as task:
        found = task.nondeterministic()
        entries = [{"line": prompt.meta["line"], **task.record(prompt)} for prompt in found]
        return entries, {"prompts": len(task.prompts()), "nondeterministic": len(found)}


def regrade_aloud(path: Path, task: str | None, data: "DataConfig", seed: int, folder: Path) -> None:
    """`regrade`, printing each entry as its row is graded; Ctrl-C says how many were and ends with exit code 130."""
    printed = 0

    def show_entry(entry: Entry) -> None:
        nonlocal printed
        print(json.dumps(entry), flush=True)
        printed += 1

    try:
        _, summary = regrade(path, task, data, seed, folder, show_entry)
    except KeyboardInterrupt:
        print(f"\ninterrupted: {printed} answers of {path} are graded, as printed; the others are not", file=sys.stderr)
        sys.exit(130)
    print(json.dumps(summary), file=sys.stderr)


def show(report: Report) -> None:
    """Prints the entries as JSON lines on standard output, then the summary as one on standard error."""
    entries, summary = report
    print("".join(json.dumps(entry) + "\n" for entry in entries), end="", flush=True)
    print(json.dumps(summary), file=sys.stderr)
