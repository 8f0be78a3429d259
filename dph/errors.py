"""The two errors that are a user's to mend, printed in one line with exit code 2, and a JSON reader that raises one."""

import json
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """A mistake in a config, a command line, a folder: the message says what, where, and what would be right."""


class DataError(UserError):
    """A row or file of data that cannot be used.

    Args:
        path: the file.
        line: its line, from 1, or None where the whole file is meant.
        message: what is wrong with it and what would be right.
    """

    def __init__(self, path: str | Path, line: int | None, message: str) -> None:
        where = str(path) if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {message}")


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; where there is no file and it is optional, {}. UserError: names the file."""
    if optional and not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a {type(data).__name__}; it must be an object")
    return data
