"""Seconds of one training step, method by method, on the same model, prompts and settings: python -m benchmarks.step

Each config is run for a few steps from the same start; the table gives the seconds of sampling and grading, scoring and
training, the whole step as a ratio to the first config's, and trained tokens a second. The paper's claim that rehearsal
needs no online reference, so that it costs no scoring and no second model, is the column `scoring` and `models`.
"""

import argparse
import json
import shutil
import statistics
from pathlib import Path

import torch

from dph.answering import tokenize
from dph.checkpoint import open_run
from dph.cli import load_policy, open_task, set_up
from dph.config import load_config
from dph.presampling import presample
from dph.trainer import Trainer

METHODS = ["grpo", "rkl", "dph_f", "dph_js", "dph_js_definition", "dph_f_top32"]


def measure(name: str, steps: int, threads: int) -> dict[str, float]:
    """Medians over `steps` steps after one to warm up."""
    config = load_config(f"configs/miniature_{name}.toml", [f"--run.name=bench_{name}", f"--run.threads={threads}"])
    shutil.rmtree(config.run_folder, ignore_errors=True)
    device, task = set_up(config), open_task(config.data.train, config)
    open_run(config)
    policy = load_policy(config.model.path, config, device)
    data = tokenize(task, policy.tokenizer, config)
    uses = config.loss.samples if config.loss.divergence != "none" else "nothing"
    partition = presample(policy, data, config) if uses in ("reference", "both") else None
    online = uses in ("own", "both")
    reference = load_policy(config.model.path, config, device).model if online else None
    trainer = Trainer(config, policy, data, partition, reference)
    rows = [trainer.train_step() for _ in range(steps + 1)][1:]
    shutil.rmtree(config.run_folder)
    found = {
        key: statistics.median(row[f"seconds/{key}"] for row in rows) for key in ("sample_and_grade", "score", "train")
    }
    tokens = statistics.median(row["trained_tokens"] for row in rows)
    return {**found, "step": sum(found.values()), "trained_tokens": tokens, "models": 1.0 + online}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves PyTorch's own choice")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    wanted = parser.parse_args()
    found = {name: measure(name, wanted.steps, wanted.threads) for name in wanted.methods}
    print("| method | models | sampling, grading | scoring | training | step | trained tokens/s | step / first |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    first = next(iter(found.values()))["step"]
    for name, f in found.items():
        seconds = f"{f['sample_and_grade']:.2f} | {f['score']:.2f} | {f['train']:.2f} | {f['step']:.2f}"
        rate = f["trained_tokens"] / f["train"]
        print(f"| {name} | {f['models']:.0f} | {seconds} | {rate:,.0f} | {f['step'] / first:.2f} |")
    if wanted.out:
        machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        wanted.out.write_text(json.dumps({**machine, "methods": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
