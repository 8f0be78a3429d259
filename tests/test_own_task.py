"""A task of one's own: a file that a config names is trained on, its mistakes are one line; nothing else is code."""

import json
import sys
from pathlib import Path

import pytest
import torch

import train
from dph.cli import run_command
from dph.config import DataConfig
from dph.errors import DataError, UserError
from dph.model_folder import load_model
from dph.tasks import Reward, Task, load_task
from dph.tasks.base import read_rows
from dph.tasks.regrade import regrade
from dph.tokenizer import load_tokenizer
from examples.worked_sums import judge
from tests.helpers import tiny_folder

ROOT = Path(__file__).parent.parent
EXAMPLE = f"task:{ROOT / 'examples' / 'worked_sums.py'}"
GOOD = """
from dph.tasks import Prompt, Reward, Task

class Echo(Task):
    def __init__(self, options, data, seed):
        message = {"role": "user", "content": "say yes"}
        super().__init__("echo", [Prompt(i, (message,), "yes", {}) for i in range(3)])

    def rewards(self, pairs):
        return [Reward.of("right" if text == prompt.gold else "wrong", text) for prompt, text in pairs]
"""


def write(folder: Path, text: str, name: str = "echo.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def opened(path: Path | str, folder: Path, query: str = "") -> Task:
    return load_task(f"task:{path}{query}", DataConfig(), 0, folder)


# ---- the example -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("1 0 + 3 0 = 4 0 , 2 + 4 = 6 , 4 0 + 6 = 4 6", "right"),
        ("10 + 30 = 40, 2 + 4 = 7, 40 + 6 = 46", "wrong"),  # a false step
        ("10 + 30 = 40, 40 + 7 = 47", "wrong"),
        ("12 + 34 = 46", "wrong"),  # one step is no work
        ("46 = 46, 46 = 46", "no_answer"),
        ("46", "no_answer"),
        ("", "no_answer"),
        ("1" * 10_000 + " + 1 = 2", "wrong"),
    ],
)
def test_the_example_asks_for_work_that_is_true(text: str, outcome: str) -> None:
    assert judge(46, text).outcome == outcome


def test_the_example_never_trains_on_what_it_tests(tmp_path: Path) -> None:
    asked = [
        {
            prompt.messages[-1]["content"]
            for seed in (0, 1)
            for prompt in load_task(source, DataConfig(), seed, tmp_path).items
        }
        for source in (EXAMPLE, f"{EXAMPLE}?split=test")
    ]
    assert len(asked[0]) > 200
    assert not asked[0] & asked[1]


def test_the_example_is_trained_on_by_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "model.path": tiny_folder(tmp_path / "model"),
        "run.folder": tmp_path,
        "data.train": EXAMPLE + "?count=4",
        "data.eval": [EXAMPLE + "?split=test&count=2"],
        "sampling.max_new_tokens": 6,
        "presample.responses": 2,
        "presample.threshold": 2,
        "train.steps": 2,
        "train.prompts_per_step": 2,
        "train.responses_per_prompt": 2,
        "eval.samples": 2,
        "eval.k": [1, 2],
    }
    overrides = [f"--{name}={json.dumps(v) if isinstance(v, list) else v}" for name, v in small.items()]
    monkeypatch.setattr(sys, "argv", ["train.py", str(ROOT / "configs" / "own_task.toml"), *overrides])
    run_command(train.main, "", train._arguments)
    assert "split=test" in capsys.readouterr().out
    run = tmp_path / "own_task"
    rows = [row.values for row in read_rows(run / "metrics.jsonl")]
    assert [row["step"] for row in rows] == [1, 2]
    assert json.loads((run / "presample" / "report.json").read_text())["prompts"] == 4


# ---- what the file gets and gives --------------------------------------------------------------------------------


def test_the_class_gets_options_data_and_seed(tmp_path: Path) -> None:
    seen = GOOD.replace('"say yes"', 'f"{options} {data.system} {seed}"')
    task = load_task(f"task:{write(tmp_path, seen)}?a=1&limit=2", DataConfig(system="S"), 7, tmp_path)
    assert [prompt.messages[0]["content"] for prompt in task.prompts()] == ["{'a': '1'} S 7"] * 2


def test_rewards_are_the_files_and_are_counted(tmp_path: Path) -> None:
    task = opened(write(tmp_path, GOOD), tmp_path)
    assert [task.reward(task.items[0], text).value for text in ("yes", "no")] == [1, 0]
    assert task.outcomes == {"right": 1, "wrong": 1}


def test_answers_vote_by_what_was_judged_and_a_file_may_say_otherwise(tmp_path: Path) -> None:
    task = opened(write(tmp_path, GOOD), tmp_path)
    prompt = task.items[0]
    assert task.vote(prompt, "", Reward.of("wrong", " The \n Answer")) == "the answer"
    assert task.vote(prompt, "", Reward.of("no_answer")) is None
    assert task.vote(prompt, "", Reward.of("timeout", "SELECT 1")) is None
    own = GOOD + "\n    def vote(self, prompt, text, reward):\n        return text[0]\n"
    assert opened(write(tmp_path, own), tmp_path).vote(prompt, "yes", Reward.of("right", "yes")) == "y"


def test_part_of_a_reward_is_a_reward(tmp_path: Path) -> None:
    half = GOOD.replace("Reward.of(", "Reward(0.5, 'wrong', text) if text == 'ye' else Reward.of(")
    task = opened(write(tmp_path, half), tmp_path)
    assert task.reward(task.items[0], "ye").value == 0.5


def test_an_imported_task_is_no_second_one_and_a_dataclass_works(tmp_path: Path) -> None:
    more = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom dph.tasks.math import MathTask\n"
    )
    text = more + GOOD + "\n@dataclass\nclass Note:\n    text: str\n\nSame = Echo\n"
    assert len(opened(write(tmp_path, text), tmp_path).prompts()) == 3


@pytest.mark.parametrize("numbers", ["np.arange(3)", "np.arange(3.0)", "[np.uint8(i) for i in range(3)]"])
def test_prompts_numbered_by_numpy_are_numbered_by_whole_numbers(numbers: str, tmp_path: Path) -> None:
    text = "import numpy as np\n" + GOOD.replace("for i in range(3)", f"for i in {numbers}")
    task = opened(write(tmp_path, text), tmp_path)
    assert json.dumps([prompt.index for prompt in task.prompts()]) == "[0, 1, 2]"
    assert task.reward(task.items[1], "yes").value == 1


def test_another_reward_is_another_content(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    contents = []
    for text in (GOOD, GOOD, GOOD.replace("==", "!=")):
        path.write_text(text, encoding="utf-8")
        contents.append(opened(path, tmp_path).content())
    assert contents[0] == contents[1] != contents[2]


def test_the_content_that_a_file_names_counts_and_is_checked(tmp_path: Path) -> None:
    more = "\n    def content(self):\n        return {}\n"
    named = opened(write(tmp_path, GOOD + more.format("{'databases': 'x'}")), tmp_path).content()
    assert named["databases"] == "x"
    assert named["grader"]
    with pytest.raises(DataError, match=r"content\(\) should return a dict of names and hashes; it returned 3"):
        opened(write(tmp_path, GOOD + more.format("3")), tmp_path).content()


# ---- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (GOOD, "class Echo(:\n", "line 1: SyntaxError: invalid syntax"),
        (GOOD, "import no_such_module\n", "line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        (GOOD, "import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
        (GOOD, "x = 1\n", "defines no subclass; it should define exactly one subclass of dph.tasks.Task"),
        (GOOD, GOOD + "\nclass Other(Echo):\n    pass\n", "defines 2 subclasses of dph.tasks.Task (Echo, Other)"),
        ("options, data, seed", "options", "TypeError: "),
        ("range(3)", "range(0)", "the task has no prompts"),
        ('"yes", {}', "None, {}", "prompt 0 has no gold answer (gold = None)"),
        ('"yes", {}', "{1, 2}, {}", "prompt 0: the gold answer cannot be stored as JSON"),
        ("Prompt(i,", "Prompt(i + 1,", "prompt 0 has index = 1; they should count from 0"),
        ("(message,)", "()", "prompt 0: messages = () should be {role, content}"),
        ("(message,)", '("say yes",)', "prompt 0: messages = ('say yes',) should be {role, content}"),
        ('[Prompt(i, (message,), "yes", {})', '["say yes"', "prompt 0 = 'say yes' should be a dph.tasks.Prompt"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_before_anything_is_sampled(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(DataError) as error:
        opened(path, tmp_path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[Reward(1.5, 'right', text) for _, text in pairs]", "reward 1.5 should be a number from 0 to 1"),
        ("[Reward(-0.1, 'wrong', text) for _, text in pairs]", "reward -0.1 should be a number from 0 to 1"),
        ("[Reward(float('nan'), 'wrong', '') for _ in pairs]", "reward nan should be a number from 0 to 1"),
        ("[Reward('1', 'wrong', '') for _ in pairs]", "reward '1' should be a number from 0 to 1"),
        ("[Reward(1.0, 'good', '') for _ in pairs]", "outcome 'good' of a reward should be one of right, wrong"),
        ("[Reward(1.0, 'wrong', '') for _ in pairs]", "reward 1.0 with outcome 'wrong': right is 1, the rest less"),
        ("[1.0 for _ in pairs]", "reward 1.0 should be a dph.tasks.Reward"),
        ("[]", "rewards() should return a list of 1, one an answer; it returned 0"),
        ("None", "rewards() should return a list of 1, one an answer; it returned NoneType"),
        ("[Reward.of(1 / 0)]", "line 10: ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_reward_stops_the_run_and_is_named(returned: str, message: str, tmp_path: Path) -> None:
    head = GOOD[: GOOD.index("        return [Reward")]
    path = write(tmp_path, head + f"        return {returned}\n")
    task = opened(path, tmp_path)
    with pytest.raises(DataError) as error:
        task.reward(task.items[0], "yes")
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere.py", "nowhere.py: no such file"),
        ("words.txt", "words.txt: should be a Python file"),
        (".", "should be"),
    ],
)
def test_what_is_no_python_file_is_named(where: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        opened(where, tmp_path)
    assert message in str(error.value)


def test_the_example_names_a_wrong_option() -> None:
    for query, message in (("?splt=test", "did you mean split?"), ("?split=dev", "'dev' should be train or test")):
        with pytest.raises(UserError) as error:
            load_task(EXAMPLE + query, DataConfig(), 0, Path())
        assert message in str(error.value)


# ---- nothing else is code ----------------------------------------------------------------------------------------


def test_no_data_file_is_ever_imported(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    path = write(tmp_path, f"open({str(mark)!r}, 'w')\n", "x.py")
    for task in ("math", "sql", "arithmetic", "miniature"):
        with pytest.raises(UserError):
            load_task(f"{task}:{path}", DataConfig(db_root=str(tmp_path)), 0, tmp_path)
    assert not mark.exists()


def test_no_file_of_a_model_folder_is_ever_imported(tmp_path: Path) -> None:
    folder, mark = tiny_folder(tmp_path / "model"), tmp_path / "mark"
    for name in ("modeling_llama.py", "tokenization_llama.py", "configuration_llama.py", "__init__.py"):
        write(folder, f"open({str(mark)!r}, 'w')\n", name)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_llama.Llama", "AutoModelForCausalLM": "modeling_llama.Llama"}
    (folder / "config.json").write_text(json.dumps(config))
    load_model(folder, torch.float32)
    load_tokenizer(folder)
    assert not mark.exists()


def test_a_stored_answer_names_code_only_where_the_config_does_too(tmp_path: Path) -> None:
    source = f"task:{write(tmp_path, GOOD)}"
    row = {"source": source, "prompt": "say yes", "answer": "yes", "response": "yes"}
    path = write(tmp_path, json.dumps(row) + "\n", "samples.jsonl")
    with pytest.raises(DataError, match=r"line 1: source = .* names code"):
        regrade(path, None, DataConfig(), 0, tmp_path)
    _, summary = regrade(path, None, DataConfig(train=source), 0, tmp_path)
    assert summary["right"] == 1


def test_the_document_shows_the_example_as_it_is() -> None:
    shown = (ROOT / "docs" / "own_task.md").read_text(encoding="utf-8")
    assert f"```python\n{(ROOT / 'examples' / 'worked_sums.py').read_text(encoding='utf-8')}```\n" in shown
