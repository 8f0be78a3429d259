"""Rollouts: one answer as token ids with its log-probabilities, batches of them, and the one scoring function.

Answers stay token ids from the sampler to the loss: text is never tokenised again. `token_logprobs` scores them for
pi_theta, pi_old and pi_ref alike, so a ratio at equal weights is 1. Masks come from lengths, never from token values.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

    The head and the softmax run on response positions alone, in chunks that are computed again in the backward pass,
    so (B, T, V) never exists at once.

    Args:
        temperature: tau; 0 is scored as 1.
        entropy_gradient: whether the entropies carry a gradient, too.
    """
    states, targets = _response_states(model, batch)  # (N, D), (N,)
    ids = batch.top_ids[batch.mask] if batch.top_ids is not None else targets[:, None]  # (N, K)
    size = max(1, LOGIT_FLOATS // model.config.vocab_size)
    pieces = [
        checkpoint(_score, model, *chunk, temperature or 1.0, entropy_gradient, use_reentrant=False)
        for chunk in zip(*(torch.split(x, size) for x in (states, targets, ids)), strict=True)
    ]
    logprobs, entropy, top = (torch.cat(piece) for piece in zip(*pieces, strict=True))

    def padded(flat: Tensor) -> Tensor:
        return flat.new_zeros(*batch.mask.shape, *flat.shape[1:]).index_put((batch.mask,), flat)

    return Scores(padded(logprobs), padded(entropy), padded(top) if batch.top_ids is not None else None)


def _response_states(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states (N, D) from which the N response tokens (N,) are predicted."""
    hidden = model(batch.tokens)  # (B, L, D)
    rows, steps = batch.mask.nonzero(as_tuple=True)  # (N,)
    positions = batch.prompt_lengths[rows] + steps
    return hidden[rows, positions - 1], batch.tokens[rows, positions]


def _score(
    model: Decoder, states: Tensor, targets: Tensor, ids: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """States (N, D), targets (N,), ids (N, K) -> log-probabilities (N,), entropies (N,), log-probabilities (N, K)."""
    logits = _logits(model, states, temperature)  # (N, V)
    total = logits.logsumexp(-1, keepdim=True)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):  # H = log Z - E[logit]
        entropy = total[:, 0] - ((logits - total).exp() * logits).sum(-1)
    return (logits.gather(-1, targets[:, None]) - total)[:, 0], entropy, logits.gather(-1, ids) - total


def _logits(model: Decoder, states: Tensor, temperature: float) -> Tensor:
    logits = model.logits(states)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


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
            chunks = torch.split(states, max(1, LOGIT_FLOATS // model.config.vocab_size))
            found = [_logits(model, x, temperature or 1.0).log_softmax(-1).topk(top_k) for x in chunks]
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
