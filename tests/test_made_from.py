"""What a run was made from: whatever changes between two commands is named, wherever the first one's work is used."""

import contextlib
import io
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import evaluate
import presample
import train
from dph.answering import Policy
from dph.cli import config_argument, run_command
from dph.config import load_config
from dph.made_from import model_hash
from dph.miniature_base import write_tokenizer
from dph.model_folder import load_model, save_model
from dph.tasks import load_task
from dph.tasks.miniature_world import vocabulary
from dph.tokenizer import load_tokenizer
from tests.helpers import ONE_STEP, SMALL_HERE, tiny_folder, tiny_model

DATA = """\
train = "sql:data.jsonl"
eval = ["sql:data.jsonl"]
db_root = "databases"
"""
AFTER = """\
record_rollouts = true
[eval]
final = false
samples = 2
k = [1]
"""
CONFIG = SMALL_HERE + DATA + ONE_STEP + AFTER
REPLAY = ("--run.name=again", "--rollouts-from", "runs/small")
ModuleAndArguments = tuple[ModuleType, tuple[str, ...]]
# Each place: the command whose work is kept, and the one that comes upon it.
PLACES: dict[str, tuple[ModuleAndArguments, ModuleAndArguments]] = {
    "resume": ((train, ()), (train, ())),
    "presample": ((presample, ()), (presample, ())),
    "evaluate": ((evaluate, ("model",)), (evaluate, ("model",))),
    "rollouts-from": ((train, ()), (train, REPLAY)),
}
SAID = {
    "resume": "runs/small: made with other {}; delete it, or change run.name",
    "presample": "runs/small/presample: made with other {}; delete it to pre-sample again, or change run.name",
    "evaluate": "runs/small/evaluation/model.json: sql:data.jsonl: made with other {}; answered again",
    "rollouts-from": "--rollouts-from runs/small: made with other {}; record them again, or train as that run did",
}
LONGER = "--sampling.max_new_tokens=4"
SETTINGS = "settings (max_new_tokens = 3 there, 4 here)"


def write_data(first: str, query: str = "SELECT a FROM t") -> None:
    words = vocabulary()
    rows = []
    for word in (first, words[1]):
        rows.append({"question": [{"role": "user", "content": word}], "db_id": "d", "query": query})
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_database(path: str, value: int) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"CREATE TABLE t (a, b); INSERT INTO t VALUES ({value}, 2), (3, 4);")


def name_a_special_token() -> None:
    """A piece that no prompt holds becomes special: nothing else than the tokenizer changes."""
    piece = next(piece for piece in load_tokenizer("model").vocabulary if piece.endswith(vocabulary()[5]))
    Path("model/special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": [piece]}))


CHANGES: dict[str, Callable[[], object]] = {
    "prompts": lambda: write_data(vocabulary()[2]),
    "gold answers": lambda: write_data(vocabulary()[0], "SELECT b FROM t"),
    "databases": lambda: write_database("databases/d/d.sqlite", 9),
    "end tokens": lambda: Path("model/generation_config.json").write_text('{"eos_token_id": [2, 3]}'),
    "tokenizer": name_a_special_token,
    "model": lambda: save_model(tiny_model(1, load_tokenizer("model").vocab_size), "model"),
}


def call(command: ModuleAndArguments, *more: str) -> tuple[int, str, str]:
    """Runs a command on small.toml in this process: exit code, standard output, last line of standard error."""
    module, arguments = command
    out, err, code = io.StringIO(), io.StringIO(), 0
    old, sys.argv = sys.argv, [module.__name__, "small.toml", *arguments, *more]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run_command(module.main, "", getattr(module, "_arguments", config_argument))
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = old
    return code, out.getvalue(), ([line for line in err.getvalue().splitlines() if line] or [""])[-1]


def begin(folder: Path) -> None:
    """Writes what the commands need."""
    tiny_folder(folder / "model")
    (folder / "small.toml").write_text(CONFIG)
    with contextlib.chdir(folder):
        write_data(vocabulary()[0])
        write_database("databases/d/d.sqlite", 1)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each place a folder in which the first command has run."""
    folders = {}
    for place, (first, _) in PLACES.items():
        folders[place] = tmp_path_factory.mktemp(place)
        begin(folders[place])
        with contextlib.chdir(folders[place]):
            assert call(first)[0] == 0
    return folders


@pytest.fixture
def at(done: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleAndArguments]:
    """Goes to a copy of a place's folder and gives its second command."""

    def go(place: str) -> ModuleAndArguments:
        shutil.copytree(done[place], tmp_path, dirs_exist_ok=True)
        monkeypatch.chdir(tmp_path)
        return PLACES[place][1]

    return go


def assert_said(place: str, name: str, answer: tuple[int, str, str]) -> None:
    code, out, err = answer
    said = SAID[place].format(name)
    if place == "evaluate":
        assert code == 0, err
        assert said in out.splitlines()
    else:
        assert code == 2
        assert err.startswith(f"error: {said}")


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_said_where_nothing_has_changed(at: Callable[[str], ModuleAndArguments], place: str) -> None:
    code, out, err = call(at(place))
    assert code == 0, err
    assert "made with other" not in out


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_what_has_changed_is_named_and_nothing_else(
    at: Callable[[str], ModuleAndArguments], place: str, what: str
) -> None:
    second = at(place)
    CHANGES[what]()
    assert_said(place, what, call(second))


@pytest.mark.parametrize("place", ["evaluate", "rollouts-from"])
def test_settings_are_named_with_their_values(at: Callable[[str], ModuleAndArguments], place: str) -> None:
    assert_said(place, SETTINGS, call(at(place), LONGER))


@pytest.mark.parametrize("place", ["resume", "presample"])
def test_a_run_of_its_own_names_any_setting_of_its_config(at: Callable[[str], ModuleAndArguments], place: str) -> None:
    code, _, err = call(at(place), LONGER)
    assert code == 2
    assert "holds another run (sampling.max_new_tokens = 3 there, 4 here)" in err


def test_several_changes_are_named_in_one_line(at: Callable[[str], ModuleAndArguments]) -> None:
    second = at("resume")
    write_data(vocabulary()[2], "SELECT b FROM t")
    assert_said("resume", "prompts and gold answers", call(second))


def test_the_batch_size_counts_for_an_evaluation_and_not_for_what_is_recorded(
    at: Callable[[str], ModuleAndArguments],
) -> None:
    fewer, named = "--sampling.max_rows=2", "settings (max_rows = 64 there, 2 here)"
    assert_said("evaluate", named, call(at("evaluate"), fewer))
    assert call(at("rollouts-from"), fewer)[0] == 0


def test_the_loss_does_not_count_where_rollouts_are_recorded(at: Callable[[str], ModuleAndArguments]) -> None:
    second = at("rollouts-from")
    assert call(second, "--loss.clip_high=0.1", "--loss.divergence=js", "--loss.eta=0.5")[0] == 0


def test_another_size_of_groups_is_refused_where_rollouts_are_recorded(
    at: Callable[[str], ModuleAndArguments],
) -> None:
    named = "settings (responses_per_prompt = 2 there, 4 here)"
    assert_said("rollouts-from", named, call(at("rollouts-from"), "--train.responses_per_prompt=4"))


def test_recorded_rollouts_of_yesterday_keep_their_day(at: Callable[[str], ModuleAndArguments]) -> None:
    second = at("rollouts-from")
    Path("runs/small/chat_day.txt").write_text("2020-02-02\n")
    assert call(second)[0] == 0
    assert Path("runs/again/chat_day.txt").read_text() == "2020-02-02\n"


def test_a_mistake_before_any_work_does_not_hold_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("runs/small").mkdir(parents=True)
    Path("runs/small/made_from.json").write_text('{"prompts": "x"}')
    assert call((train, ()))[0] == 0
    assert json.loads(Path("runs/small/made_from.json").read_text())["end tokens"] == "[2]"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("resume", "runs/small: has no made_from.json, so its data cannot be checked; delete it, or change run.name"),
        ("rollouts-from", "--rollouts-from runs/small: has no made_from.json, so its rollouts cannot be checked; "),
    ],
)
def test_a_run_that_does_not_say_what_it_was_made_from_is_refused(
    at: Callable[[str], ModuleAndArguments], place: str, said: str
) -> None:
    second = at(place)
    Path("runs/small/made_from.json").unlink()
    code, _, err = call(second)
    assert code == 2
    assert err.startswith(f"error: {said}")


LOOKS = ("--train.eval_every=1", '--data.eval=["sql:looked_at.jsonl"]')


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(("word", "query"), [(2, "SELECT a FROM t"), (0, "SELECT b FROM t")])
def test_a_set_that_is_looked_at_while_training_stays_the_same(word: int, query: str) -> None:
    shutil.copy("data.jsonl", "looked_at.jsonl")
    assert call((train, LOOKS))[0] == 0
    assert call((train, LOOKS), "--train.steps=2")[0] == 0, "as long as nothing has changed"
    shutil.copy("data.jsonl", "kept.jsonl")
    write_data(vocabulary()[word], query)
    shutil.move("data.jsonl", "looked_at.jsonl")
    shutil.move("kept.jsonl", "data.jsonl")
    code, _, err = call((train, LOOKS), "--train.steps=3")
    said = "runs/small: made with other evaluation sets (sql:looked_at.jsonl); delete it, or change run.name"
    assert (code, err) == (2, f"error: {said}")


def test_sets_that_are_looked_at_do_not_count_where_rollouts_are_recorded(
    at: Callable[[str], ModuleAndArguments],
) -> None:
    second = at("rollouts-from")
    shutil.copy("data.jsonl", "looked_at.jsonl")
    assert call(second, *LOOKS)[0] == 0


@pytest.mark.usefixtures("there")
def test_a_partition_that_is_refused_is_not_taken_over() -> None:
    rehearses = ("--loss.divergence=js", "--loss.eta=0.5")
    assert call((train, rehearses))[0] == 0
    code, _, err = call((train, REPLAY), *rehearses, "--presample.threshold=1")
    assert code == 2
    assert err.startswith("error: runs/small/presample: made with other settings (threshold = 2 there, 1 here); record")
    assert not Path("runs/again/presample").exists()
    assert call((train, REPLAY), *rehearses)[0] == 0, "so that the right settings go on"


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("name", ["base", "small"])
def test_an_evaluation_never_takes_the_place_of_the_run_s_own_report(name: str) -> None:
    assert call((train, ("--eval.final=true", "--train.steps=2")))[0] == 0
    report = Path(f"runs/small/evaluation/{name}.json")
    own = report.read_text()
    tiny_folder(Path(f"other/{name}"), seed=5)
    code, _, err = call((evaluate, (f"other/{name}",)))
    assert code == 2
    assert err.startswith(f"error: {report}: is this run's own report of another model; rename other/{name}, or take ")
    assert report.read_text() == own
    assert call((evaluate, (f"other/{name}",)), "--run.name=another")[0] == 0


@pytest.mark.usefixtures("there")
def test_the_run_s_own_model_may_be_evaluated_under_its_name() -> None:
    assert call((train, ("--eval.final=true",)))[0] == 0
    shutil.copytree("model", "other/base")
    assert call((evaluate, ("other/base",)))[0] == 0


# ---- each value by itself ----------------------------------------------------------------------------------------


def databases(*more: str) -> str:
    config = load_config("small.toml", more)
    task = load_task("sql:data.jsonl", config.data, 0, Path("runs"))
    try:
        return task.content()["databases"]
    finally:
        task.close()


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("there")
def test_further_files_of_a_database_count() -> None:
    alone = databases()
    write_database("databases/d/second.sqlite", 1)
    two = databases()
    write_database("databases/d/second.sqlite", 5)
    assert len({alone, two, databases()}) == 3


@pytest.mark.usefixtures("there")
def test_changed_copies_of_a_database_count() -> None:
    before = databases("--data.sql_variants=1")
    copy = next(Path("runs/sql_variants").rglob("*.sqlite"))
    write_database(str(copy), 7)
    assert len({databases(), before, databases("--data.sql_variants=1")}) == 3


@pytest.mark.usefixtures("there")
def test_databases_that_were_moved_are_the_same() -> None:
    before = databases()
    shutil.move("databases", "elsewhere")
    assert databases("--data.db_root=elsewhere") == before


@pytest.mark.usefixtures("there")
def test_a_database_that_no_prompt_asks_about_does_not_count() -> None:
    before = databases()
    write_database("databases/other.sqlite", 1)
    assert databases() == before


def test_the_same_weights_used_otherwise_are_another_model(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    hashes = []
    for base in (10_000.0, 10_000.0, 500_000.0):
        config = json.loads((folder / "config.json").read_text()) | {"rope_theta": base}
        (folder / "config.json").write_text(json.dumps(config))
        hashes.append(model_hash(Policy(load_model(folder), load_tokenizer(folder), folder)))
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_tokenizer_that_was_copied_is_the_same(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").content() == tokenizer.content()
