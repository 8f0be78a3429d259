"""Comparing runs: what is read, what is refused, and sentences that follow the numbers."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from dph.compare import load_reports, sentences
from dph.config import Config, load_config
from dph.errors import UserError
from dph.evaluation import pass_at_k, summarise
from dph.plots import plot_pass_at_k

ROOT = Path(__file__).parent.parent
SETTINGS = {"n": 8, "temperature": 1.0, "top_p": 1.0, "greedy": True, "seed": 0, "dtype": "fp32"}


def evaluation(
    run: Path,
    model: str,
    counts: list[int],
    *,
    sources: tuple[str, ...] = ("words:test", "words:other"),
    ks: tuple[int, ...] = (1, 4, 8),
    weights: str = "",
    prompts: str = "the prompts",
    **settings: Any,
) -> Path:
    """Leaves RUN/evaluation/MODEL.json as evaluate.py does, with these correct answers of n on every set."""
    used = SETTINGS | settings
    problems = [
        {"prompt": i, "correct": c, "greedy": float(c > 4), "distinct": 1, "tokens": 5.0, "entropy": 0.1,
         "truncated": 0.0, "errors": 0.0}
        for i, c in enumerate(counts)
    ]  # fmt: skip
    sets = {}
    for source in sources:
        fingerprint = {"model": weights or model, "prompts": prompts, "settings": json.dumps(used)}
        found = {"source": source, "n": used["n"], "problems": problems, "fingerprint": fingerprint}
        sets[source] = found | {"summary": summarise(found, ks)}
    path = run / "evaluation" / f"{model}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"model": model, "sets": sets}))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs from one base, which both have evaluated: narrow gains pass@1 and loses pass@8, wide keeps it."""
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    for run in (narrow, wide):
        evaluation(run, "base", [2, 2, 2, 0] * 10)
    evaluation(narrow, "narrow", [8, 8, 0, 0] * 10)
    evaluation(wide, "wide", [6, 4, 2, 1] * 10)
    return [narrow, wide]


def flat(config: Config) -> dict[str, Any]:
    tables = dataclasses.asdict(config)
    return {f"{section}.{name}": value for section, table in tables.items() for name, value in table.items()}


def command(*arguments: object) -> "subprocess.CompletedProcess[str]":
    asked = [sys.executable, "-m", "dph.compare", *map(str, arguments)]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)


def test_the_base_comes_first_and_once(runs: list[Path]) -> None:
    assert [report["model"] for report in load_reports(runs, "base")] == ["base", "narrow", "wide"]
    (runs[1] / "evaluation" / "base.json").unlink()
    assert [report["model"] for report in load_reports(runs, "base")] == ["base", "narrow", "wide"]


def test_the_base_may_have_any_name(tmp_path: Path) -> None:
    evaluation(tmp_path / "run", "Qwen", [1, 2])
    evaluation(tmp_path / "run", "step-300", [2, 2])
    assert [report["model"] for report in load_reports([tmp_path / "run"], "Qwen")] == ["Qwen", "step-300"]
    with pytest.raises(UserError, match=r"no run has evaluation/base.json; name the base among Qwen, step-300 by --ba"):
        load_reports([tmp_path / "run"], "base")


def test_models_of_one_name_are_told_apart_by_their_runs(runs: list[Path]) -> None:
    for run in runs:
        (run / "evaluation" / f"{run.name}.json").unlink()
        evaluation(run, "step-9", [1] * 40)
    names = [report["model"] for report in load_reports(runs, "base")]
    assert names == ["base", f"{runs[0]}: step-9", f"{runs[1]}: step-9"]


def test_sentences_tell_the_highest_pass_at_1_and_what_has_become_of_pass_at_k(runs: list[Path]) -> None:
    first, second, third, explanation = sentences(load_reports(runs, "base"))
    assert first.startswith("On words:test narrow has the highest pass@1, 0.500 [")
    assert "0.094 above wide, 0.406 [" in first  # 16/32 against 13/32
    assert first.endswith("their intervals overlap.")
    assert second.startswith("At 8 tries, pass@8, base has 0.750 [")
    assert re.search(r"narrow 0.500 \[\S+ \S+, 0.250 below \(overlap\)", second)
    assert re.search(r"wide 1.000 \[1.000, 1.000\], 0.250 above \(do not overlap\)", second)
    assert third == (
        "base solves 30 of 40 prompts and leaves 10; narrow has keep 0.667 and explore 0.000; "
        "wide has keep 1.000 and explore 1.000."
    )
    assert "at least one of the 8 answers is right" in explanation


def test_sentences_follow_the_numbers(runs: list[Path]) -> None:
    evaluation(runs[0], "narrow", [1, 0, 0, 0] * 10)
    evaluation(runs[1], "wide", [8, 8, 8, 8] * 10)
    first, second, third, _ = sentences(load_reports(runs, "base"))
    assert first.startswith("On words:test wide has the highest pass@1, 1.000")
    assert "0.812 above base, 0.188 [" in first
    assert first.endswith("their intervals do not overlap.")
    assert "narrow 0.250" in second
    assert "0.500 below (do not overlap)" in second
    assert "narrow has keep 0.333 and explore 0.000" in third


def test_the_largest_k_is_one_that_all_evaluations_have(runs: list[Path]) -> None:
    evaluation(runs[1], "wide", [6, 4, 2, 1] * 10, ks=(1, 4))
    assert sentences(load_reports(runs, "base"))[1].startswith("At 4 tries, pass@4")


def test_a_base_that_solves_everything_leaves_nothing_to_explore(tmp_path: Path) -> None:
    evaluation(tmp_path / "run", "base", [1, 2])
    evaluation(tmp_path / "run", "model", [0, 2])
    third = sentences(load_reports([tmp_path / "run"], "base"))[2]
    assert third == "base solves 2 of 2 prompts and leaves 0; model has keep 0.500 and explore –."


def test_the_same_prompts_judged_by_other_gold_answers_are_not_compared(runs: list[Path]) -> None:
    path = runs[1] / "evaluation" / "wide.json"
    report = json.loads(path.read_text())
    for found in report["sets"].values():
        found["fingerprint"]["gold answers"] = "others"
    path.write_text(json.dumps(report))
    with pytest.raises(UserError, match="other gold answers than in"):
        load_reports(runs, "base")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ("words:test",)}, "evaluated on words:test, but {base} on words:test, words:other; evaluate both"),
        ({"n": 16}, "words:test: n = 16 answers a prompt, but 8 in {base}; evaluate both with the same eval.samples"),
        ({"prompts": "others"}, "words:test: other prompts than in {base}"),
        ({"temperature": 0.6}, "words:test: temperature = 0.6, but 1.0 in {base}"),
        ({"top_k": 5}, "words:test: top_k = 5, but None in {base}"),
    ],
)
def test_evaluations_that_cannot_be_compared_are_refused(
    runs: list[Path], changes: dict[str, Any], message: str
) -> None:
    wrong = evaluation(runs[1], "wide", [6, 4, 2, 1] * 10, **changes)
    with pytest.raises(UserError) as caught:
        load_reports(runs, "base")
    base = runs[0] / "evaluation" / "base.json"
    assert str(caught.value).startswith(f"{wrong}: {message.format(base=base)}")


def test_runs_of_other_seeds_and_precisions_may_be_compared_where_the_prompts_are_the_same(runs: list[Path]) -> None:
    evaluation(runs[1], "wide", [6, 4, 2, 1] * 10, seed=1, dtype="bf16")
    assert len(load_reports(runs, "base")) == 3


def test_runs_from_another_base_are_refused(runs: list[Path]) -> None:
    evaluation(runs[1], "base", [2, 2, 2, 0] * 10, weights="others")
    with pytest.raises(UserError, match=r"wide/evaluation/base.json: another base than .*narrow/evaluation/base.json"):
        load_reports(runs, "base")


@pytest.mark.parametrize("text", ["{}", '{"model": "x", "sets": {}}', '{"model": "x", "sets": {"a": {"n": 1}}}'])
def test_a_file_that_is_no_evaluation_is_named(runs: list[Path], text: str) -> None:
    (runs[1] / "evaluation" / "wide.json").write_text(text)
    with pytest.raises(UserError, match=r"wide.json: is no evaluation as evaluate.py writes it"):
        load_reports(runs, "base")


def test_the_picture_has_a_panel_for_each_set_and_a_curve_for_each_model(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: seen.append(figure))
    plot_pass_at_k(load_reports(runs, "base"), tmp_path)
    panels = seen[0].axes
    assert [panel.get_title() for panel in panels] == ["words:test", "words:other"]
    for panel in panels:
        assert [line.get_label() for line in panel.lines] == ["base", "narrow", "wide"]
        assert len(panel.collections) == 3, "an interval around each curve"
    narrow = [float(y) for y in panels[0].lines[1].get_ydata()]
    assert narrow == [pytest.approx((pass_at_k(8, 8, k) + pass_at_k(8, 0, k)) / 2) for k in (1, 2, 4, 8)]


def test_the_command_leaves_a_table_and_a_picture_where_the_first_run_lies(runs: list[Path]) -> None:
    told = command(*runs)
    assert told.returncode == 0, told.stderr
    text = (runs[0].parent / "comparison.txt").read_text()
    assert text in told.stdout
    rows = [line.split()[:2] for line in text.splitlines() if line.startswith("words:")]
    assert rows == [[source, model] for source in ("words:test", "words:other") for model in ("base", "narrow", "wide")]
    assert (runs[0].parent / "pass_at_k.png").read_bytes().startswith(b"\x89PNG")


def test_a_mistake_is_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    evaluation(tmp_path / "alone", "base", [1])
    for arguments, message in (
        ([tmp_path / "empty"], f"{tmp_path / 'empty' / 'evaluation'}: holds no evaluation; train.py ends with one"),
        ([tmp_path / "alone"], "alone/evaluation/base.json is all that there is; name a run with a model"),
        ([], "the following arguments are required: RUN"),
    ):
        told = command(*arguments)
        assert (told.returncode, told.stderr.count("\n")) == (2, 1), told.stderr
        assert message in told.stderr


def test_the_quickstart_trains_two_runs_that_differ_in_the_divergence_alone_and_compares_them() -> None:
    asked = ["make", "-n", "-o", ".venv/.run", "--no-print-directory", "quickstart"]
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout
    configs = [load_config(ROOT / name) for name in re.findall(r"train.py (\S+)", told)]
    grpo, dph_js = (flat(config) for config in configs)
    assert {name: grpo[name] for name in grpo if grpo[name] != dph_js[name]} == {
        "run.name": "grpo", "loss.divergence": "none", "loss.eta": 0.0,
    }  # fmt: skip
    assert dph_js["loss.divergence"] == "js"
    compared = " ".join(str(config.run_folder) for config in configs)
    assert told.splitlines()[-1].endswith(f"-m dph.compare {compared}")


@pytest.mark.parametrize(("base", "refused"), [("base", False), ("another", True)])
def test_a_distance_from_another_base_is_refused(tmp_path: Path, base: str, refused: bool) -> None:
    run = tmp_path / "run"
    evaluation(run, "base", [2, 0] * 10)
    path = evaluation(run, "model", [4, 0] * 10)
    report = json.loads(path.read_text())
    for found in report["sets"].values():
        found["fingerprint"]["base"] = base
    path.write_text(json.dumps(report))
    if refused:
        with pytest.raises(UserError, match="another base"):
            load_reports([run], "base")
    else:
        assert len(load_reports([run], "base")) == 2
