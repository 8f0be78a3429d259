"""The study: its plan, its workers, one whole run, and the statistics and tables against numbers computed by hand."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dph.answering import Policy
from dph.checkpoint import read_log
from dph.cli import open_task
from dph.config import DataConfig
from dph.errors import UserError
from dph.evaluation import evaluate
from dph.miniature_base import Recipe, encode, model_config, write_tokenizer
from dph.miniature_base import train as train_base
from dph.model import Decoder
from dph.model_folder import load_model, save_model
from dph.prompts import tokenize
from dph.tasks.miniature import MiniatureTask, style_of
from dph.tokenizer import load_tokenizer
from study import run as study_run
from study.measure import measure, train, write_result
from study.plan import BASE, Run, Study, changed, load_study, make_run, pick
from study.plots import draw
from study.report import write_tables
from study.results import difference, load_results
from study.run import prepare, run_study
from tests.helpers import SMALL_RUN

ROOT = Path(__file__).parent.parent
POPEN = subprocess.Popen
COUNTS = ("test", "cross", "arithmetic", "validation")
BEFORE = """
[model]
path = "{model}"
[data]
train = "miniature:train?count=6"
max_prompt_tokens = 52
[sampling]
max_new_tokens = 44
temperature = 0.5
"""
AFTER = """\
eval_every = 1
[optim]
lr = 1e-3
[eval]
temperature = 0.5
samples = 8
k = [1, 4]
during_samples = 4
during_prompts = 2
"""
CONFIG = BEFORE + SMALL_RUN + AFTER
STUDY = """
[study]
config = "{home}/small.toml"
seeds = 2
runs = "{home}/runs"
report = "{home}/report"
against = ["base", "grpo"]
equal_kl = "dph_js"
shared = ["run.threads=1", "eval.final=false", 'data.eval=["miniature:validation?count=3"]']
[methods.grpo]
config = "{home}/small.toml"
default = true
[methods.dph_js]
config = "{home}/small.toml"
overrides = ["loss.divergence=js"]
sweep = "loss.eta"
values = [0.5, 2]
default = true
[methods.rkl]
config = "{home}/small.toml"
overrides = ["loss.divergence=reverse_kl", "loss.samples=own"]
sweep = "loss.eta"
values = [0.1]
[sets.test]
source = "miniature:test?count=3"
samples = 8
title = "in domain"
in_domain = true
kl = true
forms = true
votes = true
[sets.cross]
source = "miniature:cross?count=3"
samples = 8
kl = true
[sets.arithmetic]
source = "miniature:arithmetic?count=3"
samples = 8
seeds = 1
[sets.validation]
source = "miniature:validation?count=3"
samples = 8
chooses = true
[sets.words]
text = "{home}/words.jsonl"
field = "question"
rows = 2
"""
WORDS = ("which student from rome has the highest income", "show student from oslo", "not read: rows = 2")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that knows some answers to the few questions of these tests, so that counts are not all 0."""
    home = tmp_path_factory.mktemp("base")
    write_tokenizer(home)
    (home / "generation_config.json").write_text('{"eos_token_id": 2}')
    tokenizer, pairs = load_tokenizer(home), []
    for where, count in (("train", 6), *((name, 3) for name in COUNTS)):
        for prompt in MiniatureTask(where, {"count": str(count)}, DataConfig(), 0, home).prompts():
            words = re.sub(r"(?<=\d)(?=\d)", " ", str(prompt.gold))
            pairs.append((prompt.messages[0]["content"], words))
    recipe = Recipe(steps=60, batch=16, microbatch=16, lr=1e-2, warmup_steps=5, layers=1, width=64, feed_forward=96)
    torch.manual_seed(0)
    model = Decoder(model_config(recipe, tokenizer.vocab_size))
    train_base(model, encode(iter(pairs * 2), tokenizer), 0, recipe)
    save_model(model, home)
    return home


@pytest.fixture
def study(tmp_path: Path, base: Path) -> Study:
    (tmp_path / "small.toml").write_text(CONFIG.format(model=base))
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"question": words}) + "\n" for words in WORDS))
    (tmp_path / "study.toml").write_text(STUDY.format(home=tmp_path))
    return load_study(tmp_path / "study.toml")


# Plan


def test_the_default_set_is_eleven_settings_and_every_config_is_accepted() -> None:
    study = load_study(ROOT / "study" / "study.toml")
    picked = pick(study, None)
    assert len(picked) == 11
    assert {name for name, _ in picked} == {"grpo", "dapo", "rkl", "dph_f", "dph_js"}
    for setting in pick(study, list(study.methods)):
        run = make_run(study, setting, 3)
        assert run.config.run.seed == 3
        assert run.config.run.threads == 1
        assert not run.config.eval.final
        assert study.sets["validation"].source in run.config.data.eval
    assert study.table.seeds == 4


def test_settings_of_methods_come_once_in_the_files_order(study: Study) -> None:
    assert pick(study, None) == [("grpo", None), ("dph_js", 0.5), ("dph_js", 2.0)]
    assert pick(study, ["rkl", "grpo", "rkl"]) == [("grpo", None), ("rkl", 0.1)]


def test_a_run_is_its_method_value_and_seed(study: Study) -> None:
    run = make_run(study, ("dph_js", 0.5), 1)
    assert run.id == "dph_js-eta0.5-seed1"
    assert (run.config.loss.eta, run.config.run.seed, run.config.run.name) == (0.5, 1, run.id)
    assert run.config.run_folder == study.runs / run.id
    assert make_run(study, ("grpo", None), 0).id == "grpo-seed0"


def test_what_changed_is_named_and_new_keys_at_their_default_are_no_change(study: Study) -> None:
    settings = make_run(study, ("grpo", None), 0).settings
    assert changed(settings, settings) == []
    assert changed({**settings, "train.steps": 3}, settings) == ["train.steps"]
    assert changed({k: v for k, v in settings.items() if k != "loss.entropy"}, settings) == []
    assert changed({k: v for k, v in settings.items() if k != "train.steps"}, settings) == ["train.steps"]
    assert changed({k: v for k, v in settings.items() if k != "sets.test"}, settings) == ["sets.test"]
    assert "run.name" not in settings
    assert changed({**settings, "loss.gone": 1}, settings) == ["loss.gone"]
    of_the_base = make_run(study, (BASE, None), 0).settings
    assert {"train.steps", "loss.eta", "presample.responses"} & of_the_base.keys() == set()
    assert {"run.seed", "model.path", "sets.validation"} <= of_the_base.keys()


def test_a_result_under_a_keys_old_name_is_not_stale(study: Study) -> None:
    settings = make_run(study, ("grpo", None), 0).settings
    others = {name: value for name, value in settings.items() if "top_k" not in name}
    for value in (0, 32):
        old, new = others | {"presample.top_k": value}, others | {"presample.stored_top_k": value}
        assert changed(old, new) == changed(new, old) == []
    assert changed(others | {"presample.top_k": 1}, others | {"presample.stored_top_k": 2}) == [
        "presample.stored_top_k"
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = 2", "seeds = 0", "study.seeds = 0 should be from 1 to 1000"),
        ("seeds = 2", 'seeds = "many"', "study.seeds = 'many' should be a whole number"),
        ("values = [0.1]", "valeus = [0.1]", "unknown key methods.rkl.valeus; did you mean values?"),
        ("values = [0.1]", "", "methods.rkl: sweep = 'loss.eta' and values = [] go together"),
        ("[methods.rkl]", "[methods.base]", "methods.base: a method's name should be"),
        ("[methods.rkl]", "[methods.'a b']", "methods.a b: a method's name should be"),
        ("[methods.rkl]", "[methods.x]\nvalues = []\n[methods.rkl]", "methods.x.config should name its config file"),
        ("samples = 8", "sampels = 8", "unknown key sets.test.sampels; did you mean samples?"),
        ("[sets.cross]", "[sets]\ncross = 1\n[sets.x]", "sets.cross = 1 should be a table"),
        ("[sets.cross]", "[sets.'a b']", "sets.a b: a set's name should be letters"),
        ("in_domain = true", "", "sets: in_domain = true should stand at one set; it stands at none"),
        ("kl = true", "chooses = true", "sets: chooses = true should stand at one set; it stands at test, validation"),
        ("in_domain = true", "in_domain = true\nseeds = 1", "sets.test.seeds = 1 should be 0"),
        (
            "kl = true",
            "kl = true\ngraded = false",
            "sets.test.graded = false should stand at a set that is there for kl",
        ),
        ('field = "question"', 'source = "x:y"', "sets.words: source = 'x:y' or text = "),
        ('field = "question"', "votes = true", "sets.words.votes = true should be false: a text has no answers"),
        (
            'equal_kl = "dph_js"',
            'equal_kl = "dph_jz"',
            "[study] names 'dph_jz', which is no method; did you",
        ),
        ("miniature:test", "miniature", "source 'miniature?count=3' should read TASK:WHERE"),
        ("[sets.test]", "[set.test]", "unknown section [set]; did you mean sets?"),
    ],
)
def test_a_mistake_in_the_file_is_named(study: Study, old: str, new: str, message: str) -> None:
    study.file.write_text(study.file.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        load_study(study.file)
    assert str(caught.value).startswith(str(study.file))


def test_a_config_that_takes_no_such_key_is_named_with_its_method(study: Study) -> None:
    study.file.write_text(study.file.read_text().replace('sweep = "loss.eta"', 'sweep = "loss.etta"', 1))
    with pytest.raises(UserError, match=r"study.toml, dph_js: unknown key loss.etta; did you mean eta\?"):
        make_run(load_study(study.file), ("dph_js", 0.5), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "gpro"], "METHODS: 'gpro' is no method of {file}; did you mean grpo?"),
        (["--methods", ","], "METHODS names nothing to run; {file} has grpo, dph_js, rkl"),
        (["--seeds", "0"], "SEEDS = '0' should be a count from 1 to 1000"),
        (["--seeds", "0,1"], "SEEDS = '0,1' should be a count from 1 to 1000"),
        (["--report"], "runs: holds no base to report"),
        (["--report", "--methods", "grpo"], "--report reports all runs that are there; leave out --methods"),
        (["--sedes", "1"], "unrecognized arguments: --sedes"),
    ],
)
def test_a_wrong_pick_is_one_line_and_exit_2(
    study: Study,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["study", str(study.file), *arguments])
    with pytest.raises(SystemExit) as stop:
        study_run.main()
    err = capsys.readouterr().err
    assert (stop.value.code, err.count("\n")) == (2, 1)
    assert message.format(file=study.file) in err


# Running


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_run, "LOOK", 0.02)


def test_a_whole_run_by_its_process_leaves_one_file_that_agrees_with_an_evaluation(
    study: Study, base: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)  # `train` sets it
    measure(study, make_run(study, (BASE, None), 0))  # here: imports take seconds
    run_study(study, ["grpo"], 1)
    run = make_run(study, ("grpo", None), 0)
    found, start = read(study.results / "grpo-seed0.json"), read(study.results / "base-seed0.json")
    policy = Policy(load_model(run.config.run_folder / "checkpoints/step-2"), load_tokenizer(base), base)
    initial = load_model(base)
    for role in COUNTS:
        data = tokenize(open_task(f"miniature:{role}?count=3", run.config), policy.tokenizer, run.config)
        result, answers = evaluate(policy, data, run.config, 8, True, initial, bar=False)
        told = found["sets"][role]
        assert told["correct"] == [p["correct"] for p in result["problems"]]
        assert told["greedy"] == [p["greedy"] for p in result["problems"]]
        for i, prompt in enumerate(data.prompts):
            styles = [style_of(prompt, a.text) for a in answers if a.rollout.prompt == i]
            assert told["styles"][i] == [styles.count(s) for s in range(3)]
        if role in ("test", "cross"):
            assert told["kl"] == [pytest.approx(p["kl_to_base"], rel=1e-3, abs=1e-5) for p in result["problems"]]
            assert start["sets"][role]["kl"] == [0, 0, 0]
        assert ("votes" in told) == (role == "test")
    votes = found["sets"]["test"]["votes"]
    assert [sum(n for n, right in each if right) for each in votes] == found["sets"]["test"]["correct"]
    assert all(sum(n for n, _ in each) <= 8 for each in votes)
    assert found["sets"]["test"]["forms"] == [[n for n, right in each if right] for each in votes]
    assert "forms" not in found["sets"]["cross"]
    assert found["workers"] == 2
    assert sum(start["sets"]["test"]["correct"]) > 0
    assert sum(map(sum, start["sets"]["test"]["styles"])) > 0
    assert found["base"] == start["base"] == Policy(load_model(base), load_tokenizer(base), base).weights_hash()
    assert found["d_pef"] is None
    rows = read_log(run.config.run_folder / "metrics.jsonl")
    assert found["seconds"]["train"] == pytest.approx(np.median([row["seconds/train"] for row in rows]), abs=1e-4)
    usage = read(run.config.run_folder / "usage.json")
    assert found["peak_bytes"] == usage["peak_bytes"] > 1e8
    assert found["wall_seconds"] > usage["seconds"]
    (run.config.run_folder / "usage.json").write_text(json.dumps({**usage, "busy": True}))
    measure(study, run)
    assert read(study.results / "grpo-seed0.json")["workers"] is None, "it was trained beside other work"
    assert "training" in (study.runs / "logs" / "grpo-seed0.log").read_text()
    train(run, busy=False)
    assert read(run.config.run_folder / "usage.json") == {**usage, "busy": True}, "a second start takes no step"
    assert read_log(run.config.run_folder / "metrics.jsonl") == rows
    made_from = run.config.run_folder / "made_from.json"
    made_from.write_text(json.dumps({**read(made_from), "prompts": "of other questions"}))
    with pytest.raises(SystemExit):
        train(run, busy=False)
    assert "made with other prompts" in capfd.readouterr().err


def test_a_text_is_scored_token_by_token_after_the_begin_token(study: Study, base: Path) -> None:
    measure(study, make_run(study, (BASE, None), 0), busy=True)
    result = read(study.results / "base-seed0.json")
    assert result["workers"] is None, "seconds beside other work compare with nothing"
    found = result["sets"]["words"]["logprob"]
    model, tokenizer = load_model(base), load_tokenizer(base)
    assert len(found) == 2
    for told, words in zip(found, WORDS, strict=False):
        tokens = torch.tensor([*tokenizer.begin, *tokenizer.encode(words)])
        logprobs = model.logits(model(tokens[None]))[0, :-1].log_softmax(-1)
        of_text = logprobs.gather(1, tokens[1:, None])
        assert told == pytest.approx(of_text.mean().item(), abs=1e-4)


def test_every_table_and_picture_comes_of_real_files(study: Study) -> None:
    for method in (BASE, "grpo"):
        run = make_run(study, (method, None), 0)
        measure(study, replace(run, method=BASE))  # the base's weights under either name
        path = study.results / f"{run.id}.json"
        write_result(path, {**read(path), "method": method, "d_pef": None, "d_exp": None, "seconds": {"train": 1.0}})
    results = load_results(study)
    made = [path.name for path in [*write_tables(study.results.parent, results), *draw(study.results.parent, results)]]
    assert made == ["tables.md", "tables_many.md", "tables_kl.md", "pass_at_k.png", "pareto.png"]
    grpo = next(each for each in results.settings if each.method == "grpo")
    assert difference(grpo, results.base, "test", "pass@8") == (0, 0, 0)
    assert difference(grpo, results.base, "words", "logprob") == (0, 0, 0)
    assert "| grpo | 0.0000 [0.0000, 0.0000] |" in (study.results.parent / "tables_kl.md").read_text()


def test_a_set_may_be_measured_at_the_first_seeds_alone(study: Study) -> None:
    sets = {seed: make_run(study, ("grpo", None), seed).settings.keys() for seed in (0, 1)}
    assert sets[0] - sets[1] == {"sets.arithmetic"}
    assert not sets[1] - sets[0]


def done_by(monkeypatch: pytest.MonkeyPatch, script: str) -> list[str]:
    """Lets every run's process be `python -c script` instead; the ids of the runs that were started."""
    started: list[str] = []

    def start(command: Sequence[str], **options: Any) -> Any:
        started.append(" ".join(command[4:]))  # after python -m study.measure STUDY.toml
        return POPEN([sys.executable, "-c", script], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def leave_results(study: Study, runs: Sequence[Run], base: str) -> None:
    """What finished runs leave, as far as the runner looks at it."""
    for run in runs:
        write_result(study.results / f"{run.id}.json", {"base": base, "settings": run.settings})


def test_bases_come_first_and_what_is_done_is_skipped(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], base: Path
) -> None:
    started = done_by(monkeypatch, "pass")
    weights = Policy(load_model(base), load_tokenizer(base), base).weights_hash()
    leave_results(study, [make_run(study, ("grpo", None), 0), make_run(study, ("dph_js", 2.0), 1)], weights)
    run_study(study, None, 2)
    assert sorted(started[:2]) == ["base None 0", "base None 1"]
    assert started[2:] == ["dph_js 0.5 0", "dph_js 2.0 0", "grpo None 1", "dph_js 0.5 1"]
    assert "runs: 4 of 6 to do" in capsys.readouterr().out
    (study.results / "grpo-seed0.json").unlink()
    run_study(study, ["grpo"], 1, busy=True)
    assert started[-1] == "grpo None 0 busy"


def test_what_was_made_with_other_settings_or_from_another_base_is_done_anew_and_said(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], base: Path
) -> None:
    started = done_by(monkeypatch, "pass")
    weights = Policy(load_model(base), load_tokenizer(base), base).weights_hash()
    runs = [make_run(study, ("dph_js", value), 0) for value in (0.5, 2.0)]
    leave_results(study, [make_run(study, (BASE, None), 0)], weights)
    leave_results(study, [replace(runs[0], settings={**runs[0].settings, "train.steps": 9})], weights)
    leave_results(study, [runs[1]], "of other weights")
    run_study(study, ["dph_js"], 1)
    assert started == ["dph_js 0.5 0", "dph_js 2.0 0"]
    out = capsys.readouterr().out
    assert "dph_js-eta0.5-seed0: made with another train.steps; it is done anew" in out
    assert "dph_js-eta2-seed0: made with another base; it is done anew" in out


def test_a_runs_folder_is_kept_until_its_settings_or_its_base_change(study: Study, base: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"  # a name, which is a setting, for whatever weights
    link.symlink_to(base)
    (tmp_path / "small.toml").write_text(CONFIG.format(model=link))
    run = make_run(study, ("grpo", None), 0)
    prepare(run)
    begun = run.config.run_folder / "checkpoints"
    begun.mkdir()
    prepare(run)
    assert begun.exists()
    prepare(replace(run, settings={**run.settings, "sets.test": "other questions"}))
    assert begun.exists(), "it is measured anew, not trained anew"
    prepare(replace(run, settings={**run.settings, "train.steps": 9}))
    assert not begun.exists()
    prepare(run)
    begun.mkdir()
    other = shutil.copytree(base, tmp_path / "other", ignore=lambda *_: ["model.safetensors", "config.json"])
    model = load_model(base)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    save_model(model, other)
    link.unlink()
    link.symlink_to(other)
    prepare(run)
    assert not begun.exists()


def test_a_failing_run_ends_the_study_with_its_line_and_its_log(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    log = study.runs / "logs" / "base-seed0.log"
    done_by(monkeypatch, "import sys; print('noise', end='\\r'); sys.exit('error: no room\\nbye')")
    with pytest.raises(UserError, match=re.escape(f"base-seed0: error: no room (exit code 1; log: {log})")):
        run_study(study, ["grpo"], 1)
    done_by(monkeypatch, "raise SystemError('broken')")
    with pytest.raises(UserError, match=re.escape("base-seed0: SystemError: broken (exit code 1")):
        run_study(study, ["grpo"], 1)
    done_by(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match=re.escape("base-seed0: ended without a word (exit code -9")):
        run_study(study, ["grpo"], 1)


def test_an_interruption_ends_all_processes_and_waits_for_them(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = "import signal, sys, time\n"
    saves += "def end(*_): time.sleep(0.3); print('saved'); sys.exit(130)\n"
    saves += "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(60)"
    started = done_by(monkeypatch, saves)
    logs = [study.runs / "logs" / f"base-seed{seed}.log" for seed in (0, 1)]

    def interrupted(seconds: float) -> None:
        if all(log.exists() and "ready" in log.read_text() for log in logs):
            raise KeyboardInterrupt
        real(seconds)

    real = time.sleep
    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, ["grpo"], 3)
    assert len(started) == 2
    assert all("saved" in log.read_text() for log in logs)


def test_make_passes_on_what_is_picked() -> None:
    asked = ["make", "-n", "--no-print-directory", "study", "STUDY=my.toml", "METHODS=a,b", "SEEDS=2"]
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert told.stdout.splitlines()[-1].endswith("python -m study.run my.toml --methods a,b --seeds 2")
