"""Scoring: log pi(o_t | s_t) of every response token, by one function for pi_theta, pi_old and pi_ref alike.

So a ratio of two equal policies is 1. All log-probabilities are of softmax(logits / tau) over the full vocabulary: the
distribution that is sampled is the one that is scored.

The plain form is three lines: `logits = model.logits(hidden) / tau`, `log_softmax`, `gather` (dph/plain.py). Here they
run on response positions alone and in chunks of them: the logits of a whole batch, (B, T, V) floats, never exist.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dph.attention import compute_dtype
from dph.model import Decoder
from dph.rollouts import Batch, TopTokens, padded

LOGIT_FLOATS = 2**24  # most logits held at once: 64 MB in fp32


class Scores(NamedTuple):
    """What `token_logprobs` returns: (B, T), 0 at padding; float32, or the model's float64."""

    logprobs: Tensor  # of the response tokens
    entropy: Tensor | None = None  # of the distribution each was drawn from, in nats
    top: Tensor | None = None  # (B, T, K) log-probabilities of batch.top_ids
    rest: Tensor | None = None  # (B, T) log of the mass of all other tokens


def token_logprobs(model: Decoder, batch: Batch, temperature: float, entropy: bool = False) -> Scores:
    """Log-probabilities of a batch's response tokens, with gradient.

    Args:
        temperature: tau; 0 is scored as 1.
        entropy: whether the entropies are asked for, too, with gradient.
    """
    hidden = response_states(model, batch) / (temperature or 1.0)  # (M, D); (W h) / tau = W (h / tau)
    mask = batch.mask
    ids = batch.targets[:, None]  # (M, 1)
    if batch.top_ids is not None:
        ids = torch.cat((ids, batch.top_ids[mask]), 1)  # (M, 1 + K)
    logprobs, rest, entropies = _Head.apply(hidden, model.head, ids, entropy)  # type: ignore[no-untyped-call]
    scores = Scores(padded(logprobs[:, 0], mask), padded(entropies, mask) if entropy else None)
    if batch.top_ids is None:
        return scores
    return scores._replace(top=padded(logprobs[:, 1:], mask), rest=padded(rest, mask))


def likeliest_tokens(model: Decoder, batch: Batch, temperature: float, count: int) -> TopTokens:
    """The `count` < V likeliest tokens at each of the M response positions, and the rest's mass (E10)."""
    hidden = response_states(model, batch) / (temperature or 1.0)
    ids: list[Tensor] = []
    top_logprobs: list[Tensor] = []
    rests: list[Tensor] = []
    for rows in _chunks(len(hidden), model.config.vocab_size):
        logits = _promote(model.logits(hidden[rows]))  # (n, V)
        logprobs = logits.log_softmax(-1)
        top = logprobs.topk(count)  # (n, count)
        ids.append(top.indices)
        top_logprobs.append(top.values)
        rests.append(_without(logprobs, top.indices).logsumexp(-1))
    return TopTokens(torch.cat(ids), torch.cat(top_logprobs), torch.cat(rests))


def response_states(model: Decoder, batch: Batch) -> Tensor:
    """Hidden states (M, D) from which the M response tokens are predicted."""
    return F.embedding(batch.states, model(batch.tokens, layout=batch.layout))


class _Head(torch.autograd.Function):
    """The vocabulary's matrix and its softmax, in chunks of positions, with the gradient written by hand.

    Autograd would keep every chunk's probabilities for the backward pass, which is what must not happen; here the
    backward pass computes each chunk's logits again. With z = W h, p = softmax(z), H the entropy and p(rest) the mass
    of the tokens that are not among the top ones:

        d log p(a) / dz = 1_a - p      d log p(rest) / dz = 1_rest p / p(rest) - p      dH / dz = -p (log p + H)

    log p(rest) is a sum over the rest's own logits, not 1 minus the others' mass: a rest of 1e-12 keeps its digits, and
    its gradient. Of the ids (N, 1 + K) the first column is the response token, the others are the top ones.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, ids: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States (N, D), weight (V, D), ids (N, 1 + K) -> log-probabilities (N, 1 + K), log p(rest) (N,), H (N,).

        log p(rest) is 0 without top tokens, H is 0 without `with_entropy`.
        """
        ctx.cast = compute_dtype(weight)  # autocast does not reach into a Function: what it would cast is cast here
        cast_states = states.to(ctx.cast)
        matrix = weight.to(ctx.cast)
        has_top = ids.shape[1] > 1
        logprobs_of: list[Tensor] = []  # chunk by chunk
        rest_of: list[Tensor] = []
        entropy_of: list[Tensor] = []
        log_z_of: list[Tensor] = []
        for rows in _chunks(len(states), len(weight)):
            logits = _promote(cast_states[rows] @ matrix.T)  # (n, V)
            log_z = logits.logsumexp(-1, keepdim=True)  # (n, 1), the log of softmax's denominator
            entropy = torch.zeros_like(log_z[:, 0])
            if with_entropy:
                mean_logit = torch.linalg.vecdot((logits - log_z).exp_(), logits)  # (n,), E[z] = sum of p z
                entropy = log_z[:, 0] - mean_logit  # H = -E[log p] = log Z - E[z]
            rest = torch.zeros_like(entropy)  # without top tokens the rest is all of them: log 1
            if has_top:
                rest = _without(logits, ids[rows, 1:]).logsumexp(-1) - log_z[:, 0]
            logprobs_of.append(logits.gather(-1, ids[rows]) - log_z)
            rest_of.append(rest)
            entropy_of.append(entropy)
            log_z_of.append(log_z)
            del logits  # before the next chunk's are made
        logprobs = torch.cat(logprobs_of)
        rest = torch.cat(rest_of)
        entropy = torch.cat(entropy_of)
        ctx.save_for_backward(states, weight, ids, torch.cat(log_z_of), rest, entropy)
        ctx.with_entropy = with_entropy
        return logprobs, rest, entropy

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, grad_rest: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        """Gradients for states (N, D) and weight (V, D; None: frozen), from those for what `forward` returns.

        By the three lines above, summed over what has been chosen, the gradient for the logits is

            dz = scatter(grad) + grad_rest 1_rest p / p(rest) - p pull
            pull = sum of grad over a position's ids + grad_rest + grad_entropy (log p + H)
        """
        states, weight, ids, log_z, rest, entropy = ctx.saved_tensors
        cast_states = states.to(ctx.cast)
        matrix = weight.to(ctx.cast)
        has_top = ids.shape[1] > 1
        grad_weight = None  # of a frozen head
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=_promoted(weight.dtype))  # a sum over many chunks: not in bf16
        grad_states: list[Tensor] = []
        for rows in _chunks(len(states), len(weight)):
            # Computed again. What ends in _ overwrites its tensor: of (n, V) floats there shall be as few as can be.
            logprobs = _promote(cast_states[rows] @ matrix.T).sub_(log_z[rows])  # (n, V)
            pull = grad[rows].sum(-1, keepdim=True)  # (n, 1)
            to_rest = None
            if has_top:
                pull = pull + grad_rest[rows, None]
                rest_share = _without(logprobs, ids[rows, 1:]).sub_(rest[rows, None]).exp_()  # 1_rest p / p(rest)
                to_rest = rest_share.mul_(grad_rest[rows, None])
            if ctx.with_entropy:
                pull = pull + grad_entropy[rows, None] * (logprobs + entropy[rows, None])  # (n, V)
            dz = logprobs.exp_().mul_(-pull)  # -p pull
            dz.scatter_add_(1, ids[rows], grad[rows])
            if to_rest is not None:
                dz.add_(to_rest)
            dz = dz.to(ctx.cast)
            del logprobs, to_rest
            grad_states.append(dz @ matrix)
            if grad_weight is not None:
                if ctx.cast == grad_weight.dtype:
                    grad_weight.addmm_(dz.T, cast_states[rows])
                else:
                    grad_weight += dz.T @ cast_states[rows]
            del dz  # before the next chunk's are made
        return torch.cat(grad_states).to(states.dtype), grad_weight, None, None


def _chunks(count: int, vocabulary: int) -> Iterator[slice]:
    """Cuts `count` positions into pieces of so few that their logits (n, V) are at most LOGIT_FLOATS values."""
    rows = max(1, LOGIT_FLOATS // vocabulary)
    for start in range(0, max(1, count), rows):  # no position at all is one empty piece
        yield slice(start, start + rows)


def _without(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits (n, V) with -inf at ids (n, K): a copy."""
    return logits.scatter(1, ids, -torch.inf)


def _promote(logits: Tensor) -> Tensor:
    """float32, or the model's float64."""
    return logits.to(_promoted(logits.dtype))


def _promoted(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for it."""
    return torch.promote_types(dtype, torch.float32)
