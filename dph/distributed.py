"""Several processes, one run: torchrun --nproc-per-node N train.py CONFIG. Without torchrun this file does nothing.

Each process, a rank, holds the whole policy and goes through the same steps. Prompts are dealt out for sampling and
micro-batches for gradients, by cost; answers and scores are gathered, so that every rank knows all of a step, and the
denominators of E4 and E5 are global without being sent. Gradients are summed on every rank, while the last backward
pass is under way; each updates the parameters that it owns, keeps AdamW's moments for those alone (ZeRO's first stage,
arXiv 1910.02054) and sends them to the others. Rank 0, the leader, writes files, words and bars.

Simplified: every rank holds all weights and gradients (docs/scale.md says up to which size that is wise). What is
gathered are Python objects, pickled from one process of the run to another.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
P = ParamSpec("P")


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
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as silence:
        if rank() > 0:
            silence.enter_context(contextlib.redirect_stdout(nowhere))
            silence.enter_context(contextlib.redirect_stderr(nowhere))
        yield
    dist.destroy_process_group()


@contextlib.contextmanager
def leader_first() -> Iterator[None]:
    """The leader goes through the block alone, then the others: they find what it has made."""
    if rank() > 0:
        dist.barrier()
    yield
    if rank() == 0 and size() > 1:
        dist.barrier()


def leader_only(function: Callable[P, None]) -> Callable[P, None]:
    """The function on the leader; on the others nothing. For what writes files."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> None:
        if rank() == 0:
            function(*args, **kwargs)

    return called


def deal(items: Iterable[T], cost: Callable[[T], float]) -> list[list[T]]:
    """Every rank's share: the costliest first, each to the rank with the least to do. Alone, all in their order."""
    shares, loads = list[list[T]]([] for _ in range(size())), [0.0] * size()
    for item in sorted(items, key=cost, reverse=True) if size() > 1 else items:
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += cost(item)
    return shares


def deal_share(items: Iterable[T], cost: Callable[[T], float]) -> list[T]:
    """This rank's share of what `deal` deals out."""
    return deal(items, cost)[rank()]


def gather(mine: Iterable[T], leader: bool = False) -> Iterable[T]:
    """All ranks' items, on every rank, or on the leader alone and none on the others. Alone, the argument."""
    if size() == 1:
        return mine
    found: list[Any] = [()] * size()
    if leader:
        dist.gather_object(list(mine), found if rank() == 0 else None)
    else:
        dist.all_gather_object(found, list(mine))
    return [item for items in found for item in items]


@contextlib.contextmanager
def sum_gradients(parameters: Sequence[Tensor], passes: int) -> Iterator[None]:
    """Sums each parameter's gradient over the ranks, where the block goes backward `passes` times on this one.

    What the last pass has made is on its way while the pass goes on: in one order on all ranks, from the last parameter
    to the first. The rest goes at the block's end: a rank without a pass, or whose pass the block gave up, sends alike.
    """
    if size() == 1:
        yield
        return
    waiting, sent, made = list(parameters), [], dict.fromkeys(parameters, 0)

    def note(parameter: Tensor) -> None:
        made[parameter] += 1
        while waiting and made[waiting[-1]] == passes:
            sent.append(dist.all_reduce(waiting.pop().grad, async_op=True))

    for p in parameters:
        p.grad = torch.zeros_like(p)
    hooks = [p.register_post_accumulate_grad_hook(note) for p in parameters]  # type: ignore[no-untyped-call]
    yield
    for hook in hooks:
        hook.remove()
    for work in [*sent, *(dist.all_reduce(p.grad, async_op=True) for p in reversed(waiting))]:
        work.wait()


@torch.no_grad()
def publish(shares: Sequence[Sequence[Tensor]]) -> None:
    """Sends every parameter from its owner to all: `shares` are what `deal` made."""
    owned = [(owner, p) for owner, share in enumerate(shares if size() > 1 else ()) for p in share]
    for work in [dist.broadcast(p, owner, async_op=True) for owner, p in owned]:
        work.wait()
