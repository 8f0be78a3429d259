"""The two errors that are a user's to mend. The commands print them in one line and exit with code 2."""

from pathlib import Path


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
