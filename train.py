"""Trains a policy with DPH-RL or a baseline: python train.py configs/NAME.toml [--section.key=value ...]

Makes what is missing on the way (the miniature's base model, the pre-sampled partition), continues an interrupted run,
and ends with an evaluation of the base and the result: a table, JSON and pictures in the run's folder.
"""

import argparse
import shutil
from pathlib import Path

from dph import distributed
from dph.checkpoint import open_run
from dph.cli import config_argument, load_policy, open_task, run_command, set_up
from dph.config import Config
from dph.errors import UserError
from dph.evaluation import evaluate_model
from dph.plots import plot_run, table
from dph.presampling import presample
from dph.tasks.prompts import tokenize
from dph.trainer import Trainer


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Pre-sample, train, evaluate."""
    if arguments.replay and not (arguments.replay / "rollouts").is_dir():
        raise UserError(
            f"--replay {arguments.replay}: holds no rollouts; record them with --train.record_rollouts=true"
        )
    device = set_up(config)
    task, *exams = (open_task(source, config) for source in (config.data.train, *config.data.eval))
    run = open_run(config)
    policy = load_policy(config.model.path, config, device)
    data, *sets = (tokenize(each, policy.tokenizer, config) for each in (task, *exams))
    partition, reference, reports = None, None, []
    if arguments.replay and (arguments.replay / "presample").is_dir():
        with distributed.leader_first():
            if distributed.rank() == 0:
                shutil.copytree(arguments.replay / "presample", run / "presample", dirs_exist_ok=True)
    uses = config.loss.samples if config.loss.divergence != "none" else "nothing"
    if uses in ("reference", "both"):
        partition = presample(policy, data, config)
        stored, exp = len(partition.rehearsal), len(partition.exp)
        print(f"D_pef: {len(partition.pef)} prompts with {stored} answers; D_exp: {exp} prompts")
    if uses in ("own", "both"):
        reference = load_policy(config.model.path, config, device).model.requires_grad_(False)
    if config.eval.final and sets:
        reports.append(evaluate_model(policy, sets, config, "base"))
    trainer = Trainer(config, policy, data, partition, reference, sets)
    trainer.collector.replay = arguments.replay
    trainer.run()
    for each in (task, *exams):
        each.close()
    if reports:
        reports.append(evaluate_model(policy, sets, config, config.run.name))
        print(table(reports, base="base"))
    for picture in plot_run(run):
        print(f"picture: {picture}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    config_argument(parser)
    parser.add_argument(
        "--replay", type=Path, metavar="RUN", help="train on the rollouts recorded in this run's folder"
    )


if __name__ == "__main__":
    run_command(main, str(__doc__), _arguments)
