"""E11: the estimator, intervals, keep and explore, and a whole evaluation from files."""

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from dph.answering import Policy
from dph.config import load_config
from dph.evaluation import evaluate, evaluate_model, interval, keep_explore, kl_to_base, pass_at_k, summarise
from dph.model_folder import load_model
from dph.plots import plot_run, table
from dph.prompts import tokenize
from dph.sampler import SamplingSettings, sample
from dph.tasks.base import Prompt
from dph.tokenizer import load_tokenizer
from tests.helpers import WordTask, tiny_folder, tiny_model


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [(8, 2, 4, 0.7857143), (4, 1, 4, 1), (64, 1, 8, 0.125), (200, 1, 1, 0.005), (5, 0, 3, 0), (5, 5, 1, 1)],
)
def test_pass_at_k(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-7)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer() -> None:
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                hits = [any(i < c for i in chosen) for chosen in combinations(range(n), k)]
                assert pass_at_k(n, c, k) == pytest.approx(sum(hits) / len(hits))


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples, not 4"):
        pass_at_k(4, 1, 5)


def test_the_interval_covers_the_mean_and_narrows() -> None:
    few, many = [0.0, 1.0] * 10, [0.0, 1.0] * 1000
    (low, high), (low_many, high_many) = interval(few), interval(many)
    assert low < 0.5 < high
    assert high - low > 5 * (high_many - low_many)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(20), rel=0.15)


def test_keep_and_explore() -> None:
    base, new = {0: 3, 1: 1, 2: 0, 3: 0, 4: 8}, {0: 1, 1: 0, 2: 2, 3: 0, 4: 8}
    assert keep_explore(base, new) == (pytest.approx(2 / 3), pytest.approx(1 / 2))
    keep, explore = keep_explore({0: 1}, {0: 1})
    assert keep == 1
    assert math.isnan(explore)


def test_the_distance_from_the_base_is_the_kl_divergence(tmp_path: Path) -> None:
    """Answers of one token over a small vocabulary: the estimate against the sum over all tokens."""
    config = load_config(None, ["--sampling.max_new_tokens=1", "--eval.samples=512"])
    policy, base = (tiny_model(seed, vocab=7, dtype=torch.float64, scale=0.15) for seed in (0, 1))
    prompt = Prompt(0, tokens=[1, 2, 3])
    rollouts = sample(policy, [prompt], [range(4096)], SamplingSettings((0,), (), 1, max_rows=512))
    with torch.no_grad():
        new, old = (m.logits(m(torch.tensor([prompt.tokens]))[0, -1]).log_softmax(-1) for m in (policy, base))
    exact = float((new.exp() * (new - old)).sum())
    assert exact > 0.05
    assert kl_to_base(policy, base, rollouts, config)[0] == pytest.approx(exact, rel=0.1)
    assert kl_to_base(policy, policy, rollouts, config)[0] == 0


def report_of(policy: Policy, folder: Path, names: list[str], *more: str) -> dict[str, Any]:
    """What an evaluation on sets of these names leaves on the disk."""
    small = [f"--run.folder={folder}", "--eval.samples=2", "--eval.k=[1]", "--sampling.max_new_tokens=4"]
    config = load_config(None, [*small, *more])
    sets = [tokenize(WordTask(3), policy.tokenizer, config) for _ in names]
    for data, name in zip(sets, names, strict=True):
        data.task.name = name
    evaluate_model(policy, sets, config, "x")
    found: dict[str, Any] = json.loads((folder / "run/evaluation/x.json").read_text())["sets"]
    return found


def test_sets_that_are_not_asked_for_again_stay_in_the_report(tmp_path: Path) -> None:
    path = tiny_folder(tmp_path / "model")
    policy = Policy(load_model(path), load_tokenizer(path), path)
    whole = report_of(policy, tmp_path, ["a", "b"])
    assert report_of(policy, tmp_path, ["b"]) == whole
    assert list(report_of(policy, tmp_path, ["c"])) == ["c", "b", "a"], "what is asked for comes first"


@pytest.mark.parametrize("what", ["model", "settings"])
def test_a_set_that_no_longer_holds_for_the_model_is_dropped_aloud(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_folder(tmp_path / "model")
    policy = Policy(load_model(path), load_tokenizer(path), path)
    report_of(policy, tmp_path, ["a", "b"])
    capsys.readouterr()
    more = ["--eval.temperature=0.5"] if what == "settings" else []
    if what == "model":
        policy = Policy(load_model(tiny_folder(tmp_path / "other", seed=1)), policy.tokenizer, path)
    assert list(report_of(policy, tmp_path, ["a"], *more)) == ["a"]
    said = capsys.readouterr().out
    assert f"x.json: b: made with other {what}" in said
    assert "data.eval names it no more; dropped" in said


def test_an_evaluation_from_a_folder_to_table_json_and_picture(tmp_path: Path) -> None:
    path = tiny_folder(tmp_path / "model")
    config = load_config(
        None, [f"--run.folder={tmp_path}", "--eval.samples=8", "--eval.k=[1,4]", "--sampling.max_new_tokens=5"]
    )
    policy = Policy(load_model(path), load_tokenizer(path), path)
    data = tokenize(WordTask(6), policy.tokenizer, config)
    result, answers = evaluate(policy, data, config, samples=8, greedy=True, bar=False)
    assert len(answers) == 48
    for problem in result["problems"]:
        mine = [a for a in answers if a.rollout.prompt == problem["prompt"]]
        assert problem["correct"] == sum(a.reward.value for a in mine)
        assert problem["distinct"] == len({a.text for a in mine})
        assert problem["greedy"] in (0.0, 1.0)
    summary = summarise(result, (1, 4))
    assert summary["pass@1"][0] == pytest.approx(sum(a.reward.value for a in answers) / 48)
    base = evaluate_model(policy, [data], config, "base")
    new = evaluate_model(policy, [data], config, "new")
    assert json.loads((tmp_path / "run/evaluation/base.json").read_text()) == base
    lines = table([base, new], base="base").splitlines()
    assert lines[0].split()[:3] == ["set", "model", "greedy"]
    assert "1.000" in lines[3], "the same model keeps everything"
    assert [p.name for p in plot_run(tmp_path / "run")] == ["pass_at_k.png"]
