"""LoRA (arXiv 2106.09685): a frozen matrix W learns through two thin ones, h = W x + s B A x with s = alpha / r.

x (d_in,), W (d_out, d_in), A (r, d_in), B (d_out, r). Where full training follows G = dL/dW, here

    dL/dB = s G A^T        dL/dA = s B^T G

so r (d_in + d_out) numbers have a gradient and moments, in place of d_in d_out. B starts at zero: the first policy is
pi_ref to the bit. And pi_ref takes no memory of its own: it is the policy with its adapters off (`as_reference`).

Every linear layer of the decoder's layers has an adapter. Embedding, head, norms and biases stay as they are. Training
and scoring compute the formula above; sampling takes a plain model of the matrices W + s B A (`merged`).

Simplified: no dropout; one rank for all layers. What to set: docs/adapters.md. Files: dph/adapter_folder.py.
A run's adapter becomes a whole model with: python -m dph.adapter merge RUN_OR_CHECKPOINT OUT
"""

import hashlib
import math
import runpy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dph.errors import UserError
from dph.model import Decoder


class AdaptedLinear(nn.Module):
    """h = W x + s B A x. W and the bias are a linear layer's own; A and B are float32, or float64 beside float64."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias  # (d_out, d_in); (d_out,) or None
        self.scale = alpha / rank  # s
        self.on = True
        device = linear.weight.device
        dtype = torch.promote_types(linear.weight.dtype, torch.float32)
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False, device=device, dtype=dtype)  # A (r, d_in)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False, device=device, dtype=dtype)  # B (d_out, r)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d_in) -> (..., d_out)."""
        h = F.linear(x, self.weight, self.bias)
        if not self.on:
            return h
        low: Tensor = self.lora_A(x.to(self.lora_A.weight.dtype))  # A x, (..., r)
        change: Tensor = self.lora_B(low)  # B A x, (..., d_out)
        return h + self.scale * change.to(h.dtype)

    def merged(self) -> Tensor:
        """W + s B A, (d_out, d_in), in the type of A and B; laid out in memory as W is."""
        a, b = self.lora_A.weight, self.lora_B.weight
        return self.weight.detach().to(b.dtype, copy=True).addmm_(b, a, alpha=self.scale)


@torch.no_grad()
def add_adapters(model: Decoder, rank: int, alpha: float, base: str, seed: int = 0) -> None:
    """Freezes a model and puts an adapter on each linear layer of its layers, in place.

    Args:
        base: the folder or hub name that the model came from; PEFT's files name it.
        seed: of the numbers that A starts with, uniform in ±1 / sqrt(d_in). B starts at zero.
    """
    model.base = base
    model.base_sha256 = _hash_in_bf16(model)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, linear in _linears(model).items():
        adapted = AdaptedLinear(linear, rank, alpha)
        bound = 1 / math.sqrt(linear.in_features)
        start = torch.empty(rank, linear.in_features).uniform_(-bound, bound, generator=generator)
        adapted.lora_A.weight.copy_(start)
        adapted.lora_B.weight.zero_()
        layer, _, place = name.rpartition(".")
        setattr(model.get_submodule(layer), place, adapted)


def _hash_in_bf16(model: Decoder) -> str:
    """SHA-256 of a model's weights, rounded to bf16: the same whether it was loaded in bf16 or in a wider type."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        rounded = weight.detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(rounded.view(torch.int16).numpy().data)  # NumPy has no bf16
    return digest.hexdigest()


def check_rank(model: Decoder, rank: int) -> None:
    """Raises a UserError where r is above the rank of a matrix that it is to change: B A would say no more."""
    for name, linear in _linears(model).items():
        rows, columns = linear.weight.shape
        if rank > min(rows, columns):
            size = f"{name} is {rows} x {columns}"
            raise UserError(f"model.adapter_rank = {rank} should be at most {min(rows, columns)}: {size}")


def _linears(model: Decoder) -> dict[str, nn.Linear]:
    """By name: q, k, v, o, gate, up and down of every layer."""
    modules = model.model.layers.named_modules(prefix="model.layers")
    return {name: module for name, module in modules if isinstance(module, nn.Linear)}


def adapters(model: Decoder) -> dict[str, AdaptedLinear]:
    """A model's adapted layers by name; none in a plain model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


@contextmanager
def as_reference(model: Decoder) -> Iterator[Decoder]:
    """Within the block the model is pi_ref: its adapters, where it has any, are off."""
    adapted = adapters(model).values()
    for layer in adapted:
        layer.on = False
    try:
        yield model
    finally:
        for layer in adapted:
            layer.on = True


@torch.no_grad()
def merged_weights(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The names and weights of the plain model that computes the same, one after another.

    They are made as they are asked for: W + s B A where an adapter is on, else the model's own.
    """
    adapted = adapters(model)
    for name, weight in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        if owner.endswith((".lora_A", ".lora_B")):
            continue
        layer = adapted.get(owner)
        if layer is not None and layer.on and kind == "weight":
            yield name, layer.merged()
        else:
            yield name, weight


def merged(model: Decoder, dtype: torch.dtype) -> Decoder:
    """A plain copy of a model, in `dtype`, without gradients: what samples, and what is saved to be used elsewhere."""
    with torch.device("meta"):
        plain = Decoder(model.config)
    weights = {name: weight.detach().to(dtype, copy=True) for name, weight in merged_weights(model)}
    plain.load_state_dict(weights, assign=True)
    return plain.requires_grad_(False)


if __name__ == "__main__":
    runpy.run_module("dph.merge", run_name="__main__")  # not imported: it stands far above this file
