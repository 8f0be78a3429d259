"""Two ways to train on several processes: python -m benchmarks.sharding MODEL

copies: every process holds the model; gradients are summed and AdamW's moments divided (dph/distributed.py).
fully_shard: PyTorch's FSDP2; every process holds a part of weights, gradients and moments, gathers a layer's weights
whenever a micro-batch needs them, forward and backward, and all of them once for sampling.

Both take the same optimizer steps on random tokens and end at the same weights. MB sent are what one process sends if a
sum moves along a ring; MB held are a process's weights, gradients and moments between two passes.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.measure import on_ranks
from dph import distributed
from dph.model import Decoder
from dph.model_folder import load_model
from dph.rollouts import Rollout, collate
from dph.scoring import token_logprobs

MOVED = {"all_reduce": 2.0, "broadcast": 1.0, "all_gather_single": 1.0, "reduce_scatter_single": 1.0}
ANSWER = 128  # tokens of a row


def count(sent: list[float]) -> None:
    """Makes torch.distributed note the MB that this process sends."""

    def counted(times: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def send(*given: Any, **named: Any) -> Any:
            whole = max(x.numel() * x.element_size() for x in (*given, *named.values()) if isinstance(x, Tensor))
            sent.append(times * whole * (distributed.size() - 1) / distributed.size() / 1e6)
            return function(*given, **named)

        return send

    for name, times in MOVED.items():
        setattr(dist, name, counted(times, getattr(dist, name)))


def rows(model: Decoder, wanted: argparse.Namespace) -> list[list[Rollout]]:
    """This process's micro-batches of random answers."""
    generator = torch.Generator().manual_seed(distributed.rank())
    shape = (wanted.microbatches, wanted.rows, ANSWER)
    drawn = torch.randint(model.config.vocab_size, shape, generator=generator).tolist()
    return [[Rollout(0, i, [1], tokens, [0.0] * ANSWER, True) for i, tokens in enumerate(part)] for part in drawn]


def local(x: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def worker(wanted: argparse.Namespace) -> None:
    """One process; the leader writes seconds, MB sent and MB held."""
    with distributed.processes():
        model, sent = load_model(wanted.model), list[float]()
        for weight in model.parameters():
            weight.data = weight.data.contiguous()  # row by row, as fully_shard wants it
        if sharded := wanted.how == "fully_shard":
            mesh = init_device_mesh("cpu", (distributed.size(),))
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh)
        shards = [part for part in model.modules() if isinstance(part, FSDPModule)]
        ranks = 1 if sharded else distributed.size()  # fully_shard takes the mean over ranks by itself
        parameters = list(model.parameters())
        shares = distributed.deal(parameters, torch.numel)
        optimizer = torch.optim.AdamW(parameters if sharded else shares[distributed.rank()], 1e-5, fused=True)
        batches = [collate(part, torch.device("cpu")) for part in rows(model, wanted)]
        count(sent)
        for _ in range(2):  # the first is a warm-up
            dist.barrier()
            sent.clear()
            began = time.perf_counter()
            with distributed.sum_gradients([] if sharded else parameters, len(batches)):
                for i, batch in enumerate(batches):
                    if isinstance(model, FSDPModule):
                        model.set_requires_gradient_sync(i == len(batches) - 1)
                    (-token_logprobs(model, batch, 1.0).logprobs.mean() / len(batches) / ranks).backward()
            optimizer.step()
            distributed.publish([[]] if sharded else shares)
            for part in shards:
                part.unshard()  # what would sample
            total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
            for part in shards:
                part.reshard()
            dist.barrier()
            seconds = time.perf_counter() - began
            held = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
            held += [x for kept in optimizer.state.values() for x in kept.values()]
            optimizer.zero_grad()
        if distributed.rank() == 0:
            found = {"seconds": seconds, "MB sent": sum(sent), "MB held": sum(local(x).nbytes for x in held) / 1e6}
            found["sum of weights"] = total
            wanted.worker.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a model folder")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4, help="answers in a micro-batch")
    parser.add_argument("--microbatches", type=int, default=4, help="of each process, in one optimizer step")
    parser.add_argument("--how", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.worker:
        return worker(wanted)
    same = [wanted.model, f"--rows={wanted.rows}", f"--microbatches={wanted.microbatches}"]
    start = partial(on_ranks, "benchmarks.sharding", wanted.processes, 1, *same)
    found = {how: start(f"--how={how}") for how in ("copies", "fully_shard")}
    columns = list(found["copies"])
    print(f"| {wanted.processes} processes | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for how, figures in found.items():
        print(f"| {how} | {' | '.join(f'{figures[name]:,.1f}' for name in columns)} |")


if __name__ == "__main__":
    main()
