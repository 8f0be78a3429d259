"""What several processes bring, hold and send: python -m benchmarks.processes MODEL

Takes steps of benchmarks/step.py (as many prompts and samples, every group with mixed rewards) with one process and
with several of one thread each, in copies (train.shard = none) and in shards (full), and with one process of as many
threads. MB sent are those of a step, of one rank, if every sum and every gathering moves along a ring: 2 (N - 1) / N of
a tensor that is summed, (N - 1) / N of one that is gathered or whose sum is cut into shares. The seconds are those that
the leader spends there, its waiting for slower ranks included. MB held are weights, gradients and moments of the
leader where an optimizer step ends.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measure import machine, on_ranks
from benchmarks.step import measure
from dph import distributed

SAME = ("method", "prompts", "samples", "tokens", "steps", "budget")  # arguments that every process gets
KINDS = ("gradients", "weights", "objects")
# torch.distributed's operations: what travels in them here, and how many times (N - 1) / N of it a rank sends.
SENT = {
    "allreduce_": ("gradients", 2),
    "_reduce_scatter_base_": ("gradients", 1),
    "_allgather_base_": ("weights", 1),  # fully_shard's
    "all_gather_into_tensor": ("weights", 1),  # DTensor.full_tensor's
    "allgather_": ("objects", 1),
}


class Messages(TorchDispatchMode):
    """Notes the MB that this process sends, and the seconds of each call, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.found: defaultdict[str, float] = defaultdict(float)
        self.last = ""  # kind of the last message: that which is waited for

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().split("::")[-1].split(".")[0]
        began = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        if function.namespace in ("c10d", "_c10d_functional") and name in SENT:
            kind, times = SENT[name]
            self.last = kind
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
            largest = max(x.numel() * x.element_size() for x in tensors)  # the whole, not the share
            gathered = largest * distributed.size() if name == "allgather_" else largest
            share = (distributed.size() - 1) / distributed.size()
            self.found[f"{kind}, MB"] += times * share * gathered / 1e6
            self.found[f"{kind}, s"] += time.perf_counter() - began
        return result


def held(optimizer: torch.optim.Optimizer) -> float:
    """MB of weights, gradients and moments on this process."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    tensors = [*weights, *(weight.grad for weight in weights if weight.grad is not None)]
    tensors += [x for kept in optimizer.state.values() for x in kept.values()]
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors) / 1e6


def wait_in(messages: Messages) -> None:
    """Counts the waiting for a message under way to its seconds."""
    wait = dist.Work.wait

    def timed(work: Any, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = wait(work, *arguments)
        messages.found[f"{messages.last}, s"] += time.perf_counter() - began
        return result

    dist.Work.wait = timed  # type: ignore[method-assign]


def worker(wanted: argparse.Namespace) -> None:
    """One process; the leader writes what it measured."""
    wanted.dtype, wanted.mixed, wanted.compile, wanted.microbatch_tokens = "fp32", 1.0, False, wanted.budget
    most = 0.0

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal most
        most = max(most, held(optimizer))

    register_optimizer_step_post_hook(note)
    with distributed.processes(), Messages() as messages:
        wait_in(messages)
        steps: list[dict[str, float]] = []
        found = measure(wanted.method, wanted, lambda: steps.append(dict(messages.found)))
        found |= {key: (total - steps[0].get(key, 0.0)) / wanted.steps for key, total in steps[-1].items()}
        found["held, MB"] = most
        if distributed.rank() == 0:
            wanted.worker.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a model folder, or miniature")
    parser.add_argument("--method", default="dph_js", help="a method of benchmarks/step.py")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--shard", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.worker:
        return worker(wanted)
    most = max(wanted.processes)
    shapes = [(count, 1, "none") for count in wanted.processes]
    shapes += [(count, 1, "full") for count in wanted.processes if count > 1]
    same = [f"--{name}={getattr(wanted, name)}" for name in SAME]
    found = {}
    for count, threads, shard in [*shapes, (1, most, "none")]:
        own = [f"--threads={threads}", f"--shard={shard}"]
        name = f"{count} x {threads}, {shard}"
        found[name] = on_ranks("benchmarks.processes", count, threads, wanted.model, *same, *own)
    columns = ["seconds/sample_and_grade", "seconds/train", "step"]
    columns += [f"{kind}, {unit}" for kind in KINDS for unit in ("MB", "s")] + ["held, MB"]
    print(f"| processes x threads, shard | {' | '.join(columns)} | speed-up |\n|{' --- |' * (len(columns) + 2)}")
    first = next(iter(found.values()))["step"]
    for name, figures in found.items():
        cells = [f"{figures.get(key, 0.0):,.2f}" for key in columns] + [f"{first / figures['step']:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")
    if wanted.out:
        wanted.out.write_text(json.dumps({**machine(), **vars(wanted), "found": found}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
