"""The study: its plan, its workers, one whole run, and the statistics and tables against numbers computed by hand."""

import itertools
import json
import math
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
from matplotlib.figure import Figure

from dph import evaluation
from dph.answering import Policy
from dph.checkpoint import read_log
from dph.cli import open_task
from dph.config import DataConfig
from dph.errors import UserError
from dph.evaluation import evaluate, pass_at_k
from dph.miniature_base import Recipe, encode, model_config, write_tokenizer
from dph.miniature_base import train as train_base
from dph.model import Decoder
from dph.model_folder import load_model, save_model
from dph.prompts import tokenize
from dph.tasks.miniature import MiniatureTask, style_of, style_spread
from dph.tokenizer import load_tokenizer
from study import run as study_run
from study.measure import measure, write_result
from study.plan import BASE, Run, Study, changed, load_study, make_run, pick
from study.plots import draw
from study.report import (
    Setting,
    choose,
    difference,
    estimate,
    keep_explore,
    load_results,
    validation_score,
    values,
    write_tables,
)
from study.run import prepare, run_study
from tests.helpers import SMALL_RUN

ROOT = Path(__file__).parent.parent
POPEN = subprocess.Popen
COUNTS = {"in_domain": "test", "cross_domain": "cross", "out_of_domain": "arithmetic", "validation": "validation"}
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
[sets]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that knows some answers to the few questions of these tests, so that counts are not all 0."""
    home = tmp_path_factory.mktemp("base")
    write_tokenizer(home)
    (home / "generation_config.json").write_text('{"eos_token_id": 2}')
    tokenizer, pairs = load_tokenizer(home), []
    for where, count in (("train", 6), *((name, 3) for name in COUNTS.values())):
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
    sets = [f'{role} = {{ source = "miniature:{name}?count=3", samples = 8 }}' for role, name in COUNTS.items()]
    (tmp_path / "study.toml").write_text(STUDY.format(home=tmp_path) + "\n".join(sets))
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


def test_no_committed_result_is_stale() -> None:
    study = load_study(ROOT / "study" / "study.toml")
    for path in study.results.glob("*.json"):
        found = read(path)
        run = make_run(study, (found["method"], found["value"]), found["seed"])
        assert run.id == path.stem
        assert changed(found["settings"], run.settings) == []


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
    assert changed({k: v for k, v in settings.items() if k != "sets.in_domain"}, settings) == ["sets.in_domain"]
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
        ("in_domain = {", "indomain = {", "unknown key sets.indomain; did you mean in_domain?"),
        ("cross_domain = {", "# = {", "sets.cross_domain = None should be a table"),
        ("miniature:test", "miniature", "source 'miniature?count=3' should read TASK:WHERE"),
        ("[sets]", "[set]", "unknown section [set]; did you mean sets?"),
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


def test_a_whole_run_by_its_process_leaves_one_file_that_agrees_with_an_evaluation(study: Study, base: Path) -> None:
    measure(study, make_run(study, (BASE, None), 0))  # here: imports take seconds
    run_study(study, ["grpo"], 1)
    run = make_run(study, ("grpo", None), 0)
    found, start = read(study.results / "grpo-seed0.json"), read(study.results / "base-seed0.json")
    policy = Policy(load_model(run.config.run_folder / "checkpoints/step-2"), load_tokenizer(base), base)
    for role, name in COUNTS.items():
        data = tokenize(open_task(f"miniature:{name}?count=3", run.config), policy.tokenizer, run.config)
        result, answers = evaluate(policy, data, run.config, 8, True, bar=False)
        told = found["sets"][role]
        assert told["correct"] == [p["correct"] for p in result["problems"]]
        assert told["greedy"] == [p["greedy"] for p in result["problems"]]
        for i, prompt in enumerate(data.prompts):
            styles = [style_of(prompt, a.text) for a in answers if a.rollout.prompt == i]
            assert told["styles"][i] == [styles.count(s) for s in range(3)]
    assert sum(start["sets"]["in_domain"]["correct"]) > 0
    assert sum(map(sum, start["sets"]["in_domain"]["styles"])) > 0
    assert found["base"] == start["base"] == Policy(load_model(base), load_tokenizer(base), base).weights_hash()
    assert found["d_pef"] is None
    rows = read_log(run.config.run_folder / "metrics.jsonl")
    assert found["seconds"]["train"] == pytest.approx(np.median([row["seconds/train"] for row in rows]), abs=1e-4)
    usage = read(run.config.run_folder / "usage.json")
    assert found["peak_bytes"] == usage["peak_bytes"] > 1e8
    assert found["wall_seconds"] > usage["seconds"]
    assert "training" in (study.runs / "logs" / "grpo-seed0.log").read_text()


def done_by(monkeypatch: pytest.MonkeyPatch, script: str) -> list[str]:
    """Lets every run's process be `python -c script` instead; the ids of the runs that were started."""
    started: list[str] = []

    def start(command: Sequence[str], **options: Any) -> Any:
        name, value, seed = command[-3:]
        started.append(f"{name} {value} {seed}")
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


# Statistics


def a_set(n: int, correct: Sequence[int], greedy: Sequence[int] = (), styles: Sequence[Sequence[int]] = ()) -> Any:
    none = [0] * len(correct)
    return {
        "n": n,
        "correct": list(correct),
        "greedy": list(greedy or none),
        "styles": list(styles or [[1, 0, 0]] * len(none)),
    }


def setting(method: str, value: float | None, *seeds: Any, validation: Sequence[int] = (1, 1)) -> Setting:
    """A setting with these sets in domain, one for each seed."""
    runs = {i: {"sets": {"in_domain": each, "validation": a_set(2, validation)}} for i, each in enumerate(seeds)}
    return Setting(method, "loss.eta", value, runs)


def test_a_difference_is_paired_by_seed_and_question() -> None:
    a = setting("a", None, a_set(4, [4, 2, 1, 0]), a_set(4, [1, 1, 1, 1]))
    b = setting("b", None, a_set(4, [3, 1, 0, 1]), a_set(4, [0, 0, 0, 2]))
    found = difference(a, b, "in_domain", "pass@1")
    assert found.mean == pytest.approx((1 + 1 + 1 - 1 + 1 + 1 + 1 - 1) / 4 / 8)
    assert found.low < found.mean < found.high
    shifted = setting("c", None, a_set(4, [3, 1, 2, 0]), a_set(4, [0, 1, 2, 3]))
    higher = setting("d", None, a_set(4, [4, 2, 3, 1]), a_set(4, [1, 2, 3, 4]))
    assert difference(higher, shifted, "in_domain", "pass@1") == pytest.approx((0.25, 0.25, 0.25))
    assert estimate(values(higher, "in_domain", "pass@1")).high > 0.7, "unpaired, the same numbers are uncertain"
    alone = setting("e", None, a_set(4, [4, 2, 1, 0]))
    assert difference(a, alone, "in_domain", "pass@1").mean == 0, "of the seed that both have"


def test_the_interval_covers_seeds_as_well_as_questions() -> None:
    assert estimate(np.full((3, 5), 0.25)) == (0.25, 0.25, 0.25)
    assert estimate(np.array([[0.0] * 50, [1.0] * 50])) == (0.5, 0.0, 1.0)  # all that differs is the seed
    rng = np.random.default_rng(1)
    values = (rng.random((1, 400)) < 0.3).astype(float)  # one seed: a bootstrap over its questions
    mean, low, high = estimate(values)
    assert mean == values.mean()
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(mean * (1 - mean) / 400), rel=0.1)
    between = (rng.random((4, 400)) < np.array([[0.1], [0.3], [0.5], [0.7]])).astype(float)
    told = estimate(between)
    spread = math.sqrt(between.mean(1).var() / 4)  # of the mean of four drawn seeds
    assert told.high - told.low == pytest.approx(2 * 1.96 * spread, rel=0.15)


def test_values_that_do_not_count() -> None:
    assert estimate(np.array([[1.0, np.nan, 0.0, 1.0]])).mean == pytest.approx(2 / 3)
    assert estimate(np.array([[1.0, 0.0, 1.0]]), np.array([[1.0, 3.0, 0.0]])).mean == pytest.approx(1 / 4)
    assert str(estimate(np.full((1, 3), np.nan))) == "–"


def test_scores_of_questions() -> None:
    one = setting("a", None, a_set(8, [2, 8, 0], [1, 0, 0], [[4, 4, 0], [8, 0, 0], [0, 0, 0]]))
    assert values(one, "in_domain", "pass@4")[0].tolist() == [pass_at_k(8, c, 4) for c in (2, 8, 0)]
    assert values(one, "in_domain", "greedy").tolist() == [[1, 0, 0]]
    for score, place in (("bits", 0), ("top", 1)):
        told = values(one, "in_domain", score)[0]
        assert told[:2].tolist() == [style_spread([0] * 4 + [1] * 4)[place], style_spread([0] * 8)[place]]
        assert np.isnan(told[2]), "no answer in any style"


def test_keep_and_explore_are_those_of_the_evaluation_over_all_seeds() -> None:
    old, new = [3, 1, 0, 0, 8], [1, 0, 2, 0, 8]
    one, other = setting("base", None, a_set(8, old), a_set(8, new)), setting("a", None, a_set(8, new), a_set(8, old))
    told = [each.mean for each in keep_explore(one, other, "in_domain")]
    both = dict(enumerate(old + new)), dict(enumerate(new + old))
    assert told == pytest.approx(evaluation.keep_explore(*both))


def test_the_value_is_chosen_on_validation_among_those_with_the_most_seeds() -> None:
    sets = a_set(2, [0, 0]), a_set(2, [0, 0])
    low, best, tied = (setting("m", v, *sets, validation=c) for v, c in ((1, [1, 0]), (2, [1, 1]), (3, [1, 1])))
    few = setting("m", 4, sets[0], validation=[2, 2])
    assert validation_score(low) == pytest.approx((1 / 4 + 1 / 2) / 2)  # pass@1, and pass@2 of two answers
    other = setting("other", None, sets[0], validation=[0, 0])
    assert choose([low, best, tied, few, other]) == [best, other]
    assert choose([few, low]) == [low]


# The report, from files made by hand


def a_result(folder: Path, method: str, value: float | None, seed: int, correct: Sequence[int], **other: Any) -> None:
    one = {"source": "x", **a_set(16, correct, [c > 8 for c in correct], [[c, 16 - c, 0] for c in correct])}
    found = {
        **{"method": method, "sweep": "loss.eta" if value else "", "value": value, "seed": seed, "base": f"b{seed}"},
        **{"commit": "0123456789", "torch": "2", "d_pef": 7 if value else None, "d_exp": 5 if value else None},
        **{"seconds": {} if method == BASE else {"score": 0.25, "train": 1.0 + seed}, "peak_bytes": 300_000_000},
        **{"wall_seconds": 1800.0, "settings": {"run.seed": seed, "train.steps": 2}},
        **{"sets": dict.fromkeys(COUNTS, one), **other},
    }
    swept = f"-eta{value:g}" if value else ""
    write_result(folder / "runs" / f"{method}{swept}-seed{seed}.json", found)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Base, grpo and two values of dph_f at two seeds, four questions of 16 answers."""
    for seed in (0, 1):
        a_result(tmp_path, BASE, None, seed, [8, 8, 0, 16])
        a_result(tmp_path, "grpo", None, seed, [16, 0, 0, 16])
        a_result(tmp_path, "dph_f", 0.5, seed, [8, 8, 0, 0])
        a_result(tmp_path, "dph_f", 2, seed, [12, 8, 4, 16])
    return tmp_path


def rows_of(text: str, heading: str) -> dict[tuple[str, str], dict[str, str]]:
    """The first table after a heading: (method, setting) -> column -> cell."""
    lines = text[text.index(heading) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| method"))
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in itertools.takewhile(bool, lines[start:])]
    return {(row[0], row[1]): dict(zip(table[0], row, strict=True)) for row in table[2:]}


def test_the_tables_say_what_the_files_say(report: Path) -> None:
    text = write_tables(report, load_results(report / "runs", ["grpo", "dph_f"])).read_text()
    chosen = rows_of(text, "### in domain")
    assert list(chosen) == [("base", ""), ("grpo", ""), ("dph_f", "eta = 2")]
    best = chosen["dph_f", "eta = 2"]
    assert best["pass@1"].startswith("0.625 ±")  # (12 + 8 + 4 + 16) / 64
    assert best["pass@16"] == "1.000 ± 0.000"
    assert best["greedy"].startswith("0.500 ±")
    assert (best["keep"], best["explore"]) == ("1.000 ± 0.000", "1.000 ± 0.000")
    assert (chosen["grpo", ""]["keep"][:5], chosen["grpo", ""]["explore"][:5]) == ("0.667", "0.000")
    assert best["bits"].startswith(f"{np.mean([0.811278, 1, 0.811278, 0]):.3f} ±")
    assert best["top style"].startswith("0.750 ±")  # 12, 8, 12 and 16 of 16
    assert "pass@32" not in best, "there are 16 answers"
    costs = rows_of(text, "### Partition")
    assert costs["dph_f", "eta = 2"] | {"x": ""} == {
        **{"method": "dph_f", "setting": "eta = 2", "D_pef": "7", "D_exp": "5"},
        **{"sample_and_grade s": "0.00", "score s": "0.25", "train s": "1.50", "step s": "1.75", "MB": "300", "x": ""},
    }
    minus_grpo = rows_of(text, "## Each method minus grpo")
    assert list(minus_grpo) == [("dph_f", "eta = 2")]
    assert minus_grpo["dph_f", "eta = 2"]["in domain, pass@1"].startswith("+0.125 [")  # 40 - 32 of 64
    assert minus_grpo["dph_f", "eta = 2"]["in domain, pass@16"].startswith("**+0.500 [")
    minus_base = rows_of(text, "## Each method minus base")
    assert re.fullmatch(r"−0.250 \[−0.\d+, \+0.000\]", minus_base["grpo", ""]["cross-domain, pass@16"])
    every = rows_of(text, "### The choice")
    assert {setting: row[""] for (_, setting), row in every.items()} == {"": "", "eta = 0.5": "", "eta = 2": "chosen"}
    assert every["dph_f", "eta = 0.5"]["their mean"] == "0.3750"  # pass@1 1/4, pass@16 1/2
    assert "8 runs, 4.0 hours of one thread; torch 2; commit 01234567." in text


def test_pictures_show_what_the_files_say(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["pass_at_k.png", "pareto.png"]
    assert [path.name for path in draw(report, load_results(report / "runs"))] == names
    assert all((report / name).read_bytes().startswith(b"\x89PNG") for name in names)
    for path in {*(report / "runs").glob("*seed1.json"), *(report / "runs").glob("dph_f*")}:
        path.unlink()  # one method at one seed, nothing swept
    seen: dict[str, Figure] = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: seen.update({path.name: figure}))
    draw(report, load_results(report / "runs"))
    base, grpo = ([*map(float, line.get_ydata())] for line in seen["pass_at_k.png"].axes[0].lines)
    assert base == [pytest.approx(np.mean([pass_at_k(16, c, k) for c in (8, 8, 0, 16)])) for k in (1, 2, 4, 8, 16)]
    assert grpo == [0.5] * 5
    plane = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in seen["pareto.png"].axes[0].lines}
    assert plane == {"base": (0.5, 0.75), "grpo": (0.5, 0.5)}


def test_what_came_from_another_base_is_left_out_and_said(report: Path) -> None:
    a_result(report, "grpo", None, 1, [0, 0, 0, 0], base="other")
    results = load_results(report / "runs", ["dph_f", "grpo"])
    assert [(s.label, list(s.runs)) for s in results.settings] == [
        ("dph_f, eta = 0.5", [0, 1]), ("dph_f, eta = 2", [0, 1]), ("grpo", [0]),
    ]  # fmt: skip
    assert results.notes == ["grpo-seed1.json is left out: it started from another base than seed 1's"]
    assert f"Note: {results.notes[0]}." in write_tables(report, results).read_text()


def test_seeds_of_one_setting_with_different_settings_are_refused(report: Path) -> None:
    a_result(report, "grpo", None, 1, [0, 0, 0, 0], settings={"run.seed": 1, "train.steps": 9})
    with pytest.raises(UserError, match=r"grpo-seed1.json: train.steps = 9, but 2 at seed 0; run the study again"):
        load_results(report / "runs")


def test_seeds_under_an_old_and_a_new_name_of_a_key_are_one_setting(report: Path) -> None:
    new = {"run.seed": 1, "train.steps": 2, "presample.stored_top_k": 5}
    old = {"run.seed": 0, "train.steps": 2, "presample.top_k": 5}
    for seed, settings in enumerate((old, new)):
        a_result(report, "grpo", None, seed, [0, 0, 0, 0], settings=settings)
    grpo = next(each for each in load_results(report / "runs").settings if each.method == "grpo")
    assert list(grpo.runs) == [0, 1]


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no base to report"):
        load_results(tmp_path / "runs")
    a_result(tmp_path, BASE, None, 0, [1])
    with pytest.raises(UserError, match="holds no run to report"):
        load_results(tmp_path / "runs")


def test_the_committed_tables_are_those_of_the_committed_files(tmp_path: Path) -> None:
    study = load_study(ROOT / "study" / "study.toml")
    results = load_results(ROOT / study.results, list(study.methods))
    committed = ROOT / study.table.report / "tables.md"
    assert write_tables(tmp_path, results).read_text() == committed.read_text()
