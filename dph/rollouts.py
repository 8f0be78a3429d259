"""Rollouts: one answer as token ids with its log-probabilities, batches of them, and the one scoring function.

Answers stay token ids from the sampler to the loss: text is never tokenised again. `token_logprobs` scores them for
pi_theta, pi_old and pi_ref alike, so a ratio at equal weights is 1. Masks come from lengths, never from token values.
What the answers of a batch have in common, their prompt above all, goes through the model once: exact, and a saving.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dph import distributed
from dph.model import Decoder, Layout

SINGLE = {"prompt": torch.int64, "sample": torch.int64, "finished": torch.bool, "reward": torch.float64}
RAGGED = {"prompt_tokens": torch.int64, "tokens": torch.int64, "logprobs": torch.float32}
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
    """Rollouts side by side, B of at most T response tokens; the model reads N tokens, common beginnings once."""

    tokens: Tensor  # (N,)
    layout: Layout  # where each of the N stands
    states: Tensor  # (M,) which of the N tokens each response token follows
    targets: Tensor  # (M,) the response tokens, row by row
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
    """Puts rollouts into one Batch on `device`."""
    nodes: dict[tuple[int, int], int] = {}  # (the node before, -1 at the start; token) -> node
    states: list[int] = []
    paths: list[list[int]] = []
    for r in rollouts:
        node, before, path = -1, len(nodes), []
        for token in (*r.prompt_tokens, *r.tokens[:-1]):  # nothing follows the last one
            node = nodes.setdefault((node, token), len(nodes))
            path.append(node)
        states += path[len(r.prompt_tokens) - 1 :]
        paths += [path] if len(nodes) > before else []
    lengths = torch.tensor([len(r.tokens) for r in rollouts])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]  # (B, T)
    known = [(r.logprobs, r.ref_logprobs or [0.0] * len(r.tokens)) for r in rollouts]
    padded = [_padded(torch.tensor([x for row in part for x in row]), mask) for part in zip(*known, strict=True)]
    if tops := [r.top for r in rollouts if r.top is not None]:
        padded += [_padded(torch.cat(parts), mask) for parts in zip(*tops, strict=True)]
    tokens = torch.tensor([token for _, token in nodes])
    targets = torch.tensor([token for r in rollouts for token in r.tokens])
    layout = Layout(*(x.to(device) for x in _layout(paths)))
    rest = (x.to(device) for x in (torch.tensor(states), targets, mask, *padded))
    return Batch(tokens.to(device), layout, *rest)


def _layout(paths: Sequence[list[int]]) -> Layout:
    """The layout of a tree's nodes by the paths to its leaves; nodes are numbered as the paths meet them."""
    lengths = torch.tensor([len(path) for path in paths])
    columns = torch.arange(int(lengths.max()))
    rows = _padded(torch.tensor([node for path in paths for node in path]), columns < lengths[:, None])  # (R, L)
    seen = torch.cat([rows.new_full((1,), -1), rows.flatten().cummax(0).values])
    cells = (seen[1:] > seen[:-1]).nonzero()[:, 0]  # a node first met is larger than all before
    return Layout(columns.expand_as(rows).flatten()[cells], rows, cells)


def _padded(flat: Tensor, mask: Tensor) -> Tensor:
    """(M, ...), row by row, to (B, T, ...) with 0 where the mask is False."""
    return flat.new_zeros(*mask.shape, *flat.shape[1:]).index_put((mask,), flat)


def microbatches(rollouts: Sequence[Rollout], budget: int) -> list[list[int]]:
    """Rollouts' indices in groups of at most `budget` tokens with padding, a prompt's together: those of this rank."""
    prompts, longest = [tuple(r.prompt_tokens) for r in rollouts], dict[tuple[int, ...], int]()
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        longest[prompt] = max(longest.get(prompt, 0), len(rollout))
    groups: list[list[int]] = []
    for i in sorted(range(len(rollouts)), key=lambda i: (longest[prompts[i]], prompts[i], len(rollouts[i]))):
        if not groups or (len(groups[-1]) + 1) * longest[prompts[i]] > budget:
            groups.append([])
        groups[-1].append(i)
    return distributed.deal(groups, lambda group: sum(len(rollouts[i]) for i in group))[distributed.rank()]


def token_logprobs(model: Decoder, batch: Batch, temperature: float, entropy_gradient: bool = False) -> Scores:
    """log pi(o_t | s_t) of every response token, with gradient.

    The head and the softmax run on response positions alone, in chunks (see `_Head`): (B, T, V) never exists.

    Args:
        temperature: tau; 0 is scored as 1.
        entropy_gradient: whether the entropies carry a gradient, too.
    """
    targets = batch.targets[:, None]
    ids = targets if batch.top_ids is None else torch.cat((targets, batch.top_ids[batch.mask]), 1)  # (M, 1 + K)
    scaled = _response_states(model, batch) / (temperature or 1.0)
    logprobs, entropy = _Head.apply(scaled, model.head, ids, entropy_gradient)  # type: ignore[no-untyped-call]
    top = _padded(logprobs[:, 1:], batch.mask) if ids.shape[1] > 1 else None
    return Scores(_padded(logprobs[:, 0], batch.mask), _padded(entropy, batch.mask), top)


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


def _response_states(model: Decoder, batch: Batch) -> Tensor:
    """Hidden states (M, D) from which the M response tokens are predicted."""
    return F.embedding(batch.states, model(batch.tokens, layout=batch.layout))


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
        tops: list[Any] = [None] * len(group)
        if top_k:
            chunks = _chunks(model.config.vocab_size, _response_states(model, batch) / (temperature or 1.0))
            found = [_promote(model.logits(x)).log_softmax(-1).topk(top_k) for (x,) in chunks]
            lengths = [len(rollouts[i].tokens) for i in group]
            values, ids = (torch.split(torch.cat([f[n] for f in found]).cpu(), lengths) for n in (0, 1))
            tops = list(zip(ids, values, strict=True))
        scores |= {i: (x[: len(rollouts[i].tokens)], t) for i, x, t in zip(group, logprobs, tops, strict=True)}
    scores = dict(distributed.gather(scores.items()))
    return [scores[i] for i in range(len(rollouts))]


def pack(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Rollouts as tensors for a safetensors file; tokens and log-probabilities end to end."""
    tensors = {name: torch.tensor([getattr(r, name) for r in rollouts], dtype=kind) for name, kind in SINGLE.items()}
    for name, kind in RAGGED.items():
        tensors[name] = torch.tensor([x for r in rollouts for x in getattr(r, name)], dtype=kind)
    tensors["prompt_lengths"] = torch.tensor([len(r.prompt_tokens) for r in rollouts], dtype=torch.int64)
    tensors["lengths"] = torch.tensor([len(r.tokens) for r in rollouts], dtype=torch.int64)
    if tops := [r.top for r in rollouts if r.top is not None]:
        tensors["top_ids"] = torch.cat([ids for ids, _ in tops]).int()
        tensors["top_logprobs"] = torch.cat([values for _, values in tops])
    return tensors


def unpack(tensors: Mapping[str, Tensor]) -> list[Rollout]:
    """The rollouts that `pack` packed."""
    lengths, asked = tensors["lengths"].tolist(), tensors["prompt_lengths"].tolist()
    pieces = {n: torch.split(x, lengths) for n, x in tensors.items() if n in ("tokens", "logprobs") or "top" in n}
    pieces["prompt_tokens"] = torch.split(tensors["prompt_tokens"], asked)
    singles = {name: tensors[name].tolist() for name in SINGLE}
    rollouts = []
    for i in range(len(lengths)):
        values: dict[str, Any] = {name: column[i] for name, column in singles.items()}
        values |= {name: pieces[name][i].tolist() for name in RAGGED}
        top = (pieces["top_ids"][i].long(), pieces["top_logprobs"][i]) if "top_ids" in pieces else None
        rollouts.append(Rollout(**values, top=top))
    return rollouts
