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

from dph.model import Decoder
from dph.rollouts import Batch, padded

LOGIT_FLOATS = 2**24  # most logits held at once: 64 MB in fp32


class Scores(NamedTuple):
    """What `token_logprobs` returns: (B, T), 0 at padding; float32, or the model's float64."""

    logprobs: Tensor  # of the response tokens
    entropy: Tensor  # of the distribution each was drawn from, in nats
    top: Tensor | None  # (B, T, K) log-probabilities of batch.top_ids


def token_logprobs(model: Decoder, batch: Batch, temperature: float, entropy_gradient: bool = False) -> Scores:
    """Log-probabilities of a batch's response tokens, with gradient, and entropies.

    Args:
        temperature: tau; 0 is scored as 1.
        entropy_gradient: whether the entropies carry a gradient, too.
    """
    hidden = response_states(model, batch) / (temperature or 1.0)  # (M, D); (W h) / tau = W (h / tau)
    ids = batch.targets[:, None]  # (M, 1)
    if batch.top_ids is not None:
        ids = torch.cat((ids, batch.top_ids[batch.mask]), 1)  # (M, 1 + K)
    logprobs, entropy = _Head.apply(hidden, model.head, ids, entropy_gradient)  # type: ignore[no-untyped-call]
    return Scores(
        logprobs=padded(logprobs[:, 0], batch.mask),
        entropy=padded(entropy, batch.mask),
        top=padded(logprobs[:, 1:], batch.mask) if batch.top_ids is not None else None,
    )


def likeliest_tokens(model: Decoder, batch: Batch, temperature: float, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens (M, K) at each response position, and their log-probabilities (E10)."""
    hidden = response_states(model, batch) / (temperature or 1.0)
    found = []
    for (chunk,) in _chunks(model.config.vocab_size, hidden):
        found.append(_promote(model.logits(chunk)).log_softmax(-1).topk(count))
    ids = torch.cat([top.indices for top in found])
    return ids, torch.cat([top.values for top in found])


def response_states(model: Decoder, batch: Batch) -> Tensor:
    """Hidden states (M, D) from which the M response tokens are predicted."""
    return F.embedding(batch.states, model(batch.tokens, layout=batch.layout))


class _Head(torch.autograd.Function):
    """The vocabulary's matrix and its softmax, in chunks of positions, with the gradient written by hand.

    Autograd would keep every chunk's probabilities for the backward pass, which is what must not happen; here the
    backward pass computes each chunk's logits again. With z = W h, p = softmax(z) and H the entropy:

        d log p(a) / dz = 1_a - p          dH / dz = -p (log p + H)
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, ids: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """States (N, D), weight (V, D), ids (N, K) -> log-probabilities (N, K), entropies (N,)."""
        device = states.device.type
        # Autocast does not reach into a Function: what it would cast is cast here.
        ctx.cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        matrix = weight.to(ctx.cast)
        pieces = []
        for chunk, chosen in _chunks(len(weight), states.to(ctx.cast), ids):
            logits = _promote(chunk @ matrix.T)  # (n, V)
            log_z = logits.logsumexp(-1, keepdim=True)  # (n, 1)
            mean_logit = torch.linalg.vecdot((logits - log_z).exp_(), logits)  # (n,)
            entropy = log_z[:, 0] - mean_logit  # H = log Z - E[z]
            pieces.append((logits.gather(-1, chosen) - log_z, entropy, log_z))
        logprobs, entropy, log_z = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        ctx.save_for_backward(states, weight, ids, log_z, entropy)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients for states (N, D) and weight (V, D), from those for log-probabilities (N, K) and entropies (N,)."""
        states, weight, ids, log_z, entropy = ctx.saved_tensors
        matrix = weight.to(ctx.cast)
        grad_weight = torch.zeros_like(weight)
        grad_states = []
        columns = (states.to(ctx.cast), ids, log_z, grad, entropy, grad_entropy)
        for chunk, chosen, log_z_n, grad_n, entropy_n, grad_entropy_n in _chunks(len(weight), *columns):
            logprobs = _promote(chunk @ matrix.T).sub_(log_z_n)  # (n, V)
            pull = grad_n.sum(-1, keepdim=True)  # (n, 1), what every token of the vocabulary is pushed down by
            if ctx.entropy_gradient:
                pull = pull + grad_entropy_n[:, None] * (logprobs + entropy_n[:, None])
            dz = logprobs.exp_().mul_(-pull).scatter_add_(1, chosen, grad_n).to(ctx.cast)  # (n, V)
            grad_states.append(dz @ matrix)
            if ctx.cast == weight.dtype:
                grad_weight.addmm_(dz.T, chunk)
            else:
                grad_weight += dz.T @ chunk
        return torch.cat(grad_states).to(states.dtype), grad_weight, None, None


def _chunks(vocabulary: int, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cuts tensors of N rows into pieces of so few that (n, V) holds at most LOGIT_FLOATS values."""
    rows = max(1, LOGIT_FLOATS // vocabulary)
    return zip(*(torch.split(column, rows) for column in columns), strict=True)


def _promote(logits: Tensor) -> Tensor:
    """float32, or the model's float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
