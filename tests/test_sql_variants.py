"""Further files of one database: what is right on one by chance is wrong on another, and the gold query on none."""

import hashlib
import json
import sqlite3
from pathlib import Path

import pytest

from dph.config import DataConfig
from dph.errors import DataError, UserError
from dph.tasks import load_task
from dph.tasks.regrade import regrade
from dph.tasks.sql_variants import make_variants, neighbours
from dph.tasks.sqlite import execute

SCRIPT = """
CREATE TABLE team (id INTEGER PRIMARY KEY, name TEXT UNIQUE, founded INTEGER NOT NULL);
CREATE TABLE player (id INTEGER PRIMARY KEY, name TEXT, team INTEGER REFERENCES team (id), goals INTEGER, photo BLOB);
CREATE TABLE score (home TEXT, away TEXT, PRIMARY KEY (home, away)) WITHOUT ROWID;
CREATE TRIGGER no_change BEFORE DELETE ON player BEGIN SELECT raise(ABORT, 'no'); END;
"""


def make_club(path: Path, players: int = 40) -> Path:
    """Eight teams, each with players; every player has a team and every team a player."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript(SCRIPT)
    connection.executemany("INSERT INTO team VALUES (?, ?, ?)", [(i, f"team {i}", 1900 + i) for i in range(8)])
    rows = [(i, f"player {i}", i % 8, i % 13, bytes([255, i])) for i in range(players)]
    connection.executemany("INSERT INTO player VALUES (?, ?, ?, ?, ?)", rows)
    connection.execute("INSERT INTO player VALUES (1000, CAST(x'61ff' AS TEXT), 1, 3, NULL)")
    connection.execute("INSERT INTO score VALUES ('a', 'b')")
    connection.commit()
    connection.close()
    return path


@pytest.fixture
def club(tmp_path: Path) -> Path:
    return make_club(tmp_path / "root" / "club" / "club.sqlite")


@pytest.fixture
def outcomes(tmp_path: Path):
    """The verdicts on queries, given a gold query about the club."""

    def judge(gold: str, *queries: str, **settings) -> list[str]:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"question": "Q", "db_id": "club", "query": gold}) + "\n")
        data = DataConfig(db_root=str(tmp_path / "root"), sql_match="spider", grader_timeout=10.0, **settings)
        task = load_task(f"sql:{path}", data, 0, tmp_path / "runs")
        (prompt,) = task.prompts()
        rewards = task.rewards([(prompt, f"```sql\n{query}\n```") for query in queries])
        task.close()
        return [reward.outcome for reward in rewards]

    return judge


# ---- the other files of a database's folder ----------------------------------------------------------------------


def test_all_files_of_a_databases_own_folder_must_agree(club, outcomes):
    gold = "SELECT count(*) FROM player"
    assert outcomes(gold, gold, "SELECT 41") == ["right", "right"]
    make_club(club.parent / "club_1.sqlite", players=30)
    assert outcomes(gold, gold, "SELECT 41") == ["right", "wrong"]


def test_files_of_a_shared_folder_are_other_databases(tmp_path):
    flat = make_club(tmp_path / "root" / "club.sqlite")
    make_club(tmp_path / "root" / "zoo.sqlite")
    assert neighbours(str(flat)) == []


def test_a_gold_query_that_fails_on_another_file_is_an_error_of_the_data(club, outcomes):
    sqlite3.connect(club.parent / "empty.sqlite").close()
    with pytest.raises(DataError, match="line 1: the gold query fails on"):
        outcomes("SELECT count(*) FROM player", "SELECT 1")


# ---- changed copies ----------------------------------------------------------------------------------------------

CHANCE = [  # gold query, a query that gives its result on the file alone
    ("SELECT count(*) FROM player", "SELECT 41"),
    ("SELECT id FROM player WHERE goals >= 0", "SELECT id FROM player"),
    ("SELECT DISTINCT goals FROM player WHERE id < 13", "SELECT goals FROM player WHERE id < 13"),
    ("SELECT team.name FROM team JOIN player ON team = team.id WHERE player.id < 8", "SELECT name FROM team"),
    ("SELECT id FROM team ORDER BY founded", "SELECT id FROM team"),
    ("SELECT max(goals) FROM player", "SELECT 12"),
]


@pytest.mark.parametrize(("gold", "query"), CHANCE)
def test_what_is_right_by_chance_is_wrong_on_a_changed_copy(club, outcomes, gold, query):
    assert outcomes(gold, gold, query) == ["right", "right"]
    assert outcomes(gold, gold, query, sql_variants=8) == ["right", "wrong"]


def test_a_copy_on_which_the_gold_query_gives_nothing_does_not_count(club, outcomes):
    gold = "SELECT name FROM team WHERE id = 99"
    assert outcomes(gold, gold, "SELECT 1 WHERE 0", sql_variants=4) == ["right", "right"]
    only_here = "SELECT 1 WHERE (SELECT count(*) FROM player) = 41"
    assert outcomes(only_here, "SELECT 1", sql_variants=4) == ["right"]


def content(database: Path) -> list:
    return [execute(database, f"SELECT * FROM {table}").rows for table in ("team", "player", "score")]


def test_copies_follow_from_the_file_and_the_seed(club, tmp_path):
    before = hashlib.sha256(club.read_bytes()).hexdigest()
    first = [content(Path(path)) for path in make_variants(str(club), 3, 0, tmp_path / "a")]
    again = [content(Path(path)) for path in make_variants(str(club), 3, 0, tmp_path / "b")]
    other = [content(Path(path)) for path in make_variants(str(club), 3, 1, tmp_path / "a")]
    assert first == again
    assert all(one != content(club) for one in first)
    assert first[0] != first[1] != other[1]
    assert hashlib.sha256(club.read_bytes()).hexdigest() == before
    assert sorted(path.suffix for path in (tmp_path / "a" / "sql_variants").rglob("*.*")) == [".sqlite"] * 6


def test_copies_keep_the_schema_the_keys_and_the_kinds_of_values(club, tmp_path):
    for path in make_variants(str(club), 4, 0, tmp_path):
        tables = "SELECT sql FROM sqlite_master WHERE type = 'table'"
        assert execute(path, tables).rows == execute(club, tables).rows
        ids = {row[0] for row in execute(path, "SELECT id FROM player").rows}
        assert ids < {row[0] for row in execute(club, "SELECT id FROM player").rows}
        teams = {row[0] for row in execute(path, "SELECT team FROM player").rows}
        assert teams <= set(range(8))
        kinds = execute(path, "SELECT DISTINCT typeof(goals), typeof(photo) FROM player").rows
        assert set(kinds) <= {(goals, photo) for goals in ("integer", "null") for photo in ("blob", "null")}
        assert execute(path, "SELECT count(*) FROM team WHERE founded IS NULL").rows == [(0,)]


def test_stored_answers_are_graded_again_on_the_same_copies(club, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "Q", "db_id": "club", "query": CHANCE[0][0]}) + "\n")
    data = DataConfig(db_root=str(tmp_path / "root"), sql_variants=2)
    task = load_task(f"sql:{path}", data, 5, tmp_path / "runs")
    (prompt,) = task.prompts()
    assert task.record(prompt)["seed"] == 5
    row = {"source": task.name, "response": "```sql\nSELECT 41\n```", **task.record(prompt)}
    path.with_name("samples.jsonl").write_text(json.dumps(row) + "\n")
    task.close()
    entries, _ = regrade(path.with_name("samples.jsonl"), None, data, 0, tmp_path / "elsewhere")
    assert [entry["outcome"] for entry in entries] == ["wrong"]
    assert [path.name for path in (tmp_path / "elsewhere").rglob("*.sqlite")] == ["5-0.sqlite", "5-1.sqlite"]


def test_a_file_that_is_no_database_is_named(club, outcomes):
    club.write_bytes(b"no database at all " * 100)
    with pytest.raises(UserError, match=r"club.sqlite: cannot be copied with rows changed: file is not a database"):
        outcomes("SELECT 1", sql_variants=1)
