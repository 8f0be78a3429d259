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
from dph.rollouts import Batch, TopTokens, padded

LOGIT_FLOATS = 2**24  # most logits held at once: 64 MB in fp32


class Scores(NamedTuple):
    """What `token_logprobs` returns: (B, T), 0 at padding; float32, or the model's float64."""

    logprobs: Tensor  # of the response tokens
    entropy: Tensor  # of the distribution each was drawn from, in nats
    top: Tensor | None = None  # (B, T, K) log-probabilities of batch.top_ids
    rest: Tensor | None = None  # (B, T) log of the mass of all other tokens


def token_logprobs(model: Decoder, batch: Batch, temperature: float, entropy_gradient: bool = False) -> Scores:
    """Log-probabilities of a batch's response tokens, with gradient, and entropies.

    Args:
        temperature: tau; 0 is scored as 1.
        entropy_gradient: whether the entropies carry a gradient, too.
    """
    hidden = response_states(model, batch) / (temperature or 1.0)  # (M, D); (W h) / tau = W (h / tau)
    mask = batch.mask
    top_ids = batch.targets.new_empty(len(batch.targets), 0) if batch.top_ids is None else batch.top_ids[mask]  # (M, K)
    ids = torch.cat((batch.targets[:, None], top_ids), 1)  # (M, 1 + K)
    logprobs, rest, entropy = _Head.apply(hidden, model.head, ids, entropy_gradient)  # type: ignore[no-untyped-call]
    scores = Scores(padded(logprobs[:, 0], mask), padded(entropy, mask))
    if batch.top_ids is None:
        return scores
    return scores._replace(top=padded(logprobs[:, 1:], mask), rest=padded(rest, mask))


def likeliest_tokens(model: Decoder, batch: Batch, temperature: float, count: int) -> TopTokens:
    """The `count` < V likeliest tokens at each of the M response positions, and the rest's mass (E10)."""
    hidden = response_states(model, batch) / (temperature or 1.0)
    found = []
    for (chunk,) in _chunks(model.config.vocab_size, hidden):
        logprobs = _promote(model.logits(chunk)).log_softmax(-1)  # (n, V)
        top = logprobs.topk(count)
        found.append(TopTokens(top.indices, top.values, _without(logprobs, top.indices).logsumexp(-1)))
    return TopTokens(*(torch.cat(parts) for parts in zip(*found, strict=True)))


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
        ctx: Any, states: Tensor, weight: Tensor, ids: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States (N, D), weight (V, D), ids (N, 1 + K) -> log-probabilities (N, 1 + K), log p(rest) (N,), H (N,)."""
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
            logprobs = logits.gather(-1, chosen) - log_z
            rest = torch.zeros_like(entropy)  # all tokens: log 1
            if chosen.shape[1] > 1:
                rest = _without(logits, chosen[:, 1:]).logsumexp(-1) - log_z[:, 0]
            pieces.append((logprobs, rest, entropy, log_z))
        logprobs, rest, entropy, log_z = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        ctx.save_for_backward(states, weight, ids, log_z, rest, entropy)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, rest, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_rest: Tensor, grad_entropy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients for states (N, D) and weight (V, D), from those for what `forward` returns."""
        states, weight, ids, log_z, rest, entropy = ctx.saved_tensors
        matrix = weight.to(ctx.cast)
        grad_weight = torch.zeros_like(weight, dtype=_promoted(weight.dtype))  # a sum over many chunks: not in bf16
        grad_states = []
        columns = (states.to(ctx.cast), ids, log_z, rest, entropy, grad, grad_rest, grad_entropy)
        for chunk, chosen, log_z_n, rest_n, entropy_n, grad_n, grad_rest_n, grad_entropy_n in _chunks(
            len(weight), *columns
        ):
            logprobs = _promote(chunk @ matrix.T).sub_(log_z_n)  # (n, V)
            pull = grad_n.sum(-1, keepdim=True)  # (n, 1), what every token of the vocabulary is pushed down by
            to_rest = None
            if chosen.shape[1] > 1:
                pull = pull + grad_rest_n[:, None]
                to_rest = (_without(logprobs, chosen[:, 1:]) - rest_n[:, None]).exp_().mul_(grad_rest_n[:, None])
            if ctx.entropy_gradient:
                pull = pull + grad_entropy_n[:, None] * (logprobs + entropy_n[:, None])
            dz = logprobs.exp_().mul_(-pull).scatter_add_(1, chosen, grad_n)  # (n, V)
            dz = (dz if to_rest is None else dz.add_(to_rest)).to(ctx.cast)
            grad_states.append(dz @ matrix)
            if ctx.cast == grad_weight.dtype:
                grad_weight.addmm_(dz.T, chunk)
            else:
                grad_weight += dz.T @ chunk
        return torch.cat(grad_states).to(states.dtype), grad_weight, None, None


def _chunks(vocabulary: int, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cuts tensors of N rows into pieces of so few that (n, V) holds at most LOGIT_FLOATS values."""
    rows = max(1, LOGIT_FLOATS // vocabulary)
    return zip(*(torch.split(column, rows) for column in columns), strict=True)


def _without(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits (n, V) with -inf at ids (n, K): a copy."""
    return logits.scatter(1, ids, -torch.inf)


def _promote(logits: Tensor) -> Tensor:
    """float32, or the model's float64."""
    return logits.to(_promoted(logits.dtype))


def _promoted(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for it."""
    return torch.promote_types(dtype, torch.float32)
