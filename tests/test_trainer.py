"""The loop: its gradient is the objective's, whatever the cutting; it resumes exactly; it survives bad numbers."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dph.answering import Policy, autocast, score_rollouts
from dph.checkpoint import open_run
from dph.cli import prepare_training
from dph.collector import Experience, shuffled
from dph.config import Config, load_config
from dph.divergences import GENERATORS
from dph.errors import UserError
from dph.metrics import Meter
from dph.model_folder import DTYPES, load_model
from dph.presampling import Partition
from dph.prompts import PromptSet, tokenize
from dph.rollouts import Rollout
from dph.sampler import SamplingSettings, sample
from dph.tokenizer import load_tokenizer
from dph.trainer import Data, Trainer
from dph.updates import Update, make_update
from tests.helpers import WordTask, tiny_folder

JS = ["--loss.divergence=js", "--loss.eta=0.5"]


def config(folder: Path, *more: str) -> Config:
    small = [
        "prompts_per_step=4",
        "responses_per_prompt=4",
        "rehearsal_rows=6",
        "eval_every=0",
        "save_every=0",
        "steps=4",
    ]
    return load_config(
        None,
        [
            f"--run.folder={folder}",
            *(f"--train.{x}" for x in small),
            "--sampling.max_new_tokens=8",
            "--optim.lr=1e-3",
            *more,
        ],
    )


def trainer(folder: Path, *more: str, pef: int = 4, seed: int = 0, recorded: Path | None = None) -> Trainer:
    """A trainer on the word task whose first `pef` prompts are D_pef, rehearsed with two answers each."""
    path = folder / "model"
    if not path.exists():
        tiny_folder(path, seed)
    settings = config(folder, *more)
    open_run(settings)
    policy = Policy(load_model(path, DTYPES[settings.model.dtype]), load_tokenizer(path), path)
    data = tokenize(WordTask(), policy.tokenizer, settings)
    how = SamplingSettings((9, 9, 9), policy.tokenizer.end_ids, 8)
    stored = sample(policy.model, data.prompts[:pef], [range(2)] * pef, how)
    named = replace(settings, model=replace(settings.model, path=str(path)))
    partition = Partition(list(range(pef)), list(range(pef, len(data.prompts))), stored)
    return Trainer(
        settings,
        policy,
        Data(
            prompts=data,
            partition=partition if settings.loss.uses_stored_answers else None,
            reference=prepare_training(policy, named, torch.device("cpu")),
            recorded=recorded,
        ),
    )


def weights(made: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in made.policy.model.parameters()])


def rehearse(made: Trainer, stored: list[Rollout]) -> dict[str, Any]:
    """A step of one update on these stored answers alone; returns its metrics."""
    nothing, update = Experience([], []), make_update(made.config, [], torch.zeros(0), stored)
    with (
        mock.patch.object(made.collector, "collect", return_value=nothing),
        mock.patch.object(made, "_updates", return_value=[update]),
    ):
        return made.train_step()


def keep_gradients(made: Trainer) -> list[torch.Tensor]:
    """The gradients that the optimizer would have followed, in place of its steps."""
    found: list[torch.Tensor] = []

    def step(loss: torch.Tensor, updates: int) -> dict[str, float]:
        found.extend(weight.grad.clone() for weight in made.policy.model.parameters() if weight.grad is not None)
        return {}

    made.optimizer.step = step  # type: ignore[method-assign, assignment]
    return found


def moments(made: Trainer) -> list[torch.Tensor]:
    return [kept[key] for kept in made.optimizer.adamw.state.values() for key in sorted(kept)]


def test_rehearsal_at_the_reference_moves_nothing(tmp_path: Path) -> None:
    made = trainer(tmp_path, "--loss.divergence=forward_kl", "--loss.eta=1")
    before = weights(made)
    found = keep_gradients(made)
    metrics = rehearse(made, made.stored)
    assert max(g.abs().max().item() for g in found) < 1e-5
    assert metrics["divergence"] == pytest.approx(0, abs=1e-10)
    assert torch.equal(before, weights(made))


METHODS = {
    "grpo": ["--loss.clip_high=0.2"],
    "dapo": [],
    "dr_grpo": ["--loss.advantage_std=false", "--loss.aggregation=sequence-sum"],
    "dual_clip": ["--loss.dual_clip=3", "--loss.aggregation=sequence-mean"],
    "replay": ["--loss.divergence=forward_kl", "--loss.divergence_form=plain", "--loss.eta=0.1"],
    "eta_zero": ["--loss.divergence=js", "--loss.eta=0"],
    "bf16": [*JS, "--run.dtype=bf16"],
    **{f"rkl_{e}": ["--loss.divergence=reverse_kl", "--loss.samples=own", "--loss.eta=0.1",
                     f"--loss.penalty_estimator={e}"] for e in ("k3", "k3_importance", "exact")},
    "own_js": ["--loss.divergence=js", "--loss.samples=own", "--loss.eta=0.1", "--loss.penalty_estimator=exact"],
    **{f"dph_{name}": [f"--loss.divergence={name}", "--loss.eta=0.1"] for name in GENERATORS},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_two_steps(tmp_path: Path, method: str) -> None:
    made = trainer(tmp_path, *METHODS[method], "--train.steps=2")
    before = weights(made)
    made.run()
    assert not torch.equal(before, weights(made))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["sampler_gap"] < (0.3 if method == "bf16" else 1e-5), "the first ratio is 1"  # a maximum
    assert ("divergence" in rows[0]) == (method not in ("grpo", "dapo", "dr_grpo", "dual_clip", "eta_zero"))
    assert all(abs(value) < 1e6 for row in rows for value in row.values())


def test_it_learns(tmp_path: Path) -> None:
    made = trainer(tmp_path, "--train.steps=25", "--optim.lr=3e-3")
    made.run()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(r["reward"] for r in rows[-5:]) / 5 > sum(r["reward"] for r in rows[:3]) / 3 + 0.2


def comparable(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


@pytest.mark.parametrize("method", ["dapo", "dph_js"])
def test_four_steps_are_two_a_stop_and_two(tmp_path: Path, method: str) -> None:
    straight = trainer(tmp_path / "a", *METHODS[method])
    straight.run()
    trainer(tmp_path / "b", *METHODS[method], "--train.steps=2").run()
    resumed = trainer(tmp_path / "b", *METHODS[method])
    resumed.run()
    assert torch.equal(weights(straight), weights(resumed))
    assert comparable(tmp_path / "a") == comparable(tmp_path / "b")
    assert all(torch.equal(mine, other) for mine, other in zip(moments(straight), moments(resumed), strict=True))


def test_a_log_ahead_of_its_checkpoint_is_cut_and_each_step_stands_once(tmp_path: Path) -> None:
    trainer(tmp_path, "--train.steps=2").run()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward": 9}\n{"step": 4, "rew')
    trainer(tmp_path, "--train.steps=4").run()
    assert [row["step"] for row in comparable(tmp_path)] == [1, 2, 3, 4]


def test_a_gradient_that_is_not_finite_changes_nothing_and_a_streak_stops(tmp_path: Path) -> None:
    made = trainer(tmp_path, *JS)
    made.train_step()
    before, moments_before = weights(made), [x.clone() for x in moments(made)]
    broken = [
        Rollout(r.prompt, r.sample, r.prompt_tokens, r.tokens, [float("nan")] * len(r.tokens), True)
        for r in made.stored
    ]
    assert rehearse(made, broken)["skipped_updates"] == 1
    assert torch.equal(before, weights(made))
    assert all(torch.equal(a, b) for a, b in zip(moments_before, moments(made), strict=True))
    made.train_step()
    assert not torch.equal(before, weights(made)), "the next update works"
    for _ in range(4):
        rehearse(made, broken)
    with pytest.raises(UserError, match="5 updates in a row"):
        rehearse(made, broken)


@pytest.mark.parametrize("pef", [0, 12])
def test_one_of_both_sets_may_be_empty(tmp_path: Path, pef: int) -> None:
    made = trainer(tmp_path, *JS, pef=pef)
    made.run()
    assert len(comparable(tmp_path)) == 4


def test_a_prompt_drawn_twice_makes_two_groups(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    some = made.collector.explored
    answers = made.collector._answer(0, [some[0], some[1], some[0]], 4, Counter(), Meter())
    assert [a.rollout.prompt for a in answers] == [0] * 4 + [1] * 4 + [0] * 4
    assert [a.rollout.tokens for a in answers[:4]] != [a.rollout.tokens for a in answers[8:]]


def test_the_order_is_endless_and_each_pass_holds_everything_once() -> None:
    order = shuffled(5, (0, 1), 0, 15)
    assert all(sorted(order[i : i + 5]) == [0, 1, 2, 3, 4] for i in (0, 5, 10))
    assert order[3:9] == shuffled(5, (0, 1), 3, 6)
    assert order != shuffled(5, (1, 1), 0, 15)


def test_passes_go_through_all_rollouts_again_and_leave_the_ratio_one_only_in_the_first(tmp_path: Path) -> None:
    made = trainer(tmp_path, "--train.updates_per_step=1", "--train.passes=3", "--optim.lr=1e-2")
    original, denominators = made.optimizer.attempts, []

    def attempts(update: Update) -> Any:
        denominators.append(update.denominators["rollouts"])
        return original(update)

    made.optimizer.attempts = attempts  # type: ignore[method-assign]
    metrics = made.train_step()
    assert denominators == [metrics["sampled_tokens"]] * 3, "each update counts all rollouts"
    assert made.state.updates == 3
    assert metrics["clip_high_fraction"] + metrics["clip_low_fraction"] > 0


def test_every_update_takes_whole_groups(tmp_path: Path) -> None:
    made = trainer(tmp_path, "--train.prompts_per_step=4", "--train.updates_per_step=2")
    rollouts = made.collector.collect(made.state, [], Meter()).rollouts
    updates = list(made._updates(rollouts, torch.ones(16), [], []))
    prompts = [[rollout.prompt for rollout in update.rollouts] for update in updates]
    assert [len(set(numbers)) for numbers in prompts] == [2, 2]
    assert sorted(prompts[0] + prompts[1]) == sorted(rollout.prompt for rollout in rollouts)
    assert not set(prompts[0]) & set(prompts[1])


@pytest.mark.parametrize("method", ["dapo", "dph_js", "definition", "rkl_exact", "replay"])
def test_metrics_are_of_the_same_things_for_every_method(tmp_path: Path, method: str) -> None:
    options = {**METHODS, "definition": [*JS, "--loss.samples=both"]}[method]
    made = trainer(tmp_path, *options, "--train.updates_per_step=1")
    metrics = made.train_step()
    assert metrics["pass_rate"] == pytest.approx(metrics["reward"]), "of explored prompts alone"
    assert 0.5 < metrics["entropy"] < 5, "nats a token, over all rollouts"
    if method != "dapo":
        assert metrics["divergence"] >= 0


def test_the_distance_from_the_base_is_measured_at_each_evaluation(tmp_path: Path) -> None:
    made = trainer(tmp_path, "--train.eval_every=2", "--optim.lr=3e-3", "--eval.during_samples=16")
    made.eval_sets = [PromptSet(made.collector.task, made.collector.explored)]
    assert made._evaluate(0)["kl_to_base"] == pytest.approx(0, abs=1e-6)
    made.run()
    rows = comparable(tmp_path)
    assert ["kl_to_base" in row for row in rows] == [False, True, False, True]
    assert 1e-3 < rows[1]["kl_to_base"] < rows[3]["kl_to_base"] < 5


@pytest.mark.parametrize(
    ("recorded", "taken", "message"),
    [
        ([], ["--train.responses_per_prompt=2"], "groups are of 4 answers, not train.responses_per_prompt = 2"),
        ([], ["--train.responses_per_prompt=3"], "groups are of 4 answers, not train.responses_per_prompt = 3"),
        ([], JS, "prompts that are not in D_exp here"),
        (JS, [*JS, "--loss.samples=both"], "holds no answers to the rehearsed prompts"),
    ],
)
def test_recorded_rollouts_of_another_shape_are_refused(
    tmp_path: Path, recorded: list[str], taken: list[str], message: str
) -> None:
    trainer(tmp_path / "a", *recorded, "--train.record_rollouts=true", "--train.steps=1").run()
    with pytest.raises(UserError, match=message):
        trainer(tmp_path / "b", *taken, recorded=tmp_path / "a" / "run").train_step()


def test_new_answers_to_rehearsed_prompts_have_a_ratio_of_one_in_bf16_too(tmp_path: Path) -> None:
    made = trainer(tmp_path, *JS, "--loss.samples=both", "--run.dtype=bf16")
    experience = made.collector.collect(made.state, made.stored[:4], Meter())
    for rollouts in (experience.rollouts, experience.pef_rollouts):
        with autocast(made.policy.model, "bf16"):
            scored = score_rollouts(made.policy.model, rollouts, 1.0, made.config.train.microbatch_tokens)
        for rollout, again in zip(rollouts, scored, strict=True):
            assert rollout.logprobs == pytest.approx(again.logprobs, abs=0.05)


@pytest.mark.parametrize("method", ["grpo", "definition", "rkl_exact"])
def test_a_step_of_one_update_takes_pi_old_from_its_own_pass(tmp_path: Path, method: str) -> None:
    """In place of scoring it anew, which costs a forward pass: the same update, since pi_old is the policy itself."""
    options = {**METHODS, "definition": [*JS, "--loss.samples=both"]}[method]
    moved, scored = [], []
    for name, others in {"own": [], "anew": ["--train.record_rollouts=true"]}.items():
        made = trainer(tmp_path / name, *options, "--train.updates_per_step=1", *others)
        made.state.trust_sampler = False  # as in bf16, where sampler and scorer round differently
        before = weights(made)
        with mock.patch("dph.collector.score_rollouts", wraps=score_rollouts) as calls:
            made.train_step()
        moved.append(weights(made) - before)
        scored.append(calls.call_count)
    assert scored[1] - scored[0] == 1
    assert moved[0].abs().max() > 1e-4
    torch.testing.assert_close(moved[0], moved[1], atol=1e-6, rtol=1e-3)


def test_warm_up_is_linear(tmp_path: Path) -> None:
    made = trainer(tmp_path, "--optim.warmup_steps=4", "--optim.lr=4e-3")
    rates = [made.train_step()["lr"] for _ in range(1)]
    assert rates == pytest.approx([1.5e-3]), "mean of 1e-3 and 2e-3, two updates a step"


@pytest.mark.parametrize(("explore", "count"), [("exp", 8), ("all", 12)])
def test_exploration_is_of_d_exp_or_of_all_prompts(tmp_path: Path, explore: str, count: int) -> None:
    made = trainer(tmp_path, *JS, f"--train.explore={explore}", pef=4)
    assert len(made.collector.explored) == count
    assert {r.prompt for r in made.stored} == {0, 1, 2, 3}
