"""Stored answers graded again earn what they earned; what is no stored answer is named by its line."""

import json
import sqlite3
from pathlib import Path

import pytest

import evaluate
from dph.cli import run_command
from dph.config import DataConfig
from dph.errors import DataError, UserError
from dph.prompts import PromptSet
from dph.tasks import Task, load_task
from dph.tasks.math import MathTask
from dph.tasks.regrade import check, regrade
from tests.helpers import tiny_folder

GOLD = [
    {"question": "Q", "answer": "1,005"},
    {"question": "Q", "final_answer": ["5"], "unit": "cm"},
    {"question": "Q", "answer": "so\n#### \\boxed{\\frac{1}{2}}"},
]
QUERIES = ["SELECT id FROM player ORDER BY id", "SELECT name FROM player LIMIT 1"]


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of databases with one, `club`."""
    (tmp_path / "root" / "club").mkdir(parents=True)
    connection = sqlite3.connect(tmp_path / "root" / "club" / "club.sqlite")
    connection.executescript(
        "CREATE TABLE player (id INTEGER, name TEXT); INSERT INTO player VALUES (1, 'a'), (2, 'b')"
    )
    connection.close()
    return tmp_path / "root"


@pytest.fixture
def sources(tmp_path: Path, root: Path) -> list[str]:
    """A source of each kind."""
    rows = [{"question": "Q", "db_id": "club", "query": query} for query in QUERIES]
    return [
        f"math:{write(tmp_path / 'math.jsonl', *GOLD)}",
        f"sql:{write(tmp_path / 'sql.jsonl', *rows)}",
        "arithmetic:test?digits=1&count=3",
        "miniature:cross?count=3",
        "miniature:arithmetic?count=3",
    ]


def solution(task: Task, number: int) -> str:
    """A right response to a prompt of any of the sources."""
    gold = task.prompts()[number].gold
    if isinstance(gold, dict):
        return f"```sql\n{gold['query']}\n```"
    return f"\\boxed{{{gold}}}" if task.name.startswith("math") else str(gold)


def samples(path: Path, sources: list[str], data: DataConfig, seed: int) -> list[dict]:
    """Writes rows as a run does, with right, wrong and empty responses; returns them."""
    rows = []
    for source in sources:
        task = load_task(source, data, seed, path.parent)
        pairs = [
            (prompt, text)
            for number, prompt in enumerate(task.prompts())
            for text in (solution(task, number), solution(task, number - 1) + "0", "")
        ]
        for (prompt, text), reward in zip(pairs, task.rewards(pairs), strict=True):
            rows.append(PromptSet(task, [prompt]).sample_row(prompt.index, text, reward))
        task.close()
    write(path, *rows)
    return rows


def test_a_run_s_samples_of_every_task_earn_what_they_earned(tmp_path: Path, sources: list[str], root: Path) -> None:
    data = DataConfig(db_root=str(root), sql_match="spider")
    rows = samples(tmp_path / "samples.jsonl", sources, data, seed=3)
    # The seed, the way to compare and the columns' names stand in the rows, so the settings may be others.
    other = DataConfig(db_root=str(root), fields={"answer": "elsewhere"})
    entries, summary = regrade(tmp_path / "samples.jsonl", None, other, 0, tmp_path)
    judged = [(row["reward"], row["outcome"]) for row in rows]
    assert [(entry["reward"], entry["outcome"]) for entry in entries] == judged
    assert [entry["line"] for entry in entries] == list(range(1, len(rows) + 1))
    assert summary["answers"] == len(rows) == 42
    assert (summary["right"], summary["mean_reward"]) == (14, 14 / 42)
    assert summary["no_answer"] == 14
    assert str(tmp_path) not in "".join(str(row) for row in rows if not row["source"].startswith(("math", "sql")))


def test_rows_of_one_s_own_need_the_gold_answer_and_a_response(tmp_path: Path, root: Path) -> None:
    rows = [
        {"answer": "#### 5", "response": r"\boxed{5.0}"},
        {"Answer": 5, "response": "5"},
        {"solution": r"\boxed{x+1}", "response": r"\boxed{1+x}", "source": "a book"},
        {"reward_model": {"ground_truth": "5"}, "response": r"\boxed{6}"},
    ]
    entries, summary = regrade(write(tmp_path / "a.jsonl", *rows), "math", DataConfig(), 0, tmp_path)
    assert [entry["outcome"] for entry in entries] == ["right", "no_answer", "right", "wrong"]
    assert [entry["extracted"] for entry in entries] == ["5.0", None, "1+x", "6"]
    assert summary == {
        "answers": 4,
        "mean_reward": 0.5,
        **{"right": 2, "wrong": 1, "no_answer": 1, "timeout": 0, "grader_error": 0, "data_error": 0},
    }
    rows = [
        {"db_id": "club", "query": "SELECT 1", "response": "```sql\nSELECT 1.0\n```"},
        {"db_id": "club", "SQL": "SELECT nothing", "response": "```sql\nSELECT 1\n```"},
    ]
    entries, _ = regrade(write(tmp_path / "b.jsonl", *rows), "sql", DataConfig(db_root=str(root)), 0, tmp_path)
    assert [entry["outcome"] for entry in entries] == ["right", "data_error"]


def test_a_grader_that_often_fails_stops_no_regrading(tmp_path: Path, root: Path) -> None:
    row = {"db_id": "club", "query": "SELECT nothing", "response": "```sql\nSELECT 1\n```"}
    _, summary = regrade(write(tmp_path / "a.jsonl", *[row] * 300), "sql", DataConfig(db_root=str(root)), 0, tmp_path)
    assert summary["data_error"] == 300


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "5"}, "response = nothing"),
        ({"answer": "5", "response": 5}, "response = 5 should be a text"),
        ({"response": ""}, "answer = None should be a text or a number"),
        ({"answer": "5", "response": "", "source": "a book"}, "source = 'a book' should name a task"),
        ({"answer": "5", "response": ""}, "source = None should name a task"),
        ({"answer": "x", "response": "", "source": "arithmetic:test"}, "answer = 'x' should be a whole number"),
        ({"response": "", "source": "miniature:test", "seed": "../x"}, "seed = '../x' should be a whole number"),
        ({"response": "", "source": "miniature:test", "database": "x", "answer": "y"}, "database = 'x' should be"),
    ],
)
def test_what_is_no_stored_answer_is_named(tmp_path: Path, row: dict, message: str) -> None:
    good = {"answer": "5", "response": "", "source": "math:x.jsonl"}
    task = None if "source" in row or message.startswith("source") else "math"
    path = write(tmp_path / "a.jsonl", good, row)
    with pytest.raises(DataError) as error:
        regrade(path, task, DataConfig(), 0, tmp_path)
    assert f"{path}, line 2: {message}" in str(error.value)


def test_gold_queries_whose_result_is_open_are_listed(tmp_path: Path, sources: list[str], root: Path) -> None:
    entries, summary = check(sources[1], DataConfig(db_root=str(root)), 0, tmp_path)
    assert entries == [{"line": 2, "db_id": "club/club.sqlite", "query": QUERIES[1], "cmp_method": "bird"}]
    assert summary == {"prompts": 2, "nondeterministic": 1}
    assert check(sources[0], DataConfig(), 0, tmp_path)[1] == {"prompts": 3, "nondeterministic": 0}


def test_a_malformed_source_is_a_user_s_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="should read TASK:WHERE"):
        regrade(write(tmp_path / "a.jsonl", {"response": "", "source": "math"}), None, DataConfig(), 0, tmp_path)


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs evaluate.py in this process: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["evaluate.py", *map(str, arguments)])
        code = 0
        try:
            run_command(evaluate.main, str(evaluate.__doc__), evaluate._arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


def test_the_command_grades_without_a_config_or_a_model(call, tmp_path: Path, root: Path, sources: list[str]) -> None:
    data = DataConfig(db_root=str(root))
    rows = samples(tmp_path / "samples.jsonl", sources, data, seed=0)
    code, out, err = call("--regrade", tmp_path / "samples.jsonl", "--db-root", root, f"--run.folder={tmp_path}")
    assert code == 0
    assert [json.loads(line)["reward"] for line in out.splitlines()] == [row["reward"] for row in rows]
    assert json.loads(err)["right"] == 14
    code, out, err = call("--check", sources[1], "--db-root", root)
    assert (code, json.loads(out)["line"], json.loads(err)["prompts"]) == (0, 2, 2)


def test_the_command_says_what_is_missing(call, tmp_path: Path, sources: list[str]) -> None:
    path = write(tmp_path / "a.jsonl", {"answer": "5", "response": ""}, {"answer": "5"})
    for arguments, message in (
        ([], "name a CONFIG, or --regrade FILE, or --check SOURCE"),
        (["--regrade", path, "--task=math"], f"{path}, line 2: response = nothing"),
        (["--regrade", tmp_path / "none.jsonl"], "none.jsonl: no such file"),
        (["--check", sources[1]], "data.db_root = '' should be the folder of the databases"),
    ):
        code, out, err = call(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_rows_are_printed_as_they_are_graded_and_ctrl_c_says_how_many(call, tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path / "a.jsonl", *[{"answer": "5", "response": r"\boxed{5}"}] * 600)
    graded = MathTask.rewards

    def interrupted(self, pairs):
        if len(pairs) < 256:  # the last of three chunks
            raise KeyboardInterrupt
        return graded(self, pairs)

    monkeypatch.setattr(MathTask, "rewards", interrupted)
    code, out, err = call("--regrade", path, "--task=math")
    assert code == 130
    assert [json.loads(line)["line"] for line in out.splitlines()] == list(range(1, 513))
    assert f"interrupted: 512 answers of {path} are graded, as printed; the others are not" in err
    assert "the same command continues" not in err


def test_rows_of_several_sources_stay_in_their_order(tmp_path: Path) -> None:
    kinds = [("math:x.jsonl", "5"), ("arithmetic:test", 6)]
    rows = [
        {"source": source, "answer": gold, "response": f"\\boxed{{{5 + number % 3}}}"}
        for number in range(700)
        for source, gold in kinds[number % 7 % 2 :]
    ]
    entries, _ = regrade(write(tmp_path / "a.jsonl", *rows), None, DataConfig(), 0, tmp_path)
    assert [entry["line"] for entry in entries] == list(range(1, len(rows) + 1))
    assert [entry["reward"] for entry in entries] == [
        float(f"\\boxed{{{row['answer']}}}" == row["response"]) for row in rows
    ]


def test_the_samples_of_a_trained_run_are_graded_again(call, tmp_path: Path) -> None:
    import train

    config = tmp_path / "small.toml"
    config.write_text(
        f"""
[run]
name = "small"
folder = "{tmp_path / "runs"}"
seed = 5
[model]
path = "{tiny_folder(tmp_path / "model")}"
[data]
train = "miniature:train?count=4"
eval = ["miniature:arithmetic?count=2", "miniature:test?count=2"]
[sampling]
max_new_tokens = 5
[train]
steps = 1
prompts_per_step = 2
responses_per_prompt = 2
eval_every = 1
[eval]
final = false
k = [1]
"""
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", str(config)])
        run_command(train.main, str(train.__doc__), train._arguments)
    path = tmp_path / "runs" / "small" / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["source"] for row in rows} == {"miniature:arithmetic?count=2", "miniature:test?count=2"}
    for arguments in ([path, f"--run.folder={tmp_path / 'elsewhere'}"], [path, config]):
        code, out, _ = call("--regrade", *arguments)
        entries = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert code == 0
        assert [(e["reward"], e["outcome"]) for e in entries] == [(r["reward"], r["outcome"]) for r in rows]
