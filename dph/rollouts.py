"""Rollouts: one answer as token ids with its log-probabilities, batches of them, and the one scoring function.

Answers stay token ids from the sampler to the loss: text is never tokenised again. `token_logprobs` scores them for
pi_theta, pi_old and pi_ref alike, so a ratio at equal weights is 1. Masks come from lengths, never from token values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dph.model import Decoder

LOGIT_FLOATS = 2**24  # most values of (positions, V) held at once while scoring: 64 MB in fp32


@dataclass
class Rollout:
    """One answer to one prompt."""

    prompt: int  # index of the prompt in its source
    sample: int  # number of the answer among those to this prompt
    prompt_tokens: list[int]
    tokens: list[int]  # the end token is one of them: stopping is an action
    logprobs: list[float]  # of `tokens`, full softmax at the sampling temperature
    finished: bool  # False where the length limit cut it
    reward: float = 0.0
    ref_logprobs: list[float] | None = None  # pi_ref's, where a penalty on own samples needs them

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"an answer of {len(self.tokens)} tokens has {len(self.logprobs)} log-probabilities")

    def __len__(self) -> int:
        return len(self.prompt_tokens) + len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """Rollouts side by side, padded on the right. B rows, L tokens, T response positions."""

    tokens: Tensor  # (B, L) prompt and response
    prompt_lengths: Tensor  # (B,)
    mask: Tensor  # (B, T) True at response tokens
    logprobs: Tensor  # (B, T) of the policy that wrote them, 0 at padding
    ref_logprobs: Tensor  # (B, T) of pi_ref, 0 at padding and where not known


def collate(rollouts: Sequence[Rollout], device: torch.device | str) -> Batch:
    """Pads rollouts into one Batch on `device`."""
    lengths = torch.tensor([len(r.tokens) for r in rollouts])
    tokens = torch.zeros(len(rollouts), max(map(len, rollouts)), dtype=torch.int64)
    logprobs = torch.zeros(len(rollouts), int(lengths.max()))
    ref_logprobs = torch.zeros_like(logprobs)
    for row, rollout in enumerate(rollouts):
        tokens[row, : len(rollout)] = torch.tensor(rollout.prompt_tokens + rollout.tokens)
        logprobs[row, : len(rollout.tokens)] = torch.tensor(rollout.logprobs)
        if rollout.ref_logprobs is not None:
            ref_logprobs[row, : len(rollout.tokens)] = torch.tensor(rollout.ref_logprobs)
    mask = torch.arange(logprobs.shape[1]) < lengths[:, None]
    prompt_lengths = torch.tensor([len(r.prompt_tokens) for r in rollouts])
    return Batch(*(x.to(device) for x in (tokens, prompt_lengths, mask, logprobs, ref_logprobs)))


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


def token_logprobs(model: Decoder, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """log pi(o_t | s_t) of every response token, and the entropy of the distribution it was drawn from.

    The head and the softmax run on response positions alone, in chunks that are computed again in the backward pass,
    so (B, T, V) never exists at once.

    Args:
        temperature: tau; 0 is scored as 1.

    Returns: log-probabilities (B, T) with gradient, entropies (B, T) in nats without; 0 at padding; float32 (or the
        model's float64).
    """
    hidden = model(batch.tokens)  # (B, L, D)
    rows, steps = batch.mask.nonzero(as_tuple=True)  # (N,)
    positions = batch.prompt_lengths[rows] + steps
    states, targets = hidden[rows, positions - 1], batch.tokens[rows, positions]  # (N, D), (N,)
    size = max(1, LOGIT_FLOATS // model.config.vocab_size)
    scores, entropies = [], []
    for chunk, target in zip(torch.split(states, size), torch.split(targets, size), strict=True):
        score, entropy = checkpoint(_score, model, chunk, target, temperature or 1.0, use_reentrant=False)
        scores.append(score)
        entropies.append(entropy)
    flat = torch.cat(scores) if scores else states.new_zeros(0, dtype=batch.logprobs.dtype)
    logprobs = flat.new_zeros(batch.mask.shape).masked_scatter(batch.mask, flat)
    entropy = flat.new_zeros(batch.mask.shape).masked_scatter(batch.mask, torch.cat(entropies) if entropies else flat)
    return logprobs, entropy.detach()


@torch.no_grad()
def score(model: Decoder, rollouts: Sequence[Rollout], temperature: float, budget: int) -> list[list[float]]:
    """The log-probabilities of every rollout's tokens under `model`, in micro-batches of `budget` tokens."""
    device = next(model.parameters()).device
    scores: list[list[float]] = [[] for _ in rollouts]
    for group in microbatches(rollouts, budget):
        logprobs, _ = token_logprobs(model, collate([rollouts[i] for i in group], device), temperature)
        for i, row in zip(group, logprobs.tolist(), strict=True):
            scores[i] = row[: len(rollouts[i].tokens)]
    return scores


def _score(model: Decoder, states: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """States (N, D), targets (N,) -> log-probabilities (N,), entropies (N,)."""
    logits = model.logits(states)  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    total = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - total
    with torch.no_grad():  # H = log Z - E[logit]
        entropy = total - ((logits - total[:, None]).exp() * logits).sum(-1)
    return logprobs, entropy
