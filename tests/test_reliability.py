"""What docs/reliability.md promises, tested by doing the harm: broken checkpoints, full disks, locks, odd numbers."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import dph.checkpoint
import dph.evaluation
import dph.losses
import dph.objective
from dph.answering import Policy
from dph.checkpoint import append_rows, chat_day, checkpoints, newest_checkpoint, open_run, read_log, write_text
from dph.cli import load_policy
from dph.config import load_config
from dph.errors import DataError, UserError
from dph.evaluation import evaluate_model
from dph.model_folder import load_model
from dph.prompts import PromptSet, tokenize
from dph.rollouts import Rollout
from dph.tokenizer import load_tokenizer
from tests.helpers import WordTask, tiny_folder
from tests.test_trainer import JS, comparable, keep_gradients, moments, rehearse, trainer, weights

ROOT = Path(__file__).parent.parent


# ---- checkpoints -------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


HARM = {
    "a bit of the weights": lambda c: flip(c / "model.safetensors"),
    "a bit of the moments": lambda c: flip(c / "trainer.safetensors"),
    "a bit of the counters": lambda c: flip(c / "state.json"),
    "a bit of the sums": lambda c: flip(c / "SHA256SUMS"),
    "half of the weights": lambda c: os.truncate(c / "model.safetensors", 5000),
    "no moments": lambda c: (c / "trainer.safetensors").unlink(),
    "no sums": lambda c: (c / "SHA256SUMS").unlink(),
    "empty sums": lambda c: os.truncate(c / "SHA256SUMS", 0),
    "half of the sums": lambda c: os.truncate(c / "SHA256SUMS", 100),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with all its checkpoints."""
    folder = tmp_path_factory.mktemp("straight")
    trainer(folder, *JS, "--train.steps=3", "--train.save_every=1", "--train.keep_last=3").run()
    return folder


@pytest.mark.parametrize("harm", HARM)
def test_a_checkpoint_that_is_not_as_written_is_passed_over_with_its_reason(
    tmp_path: Path, straight: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(straight / "run", tmp_path / "run"))
    HARM[harm](run / "checkpoints" / "step-3")
    assert newest_checkpoint(run) == run / "checkpoints" / "step-2"
    assert "step-3: passed over, not as it was written: " in capsys.readouterr().err


def test_going_on_from_the_last_good_one_ends_with_the_same_files(tmp_path: Path, straight: Path) -> None:
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    last = tmp_path / "run" / "checkpoints" / "step-3"
    flip(last / "model.safetensors")
    trainer(tmp_path, *JS, "--train.steps=3", "--train.save_every=1", "--train.keep_last=3").run()
    for file in last.iterdir():
        assert file.read_bytes() == (straight / "run/checkpoints/step-3" / file.name).read_bytes(), file.name
    assert comparable(tmp_path) == comparable(straight)


def test_none_whole_is_an_error_not_a_silent_start(tmp_path: Path, straight: Path) -> None:
    run = Path(shutil.copytree(straight / "run", tmp_path / "run"))
    for folder in checkpoints(run):
        flip(folder / "state.json")
    with pytest.raises(UserError, match="none of 3 is whole; delete the folder to train from step 0"):
        newest_checkpoint(run)


BF16 = (*JS, "--train.save_dtype=bf16")


def test_a_run_whose_checkpoints_are_in_bf16_goes_on_to_the_bit(tmp_path: Path) -> None:
    unbroken = trainer(tmp_path / "a", *JS, "--train.steps=4")
    unbroken.run()
    trainer(tmp_path / "b", *BF16, "--train.steps=2").run()
    resumed = trainer(tmp_path / "b", *BF16, "--train.steps=4")
    resumed.run()
    assert torch.equal(weights(unbroken), weights(resumed))
    assert comparable(tmp_path / "a") == comparable(tmp_path / "b")
    assert all(torch.equal(mine, other) for mine, other in zip(moments(unbroken), moments(resumed), strict=True))


def test_a_checkpoint_in_bf16_is_the_fp32_model_rounded(tmp_path: Path) -> None:
    made = trainer(tmp_path, *BF16, "--train.steps=2")
    made.run()
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    stored = load_file(folder / "model.safetensors")
    for name, weight in made.policy.model.named_parameters():
        assert stored[name].dtype == torch.bfloat16
        assert torch.equal(stored[name], weight.detach().bfloat16())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_model(folder)  # as evaluate.py does
    assert next(loaded.parameters()).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_other_tools_find_the_model_among_a_checkpoints_files(tmp_path: Path, dtype: str) -> None:
    transformers = pytest.importorskip("transformers")
    made = trainer(tmp_path, *JS, "--train.steps=1", f"--train.save_dtype={dtype}")
    made.run()
    folder = tmp_path / "run" / "checkpoints" / "step-1"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(theirs[name], stored[name]) for name in stored)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(stored, "model.safetensors")


def test_the_type_of_the_checkpoints_may_change_when_a_run_goes_on(tmp_path: Path) -> None:
    trainer(tmp_path / "a", *JS, "--train.steps=3", "--train.save_every=1").run()
    for step, dtype in enumerate(("bf16", "fp32", "bf16"), start=1):
        trainer(tmp_path / "b", *JS, f"--train.steps={step}", f"--train.save_dtype={dtype}").run()
    last = [load_file(tmp_path / name / "run/checkpoints/step-3/trainer.safetensors") for name in ("a", "b")]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


def test_a_checkpoint_in_bf16_without_its_fp32_weights_is_not_whole(tmp_path: Path) -> None:
    trainer(tmp_path, *BF16, "--train.steps=2", "--train.save_every=1").run()
    (tmp_path / "run" / "checkpoints" / "step-2" / "master_weights.safetensors").unlink()
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step-1"


def test_sums_are_those_of_sha256sum(straight: Path) -> None:
    folder = straight / "run" / "checkpoints" / "step-3"
    subprocess.run(["sha256sum", "--check", "--strict", "--status", "SHA256SUMS"], cwd=folder, check=True)


def test_the_newest_and_the_best_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, "--train.steps=5", "--train.save_every=2", "--train.eval_every=1", "--train.keep_last=1",
                   "--train.keep_best=true")  # fmt: skip
    scores = iter([0.1, 0.9, 0.9, 0.3, 0.2])
    made.eval_sets = [PromptSet(made.collector.task, made.collector.explored)]
    monkeypatch.setattr(dph.trainer, "evaluate", lambda *a, **k: ({}, []))
    monkeypatch.setattr(dph.trainer, "summarise", lambda *a: {"pass@1": [next(scores), 0, 0]})
    monkeypatch.setattr(dph.trainer, "append_rows", lambda *a: None)
    made._evaluate = _without_samples(made)  # type: ignore[method-assign]
    made.run()
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-2", "step-5"]
    assert (made.state.best, made.state.best_step) == (0.9, 2), "the first of two equal ones"
    assert json.loads((tmp_path / "run/checkpoints/step-5/state.json").read_text())["best_step"] == 2


def _without_samples(made: Any) -> Any:
    def evaluation(step: int) -> dict[str, Any]:
        score = dph.trainer.summarise({}, ())["pass@1"][0]
        if score > made.state.best:
            made.state.best, made.state.best_step = score, step
        return {}

    return evaluation


# ---- disks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KB: room for one checkpoint, not for two."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)  # lazily: the lock stays open


def test_a_full_disk_leaves_the_old_checkpoint_and_with_room_the_run_ends_the_same(
    tmp_path: Path, small_disk: Path, straight: Path
) -> None:
    options = [*JS, "--train.steps=3", "--train.save_every=1", "--train.keep_last=3", f"--run.folder={small_disk}"]
    with pytest.raises(UserError, match=r"step-2: cannot be written .*No space left.*; make room"):
        trainer(tmp_path, *options).run()
    assert [p.name for p in (small_disk / "run/checkpoints").iterdir()] == ["step-1"]
    assert newest_checkpoint(small_disk / "run") is not None
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    trainer(tmp_path, *options).run()
    assert comparable(small_disk) == comparable(straight)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")])
def test_a_failed_write_leaves_the_old_file_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*anything: object, **more: object) -> None:
        (tmp_path / "x.partial").write_bytes(b"half")
        raise error

    write_text(tmp_path / "x", "old")
    monkeypatch.setattr(dph.checkpoint, "save_file", fails)
    with pytest.raises(UserError, match="x: cannot be written"):
        dph.checkpoint.write_tensors(tmp_path / "x", {})
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "old")]


def test_a_log_drops_its_cut_last_line_and_names_any_other_bad_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_rows(path, [{"step": 1}, {"step": 2}])
    with path.open("a") as file:
        file.write('{"step": 3')
    assert read_log(path, "step") == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"log\.jsonl, line 2"):
        read_log(path, "step")


# ---- one process a run, each evaluation once ---------------------------------------------------------------------


def test_a_second_process_on_a_run_is_told_so(tmp_path: Path) -> None:
    config = load_config(None, [f"--run.folder={tmp_path}"])
    open_run(config)
    open_run(config)  # the same process may
    again = (
        "import sys; from dph.checkpoint import open_run; from dph.config import load_config; "
        "open_run(load_config(None, sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", again, f"--run.folder={tmp_path}"], cwd=ROOT, capture_output=True)
    assert b"another process is at work here" in done.stderr


class Tomorrow(date):
    @classmethod
    def today(cls) -> date:
        return date(2030, 1, 2)


def test_the_day_of_chat_templates_stays_that_of_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}")
    made = load_config(None, [f"--run.folder={tmp_path}", f"--model.path={folder}"])
    open_run(made)
    message = [{"role": "user", "content": "list"}]
    first = load_policy(str(folder), made, torch.device("cpu")).tokenizer.template.render(message)
    monkeypatch.setattr(dph.checkpoint, "date", Tomorrow)
    assert open_run(made) == tmp_path / "run"
    again = load_policy(str(folder), made, torch.device("cpu")).tokenizer.template.render(message)
    other = load_config(None, [f"--run.folder={tmp_path}", f"--model.path={folder}", "--run.name=other"])
    new = load_policy(str(folder), other, torch.device("cpu")).tokenizer.template.render(message)
    assert first == again == f"{date.today():%d %b %Y} list"
    assert new == "02 Jan 2030 list"


def test_a_day_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_day.txt").write_text("yesterday")
    with pytest.raises(UserError, match=r"chat_day\.txt: should hold the day of the run's first start"):
        chat_day(tmp_path)


def test_a_mistake_mended_before_any_work_is_no_other_run(tmp_path: Path) -> None:
    open_run(load_config(None, [f"--run.folder={tmp_path}", "--model.path=/no/such/model"]))
    open_run(load_config(None, [f"--run.folder={tmp_path}"]))
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"holds another run \(optim.lr"):
        open_run(load_config(None, [f"--run.folder={tmp_path}", "--optim.lr=1"]))


def test_a_finished_evaluation_is_not_done_again_unless_something_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tiny_folder(tmp_path / "model"), []
    policy = Policy(load_model(path), load_tokenizer(path), path)
    original = dph.evaluation.evaluate
    monkeypatch.setattr(dph.evaluation, "evaluate", lambda *a, **k: (calls.append(1), original(*a, **k))[1])

    def run(*more: str) -> dict[str, Any]:
        small = ["--eval.samples=2", "--eval.k=[1]", "--sampling.max_new_tokens=4"]
        config = load_config(None, [f"--run.folder={tmp_path}", *small, *more])
        return evaluate_model(policy, [tokenize(WordTask(), policy.tokenizer, config)], config, "x")

    first = run()
    assert run() == first
    assert run("--eval.k=[1, 2]")["sets"]["words"]["summary"]["pass@2"], "a summary is made anew"
    assert len(calls) == 1
    run("--eval.temperature=0.5")
    with torch.no_grad():
        policy.model.model.norm.weight[0] += 1
    run("--eval.temperature=0.5")
    assert len(calls) == 3


# ---- numbers -----------------------------------------------------------------------------------------------------


def test_a_skipped_update_leaves_the_ids_of_its_batch(tmp_path: Path) -> None:
    made = trainer(tmp_path, *JS)
    broken = [Rollout(7, 3, [1], [5], [float("nan")], True), Rollout(8, 0, [1], [5], [-1.0], True)]
    rehearse(made, broken)
    assert read_log(tmp_path / "run" / "skipped.jsonl") == [
        {"step": 1, "rollouts": [], "stored": [[7, 3], [8, 0]], "pef_rollouts": []}
    ]


def test_a_loss_that_is_not_finite_skips_though_its_gradient_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(tmp_path, *JS)
    original = dph.losses.rehearsal_loss
    monkeypatch.setattr(dph.losses, "rehearsal_loss", lambda *a: original(*a) + float("inf"))
    before = weights(made)
    rehearse(made, made.stored)
    assert made.state.skipped == 1
    assert torch.equal(before, weights(made))


def test_a_streak_stops_the_run_before_a_checkpoint(tmp_path: Path) -> None:
    made = trainer(tmp_path, *JS, "--train.save_every=1")
    for rollout in made.stored:
        rollout.logprobs = [float("nan")] * len(rollout.logprobs)
    with pytest.raises(UserError, match="5 updates in a row"):
        made.run()
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-1", "step-2"], "written while the streak was short"
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(start[k], w) for k, w in made.policy.model.state_dict().items()), "no update was taken"
    assert [row["step"] for row in read_log(tmp_path / "run" / "skipped.jsonl")] == [1, 1, 2, 2, 3]


def fails_at(calls: set[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Scoring for the loss runs out of memory at these calls; returns the rows of each call."""
    original, seen = dph.objective.token_logprobs, []

    def scored(model: Any, batch: Any, *more: Any) -> Any:
        seen.append(len(batch.tokens))
        if len(seen) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(model, batch, *more)

    monkeypatch.setattr(dph.objective, "token_logprobs", scored)
    return seen


def test_out_of_memory_is_tried_once_more_in_halves_with_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = []
    for calls in (set(), {2}):
        made = trainer(tmp_path, *JS, "--train.microbatch_tokens=60")
        found = keep_gradients(made)
        with monkeypatch.context() as patch:
            seen = fails_at(calls, patch)
            rehearse(made, made.stored)
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    assert max(seen[2:]) < max(seen[:2])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


def test_out_of_memory_twice_names_the_key_to_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, *JS)
    fails_at({1, 2}, monkeypatch)
    with pytest.raises(UserError, match=r"out of memory in micro-batches of 8192 tokens; lower train\.microbatch"):
        rehearse(made, made.stored)


# ---- strangers' files (databases: test_sql_grader.py; headers, pickles, shards: test_bad_input.py) ---------------


def test_nothing_unpickles_evaluates_or_starts_a_shell() -> None:
    forbidden = {"eval", "exec", "compile", "__import__", "load", "loads", "system", "popen", "unsafe_load"}
    allowed = {("json", "loads"), ("tomllib", "loads"), ("re", "compile")}
    for path in [*(ROOT / "dph").rglob("*.py"), *ROOT.glob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {n for x in ast.walk(tree) if isinstance(x, ast.Import) for n in (a.name for a in x.names)}
        assert not names & {"pickle", "shelve", "marshal", "dill", "yaml"}, path.name
        for call in (x for x in ast.walk(tree) if isinstance(x, ast.Call)):
            f = call.func
            owner = f.value.id if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) else ""
            name = f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""
            builtin = isinstance(f, ast.Name) and name in ("eval", "exec", "compile", "__import__")
            loader = owner in ("torch", "pickle", "os") and name in forbidden
            assert (not builtin and not loader) or (owner, name) in allowed, f"{path.name}: {owner}.{name}"
            assert not any(k.arg == "shell" for k in call.keywords), path.name


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.os.system('touch x') }}",
        "{{ cycler.__init__.__globals__.os.system('touch x') }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
    ],
)
def test_a_template_reaches_nothing(tmp_path: Path, template: str) -> None:
    folder = tiny_folder(tmp_path)
    before = {path.name for path in folder.iterdir()} | {"chat_template.jinja"}
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match="template"):
        load_tokenizer(folder).chat([{"role": "user", "content": "x"}])
    assert {path.name for path in folder.iterdir()} == before
