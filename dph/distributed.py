"""Several processes, one run: torchrun --nproc-per-node N train.py CONFIG. Without torchrun this file does nothing.

Each process, a rank, goes through the same steps. Prompts are dealt out for sampling and micro-batches for gradients,
by cost. Answers and scores are gathered, so every rank knows all of a step, and the denominators of E4 and E5 are
global without being sent. Rank 0, the leader, writes files, words and bars.
What a rank holds of weights, gradients and moments is `train.shard`:

- none: all of them. Gradients are summed after an update's last backward pass, and every rank takes the same step.
- full: one N-th of each, by PyTorch's own engine, FSDP2. Weights are whole while a rank scores or trains, so that ranks
  may have unequally many micro-batches; gradients are summed once an update.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

T = TypeVar("T")


def rank() -> int:
    """This process's number; 0 is the leader."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def processes() -> Iterator[None]:
    """Joins what torchrun started, over NCCL on GPUs, else over gloo; only the leader prints what is no error."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=6))
    with contextlib.ExitStack() as silence:
        if rank() > 0:
            nowhere = silence.enter_context(open(os.devnull, "w"))
            silence.enter_context(contextlib.redirect_stdout(nowhere))
            silence.enter_context(contextlib.redirect_stderr(nowhere))
        yield
    dist.destroy_process_group()


def deal_share(items: Iterable[T], cost: Callable[[T], float]) -> list[T]:
    """This rank's share: the costliest are dealt first, each to the rank with the least to do. Alone: all, in order."""
    if size() == 1:
        return list(items)
    shares, loads = list[list[T]]([] for _ in range(size())), [0.0] * size()
    for item in sorted(items, key=cost, reverse=True):
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += cost(item)
    return shares[rank()]


def gather(mine: Iterable[T]) -> Iterable[T]:
    """All ranks' items, on every rank, which waits for the others; they travel pickled. Alone, the argument."""
    if size() == 1:
        return mine
    everyones: list[Any] = [()] * size()
    dist.all_gather_object(everyones, list(mine))
    return [item for items in everyones for item in items]


# ---- weights, gradients, moments -------------------------------------------------------------------------------------


def shard(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Leaves this rank one N-th of every weight, in one message a layer. Without torchrun: nothing happens."""
    if not dist.is_initialized():
        return
    for weight in model.parameters():
        weight.data = weight.data.contiguous()
    mesh = init_device_mesh(weight.device.type, (size(),))
    summed_in = torch.promote_types(weight.dtype, torch.float32)
    precision = MixedPrecisionPolicy(reduce_dtype=summed_in)
    for part in (*layers, model):
        # A pass neither gathers nor sends: `whole_weights` and `sum_gradients` say when.
        sharded = fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
        sharded.set_gradient_divide_factor(1.0)  # the sum over ranks, not their mean,
        sharded.set_force_sum_reduction_for_comms(True)  # and in a form that gloo knows, too
        sharded.set_reshard_after_backward(False)
        sharded.set_requires_gradient_sync(False)


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` has divided its weights."""
    return isinstance(model, FSDPModule)


@contextlib.contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Every weight is whole within the block: each rank may take as many passes as it likes, on its own."""
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


def sum_gradients(model: nn.Module, empty_pass: Callable[[], Tensor]) -> None:
    """Sums each trained parameter's gradient over the ranks. `empty_pass` gives a loss whose gradient is zero."""
    if isinstance(model, FSDPModule):  # sums within a backward pass, and a rank may have had none: all take one more
        model.set_requires_gradient_sync(True)
        empty_pass().backward()  # type: ignore[no-untyped-call]
        model.set_requires_gradient_sync(False)
    elif size() > 1:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        for work in [dist.all_reduce(parameter.grad, async_op=True) for parameter in trained]:
            work.wait()


def recover(model: nn.Module) -> None:
    """Makes a model fit for another pass where one was given up on some rank; all call it. Gradients stay."""
    if isinstance(model, FSDPModule):
        model.reset_iter_state()


def whole(part: Tensor) -> Tensor:
    """A weight, gradient or moment in full, gathered from all ranks: all of them have to ask."""
    return part.full_tensor() if isinstance(part, DTensor) else part


def part_of(tensor: Tensor, weight: Tensor) -> Tensor:
    """What this rank holds of a whole tensor that belongs to `weight`."""
    if not isinstance(weight, DTensor):
        return tensor
    return distribute_tensor(tensor, weight.device_mesh, weight.placements, src_data_rank=None)
