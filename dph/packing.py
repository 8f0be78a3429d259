"""Matrices as a CPU's bf16 products read them, for a model that only samples.

A product by few rows takes about as long as reading its matrix, and oneDNN reads one faster in an order of its own. It
is one and a half times as fast for 2 to 16 rows, a third faster for 64 (docs/performance.md).
The plain weights stay where they are, so the copy takes as much memory again.
"""

import torch
from torch import Tensor, nn

from dph.model import Decoder


class PackedLinear(nn.Module):
    """A linear layer that computes with a packed copy of its weight, as it was when `pack` was last called."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias  # (outputs, inputs); (outputs,) or None
        self.pack()

    def pack(self) -> None:
        """Copies the weight in oneDNN's order."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """x (..., inputs) -> (..., outputs): what F.linear(x, weight, bias) gives."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]


def pack(model: Decoder) -> None:
    """Packs the matrices of a bf16 model on a CPU, and again whenever its weights have changed; leaves others alone."""
    weight = model.head
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or model.compiled:
        return  # a compiler cannot look into a packed matrix
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # a processor without AVX-512, or another kind of processor
        return
    if model.packed_head is None:
        for module in list(model.model.layers.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, PackedLinear(child))
        vocabulary = nn.Linear(1, 1, bias=False, device="meta")
        vocabulary.weight = (model.model.embed_tokens if model.lm_head is None else model.lm_head).weight
        model.packed_head = PackedLinear(vocabulary)
        return
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.pack()
