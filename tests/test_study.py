"""The study: its plan, its workers, one whole run, and the statistics and tables against numbers computed by hand."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import presample
import train
from dph import evaluation
from dph import study as study_module
from dph.answering import Policy
from dph.checkpoint import read_log
from dph.cli import config_argument, open_task, run_command
from dph.config import DataConfig
from dph.errors import UserError
from dph.evaluation import evaluate, pass_at_k
from dph.model import Decoder
from dph.model_folder import load_model, save_model
from dph.study import _Crew, _Job, _jobs, _time_left, partition_of, run_study
from dph.study_measure import measure, write_result
from dph.study_plan import BASE, Study, changed, load_study, make_run, pick
from dph.study_plots import draw
from dph.study_report import (
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
from dph.tasks.miniature import MiniatureTask, style_of, style_spread
from dph.tasks.miniature_base import Recipe, encode, model_config, write_tokenizer
from dph.tasks.miniature_base import train as train_base
from dph.tasks.prompts import tokenize
from dph.tokenizer import load_tokenizer
from tests.helpers import SMALL_RUN

ROOT = Path(__file__).parent.parent
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
config = "small.toml"
seeds = 2
runs = "{home}/runs"
report = "{home}/report"
shared = ["run.threads=1", "eval.final=false", 'data.eval=["miniature:validation?count=3"]']
[methods.grpo]
config = "small.toml"
default = true
[methods.dph_js]
config = "small.toml"
overrides = ["loss.divergence=js"]
sweep = "loss.eta"
values = [0.5, 2]
default = true
[methods.again]
config = "small.toml"
overrides = ["loss.divergence=js", "loss.eta=2"]
[methods.rkl]
config = "small.toml"
overrides = ["loss.divergence=reverse_kl", "loss.samples=own"]
sweep = "loss.eta"
values = [0.1]
[groups]
more = {{ dph_js = [8, 0] }}
both = ["grpo", "rkl"]
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


def call_here(arguments: Sequence[str]) -> None:
    """What a worker's process would do, in this one."""
    if arguments[0] == "-m":
        return measure(Path(arguments[-1]))
    module = {"train.py": train, "presample.py": presample}[Path(arguments[0]).name]
    sys.argv = list(arguments)
    return run_command(module.main, "", getattr(module, "_arguments", config_argument))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets workers run in this process, one at a time; the ids of what they ran."""
    called, alone = [], threading.Lock()

    def call(crew: _Crew, name: str, folder: Path, arguments: Sequence[str]) -> None:
        with alone:
            called.append(f"{name} {Path(arguments[0]).name}")
            call_here(arguments)

    monkeypatch.setattr(_Crew, "_call", call)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(train, "plot_run", lambda run: [])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # only a main thread may set handlers
    return called


# Plan


def test_the_default_set_is_eleven_settings_and_every_config_is_accepted() -> None:
    study = load_study(ROOT / "study.toml")
    picked = pick(study, None)
    assert len(picked) == 11
    assert {name for name, _ in picked} == {"grpo", "dapo", "rkl", "dph_f", "dph_js"}
    for setting in pick(study, [*study.methods, *study.groups]):
        run = make_run(study, setting, 3)
        assert run.config.run.seed == 3
        assert run.config.run.threads == 1
        assert not run.config.eval.final
        assert study.sets["validation"].source in run.config.data.eval
    assert study.table.seeds == 4


def test_settings_of_methods_and_groups_come_once_in_the_files_order(study: Study) -> None:
    assert pick(study, None) == [("grpo", None), ("dph_js", 0.5), ("dph_js", 2.0)]
    assert pick(study, ["rkl", "more", "dph_js", "both"]) == [
        ("grpo", None), ("dph_js", 0.0), ("dph_js", 0.5), ("dph_js", 2.0), ("dph_js", 8.0), ("rkl", 0.1),
    ]  # fmt: skip


def test_a_run_is_its_method_value_and_seed(study: Study) -> None:
    run = make_run(study, ("dph_js", 0.5), 1)
    assert run.id == "dph_js-eta0.5-seed1"
    assert (run.config.loss.eta, run.config.run.seed, run.config.run.name) == (0.5, 1, run.id)
    assert run.config.run_folder == study.runs / run.id
    assert make_run(study, ("grpo", None), 0).id == "grpo-seed0"
    assert [make_run(study, (name, value), 0).uses_partition for name, value in pick(study, ["both", "more"])] == [
        False, True, True, False,
    ]  # fmt: skip


def test_methods_with_the_same_presampling_share_a_partition(study: Study) -> None:
    one, other, later = (
        partition_of(study, make_run(study, s, n))
        for s, n in ((("dph_js", 0.5), 0), (("again", None), 0), (("again", None), 1))
    )
    assert one == other != later
    study.methods["again"] = replace(study.methods["again"], overrides=("presample.confirm=false",))
    assert partition_of(study, make_run(study, ("again", None), 0)) != one


def test_what_changed_is_named_and_new_keys_at_their_default_are_no_change(study: Study) -> None:
    settings = make_run(study, ("grpo", None), 0).settings
    assert changed(settings, settings) == []
    assert changed({**settings, "train.steps": 3}, settings) == ["train.steps"]
    assert changed({k: v for k, v in settings.items() if k != "loss.entropy"}, settings) == []
    assert changed({k: v for k, v in settings.items() if k != "train.steps"}, settings) == ["train.steps"]
    assert changed({k: v for k, v in settings.items() if k != "sets.in_domain"}, settings) == ["sets.in_domain"]
    assert changed({**settings, "loss.gone": 1}, settings) == ["loss.gone"]
    assert "run.name" not in settings
    of_the_base = make_run(study, (BASE, None), 0).settings
    assert {"train.steps", "loss.eta", "presample.responses"} & of_the_base.keys() == set()
    assert {"run.seed", "model.path", "sets.validation"} <= of_the_base.keys()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = 2", "seeds = 0", "study.seeds = 0 should be from 1 to 1000"),
        ("seeds = 2", 'seeds = "many"', "study.seeds = 'many' should be a whole number"),
        ("values = [0.1]", "valeus = [0.1]", "unknown key methods.rkl.valeus; did you mean values?"),
        ("values = [0.1]", "", "methods.rkl: sweep = 'loss.eta' and values = [] go together"),
        ("[methods.again]", "[methods.base]", "methods.base: a method's name should be"),
        ('both = ["grpo", "rkl"]', 'both = ["grop"]', "groups.both: unknown method 'grop'; did you mean grpo?"),
        ('both = ["grpo", "rkl"]', 'grpo = ["rkl"]', "groups.grpo: a method has that name"),
        ('both = ["grpo", "rkl"]', "both = 3", "groups.both = 3 should be a list of methods"),
        ("in_domain = {", "indomain = {", "sets.in_domain = None should be a table"),
        ("[groups]", "[group]", "unknown section [group]; did you mean groups?"),
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
        (["--methods", "gpro"], "METHODS: 'gpro' is no method or group of {file}; did you mean grpo?"),
        (["--methods", ","], "METHODS names nothing to run; {file} has grpo, dph_js, again, rkl, more, both"),
        (["--seeds", "0"], "SEEDS = '0' should be a count from 1 to 1000"),
        (["--seeds", "0,1"], "SEEDS = '0,1' should be a count from 1 to 1000"),
        (["--report"], "runs: holds no base to report"),
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
        study_module.main()
    err = capsys.readouterr().err
    assert (stop.value.code, err.count("\n")) == (2, 1)
    assert message.format(file=study.file) in err


# Running


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_whole_run_by_its_processes_leaves_one_file_that_agrees_with_an_evaluation(study: Study, base: Path) -> None:
    run, started = make_run(study, ("grpo", None), 0), make_run(study, (BASE, None), 0)
    measure(_Crew(study)._prepare(started, started.config.run_folder, started.settings))  # here: imports take seconds
    run_study(study, ["grpo"], 1)
    path = study.results / "grpo-seed0.json"
    found, start = read(path), read(study.results / "base-seed0.json")
    policy = Policy(load_model(run.config.run_folder / "checkpoints/step-2"), load_tokenizer(base), base)
    for role, name in COUNTS.items():
        data = tokenize(open_task(f"miniature:{name}?count=3", run.config), policy.tokenizer, run.config)
        result, answers = evaluate(policy, data, run.config, 8, True, bar=False)
        told = found["sets"][role]
        assert told["correct"] == [p["correct"] for p in result["problems"]]
        assert told["greedy"] == [p["greedy"] for p in result["problems"]]
        for i, question in enumerate(data.questions):
            styles = [style_of(question.prompt, a.text) for a in answers if a.rollout.prompt == i]
            assert told["styles"][i] == [styles.count(s) for s in range(3)]
    assert sum(start["sets"]["in_domain"]["correct"]) > 0
    assert sum(map(sum, start["sets"]["in_domain"]["styles"])) > 0
    assert found["base"] == start["base"] == Policy(load_model(base), load_tokenizer(base), base).weights_hash()
    assert found["d_pef"] is None
    rows = read_log(run.config.run_folder / "metrics.jsonl")
    assert found["seconds"]["train"] == pytest.approx(np.median([row["seconds/train"] for row in rows]), abs=1e-4)
    summaries = [row["eval"]["miniature:validation?count=3"] for row in rows]
    points = [[n, *(round(told[f"pass@{k}"][0], 5) for k in (1, 4))] for n, told in enumerate(summaries, start=1)]
    assert found["curve"] == {"k": 4, "points": points}
    assert [step for step, *_ in start["curve"]["points"]] == [0]
    usage = read_log(run.config.run_folder / "usage.jsonl")
    assert [row["command"] for row in usage] == ["train.py", "dph.study_measure"]
    assert found["peak_bytes"] == usage[0]["peak_bytes"] > 1e8
    assert (study.runs / "logs" / "grpo-seed0.log").stat().st_size > 0


def test_partitions_and_twins_are_shared_and_only_what_is_stale_is_done_anew(
    study: Study, here: list[str], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"  # a name, which is a setting, for whatever weights
    link.symlink_to(base)
    (tmp_path / "small.toml").write_text(CONFIG.format(model=link))

    def todo() -> list[str]:
        crew = _Crew(study)
        return [
            job.id for job in _jobs(study, [make_run(study, s, 0) for s in pick(study, ["dph_js", "again"])], 1, crew)
        ]

    shared = partition_of(study, make_run(study, ("again", None), 0)).name
    runs = ["dph_js-eta0.5-seed0", "dph_js-eta2-seed0", "again-seed0"]
    assert todo() == ["base-seed0", shared, *runs]
    run_study(study, ["dph_js", "again"], 1)
    assert here[:2] == ["base-seed0 -m", f"{shared} presample.py"]
    assert sorted(here[2:]) == sorted(f"{run} {command}" for run in runs[:2] for command in ("train.py", "-m"))
    one, twin = (read(study.results / f"{name}.json") for name in runs[1:])
    assert (twin["method"], twin["value"], twin["same_as"], twin["sets"]) == ("again", None, runs[1], one["sets"])
    stored = [study.runs / name / "presample" / "rehearsal.safetensors" for name in (shared, *runs[:2])]
    assert len({path.read_bytes() for path in stored}) == 1
    assert one["d_pef"] > 0
    assert one["d_pef"] + one["d_exp"] == 6
    assert todo() == []

    path = study.results / f"{runs[0]}.json"
    write_result(path, {**read(path), "settings": {**read(path)["settings"], "train.steps": 1}})
    assert todo() == [runs[0]]
    assert f"{runs[0]}: made with another train.steps; it is done anew" in capsys.readouterr().out

    other = shutil.copytree(base, tmp_path / "other", ignore=lambda *_: ["model.safetensors", "config.json"])
    model = load_model(base)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    save_model(model, other)
    link.unlink()
    link.symlink_to(other)
    assert todo() == ["base-seed0", shared, *runs]
    run = make_run(study, ("dph_js", 2.0), 0)
    assert (run.config.run_folder / "checkpoints").exists()
    _Crew(study)._prepare(run, run.config.run_folder, run.settings)
    assert not (run.config.run_folder / "checkpoints").exists(), "it came from the other base"


def stub(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Lets every measurement be `python -c script` instead."""
    monkeypatch.setattr(_Crew, "measure", lambda crew, run: crew._call(run.id, crew.study.runs, ["-c", script]))


def test_a_failing_worker_ends_the_study_with_its_line_and_its_log(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(
        monkeypatch,
        "import sys; print('error: an old one'); print('noise', end='\\r'); sys.exit('error: no room\\nbye')",
    )
    log = study.runs / "logs" / "base-seed0.log"
    with pytest.raises(UserError, match=re.escape(f"base-seed0: error: no room (log: {log})")):
        run_study(study, ["grpo"], 1)
    stub(monkeypatch, "raise SystemError('broken')")
    with pytest.raises(UserError, match=re.escape(f"SystemError: broken (log: {log})")):  # not the line of last time
        run_study(study, ["grpo"], 1)
    assert "no room" in log.read_text()
    usage = [json.loads(line) for line in (study.runs / "usage.jsonl").read_text().splitlines()]
    assert [row["command"] for row in usage] == ["-c", "-c"]


def test_an_interruption_ends_the_processes_and_is_no_error_of_theirs(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(monkeypatch, "import time; time.sleep(60)")
    waits = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        waits.append(time.monotonic())
        if len(waits) > 1:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    real, began = study_module.wait, time.monotonic()
    monkeypatch.setattr(study_module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, ["grpo"], 2)
    assert time.monotonic() - began < 10
    assert len((study.runs / "usage.jsonl").read_text().splitlines()) == 2, "both were at work, and both have ended"


def test_a_crew_that_is_stopping_starts_nothing(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = _Crew(study)
    crew.stop()
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(KeyboardInterrupt):
        crew._call("x", study.runs, ["-c", "pass"])


def test_the_time_left_is_that_of_jobs_of_the_same_kind() -> None:
    jobs = [_Job(kind, kind, (), lambda: None) for kind in ("grpo", "dapo", BASE)]
    assert _time_left(jobs, [], {BASE: [60.0]}, 2) == "time left: known when the first run is done"
    took = {"grpo": [600.0, 1200.0], "rkl": [1500.0], BASE: [300.0]}  # of dapo nothing is known: all runs' mean, 1100
    assert _time_left(jobs, [], took, 2) == "about 19 min left"  # (900 + 1100 + 300) / 2 s
    assert _time_left([], [(jobs[0], time.monotonic() - 300)], took, 2) == "about 10 min left"
    assert _time_left([], [(jobs[0], time.monotonic() - 3000)], took, 2).startswith("the last ones take longer")
    assert _time_left(jobs * 10, [], took, 2) == "about 3.2 h left"


def test_make_passes_on_what_is_picked() -> None:
    asked = ["make", "-n", "--no-print-directory", "study", "METHODS=a,b", "SEEDS=2"]
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert told.stdout.splitlines()[-1].endswith("python -m dph.study --methods a,b --seeds 2")


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


def test_keep_and_explore_are_those_of_the_evaluation_and_with_k_their_expectation() -> None:
    old, new = [3, 1, 0, 0, 8], [1, 0, 2, 0, 8]
    one, other = setting("base", None, a_set(8, old), a_set(8, new)), setting("a", None, a_set(8, new), a_set(8, old))
    told = [each.mean for each in keep_explore(one, other, "in_domain", 8)]
    both = dict(enumerate(old + new)), dict(enumerate(new + old))
    assert told == pytest.approx(evaluation.keep_explore(*both))
    one, other = setting("base", None, a_set(4, [2, 0])), setting("a", None, a_set(4, [1, 4]))
    keep, explore = keep_explore(one, other, "in_domain", 1)  # chances of the base 1/2, 0; of the other 1/4, 1
    assert keep.mean == pytest.approx((1 / 2 * 1 / 4) / (1 / 2))
    assert explore.mean == pytest.approx((1 / 2 * 1 / 4 + 1 * 1) / (1 / 2 + 1))


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
    point = [[0, 0.5, 0.9]] if method == BASE else [[50, 0.6, 0.8], [100, 0.7, 0.7]]
    found = {
        **{"method": method, "sweep": "loss.eta" if value else "", "value": value, "seed": seed, "base": f"b{seed}"},
        **{"commit": "0123456789", "torch": "2", "d_pef": 7 if value else None, "d_exp": 5 if value else None},
        **{"seconds": {} if method == BASE else {"score": 0.25, "train": 1.0 + seed}, "peak_bytes": 300_000_000},
        **{"wall_seconds": 1800.0, "settings": {"run.seed": seed, "train.steps": 2}},
        **{"curve": {"k": 16, "points": point}, "sets": dict.fromkeys(COUNTS, one), **other},
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
    text = write_tables(report, ["grpo", "dph_f"]).read_text()
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
        **{"score s": "0.25", "train s": "1.50", "step s": "1.75", "MB": "300", "x": ""},
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
    names = ["pass_at_k.png", "training.png", "styles.png", "keep_explore.png", "pareto.png"]
    assert [path.name for path in draw(report)] == names
    assert all((report / name).read_bytes().startswith(b"\x89PNG") for name in names)
    for path in {*(report / "runs").glob("*seed1.json"), *(report / "runs").glob("dph_f*")}:
        path.unlink()  # one method at one seed, nothing swept
    seen: dict[str, Figure] = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: seen.update({path.name: figure}))
    draw(report)
    base, grpo = ([*map(float, line.get_ydata())] for line in seen["pass_at_k.png"].axes[0].lines)
    assert base == [pytest.approx(np.mean([pass_at_k(16, c, k) for c in (8, 8, 0, 16)])) for k in (1, 2, 4, 8, 16)]
    assert grpo == [0.5] * 5
    last = seen["training.png"].axes[1].lines[-1]
    assert np.array([last.get_xdata(), last.get_ydata()]).tolist() == [[0, 50, 100], [0.9, 0.8, 0.7]]
    assert [bar.get_width() for bar in seen["styles.png"].axes[0].containers[0]] == [0.75, 1.0]  # 8, 8, 16, 16 of 16
    plane = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in seen["pareto.png"].axes[0].lines}
    assert plane == {"base": (0.5, 0.75), "grpo": (0.5, 0.5)}
    assert [line.get_label() for line in seen["pareto.png"].axes[1].lines] == ["base", "grpo: 300 MB"]


def test_what_came_from_another_base_is_left_out_and_said(report: Path) -> None:
    a_result(report, "grpo", None, 1, [0, 0, 0, 0], base="other")
    _, settings, notes = load_results(report / "runs", ["dph_f", "grpo"])
    assert [(s.label, list(s.runs)) for s in settings] == [
        ("dph_f, eta = 0.5", [0, 1]), ("dph_f, eta = 2", [0, 1]), ("grpo", [0]),
    ]  # fmt: skip
    assert notes == ["grpo-seed1.json is left out: it started from another base than seed 1's"]
    assert f"Note: {notes[0]}." in write_tables(report).read_text()


def test_seeds_of_one_setting_with_different_settings_are_refused(report: Path) -> None:
    a_result(report, "grpo", None, 1, [0, 0, 0, 0], settings={"run.seed": 1, "train.steps": 9})
    with pytest.raises(UserError, match=r"grpo-seed1.json: train.steps = 9, but 2 at seed 0; run the study again"):
        load_results(report / "runs")


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no base to report"):
        write_tables(tmp_path)
    a_result(tmp_path, BASE, None, 0, [1])
    with pytest.raises(UserError, match="holds no run to report"):
        write_tables(tmp_path)
