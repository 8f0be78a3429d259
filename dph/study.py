"""The study: every method along its sweep, over seeds, measured alike: python -m dph.study [STUDY.toml] [options]

A run is one train.py and then one measurement, both processes of one thread; it leaves one small JSON file with each
question's correct answers, greedy answer and styles. Tables and pictures are made from those files alone
(study_report.py, study_plots.py), which is all that --report does. What is done is skipped, what was made with other
settings or another base is done anew, and an interrupted study goes on where it stopped.

    python -m dph.study                                   the default methods of study.toml
    python -m dph.study --methods grpo,dph_js --seeds 2   some of them, or groups, at seeds 0 and 1
    python -m dph.study --report                          tables and pictures again

Folders: RUNS/ID is a run as train.py leaves it, RUNS/logs/ID.log what its processes said, RUNS/presample-... a
partition that all methods with the same presample settings share.

How to read it: study_plan.py says what the runs are; `run_study` makes jobs of those that are not done and hands them
to workers, `_Crew` is the workers' processes; the last process of each run is study_measure.py.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dph.checkpoint import append_rows, write_text
from dph.cli import fail, load_policy, to_the_end
from dph.config import Config
from dph.errors import UserError, read_json
from dph.miniature_base import base_folder
from dph.study_measure import SPEC, USAGE, write_result
from dph.study_plan import BASE, Run, Study, changed, load_study, make_run, pick
from dph.study_plots import draw
from dph.study_report import write_tables

ROOT = Path(__file__).parent.parent
PRESAMPLE = "presample"  # the kind of those jobs


@dataclass(frozen=True)
class _Job:
    """What one worker does at a time; it may begin when the jobs that it needs are done."""

    id: str
    kind: str  # jobs of one kind take about equally long
    needs: tuple[str, ...]
    work: Callable[[], None]


def run_study(study: Study, methods: Sequence[str] | None, seeds: int) -> None:
    """Does the runs that are not done, with a bar over all of them. UserError: the line in which one failed."""
    crew, workers = _Crew(study), study.table.workers
    runs = [make_run(study, setting, seed) for seed in range(seeds) for setting in pick(study, methods)]
    waiting, took = _jobs(study, runs, seeds, crew), _seconds_of_old(study)
    print(f"{len(runs)} runs, {sum(job.kind not in (BASE, PRESAMPLE) for job in waiting)} of them to do", flush=True)
    if not waiting:
        return
    running: dict[Future[None], tuple[_Job, float]] = {}
    form = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} jobs, {elapsed} gone{postfix}"
    pool = ThreadPoolExecutor(workers)
    with tqdm(total=len(waiting), desc="study", bar_format=form) as bar:
        try:
            while waiting or running:
                undone = {job.id for job in waiting} | {job.id for job, _ in running.values()}
                ready = [job for job in waiting if not undone & set(job.needs)]
                for job in ready[: workers - len(running)]:
                    waiting.remove(job)
                    running[pool.submit(job.work)] = (job, time.monotonic())
                for future in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                    job, began = running.pop(future)
                    future.result()
                    took[job.kind].append(time.monotonic() - began)
                    bar.update()
                bar.set_postfix_str(_time_left(waiting, list(running.values()), took, workers))
        finally:
            crew.stop()
            pool.shutdown(cancel_futures=True)


def _jobs(study: Study, runs: Sequence[Run], seeds: int, crew: "_Crew") -> list[_Job]:
    """What is not done yet: each seed's base, the partitions that runs share, the runs; seed by seed."""
    jobs: dict[str, _Job] = {}
    first: dict[str, str] = {}  # by settings, so that of runs with equal ones the first is trained and the others wait
    for seed in range(seeds):
        base = make_run(study, (BASE, None), seed)
        if not _done(study, base):
            jobs[base.id] = _Job(base.id, BASE, (), partial(crew.measure, base))
        for run in (run for run in runs if run.seed == seed and not _done(study, run)):
            needs = [base.id, first.setdefault(json.dumps(run.settings), run.id)]
            if run.uses_partition:
                shared = partition_of(study, run)
                if not (shared / "presample" / "report.json").exists() or _stale(shared, run, _of_presampling(run)):
                    jobs.setdefault(shared.name, _Job(shared.name, PRESAMPLE, (base.id,), partial(crew.presample, run)))
                needs.append(shared.name)
            jobs[run.id] = _Job(run.id, run.method, tuple({*needs} - {run.id}), partial(crew.train, run))
    return list(jobs.values())


def _of_presampling(run: Run) -> dict[str, Any]:
    """The settings that decide a partition."""
    return {k: v for k, v in run.settings.items() if k.split(".")[0] in ("presample", "sampling", "data", "model")}


def partition_of(study: Study, run: Run) -> Path:
    """The folder of the partition that a run shares with all whose presampling is the same."""
    digits = hashlib.sha256(json.dumps(_of_presampling(run), sort_keys=True).encode()).hexdigest()[:8]
    return study.runs / f"{PRESAMPLE}-{digits}-seed{run.seed}"


def base_weights(config: Config) -> str:
    """SHA-256 of the initial policy's weights; "" where it is not trained yet."""
    home = Path(config.run.folder)
    if config.model.path == "miniature" and not base_folder(home, config.run.seed).is_dir():
        return ""
    return load_policy(config.model.path, config, torch.device("cpu")).weights_hash()


def _done(study: Study, run: Run) -> bool:
    """Whether the run's JSON file is there, made with these settings from this base; if not from these, says so."""
    old = read_json(study.results / f"{run.id}.json", optional=True)
    if not old:
        return False
    base = base_weights(run.config)
    stale = changed(old["settings"], run.settings) + ["base"] * (old["base"] != base)
    if stale and base:  # else it is not known yet whether the base will be the same: the job asks again
        print(f"{run.id}: made with another {', '.join(stale)}; it is done anew")
    return not stale


def _twin(study: Study, run: Run) -> dict[str, Any]:
    """The JSON object of a run under another name with the same settings and base, {} where there is none."""
    for path in sorted(study.results.glob(f"*-seed{run.seed}.json")):
        old = read_json(path)
        if old["method"] != BASE and old["settings"] == run.settings and old["base"] == base_weights(run.config):
            return {**old, "same_as": old.get("same_as", path.stem)}
    return {}


def _stale(folder: Path, run: Run, settings: Mapping[str, Any]) -> bool:
    """Whether what lies in a folder was begun with other settings, or from another base."""
    old = read_json(folder / SPEC, optional=True)
    return not old or bool(changed(old["settings"], settings)) or old["base"] != _base_of(run)


def _base_of(run: Run) -> str:
    return "" if run.method == BASE else base_weights(run.config)


def _seconds_of_old(study: Study) -> dict[str, list[float]]:
    took: dict[str, list[float]] = defaultdict(list)
    for path in sorted(study.results.glob("*.json")):
        old = read_json(path)
        took[old["method"]].append(old["wall_seconds"])
    return took


def _time_left(
    waiting: Sequence[_Job], running: Sequence[tuple[_Job, float]], took: Mapping[str, list[float]], workers: int
) -> str:
    """From what jobs of the same kind took, or all runs where there is none of that kind yet."""
    of_runs = [seconds for kind, known in took.items() if kind not in (BASE, PRESAMPLE) for seconds in known]
    if not of_runs:
        return "time left: known when the first run is done"
    ahead = [statistics.fmean(took.get(job.kind) or of_runs) for job in waiting]
    begun = [statistics.fmean(took.get(job.kind) or of_runs) - time.monotonic() + began for job, began in running]
    left = max([sum(x for x in (*ahead, *begun) if x > 0) / workers, *begun, 0.0])
    if not left:
        return "the last ones take longer than such jobs did so far"
    return f"about {left / 3600:.1f} h left" if left > 5400 else f"about {left / 60:.0f} min left"


class _Crew:
    """The processes at work. Each is a session of its own, so that Ctrl-C reaches it once, from here."""

    def __init__(self, study: Study) -> None:
        self.study, self.live, self.lock, self.stopping = study, set[int](), threading.Lock(), False

    def stop(self) -> None:
        """Ends the processes as Ctrl-C would: a training saves and stops after its step."""
        with self.lock:
            self.stopping = True
            for number in self.live:
                with contextlib.suppress(ProcessLookupError):  # it has ended this moment
                    os.kill(number, signal.SIGTERM)

    def train(self, run: Run) -> None:
        """Trains, then measures; what stands there under another name is copied instead."""
        if _done(self.study, run):
            return
        if twin := _twin(self.study, run):
            twin |= {"method": run.method, "sweep": run.sweep, "value": run.value}
            write_result(self.study.results / f"{run.id}.json", twin)
            return
        folder = self._prepare(run, run.config.run_folder, run.settings)
        if run.uses_partition:
            source = partition_of(self.study, run) / "presample"
            shutil.copytree(source, folder / "presample", dirs_exist_ok=True)
        self._call(run.id, folder, [str(ROOT / "train.py"), str(run.file), *run.overrides])
        self.measure(run)

    def measure(self, run: Run) -> None:
        """Leaves the run's JSON file."""
        folder = self._prepare(run, run.config.run_folder, run.settings)
        self._call(run.id, folder, ["-m", "dph.study_measure", str(folder)])

    def presample(self, run: Run) -> None:
        """Makes the partition that the run shares."""
        folder = self._prepare(run, partition_of(self.study, run), _of_presampling(run))
        arguments = [str(ROOT / "presample.py"), str(run.file), *run.overrides, f"--run.name={folder.name}"]
        self._call(folder.name, folder, arguments)

    def _prepare(self, run: Run, folder: Path, settings: Mapping[str, Any]) -> Path:
        """The folder with what it is for; what other settings or another base left there is deleted."""
        spec: dict[str, Any] = {
            **{"method": run.method, "sweep": run.sweep, "value": run.value, "seed": run.seed},
            "base": _base_of(run),
            "file": str(run.file),
            "overrides": run.overrides,
            "sets": {role: [each.source, each.samples] for role, each in self.study.sets.items()},
            "result": str(self.study.results / f"{run.id}.json"),
            "settings": settings,
        }
        if folder.exists() and _stale(folder, run, settings):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / SPEC, json.dumps(spec, indent=1) + "\n")
        return folder

    def _call(self, name: str, folder: Path, arguments: Sequence[str]) -> None:
        """Runs Python with `arguments`, its words into the log. UserError: the line in which it failed."""
        log = self.study.runs / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        began = time.monotonic()
        with log.open("ab") as words, self.lock:
            if self.stopping:
                raise KeyboardInterrupt
            start = words.tell()
            process = subprocess.Popen(
                [sys.executable, *arguments], stdout=words, stderr=words, env=environment, start_new_session=True
            )
            self.live.add(process.pid)
        _, status, used = os.wait4(process.pid, 0)  # not process.wait: what this child alone used is wanted
        with self.lock:
            process.returncode = os.waitstatus_to_exitcode(status)
            self.live.discard(process.pid)
        peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # at least this process's: Linux counts from
        # the copy that begins a child, and this one has loaded no more than a training does
        command = Path(arguments[1] if arguments[0] == "-m" else arguments[0]).name
        append_rows(folder / USAGE, [{"command": command, "seconds": time.monotonic() - began, "peak_bytes": peak}])
        if process.returncode and not self.stopping:
            raise UserError(f"{name}: {_last_words(log, start)} (log: {log})")
        if process.returncode:
            raise KeyboardInterrupt


def _last_words(log: Path, start: int) -> str:
    """The last `error:` line, or the last line at all, after `start` bytes of a log."""
    text = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    return ([line for line in lines if line.startswith("error:")] or lines or ["ended without a word"])[-1]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = fail  # type: ignore[method-assign]
    parser.add_argument("study", nargs="?", type=Path, default=Path("study.toml"), help="default: study.toml")
    parser.add_argument("--methods", metavar="NAMES", help="methods and groups, with commas; default: the default ones")
    parser.add_argument("--seeds", metavar="COUNT", help="seeds 0 ... COUNT-1; default: the file's")
    parser.add_argument("--report", action="store_true", help="tables and pictures alone")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments = parser.parse_args()
    to_the_end(lambda: _study(arguments), arguments.debug)


def _study(arguments: argparse.Namespace) -> None:
    study = load_study(arguments.study)
    names = None if arguments.methods is None else [n.strip() for n in arguments.methods.split(",") if n.strip()]
    seeds = str(study.table.seeds if arguments.seeds is None else arguments.seeds)
    if not (seeds.isdecimal() and 1 <= int(seeds) <= 1000):
        raise UserError(f"SEEDS = {seeds!r} should be a count from 1 to 1000, e.g. 4 for seeds 0, 1, 2, 3")
    if not arguments.report:
        run_study(study, names, int(seeds))
    folder, order = Path(study.table.report), list(study.methods)
    for path in [write_tables(folder, order), *draw(folder, order)]:
        print(path)


if __name__ == "__main__":
    main()
