"""f-divergences as generator functions of log u: the heart of the method, equation E1.

    u = pi_theta(token) / pi_ref(token),   l = log u        per token, always this way up in the whole project
    D_f(pi_theta || pi_ref) = E_{pi_ref}[ f(u) ],           f convex, f(1) = 0

Every generator is in standard form, f'(1) = 0, so f >= 0 with its minimum at u = 1; forward_kl also comes in a plain
form, which is not. Each function returns the pair (f(u), f'(u)), computed from l alone, never log(exp(.)).

Two estimators of one gradient use them (E2): autograd through f(u) on samples of pi_ref, whose weight on
grad log pi_theta is u f'(u); or stopgrad(f'(u)) log pi_theta on own samples.

Against the paper and its released code: the code's JS generator is twice the Jensen-Shannon divergence; ours is the
divergence itself, so a coefficient of 0.2 there is 0.4 in this scale (and about 0.05 as eta, since its two terms share
one denominator: docs/equations.md, "How to carry an eta over").

To add a divergence, write one function with @generator: configs, tests and plots find it by its name.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dph.errors import UserError

Pair = tuple[Tensor, Tensor]
EXP_LIMIT = 80.0  # e^80 = 5.5e34, still finite in fp32 and bf16
GENERATORS: dict[str, tuple[Callable[..., Pair], float, float]] = {}


def generator(
    name: str, low: float = -math.inf, high: float = EXP_LIMIT
) -> Callable[[Callable[..., Pair]], Callable[..., Pair]]:
    """Registers a function log_u -> (f(u), f'(u)); outside [low, high] log u saturates."""

    def register(function: Callable[..., Pair]) -> Callable[..., Pair]:
        GENERATORS[name] = (function, low, high)
        return function

    return register


@generator("forward_kl")
def forward_kl(log_u: Tensor, divergence_form: str = "standard") -> Pair:
    """f(u) = u - 1 - log u: KL(pi_ref || pi_theta), mass-covering; DPH-F. Plain form: f(u) = -log u (supervised)."""
    if divergence_form == "plain":
        return -log_u, -torch.exp(-log_u)
    return torch.expm1(log_u) - log_u, -torch.expm1(-log_u)


@generator("reverse_kl")
def reverse_kl(log_u: Tensor) -> Pair:
    """f(u) = u log u - u + 1: KL(pi_theta || pi_ref), mode-seeking."""
    return log_u * torch.exp(log_u) - torch.expm1(log_u), log_u


@generator("js")
def js(log_u: Tensor) -> Pair:
    """f(u) = 1/2 [u log(2u / (1+u)) + log(2 / (1+u))]: Jensen-Shannon, in [0, log 2]; DPH-JS."""
    log_m_over_ref = torch.log1p(0.5 * torch.expm1(log_u))  # m = (pi_theta + pi_ref) / 2; keeps its digits near u = 1
    log_theta_over_m = log_u - log_m_over_ref
    return 0.5 * (torch.exp(log_u) * log_theta_over_m - log_m_over_ref), 0.5 * log_theta_over_m


@generator("alpha")
def alpha_divergence(log_u: Tensor, alpha: float) -> Pair:
    """f(u) = (u^(1-a) - (1-a) u - a) / (a (a-1)), 0 < a < 1: a -> 0 reverse_kl, a -> 1 forward_kl."""
    numerator = torch.expm1((1 - alpha) * log_u) - (1 - alpha) * torch.expm1(log_u)
    return numerator / (alpha * (alpha - 1)), -torch.expm1(-alpha * log_u) / alpha


@generator("jeffreys")
def jeffreys(log_u: Tensor) -> Pair:
    """f(u) = (u - 1) log u: KL(pi_theta || pi_ref) + KL(pi_ref || pi_theta)."""
    return torch.expm1(log_u) * log_u, log_u - torch.expm1(-log_u)


@generator("squared_hellinger")
def squared_hellinger(log_u: Tensor) -> Pair:
    """f(u) = (sqrt(u) - 1)^2: sum of (sqrt(pi_theta) - sqrt(pi_ref))^2."""
    return torch.expm1(log_u / 2).square(), -torch.expm1(-log_u / 2)


@generator("pearson_chi2", high=EXP_LIMIT / 2)
def pearson_chi2(log_u: Tensor) -> Pair:
    """f(u) = (u - 1)^2: sum of (pi_theta - pi_ref)^2 / pi_ref."""
    return torch.expm1(log_u).square(), 2 * torch.expm1(log_u)


@generator("neyman_chi2", low=-EXP_LIMIT / 2)
def neyman_chi2(log_u: Tensor) -> Pair:
    """f(u) = (u - 1)^2 / u: sum of (pi_theta - pi_ref)^2 / pi_theta."""
    return -torch.expm1(log_u) * torch.expm1(-log_u), -torch.expm1(-2 * log_u)


@generator("total_variation")
def total_variation(log_u: Tensor) -> Pair:
    """f(u) = |u - 1| / 2: half the L1 distance, in [0, 1]."""
    return 0.5 * torch.expm1(log_u).abs(), 0.5 * torch.sign(log_u)


@generator("skew_js")
def skew_js(log_u: Tensor, skew: float) -> Pair:
    """f(u) = w u log(u/m) - (1-w) log m, m = w u + 1-w: w KL(pi_theta || m) + (1-w) KL(pi_ref || m); w = 1/2 is js."""
    log_m_over_ref = torch.log1p(skew * torch.expm1(log_u))
    log_theta_over_m = log_u - log_m_over_ref
    return skew * torch.exp(log_u) * log_theta_over_m - (1 - skew) * log_m_over_ref, skew * log_theta_over_m


@dataclass(frozen=True)
class Divergence:
    """A generator with its settings bound; made by `make_divergence`.

    Where e^l would overflow the value and its gradient stay those of the limit (the pull is never cut to zero);
    `saturated` says where that happens to f; f' alone also stops growing at log u = -80, for all generators alike.
    """

    name: str
    pair: Callable[[Tensor], Pair]
    low: float
    high: float

    def f(self, log_u: Tensor) -> Tensor:
        """f(u), any shape; autograd gives u f'(u) with respect to log pi_theta."""
        return self.pair(saturate(log_u, self.low, self.high))[0]

    def derivative(self, log_u: Tensor) -> Tensor:
        """f'(u), any shape, finite everywhere."""
        return self.pair(saturate(log_u, max(self.low, -EXP_LIMIT), self.high))[1]

    def saturated(self, log_u: Tensor) -> Tensor:
        """True where log u lies outside of what the generator can represent."""
        return (log_u < self.low) | (log_u > self.high)


def make_divergence(name: str, **settings: Any) -> Divergence:
    """The generator `name` of E1 with those of `settings` (alpha, skew, divergence_form) that it takes.

    Raises: UserError for an unknown name.
    """
    if name not in GENERATORS:
        raise UserError(f"loss.divergence = {name!r} should be none or one of {', '.join(GENERATORS)}")
    function, low, high = GENERATORS[name]
    takes = inspect.signature(function).parameters
    bound = partial(function, **{key: value for key, value in settings.items() if key in takes})
    return Divergence(name, bound, low, high)


def saturate(log_ratio: Tensor, low: float = -math.inf, high: float = EXP_LIMIT) -> Tensor:
    """log_ratio clamped to [low, high] in value, with the gradient of the identity: no pull is lost (E1's numerics)."""
    return log_ratio + (log_ratio.clamp(low, high) - log_ratio).detach()
