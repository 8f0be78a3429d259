"""Tasks: prompts and rewards. `load_task` makes one from a source such as `math:gsm8k/test.jsonl?limit=200`.

The helpers that a task of one's own may want (docs/own_task.md) are importable from here, too.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dph.errors import UserError
from dph.tasks.base import Prompt, Reward, Row, Task, chat, known_options, parse_source, read_rows, whole_number

if TYPE_CHECKING:
    from dph.config import DataConfig

__all__ = [
    "TASKS",
    "Prompt",
    "Reward",
    "Task",
    "chat",
    "known_options",
    "load_task",
    "read_rows",
    "whole_number",
]

# Imported by name when asked for, so that a grader's worker process never loads what it does not need.
TASKS = {
    "math": ("dph.tasks.math", "MathTask"),
    "sql": ("dph.tasks.sql", "SQLTask"),
    "arithmetic": ("dph.tasks.arithmetic", "ArithmeticTask"),
    "miniature": ("dph.tasks.miniature", "MiniatureTask"),
    "task": ("dph.tasks.own", "OwnTask"),  # a Python file of one's own, the only source that names code
}


def load_task(source: str, data: "DataConfig", seed: int, folder: Path, stored: Sequence[Row] | None = None) -> Task:
    """The task that `source` names, its gold answers checked.

    Args:
        source: TASK:WHERE[?option=value&...]; `limit=N` keeps the first N prompts of any task.
        data: the config's [data] section.
        seed: the run's seed, for generated tasks.
        folder: the runs' folder, where a task may keep files that it makes.
        stored: rows with the columns of `Task.record`; the prompts are then these, one a row and without messages, in
            place of the source's own, and their gold answers are not checked.

    Raises:
        UserError: an unknown task, option or value; DataError: a row or file that cannot be used.
    """
    parsed = parse_source(source)
    if parsed.task not in TASKS:
        raise UserError(f"source {source!r}: unknown task {parsed.task!r}; known: {', '.join(TASKS)}")
    module, name = TASKS[parsed.task]
    options = dict(parsed.options)
    limit = whole_number(source, options, "limit", 0, 1, 10**9)
    options.pop("limit", None)
    task: Task = getattr(importlib.import_module(module), name)(parsed.where, options, data, seed, folder, stored)
    task.name = source
    if stored is None:
        if limit:
            task.limit(limit)
        task.check()
    return task
