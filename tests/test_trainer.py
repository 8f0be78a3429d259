"""The loop: its gradient is the objective's, whatever the cutting; it resumes exactly; it survives bad numbers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dph.answering import Policy
from dph.checkpoint import open_run
from dph.collector import shuffled
from dph.config import Config, load_config
from dph.divergences import GENERATORS
from dph.errors import UserError
from dph.losses import group_advantages
from dph.metrics import Meter
from dph.model_folder import load_model
from dph.presampling import Partition
from dph.rollouts import Rollout
from dph.sampler import Request, Settings, sample
from dph.tasks.prompts import tokenize
from dph.tokenizer import load_tokenizer
from dph.trainer import Trainer
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


def trainer(folder: Path, *more: str, pef: int = 4, seed: int = 0) -> Trainer:
    """A trainer on the word task whose first `pef` prompts are D_pef, rehearsed with two answers each."""
    path = folder / "model"
    if not path.exists():
        tiny_folder(path, seed)
    settings = config(folder, *more)
    open_run(settings)
    policy = Policy(load_model(path), load_tokenizer(path), path)
    data = tokenize(WordTask(), policy.tokenizer, settings)
    questions = data.questions
    asked = [Request(q.prompt.index, q.tokens, range(2)) for q in questions[:pef]]
    stored = sample(policy.model, asked, Settings((9, 9, 9), policy.tokenizer.end_ids, 8))
    partition = Partition(list(range(pef)), list(range(pef, len(questions))), stored)
    uses = settings.loss.divergence != "none" and settings.loss.samples != "own"
    reference = (
        load_model(path) if settings.loss.divergence != "none" and settings.loss.samples != "reference" else None
    )
    return Trainer(settings, policy, data, partition if uses else None, reference)


def weights(made: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


def naive_objective(made: Trainer, rollouts: list[Rollout], rehearsal: list[Rollout], eta: float) -> torch.Tensor:
    """E4 + eta E5 (js, token-mean), one row at a time with the whole softmax: the oracle."""
    rewards = torch.tensor([r.reward for r in rollouts])
    advantages = group_advantages(rewards, torch.tensor([r.prompt for r in rollouts]))
    totals = [sum(len(r.tokens) for r in rows) for rows in (rollouts, rehearsal)]
    loss = torch.zeros(())
    for rows, total, exploring in ((rollouts, totals[0], True), (rehearsal, totals[1], False)):
        for i, r in enumerate(rows):
            tokens = torch.tensor([r.prompt_tokens + r.tokens])
            table = torch.log_softmax(made.model.logits(made.model(tokens))[0], -1)
            for t, token in enumerate(r.tokens):
                u = torch.exp(table[len(r.prompt_tokens) + t - 1, token] - r.logprobs[t])
                if exploring:
                    a = advantages[i]
                    loss = loss - torch.min(u * a, u.clamp(0.8, 1.28) * a) / total
                else:
                    loss = loss + eta * 0.5 * (u * torch.log(2 * u / (1 + u)) + torch.log(2 / (1 + u))) / total
    return loss


@pytest.mark.parametrize("microbatch_tokens", [10**6, 40, 1])
def test_the_gradient_is_the_objectives_however_micro_batches_are_cut(tmp_path: Path, microbatch_tokens: int) -> None:
    made = trainer(tmp_path, *JS, f"--train.microbatch_tokens={microbatch_tokens}", "--optim.grad_clip=0")
    rollouts = [a.rollout for a in made.collector._sample(0, made.collector.explore[:4], 4, Counter(), Meter())]
    rehearsal = [
        Rollout(r.prompt, r.sample, r.prompt_tokens, r.tokens, [x - 0.3 for x in r.logprobs], True)
        for r in made.rehearsal
    ]
    expected = torch.autograd.grad(naive_objective(made, rollouts, rehearsal, 0.5), list(made.model.parameters()))
    found: list[torch.Tensor] = []
    made._optimize = lambda meter: found.extend(p.grad for p in made.model.parameters())  # type: ignore[method-assign, misc]
    rewards = torch.tensor([r.reward for r in rollouts])
    assert 0 < rewards.mean() < 1
    made._update(rollouts, group_advantages(rewards, torch.arange(4).repeat_interleave(4)), rehearsal, [], Meter())
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def test_rehearsal_at_the_reference_moves_nothing(tmp_path: Path) -> None:
    made = trainer(tmp_path, "--loss.divergence=forward_kl", "--loss.eta=1")
    before = weights(made)
    found: list[torch.Tensor] = []
    made._optimize = lambda meter: found.extend(p.grad for p in made.model.parameters())  # type: ignore[method-assign, misc]
    meter = Meter()
    made._update([], torch.zeros(0), made.rehearsal, [], meter)
    assert max(g.abs().max().item() for g in found) < 1e-5
    assert meter.means()["divergence"] == pytest.approx(0, abs=1e-10)
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
    assert rows[0]["sampler_gap"] < (0.2 if method == "bf16" else 1e-5), "the first ratio is 1"
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
    for mine, other in zip(straight.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], other[key]) for key in mine)


def test_a_log_ahead_of_its_checkpoint_is_cut_and_each_step_stands_once(tmp_path: Path) -> None:
    trainer(tmp_path, "--train.steps=2").run()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward": 9}\n{"step": 4, "rew')
    trainer(tmp_path, "--train.steps=4").run()
    assert [row["step"] for row in comparable(tmp_path)] == [1, 2, 3, 4]


def test_a_gradient_that_is_not_finite_changes_nothing_and_a_streak_stops(tmp_path: Path) -> None:
    made = trainer(tmp_path, *JS)
    made.train_step()
    before, moments = weights(made), [x.clone() for s in made.optimizer.state.values() for x in s.values()]
    broken = [
        Rollout(r.prompt, r.sample, r.prompt_tokens, r.tokens, [float("nan")] * len(r.tokens), True)
        for r in made.rehearsal
    ]
    meter = Meter()
    made._update([], torch.zeros(0), broken, [], meter)
    assert meter.means()["skipped_updates"] == 1
    assert torch.equal(before, weights(made))
    assert all(
        torch.equal(a, b)
        for a, b in zip(moments, (x for s in made.optimizer.state.values() for x in s.values()), strict=True)
    )
    made.state["step"] = 1
    made.train_step()
    assert not torch.equal(before, weights(made)), "the next update works"
    for _ in range(4):
        made._update([], torch.zeros(0), broken, [], meter)
    with pytest.raises(UserError, match="5 updates in a row"):
        made._update([], torch.zeros(0), broken, [], meter)


@pytest.mark.parametrize("pef", [0, 12])
def test_one_of_both_sets_may_be_empty(tmp_path: Path, pef: int) -> None:
    made = trainer(tmp_path, *JS, pef=pef)
    made.run()
    assert len(comparable(tmp_path)) == 4


def test_a_prompt_drawn_twice_makes_two_groups(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    some = made.collector.explore
    answers = made.collector._sample(0, [some[0], some[1], some[0]], 4, Counter(), Meter())
    assert [a.rollout.prompt for a in answers] == [0] * 4 + [1] * 4 + [0] * 4
    assert [a.rollout.tokens for a in answers[:4]] != [a.rollout.tokens for a in answers[8:]]


def test_the_order_is_endless_and_each_pass_holds_everything_once() -> None:
    order = shuffled(5, (0, 1), 0, 15)
    assert all(sorted(order[i : i + 5]) == [0, 1, 2, 3, 4] for i in (0, 5, 10))
    assert order[3:9] == shuffled(5, (0, 1), 3, 6)
    assert order != shuffled(5, (1, 1), 0, 15)


def test_passes_go_through_all_rollouts_again_and_leave_the_ratio_one_only_in_the_first(tmp_path: Path) -> None:
    made = trainer(tmp_path, "--train.updates_per_step=1", "--train.passes=3", "--optim.lr=1e-2")
    seen: list[int] = []
    update = made._update
    made._update = lambda rows, *rest: (seen.append(len(rows)), update(rows, *rest))[1]  # type: ignore[method-assign]
    metrics = made.train_step()
    assert seen == [16, 16, 16]
    assert made.state["updates"] == 3
    assert metrics["clip_high_fraction"] + metrics["clip_low_fraction"] > 0


def test_warm_up_is_linear(tmp_path: Path) -> None:
    made = trainer(tmp_path, "--optim.warmup_steps=4", "--optim.lr=4e-3")
    rates = [made.train_step()["lr"] for _ in range(1)]
    assert rates == pytest.approx([1.5e-3]), "mean of 1e-3 and 2e-3, two updates a step"


@pytest.mark.parametrize(("explore", "count"), [("exp", 8), ("all", 12)])
def test_exploration_is_of_d_exp_or_of_all_prompts(tmp_path: Path, explore: str, count: int) -> None:
    made = trainer(tmp_path, *JS, f"--train.explore={explore}", pef=4)
    assert len(made.collector.explore) == count
    assert {r.prompt for r in made.rehearsal} == {0, 1, 2, 3}
