"""The fast path is the plain one (dph/plain.py): samples, log-probabilities, loss and gradient, method by method."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dph import plain
from dph.answering import score_rollouts
from dph.config import Config, load_config
from dph.divergences import GENERATORS, make_divergence
from dph.losses import group_advantages
from dph.metrics import Meter
from dph.model import Decoder
from dph.objective import Objective
from dph.rollouts import Rollout, collate
from dph.sampler import SamplingSettings, _uniforms, sample
from dph.scoring import token_logprobs
from dph.tasks.base import Prompt
from dph.updates import MicroBatch, Optimizer, make_update
from examples import toy
from tests.helpers import tiny_model

END, LIMIT, G = (0, 3, 4), 12, 4
PROMPTS = [Prompt(0, tokens=[5, 6, 7]), Prompt(1, tokens=[8] * 9), Prompt(2, tokens=[5, 6])]
METHODS = {
    "grpo": (["loss.clip_high=0.2"], plain.Method()),
    "dapo": (["loss.clip_high=0.28"], plain.Method(clip_high=0.28)),
    "rkl_exact": (
        ["loss.divergence=reverse_kl", "loss.samples=own", "loss.penalty_estimator=exact"],
        plain.Method("reverse_kl", "own", "exact", clip_high=0.28),
    ),
    "rkl_k3": (
        ["loss.divergence=reverse_kl", "loss.samples=own", "loss.penalty_estimator=k3"],
        plain.Method("reverse_kl", "own", "k3", clip_high=0.28),
    ),
    "rkl_k3_importance": (
        ["loss.divergence=reverse_kl", "loss.samples=own", "loss.penalty_estimator=k3_importance"],
        plain.Method("reverse_kl", "own", "k3_importance", clip_high=0.28),
    ),
    "replay": (
        ["loss.divergence=forward_kl", "loss.divergence_form=plain"],
        plain.Method("plain_forward_kl", "stored", clip_high=0.28),
    ),
    "dph_js_definition": (
        ["loss.divergence=js", "loss.samples=both"],
        plain.Method("js", "both", clip_high=0.28),
    ),
    **{
        f"dph_{name}": ([f"loss.divergence={name}"], plain.Method(name, "stored", clip_high=0.28))
        for name in GENERATORS
    },
}


def settings(tau: float = 1.0) -> SamplingSettings:
    return SamplingSettings((0, 1), END, LIMIT, tau)


def rollouts_of(model: Decoder, numbers: Sequence[int], tau: float = 1.0) -> list[Rollout]:
    return sample(model, PROMPTS, [numbers] * len(PROMPTS), settings(tau))


@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_the_batched_sampler_writes_what_one_loop_over_tokens_writes(tau: float) -> None:
    model = tiny_model(dtype=torch.float64)
    for fast in rollouts_of(model, range(G), tau):
        uniforms = _uniforms((0, 1, fast.prompt, fast.sample), LIMIT)
        slow = plain.sample(model, fast.prompt_tokens, uniforms, END, LIMIT, tau)
        assert slow.tokens == fast.tokens
        torch.testing.assert_close(slow.logprobs, torch.tensor(fast.logprobs).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_scores_are_the_full_softmax_at_the_sampling_temperature(tau: float) -> None:
    model = tiny_model(dtype=torch.float64)
    rollouts = rollouts_of(model, range(G))
    batch = collate(rollouts, "cpu")
    scores = token_logprobs(model, batch, tau, entropy=True)
    assert scores.entropy is not None
    scored = score_rollouts(model, rollouts, tau, budget=40)
    for row, rollout in enumerate(rollouts):
        expected = plain.answer_logprobs(model, rollout.prompt_tokens, rollout.tokens, tau).detach()
        torch.testing.assert_close(scores.logprobs[row, : len(expected)].detach(), expected)
        torch.testing.assert_close(torch.tensor(scored[row].logprobs).double(), expected, atol=1e-6, rtol=1e-6)
        table = plain.next_token_logprobs(model, rollout.prompt_tokens + rollout.tokens, tau)
        table = table[len(rollout.prompt_tokens) - 1 : -1].detach()
        torch.testing.assert_close(scores.entropy[row, : len(table)].detach(), -(table.exp() * table).sum(-1))
    assert not scores.logprobs[~batch.mask].any()


class Scene:
    """A policy that has moved, its old rollouts with rewards, answers stored before, and new ones to their prompts."""

    def __init__(self) -> None:
        self.model = tiny_model(dtype=torch.float64)
        near, reference = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64)
        with torch.no_grad():
            for old, new in ((near, 0.02), (reference, 0.05)):
                for weight in old.parameters():
                    weight += new * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        self.rollouts = rollouts_of(near, range(G))
        for number, rollout in enumerate(self.rollouts):
            rollout.reward = float(number in (0, 2, 3, 5))  # the third group has no variance
        self.stored = rollouts_of(reference, range(10, 12))
        self.pef_rollouts = rollouts_of(near, range(20, 22))
        for kind in (self.rollouts, self.pef_rollouts):
            for rollout, scored in zip(kind, score_rollouts(reference, kind, 1.0, 100), strict=True):
                rollout.ref_logprobs = scored.logprobs
        rewards = torch.tensor([rollout.reward for rollout in self.rollouts], dtype=torch.float64)
        self.advantages = group_advantages(rewards, torch.arange(len(rewards)) // G)


def config_of(options: list[str], microbatch_tokens: int) -> Config:
    more = ["loss.alpha=0.3", "loss.skew=0.3", f"train.microbatch_tokens={microbatch_tokens}"]
    if any("divergence" in option for option in options):
        more.append("loss.eta=0.5")
    return load_config(None, [f"--{option}" for option in (*options, *more)])


def plain_answers(rollouts: list[Rollout]) -> list[plain.Answer]:
    """The same in the plain form; advantages come group by group."""
    answers = []
    for rollout in rollouts:
        ref = torch.tensor(rollout.ref_logprobs or [], dtype=torch.float64)
        logprobs = torch.tensor(rollout.logprobs, dtype=torch.float64)
        answers.append(plain.Answer(rollout.prompt_tokens, rollout.tokens, logprobs, ref, rollout.reward))
    for start in range(0, len(answers), G):
        group = answers[start : start + G]
        for answer, advantage in zip(group, plain.advantages([a.reward for a in group]), strict=True):
            answer.advantage = advantage
    return answers


@pytest.mark.parametrize("microbatch_tokens", [10**6, 40, 1])
@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradient_are_the_plain_ones_however_micro_batches_are_cut(
    method: str, microbatch_tokens: int
) -> None:
    options, slow = METHODS[method]
    scene, config = Scene(), config_of(options, microbatch_tokens)
    uses_stored, answers_again = config.loss.uses_stored_answers, config.loss.answers_pef_prompts
    stored = scene.stored if uses_stored else []
    pef_rollouts = scene.pef_rollouts if answers_again else []

    slow.eta, slow.setting = 0.5, 0.3
    expected = plain.total_loss(
        scene.model, slow, plain_answers(scene.rollouts), plain_answers(stored), plain_answers(pef_rollouts)
    )
    gradient = torch.autograd.grad(expected, list(scene.model.parameters()))

    objective = Objective(scene.model, config)
    update = make_update(config, scene.rollouts, scene.advantages, stored, pef_rollouts)
    total = torch.zeros((), dtype=torch.float64)
    for attempt in Optimizer(scene.model, config).attempts(update):
        with attempt as micro_batches:
            for micro in micro_batches:
                loss = objective.loss(micro, Meter())
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
    assert max(float(g.abs().max()) for g in gradient) > 1e-3
    for weight, wanted in zip(scene.model.parameters(), gradient, strict=True):
        torch.testing.assert_close(weight.grad, wanted, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(total, expected.detach(), atol=1e-7, rtol=1e-6)


def test_one_micro_batch_may_hold_every_kind_of_row() -> None:
    """The objective's three batches side by side give what one after another gives."""
    options, _ = METHODS["dph_js_definition"]
    scene, config = Scene(), config_of(options, 10**6)
    update = make_update(config, scene.rollouts, scene.advantages, scene.stored, scene.pef_rollouts)
    objective = Objective(scene.model, config)
    (attempt,) = Optimizer(scene.model, config).attempts(update)
    with attempt as micro_batches:
        parts = list(micro_batches)
    first, second, third = parts
    together = MicroBatch(first.denominators, first.rollouts, first.advantages, second.stored, third.pef_rollouts)
    apart = sum(objective.loss(part, Meter()).item() for part in parts)
    assert objective.loss(together, Meter()).item() == pytest.approx(apart, rel=1e-9)


@pytest.mark.parametrize("name", GENERATORS)
def test_the_plain_generators_are_the_generators(name: str) -> None:
    log_u = torch.linspace(-4, 4, 41, dtype=torch.float64)
    fast = make_divergence(name, alpha=0.3, skew=0.3)
    torch.testing.assert_close(plain.f(log_u.exp(), name, 0.3), fast.f(log_u))
    torch.testing.assert_close(plain.f_prime(log_u.exp(), name, 0.3), fast.derivative(log_u))


def test_a_generator_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match="no generator is called 'kl'"):
        plain.f(torch.ones(1), "kl", 0.5)


def test_the_toy_trains_with_the_plain_method(capsys: pytest.CaptureFixture[str]) -> None:
    table = toy.main(steps=12, base_steps=300)
    assert "D_pef: n = [3" in capsys.readouterr().out
    assert table["dph_f"][1][0] > table["base"][1][0], "right more often where the base was not"
    assert table["dph_f"][0][0] > 0.8, "and still right where it was"


def test_the_plain_file_is_short() -> None:
    text = (Path(plain.__file__)).read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line.strip()]) < 230
