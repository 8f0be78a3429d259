"""Which token comes next: a draw from softmax(logits / temperature) by one uniform number, and its log-probability.

The plain form: `torch.multinomial(softmax(logits / temperature), 1)`. Here the cumulative distribution is inverted, so
that a uniform number decides and a stream of them can belong to an answer. It takes two stages, sums of blocks of 128
tokens and then one block, in place of a cumulative sum over the whole vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # tokens summed together in the first stage of a draw
NUCLEUS = 1024  # likeliest tokens looked at first for top_p


def draw(logits: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability under the full softmax.

    Args:
        logits: (R, V), any floating type.
        uniforms: (R,) float64 in [0, 1).

    Returns: tokens (R,) int64, log-probabilities (R,) of softmax(logits / temperature).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = logits if temperature in (0, 1) else logits / temperature
    probs = torch.softmax(scaled, dim=-1)
    if temperature == 0:
        tokens = logits.argmax(-1)
    elif top_p < 1:
        tokens = _draw_nucleus(probs, uniforms, top_p)
    else:
        tokens = inverse_cdf(probs, uniforms)
    tokens = tokens.clamp(max=probs.shape[1] - 1)  # NaN has no place in a cumulative sum; its log-probability tells
    drawn = probs.gather(1, tokens[:, None])[:, 0]
    return tokens, drawn.log().float()


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index at which the cumulative weight exceeds uniform * total: weights (R, V) >= 0, uniforms (R,)."""
    rows, size = weights.shape
    padding = -size % BLOCK
    padded = F.pad(weights, (0, padding)) if padding else weights
    blocks = padded.view(rows, -1, BLOCK)  # (R, V / 128, 128)
    cumulative = blocks.sum(-1).double().cumsum(-1)  # (R, V / 128)
    total = cumulative[:, -1]
    block, rest = _search(cumulative, uniforms * total)
    chosen = blocks[torch.arange(rows, device=weights.device), block]  # (R, 128)
    inside, _ = _search(chosen.double().cumsum(-1), rest)
    return block * BLOCK + inside


def _search(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first index with cumulative > target, never one without weight, and the target's distance from its start."""
    total = cumulative[:, -1]
    target = torch.minimum(target, total * (1 - 1e-15))[:, None]  # rounding must not step over the end
    index = torch.searchsorted(cumulative, target, right=True)
    index = index.clamp(max=cumulative.shape[1] - 1)  # (R, 1)
    previous = cumulative.gather(1, (index - 1).clamp(min=0))
    before = torch.where(index > 0, previous, 0.0)
    return index[:, 0], (target - before)[:, 0]


def _draw_nucleus(probs: Tensor, uniforms: Tensor, top_p: float, look_at: int = NUCLEUS) -> Tensor:
    """Draws from the smallest set of likeliest tokens whose mass reaches top_p; looks at all where `look_at` do not."""
    top, ids = probs.topk(min(look_at, probs.shape[1]), dim=-1)
    place = inverse_cdf(nucleus(top, top_p), uniforms)
    tokens = ids.gather(1, place[:, None])[:, 0]
    short = (top.sum(-1) < top_p).nonzero()[:, 0]
    if len(short) and top.shape[1] < probs.shape[1]:
        tokens[short] = _draw_nucleus(probs[short], uniforms[short], top_p, probs.shape[1])
    return tokens


def nucleus(sorted_probs: Tensor, top_p: float) -> Tensor:
    """Descending probabilities (R, K), zero where those before already hold top_p; the first always stays."""
    before = sorted_probs.double().cumsum(-1) - sorted_probs
    return torch.where(before < top_p, sorted_probs, 0.0)
