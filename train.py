"""Trains a policy with DPH-RL or a baseline: python train.py configs/NAME.toml [--section.key=value ...]

Makes what is missing on the way (the miniature's base model, the pre-sampled partition), continues an interrupted run,
and ends with an evaluation of the base and the result: a table, JSON and pictures in the run's folder.
"""

import argparse
from pathlib import Path

from dph import cli
from dph.budget import report
from dph.checkpoint import open_run, take_over_day
from dph.config import Config
from dph.evaluation import evaluate_model
from dph.made_from import check_recorded, check_run, check_source, made_from, made_from_sets, run_settings
from dph.metrics import check_tensorboard
from dph.plots import plot_run, table
from dph.presampling import presample
from dph.prompts import tokenize
from dph.trainer import Data, Trainer


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Pre-sample, train, evaluate; or print the budget alone."""
    if arguments.budget:
        return print(report(cli.read_shape(config), config, arguments.gpu_memory, arguments.processes))
    recorded = arguments.rollouts_from
    if recorded:
        check_source(recorded, config.run_folder)
    check_tensorboard(config.run.tensorboard)
    device = cli.set_up(config)
    train_task = cli.open_task(config.data.train, config)
    eval_tasks = [cli.open_task(source, config) for source in config.data.eval]
    run = open_run(config)
    if recorded:
        take_over_day(recorded, run)
    policy = cli.load_policy(config.model.path, config, device)
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
    reference = cli.prepare_training(policy, config, device)
    Trainer(config, policy, Data(prompts, partition, reference, eval_sets, recorded)).run()
    if final:
        reports.append(evaluate_model(policy, eval_sets, config, config.run.name, policy.folder))
        print(table(reports, base="base"))
    for task in (train_task, *eval_tasks):
        task.close()
    for picture in plot_run(run):
        print(f"picture: {picture}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    cli.config_argument(parser)
    cli.budget_arguments(parser)
    parser.add_argument(
        "--rollouts-from", type=Path, metavar="RUN", help="train on the rollouts recorded in this run's folder"
    )


if __name__ == "__main__":
    cli.run_command(main, str(__doc__), _arguments)
