"""Kills a training again and again, and compares its end with that of an untouched one.

    python benchmarks/chaos.py --kills 50     the quickstart, shortened: its own base model, fewer prompts and steps
    python benchmarks/chaos.py --tiny         a random model and a reward that it can learn, as in the tests

Each kill is SIGTERM, SIGINT or SIGKILL at a random moment; every fourth waits for a checkpoint's writing. The same
command then goes on. When it comes to its end, everything it left is compared with the untouched run's: weights,
moments, counters, metrics (without seconds and rates), samples, pre-sampling and evaluations; and another run begins.

Simplified: each process is forked from one that has imported everything, so that kills fall into work, not imports.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import train
from dph.cli import run_command
from dph.config import load_config, to_toml
from dph.miniature_base import build_base
from dph.tasks.miniature import MiniatureTask
from tests.helpers import WordTask, tiny_folder

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGKILL]
SHORT = [
    *("--run.device=cpu", "--run.threads=1", "--train.steps=8", "--train.eval_every=4", "--train.save_every=2"),
    *("--data.train=miniature:train?count=40", '--data.eval=["miniature:test?count=12", "miniature:cross?count=8"]'),
    *("--eval.samples=4", "--eval.k=[1, 4]", "--eval.during_prompts=8", "--eval.during_samples=2"),
    *("--sampling.max_rows=32", "--presample.rehearsal_responses=2", "--train.rehearsal_rows=8"),
    *("--train.prompts_per_step=8", "--train.responses_per_prompt=4", "--train.keep_best=true"),
    "--train.save_dtype=bf16",
]
TINY = [
    *("--train.steps=6", "--train.prompts_per_step=4", "--train.rehearsal_rows=4", "--sampling.max_new_tokens=8"),
    *("--data.train=miniature:train?count=24", '--data.eval=["miniature:test?count=6"]', "--train.eval_every=2"),
    *("--presample.responses=4", "--presample.threshold=2", "--train.save_every=1", "--eval.during_prompts=4"),
    *("--sampling.max_rows=4", "--eval.samples=2", "--eval.k=[1, 2]", "--optim.lr=1e-3"),
]


def command(arguments: list[str], log: Path) -> None:
    """What a child does: train.py with these arguments; what it prints goes to `log`."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in its background without it
    sys.argv = ["train.py", *arguments]
    if log.parent.joinpath("model").exists():  # the tiny one's
        train.plot_run = lambda run: []  # pictures take longer than all the rest
        MiniatureTask.rewards = WordTask.rewards  # type: ignore[method-assign, assignment]
    try:
        run_command(train.main, str(train.__doc__), train._arguments)
        sys.stdout.flush()
        os._exit(0)  # what Python does after a program's end belongs to no run
    except KeyboardInterrupt:  # between the run's end and here: a kill like any other
        os._exit(130)


def left(run: Path, steps: int) -> dict[str, Any]:
    """Everything that a finished run leaves and that may be compared, by name."""
    last = run / "checkpoints" / f"step-{steps}"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    hashed = {
        "weights": [last / "model.safetensors", last / "master_weights.safetensors"],
        "moments": [last / "trainer.safetensors"],
        "counters": [last / "state.json"],
        "samples": [run / "samples.jsonl"],
        "pre-sampling": sorted((run / "presample").iterdir()),
        "evaluations": sorted((run / "evaluation").glob("*.json")),
    }
    found: dict[str, Any] = {
        name: [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
        for name, files in hashed.items()
    }
    found["metrics"] = [{key: value for key, value in row.items() if "second" not in key} for row in metrics]
    found["stray files"] = sorted(str(p.relative_to(run)) for p in run.rglob("*.partial"))
    return found


def stage(run: Path, steps: int) -> str:
    """What a run is at, told from its files."""
    if list(run.glob("checkpoints/*.partial")):
        return "a checkpoint's writing"
    if not (run / "presample" / "report.json").exists():
        return "pre-sampling" if (run / "presample").exists() else "reading"
    if (run / "checkpoints" / f"step-{steps}").exists():
        return "evaluation of the result"
    return "training" if (run / "metrics.jsonl").exists() else "evaluation of the base, first step"


def chaos(folder: Path, kills: int, seed: int = 0, tiny: bool = False) -> dict[str, Any]:
    """Runs it all in `folder`.

    Returns: {kills: {(stage, signal): count}, resumes, finished: runs compared, differences: {name: count}, ...}.
    """
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__ if __name__ != "__main__" else "train"])
    base = tiny_folder(folder / "model") if tiny else build_base(folder, 0, threads=1)
    run = "tiny" if tiny else "quickstart"
    config = load_config(CONFIG, [*SHORT, *(TINY if tiny else []), f"--model.path={base}", f"--run.name={run}"])
    (folder / "config.toml").write_text(to_toml(config))  # the file in configs/ may change meanwhile
    steps = config.train.steps
    log, killed = folder / "log.txt", folder / "killed" / run

    def start(name: str) -> Any:
        child = context.Process(
            target=command, args=([str(folder / "config.toml"), f"--run.folder={folder / name}"], log)
        )
        child.start()
        return child

    began = time.monotonic()
    child = start("untouched")
    child.join()
    whole = time.monotonic() - began
    assert child.exitcode == 0, log.read_text()[-2000:]
    expected = left(folder / "untouched" / run, steps)
    counts: Counter[tuple[str, str]] = Counter()
    differences, finished, resumes = Counter(dict.fromkeys(expected, 0)), 0, 0
    while True:
        child = start("killed")
        resumes += (killed / "config.toml").exists()
        if counts.total() < kills:
            deadline = time.monotonic() + (whole if rng.random() < 0.25 else 0.4 * whole * rng.random())
            waits = deadline - time.monotonic() > 0.4 * whole  # for a checkpoint's writing
            while child.is_alive() and time.monotonic() < deadline:
                if waits and list(killed.glob("checkpoints/*.partial")):
                    break
                time.sleep(0.0005 if waits else 0.01)
            if child.is_alive():
                number, at = rng.choice(SIGNALS), stage(killed, steps)
                os.kill(child.pid, number)
                child.join()
                if child.exitcode in (-number, 130):
                    counts[at, number.name] += 1
                    continue
        child.join()
        assert child.exitcode == 0, log.read_text()[-2000:]
        finished += 1
        got = left(killed, steps)
        differences.update(name for name in expected if got[name] != expected[name])
        if counts.total() >= kills:
            break
        shutil.rmtree(folder / "killed")
    printed = log.read_text(errors="replace")
    lost = len(re.findall("^KeyboardInterrupt", printed, re.MULTILINE))  # raised where Python drops exceptions
    found = {"kills": counts, "finished": finished, "resumes": resumes, "lost": lost}
    return {**found, "differences": differences, "tracebacks": printed.count("Traceback") - lost, "seconds": whole}


def table(found: dict[str, Any]) -> str:
    """The report in Markdown."""
    counts: Counter[tuple[str, str]] = found["kills"]
    names = [number.name for number in SIGNALS]
    lines = [f"| killed during | {' | '.join(names)} | all |", "| --- |" + " ---: |" * (len(names) + 1)]
    for at in dict.fromkeys(at for at, _ in sorted(counts)):
        row = [counts[at, name] for name in names]
        lines.append(f"| {at} | {' | '.join(map(str, row))} | {sum(row)} |")
    row = [sum(n for (_, each), n in counts.items() if each == name) for name in names]
    lines.append(f"| all | {' | '.join(map(str, row))} | {sum(row)} |")
    shown = ", ".join(f"{name} {count}" for name, count in found["differences"].items())
    lines += ["", f"{found['resumes']} resumes, {found['finished']} finished runs compared. Differences: {shown}."]
    lines.append(
        f"Tracebacks: {found['tracebacks']}. Signals lost in a callback, which runs outlived: {found['lost']}."
    )
    lines.append(f"An untouched run took {found['seconds']:.0f} s.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of moments and signals")
    parser.add_argument("--tiny", action="store_true", help="a random model")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(table(chaos(folder, options.kills, options.seed, options.tiny)))


if __name__ == "__main__":
    main()
