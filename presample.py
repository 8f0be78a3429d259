"""Divides the training prompts into D_pef and D_exp: python presample.py configs/NAME.toml [--section.key=value ...]

train.py does the same when the partition is missing; this command makes it alone, and prints what came out.
"""

import argparse
import json

from dph.checkpoint import open_run
from dph.cli import load_policy, open_task, run_command, set_up
from dph.config import Config
from dph.presampling import presample
from dph.prompts import tokenize


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Makes RUN/presample and prints its report."""
    device = set_up(config)
    task = open_task(config.data.train, config)
    run = open_run(config)
    policy = load_policy(config.model.path, config, device)
    presample(policy, tokenize(task, policy.tokenizer, config), config)
    task.close()
    report = json.loads((run / "presample" / "report.json").read_text(encoding="utf-8"))
    for name in ("prompts", "near_perfect", "d_pef", "d_exp", "rehearsal_answers", "pass@1", "correct_of_k"):
        print(f"{name:18} {report[name]}")


if __name__ == "__main__":
    run_command(main, str(__doc__))
