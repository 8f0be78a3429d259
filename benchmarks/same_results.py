"""Do two versions of the code give the same run? For whoever changes how it is written and not what it computes.

    git worktree add ../before COMMIT
    python -m benchmarks.same_results ../before . [--steps 6] [--folder runs/same_results]

Trains six methods on the miniature in both checkouts, a few steps each on one thread from one base model, and compares
all metrics but seconds, all rollouts and the weights after the last step: "same" means to the last bit, else the
largest relative difference is printed. What is there from an earlier call is compared again, not trained again.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

METHODS = ("dph_js", "grpo", "rkl", "dph_js_definition", "dapo", "dph_f_top32")


def train(checkout: Path, folder: Path, method: str, steps: int) -> Path:
    """One run; returns its folder."""
    run = folder / method
    if not (run / "checkpoints" / f"step-{steps}").is_dir():
        settings = {
            "run.folder": folder,
            "run.name": method,
            "run.threads": 1,
            "run.device": "cpu",
            "train.steps": steps,
            "train.eval_every": max(1, steps // 2),
            "train.record_rollouts": "true",
            "eval.final": "false",
            "eval.during_prompts": 16,
        }
        arguments = [f"--{key}={value}" for key, value in settings.items()]
        command = [sys.executable, "train.py", f"configs/miniature_{method}.toml", *arguments]
        subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    return run


def tensors(run: Path, steps: int) -> dict[str, torch.Tensor]:
    """Weights after the last step, and every step's rollouts."""
    found = load_file(run / "checkpoints" / f"step-{steps}" / "model.safetensors")
    for step in range(1, steps + 1):
        for name, tensor in load_file(run / "rollouts" / f"step-{step}.safetensors").items():
            if name.startswith("rollouts."):
                found[f"step {step} {name}"] = tensor
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    """All rows without what depends on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows]


def compare(before: Path, after: Path, steps: int) -> str:
    """One line about two runs."""
    mine, theirs = tensors(after, steps), tensors(before, steps)
    different = [name for name in theirs if name not in mine or not torch.equal(mine[name], theirs[name])]
    largest = 0.0
    for name in different:
        if name in mine and mine[name].shape == theirs[name].shape:
            gap = (mine[name].double() - theirs[name].double()).abs().max() / theirs[name].double().abs().max()
            largest = max(largest, float(gap))
        else:
            largest = float("inf")
    words = "same" if not different else f"{len(different)} of {len(theirs)} tensors differ, by {largest:.1e} at most"
    told = []
    for new, old in zip(metrics(after), metrics(before), strict=True):
        told += [name for name in {*new, *old} if new.get(name) != old.get(name)]
    return f"{words}; metrics: {'same' if not told else ', '.join(sorted(set(told))) + ' differ'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("runs/same_results"))
    arguments = parser.parse_args()
    homes = [(arguments.folder / name).resolve() for name in ("before", "after")]
    for method in METHODS:
        before = train(arguments.before, homes[0], method, arguments.steps)
        for base in homes[0].glob("miniature-seed*"):  # the base model is trained once
            shutil.copytree(base, homes[1] / base.name, dirs_exist_ok=True)
        after = train(arguments.after, homes[1], method, arguments.steps)
        print(f"{method:18} {compare(before, after, arguments.steps)}", flush=True)


if __name__ == "__main__":
    main()
