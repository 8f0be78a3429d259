"""Trains a policy with DPH-RL or a baseline: python train.py configs/NAME.toml [--section.key=value ...]

Makes what is missing on the way (the miniature's base model, the pre-sampled partition), continues an interrupted run,
and ends with an evaluation of the base and the result: a table, JSON and pictures in the run's folder.
"""

import argparse
from pathlib import Path

from dph.budget import report
from dph.checkpoint import open_run, take_over_day
from dph.cli import config_argument, load_policy, open_task, prepare_training, read_shape, run_command, set_up
from dph.config import Config
from dph.errors import UserError
from dph.evaluation import evaluate_model
from dph.made_from import check_recorded, check_run, made_from, made_from_sets, run_settings
from dph.metrics import check_tensorboard
from dph.plots import plot_run, table
from dph.presampling import presample
from dph.prompts import tokenize
from dph.trainer import Data, Trainer


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Pre-sample, train, evaluate; or print the budget alone."""
    if arguments.budget:
        return print(report(read_shape(config), config, arguments.gpu_memory, arguments.processes))
    recorded = arguments.rollouts_from
    if recorded and not (recorded / "rollouts").is_dir():
        raise UserError(f"--rollouts-from {recorded}: holds none; record them with --train.record_rollouts=true")
    if recorded and recorded.resolve() == config.run_folder.resolve():
        raise UserError(f"--rollouts-from {recorded}: is this run itself; choose another run.name")
    check_tensorboard(config.run.tensorboard)
    device = set_up(config)
    train_task = open_task(config.data.train, config)
    eval_tasks = [open_task(source, config) for source in config.data.eval]
    run = open_run(config)
    if recorded:
        take_over_day(recorded, run)
    policy = load_policy(config.model.path, config, device)
    prompts = tokenize(train_task, policy.tokenizer, config)
    eval_sets = [tokenize(task, policy.tokenizer, config) for task in eval_tasks]

    made = made_from(policy, prompts, run_settings(config))
    if recorded:
        check_recorded(recorded, made)
    made["rollouts"] = f"those of {recorded.name}" if recorded else "sampled"
    check_run(run, made | made_from_sets(eval_sets if config.train.eval_every else []))

    partition = None
    if config.loss.uses_stored_answers:
        partition = presample(policy, prompts, config, recorded)
        stored, d_exp = len(partition.rehearsal), len(partition.exp)
        print(f"D_pef: {len(partition.pef)} prompts with {stored} answers; D_exp: {d_exp} prompts")

    reports = []
    final = config.eval.final and eval_sets
    if final:
        reports.append(evaluate_model(policy, eval_sets, config, "base"))
    reference = prepare_training(policy, config, device)
    Trainer(config, policy, Data(prompts, partition, reference, eval_sets, recorded)).run()
    if final:
        reports.append(evaluate_model(policy, eval_sets, config, config.run.name, policy.folder))
        print(table(reports, base="base"))
    for task in (train_task, *eval_tasks):
        task.close()
    for picture in plot_run(run):
        print(f"picture: {picture}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    config_argument(parser)
    parser.add_argument("--budget", action="store_true", help="print the memory that the run would take, and end")
    parser.add_argument("--gpu-memory", type=float, default=0, metavar="GB", help="--budget: what makes it fit")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="--budget: those of torchrun")
    parser.add_argument(
        "--rollouts-from", type=Path, metavar="RUN", help="train on the rollouts recorded in this run's folder"
    )


if __name__ == "__main__":
    run_command(main, str(__doc__), _arguments)
