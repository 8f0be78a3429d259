"""The study: every method along its sweep, over seeds, measured alike: python -m study.run [STUDY.toml] [options]

    python -m study.run                                   the default methods of study/study.toml
    python -m study.run --methods grpo,dph_js --seeds 2   some methods, at seeds 0 and 1
    python -m study.run --busy                            other work runs on the machine, too: seconds are left out
    python -m study.run --report                          tables and pictures again, from the JSON files alone

A run is one process of one thread, measure.py: it trains, measures, and leaves one small JSON file. Tables and pictures
are made from these files alone (report.py, plots.py). A run whose file is there is skipped; one whose file was made
with other settings or from another base is done anew. An interrupted study goes on where it stopped.

Folders: RUNS/ID is a run as train.py leaves it, RUNS/logs/ID.log what its process said.

How to read it: plan.py says what the runs are; `do_runs` is the loop over those that are not done.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dph.checkpoint import write_text
from dph.cli import fail, load_policy, to_the_end
from dph.config import Config
from dph.errors import UserError, read_json
from dph.miniature_base import base_folder
from study.plan import BASE, Run, Study, changed, load_study, make_run, pick
from study.plots import draw
from study.report import write_tables
from study.results import load_results

LOOK = 1.0  # seconds between two looks at the processes
Process = subprocess.Popen[bytes]


def run_study(study: Study, methods: Sequence[str] | None, seeds: int, busy: bool = False) -> None:
    """Does the runs that are not done, the bases first. UserError: names the run that failed and its log.

    Args:
        busy: something else runs on the machine, so that the seconds of these runs compare with nothing.
    """
    settings = pick(study, methods)
    runs = [make_run(study, setting, seed) for seed in range(seeds) for setting in settings]
    bases = [make_run(study, (BASE, None), seed) for seed in range(seeds)]
    do_runs(study, bases, "bases", busy)
    do_runs(study, runs, "runs", busy)


def do_runs(study: Study, runs: Sequence[Run], what: str, busy: bool = False) -> None:
    """Does those of the runs that are not done, `study.table.workers` at a time, under one bar."""
    waiting = [run for run in runs if not is_done(study, run)]
    print(f"{what}: {len(waiting)} of {len(runs)} to do", flush=True)
    if not waiting:
        return
    working: dict[str, Process] = {}  # by the run's id
    with tqdm(total=len(waiting), desc=what, unit="run", smoothing=0) as bar:
        try:
            while waiting or working:
                while waiting and len(working) < study.table.workers:
                    run = waiting.pop(0)
                    working[run.id] = start(study, run, busy)
                time.sleep(LOOK)
                for name, process in list(working.items()):
                    if process.poll() is not None:
                        del working[name]
                        check(study, name, process.returncode)
                        bar.update()
                bar.refresh()
        finally:
            stop(list(working.values()))


def is_done(study: Study, run: Run) -> bool:
    """Whether the run's JSON file is there, made with these settings from this base; if not from these, says so."""
    result = read_json(study.results / f"{run.id}.json", optional=True)
    if not result:
        return False
    stale = stale_parts(run, result)
    if stale:
        print(f"{run.id}: made with another {', '.join(stale)}; it is done anew")
    return not stale


def stale_parts(run: Run, made: Mapping[str, Any]) -> list[str]:
    """In what a result, or a folder's study.json, is not of this run: names of settings, and "base" for its weights."""
    stale = changed(made["settings"], run.settings)
    if made["base"] != base_weights(run.config):
        stale.append("base")
    return stale


def base_weights(config: Config) -> str:
    """SHA-256 of the initial policy's weights; "" where the miniature's is not trained yet."""
    if config.model.path == "miniature" and not base_folder(Path(config.run.folder), config.run.seed).is_dir():
        return ""
    return load_policy(config.model.path, config, torch.device("cpu")).weights_hash()


def prepare(run: Run) -> None:
    """Makes the run's folder, with study.json; what other settings or another base left there is deleted."""
    folder = run.config.run_folder
    old = read_json(folder / "study.json", optional=True)
    parts = stale_parts(run, old) if old else []
    if any(not part.startswith("sets.") for part in parts):  # other sets: measured anew, not trained anew
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made = {"base": base_weights(run.config), "settings": run.settings}
    write_text(folder / "study.json", json.dumps(made, indent=1) + "\n")


def start(study: Study, run: Run, busy: bool) -> Process:
    """Starts a run's process, its words into the run's log.

    It is a session of its own, so that Ctrl-C reaches it once, from `stop`.
    """
    prepare(run)
    log = log_of(study, run.id)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "study.measure", str(study.file), run.method, str(run.value), str(run.seed)]
    command += ["busy"] * busy
    with log.open("wb") as words:
        return subprocess.Popen(command, stdout=words, stderr=words, env=environment, start_new_session=True)


def stop(processes: Sequence[Process]) -> None:
    """Ends processes as Ctrl-C would, and waits: a training saves and stops after its step."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


def check(study: Study, name: str, code: int) -> None:
    """Raises a UserError where a run's process has failed: its last `error:` line, or its last line at all."""
    if code == 0:
        return
    log = log_of(study, name)
    lines = [line.strip() for line in re.split(r"[\r\n]+", log.read_text(errors="replace")) if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    words = (errors or lines or ["ended without a word"])[-1]
    raise UserError(f"{name}: {words} (exit code {code}; log: {log})")


def log_of(study: Study, name: str) -> Path:
    """What a run's process said the last time."""
    return study.runs / "logs" / f"{name}.log"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = fail  # type: ignore[method-assign]  # its own prints the usage, too
    default = Path("study/study.toml")
    parser.add_argument("study", nargs="?", type=Path, default=default, help=f"default: {default}")
    parser.add_argument("--methods", metavar="NAMES", help="methods, with commas; default: the default ones")
    parser.add_argument("--seeds", metavar="COUNT", help="seeds 0 ... COUNT-1; default: the file's")
    parser.add_argument("--busy", action="store_true", help="other work runs on the machine: leave seconds out")
    parser.add_argument("--report", action="store_true", help="tables and pictures alone")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments = parser.parse_args()
    to_the_end(lambda: run_and_report(arguments), arguments.debug)


def run_and_report(arguments: argparse.Namespace) -> None:
    """Does the runs unless --report asks for none, and writes tables and pictures."""
    study = load_study(arguments.study)
    names = None
    if arguments.methods is not None:
        names = [name.strip() for name in arguments.methods.split(",") if name.strip()]
    seeds = str(study.table.seeds if arguments.seeds is None else arguments.seeds)
    if not (seeds.isdecimal() and 1 <= int(seeds) <= 1000):
        raise UserError(f"SEEDS = {seeds!r} should be a count from 1 to 1000, e.g. 4 for seeds 0, 1, 2, 3")
    if not arguments.report:
        run_study(study, names, int(seeds), arguments.busy)
    elif arguments.methods is not None or arguments.seeds is not None or arguments.busy:
        raise UserError("--report reports all runs that are there; leave out --methods, --seeds and --busy")
    folder = Path(study.table.report)
    results = load_results(study)
    for path in [*write_tables(folder, results), *draw(folder, results)]:
        print(path)


if __name__ == "__main__":
    main()
