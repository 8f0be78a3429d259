"""Small Markov decision processes, solved exactly in float64, and policy updates in them, for docs/theory.md's tests.

Every tensor may carry leading batch dimensions (...), so that one linear solve handles hundreds of processes. S is the
number of states, A of actions. Occupancies are normalised (they sum to 1), hence the 1/(1 - gamma) wherever a return is
an average over states.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dph.divergences import Divergence

TINY = 1e-300  # stands for a probability of 0 inside a logarithm
ROUNDING = 1e-9


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class MDP:
    transition: Tensor  # (..., S, A, S)
    reward: Tensor  # (..., S, A)
    start: Tensor  # (..., S)
    gamma: Tensor  # (...,)

    def values(self, policy: Tensor) -> Tensor:
        """V of policy (..., S, A): solves (I - gamma P) V = r. Shape (..., S)."""
        values: Tensor = torch.linalg.solve(self._system(policy), (policy * self.reward).sum(-1))
        return values

    def advantages(self, policy: Tensor) -> Tensor:
        """A(s, a) = r + gamma E V(s') - V(s), shape (..., S, A)."""
        values = self.values(policy)
        ahead = torch.einsum("...sat,...t->...sa", self.transition, values)
        return self.reward + self.gamma[..., None, None] * ahead - values[..., None]

    def occupancy(self, policy: Tensor) -> Tensor:
        """d(s) = (1 - gamma) sum over t of gamma^t P(s_t = s), shape (..., S); sums to 1."""
        occupancy: Tensor = torch.linalg.solve(self._system(policy).mT, (1 - self.gamma)[..., None] * self.start)
        return occupancy

    def objective(self, policy: Tensor) -> Tensor:
        """J, the expected discounted return from the start, shape (...,)."""
        return (self.start * self.values(policy)).sum(-1)

    def surrogate(self, policy: Tensor, old: Tensor) -> Tensor:
        """L_old(policy) = J(old) + 1/(1-gamma) E_{s ~ d_old, a ~ policy} A_old, shape (...,)."""
        mean_gain = (self.occupancy(old) * gain(policy, self.advantages(old))).sum(-1)
        return self.objective(old) + mean_gain / (1 - self.gamma)

    def _system(self, policy: Tensor) -> Tensor:
        """I - gamma P, shape (..., S, S)."""
        step = torch.einsum("...sa,...sat->...st", policy, self.transition)
        return torch.eye(step.shape[-1], dtype=step.dtype) - self.gamma[..., None, None] * step


def gain(policy: Tensor, advantages: Tensor) -> Tensor:
    """E_{a ~ policy} A(s, a), shape (..., S)."""
    return (policy * advantages).sum(-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the L1 distance over the last dimension."""
    return 0.5 * (p - q).abs().sum(-1)


def f_divergence(divergence: Divergence, p: Tensor, q: Tensor) -> Tensor:
    """D_f(p || q) = E_q f(p/q) over the last dimension; p may have zeros, q may not."""
    assert bool((q > 0).all()), "mass of p outside the support of q would be lost"
    return (q * divergence.f(p.clamp_min(TINY).log() - q.log())).sum(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) over the last dimension, zeros allowed."""
    return (p * (p.clamp_min(TINY) / q.clamp_min(TINY)).log()).sum(-1)


def pair(first: Tensor) -> Tensor:
    """The distribution (first, 1 - first) over two outcomes, on a new last dimension."""
    return torch.stack((first, 1 - first), -1)


def simplex(generator: torch.Generator, *shape: int) -> Tensor:
    """Random distributions over the last dimension, from nearly flat to nearly certain."""
    scale = 6 * torch.rand(*shape[:-1], 1, dtype=torch.float64, generator=generator)
    return (scale * torch.randn(*shape, dtype=torch.float64, generator=generator)).softmax(-1)


def random_mdps(generator: torch.Generator, count: int, states: int = 4, actions: int = 3) -> MDP:
    """Processes with random rewards and transitions, gamma from 0 to 0.98."""
    return MDP(
        simplex(generator, count, states, actions, states),
        torch.randn(count, states, actions, dtype=torch.float64, generator=generator),
        simplex(generator, count, states),
        0.98 * torch.rand(count, dtype=torch.float64, generator=generator),
    )


def near_and_far(generator: torch.Generator, old: Tensor) -> Iterator[Tensor]:
    """Policies to compare with old (..., S, A): unrelated ones, and steps of every size to certain choices."""
    yield simplex(generator, *old.shape)
    for _ in range(8):
        certain = torch.nn.functional.one_hot(simplex(generator, *old.shape).argmax(-1), old.shape[-1]).double()
        step = 10 ** (-4 * torch.rand(*old.shape[:-2], 1, 1, dtype=torch.float64, generator=generator))
        yield (1 - step) * old + step * certain


def two_rooms(gamma: float) -> tuple[MDP, Tensor]:
    """A process on which bounds are attained, and its old policy.

    Room 0, the start: action 0 stays and earns 1, action 1 stays and earns -1, action 2 earns 1 and leaves for room 1
    for ever. There action 0 earns 1, action 1 earns -1, action 2 nothing. The old policy picks actions 0 and 1 with
    probability 1/2 in both rooms, so its value is 0 everywhere, its advantages are the rewards, and epsilon = 1.
    """
    transition = torch.zeros(2, 3, 2, dtype=torch.float64)
    transition[0, :2, 0] = transition[0, 2, 1] = transition[1, :, 1] = 1
    reward = torch.tensor([[1.0, -1.0, 1.0], [1.0, -1.0, 0.0]], dtype=torch.float64)
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    old = torch.tensor([[0.5, 0.5, 0.0]] * 2, dtype=torch.float64)
    return MDP(transition, reward, start, torch.tensor(gamma, dtype=torch.float64)), old


class Step:
    """One policy update in many processes at once, with the quantities that bounds are made of, each (N,)."""

    def __init__(self, mdp: MDP, old: Tensor, new: Tensor) -> None:
        self.mdp, self.old, self.new, self.gamma = mdp, old, new, mdp.gamma
        self.advantages = mdp.advantages(old)  # (N, S, A)
        self.g = gain(new, self.advantages)  # (N, S)
        self.distances = total_variation(new, old)  # (N, S)
        self.epsilon, self.alpha = self.advantages.abs().amax((-2, -1)), self.distances.amax(-1)
        self.improvement = mdp.objective(new) - mdp.objective(old)
        self.shortfall = mdp.surrogate(new, old) - mdp.objective(new)  # L_old - J, what the bounds limit
        self.tv_penalty = 4 * self.gamma * self.epsilon * self.alpha**2 / (1 - self.gamma) ** 2

    def alpha_1(self) -> tuple[Tensor, Tensor]:
        """The largest KL over states, KL(old || new) and KL(new || old)."""
        return kl(self.old, self.new).amax(-1), kl(self.new, self.old).amax(-1)

    def kl_penalty(self, alpha_1: Tensor) -> Tensor:
        return 2 * self.gamma * alpha_1 * self.epsilon / (1 - self.gamma) ** 2

    def floor_penalty(self, floor: Tensor) -> Tensor:
        return self.gamma * self.alpha * (2 * self.epsilon * self.alpha - floor) / (1 - self.gamma) ** 2

    def path_penalty(self, alpha_1: Tensor) -> Tensor:
        return 2 * self.gamma.sqrt() * alpha_1 * self.epsilon / (1 - self.gamma) ** 1.5


@cache
def steps() -> list[Step]:
    """Random processes and old policies; new policies near and far, random and towards the worst action."""
    source = generator()
    mdp, old = random_mdps(source, 200), simplex(source, 200, 4, 3)
    worst = torch.nn.functional.one_hot(mdp.advantages(old).argmin(-1), 3).double()
    hostile = [(1 - step) * old + step * worst for step in (1e-3, 0.03, 0.3, 1.0)]
    return [Step(mdp, old, new) for new in [*near_and_far(source, old), *hostile]]


def at_most(small: Tensor, large: Tensor) -> bool:
    return bool((small <= large + ROUNDING * (1 + large.abs())).all())


def tilt(mdp: MDP, old: Tensor, strength: float) -> Tensor:
    """The old policy leant towards its advantages: a gain above 0 in every state."""
    advantages = mdp.advantages(old)
    return (old.log() + strength * advantages / advantages.abs().amax((-2, -1), keepdim=True)).softmax(-1)


def greedier() -> Iterator[Step]:
    mdp, old = random_mdps(generator(), 300), simplex(generator(1), 300, 4, 3)
    yield from (Step(mdp, old, tilt(mdp, old, strength)) for strength in (0.1, 1.0, 5.0))


def drift(gamma: float, alpha: float, second_room: float = -1.0) -> Step:
    """In two rooms: lean by alpha towards leaving room 0, and by second_room * alpha towards action 0 in room 1."""
    mdp, old = two_rooms(gamma)
    shift = torch.tensor([[0.0, -alpha, alpha], [second_room * alpha, -second_room * alpha, 0.0]], dtype=torch.float64)
    return Step(mdp, old, old + shift)


def smallest(divergence: Divergence, p: Tensor, budget: Tensor) -> Tensor:
    """The smallest q in [0, p] with D_f((q, 1-q) || (p, 1-p)) <= budget, by bisection from below."""
    low, high = torch.zeros_like(p), p
    for _ in range(60):
        middle = (low + high) / 2
        inside = f_divergence(divergence, pair(middle), pair(p)) <= budget
        low, high = torch.where(inside, low, middle), torch.where(inside, middle, high)
    return low


def surviving(divergence: Divergence, x: Tensor, budget: Tensor) -> Tensor:
    """What is left of x = delta / epsilon at D_f <= budget."""
    return 2 * smallest(divergence, (1 + x) / 2, budget) - 1


def scene(seed: int = 0, count: int = 2000) -> tuple[Tensor, Tensor, Tensor]:
    """pi_pef, pi, near and far, and A over five actions with max |A| = 1, all (count, 5)."""
    source = generator(seed)
    pef, other = simplex(source, count, 5), simplex(source, count, 5)
    near = 10 ** (-3 * torch.rand(count, 1, dtype=torch.float64, generator=source))
    advantages = torch.randn(count, 5, dtype=torch.float64, generator=source)
    hostile = torch.where(other < pef, 1.0, -1.0).double()
    advantages = torch.where(torch.rand(count, 1, dtype=torch.float64, generator=source) < 0.5, advantages, hostile)
    return pef, (1 - near) * pef + near * other, advantages / advantages.abs().amax(-1, keepdim=True)


def near_perfect(divergence: Divergence) -> Iterator[tuple[Step, Tensor, Tensor]]:
    """Steps that stay near a good pi_pef on some of the states: (step, those states (N, S), what survives (N,))."""
    source = generator(5)
    mdp, old = random_mdps(source, 200), simplex(source, 200, 4, 3)
    chosen = torch.rand(200, 4, generator=source) < 0.5
    chosen[:, 0] = True
    for near in (1e-3, 0.03, 0.3):
        pef, wander = tilt(mdp, old, 3.0), simplex(source, 200, 4, 3)
        step = Step(mdp, old, (1 - near) * torch.where(chosen[..., None], pef, old) + near * wander)
        delta = torch.where(chosen, gain(pef, step.advantages), math.inf).amin(-1)
        budget = torch.where(chosen, f_divergence(divergence, step.new, pef), 0).amax(-1)
        yield step, chosen, step.epsilon * surviving(divergence, delta / step.epsilon, budget)


def attack(gamma: float, penalty: Callable[[Step], Tensor]) -> float:
    """The largest shortfall / penalty that gradient ascent over process and both policies ever meets."""
    source, count = generator(3), 12
    shapes = ((count, 3, 3, 3), (count, 3, 3), (count, 3), (count, 3, 3), (count, 3, 3))
    free = [torch.randn(*shape, dtype=torch.float64, generator=source).requires_grad_() for shape in shapes]
    worst = 0.0
    for turn in range(100):
        transition, reward, start, old, shift = free
        mdp = MDP(transition.softmax(-1), reward, start.softmax(-1), torch.full((count,), gamma, dtype=torch.float64))
        step = Step(mdp, old.softmax(-1), (old + shift).softmax(-1))
        ratio = step.shortfall / penalty(step)
        worst = max(worst, ratio.max().item())
        gradients = torch.autograd.grad(ratio.sum(), free)
        with torch.no_grad():
            for tensor, gradient in zip(free, gradients, strict=True):
                tensor += 0.1 * (1 - turn / 100) * gradient.sign()
    return worst
