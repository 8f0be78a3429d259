"""The config: strict, checked, one home of defaults, and readable back."""

import re
from pathlib import Path

import pytest

from dph.config import Config, describe, load_config, to_toml
from dph.errors import UserError
from dph.tasks import TASKS
from dph.tasks.base import parse_source


def write(folder: Path, text: str, name: str = "c.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_no_file_and_no_argument_gives_the_defaults() -> None:
    assert load_config(None) == Config()


def test_the_command_line_wins_over_the_file_and_the_file_over_what_it_extends(tmp_path: Path) -> None:
    write(tmp_path, "[optim]\nlr = 1.0\ngrad_clip = 5.0\nweight_decay = 0.5\n", "base.toml")
    path = write(tmp_path, 'extends = "base.toml"\n[optim]\nlr = 2.0\ngrad_clip = 6.0\n')
    optim = load_config(path, ["--optim.lr=3e-4"]).optim
    assert (optim.lr, optim.grad_clip, optim.weight_decay) == (3e-4, 6.0, 0.5)


def test_a_written_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(
        None,
        [
            '--data.system=quote " back\\slash é',
            '--data.fields={prompt = "q\\n"}',
            "--optim.lr=1e-6",
            '--data.eval=["a:b"]',
        ],
    )
    assert load_config(write(tmp_path, to_toml(config))) == config


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--optim.lr=abc", "optim.lr = 'abc' should be a number"),
        ("--optim.lr=-1", "optim.lr = -1.0 should be at least 0"),
        ("--optim.lr=nan", "optim.lr = nan should be at least 0"),
        ("--optim.lr=inf", "optim.lr = inf should be at least 0"),
        ("--optim.learning_rate=1", "unknown key optim.learning_rate"),
        ("--optin.lr=1", "unknown section [optin]; did you mean optim?"),
        ("--train.steps=1.5", "train.steps = 1.5 should be a whole number"),
        ("--train.steps=true", "train.steps = True should be a whole number"),
        ("--run.device=tpu", "run.device = 'tpu' should be one of auto, cpu, cuda"),
        ("--presample.threshold=9", "presample.threshold = 9 should be at most presample.responses = 8"),
        ("--loss.alpha=1", "loss.alpha = 1 should be at least 0.01 and below 1"),
        ("--loss.alpha=1e-5", "loss.alpha = 1e-05 should be at least 0.01 and below 1"),
        ("--loss.eta=0.2", "loss.eta = 0.2 weighs nothing: loss.divergence is 'none'"),
        ("--loss.divergence_form=plain", "goes with loss.divergence = 'forward_kl'"),
        ("--model.dtype=bf16", "model.dtype = 'bf16' computes in bf16; run.dtype = 'fp32' should be 'bf16', too"),
        ("--optim.betas=[0.9]", "optim.betas = [0.9] should be two numbers"),
        ("--eval.k=[1,128]", "eval.k = [1, 128] should not exceed eval.samples = 64"),
        ("--run.name=../x", "run.name = '../x' should be one folder name"),
        ('--run.name="two\\nlines"', "run.name = 'two\\nlines' should be one folder name of printable characters"),
        ("--run.name=a\udcff", "run.name holds half a surrogate pair, or a byte that is not UTF-8, at character 2"),
        ("--run.name=base", "run.name = 'base' is the name of the initial policy's report"),
        ("--run.name=Base", "run.name = 'Base' is the name of the initial policy's report"),  # one file on a Mac
        ("--data.fields=3", "data.fields = 3 should be a table of strings"),
        ('--data.fields={prompt = "q", anwser = "a"}', "unknown name 'anwser'; did you mean answer?"),
        ("--data.template={date = 2024-07-26}", "should be a table of texts, true or false, and numbers"),
        ("--data.template={x = [1]}", "should be a table of texts, true or false, and numbers"),
        ("--data.template={x = nan}", "data.template.x = nan should be a number"),
        ('--data.template={x = "\\frac"}', "holds a form feed (U+000C) before 'rac'"),
        ("--sampling.max_new_tokens=1e9", "sampling.max_new_tokens = 1000000000.0 should be a whole number"),
        ("--sampling.max_new_tokens=1000000000", "sampling.max_new_tokens = 1000000000 should be from 1 to 1000000"),
        ("--eval.samples=10000000000", "eval.samples = 10000000000 should be from 1 to 1000000"),
        ("lr=3", "argument 'lr=3' should read --section.key=value"),
        ("--lr=3", "argument '--lr=3' should read --section.key=value"),
    ],
)
def test_a_mistake_names_the_key_the_value_and_what_would_be_right(argument: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        load_config(None, [argument])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text", ["lr = 3", "[optim\nlr = 3", 'extends = "c.toml"', 'extends = "missing.toml"', "extends = 3"]
)
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"\.toml"):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "number"),
    [(".5", 0.5), ("+.5", 0.5), ("5.", 5.0), ("5.e-1", 0.5), (".5e1", 5.0), ("1_000", 1000.0), ("7", 7.0)],
)
def test_a_number_may_begin_or_end_with_its_point_on_the_command_line(text: str, number: float) -> None:
    assert load_config(None, [f"--optim.lr={text}"]).optim.lr == number


def test_so_may_the_numbers_of_a_list() -> None:
    assert load_config(None, ["--optim.betas=[.9, 0.99]"]).optim.betas == (0.9, 0.99)


@pytest.mark.parametrize("text", ["1.2.3", ".", "-", "..5", "1-2"])
def test_what_only_looks_like_a_number_is_none(text: str) -> None:
    with pytest.raises(UserError, match="should be a number"):
        load_config(None, [f"--optim.lr={text}"])


@pytest.mark.parametrize("text", [".5", "1.10", "007", "2024-01-01", "true", "1e-6"])
def test_a_text_stays_what_was_written(text: str) -> None:
    assert load_config(None, [f"--run.name={text}"]).run.name == text
    assert load_config(None, [f'--run.name="{text}"']).run.name == text


def test_variables_of_the_chat_template_may_be_texts_flags_and_numbers(tmp_path: Path) -> None:
    config = load_config(None, ['--data.template={date_string = "26 Jul 2024", enable_thinking = false, depth = 3}'])
    assert config.data.template == {"date_string": "26 Jul 2024", "enable_thinking": False, "depth": 3}
    assert load_config(write(tmp_path, to_toml(config))) == config


def test_help_names_every_key() -> None:
    text = describe()
    assert all(f"--{line}=" in text for line in ("loss.eta", "data.train", "eval.k", "presample.confirm"))


CONFIGS = sorted(Path("configs").glob("*.toml"))


def test_no_two_committed_configs_share_a_run_folder() -> None:
    names = [load_config(path).run.name for path in CONFIGS]
    assert len(set(names)) == len(names) > 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_committed_config_loads_and_names_known_tasks(path: Path) -> None:
    data = load_config(path).data
    for source in (data.train, *data.eval):
        assert parse_source(source).task in TASKS
        assert not source.startswith("sql:") or data.db_root
