"""What the benchmarks share: a clock that waits for the device, peak memory of a block, torchrun, the machine."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


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
