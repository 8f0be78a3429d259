"""What a run logs: sums and means within a step, one row a step in metrics.jsonl, TensorBoard where it is wanted."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dph.checkpoint import append_rows, is_writer, read_log, write_text
from dph.errors import UserError
from dph.rollouts import Rollout


class Meter:
    """Sums and counts of one step's metrics; tensors stay on their device until they are read."""

    def __init__(self) -> None:
        self.processes = 1  # that have counted here
        self.totals: dict[str, Any] = defaultdict(float)
        self.counts: dict[str, Any] = defaultdict(float)

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 0) -> None:
        """Adds to a mean; a count of 0 makes it a plain sum."""
        self.totals[name] = self.totals[name] + total
        self.counts[name] = self.counts[name] + count

    def add_tokens(self, mask: Tensor, **values: Tensor) -> None:
        """Adds per-token values (B, T) to means over the tokens of mask (B, T)."""
        count = mask.sum()  # a tensor: an int would wait for the GPU
        for name, value in values.items():
            self.add(name, torch.where(mask, value.detach(), 0).sum(), count)

    def add_rollouts(self, rollouts: Sequence[Rollout], advantages: Tensor, group_size: int) -> None:
        """What a step's rollouts tell: groups of `group_size`, one after another, with advantages (rollouts,)."""
        count = len(rollouts)
        if not count:  # no group is left after dynamic sampling, or all prompts are in D_pef: there is no mean
            return
        flat_groups = (advantages.view(-1, group_size) == 0).all(dim=1).sum()
        self.add("reward", sum(rollout.reward for rollout in rollouts), count)
        self.add("length", sum(len(rollout.tokens) for rollout in rollouts), count)
        self.add("truncated_fraction", sum(not rollout.finished for rollout in rollouts), count)
        self.add("zero_variance_fraction", int(flat_groups), count / group_size)

    @contextmanager
    def seconds(self, phase: str) -> Iterator[None]:
        """Times a phase, the GPU's work included."""
        begin = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.add(f"seconds/{phase}", time.perf_counter() - begin)

    def read(self) -> "Meter":
        """The same in numbers, without tensors."""
        found = Meter()
        found.processes = self.processes
        for name, total in self.totals.items():
            found.add(name, float(total), float(self.counts[name]))
        return found

    def merge(self, other: "Meter") -> None:
        """Adds what another process has counted in the same step."""
        self.processes += other.processes
        for name, total in other.totals.items():
            self.add(name, total, other.counts[name])

    def means(self) -> dict[str, float]:
        """Every metric as a number, with the rates of sampling and training; a plain sum as one process's share."""
        found: dict[str, float] = {}
        for name, total in self.totals.items():
            found[name] = float(total) / (float(self.counts[name]) or self.processes)
        for phase, tokens in (("sample_and_grade", "sampled_tokens"), ("train", "trained_tokens")):
            if found.get(f"seconds/{phase}"):
                found[f"{tokens}_per_second"] = found.get(tokens, 0.0) / found[f"seconds/{phase}"]
        return found


class RunLog:
    """metrics.jsonl of a run; rows of steps after `step` are dropped, so that a resumed run has each step once."""

    def __init__(self, run: Path, step: int, tensorboard: bool) -> None:
        self.path = run / "metrics.jsonl"
        for path in (self.path, run / "samples.jsonl", run / "skipped.jsonl"):
            if path.exists():
                kept = [row for row in read_log(path, "step") if row["step"] <= step]
                write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.writer: Any = None
        if tensorboard and is_writer():
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("run.tensorboard needs a package: pip install tensorboard") from None
            self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Appends one step."""
        append_rows(self.path, [{"step": step, **metrics}])
        for name, value in metrics.items():
            if self.writer is not None and isinstance(value, float):
                self.writer.add_scalar(name, value, step)
