"""The committed studies: their files are those of the study files, and tables and pages say what the files say."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from study.plan import BASE, changed, load_study, make_run, pick
from study.report import write_tables
from study.results import load_results

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["study", "smollm2"])
def test_the_committed_results_are_those_of_the_study_file(name: str) -> None:
    study = load_study(ROOT / "study" / f"{name}.toml")
    committed = {path.stem: json.loads(path.read_text()) for path in study.results.glob("*.json")}
    for stem, found in committed.items():
        run = make_run(study, (found["method"], found["value"]), found["seed"])
        assert (run.id, changed(found["settings"], run.settings)) == (stem, [])
    wanted = [(BASE, None), *pick(study, None)]
    missing = {make_run(study, each, seed).id for each in wanted for seed in range(study.table.seeds)} - {*committed}
    assert missing == set()


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def said(name: str, words: str) -> str:
    """The number that follows these words on a page, as it stands there."""
    found = re.search(re.escape(words) + r" ([+−]?\d*\.\d+)", page(name))
    assert found is not None, f"docs/{name}.md no longer says {words!r}"
    return found[1]


def chosen_eta(name: str, method: str) -> str:
    """The η that a page names in the first cell of a row, "| dph_js, η = 128 |"."""
    found = re.search(rf"\| {method}, η = (\S+) \|", page(name))
    assert found is not None, f"docs/{name}.md no longer has a row of {method}"
    return found[1]


def files_of(study: str, name: str) -> list[Any]:
    """The committed JSON files of one setting, by seed."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / f"docs/{study}/runs").glob(f"{name}-seed*.json"))]


def mean_pass(study: str, name: str, role: str, k: int) -> float:
    """pass@k over all questions of all seeds, with nothing but the definition: 1 - C(n - c, k) / C(n, k)."""
    scores = [
        1 - math.comb(run["sets"][role]["n"] - correct, k) / math.comb(run["sets"][role]["n"], k)
        for run in files_of(study, name)
        for correct in run["sets"][role]["correct"]
    ]
    return sum(scores) / len(scores)


def mean_bits_apart(study: str, one: str, other: str, role: str) -> float:
    """How much more bits one has than another, over the questions to which both have right answers."""

    def bits(counts: Sequence[int]) -> float:
        return sum(count / sum(counts) * math.log2(sum(counts) / count) for count in counts)

    pairs = [
        (a, b)
        for left, right in zip(files_of(study, one), files_of(study, other), strict=True)
        for a, b in zip(left["sets"][role]["forms"], right["sets"][role]["forms"], strict=True)
    ]
    apart = [bits(a) - bits(b) for a, b in pairs if a and b]
    return sum(apart) / len(apart)


def as_said(number: float) -> str:
    return f"{number:+.3f}".replace("-", "−").replace("0.", ".", 1)


def test_three_numbers_of_the_study_are_those_of_its_files_by_plain_means() -> None:
    def minus(one: str, other: str, role: str) -> str:
        return as_said(mean_pass("study", one, role, 16) - mean_pass("study", other, role, 16))

    js = f"dph_js-eta{chosen_eta('study', 'dph_js')}"
    assert said("study", "grpo − base at 16 tries:") == minus("grpo", "base", "in_domain")
    assert said("study", "dph_js − base at 16 tries:") == minus(js, "base", "in_domain")
    assert said("study", "dph_js − grpo on arithmetic at 16 tries:") == minus(js, "grpo", "out_of_domain")


def test_three_numbers_of_the_study_on_a_language_model_are_those_of_its_files_by_plain_means() -> None:
    name = "study_smollm2"
    forward = f"dph_f-eta{chosen_eta(name, 'dph_f')}"
    rise = mean_pass(name, "grpo", "in_domain", 1) - mean_pass(name, "base", "in_domain", 1)
    assert said(name, "grpo − base at 1 try:") == as_said(rise)
    assert said(name, "grpo − base, bits:") == as_said(mean_bits_apart(name, "grpo", "base", "in_domain"))
    assert said(name, "dph_f − grpo, bits:") == as_said(mean_bits_apart(name, forward, "grpo", "in_domain"))


@pytest.mark.parametrize("name", ["study", "smollm2"])
def test_the_committed_tables_are_those_of_the_committed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(ROOT)
    study = load_study(ROOT / "study" / f"{name}.toml")
    for path in write_tables(tmp_path, load_results(study)):
        assert path.read_text() == (ROOT / study.table.report / path.name).read_text()
