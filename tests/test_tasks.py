"""Sources, data files, arithmetic, and the processes that grade."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dph.config import DataConfig
from dph.errors import DataError, UserError
from dph.tasks import load_task
from dph.tasks.arithmetic import ArithmeticTask, grade, split_of
from dph.tasks.base import Prompt, Reward, Task, parse_source, read_rows
from dph.tasks.workers import GraderPool

ROOT = Path(__file__).resolve().parents[1]


# ---- sources -----------------------------------------------------------------------------------------------------


def test_a_source_is_task_place_and_options():
    source = parse_source("arithmetic:train?ops=+*&digits=1")
    assert (source.task, source.where, source.options) == ("arithmetic", "train", {"ops": "+*", "digits": "1"})
    assert parse_source("math:C:/what?/x.jsonl?limit=2").where == "C:/what?/x.jsonl"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("math", "TASK:WHERE"),
        (":x", "TASK:WHERE"),
        ("math:", "TASK:WHERE"),
        ("arithmetic:train?limit", "'limit' has no '='"),
        ("arithmetic:train?count=3&count=4", "'count' stands there twice"),
        ("algebra:train", "unknown task 'algebra'; known: math, sql"),
        ("arithmetic:train?digit=2", "did you mean digits?"),
        ("arithmetic:train?limit=0", "limit = '0' should be a whole number from 1"),
        ("arithmetic:train?digits=ten", "digits = 'ten'"),
        ("arithmetic:train?digits=10", "from 1 to 9"),
        ("arithmetic:train?ops=/", "ops = '/' should be some of +-*"),
        ("arithmetic:dev", "'dev' should be one of train, test"),
    ],
)
def test_a_wrong_source_is_named(source, named, tmp_path):
    with pytest.raises(UserError) as error:
        load_task(source, DataConfig(), 0, tmp_path)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_limit_keeps_the_first_prompts_of_any_task(tmp_path):
    whole = load_task("arithmetic:train?count=20", DataConfig(), 0, tmp_path).prompts()
    assert load_task("arithmetic:train?count=20&limit=3", DataConfig(), 0, tmp_path).prompts() == whole[:3]


# ---- data files --------------------------------------------------------------------------------------------------


def rows_of(path, data):
    path.write_bytes(data)
    return [(row.line, row.values) for row in read_rows(path)]


def test_a_mark_crlf_and_a_missing_last_newline_are_taken(tmp_path):
    data = b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}'
    assert rows_of(tmp_path / "x.jsonl", data) == [(1, {"a": 1}), (3, {"a": 2})]


def test_a_line_separator_within_a_text_ends_no_row(tmp_path):
    data = '{"a": "x\u2028y\u0085z"}\n'.encode()
    assert rows_of(tmp_path / "x.jsonl", data) == [(1, {"a": "x\u2028y\u0085z"})]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"a": 1}\n{"a": \n', "line 2: is not JSON at column 7"),
        (b'{"a": 1}\n[1]\n', "line 2: should be a JSON object, one a line; found list"),
        (b'{"a": 1}\n{"a": "\xff"}', "line 2: is not UTF-8 at byte 8"),
        (b'{"a": ' + b"1" * 5000 + b"}", "line 1: holds a number that is too long"),
        (b"[" * 100_000, "line 1: is nested too deeply"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, data, message):
    with pytest.raises(DataError) as error:
        rows_of(tmp_path / "x.jsonl", data)
    assert "x.jsonl" in str(error.value)
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl: no such file"):
        list(read_rows(tmp_path / "nowhere.jsonl"))


@pytest.mark.parametrize(
    ("value", "message"), [(3, "q = 3"), (None, "q = None"), ("  ", "q = '  '"), ("\ud83d", "surrogate")]
)
def test_a_field_of_the_wrong_kind_is_named(tmp_path, value, message):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"q": value}))
    (row,) = read_rows(path)
    with pytest.raises(DataError) as error:
        row.text("q")
    assert message in str(error.value)
    assert "line 1" in str(error.value)
    with pytest.raises(DataError, match=r"nothing \(the row has 'q'\)"):
        row.text("question")


# ---- tasks -------------------------------------------------------------------------------------------------------


def test_a_grader_that_often_fails_stops_the_run():
    task = Task("math:x")
    task.counted([Reward.of("right")] * 190 + [Reward.of("grader_error")] * 9)  # too few to tell
    with pytest.raises(UserError, match="the grader failed on 11 of 201 answers"):
        task.counted([Reward.of("grader_error"), Reward.of("data_error")])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_said_to_be_the_tasks(value):
    with pytest.raises(UserError, match=f"math:x: the task gave the reward {value}; it should be a finite number"):
        Task("math:x").counted([Reward.of("right"), Reward(value, "right", "5")])


def test_a_column_that_is_not_used_may_hold_what_is_no_json_number(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "Q", "answer": "5", "difficulty": NaN, "score": -Infinity}\n')
    (prompt,) = load_task(f"math:{path}", DataConfig(), 0, tmp_path).prompts()
    assert prompt.gold == "5"
    path.write_text('{"question": "Q", "answer": NaN}\n')
    with pytest.raises(DataError, match="line 1: answer = nan should be a finite number"):
        load_task(f"math:{path}", DataConfig(), 0, tmp_path)


def test_wrong_answers_and_timeouts_never_stop_a_run():
    task = Task("math:x")
    task.counted([Reward.of("wrong"), Reward.of("timeout"), Reward.of("no_answer")] * 1000)
    assert task.outcomes["timeout"] == 1000


def arithmetic(where="train", seed=0, **options):
    return ArithmeticTask(where, {key: str(value) for key, value in options.items()}, DataConfig(), seed)


def question(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


def test_arithmetic_is_the_same_for_the_same_seed_and_another_for_another():
    assert arithmetic(seed=1).prompts() == arithmetic(seed=1).prompts()
    assert arithmetic(seed=1).prompts() != arithmetic(seed=2).prompts()


def test_arithmetic_asks_what_its_options_say():
    prompts = arithmetic(ops="*", digits=3, count=50).prompts()
    assert len({question(prompt) for prompt in prompts}) == 50
    for prompt in prompts:
        a, b = (int(word.strip(".?")) for word in question(prompt).split() if word.strip(".?").isdigit())
        assert 100 <= min(a, b) <= max(a, b) <= 999
        assert prompt.gold == a * b
        assert " * " in question(prompt)


def test_train_and_test_share_no_sum_in_any_order_wording_or_seed():
    def sums(where, seed):
        words = [question(prompt).replace(".", "").replace("?", "").split() for prompt in arithmetic(where, seed).items]
        return {tuple(sorted(word for word in each if not word.isalpha() and word != "=")) for each in words}

    assert not sums("train", 0) & sums("test", 1)
    assert all(split_of(a, op, 47) == split_of(47, op, a) for a in range(100) for op in "+-*")


def test_shots_are_solved_turns_of_the_training_split_that_no_prompt_asks():
    train, test = arithmetic(digits=1, shots=4), arithmetic("test", digits=1, shots=4, count=20)
    shots = test.items[0].messages[:-1]
    assert [turn["role"] for turn in shots] == ["user", "assistant"] * 4
    for asked, answered in zip(shots[::2], shots[1::2], strict=True):
        expression = "".join(letter for letter in asked["content"] if letter in "0123456789+-*")
        assert int(answered["content"]) == eval(expression)
        assert all(asked["content"] != question(prompt) for prompt in train.items + test.items)


def test_more_sums_than_there_are_is_an_error_that_says_how_many():
    with pytest.raises(UserError, match=r"count = 900 should be at most \d+, all there are"):
        arithmetic(ops="+", digits=1, count=900)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("7", "right"),
        ("3 + 4 = 7.", "right"),
        ("\\boxed{7} and not 8", "right"),
        ("7.0", "right"),
        ("9-7", "right"),  # a minus between digits is no sign
        ("-7", "wrong"),
        ("3.7", "wrong"),
        ("7,000", "wrong"),
        ("7 + 1 = 8", "wrong"),
        ("seven", "no_answer"),
        ("", "no_answer"),
        ("1" * 10_000, "wrong"),
    ],
)
def test_arithmetic_reads_the_last_number(text, outcome):
    assert grade(7, text).outcome == outcome


@pytest.mark.parametrize("text", ["3 - 8 = -5", "3 - 8 = −5.", "\\boxed{-5}", "\\boxed{−5}"])
def test_arithmetic_reads_either_minus(text):
    assert grade(-5, text).outcome == "right"
    assert grade(5, text).outcome == "wrong"


# ---- processes that grade ----------------------------------------------------------------------------------------


@pytest.fixture
def pools():
    made = []

    def make(handler, workers=1, limit=20.0):
        made.append(GraderPool(handler, workers, limit))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def pids(pool):
    return [worker.process.pid for worker in pool._running]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie of an ended parent is gone too, whoever is to collect it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_results_come_in_the_order_of_jobs(pools):
    jobs = list(range(500))
    assert [verdict.value for verdict in pools("operator:neg", workers=2).run(jobs)] == [-job for job in jobs]


def test_a_job_over_the_limit_costs_the_limit_and_nothing_else(pools):
    pool = pools("time:sleep", limit=0.5)
    pool.run([0])
    start = time.monotonic()
    outcomes = [verdict.outcome for verdict in pool.run([0] * 20 + [60] + [0] * 43)]
    assert outcomes == ["ok"] * 20 + ["timeout"] + ["ok"] * 43
    assert time.monotonic() - start < 0.5 + 5  # and the start of another worker on a busy machine


def test_an_exception_and_a_dead_process_are_grader_errors(pools):
    verdicts = pools("time:sleep").run([0, "x", 0])
    assert [verdict.outcome for verdict in verdicts] == ["ok", "grader_error", "ok"]
    assert "TypeError" in verdicts[1].value
    assert {verdict.outcome for verdict in pools("os:_exit").run([3, 0])} == {"grader_error"}


def test_what_a_grader_prints_is_no_reply(pools):
    assert [verdict.outcome for verdict in pools("builtins:print").run(["ready", '{"outcome": "ok"}'])] == ["ok", "ok"]


def test_a_worker_never_imports_torch(pools):
    (verdict,) = pools("builtins:eval").run(["'torch' in __import__('sys').modules"])
    assert verdict.value is False
    code = "[__import__('dph.tasks.math'), __import__('dph.tasks.sql'), 'torch' in __import__('sys').modules][-1]"
    assert pools("builtins:eval").run([code])[0].value is False


def test_jobs_longer_than_a_pipe_get_through(pools):
    jobs = ["x" * 300_000] * 20
    assert [verdict.value for verdict in pools("builtins:len").run(jobs)] == [300_000] * 20
    assert [len(verdict.value) for verdict in pools("builtins:str").run(jobs)] == [300_000] * 20


def test_a_grader_that_cannot_be_imported_says_so(pools):
    with pytest.raises(RuntimeError, match="no_such_module"):
        pools("no_such_module:judge").run([1])


def test_the_pool_works_off_the_main_thread_and_from_several(pools):
    pool = pools("operator:neg")
    found = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: pool.run([n])[0].value})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: -n for n in range(4)}


def test_close_leaves_no_process_and_the_pool_usable(pools):
    pool = pools("operator:neg", workers=2)
    pool.run(range(100))
    before = pids(pool)
    pool.close()
    assert not any(map(alive, before))
    assert pool.run([1])[0].value == -1


def wait_until_dead(pid, seconds):
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def test_no_worker_outlives_the_interpreter():
    code = (
        "from dph.tasks.workers import GraderPool\n"
        "pool = GraderPool('operator:neg', 1, 5.0)\n"
        "pool.run([1])\n"
        "print(pool._running[0].process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert wait_until_dead(int(done.stdout), 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_hanging_worker_ends_though_its_parent_was_killed():
    code = (
        "from dph.tasks.workers import GraderPool\n"
        "pool = GraderPool('builtins:exec', 1, 0.5)\n"
        "pool.run(['1'])\n"
        "print(pool._running[0].process.pid, flush=True)\n"
        "pool.limit = 1000\n"
        "pool.run(['while True: pass'])"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert wait_until_dead(worker, 15)
