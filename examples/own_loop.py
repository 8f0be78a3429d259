"""The rehearsal loss in somebody else's loop: any model, any optimizer, fifteen lines (E5).

`logits` are your model's for the stored answers' tokens, `ref_logprobs` what the initial model gave those tokens.
"""

import torch
from torch import Tensor

from dph.divergences import make_divergence
from dph.losses import aggregate, denominator, rehearsal_loss

js = make_divergence("js")


def rehearse(logits: Tensor, tokens: Tensor, ref_logprobs: Tensor, lengths: Tensor) -> Tensor:
    """L_pef, to add to your loss: logits (B, T, V), tokens and ref_logprobs (B, T), lengths (B,) -> a scalar."""
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    values = rehearsal_loss(logprobs, ref_logprobs, mask, js)
    return aggregate(values, mask, "token-mean", denominator(lengths, "token-mean"))
