"""Rollouts: one answer as token ids with its log-probabilities, batches of them, and the one scoring function.

Answers stay token ids from the sampler to the loss: text is never tokenised again. `token_logprobs` scores them for
pi_theta, pi_old and pi_ref alike, so a ratio at equal weights is 1. Masks come from lengths, never from token values.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dph.model import Decoder

LOGIT_FLOATS = 2**24  # most values of (positions, V) held at once while scoring: 64 MB in fp32


@dataclass
class Rollout:
    """One answer to one prompt."""

    prompt: int  # index of the prompt in its source
    sample: int  # number of the answer among those to this prompt
    prompt_tokens: list[int]
    tokens: list[int]  # the end token is one of them: stopping is an action
    logprobs: list[float]  # of `tokens` under the policy that wrote them, full softmax at the sampling temperature
    finished: bool  # False where the length limit cut it
    reward: float = 0.0
    ref_logprobs: list[float] | None = None  # pi_ref's, where a loss on own samples needs them
    top: tuple[Tensor, Tensor] | None = None  # pi_ref's K likeliest tokens (T, K) and their log-probabilities (E10)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"an answer of {len(self.tokens)} tokens has {len(self.logprobs)} log-probabilities")

    def __len__(self) -> int:
        return len(self.prompt_tokens) + len(self.tokens)


class Batch(NamedTuple):
    """Rollouts side by side, padded on the right. B rows, L tokens, T response positions."""

    tokens: Tensor  # (B, L) prompt and response
    prompt_lengths: Tensor  # (B,)
    mask: Tensor  # (B, T) True at response tokens
    logprobs: Tensor  # (B, T) of the policy that wrote them, 0 at padding
    ref_logprobs: Tensor  # (B, T) of pi_ref, 0 at padding and where not known
    top_ids: Tensor | None = None  # (B, T, K) see Rollout.top
    top_logprobs: Tensor | None = None  # (B, T, K)


class Scores(NamedTuple):
    """What `token_logprobs` returns: (B, T), 0 at padding; float32, or the model's float64."""

    logprobs: Tensor  # of the response tokens
    entropy: Tensor  # of the distribution each was drawn from, in nats
    top: Tensor | None  # (B, T, K) log-probabilities of batch.top_ids


def collate(rollouts: Sequence[Rollout], device: torch.device | str) -> Batch:
    """Pads rollouts into one Batch on `device`."""
    lengths = torch.tensor([len(r.tokens) for r in rollouts])
    rows, steps = len(rollouts), int(lengths.max())
    tokens = torch.zeros(rows, max(map(len, rollouts)), dtype=torch.int64)
    logprobs, ref_logprobs = torch.zeros(rows, steps), torch.zeros(rows, steps)
    width = rollouts[0].top[0].shape[1] if rollouts[0].top is not None else 0
    top_ids, top_logprobs = torch.zeros(rows, steps, width, dtype=torch.int64), torch.zeros(rows, steps, width)
    for row, rollout in enumerate(rollouts):
        here = slice(0, len(rollout.tokens))
        tokens[row, : len(rollout)] = torch.tensor(rollout.prompt_tokens + rollout.tokens)
        logprobs[row, here] = torch.tensor(rollout.logprobs)
        if rollout.ref_logprobs is not None:
            ref_logprobs[row, here] = torch.tensor(rollout.ref_logprobs)
        if rollout.top is not None:
            top_ids[row, here], top_logprobs[row, here] = rollout.top
    mask = torch.arange(steps) < lengths[:, None]
    prompt_lengths = torch.tensor([len(r.prompt_tokens) for r in rollouts])
    tensors = [tokens, prompt_lengths, mask, logprobs, ref_logprobs] + ([top_ids, top_logprobs] if width else [])
    return Batch(*(tensor.to(device) for tensor in tensors))


def microbatches(rollouts: Sequence[Rollout], budget: int) -> Iterator[list[int]]:
    """Indices of rollouts in groups of similar length, each at most `budget` tokens with padding (or one row)."""
    order = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i]))
    group: list[int] = []
    for i in order:
        if group and (len(group) + 1) * len(rollouts[i]) > budget:  # ascending lengths: the newest is the longest
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def token_logprobs(model: Decoder, batch: Batch, temperature: float, entropy_gradient: bool = False) -> Scores:
    """log pi(o_t | s_t) of every response token, with gradient.

    The head and the softmax run on response positions alone, in chunks (see `_Head`): (B, T, V) never exists.

    Args:
        temperature: tau; 0 is scored as 1.
        entropy_gradient: whether the entropies carry a gradient, too.
    """
    states, targets = _response_states(model, batch)  # (N, D), (N,)
    ids = targets[:, None] if batch.top_ids is None else torch.cat((targets[:, None], batch.top_ids[batch.mask]), 1)
    scaled = states / (temperature or 1.0)
    logprobs, entropy = _Head.apply(scaled, model.head, ids, entropy_gradient)  # type: ignore[no-untyped-call]

    def padded(flat: Tensor) -> Tensor:
        return flat.new_zeros(*batch.mask.shape, *flat.shape[1:]).index_put((batch.mask,), flat)

    return Scores(padded(logprobs[:, 0]), padded(entropy), padded(logprobs[:, 1:]) if ids.shape[1] > 1 else None)


class _Head(torch.autograd.Function):
    """The vocabulary's softmax in chunks of positions whose logits are computed again for the gradient.

    With z = W h and p = softmax(z): d log p(a) / dz = 1_a - p, and dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, ids: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """States (N, D), weight (V, D), ids (N, K) -> log-probabilities (N, K), entropies (N,)."""
        kind = states.device.type
        ctx.cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        matrix, pieces = weight.to(ctx.cast), []
        for chunk, chosen in _chunks(len(weight), states.to(ctx.cast), ids):
            logits = _promote(chunk @ matrix.T)  # (n, V)
            total = logits.logsumexp(-1, keepdim=True)
            mean = torch.linalg.vecdot((logits - total).exp_(), logits)  # E[logit]; H = log Z - E[logit]
            pieces.append((logits.gather(-1, chosen) - total, total[:, 0] - mean, total))
        logprobs, entropy, total = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        ctx.save_for_backward(states, weight, ids, total, entropy)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients for states (N, D) and weight (V, D)."""
        states, weight, ids, total, entropy = ctx.saved_tensors
        matrix, grad_weight, grad_states = weight.to(ctx.cast), torch.zeros_like(weight), []
        rows = (states.to(ctx.cast), ids, total, grad, grad.sum(-1, keepdim=True), entropy, grad_entropy)
        for chunk, chosen, log_z, g, g_sum, h, g_h in _chunks(len(weight), *rows):
            logprobs = _promote(chunk @ matrix.T).sub_(log_z)  # (n, V)
            pull = g_sum + g_h[:, None] * (logprobs + h[:, None]) if ctx.entropy_gradient else g_sum
            dz = logprobs.exp_().mul_(-pull).scatter_add_(1, chosen, g).to(ctx.cast)
            grad_states.append(dz @ matrix)
            if ctx.cast == weight.dtype:
                grad_weight.addmm_(dz.T, chunk)
            else:
                grad_weight += dz.T @ chunk
        return torch.cat(grad_states).to(states.dtype), grad_weight, None, None


def _chunks(vocabulary: int, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cuts tensors of N rows into pieces of so few that (n, V) holds at most LOGIT_FLOATS values."""
    return zip(*(torch.split(x, max(1, LOGIT_FLOATS // vocabulary)) for x in rows), strict=True)


def _promote(logits: Tensor) -> Tensor:
    """float32, or the model's float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _response_states(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states (N, D) from which the N response tokens (N,) are predicted."""
    hidden = model(batch.tokens)  # (B, L, D)
    rows, steps = batch.mask.nonzero(as_tuple=True)  # (N,)
    positions = batch.prompt_lengths[rows] + steps
    return hidden[rows, positions - 1], batch.tokens[rows, positions]


@torch.no_grad()
def score(
    model: Decoder, rollouts: Sequence[Rollout], temperature: float, budget: int, top_k: int = 0
) -> list[tuple[list[float], tuple[Tensor, Tensor] | None]]:
    """For every rollout its tokens' log-probabilities under `model`, and the K likeliest tokens with theirs (E10)."""
    device = next(model.parameters()).device
    scores: dict[int, tuple[list[float], tuple[Tensor, Tensor] | None]] = {}
    for group in microbatches(rollouts, budget):
        batch = collate([rollouts[i] for i in group], device)
        logprobs = token_logprobs(model, batch, temperature).logprobs.tolist()
        tops: list[tuple[Tensor, Tensor]] = []
        if top_k:
            states, _ = _response_states(model, batch)
            chunks = _chunks(model.config.vocab_size, states / (temperature or 1.0))
            found = [_promote(model.logits(x)).log_softmax(-1).topk(top_k) for (x,) in chunks]
            lengths = [len(rollouts[i].tokens) for i in group]
            values, ids = (torch.split(torch.cat([f[n] for f in found]).cpu(), lengths) for n in (0, 1))
            tops = list(zip(ids, values, strict=True))
        for place, i in enumerate(group):
            scores[i] = (logprobs[place][: len(rollouts[i].tokens)], tops[place] if top_k else None)
    return [scores[i] for i in range(len(rollouts))]


def pack(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Rollouts as tensors for a safetensors file; tokens and log-probabilities end to end."""
    tensors = {
        "prompt": torch.tensor([r.prompt for r in rollouts], dtype=torch.int64),
        "sample": torch.tensor([r.sample for r in rollouts], dtype=torch.int64),
        "finished": torch.tensor([r.finished for r in rollouts], dtype=torch.bool),
        "reward": torch.tensor([r.reward for r in rollouts], dtype=torch.float64),
        "prompt_lengths": torch.tensor([len(r.prompt_tokens) for r in rollouts], dtype=torch.int64),
        "prompt_tokens": torch.tensor([t for r in rollouts for t in r.prompt_tokens], dtype=torch.int64),
        "lengths": torch.tensor([len(r.tokens) for r in rollouts], dtype=torch.int64),
        "tokens": torch.tensor([t for r in rollouts for t in r.tokens], dtype=torch.int64),
        "logprobs": torch.tensor([x for r in rollouts for x in r.logprobs], dtype=torch.float32),
    }
    tops = [r.top for r in rollouts if r.top is not None]
    if tops:
        tensors["top_ids"] = torch.cat([ids for ids, _ in tops]).int()
        tensors["top_logprobs"] = torch.cat([values for _, values in tops])
    return tensors


def unpack(tensors: Mapping[str, Tensor]) -> list[Rollout]:
    """The rollouts that `pack` packed."""
    lengths, prompt_lengths = tensors["lengths"].tolist(), tensors["prompt_lengths"].tolist()
    pieces = {
        name: torch.split(x, lengths) for name, x in tensors.items() if name in ("tokens", "logprobs") or "top" in name
    }
    prompts = torch.split(tensors["prompt_tokens"], prompt_lengths)
    rollouts = []
    for i, (prompt, sample, finished, reward) in enumerate(
        zip(*(tensors[name].tolist() for name in ("prompt", "sample", "finished", "reward")), strict=True)
    ):
        top = (pieces["top_ids"][i].long(), pieces["top_logprobs"][i]) if "top_ids" in pieces else None
        tokens, logprobs = pieces["tokens"][i].tolist(), pieces["logprobs"][i].tolist()
        rollouts.append(Rollout(prompt, sample, prompts[i].tolist(), tokens, logprobs, finished, reward, None, top))
    return rollouts
