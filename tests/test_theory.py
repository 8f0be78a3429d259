"""docs/theory.md made checkable: every step of it names its tests here.

Letters are the document's: g(s) = E_{a ~ pi} A_old(s, a), epsilon = max |A_old|, alpha = the largest total variation
between pi and pi_old over states, alpha_1 the largest KL, x = delta / epsilon, d a normalised discounted occupancy.
"""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dph.divergences import Divergence, make_divergence
from tests.tabular import (
    MDP,
    ROUNDING,
    Step,
    at_most,
    attack,
    drift,
    f_divergence,
    gain,
    generator,
    greedier,
    near_perfect,
    pair,
    random_mdps,
    scene,
    simplex,
    smallest,
    steps,
    surviving,
    tilt,
    total_variation,
    two_rooms,
)

# ------------------------------------------------------------------------------------ 1: the setting


def test_the_improvement_is_the_new_occupancys_mean_gain() -> None:
    for step in steps():
        d = step.mdp.occupancy(step.new)
        torch.testing.assert_close(d.sum(-1), torch.ones_like(step.gamma))
        torch.testing.assert_close((d * step.g).sum(-1) / (1 - step.gamma), step.improvement, rtol=1e-8, atol=1e-8)


def test_the_old_policy_gains_nothing_in_any_state() -> None:
    mdp, old = random_mdps(generator(), 300), simplex(generator(1), 300, 4, 3)
    assert gain(old, mdp.advantages(old)).abs().max() < ROUNDING


def test_the_surrogate_touches_j_in_value_and_in_gradient() -> None:
    mdp, logits = random_mdps(generator(), 50), torch.randn(50, 4, 3, dtype=torch.float64, generator=generator(1))
    old, logits = logits.softmax(-1), logits.requires_grad_()
    j, surrogate = mdp.objective(logits.softmax(-1)), mdp.surrogate(logits.softmax(-1), old)
    torch.testing.assert_close(surrogate, j)
    torch.testing.assert_close(*(torch.autograd.grad(value.sum(), logits)[0] for value in (j, surrogate)))


# ------------------------------------------------------------------------------------ 2: the classical bound


def test_a_gain_is_at_most_twice_epsilon_times_total_variation() -> None:
    for step in steps():
        assert at_most(step.g.abs(), 2 * step.epsilon[:, None] * step.distances)


def test_occupancies_differ_by_at_most_gamma_alpha_over_one_minus_gamma() -> None:
    for step in steps():
        moved = total_variation(step.mdp.occupancy(step.new), step.mdp.occupancy(step.old))
        assert at_most(moved, step.gamma * step.alpha / (1 - step.gamma))


def test_the_classical_bound_holds_in_total_variation_and_in_both_kls() -> None:
    for step in steps():
        assert at_most(step.shortfall, step.tv_penalty)
        assert all(at_most(step.shortfall, step.kl_penalty(alpha_1)) for alpha_1 in step.alpha_1())


@pytest.mark.parametrize("gamma", [0.3, 0.7])
def test_an_attack_by_gradient_stays_below_the_classical_bound(gamma: float) -> None:
    assert 0.35 < attack(gamma, lambda step: step.tv_penalty) <= 1


def test_the_constant_four_and_the_square_of_the_horizon_are_needed() -> None:
    step = drift(gamma=0.9, alpha=1e-5)
    assert 0.999 < step.shortfall / step.tv_penalty <= 1, "with 3.99 in place of 4 the bound would be false"
    assert step.shortfall > 9 * step.tv_penalty * (1 - step.gamma), "and with 1/(1-gamma) in place of its square"


def test_the_kl_form_is_not_tight_because_kl_adds_along_a_path() -> None:
    for step in steps():
        for alpha_1 in step.alpha_1():
            assert at_most(step.shortfall, step.path_penalty(alpha_1))
            assert torch.equal(step.path_penalty(alpha_1) < step.kl_penalty(alpha_1), step.gamma > 0.5)
    assert 0.3 < attack(0.9, lambda step: step.path_penalty(torch.minimum(*step.alpha_1()))) <= 1


# ------------------------------------------------------------------------------------ 3: D_f against total variation


def k(x: float) -> float:
    """KL((1+x)/2 || 1/2) = log 2 - entropy of (1+x)/2."""
    return 0.5 * ((1 + x) * math.log1p(x) + (1 - x) * math.log1p(-x))


@dataclass(frozen=True)
class Case:
    """A generator, f''(1), and the largest alpha_2 that leaves something of delta, as a function of x."""

    name: str
    curvature: float
    threshold: Callable[[float], float]
    setting: float = 0.5  # alpha's alpha and skew_js's skew

    @property
    def label(self) -> str:
        return f"{self.name}({self.setting})" if self.name in ("alpha", "skew_js") else self.name

    @property
    def divergence(self) -> Divergence:
        return make_divergence(self.name, alpha=self.setting, skew=self.setting)


def alpha_threshold(a: float) -> Callable[[float], float]:
    return lambda x: (1 - 0.5 * ((1 + x) ** a + (1 - x) ** a)) / (a * (1 - a))


SMOOTH = [
    Case("forward_kl", 1, k),
    Case("reverse_kl", 1, lambda x: -0.5 * math.log1p(-x * x)),
    Case("js", 1 / 4, lambda x: 0.5 * k(x) - k(x / 2)),
    Case("alpha", 1, alpha_threshold(0.5)),
    Case("alpha", 1, alpha_threshold(0.2), 0.2),
    Case("alpha", 1, alpha_threshold(0.8), 0.8),
    Case("jeffreys", 2, lambda x: x * math.atanh(x)),
    Case("squared_hellinger", 1 / 2, lambda x: 2 - math.sqrt(1 + x) - math.sqrt(1 - x)),
    Case("pearson_chi2", 2, lambda x: x * x / (1 - x * x)),
    Case("neyman_chi2", 2, lambda x: x * x),
    Case("skew_js", 0.16, lambda x: 0.8 * k(x) - k(0.8 * x), 0.2),
]
ALL = [*SMOOTH, Case("total_variation", 0, lambda x: x / 2)]
label = operator.attrgetter("label")
smooth = pytest.mark.parametrize("case", SMOOTH, ids=label)
every = pytest.mark.parametrize("case", ALL, ids=label)


@every
def test_merging_actions_never_raises_a_divergence(case: Case) -> None:
    p, q, kernel = simplex(generator(), 2000, 5), simplex(generator(1), 2000, 5), simplex(generator(2), 2000, 5, 2)
    merged = [torch.einsum("na,nab->nb", policy, kernel) for policy in (p, q)]
    assert at_most(f_divergence(case.divergence, *merged), f_divergence(case.divergence, p, q))


@smooth
def test_f_lies_above_a_parabola_over_a_line(case: Case) -> None:
    one = torch.ones((), dtype=torch.float64, requires_grad=True)
    (f1,) = torch.autograd.grad(case.divergence.f(one.log()), one, create_graph=True)
    (f2,) = torch.autograd.grad(f1, one, create_graph=True)
    (f3,) = torch.autograd.grad(f2, one)
    slope = -f3.item() / (3 * case.curvature)
    assert f2.item() == pytest.approx(case.curvature)
    assert -ROUNDING <= slope <= 1 + ROUNDING
    u = torch.logspace(-9, 9, 4001, dtype=torch.float64)
    left, right = case.divergence.f(u.log()) * (1 + slope * (u - 1)), case.curvature / 2 * (u - 1) ** 2
    assert bool((left >= right * (1 - 1e-6)).all())


@smooth
def test_total_variation_squared_times_twice_the_curvature_is_below_and_no_larger_constant_is(case: Case) -> None:
    p, q = simplex(generator(), 5000, 4), simplex(generator(1), 5000, 4)
    assert at_most(2 * case.curvature * total_variation(p, q) ** 2, f_divergence(case.divergence, p, q))
    t = 1e-3
    two = [pair(torch.tensor(0.5 + sign * t / 2, dtype=torch.float64)) for sign in (1, -1)]
    assert f_divergence(case.divergence, *two) < 2.001 * case.curvature * t * t


EXACT_RANGE: dict[str, Callable[[float], float]] = {
    "js": k,
    "squared_hellinger": lambda t: 2 - 2 * math.sqrt(1 - t * t),
    "alpha": lambda t: 4 - 4 * math.sqrt(1 - t * t),  # alpha = 1/2
    "jeffreys": lambda t: 2 * t * math.log((1 + t) / (1 - t)),
    "pearson_chi2": lambda t: 4 * t * t if t <= 0.5 else t / (1 - t),
    "neyman_chi2": lambda t: 4 * t * t if t <= 0.5 else t / (1 - t),
    "total_variation": lambda t: t,
}


@pytest.mark.parametrize("name", EXACT_RANGE)
@pytest.mark.parametrize("t", [0.1, 0.5, 0.8])
def test_the_exact_range_on_two_outcomes(name: str, t: float) -> None:
    q = torch.linspace(1e-9, 1 - t - 1e-9, 20001, dtype=torch.float64)
    smallest = f_divergence(make_divergence(name, alpha=0.5), pair(q + t), pair(q)).min()
    assert float(smallest) == pytest.approx(EXACT_RANGE[name](t), rel=1e-6)


# ------------------------------------------------------------------------------------ 4: how much of delta survives


def test_two_policies_gains_differ_by_at_most_the_span_times_their_total_variation() -> None:
    pef, new, advantages = scene()
    span = advantages.amax(-1) - advantages.amin(-1)
    difference = (gain(new, advantages) - gain(pef, advantages)).abs()
    assert at_most(difference, span * total_variation(new, pef))
    assert at_most(span, torch.full_like(span, 2.0))
    assert (difference / (span * total_variation(new, pef))).max() > 0.999


@every
def test_the_surviving_gain_is_a_lower_bound(case: Case) -> None:
    pef, new, advantages = scene()
    budget = f_divergence(case.divergence, new, pef)
    assert at_most(surviving(case.divergence, gain(pef, advantages), budget), gain(new, advantages))


@every
def test_the_surviving_gain_is_attained_on_two_actions(case: Case) -> None:
    x, budget = torch.tensor(0.6, dtype=torch.float64), torch.tensor(0.05, dtype=torch.float64)
    q = torch.linspace(0, 1, 200001, dtype=torch.float64)
    p = (1 + x) / 2
    allowed = f_divergence(case.divergence, pair(q), pair(p.expand_as(q))) <= budget
    smallest = (2 * q[allowed] - 1).min()  # A = (1, -1)
    assert float(smallest) == pytest.approx(float(surviving(case.divergence, x, budget)), abs=2e-5)


@smooth
def test_the_simple_form_is_never_more_than_the_exact_one(case: Case) -> None:
    x = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)[:, None].expand(25, 40)
    budget = torch.logspace(-4, 0, 40, dtype=torch.float64).expand(25, 40)
    simple = x - 2 * (budget / (2 * case.curvature)).sqrt()
    assert at_most(simple.clamp_min(-1), surviving(case.divergence, x, budget))


@every
@pytest.mark.parametrize("x", [0.1, 0.5, 0.9])
def test_delta_survives_exactly_below_the_threshold(case: Case, x: float) -> None:
    ratio, budget = torch.tensor(x, dtype=torch.float64), case.threshold(x)
    half, p = torch.tensor(0.5, dtype=torch.float64), (1 + ratio) / 2
    assert float(f_divergence(case.divergence, pair(half), pair(p))) == pytest.approx(budget, rel=1e-9)
    assert surviving(case.divergence, ratio, torch.tensor(budget * 0.99)) > 0
    assert surviving(case.divergence, ratio, torch.tensor(budget * 1.01)) < 0


@smooth
def test_for_small_delta_only_the_curvature_matters(case: Case) -> None:
    assert case.threshold(1e-3) == pytest.approx(case.curvature * 1e-6 / 2, rel=1e-3)


@every
def test_a_policy_without_gain_is_never_inside_the_threshold(case: Case) -> None:
    pef, idle, advantages = scene()
    advantages = advantages - gain(idle, advantages)[:, None]  # idle is pi_old
    x = gain(pef, advantages) / advantages.abs().amax(-1)
    distance = f_divergence(case.divergence, idle, pef)
    threshold = torch.tensor([case.threshold(float(value)) for value in x[x > 0]], dtype=torch.float64)
    assert at_most(threshold, distance[x > 0])
    assert int((x > 0).sum()) > 500


@every
def test_a_mean_divergence_over_states_bounds_the_mean_gain_over_the_same_states(case: Case) -> None:
    weights = simplex(generator(9), 400, 5)
    pef, new, advantages = (tensor.view(400, 5, 5) for tensor in scene())
    x, budget, gained = (
        (weights * per_state).sum(-1)
        for per_state in (gain(pef, advantages), f_divergence(case.divergence, new, pef), gain(new, advantages))
    )
    assert at_most(surviving(case.divergence, x, budget), gained)


def test_a_mean_divergence_over_the_references_states_bounds_nothing_elsewhere() -> None:
    mdp, old = two_rooms(0.999)
    pef = torch.tensor([[1 - 2e-6, 1e-6, 1e-6]] * 2, dtype=torch.float64)  # nearly never leaves room 0; delta = 1
    new = torch.tensor([[0.95, 0.0, 0.05], [0.0, 1.0, 0.0]], dtype=torch.float64)
    js = make_divergence("js")
    budget = (mdp.occupancy(pef) * f_divergence(js, new, pef)).sum()
    assert budget < 0.02
    x = (mdp.occupancy(pef) * gain(pef, mdp.advantages(old))).sum()
    assert surviving(js, x, budget) > 0.85, "what the reference's states promise"
    assert Step(mdp, old, new).improvement * (1 - mdp.gamma) < -0.9, "what happens"


# ------------------------------------------------------------------------------------ 5: the improved bound


def test_at_the_old_policy_no_bonus_is_left() -> None:
    mdp, old = random_mdps(generator(), 200), simplex(generator(1), 200, 4, 3)
    pef, step = tilt(mdp, old, 1.0), Step(mdp, old, old)
    assert gain(pef, step.advantages).min() > 0, "delta > 0"
    assert f_divergence(make_divergence("forward_kl"), old, pef).max() < 0.6, "and a finite alpha_2: hypotheses hold"
    assert step.shortfall.abs().max() < ROUNDING
    assert step.tv_penalty.max() == 0


def test_in_one_step_problems_no_policy_leaves_room_for_a_bonus() -> None:
    for step in steps():
        bandit = MDP(step.mdp.transition, step.mdp.reward, step.mdp.start, torch.zeros_like(step.gamma))
        assert Step(bandit, step.old, step.new).shortfall.abs().max() < ROUNDING


def test_a_floor_under_the_gain_of_every_state_improves_the_bound() -> None:
    for step in [*steps(), *greedier()]:
        floor = step.g.amin(-1)
        assert at_most(step.shortfall, step.floor_penalty(floor))
        for alpha_1 in step.alpha_1():
            bonus = step.gamma / (1 - step.gamma) ** 2 * (alpha_1 * step.epsilon + floor * (alpha_1 / 2).sqrt())
            assert at_most(step.floor_penalty(floor), step.kl_penalty(alpha_1) - bonus)
    assert all(bool((step.g.amin(-1) > 0).all()) for step in greedier())


def test_the_bound_with_a_floor_is_tight() -> None:
    step = drift(gamma=0.9, alpha=1e-5, second_room=0.25)
    floor, most = step.g.min(), 2 * step.epsilon * step.alpha
    assert float(floor / most) == pytest.approx(0.25)
    assert 0.999 < step.shortfall / step.floor_penalty(floor) <= 1


def test_a_floor_in_some_states_only_adds_nothing() -> None:
    step = drift(gamma=0.9, alpha=1e-5)
    d = step.mdp.occupancy(step.old)
    assert d.tolist() == pytest.approx([1, 0]), "room 0 is all that the old policy sees"
    assert step.g[0] == pytest.approx(float(2 * step.epsilon * step.alpha)), "its gain is as large as alpha allows"
    assert step.shortfall > 0.999 * step.tv_penalty, "and still no bonus"


@every
def test_what_survives_enters_the_surrogate_and_from_there_j(case: Case) -> None:
    for step, chosen, floor in near_perfect(case.divergence):
        d_old, d_new = step.mdp.occupancy(step.old), step.mdp.occupancy(step.new)
        floored = torch.where(chosen, floor[:, None], step.g)
        assert at_most(floored, step.g)
        assert at_most((d_new * floored).sum(-1) / (1 - step.gamma), step.improvement)
        assert at_most((d_old * floored).sum(-1) / (1 - step.gamma) - step.tv_penalty, step.improvement)
        assert bool((floor > 0).any())


def test_a_floor_in_every_state_needs_no_penalty() -> None:
    for step in greedier():
        assert at_most(step.g.amin(-1) / (1 - step.gamma), step.improvement)


def test_with_the_penalty_only_short_steps_are_promised_anything() -> None:
    long_ones = 0
    for step in [*steps(), *greedier()]:
        promise = (step.mdp.occupancy(step.old) * step.g).sum(-1) / (1 - step.gamma) - step.tv_penalty
        long = step.alpha >= (1 - step.gamma) / (2 * step.gamma)
        assert at_most(promise[long], torch.zeros_like(promise[long]))
        long_ones += int(long.sum())
    assert long_ones > 100


# ------------------------------------------------------------------------------------ 6: in the method's terms


def answers() -> tuple[Tensor, Tensor, Tensor]:
    """pi_ref and pi over five responses, and which of them are right (at least one, not all), all (N, 5)."""
    ref, new, _ = scene()
    right = torch.rand(ref.shape, generator=generator(7)) < 0.5
    right[:, 0], right[:, 1] = True, False
    return ref, new, right


def test_with_rewards_of_0_and_1_delta_is_the_accuracy_that_was_lost() -> None:
    ref, old, right = answers()
    mdp = MDP(torch.ones(1, 5, 1).double(), right.double()[:, None], torch.ones(1).double(), torch.zeros(len(ref)))
    delta = gain(ref, mdp.advantages(old[:, None])[:, 0])
    torch.testing.assert_close(delta, (ref * right).sum(-1) - (old * right).sum(-1))


@every
def test_a_divergence_over_responses_floors_the_accuracy(case: Case) -> None:
    ref, new, right = answers()
    floor = smallest(case.divergence, (ref * right).sum(-1), f_divergence(case.divergence, new, ref))
    assert at_most(floor, (new * right).sum(-1))


@every
def test_the_mean_loss_on_right_answers_alone_floors_the_accuracy(case: Case) -> None:
    ref, new, right = answers()
    before, after = (ref * right).sum(-1), (new * right).sum(-1)

    def loss(policy: Tensor) -> Tensor:
        return (ref * right * case.divergence.f((policy / ref).log())).sum(-1) / before

    floor = case.divergence.f((after / before).log())
    assert at_most(floor, loss(new))
    torch.testing.assert_close(floor, loss(ref * (after / before)[:, None]), msg="attained if all keep the same share")


# ------------------------------------------------------------------------------------ the document itself


DOCUMENT = (Path(__file__).parent.parent / "docs" / "theory.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", [case for case in ALL if case.name != "alpha" or case.setting == 0.5], ids=label)
def test_the_documents_table(case: Case) -> None:
    """Columns: name, f''(1), threshold, the same at x = 1/2 and x -> 1, accuracy kept of 0.9 at D_f <= 0.05."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in DOCUMENT.splitlines()]
    row = next(row for row in rows if row and row[0] == case.label)
    kept = smallest(case.divergence, *torch.tensor([0.9, 0.05], dtype=torch.float64))
    at_one = case.threshold(1 - 1e-12)
    assert row[1] in (f"{case.curvature:g}", "none")
    assert [float(cell) for cell in row[3:]] == pytest.approx(
        [case.threshold(0.5), math.inf if at_one > 13 else at_one, float(kept)], abs=5.1e-4
    )


def test_the_document_names_every_test() -> None:
    here = {name for name in globals() if name.startswith("test_") and "_document" not in name}
    assert set(re.findall(r"`(test_\w+)`", DOCUMENT)) == here
