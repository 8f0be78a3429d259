"""E7: who enters D_pef, with what; made once, resumed anywhere, refused when stale."""

import json
from pathlib import Path

import pytest
import torch

import dph.presampling
from dph.answering import Policy
from dph.config import Config, load_config
from dph.errors import UserError
from dph.model_folder import load_model
from dph.presampling import Partition, presample
from dph.prompts import tokenize
from dph.rollouts import collate
from dph.scoring import token_logprobs
from dph.tasks.base import Prompt, Reward
from dph.tokenizer import load_tokenizer
from tests.helpers import WordTask, tiny_folder


class Counting(WordTask):
    """The word task, noting how often each prompt's answers were judged."""

    def __init__(self) -> None:
        super().__init__()
        self.judged: dict[int, list[float]] = {}

    def rewards(self, pairs: list[tuple[Prompt, str]]) -> list[Reward]:  # type: ignore[override]
        found = super().rewards(pairs)
        for (prompt, _), reward in zip(pairs, found, strict=True):
            self.judged.setdefault(prompt.index, []).append(reward.value)
        return found


def make(folder: Path, *more: str, task: Counting | None = None) -> tuple[Partition, Config, list[Prompt]]:
    if not (folder / "model").exists():
        tiny_folder(folder / "model")
    config = load_config(
        None,
        [
            f"--run.folder={folder}",
            "--sampling.max_new_tokens=6",
            "--presample.responses=4",
            "--presample.threshold=2",
            *more,
        ],
    )
    policy = Policy(load_model(folder / "model"), load_tokenizer(folder / "model"), folder / "model")
    data = tokenize(task or Counting(), policy.tokenizer, config)
    return presample(policy, data, config), config, data.prompts


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "run" / "presample" / "partition.jsonl").read_text().splitlines()]


def test_every_prompt_is_in_one_set_and_the_counts_are_the_graders(tmp_path: Path) -> None:
    task = Counting()
    partition, _, questions = make(tmp_path, task=task)
    assert sorted(partition.pef + partition.exp) == list(range(len(questions)))
    assert partition.pef
    assert partition.exp
    for row in rows(tmp_path):
        judged = task.judged[row["prompt"]]  # type: ignore[index]
        near_perfect = row["correct"] >= 2  # type: ignore[operator]
        assert row["correct"] == sum(judged[:4])
        assert len(judged) == (5 if near_perfect else 4)
        assert (row["set"] == "pef") == (near_perfect and judged[4] == 1)


def test_the_confirming_sample_is_the_rehearsal_answer_scored_by_the_reference(tmp_path: Path) -> None:
    partition, config, _ = make(tmp_path)
    assert [r.prompt for r in partition.rehearsal] == partition.pef
    batch = collate(partition.rehearsal, "cpu")
    scored, *_ = token_logprobs(load_model(tmp_path / "model"), batch, config.sampling.temperature)
    torch.testing.assert_close(scored, batch.logprobs, atol=1e-5, rtol=0)


def test_more_rehearsal_answers_keep_the_correct_ones(tmp_path: Path) -> None:
    task = Counting()
    partition, _, _ = make(tmp_path, "--presample.rehearsal_responses=5", task=task)
    for prompt in partition.pef:
        stored = [r for r in partition.rehearsal if r.prompt == prompt]
        assert len(stored) == sum(task.judged[prompt][4:])
        assert 1 <= len(stored) <= 5


def test_stored_answers_say_which_of_their_prompts_they_are_and_whether_the_length_limit_cut_them(
    tmp_path: Path,
) -> None:
    often = {"eos_token_id": [2, *range(50, 60)]}  # so that some of a random model's answers end by themselves
    (tiny_folder(tmp_path / "model") / "generation_config.json").write_text(json.dumps(often))
    partition, config, _ = make(tmp_path, "--presample.rehearsal_responses=5")
    ends = load_tokenizer(tmp_path / "model").end_ids
    names = [(r.prompt, r.sample) for r in partition.rehearsal]
    assert len(set(names)) == len(names), "a skipped update names its rows by these two"
    for r in partition.rehearsal:
        assert r.finished == (r.tokens[-1] in ends)
        assert r.finished or len(r.tokens) == config.sampling.max_new_tokens
    assert {r.finished for r in partition.rehearsal} == {True, False}


def test_without_a_confirming_sample_the_correct_ones_of_k_are_kept(tmp_path: Path) -> None:
    partition, _, _ = make(tmp_path, "--presample.confirm=false", "--presample.rehearsal_responses=2")
    assert partition.pef == [row["prompt"] for row in rows(tmp_path) if row["correct"] >= 2]  # type: ignore[operator]
    assert len(partition.rehearsal) == 2 * len(partition.pef)


def test_unsolved_prompts_may_be_dropped(tmp_path: Path) -> None:
    partition, _, _ = make(tmp_path, "--presample.drop_unsolved=true", "--presample.responses=2")
    unsolved = {row["prompt"] for row in rows(tmp_path) if row["correct"] == 0}
    assert unsolved
    assert not unsolved & {*partition.pef, *partition.exp}


def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a", "--sampling.max_rows=4")
    original = dph.presampling.append_rows
    left = [5]

    def failing(path: Path, rows: list[dict[str, object]]) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        original(path, rows)

    monkeypatch.setattr(dph.presampling, "append_rows", failing)
    for _ in range(9):
        left[0] = 5
        try:
            make(tmp_path / "b", "--sampling.max_rows=4")
            break
        except KeyboardInterrupt:
            with (tmp_path / "b" / "run" / "presample" / "progress.jsonl").open("a") as file:
                file.write('{"stage": "first", "pro')
    for name in ("partition.jsonl", "rehearsal.safetensors", "report.json"):
        assert (tmp_path / "a/run/presample" / name).read_bytes() == (tmp_path / "b/run/presample" / name).read_bytes()


def test_a_finished_partition_is_reused_and_a_stale_one_refused_by_name(tmp_path: Path) -> None:
    first, _, _ = make(tmp_path)
    task = Counting()
    assert make(tmp_path, task=task)[0] == first
    assert not task.judged, "nothing was sampled again"
    with pytest.raises(UserError, match=r"made with other settings \(threshold = 2 there, 3 here\); delete it"):
        make(tmp_path, "--presample.threshold=3")
    with pytest.raises(UserError, match=r"made with other settings \(max_rows = 64 there, 2 here\); delete it"):
        make(tmp_path, "--sampling.max_rows=2")
    tiny_folder(tmp_path / "model", seed=1)
    with pytest.raises(UserError, match="made with other model; delete it"):
        make(tmp_path)


def test_two_empty_sets_are_an_error(tmp_path: Path) -> None:
    class Hopeless(Counting):
        def rewards(self, pairs: list[tuple[Prompt, str]]) -> list[Reward]:  # type: ignore[override]
            return [Reward.of("wrong") for _ in pairs]

    with pytest.raises(UserError, match="D_pef and D_exp are both empty"):
        make(tmp_path, "--presample.drop_unsolved=true", task=Hopeless())


@pytest.mark.parametrize("name", ["rehearsal.safetensors", "partition.jsonl", "report.json"])
def test_a_broken_partition_is_named(tmp_path: Path, name: str) -> None:
    """Cut short, as no rename leaves a file: nothing is to be read from what is left of it."""
    make(tmp_path)
    path = tmp_path / "run/presample" / name
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="presample: cannot be read"):
        make(tmp_path)
