"""Evaluates models on the config's sets: python evaluate.py configs/NAME.toml [MODEL ...] [--section.key=value ...]

Greedy, pass@1 and pass@k with intervals, keep and explore against the first model: a table, JSON, a pass@k picture.
A MODEL is a folder in Hugging Face layout, one of an adapter in PEFT's, a hub name or `miniature`; without one, the
config's model and the newest checkpoint of its run are taken.

Without a model, and without a CONFIG if its [data] is not wanted (docs/graders.md):
  evaluate.py --regrade FILE.jsonl [--task math|sql] [--db-root DIR]   grades stored answers, e.g. a run's samples.jsonl
  evaluate.py --check SOURCE [--db-root DIR]                           lists gold queries whose result is left open
"""

import argparse
from dataclasses import replace
from pathlib import Path

from dph.checkpoint import newest_checkpoint
from dph.cli import config_argument, load_policy, open_task, resolve_model, run_command, set_up
from dph.config import Config
from dph.errors import UserError
from dph.evaluation import evaluate_model, keep_own_reports, short_names
from dph.plots import plot_pass_at_k, table
from dph.prompts import tokenize
from dph.tasks.regrade import check, regrade_aloud, show


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Evaluates every model on every set."""
    if arguments.regrade or arguments.check:
        return _without_a_model(config, arguments)
    if arguments.config is None:
        raise UserError("name a CONFIG, or --regrade FILE, or --check SOURCE")
    device = set_up(config)
    if not config.data.eval:
        raise UserError('data.eval = [] names no evaluation set, e.g. data.eval = ["math:gsm8k/test.jsonl"]')
    tasks = [open_task(source, config) for source in config.data.eval]
    newest = newest_checkpoint(config.run_folder) if not arguments.models else None
    paths = arguments.models or [config.model.path, *([str(newest)] if newest else [])]
    names = short_names(paths)
    for path in paths:
        resolve_model(path, config)  # a missing one is said before the first is evaluated
    reports = []
    base_folder: Path | None = None  # the first model's, for the others
    for path, name in zip(paths, names, strict=True):
        policy = load_policy(path, config, device, may_be_adapter=True)
        keep_own_reports(config, name, policy)
        sets = [tokenize(task, policy.tokenizer, config) for task in tasks]
        reports.append(evaluate_model(policy, sets, config, name, base_folder))
        base_folder = base_folder or policy.folder
    print(table(reports, base=names[0]))
    print(f"picture: {plot_pass_at_k(reports, config.run_folder / 'evaluation')}")


def _without_a_model(config: Config, arguments: argparse.Namespace) -> None:
    data = replace(config.data, db_root=arguments.db_root or config.data.db_root)
    settings = (data, config.run.seed, Path(config.run.folder))
    if arguments.check:
        show(check(arguments.check, *settings))
    else:
        regrade_aloud(Path(arguments.regrade), arguments.task, *settings)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [CONFIG] [MODEL ...] [options] [--section.key=value ...]"
    config_argument(parser, nargs="?")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="models to evaluate; the first is the base")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--regrade", metavar="FILE", help="grade the stored answers of a JSON Lines file instead")
    instead.add_argument("--check", metavar="SOURCE", help="list gold queries with ties under LIMIT instead")
    parser.add_argument("--task", choices=("math", "sql"), help="--regrade: what the rows are; else their own source")
    parser.add_argument("--db-root", metavar="DIR", help="--regrade, --check: short for --data.db_root=DIR")


if __name__ == "__main__":
    run_command(main, str(__doc__), _arguments)
