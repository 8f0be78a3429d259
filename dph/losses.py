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
    mean = zeros.index_add(0, index, rewards) / counts
    centred: Tensor = rewards - mean[index]
    highest = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    centred = torch.where((highest == lowest)[index], 0.0, centred)  # else rounding of the mean would be amplified
    if not divide_by_std:
        return centred
    std = (zeros.index_add(0, index, centred.square()) / counts).sqrt()
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
    ratio = torch.exp(saturate(_log_ratio(logprobs, old_logprobs, mask)))  # (B, T)
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip:
        loss = torch.where(advantages < 0, torch.min(loss, -dual_clip * advantages), loss)
    return torch.where(mask, loss, 0.0)


def clipped_fractions(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Where E4's clip stops the gradient, (B, T) booleans: below (A < 0, rho < 1 - clip_low) and above (A > 0)."""
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    ratio, advantages = torch.exp(saturate(log_ratio)), advantages[:, None]
    return mask & (advantages < 0) & (ratio < 1 - clip_low), mask & (advantages > 0) & (ratio > 1 + clip_high)


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
    weights, rest_weight = ref_top.exp(), ref_rest.exp()
    values = (weights * divergence.f(log_u)).sum(-1) + rest_weight * divergence.f(log_u_rest)
    return torch.where(mask, values, 0.0)


def js_reference_half(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """1/2 KL(pi_ref || m) on stored answers, per token: the first half of JS by its definition (E8)."""
    return torch.where(mask, 0.5 * (math.log(2) - F.softplus(_log_ratio(logprobs, ref_logprobs, mask))), 0.0)


def js_own_half(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, ratio_cap: float) -> Tensor:
    """The surrogate of 1/2 KL(pi_theta || m) on own samples (E8): 1/2 stopgrad(g + 1/(1+u)) log pi_theta, per token.

    g = log(2u / (1+u)). Differentiating g itself would cancel the other half's gradient: a trap. All of it is weighted
    by `importance_weights`.
    """
    log_u = _log_ratio(logprobs, ref_logprobs, mask).detach()
    weight = math.log(2) - F.softplus(-log_u) + torch.sigmoid(-log_u)
    values = 0.5 * weight * torch.where(mask, logprobs, 0.0)
    return torch.where(mask, importance_weights(logprobs, old_logprobs, mask, ratio_cap) * values, 0.0)


def importance_weights(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(rho, cap), without gradient: truncated importance sampling (Ionides 2008).

    Own samples are drawn from pi_old. From the second optimizer step on the same rollouts pi_theta is another policy,
    and a mean over them estimates the wrong expectation, by a factor rho per token, which this puts back at the states
    that were visited (which states those are is still pi_old's doing). The cap bounds the variance; it biases the mean
    only where rho exceeds it.

    Args:
        logprobs, old_logprobs, mask: (B, T).
    """
    ratio = torch.exp(saturate(_log_ratio(logprobs, old_logprobs, mask)))
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
        loss = weights * divergence.derivative(log_u).detach() * torch.where(mask, logprobs, 0.0)
        return torch.where(mask, loss, 0.0)
    inverse = saturate(-log_u)
    k3 = torch.expm1(inverse) - inverse
    if estimator == "k3_importance":
        weights = torch.exp(saturate(_log_ratio(logprobs, old_logprobs, mask)))
    return torch.where(mask, weights * k3, 0.0)


def own_sample_divergence(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, divergence: Divergence) -> Tensor:
    """f(u) / u per token: its mean over own samples estimates D_f (for reverse_kl it is k3's value). For metrics."""
    log_u = _log_ratio(logprobs, ref_logprobs, mask)
    return torch.where(mask, divergence.f(log_u) * torch.exp(saturate(-log_u)), 0.0)


def denominator(lengths: Tensor, aggregation: str, length: int = 0) -> float:
    """What `aggregate` divides by, counted once over all rows of an optimizer step.

    Args:
        lengths: (B,) response tokens of every row of the step, those without gradient included.
        aggregation: "token-mean": all tokens; "sequence-mean": rows; "sequence-sum": rows times `length` (Dr. GRPO).
    """
    rows = lengths.numel()
    count = {"token-mean": int(lengths.sum()), "sequence-mean": rows, "sequence-sum": rows * length}[aggregation]
    return float(max(count, 1))


def aggregate(values: Tensor, mask: Tensor, aggregation: str, total: float) -> Tensor:
    """Per-token values (B, T) to a scalar; `total` comes from `denominator`. Micro-batches' results add up (E4)."""
    values = torch.where(mask, values, 0.0)
    if aggregation == "sequence-mean":
        values = values / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return values.sum() / total


def _log_ratio(above: Tensor, below: Tensor, mask: Tensor) -> Tensor:
    """log(above / below) of two log-probabilities, 0 where masked."""
    return torch.where(mask, above, 0.0) - torch.where(mask, below, 0.0)
