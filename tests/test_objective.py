"""The whole objective (E8, E9, E10, levels): each loss by enumeration or by hand, each method by a step of training."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dph import divergences, losses, scoring
from dph.collector import overlong_penalty
from dph.config import load_config
from dph.divergences import make_divergence
from dph.errors import UserError
from dph.metrics import Meter
from dph.model_folder import load_model
from dph.tasks.base import Reward
from tests.test_presampling import make
from tests.test_trainer import JS, comparable, rehearse, trainer, weights

HERE = torch.ones(1, 1, dtype=torch.bool)


def policies(size: int = 2) -> tuple[Tensor, Tensor]:
    """Logits of pi_theta, log pi_ref: (.9, .1) and (.5, .5), or random ones over `size` tokens."""
    if size == 2:
        return torch.tensor([0.9, 0.1], dtype=torch.float64).log().requires_grad_(), torch.full(
            (2,), 0.5, dtype=torch.float64
        ).log()
    torch.manual_seed(size)
    return torch.randn(size, dtype=torch.float64).mul(2).requires_grad_(), torch.randn(
        size, dtype=torch.float64
    ).log_softmax(0)


# E8: the Jensen-Shannon divergence by its definition


@pytest.mark.parametrize("size", [2, 5])
def test_the_two_halves_of_js_have_the_generators_gradient(size: int) -> None:
    logits, ref = policies(size)
    logprobs, mask = logits.log_softmax(0)[:, None], torch.ones(size, 1, dtype=torch.bool)
    first = (ref.exp()[:, None] * losses.js_reference_half(logprobs, ref[:, None], mask)).sum()
    second = (logprobs.detach().exp() * losses.js_own_half(logprobs, logprobs.detach(), ref[:, None], mask, 2.0)).sum()
    generator = (ref.exp() * make_divergence("js").f(logits.log_softmax(0) - ref)).sum()
    halves = torch.autograd.grad(first + second, logits, retain_graph=True)[0]
    torch.testing.assert_close(halves, torch.autograd.grad(generator, logits)[0])
    if size == 2:
        assert halves[0].item() == pytest.approx(0.0607467, abs=1e-7)


def test_the_reference_half_is_its_value_and_the_naive_own_half_cancels_it() -> None:
    logits, ref = policies()
    logprobs = logits.log_softmax(0)
    m = (logprobs.exp() + ref.exp()) / 2
    half = (
        ref.exp()[:, None] * losses.js_reference_half(logprobs[:, None], ref[:, None], torch.ones(2, 1).bool())
    ).sum()
    assert half.item() == pytest.approx(0.5 * (ref.exp() * (ref - m.log())).sum().item())
    log_u = logprobs - ref
    g = math.log(2) + log_u - torch.nn.functional.softplus(log_u)
    naive = 0.5 * (logprobs.detach().exp() * g).sum()  # autograd through g on own samples: the trap
    total = torch.autograd.grad(half + naive, logits)[0]
    assert total.abs().max().item() == pytest.approx(0, abs=1e-12)


def test_js_by_definition_trains_with_an_online_reference(tmp_path: Path) -> None:
    made = trainer(tmp_path, "--loss.divergence=js", "--loss.samples=both", "--loss.eta=0.5", "--train.steps=2")
    before = weights(made)
    made.run()
    assert not torch.equal(before, weights(made))
    assert made.collector.reference is not None
    experience = made.collector.collect(made.state, made.stored[:4], Meter())
    assert len(experience.pef_rollouts) == 4
    assert all(r.ref_logprobs is not None for r in experience.pef_rollouts)
    assert {r.prompt for r in experience.pef_rollouts} <= {0, 1, 2, 3}, "these answers are to prompts of D_pef"


# E10: stored distributions


def distribution_loss(logits: Tensor, ref: Tensor, k: int, name: str) -> Tensor:
    """E10 at one position, through the scorer: a model of one state whose logits these are."""
    ids = ref.topk(k).indices[None]
    head = scoring._Head.apply(logits.new_ones(1, 1), logits[:, None], ids[:, [0, *range(k)]], False)  # type: ignore[no-untyped-call]
    top, rest = head[0][:, 1:], head[1]
    others = ref.clone()
    others[ids[0]] = -math.inf
    divergence = make_divergence(name, alpha=0.3, skew=0.2)
    ref_top, ref_rest = ref[ids], others.logsumexp(0)[None]
    return losses.stored_distribution_loss(top[None], rest[None], ref_top[None], ref_rest[None], HERE, divergence)[0, 0]


@pytest.mark.parametrize(
    ("forgotten", "value"), [(1e-4, 3.9120730), (1e-6, 6.2146081), (1e-7, 7.3659008), (1e-12, 13.1223634)]
)
def test_the_rest_keeps_its_value_and_its_pull_however_little_of_it_is_left(forgotten: float, value: float) -> None:
    """ref (.5, .5), K = 1: pi_theta(rest) = 1e-12 in fp32, by logits that hold it; exact value and gradient .5."""
    logits = torch.tensor([math.log1p(-forgotten), math.log(forgotten)], requires_grad=True)
    ref = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    theta = torch.tensor([1 - forgotten, forgotten], dtype=torch.float64)
    assert float((ref.exp() * make_divergence("forward_kl").f(theta.log() - ref)).sum()) == pytest.approx(value)
    loss = distribution_loss(logits, ref.float(), 1, "forward_kl")
    assert loss.item() == pytest.approx(value, rel=1e-3)
    gradient = torch.autograd.grad(loss, logits)[0]
    assert gradient.tolist() == pytest.approx([0.5 - forgotten, -0.5 + forgotten], rel=1e-3)


def test_a_rest_of_a_twentieth_behind_four_tokens_keeps_its_pull_too() -> None:
    ref = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.03, 0.02], dtype=torch.float64).log()
    theta = torch.tensor([0.4, 0.3, 0.2, 0.1 - 1e-9, 6e-10, 4e-10], dtype=torch.float64).log()
    double, single = theta.clone().requires_grad_(), theta.float().requires_grad_()
    exact = torch.autograd.grad(distribution_loss(double, ref, 4, "forward_kl"), double)[0]
    assert exact[4:].sum().item() == pytest.approx(-0.05, rel=1e-5)
    found = torch.autograd.grad(distribution_loss(single, ref.float(), 4, "forward_kl"), single)[0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", list(divergences.GENERATORS))
def test_stored_distributions_never_exceed_the_divergence_and_rise_to_it(name: str) -> None:
    logits, ref = policies(9)
    full = (ref.exp() * make_divergence(name, alpha=0.3, skew=0.2).f(logits.log_softmax(0) - ref)).sum().item()
    values = [distribution_loss(logits, ref, k, name).item() for k in range(1, 9)]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise([*values, full]))
    assert values[-1] == pytest.approx(full, rel=1e-6)


@pytest.mark.parametrize("name", ["forward_kl", "js"])
def test_stored_distributions_give_the_exact_gradient_at_full_width(name: str) -> None:
    logits, ref = policies(9)
    full = (ref.exp() * make_divergence(name).f(logits.log_softmax(0) - ref)).sum()
    stored = torch.autograd.grad(distribution_loss(logits, ref, 8, name), logits, retain_graph=True)[0]
    torch.testing.assert_close(stored, torch.autograd.grad(full, logits)[0], rtol=1e-6, atol=1e-8)


def test_a_reference_sure_of_one_token_leaves_everything_finite() -> None:
    logits = torch.tensor([30.0, 0.0, 0.0], requires_grad=True)
    loss = distribution_loss(logits, torch.tensor([0.0, -50.0, -60.0]), 2, "forward_kl")
    assert math.isfinite(loss.item())
    assert torch.isfinite(torch.autograd.grad(loss, logits)[0]).all()


# Levels


@pytest.mark.parametrize(("name", "equal"), [("forward_kl", True), ("js", False), ("squared_hellinger", False)])
def test_the_sum_over_tokens_is_the_sequences_divergence_for_the_forward_kl_alone(name: str, equal: bool) -> None:
    """Three tokens, length three, states that depend on all before: 27 sequences, enumerated."""
    torch.manual_seed(0)
    tables = {
        prefix: (torch.randn(3, dtype=torch.float64).log_softmax(0), torch.randn(3, dtype=torch.float64).log_softmax(0))
        for length in range(3)
        for prefix in itertools.product(range(3), repeat=length)
    }
    sequences = list(itertools.product(range(3), repeat=3))
    theta, ref = (
        torch.stack([torch.stack([tables[s[:t]][which][s[t]] for t in range(3)]) for s in sequences])
        for which in (0, 1)
    )
    mask, chance, divergence = torch.ones(27, 3, dtype=torch.bool), ref.sum(1).exp(), make_divergence(name)
    by_token = (chance * losses.rehearsal_loss(theta, ref, mask, divergence).sum(1)).sum().item()
    exact = (chance * divergence.f(theta.sum(1) - ref.sum(1))).sum().item()
    assert (by_token == pytest.approx(exact)) is equal


def test_the_u_of_a_whole_answer_has_a_gradient_without_bound_which_is_why_it_is_not_offered() -> None:
    """js, log u = .59 a token, 300 tokens: one token's gradient through the product, and through its own u."""
    log_u = torch.full((300,), 0.59, dtype=torch.float64, requires_grad=True)
    js = make_divergence("js")
    whole = torch.autograd.grad(js.f(log_u.sum()), log_u)[0]
    assert whole[0] > 1e30
    assert torch.autograd.grad(js.f(log_u).sum(), log_u)[0].max() < 1
    with pytest.raises(UserError, match=r"loss\.level is gone"):
        load_config(None, ["--loss.level=sequence"])


# Own samples of an older policy


@pytest.mark.parametrize(
    ("loss", "gradient"),
    [("exact", 0.1977502), ("k3", 0.4), ("k3_importance", 0.1977502), ("js_own_half", 0.0393181)],
)
def test_penalties_on_samples_of_an_older_policy_have_the_gradient_of_the_present_one(
    loss: str, gradient: float
) -> None:
    """theta (.9, .1), ref (.5, .5), samples of old (.7, .3): the ratios 9/7 and 1/3 stay below the cap."""
    logits, ref = policies()
    old = torch.tensor([0.7, 0.3], dtype=torch.float64).log()
    logprobs, mask = logits.log_softmax(0)[:, None], torch.ones(2, 1, dtype=torch.bool)
    if loss == "js_own_half":
        values = losses.js_own_half(logprobs, old[:, None], ref[:, None], mask, 2.0)
    else:
        reverse_kl = make_divergence("reverse_kl")
        values = losses.penalty_loss(logprobs, old[:, None], ref[:, None], mask, reverse_kl, loss, 2.0)
    found = torch.autograd.grad((old.exp()[:, None] * values).sum(), logits)[0]
    assert found[0].item() == pytest.approx(gradient, abs=1e-7)


def test_importance_weights_are_the_ratio_up_to_the_cap_and_carry_no_gradient() -> None:
    logprobs = torch.tensor([[0.5, 1.0, 3.0]]).log().requires_grad_()
    weights = losses.importance_weights(logprobs, torch.zeros(1, 3), torch.ones(1, 3).bool(), 2.0)
    assert weights.tolist()[0] == pytest.approx([0.5, 1.0, 2.0])
    assert not weights.requires_grad


# E9: the baselines


@pytest.mark.parametrize(("length", "penalty"), [(5, 0.0), (8, 0.0), (9, -0.5), (10, -1.0)])
def test_the_overlong_penalty(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=10, buffer=2) == pytest.approx(penalty)
    assert overlong_penalty(length, limit=10, buffer=0) == 0


def test_dynamic_sampling_replaces_groups_without_variance_and_counts_its_cost(tmp_path: Path) -> None:
    made = trainer(
        tmp_path, "--train.dynamic_sampling=5", "--train.prompts_per_step=3", "--train.responses_per_prompt=2"
    )
    meter = Meter()
    experience = made.collector.collect(made.state, [], meter)
    rewards = torch.tensor([rollout.reward for rollout in experience.rollouts]).view(-1, 2)
    assert (rewards[:, 0] != rewards[:, 1]).all()
    assert meter.means()["sampling_rounds"] > 1
    assert made.state.drawn > 3


def test_dynamic_sampling_asks_the_grader_not_the_reward_that_a_penalty_has_shaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wrong, of unequal length, and the overlong penalty makes their rewards differ: no group may stay."""
    made = trainer(tmp_path, "--train.dynamic_sampling=1", "--train.overlong_buffer=7", "--train.steps=1")
    monkeypatch.setattr(type(made.collector.task), "rewards", lambda self, pairs: [Reward.of("wrong") for _ in pairs])
    experience = made.collector.collect(made.state, [], Meter())
    assert experience.rollouts == []


def test_dynamic_sampling_gives_up_after_its_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, "--train.dynamic_sampling=2", "--train.steps=1")
    monkeypatch.setattr(type(made.collector.task), "rewards", lambda self, pairs: [Reward.of("wrong") for _ in pairs])
    before = weights(made)
    made.run()
    row = comparable(tmp_path)[0]
    assert row["sampling_gave_up"] == 1
    assert row["sampling_rounds"] == 3
    assert "reward" not in row, "there is no mean of nothing"
    assert "length" not in row
    assert row["pass_rate"] == 0
    assert torch.equal(before, weights(made))


def test_the_overlong_penalty_lowers_rewards_but_not_the_pass_rate(tmp_path: Path) -> None:
    plain, shaped = (
        trainer(tmp_path / name, *more).train_step() for name, more in (("a", []), ("b", ["--train.overlong_buffer=4"]))
    )
    assert shaped["pass_rate"] == plain["pass_rate"]
    assert shaped["reward"] < plain["reward"]


def test_the_entropy_bonus_raises_the_entropy(tmp_path: Path) -> None:
    ends = []
    for bonus in (0.0, 0.5):
        made = trainer(tmp_path / str(bonus), f"--loss.entropy={bonus}", "--train.steps=6", "--optim.lr=3e-3")
        made.run()
        ends.append(comparable(tmp_path / str(bonus))[-1]["entropy"])
    assert ends[1] > ends[0] + 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss.samples=both", "--loss.divergence=forward_kl"], "definition of loss.divergence = 'js'"),
        (["--presample.top_k=4"], "is now called presample.stored_top_k"),
        (["--train.overlong_buffer=512"], "below sampling.max_new_tokens"),
        (["--loss.samples=own", "--loss.divergence=js"], "needs loss.penalty_estimator = 'exact'"),
    ],
)
def test_combinations_without_meaning_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(None, arguments)


OLD, NEW, REF = [-1.5, -2.0], [-1.0, -2.0], [-1.2, -2.5]  # rho = e^.5, 1; log u = .2, .5
HAND_COMPUTED = {
    "grpo": -(1.2 + 1) / 2,
    "dapo": -(1.28 + 1) / 2,
    "rkl_k3": (1.6487213 * 0.0187308 + 0.1065307) / 2,
    "rkl_k3_importance": (1.6487213 * 0.0187308 + 0.1065307) / 2,
    "rkl_exact": (1.6487213 * 0.2 * -1 + 0.5 * -2) / 2,
    "replay": -(0.2 + 0.5) / 2,
    "dph_f": (0.0214028 + 0.1487213) / 2,
    "dph_js": (0.0055258 + 0.0401280) / 2,
    "dph_alpha": (0.0221218 + 0.1613409) / 2,
    "dph_js_definition": -(0.1049917 + 0.2809298) / 4,
}


@pytest.mark.parametrize("method", HAND_COMPUTED)
def test_each_baselines_loss_on_a_batch_computed_by_hand(method: str) -> None:
    """One row of two tokens with A = 1, token-mean."""
    old, new, ref = (torch.tensor([x], dtype=torch.float64) for x in (OLD, NEW, REF))
    mask, one = torch.ones(1, 2, dtype=torch.bool), torch.ones(1)
    name, _, estimator = method.partition("_")
    if method in ("grpo", "dapo"):
        values = losses.clipped_loss(new, old, one, mask, 0.2, 0.2 if method == "grpo" else 0.28)
    elif name == "rkl":
        values = losses.penalty_loss(new, old, ref, mask, make_divergence("reverse_kl"), estimator, 10.0)
    elif method == "dph_js_definition":
        values = losses.js_reference_half(new, ref, mask)
    else:
        generators = {"replay": "forward_kl", "dph_f": "forward_kl", "dph_js": "js", "dph_alpha": "alpha"}
        form = "plain" if method == "replay" else "standard"
        divergence = make_divergence(generators[method], alpha=0.5, divergence_form=form)
        values = losses.rehearsal_loss(new, ref, mask, divergence)
    total = losses.denominator(torch.tensor([2]), "token-mean")
    assert losses.aggregate(values, mask, "token-mean", total).item() == pytest.approx(HAND_COMPUTED[method], abs=1e-6)


# Recorded rollouts


@pytest.mark.parametrize("method", ["plain", "js"])
def test_a_replayed_run_is_the_recorded_one_bit_for_bit(tmp_path: Path, method: str) -> None:
    more = JS if method == "js" else []
    recorded = trainer(tmp_path / "a", *more, "--train.record_rollouts=true")
    recorded.run()
    stored = load_file(tmp_path / "a/run/rollouts/step-1.safetensors")
    assert len(stored["rollouts.reward"]) == 16
    replayed = trainer(tmp_path / "b", *more, recorded=tmp_path / "a/run")
    replayed.collector._sample = None  # type: ignore[method-assign, assignment]
    replayed.run()
    assert torch.equal(weights(recorded), weights(replayed))


def test_two_losses_see_the_same_recorded_data(tmp_path: Path) -> None:
    trainer(tmp_path / "a", "--train.record_rollouts=true").run()
    other = trainer(tmp_path / "b", "--loss.clip_high=0.01", "--loss.clip_low=0.01", recorded=tmp_path / "a/run")
    other.run()
    rewards = [[row["reward"] for row in comparable(tmp_path / name)] for name in ("a", "b")]
    assert rewards[0] == rewards[1]
    beyond = trainer(tmp_path / "c", "--train.steps=9", recorded=tmp_path / "a/run")
    with pytest.raises(UserError, match=r"step-5\.safetensors: no recorded rollouts"):
        beyond.run()


def test_recorded_rollouts_are_never_taken_for_the_policys_own(tmp_path: Path) -> None:
    """Also where a step is one update: another loss has led the policy away from the one that wrote them."""
    trainer(tmp_path / "a", "--train.record_rollouts=true").run()
    narrow = ["--loss.clip_high=0.001", "--loss.clip_low=0.001", "--train.updates_per_step=1", "--optim.lr=1e-2"]
    trainer(tmp_path / "b", *narrow, recorded=tmp_path / "a/run").run()
    rows = comparable(tmp_path / "b")
    assert rows[-1]["clip_low_fraction"] + rows[-1]["clip_high_fraction"] > 0.1


# A new generator in one place


def test_a_new_generator_is_found_by_configs_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergences, "GENERATORS", dict(divergences.GENERATORS))

    @divergences.generator("vincze_le_cam")
    def vincze_le_cam(log_u: Tensor) -> divergences.Pair:
        """f(u) = (u - 1)^2 / (u + 1)."""
        u = torch.exp(log_u)
        return (u - 1) ** 2 / (u + 1), 1 - 4 / (u + 1) ** 2

    made = trainer(tmp_path, "--loss.divergence=vincze_le_cam", "--loss.eta=0.5", "--train.steps=2")
    before = weights(made)
    made.run()
    assert not torch.equal(before, weights(made))


def test_presampling_stores_distributions_and_training_uses_them(tmp_path: Path) -> None:
    partition, *_ = make(tmp_path, "--presample.stored_top_k=7")
    for r in partition.rehearsal:
        assert r.top is not None
        ids, logprobs, rest = r.top
        assert ids.shape == logprobs.shape == (len(r.tokens), 7)
        torch.testing.assert_close(rest.exp() + logprobs.exp().sum(-1), torch.ones(len(r.tokens)), atol=1e-5, rtol=0)
        among = (ids == torch.tensor(r.tokens)[:, None]).any(1)
        found = logprobs[ids == torch.tensor(r.tokens)[:, None]]
        torch.testing.assert_close(found, torch.tensor(r.logprobs)[among], atol=1e-5, rtol=0)
    made = trainer(tmp_path / "t", *JS)
    made.policy.model.load_state_dict(load_model(tmp_path / "model").state_dict())
    metrics = rehearse(made, partition.rehearsal)
    assert metrics["divergence"] == pytest.approx(0, abs=1e-6), "nothing has moved from the reference yet"
    for _ in range(5):
        rehearse(made, partition.rehearsal)
