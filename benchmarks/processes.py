"""What several processes bring and what they send: python -m benchmarks.processes MODEL

Takes steps of benchmarks/step.py (as many prompts and samples, every group with mixed rewards) with one process and
with several, of one thread each, and with one process of as many threads. The bytes are those of the tensors and
pickled objects that a step hands to torch.distributed on one rank; the seconds, those that the leader spends there,
its waiting for slower ranks included. "At once" waits for every message where it begins, so that no sum of gradients
is hidden behind the backward pass.
"""

import argparse
import json
import pickle
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.measure import machine, on_ranks
from benchmarks.step import measure
from dph import distributed

SAME = ("method", "prompts", "samples", "tokens", "steps", "budget")  # arguments that every process gets
SENDERS = {"all_reduce": "gradients", "broadcast": "parameters", "all_gather_object": "objects"}


class Timed:
    """A message under way, whose waiting is counted, too."""

    def __init__(self, work: Any, note: Callable[[float], None]) -> None:
        self.work, self.note = work, note

    def wait(self) -> None:
        began = time.perf_counter()
        self.work.wait()
        self.note(began)


def count(sent: defaultdict[str, float], at_once: bool) -> None:
    """Makes torch.distributed count the bytes and seconds of each kind of message in `sent`."""

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(began: float) -> None:
            sent[f"{name}, s"] += time.perf_counter() - began

        def send(first: Any, *others: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = function(first, *others, **options)
            if at_once and result is not None:
                result.wait()
            size = len(pickle.dumps(others[0])) if name == "objects" else first.numel() * first.element_size()
            sent[f"{name}, MB"] += size / 1e6
            note(began)
            return Timed(result, note)

        return send

    for function, name in SENDERS.items():
        setattr(dist, function, counted(name, getattr(dist, function)))


def worker(wanted: argparse.Namespace) -> None:
    """One process; the leader writes what it measured."""
    wanted.dtype, wanted.mixed, wanted.compile, wanted.microbatch_tokens = "fp32", 1.0, False, wanted.budget
    with distributed.processes():
        sent: defaultdict[str, float] = defaultdict(float)
        count(sent, wanted.at_once)
        steps: list[dict[str, float]] = []
        found = measure(wanted.method, wanted, lambda: steps.append(dict(sent)))
        found |= {key: (steps[-1][key] - steps[0].get(key, 0.0)) / wanted.steps for key in sent}
        if distributed.rank() == 0:
            wanted.worker.write_text(json.dumps(found))


def run(processes: int, threads: int, at_once: bool, wanted: argparse.Namespace) -> dict[str, float]:
    """The figures of `processes` processes of `threads` threads each."""
    same = [f"--{name}={getattr(wanted, name)}" for name in SAME]
    own = [f"--threads={threads}", *(["--at-once"] if at_once else [])]
    return on_ranks("benchmarks.processes", processes, threads, wanted.model, *same, *own)


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
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--at-once", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.worker:
        return worker(wanted)
    most = max(wanted.processes)
    shapes = [*((count, 1, False) for count in wanted.processes), (most, 1, True), (1, most, False)]
    found = {f"{n} x {t}{', at once' if at_once else ''}": run(n, t, at_once, wanted) for n, t, at_once in shapes}
    columns = ["seconds/sample_and_grade", "seconds/train", "step"]
    columns += [f"{name}, {unit}" for name in SENDERS.values() for unit in ("MB", "s")]
    print(f"| processes x threads | {' | '.join(columns)} | speed-up |\n|{' --- |' * (len(columns) + 2)}")
    first = next(iter(found.values()))["step"]
    for name, f in found.items():
        cells = [f"{f.get(key, 0.0):,.2f}" for key in columns] + [f"{first / f['step']:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")
    if wanted.out:
        wanted.out.write_text(json.dumps({**machine(), **vars(wanted), "found": found}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
