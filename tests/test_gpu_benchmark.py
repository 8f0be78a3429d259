"""benchmarks/gpu.sh before there is a GPU: the same lines on a small model, to the end."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu import SETTINGS

ROOT = Path(__file__).parent.parent


def test_all_of_it_runs_on_a_cpu_and_memory_is_as_foretold(tmp_path: Path) -> None:
    """Layers are called for compiled, and run as they are: compiling takes a minute."""
    environment = {**os.environ, "PYTHON": sys.executable, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = ["sh", "benchmarks/gpu.sh", "--tiny", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=300)
    (figures,) = json.loads((tmp_path / "gpu.json").read_text())["models"].values()
    assert all(rate > 0 for rate in figures["decode"].values())
    assert {"ours", "ours, graphs", "ours, compiled", "ours, compiled, graphs"} <= set(figures["decode"])
    for kind in SETTINGS:
        found = figures["update"][kind]
        for moment in ("update", "sampling"):
            assert abs(found[f"{moment}, budget"] / found[moment] - 1) < 0.15, (kind, moment)
        assert kind in (tmp_path / "gpu.md").read_text()
