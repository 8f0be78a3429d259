"""Matrices in oneDNN's own order, for a copy of the model that only samples, on a CPU.

A product by few rows takes about as long as reading its matrix. In the order that oneDNN chooses it takes half to nine
tenths of the time, in fp32 and in bf16 (docs/performance.md). The order is known to oneDNN alone, so nothing else can
be done with such a matrix: the trained weights stay as they are, and new ones are packed anew.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dph.model import Decoder


class PackedLinear(nn.Module):
    """A linear layer that holds its matrix packed, and no other."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight (d_out, d_in); bias (d_out,)."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        """Takes another matrix (d_out, d_in)."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d_in) -> (..., d_out): what F.linear(x, weight, bias) gives."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]


def can_pack(model: Decoder, dtype: torch.dtype) -> bool:
    """Whether a copy of this model in `dtype` can be packed: fp32, or bf16 where the processor has its instructions."""
    if model.head.device.type != "cpu" or model.compiled:  # a compiler cannot look into a packed matrix
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False  # another kind of processor, where this was never tried
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def pack(model: Decoder) -> None:
    """Packs the matrices of a model that `can_pack` allows, in place. The embedding stays: its rows are read."""
    for name, linear in list(model.model.layers.named_modules()):
        if isinstance(linear, nn.Linear):
            model.model.layers.set_submodule(name, PackedLinear(linear.weight, linear.bias))
    model.packed_head = PackedLinear(model.head)


@torch.no_grad()
def set_weights(model: Decoder, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Gives a model, packed or not, new weights, by name and of any type: those of the model that it is a copy of."""
    parameters = dict(model.named_parameters())
    packed = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    dtype = model.head.dtype
    for name, weight in weights:
        if name in parameters:
            parameters[name].copy_(weight)
        else:
            packed[name].pack(weight.to(dtype))
    if isinstance(model.packed_head, PackedLinear):
        model.packed_head.pack(model.head)
