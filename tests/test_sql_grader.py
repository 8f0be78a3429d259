"""The SQL grader: safe execution, comparison as BIRD and Spider do it, and rows as they are published.

With $DPH_DATA set (the folder that holds spider/), Spider's own database and gold queries are read too.
"""

import hashlib
import itertools
import json
import os
import random
import re
import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dph.config import DataConfig
from dph.errors import DataError, UserError
from dph.tasks import load_task
from dph.tasks.sql import SQLTask, extract, judge, schema
from dph.tasks.sqlite import ResultCache, execute, has_order, nondeterministic, same_result, shuffled

SCRIPT = """
CREATE TABLE team (id INTEGER PRIMARY KEY, name TEXT, "order" REAL);
CREATE TABLE player (id INTEGER PRIMARY KEY, name TEXT, team INTEGER REFERENCES team (id), goals INTEGER);
INSERT INTO team VALUES (1, 'red', 1.5), (2, 'blue', NULL), (3, 'green', 2);
INSERT INTO player VALUES (1, 'Ann', 1, 5), (2, 'Bo', 1, 7), (3, 'Cy', 2, 5), (4, 'Di', 2, NULL), (5, 'Bo', 3, 0);
"""


def make_database(path: Path, script: str = SCRIPT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()
    return path


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return make_database(tmp_path_factory.mktemp("sql") / "root" / "club" / "club.sqlite")


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def verl(query: str, method: str = "spider", db_id: str = "club") -> dict:
    truth = {"db_id": db_id, "gold_sql": query, "cmp_method": method}
    return {"prompt": [{"role": "user", "content": "Q"}], "reward_model": {"style": "rule", "ground_truth": truth}}


@pytest.fixture
def tasks(database, tmp_path):
    """Makes a checked task of rows about the database `club`."""
    made = []

    def make(*rows, **settings_):
        path = write(tmp_path / f"{len(made)}.jsonl", *rows)
        data = DataConfig(**{"db_root": str(database.parent.parent), "grader_timeout": 10.0, **settings_})
        made.append(load_task(f"sql:{path}", data, 0, tmp_path))
        return made[-1]

    yield make
    for task in made:
        task.close()


def block(query: str) -> str:
    return f"Thus:\n```sql\n{query}\n```"


def outcome(database, gold, query, match="spider"):
    job = {"database": str(database), "gold": gold, "query": query, "match": match, "seconds": 5.0}
    return judge(job)["outcome"]


# ---- extraction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "query"),
    [
        (block("SELECT 1"), "SELECT 1"),
        (block("SELECT 1") + block("SELECT 2"), "SELECT 2"),
        ("``` SQL \nSELECT 1\n```", "SELECT 1"),
        ("```Sql\r\nSELECT 1\r\n```", "SELECT 1"),
        ("```sql SELECT 1```", "SELECT 1"),
        ("```sql\nSELECT 1", "SELECT 1"),
        ("```python\nx\n```" + block("WITH t AS (SELECT 1) SELECT * FROM t;"), "WITH t AS (SELECT 1) SELECT * FROM t;"),
    ],
)
def test_the_last_sql_block_counts(text, query):
    assert extract(text, strict=True) == extract(text, strict=False) == query


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("I start with a join.\nSELECT a\nFROM t; that is all", "SELECT a\nFROM t"),
        ("The query is select ';' from t; done", "select ';' from t"),
        ("```\nSELECT 1\n```", "SELECT 1"),
        ("with x AS (SELECT 1) SELECT * FROM x", "with x AS (SELECT 1) SELECT * FROM x"),
        ("none", None),
    ],
)
def test_without_a_block_only_lenient_mode_finds_a_query(text, query):
    assert extract(text, strict=True) is None
    assert extract(text, strict=False) == query


def test_an_empty_block_is_no_answer(tasks):
    task = tasks(verl("SELECT 1 WHERE 0"))
    (prompt,) = task.prompts()
    assert [task.reward(prompt, text).outcome for text in ("none", block(""))] == ["no_answer", "no_answer"]


# ---- execution ---------------------------------------------------------------------------------------------------

FOREVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
HOSTILE = [
    "WITH x AS (SELECT 1) DELETE FROM player",
    "DELETE FROM player",
    "UPDATE player SET goals = 0",
    "INSERT INTO player DEFAULT VALUES",
    "DROP TABLE player",
    "CREATE TABLE t (a)",
    "CREATE TEMP VIEW player AS SELECT 1",
    "CREATE TEMP TABLE player (id)",
    "CREATE VIRTUAL TABLE t USING fts5(a)",
    "ATTACH '{folder}/other.sqlite' AS o",
    "ATTACH ':memory:' AS o",
    "PRAGMA case_sensitive_like = 1",
    "PRAGMA writable_schema = 1",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA user_version = 7",
    "SELECT 1; SELECT 2",
    "SELECT 1; DELETE FROM player",
    "BEGIN",
    "SAVEPOINT s",
    "VACUUM",
    "VACUUM INTO '{folder}/copy.sqlite'",
    "ANALYZE",
    "REINDEX",
    "SELECT load_extension('x')",
    "SELECT LOAD_EXTENSION('x')",
    "SELECT fts3_tokenizer('simple')",
    "SELECT writefile('{folder}/x', 'y')",
    "SELECT randomblob(1000000000)",
    "SELECT group_concat(hex(zeroblob(400000))) FROM player",
    "SELECT a.id FROM player a" + "".join(f", player b{i}" for i in range(8)),
    FOREVER,
    FOREVER.replace("count(*)", "x"),
    "",
    ";",
    "-- nothing",
    "SELECT " + "(" * 5000,
    "SELECT '\0'",
    "SELECT '\ud800'",
    "SELECT * FROM nowhere",
]


def test_hostile_queries_score_zero_in_time_change_nothing_and_leave_the_next_alone(tasks, database):
    before = hashlib.sha256(database.read_bytes()).hexdigest(), sorted(os.listdir(database.parent))
    task = tasks(verl("SELECT name FROM player WHERE name LIKE 'a%'"), grader_timeout=1.0)
    (prompt,) = task.prompts()
    good = block("SELECT name FROM player WHERE name LIKE 'A%'")
    texts = [text for query in HOSTILE for text in (block(query.replace("{folder}", str(database.parent))), good)]
    start = time.monotonic()
    rewards = task.rewards([(prompt, text) for text in texts])
    assert time.monotonic() - start < 4 * 1.5 + 10  # two never end, two are large
    assert [reward.value for reward in rewards] == [0.0, 1.0] * len(HOSTILE)
    assert {reward.outcome for reward in rewards[::2]} == {"wrong", "timeout", "no_answer"}
    assert (hashlib.sha256(database.read_bytes()).hexdigest(), sorted(os.listdir(database.parent))) == before


def test_a_function_that_ignores_the_time_limit_costs_its_worker_alone(tasks):
    # SQLite looks at the clock between steps of its program; one function can be a single step of many seconds.
    stubborn = "SELECT instr(hex(zeroblob(490000)), hex(zeroblob(240000)) || '1')"
    task = tasks(verl("SELECT 1"), grader_timeout=0.5)
    (prompt,) = task.prompts()
    start = time.monotonic()
    rewards = task.rewards([(prompt, block(query)) for query in ("SELECT 1", stubborn, "SELECT 1.0")])
    assert [reward.outcome for reward in rewards] == ["right", "timeout", "right"]
    assert time.monotonic() - start < 0.5 + 6


def test_reading_in_every_form_is_allowed(database):
    for query in (
        "SELECT count(DISTINCT name) FROM player",
        "WITH t AS (SELECT * FROM player) SELECT * FROM t",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 9) SELECT x FROM c;",
        "SELECT rank() OVER (ORDER BY goals) FROM player -- a comment",
        "VALUES (1), (2)",
        "SELECT value FROM json_each('[1, 2]')",
        "SELECT strftime('%Y', '2020-01-01'), upper('a'), round(1.5)",
        "PRAGMA table_info(player)",
        "SELECT sql FROM sqlite_master",
    ):
        result = execute(database, query)
        assert (result.error, bool(result.rows)) == (None, True), query


def test_text_that_is_not_utf8_is_read_and_told_apart(tmp_path):
    script = "CREATE TABLE t (a TEXT); INSERT INTO t VALUES (CAST(x'61ff' AS TEXT)), (CAST(x'61fe' AS TEXT));"
    database = make_database(tmp_path / "t.sqlite", script)
    first, second = execute(database, "SELECT a FROM t").rows
    assert first != second
    assert outcome(database, "SELECT a FROM t LIMIT 1", "SELECT a FROM t LIMIT 1") == "right"
    assert outcome(database, "SELECT a FROM t LIMIT 1", "SELECT a FROM t LIMIT 1 OFFSET 1") == "wrong"
    assert "example" in schema(str(database))


def test_results_are_bounded_in_rows_and_bytes(database):
    many = "SELECT 1 FROM player" + "".join(f", player p{i}" for i in range(7))
    assert "rows" in str(execute(database, many).error)
    wide = "SELECT hex(zeroblob(400000)) FROM player a, player b, player c"
    assert execute(database, "SELECT hex(zeroblob(400000))").size > 800_000
    assert "bytes" in str(execute(database, wide).error)
    assert execute(database, "SELECT hex(zeroblob(600000))").error == "string or blob too big"


def test_the_cache_forgets_nothing_it_holds_and_sees_a_file_that_changed(tmp_path):
    database = make_database(tmp_path / "t.sqlite")
    cache = ResultCache(limit=11_000)
    queries = [f"SELECT {n}" for n in range(30)]
    for query in queries * 2:
        assert cache.execute(database, query) == cache.execute(database, query)
        assert cache.execute(database, query).rows == execute(database, query).rows
    assert len(cache.results) < 11
    assert cache.execute(database, "SELECT count(*) FROM team").rows == [(3,)]
    connection = sqlite3.connect(database)
    connection.execute("DELETE FROM team")
    connection.commit()
    connection.close()
    os.utime(database, ns=(1, 1))
    assert cache.execute(database, "SELECT count(*) FROM team").rows == [(0,)]


FRAGMENTS = [
    *("SELECT", "*", "name", "FROM", "player", "team", "WHERE", "goals", ">", "1", "(", ")", ",", ";", "'", '"'),
    *("DELETE FROM", "UPDATE", "SET", "=", "DROP TABLE", "INSERT INTO", "VALUES", "CREATE TABLE", "ALTER TABLE"),
    *("RENAME TO", "ATTACH", "AS", "PRAGMA", "user_version", "COMMIT", "VACUUM", "WITH", "RETURNING", "--", "/*"),
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_no_query_changes_the_database(database, fragments):
    before = database.read_bytes()
    execute(database, " ".join(fragments), seconds=0.5)
    assert database.read_bytes() == before
    assert os.listdir(database.parent) == [database.name]


# ---- comparison --------------------------------------------------------------------------------------------------


def test_bag_counts_rows_and_set_does_not():
    gold, rows = [("a",), ("b",)], [("a",), ("a",), ("b",)]
    assert same_result(gold, rows, "bird")
    assert not same_result(gold, rows, "spider")
    assert not same_result(gold, rows, "bag")


def test_order_counts_only_where_the_gold_query_orders(database):
    ordered, free = "SELECT name FROM player ORDER BY id", "SELECT name FROM player"
    assert outcome(database, ordered, ordered + " DESC") == "wrong"
    assert outcome(database, free, ordered + " DESC") == "right"
    assert outcome(database, ordered, ordered + " DESC", "bird") == "right"
    assert outcome(database, "SELECT * FROM (SELECT name FROM player ORDER BY id)", ordered + " DESC") == "right"


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n by a;", True),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1", True),
        ("WITH x AS (SELECT 1) SELECT * FROM x ORDER /* ) */ BY 1", True),
        ("SELECT ')' FROM t ORDER BY a", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT a FROM t WHERE b = (SELECT b FROM u ORDER BY c LIMIT 1)", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
        ("SELECT 'x ORDER BY y' FROM t", False),
        ("SELECT 'it''s ORDER BY y' FROM t", False),
        ("SELECT a FROM t -- ORDER BY a", False),
        ("SELECT a FROM t /* ORDER BY a */", False),
        ('SELECT a FROM t WHERE "order by" = 1', False),
        ("SELECT a FROM [order by]", False),
        ("SELECT reorder, by FROM t", False),
    ],
)
def test_order_by_is_found_by_parsing(query, ordered):
    assert has_order(query) is ordered


def test_values_are_equal_as_numbers_texts_and_nulls(database):
    for gold, query, same in (
        ("SELECT 1", "SELECT 1.0", True),
        ("SELECT 0.1 + 0.2", "SELECT 0.3", True),
        ("SELECT 3", "SELECT 2.9999999999", True),
        ("SELECT 3", "SELECT 2.9999", False),
        ("SELECT 0", "SELECT 1e-12", True),
        ("SELECT 1", "SELECT '1'", False),
        ("SELECT NULL", "SELECT NULL", True),
        ("SELECT NULL", "SELECT 0", False),
        ("SELECT NULL", "SELECT ''", False),
        ("SELECT 'a'", "SELECT 'A'", False),
        ("SELECT 'a'", "SELECT x'61'", False),
        ("SELECT 9007199254740993", "SELECT 9007199254740992", False),
        ("SELECT 1 WHERE 0", "SELECT 2, 3 WHERE 0", True),
        ("SELECT 1 WHERE 0", "SELECT NULL", False),
        ("SELECT 1", "SELECT 1, 1", False),
    ):
        for match in ("bird", "spider", "bag"):
            assert outcome(database, gold, query, match) == ("right" if same else "wrong"), (gold, query, match)


def test_floats_near_each_other_match_whatever_stands_beside_them():
    gold = [(0.1 + 0.2, "a"), (0.3, "b"), (None, "c"), ("x", "d"), (b"y", "e")]
    rows = [(b"y", "e"), ("x", "d"), (None, "c"), (0.3, "a"), (0.1 + 0.2, "b")]
    assert same_result(gold, rows, "bird")
    assert same_result(gold, rows, "spider")
    assert not same_result(gold, [*rows[:-1], (0.3001, "b")], "spider")


def test_columns_may_be_permuted_in_spider_alone():
    gold, rows = [(1, "a"), (2, "b")], [("b", 2), ("a", 1)]
    assert same_result(gold, rows, "spider")
    assert not same_result(gold, rows, "spider", ordered=True)
    assert same_result(gold, rows[::-1], "spider", ordered=True)
    assert not same_result(gold, rows, "bird")
    assert not same_result(gold, [("a", 2), ("b", 1)], "spider")  # the same columns, put together otherwise


def test_many_columns_alike_take_no_time():
    start = time.monotonic()
    equal = [(n % 3,) * 26 for n in range(200)]
    assert same_result(equal, equal[::-1], "spider")
    assert not same_result(equal, [(*row[1:], 0) for row in equal], "spider")
    # Each row one 1 and 25 zeros: no column differs from another but by its place.
    unit = [tuple(int(i == j) for j in range(26)) for i in range(26)]
    assert same_result(
        [(*row, i) for i, row in enumerate(unit)], [(i, *row[::-1]) for i, row in enumerate(unit)], "spider"
    )
    twisted = [tuple(int(j in (i, (i + 1) % 26)) for j in range(26)) for i in range(26)]  # one ring of 26
    rings = [tuple(int(j in (i, i // 13 * 13 + (i + 1) % 13)) for j in range(26)) for i in range(26)]  # two of 13
    assert not same_result([(*row, 1) for row in twisted], [(1, *row) for row in rings], "spider")
    assert time.monotonic() - start < 1


VALUES = st.sampled_from([0, 1, 2, 1.0, 0.5, None, "a", "1", b"a"])


@st.composite
def results(draw):
    width = draw(st.integers(1, 4))
    return draw(st.lists(st.tuples(*[VALUES] * width), min_size=1, max_size=6))


@given(results(), st.randoms(use_true_random=False))
def test_row_order_never_matters_without_order_by_and_always_with(rows, source):
    other = source.sample(rows, len(rows))
    assert same_result(rows, other, "bag")
    assert same_result(rows, other, "bird")
    assert same_result(rows, other, "spider")
    if len(rows[0]) == 1:  # with more, another column may happen to hold the same values
        assert same_result(rows, other, "spider", ordered=True) == (rows == other)


@given(results(), results(), st.booleans())
def test_columns_are_matched_as_trying_all_orders_would(first, second, ordered):
    def brute(gold, rows):
        if (len(gold), len(gold[0])) != (len(rows), len(rows[0])):
            return False
        for order in itertools.permutations(range(len(rows[0]))):
            turned = [tuple(row[i] for i in order) for row in rows]
            if turned == gold if ordered else not [r for r in gold if gold.count(r) != turned.count(r)]:
                return True
        return False

    second = [(*row, *row)[: len(first[0])] for row in second]
    assert same_result(first, second, "spider", ordered) == brute(first, second)
    turned = [row[::-1] for row in first]
    assert same_result(first, turned, "spider", ordered)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(["SELECT id FROM player", "SELECT 1", "nonsense", "SELECT id FROM player LIMIT 2", ""]))
)
def test_a_batch_is_graded_as_one_at_a_time(club, queries):
    pairs = [(club.prompts()[i % 2], block(query)) for i, query in enumerate(queries)]
    assert club.rewards(pairs) == [club.reward(prompt, text) for prompt, text in pairs]


@pytest.fixture(scope="module")
def club(database):
    path = write(database.parent.parent / "rows.jsonl", verl("SELECT id FROM player"), verl("SELECT 1"))
    task = SQLTask(str(path), {}, DataConfig(db_root=str(database.parent.parent), grader_timeout=20.0), 0)
    yield task
    task.close()


# ---- gold queries that leave an order open -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "match", "open_order"),
    [
        ("SELECT name FROM player ORDER BY goals LIMIT 1", "bird", False),
        ("SELECT name FROM player WHERE goals > 4 ORDER BY goals LIMIT 1", "bird", True),
        ("SELECT goals FROM player WHERE goals > 4 ORDER BY goals LIMIT 1", "bird", False),  # a tie, one result
        ("SELECT id FROM player LIMIT 2", "bird", True),
        ("SELECT id FROM player WHERE goals > 4 ORDER BY goals", "bird", False),
        ("SELECT id FROM player WHERE goals > 4 ORDER BY goals", "spider", True),
        ("SELECT * FROM team WHERE id = (SELECT team FROM player GROUP BY 1 ORDER BY -count(*) LIMIT 1)", "bird", True),
        ("SELECT id, rank() OVER (ORDER BY goals) FROM player", "bird", False),
        ("SELECT id FROM team UNION SELECT id FROM player ORDER BY id LIMIT 2", "bird", False),
        ("SELECT avg(goals), sum(goals) FROM player", "spider", False),
        ("SELECT id FROM player ORDER BY random() LIMIT 2", "bird", True),
    ],
)  # fmt: skip
def test_ties_are_found(database, query, match, open_order):
    assert nondeterministic(database, query, match) is open_order


def test_a_task_names_its_prompts_with_ties(tasks):
    task = tasks(verl("SELECT id FROM team ORDER BY id"), verl("SELECT id FROM player LIMIT 1"))
    assert [prompt.meta["line"] for prompt in task.nondeterministic()] == [2]


def test_shuffling_adds_a_last_key_to_every_order_but_a_windows():
    assert shuffled("SELECT a FROM (SELECT b FROM t LIMIT 2) ORDER BY a LIMIT 1").replace(" ", "") == (
        "SELECTaFROM(SELECTbFROMtORDERBYrandom()LIMIT2)ORDERBYa,random()LIMIT1"
    )
    assert shuffled("SELECT rank() OVER (ORDER BY a) FROM t") == "SELECT rank() OVER (ORDER BY a) FROM t"


# ---- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("db_id", ["club", "club/club.sqlite", "club/club", "club.sqlite", "elsewhere/club.sqlite"])
def test_a_database_is_found_with_or_without_its_folder(tasks, database, db_id):
    (prompt,) = tasks(verl("SELECT 1", db_id=db_id)).prompts()
    assert Path(prompt.gold["database"]) == database


@pytest.mark.parametrize("db_id", ["../secret", "/etc/passwd", "club/../../secret", "..", "a\0b"])
def test_no_row_leads_out_of_the_databases_folder(tasks, database, db_id):
    secret = database.parent.parent.parent / "secret.sqlite"
    secret.write_bytes(database.read_bytes())
    with pytest.raises(DataError, match=r"line 1: db_id (= .* leads out of|holds a control character)"):
        tasks(verl("SELECT 1", db_id=db_id))


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (verl("SELECT nothing FROM player"), "line 2: the gold query fails on"),
        (verl("DELETE FROM player"), "not authorized"),
        (verl(FOREVER), "over 0.5 s"),
        (verl("SELECT 1", db_id="zoo"), "line 2: db_id = 'zoo': no zoo.sqlite under data.db_root"),
        (verl("SELECT 1", method="exact"), "cmp_method = 'exact' should be one of bird, spider"),
        ({"prompt": [], "reward_model": {"ground_truth": "SELECT 1"}}, "ground_truth = 'SELECT 1' should be {db_id"),
        ({"question": "Q", "db_id": "club"}, "SQL = nothing"),
    ],
)
def test_a_bad_gold_query_or_database_is_an_error_of_the_data_before_training(tasks, row, named):
    with pytest.raises(DataError) as error:
        tasks(verl("SELECT 1"), row, grader_timeout=0.5)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_folder_of_databases_is_named(tasks):
    for folder in ("", "nowhere"):
        with pytest.raises(UserError, match=f"data.db_root = '{folder}' should be the folder"):
            tasks(verl("SELECT 1"), db_root=folder)


def test_the_row_says_how_to_compare_and_the_config_where_it_does_not(tasks):
    twice = block("SELECT 1 UNION ALL SELECT 1")
    task = tasks(
        verl("SELECT 1", "bird"),
        verl("SELECT 1", "spider"),
        {"question": "Q", "db_id": "club", "query": "SELECT 1"},
        sql_match="spider",
    )
    assert [task.reward(prompt, twice).value for prompt in task.prompts()] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("field", ["query", "SQL"])
def test_a_raw_row_gets_a_prompt_with_schema_question_and_evidence(tasks, field):
    row = {"question": "How many?", "db_id": "club", field: "SELECT 1", "evidence": "count them"}
    (prompt,) = tasks(row, system="S", instruction=" Go.").prompts()
    system, user = (message["content"] for message in prompt.messages)
    assert system == "S"
    assert user.endswith("Question: How many?\nHint: count them Go.")
    (other,) = tasks({**row, "evidence": ""}).prompts()
    assert other.messages[0]["content"].endswith(
        "Question: How many?\n\nWrite one SQLite query that answers the question, in a ```sql block."
    )


def test_the_schema_creates_the_same_tables_again(database, tmp_path):
    text = schema(str(database))
    assert text.splitlines()[:6] == [
        "CREATE TABLE team (",
        "    id INTEGER, -- example: [1, 2]",
        "    name TEXT, -- example: ['red', 'blue']",
        '    "order" REAL, -- example: [1.5, 2.0]',
        "    PRIMARY KEY (id)",
        ");",
    ]
    assert "    FOREIGN KEY (team) REFERENCES team (id)\n);" in text
    again = make_database(tmp_path / "again.sqlite", text)
    for table in ("team", "player"):
        for pragma in ("table_info", "foreign_key_list"):
            names = [
                [column[1:4] for column in execute(each, f"PRAGMA {pragma}({table})").rows]
                for each in (database, again)
            ]
            assert names[0] == names[1]


def test_the_schema_takes_any_names_keys_and_values(tmp_path):
    script = """
    CREATE TABLE "odd ""name" ("select" INT, "a b" TEXT, b BLOB, empty, PRIMARY KEY ("a b", "select"));
    CREATE TABLE child (x INT, y TEXT, FOREIGN KEY (y, x) REFERENCES "odd ""name");
    INSERT INTO "odd ""name" VALUES (1, 'it''s\n--', x'00ff', NULL), (2, 'long' || hex(zeroblob(100)), x'01', NULL);
    """
    text = schema(str(make_database(tmp_path / "t.sqlite", script)))
    make_database(tmp_path / "again.sqlite", text)
    assert 'PRIMARY KEY ("a b", "select")' in text
    assert 'FOREIGN KEY (y, x) REFERENCES "odd ""name"' in text
    assert max(map(len, text.splitlines())) < 120


# ---- Spider's own ------------------------------------------------------------------------------------------------

MUTATIONS = [
    (r" DESC\b", " ASC"),
    (r"\bDISTINCT ", ""),
    (r"\bmax\(", "min("),
    (r"\bcount\(", "1 + count("),
    (r"LIMIT 1", "LIMIT 2"),
    (r">", "<"),
    (r"=", "<>"),
    (r"^SELECT ", "SELECT NULL, "),
    (r"\bEXCEPT\b", "UNION"),
    (r"\bAND\b", "OR"),
]


def loosely(rows):
    """A result without the order of rows and columns and without counts: results that differ here differ everywhere."""
    return {tuple(sorted(map(repr, row))) for row in rows}


def test_all_gold_queries_equal_themselves_and_no_mutant_whose_result_differs():
    folder = Path(os.environ.get("DPH_DATA", "nowhere"), "spider")
    if not folder.is_dir():
        pytest.skip("needs the published data in the folder $DPH_DATA")
    (database,) = (folder / "database").rglob("*.sqlite")
    queries = [line.strip() for line in (folder / "department_store_gold.sql").read_text().splitlines() if line.strip()]
    assert len(queries) == 88
    differing = 0
    for query, match in itertools.product(queries, ("bird", "spider")):
        assert outcome(database, query, query, match) == "right"
        gold = execute(database, query).rows
        for pattern, by in MUTATIONS:
            mutant = re.sub(pattern, by, query, count=1, flags=re.IGNORECASE)
            result = execute(database, mutant)
            if result.error is None and loosely(result.rows) != loosely(gold):
                assert outcome(database, query, mutant, match) == "wrong", mutant
                differing += 1
    assert differing > 300


def test_a_shuffled_copy_of_a_result_is_judged_by_the_gold_order(database):
    rows = execute(database, "SELECT id, name FROM player").rows
    random.Random(0).shuffle(rows)
    values = ", ".join(str(row) for row in rows)
    assert outcome(database, "SELECT id, name FROM player", f"VALUES {values}") == "right"
    assert outcome(database, "SELECT id, name FROM player ORDER BY id", f"VALUES {values}") == "wrong"
