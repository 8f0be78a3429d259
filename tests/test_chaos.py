"""Killed at random moments, a run ends as if it had not been."""

from pathlib import Path

from benchmarks.chaos import chaos, table


def test_five_kills_change_nothing(tmp_path: Path) -> None:
    found = chaos(tmp_path, kills=5, tiny=True)
    assert found["kills"].total() == 5
    assert found["finished"] >= 1
    assert not found["differences"].total(), table(found)
    assert found["tracebacks"] == 0
