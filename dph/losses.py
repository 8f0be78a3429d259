"""The objective, term by term: advantages (E3), clipped loss (E4), rehearsal (E5, E10),
penalties on own samples (E2), Jensen-Shannon by its definition (E8).

A loss takes tensors, never a model, and returns per-token values of shape (B, T), zero where the mask is False; one
reducer, `aggregate`, turns them into a scalar with a denominator counted over the whole optimizer step, so that the
gradient does not depend on how micro-batches are cut. B is rows (answers), T response positions; logprobs are
log pi_theta of the sampled tokens, of softmax(logits / tau) over the full vocabulary. Masked positions may hold
anything, NaN included: they are replaced before any exp.

The total (E6), L_exp + eta L_pef, is written in dph/objective.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dph.divergences import Divergence, saturate


def group_advantages(rewards: Tensor, groups: Tensor, divide_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean) / (std + epsilon) within each group (E3; DeepSeekMath, arXiv 2402.03300).

    Args:
        rewards: (B,).
        groups: (B,) integers, one for each prompt of the batch (its index there, never its text).
        divide_by_std: population standard deviation (ddof 0); False is Dr. GRPO's r_i - mean (arXiv 2503.20783).

    Returns: (B,); exactly 0 where all rewards of a group are equal.
    """
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    zeros = torch.zeros_like(counts, dtype=rewards.dtype)
    sums = zeros.index_add(0, index, rewards)  # (groups,)
    mean = sums / counts
    highest = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    all_equal = highest == lowest
    centred: Tensor = rewards - mean[index]  # (B,)
    centred = torch.where(all_equal[index], 0.0, centred)  # else rounding of the mean would be amplified
    if not divide_by_std:
        return centred
    sums_of_squares = zeros.index_add(0, index, centred.square())
    std = (sums_of_squares / counts).sqrt()
    normalised: Tensor = centred / (std[index] + epsilon)
    return normalised


def clipped_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Tensor:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), the exploration loss of E4, per token.

    Args:
        logprobs, old_logprobs, mask: (B, T); rho = exp(logprobs - old_logprobs).
        advantages: (B,), one for all tokens of a row.
        dual_clip: c > 1 bounds the loss of a negative advantage by -c A (arXiv 1912.09729); 0 is off.
    """
    advantages = advantages[:, None]  # (B, 1)
    ratio = _ratio(logprobs, old_logprobs, mask)  # (B, T)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    if dual_clip:
        bounded = torch.min(loss, -dual_clip * advantages)
        loss = torch.where(advantages < 0, bounded, loss)
    return torch.where(mask, loss, 0.0)


def clipped_fractions(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Where E4's clip stops the gradient, (B, T) booleans: below (A < 0, rho < 1 - clip_low) and above (A > 0)."""
    advantages = advantages[:, None]  # (B, 1)
    ratio = _ratio(logprobs, old_logprobs, mask)  # (B, T)
    below = (advantages < 0) & (ratio < 1 - clip_low)
    above = (advantages > 0) & (ratio > 1 + clip_high)
    return mask & below, mask & above


def rehearsal_loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, divergence: Divergence) -> Tensor:
    """f(u) on stored answers of pi_ref, per token: L_pef of E5, differentiated by autograd (E2).

    u is each token's, as in the released code. The paper's notation has whole answers; for the forward KL the sum over
    tokens is the answers' divergence (chain rule), for the others it is not. The u of a whole answer, a product of
    hundreds of ratios, is not offered: under js, on one answer of 300 tokens with log u = .59 each, the gradient is
    1e76, and 1e34 with the value saturated.

    Args:
        logprobs, ref_logprobs (stored before training), mask: (B, T).
    """
    log_u = _log_ratio(logprobs, ref_logprobs, mask)
    return torch.where(mask, divergence.f(log_u), 0.0)


def stored_distribution_loss(
    top: Tensor, rest: Tensor, ref_top: Tensor, ref_rest: Tensor, mask: Tensor, divergence: Divergence
) -> Tensor:
    """Rehearsal against stored distributions (E10): sum over pi_ref's K likeliest tokens, and over the rest as one.

    sum_a pi_ref(a) f(pi_theta(a) / pi_ref(a)) + pi_ref(rest) f(pi_theta(rest) / pi_ref(rest)), per position: no noise
    from the choice of the action. Never above the full D_f, rising with K, equal to it at K = V - 1.

    Args:
        top, ref_top: (B, T, K) log-probabilities of the same tokens under pi_theta and pi_ref.
        rest, ref_rest: (B, T) logs of the mass of all other tokens, summed from these tokens' own logits: 1 minus the
            mass of the top ones has no digits left, and no gradient, where the rest is what has been forgotten.
        mask: (B, T).
    """
    log_u = _log_ratio(top, ref_top, mask[..., None])  # (B, T, K)
    log_u_rest = _log_ratio(rest, ref_rest, mask)  # (B, T)
    of_top = ref_top.exp() * divergence.f(log_u)  # (B, T, K): pi_ref(a) f(u)
    of_rest = ref_rest.exp() * divergence.f(log_u_rest)  # (B, T)
    return torch.where(mask, of_top.sum(-1) + of_rest, 0.0)


def js_reference_half(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """1/2 KL(pi_ref || m) on stored answers, per token: the first half of JS by its definition (E8)."""
    log_u = _log_ratio(logprobs, ref_logprobs, mask)
    values = 0.5 * (math.log(2) - F.softplus(log_u))
    return torch.where(mask, values, 0.0)


def js_own_half(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, ratio_cap: float) -> Tensor:
    """The surrogate of 1/2 KL(pi_theta || m) on own samples (E8): 1/2 stopgrad(g + 1/(1+u)) log pi_theta, per token.

    g = log(2u / (1+u)). Differentiating g itself would cancel the other half's gradient: a trap. All of it is weighted
    by `importance_weights`.
    """
    log_u = _log_ratio(logprobs, ref_logprobs, mask).detach()
    g = math.log(2) - F.softplus(-log_u)
    slope = g + torch.sigmoid(-log_u)
    values = 0.5 * slope * torch.where(mask, logprobs, 0.0)
    weights = importance_weights(logprobs, old_logprobs, mask, ratio_cap)
    return torch.where(mask, weights * values, 0.0)


def importance_weights(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(rho, cap), without gradient: truncated importance sampling (Ionides 2008).

    Own samples are drawn from pi_old. From the second optimizer step on the same rollouts pi_theta is another policy,
    and a mean over them estimates the wrong expectation, by a factor rho per token, which this puts back at the states
    that were visited (which states those are is still pi_old's doing). The cap bounds the variance; it biases the mean
    only where rho exceeds it.

    Args:
        logprobs, old_logprobs, mask: (B, T).
    """
    ratio = _ratio(logprobs, old_logprobs, mask)
    return ratio.clamp(max=cap).detach()


def penalty_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    divergence: Divergence,
    estimator: str,
    ratio_cap: float,
) -> Tensor:
    """A penalty on own samples, per token; what matters is its gradient (E2).

    Args:
        logprobs, old_logprobs, ref_logprobs, mask: (B, T).
        estimator: "exact": stopgrad(f'(u)) log pi_theta, the gradient of D_f for any f;
            "k3": e^-l - 1 + l, the literature's KL loss, whose gradient is the forward KL's (arXiv 2510.01555);
            "k3_importance": rho k3 with the gradient through rho, which is the reverse KL's (arXiv 2512.02556).
        ratio_cap: of `importance_weights`, for the first two; the third has its rho.
    """
    log_u = _log_ratio(logprobs, ref_logprobs, mask)
    weights = importance_weights(logprobs, old_logprobs, mask, ratio_cap)
    if estimator == "exact":
        slope = divergence.derivative(log_u).detach()  # f'(u)
        loss = weights * slope * torch.where(mask, logprobs, 0.0)
        return torch.where(mask, loss, 0.0)
    inverse = saturate(-log_u)
    k3 = torch.expm1(inverse) - inverse
    if estimator == "k3_importance":
        weights = _ratio(logprobs, old_logprobs, mask)
    return torch.where(mask, weights * k3, 0.0)


def own_sample_divergence(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, divergence: Divergence) -> Tensor:
    """f(u) / u per token: its mean over own samples estimates D_f (for reverse_kl it is k3's value). For metrics."""
    log_u = _log_ratio(logprobs, ref_logprobs, mask)
    inverse_u = torch.exp(saturate(-log_u))
    return torch.where(mask, divergence.f(log_u) * inverse_u, 0.0)


def denominator(lengths: Tensor, aggregation: str, length: int = 0) -> float:
    """What `aggregate` divides by (E4), counted once over all rows of an optimizer step.

    Args:
        lengths: (B,) response tokens of every row of the step, those without gradient included.
        aggregation: "token-mean": all tokens; "sequence-mean": rows; "sequence-sum": rows times `length` (Dr. GRPO).
    """
    if aggregation == "token-mean":
        count = int(lengths.sum())
    elif aggregation == "sequence-mean":
        count = lengths.numel()
    else:
        count = lengths.numel() * length
    return float(max(count, 1))  # a step without rows has the loss 0, not NaN


def aggregate(values: Tensor, mask: Tensor, aggregation: str, total: float) -> Tensor:
    """Per-token values (B, T) to a scalar; `total` comes from `denominator`. Micro-batches' results add up (E4)."""
    values = torch.where(mask, values, 0.0)
    if aggregation == "sequence-mean":
        lengths = mask.sum(dim=1, keepdim=True)  # (B, 1)
        values = values / lengths.clamp(min=1)
    return values.sum() / total


def _log_ratio(above: Tensor, below: Tensor, mask: Tensor) -> Tensor:
    """log(above / below) of two log-probabilities, 0 where masked."""
    above = torch.where(mask, above, 0.0)
    below = torch.where(mask, below, 0.0)
    return above - below


def _ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """rho = pi_theta / pi_old, (B, T), 1 where masked; it saturates before it overflows."""
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    return torch.exp(saturate(log_ratio))
