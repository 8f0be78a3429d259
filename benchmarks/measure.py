"""What the benchmarks share: a clock that waits for the device, peak memory of a block, torchrun, the machine."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations make in this block and that are alive: now, and the most there were.

    What a kernel takes within itself is not seen, except where it is much and known: logsumexp copies its input. Alike
    on every machine and device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.logsumexp.default:
            self.most = max(self.most, self.now + args[0].nbytes)
        before = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(made):
            if storage._cdata not in before | self.known:
                self._follow(storage)
        return made

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Of the tensors among some values; those in an order of oneDNN's own have none that can be seen."""
    tensors = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]


class Cost:
    """Seconds, and the most memory in use beyond what was in use before, in MiB (NaN where it cannot be told)."""

    seconds = peak = float("nan")


@contextmanager
def cost() -> Iterator[Cost]:
    """Measures its block; on the CPU the peak is the resident set's (Linux alone)."""
    found, before = Cost(), _resident("VmRSS")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    started = time.perf_counter()
    yield found
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    found.seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else _resident("VmHWM")
    found.peak = max(0.0, peak - before)


def _resident(name: str) -> float:
    """A line of /proc/self/status in MiB; NaN where there is none."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":")), float("nan"))


def on_ranks(module: str, processes: int, threads: int, *arguments: str) -> dict[str, float]:
    """Runs a module with torchrun; the figures that its leader writes as JSON to the file after --worker."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        start = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", module]
        command = [sys.executable, "-m", *start, *arguments, f"--worker={path}"]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        return json.loads(path.read_text())  # type: ignore[no-any-return]


def machine() -> dict[str, str | int]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else (models or [platform.processor()])[0]
    return {"device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}
