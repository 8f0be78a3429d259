"""The three commands: a mistake is one line and exit code 2, nothing half-written; a whole run works from files."""

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import evaluate
import presample
import train
from dph.cli import config_argument, run_command
from dph.objective import Objective
from tests.helpers import SMALL_RUN, tiny_folder

COMMANDS = {"train": train, "presample": presample, "evaluate": evaluate}
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command in this process: exit code, standard output, standard error."""

    def run(command: str, *arguments: object) -> tuple[int, str, str]:
        module = COMMANDS[command]
        monkeypatch.setattr(sys, "argv", [f"{command}.py", *map(str, arguments)])
        declare = getattr(module, "_arguments", config_argument)
        code = 0
        try:
            run_command(module.main, str(module.__doc__), declare)
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config of the arithmetic task on a tiny random model, whose every key is small."""
    model = tiny_folder(tmp_path / "model")
    path = tmp_path / "small.toml"
    path.write_text(
        f"""
[run]
name = "small"
folder = "{tmp_path / "runs"}"
[model]
path = "{model}"
[data]
train = "miniature:train?count=6"
eval = ["miniature:test?count=3"]
[sampling]
max_new_tokens = 5
{SMALL_RUN}eval_every = 2
save_every = 1
[eval]
samples = 2
k = [1, 2]
during_samples = 2
during_prompts = 2
[loss]
divergence = "js"
eta = 0.1
"""
    )
    return path


def test_a_whole_run_leaves_what_is_promised(call: Call, config: Path, tmp_path: Path) -> None:
    code, out, _ = call("train", config)
    assert code == 0
    assert "pass@2" in out
    run = tmp_path / "runs" / "small"
    for name in (
        "config.toml",
        "metrics.jsonl",
        "samples.jsonl",
        "metrics.png",
        "pass_at_k.png",
        "presample/partition.jsonl",
    ):
        assert (run / name).stat().st_size > 0, name
    assert {p.name for p in (run / "presample").iterdir()} == {
        "partition.jsonl",
        "rehearsal.safetensors",
        "report.json",
    }
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-1", "step-2"]
    assert {
        "model.safetensors",
        "config.json",
        "tokenizer.model",
        "generation_config.json",
        "trainer.safetensors",
        "state.json",
    } <= {p.name for p in (run / "checkpoints" / "step-2").iterdir()}
    assert sorted(p.name for p in (run / "evaluation").iterdir()) == ["base.json", "small.json"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert list(rows[1]["eval"]) == ["miniature:test?count=3"]
    assert call("train", config)[0] == 0, "the same command again has nothing left to do"
    code, out, _ = call("evaluate", config, run / "checkpoints/step-1", run / "checkpoints/step-2", "--eval.samples=4")
    assert code == 0
    assert "step-1" in out
    assert "step-2" in out


def test_presample_alone_prints_its_report(call: Call, config: Path) -> None:
    code, out, _ = call("presample", config)
    assert code == 0
    assert "rehearsal_answers" in out


def test_both_sets_empty_is_said_before_a_model_is_trained(call: Call, config: Path, tmp_path: Path) -> None:
    code, _, err = call("train", config, "--presample.drop_unsolved=true")
    assert code == 2
    assert last_line(err).startswith("error: ")
    assert "D_pef and D_exp are both empty" in last_line(err)
    assert not (tmp_path / "runs/small/checkpoints").exists()


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optim.lr=abc"], "optim.lr = 'abc' should be a number"),
        (["--optim.learning_rate=1"], "unknown key optim.learning_rate"),
        (["--model.path=/no/such/model"], "model.path = '/no/such/model': no such folder"),
        (["--loss.divergence=kl"], "loss.divergence = 'kl' should be none or one of"),
        (["--data.train=math:missing.jsonl"], "missing.jsonl: no such file"),
        (["--data.train=poetry:x"], "unknown task 'poetry'"),
        (["--data.max_prompt_tokens=1"], "no prompt of at most data.max_prompt_tokens = 1"),
        (["--run.device=cuda"], "run.device = 'cuda'"),
        (["stray"], "'stray' should read --section.key=value"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    call: Call, config: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    if arguments == ["--run.device=cuda"] and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    code, _, err = call("train", config, *arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert message in err
    assert not list((tmp_path / "runs").rglob("checkpoints"))
    assert not list((tmp_path / "runs").rglob("presample"))


def test_a_truncated_row_is_named_by_file_and_line(call: Call, config: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "1 + ')
    code, _, err = call("train", config, f"--data.train=math:{data}")
    assert code == 2
    assert f"{data}, line 2: is not JSON" in err
    assert not (tmp_path / "runs" / "small").exists()


def test_a_run_with_adapters_is_made_continued_and_evaluated(call: Call, config: Path, tmp_path: Path) -> None:
    adapters = ("--model.adapter_rank=4", "--loss.samples=both")
    code, out, err = call("train", config, *adapters, "--train.steps=1")
    assert code == 0, err
    assert call("train", config, *adapters)[0] == 0
    step = tmp_path / "runs" / "small" / "checkpoints" / "step-2"
    assert (step / "adapter_model.safetensors").is_file()
    code, out, err = call("evaluate", config, *adapters)
    assert code == 0, err
    assert "step-2" in out
    code, out, err = call("evaluate", config, tmp_path / "model", step, *adapters)
    assert code == 0, err
    code, _, err = call("train", config, f"--model.path={step}", "--run.name=next")
    assert code == 2
    assert f"python -m dph.adapter merge {step} OUT" in err


def test_the_last_evaluation_of_a_run_with_adapters_stands_for_its_checkpoint(
    call: Call, config: Path, tmp_path: Path
) -> None:
    assert call("train", config, "--model.adapter_rank=4")[0] == 0
    evaluation = tmp_path / "runs" / "small" / "evaluation"
    (evaluation / "small.json").rename(evaluation / "step-2.json")
    _, out, _ = call("evaluate", config, "--model.adapter_rank=4")
    assert "answered again" not in out


def test_another_run_in_the_folder_is_refused_by_its_keys(call: Call, config: Path) -> None:
    assert call("train", config)[0] == 0
    code, _, err = call("train", config, "--loss.eta=0.2")
    assert code == 2
    assert "holds another run (loss.eta = 0.1 there, 0.2 here)" in err


def test_recorded_rollouts_are_replayed_without_sampling(call: Call, config: Path, tmp_path: Path) -> None:
    assert call("train", config, "--train.record_rollouts=true")[0] == 0
    recorded = tmp_path / "runs" / "small"
    assert call("train", config, "--run.name=again", "--rollouts-from", recorded)[0] == 0
    sums = [
        (tmp_path / "runs" / name / "checkpoints/step-2/model.safetensors").read_bytes() for name in ("small", "again")
    ]
    assert sums[0] == sums[1]
    rows = [json.loads(line) for line in (tmp_path / "runs/again/metrics.jsonl").read_text().splitlines()]
    assert not any("seconds/sample_and_grade" in row for row in rows)


def test_where_rollouts_come_from_is_kept_when_a_run_goes_on(call: Call, config: Path, tmp_path: Path) -> None:
    assert call("train", config, "--train.record_rollouts=true")[0] == 0
    recorded = tmp_path / "runs" / "small"
    assert call("train", config, "--run.name=again", "--train.steps=1", "--rollouts-from", recorded)[0] == 0
    code, _, err = call("train", config, "--run.name=again")
    assert code == 2
    assert "again: made with other rollouts" in err
    code, _, err = call("train", config, "--train.record_rollouts=true", "--rollouts-from", recorded)
    assert code == 2
    assert "is this run itself" in err
    (recorded / "rollouts" / "step-2.safetensors").write_bytes(b"cut")
    code, _, err = call("train", config, "--run.name=again", "--rollouts-from", recorded)
    assert code == 2
    assert "step-2.safetensors: not readable" in err


def test_every_model_is_looked_for_before_the_first_is_evaluated(call: Call, config: Path, tmp_path: Path) -> None:
    code, _, err = call("evaluate", config, tmp_path / "model", tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in err
    assert not list((tmp_path / "runs").rglob("*.json"))


def test_three_calls_lead_from_train_to_the_loss(call: Call, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[list[str]] = []
    loss = Objective.loss

    def noted(self: Objective, *arguments: Any) -> torch.Tensor:
        names = [frame.name for frame in traceback.extract_stack()]
        stacks.append(names[-1 - names[::-1].index("main") :])
        return loss(self, *arguments)

    monkeypatch.setattr(Objective, "loss", noted)
    assert call("train", config, "--loss.entropy=0.01")[0] == 0  # so that every rollout is trained on
    assert {tuple(names) for names in stacks} == {("main", "run", "train_step", "noted")}, "noted is Objective.loss"


def test_memory_that_a_cpu_does_not_have_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for ask in (lambda: torch.empty(2**58), lambda: np.empty(2**58)):
        with pytest.raises(SystemExit) as stopped:
            run_command(lambda config, arguments, ask=ask: ask(), "", lambda parser: parser.set_defaults(config=None))
        assert stopped.value.code == 2
        assert capsys.readouterr().err.startswith("error: out of memory; lower sampling.max_rows")


def test_a_mistake_of_the_programs_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(RuntimeError, match="size of tensor"):
        run_command(
            lambda config, arguments: torch.ones(2) + torch.ones(3),
            "",
            lambda parser: parser.set_defaults(config=None),
        )


def test_debug_shows_the_traceback(call: Call, config: Path) -> None:
    assert "Traceback" in call("train", config, "--model.path=/no/such/model", "--debug")[2]


def test_evaluating_nothing_or_twice_the_same_is_said(call: Call, config: Path, tmp_path: Path) -> None:
    assert "names no evaluation set" in call("evaluate", config, "--data.eval=[]")[2]
    model = tmp_path / "model"
    assert "the same model is named twice" in call("evaluate", config, model, model)[2]


def test_help_of_evaluate_begins_with_the_models_that_it_takes(call: Call) -> None:
    _, out, _ = call("evaluate", "--help")
    assert out.splitlines()[0].endswith("[CONFIG] [MODEL ...] [options] [--section.key=value ...]")


def test_help_shows_every_key_with_its_default(call: Call) -> None:
    code, out, _ = call("train", "--help")
    assert code == 0
    assert "--loss.eta=0.0" in out


def test_tensorboard_without_its_package_is_said_before_any_work(
    call: Call, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = call("train", config, "--run.tensorboard=true")
    assert code == 2
    assert err == "error: run.tensorboard = true needs a package: pip install tensorboard\n"
    assert not (tmp_path / "runs").exists()


def test_the_budget_needs_a_config_json_and_nothing_else(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    shape |= {"num_attention_heads": 14, "num_key_value_heads": 2, "model_type": "qwen2", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(shape))
    options = ["configs/gsm8k_dph_js.toml", f"--model.path={folder}", f"--run.folder={tmp_path}/runs", "--budget"]
    code, out, _ = call("train", *options, "--gpu-memory=24")
    assert code == 0
    assert "0.49 billion weights" in out
    assert "24 GB: fits with" in out
    assert not (tmp_path / "runs").exists()
    code, _, err = call("train", "configs/quickstart.toml", "--budget")
    assert (code, "fits everywhere" in err) == (2, True)


@pytest.mark.parametrize("name", ["gsm8k_qwen0.5b_24gb", "spider_llama8b_80gb"])
def test_the_configs_for_one_gpu_train_two_steps_of_a_small_model(call: Call, tmp_path: Path, name: str) -> None:
    model = tiny_folder(tmp_path / "model")
    small = {
        "model.path": model, "run.folder": tmp_path / "runs", "data.train": "miniature:train?count=6",
        "data.eval": "[]", "data.db_root": "", "data.instruction": "", "sampling.max_new_tokens": 5,
        "presample.threshold": 1,
        "train.steps": 2, "train.prompts_per_step": 2, "train.responses_per_prompt": 2, "train.updates_per_step": 1,
        "train.explore": "all", "train.rehearsal_rows": 2, "presample.responses": 2,
        "loss.entropy": 0.01,  # a random model is never right, and without it nothing would pull
    }  # fmt: skip
    code, out, err = call("train", f"configs/{name}.toml", *(f"--{key}={value}" for key, value in small.items()))
    assert code == 0, err
    assert "D_exp: 6 prompts" in out
    step = tmp_path / "runs" / name / "checkpoints" / "step-2"
    adapted = name.startswith("spider")
    assert (step / "adapter_model.safetensors").exists() == adapted
    assert (step / "model.safetensors").exists() != adapted
    assert load_file(step / "trainer.safetensors"), "nothing was trained"
