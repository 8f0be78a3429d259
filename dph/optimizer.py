"""AdamW, and how bf16 weights learn from steps that are smaller than their last digit.

A bf16 number has 8 bits of mantissa: added to it, whatever is below a 512th of it is rounded away. A step of RL is far
smaller (lr = 1e-6 on a weight of 0.02 is a 20,000th), so bf16 weights alone would stand still.

But a bf16 number is the upper half of a float32's 32 bits, and this file keeps the lower half, too: beside each weight
lie the 16 bits that rounding took from it (`rest`). For a step the two halves become one float32. AdamW moves it, and
it is cut in two again. So the weights that learn are float32 to the last bit; the model reads their upper halves.

    bytes a parameter           weight   rest   gradient   moments   copies in bf16
    model.dtype = "fp32"          4       0        4          8      2 to sample, 2 of autocast in the forward pass
    model.dtype = "bf16"          2       2        4          8      none

The copies are those of a GPU; a CPU samples with a packed copy in any case (dph/packing.py).
Gradients are summed in float32. In shards (train.shard = "full") the sum over the processes is rounded to the weight's
type: of a bf16 weight's gradient a process then keeps 2 bytes for each parameter of its share.

Compared with rounding to nearest, at random and with a bf16 remainder: python -m benchmarks.bf16_weights
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from dph.config import OptimConfig

HALF = 16  # bits


def make_adamw(parameters: Iterable[Tensor], settings: OptimConfig) -> torch.optim.Optimizer:
    """AdamW for the parameters that are trained: PyTorch's own, or `SplitAdamW` where they are bf16."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    beta1, beta2 = settings.betas
    how: dict[str, Any] = {"lr": settings.lr, "betas": (beta1, beta2), "weight_decay": settings.weight_decay}
    kinds = {parameter.dtype for parameter in trained}
    if kinds == {torch.bfloat16}:
        return SplitAdamW(trained, **how)
    assert torch.bfloat16 not in kinds, "bf16 weights beside others would stand still"
    return torch.optim.AdamW(trained, fused=True, **how)


def join(weight: Tensor, rest: Tensor) -> Tensor:
    """The float32 whose upper half is `weight` (bf16), rounded, and whose lower half is `rest` (int16)."""
    upper = weight.view(torch.int16).to(torch.int32) << HALF
    return (upper + rest).view(torch.float32)


def split(whole: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 as the nearest bf16 and what is left of its bits: (weight, rest), of which `join` is the inverse.

    Read as whole numbers, floats of one sign stand in the order of their size. So the nearest bf16 is the nearest
    multiple of 2^16, and the rest lies between -2^15 and 2^15 - 1, which int16 holds.
    """
    bits = whole.view(torch.int32)
    upper = (bits + (1 << (HALF - 1))) >> HALF
    rest = bits - (upper << HALF)
    return upper.to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


class SplitAdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay, arXiv 1711.05101) in float32 for weights that are held in bf16.

    The state of each weight is what torch.optim.AdamW keeps (`step`, and in float32 `exp_avg` and `exp_avg_sq`), and
    `rest` (int16), see `join`. Gradients may be of any type; those of the trained weights are set to be summed in
    float32, since a sum over micro-batches loses in bf16 what the weights would.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8})
        for group in self.param_groups:
            for weight in group["params"]:
                if not isinstance(weight, DTensor):  # FSDP2 sums in float32 by itself, and rounds the sum once
                    weight.grad_dtype = torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step for every weight that has a gradient; one weight at a time is in float32."""
        assert closure is None, "no loss is computed again here"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, group)

    def _step(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.float32)
            state["rest"] = torch.zeros_like(weight, dtype=torch.int16)
        assert weight.grad is not None
        held, rest = _here(weight), _here(state["rest"])
        whole = join(held, rest)
        adamw(
            params=[whole],
            grads=[_here(weight.grad).float()],
            exp_avgs=[_here(state["exp_avg"])],
            exp_avg_sqs=[_here(state["exp_avg_sq"])],
            max_exp_avg_sqs=[],
            state_steps=[state["step"]],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        upper, lower = split(whole)
        held.copy_(upper)
        rest.copy_(lower)


def _here(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this process holds; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
