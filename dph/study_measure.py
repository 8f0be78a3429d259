"""What a run of the study leaves: python -m dph.study_measure RUN, the last process of each run (study.py calls it).

It answers every set of the study with the run's newest checkpoint (the base: with its model), greedily and n times, and
writes one JSON file: of each question how many answers are right, whether the greedy one is, and how many are in each
style; also sizes of the partition, seconds a step, peak memory, and the curve of the evaluations during training.
RUN/study.json says what the run is, RUN/usage.jsonl what its processes took.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dph.answering import Policy
from dph.checkpoint import newest_checkpoint, read_log, write_text
from dph.cli import load_policy, open_task, set_up, to_the_end
from dph.config import Config, load_config
from dph.errors import read_json
from dph.evaluation import evaluate, summarise
from dph.prompts import PromptSet, tokenize
from dph.study_plan import BASE
from dph.tasks.miniature import style_of

SPEC, USAGE = "study.json", "usage.jsonl"
STYLES = 3  # of each family of the miniature


def measure(folder: Path) -> None:
    """Answers all sets with the newest checkpoint of a run's folder (the base: its model), and writes its JSON file."""
    spec, began = read_json(folder / SPEC), time.monotonic()
    config = load_config(spec["file"], spec["overrides"])
    policy = load_policy(config.model.path, config, set_up(config))
    found = {key: spec[key] for key in ("method", "sweep", "value", "seed")}
    found |= {"base": policy.weights_hash(), "commit": _commit(), "torch": torch.__version__}
    if spec["method"] == BASE:
        found["curve"] = _small_evaluation(policy, spec["sets"]["validation"][0], config)
    else:
        newest = newest_checkpoint(folder)
        assert newest is not None, f"{folder} holds no checkpoint"
        policy = load_policy(str(newest), config, set_up(config))
        found |= _of_the_training(folder, spec["sets"]["validation"][0])
    found["sets"] = {role: _answers(policy, source, n, config) for role, (source, n) in spec["sets"].items()}
    usage = read_log(folder / USAGE)
    found["peak_bytes"] = max((row["peak_bytes"] for row in usage if row["command"] == "train.py"), default=0)
    found["wall_seconds"] = round(sum(row["seconds"] for row in usage) + time.monotonic() - began, 1)
    found["settings"] = spec["settings"]
    write_result(Path(spec["result"]), found)


def write_result(path: Path, found: Mapping[str, Any]) -> None:
    """One line for each key, so that a difference between two files can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in found.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _commit() -> str:
    """The project's commit, "" where it is no checkout."""
    told = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return told.stdout.strip()


def _small_evaluation(policy: Policy, source: str, config: Config) -> dict[str, Any]:
    """The base's point of the curve over training steps: what an evaluation during training would have found."""
    data = tokenize(open_task(source, config), policy.tokenizer, config)
    part = PromptSet(data.task, data.prompts[: config.eval.during_prompts])
    result, _ = evaluate(policy, part, config, config.eval.during_samples, False)
    return _curve([(0, summarise(result, config.eval.k))])


def _of_the_training(folder: Path, validation: str) -> dict[str, Any]:
    """Sizes of the partition, medians of the seconds a step, and the curve over training steps."""
    rows = read_log(folder / "metrics.jsonl", "step")
    phases = {name for row in rows for name in row if name.startswith("seconds/")}
    seconds = {n.removeprefix("seconds/"): statistics.median(row.get(n, 0.0) for row in rows) for n in sorted(phases)}
    report = read_json(folder / "presample" / "report.json", optional=True)
    curve = _curve([(row["step"], row["eval"][validation]) for row in rows if validation in row.get("eval", {})])
    sizes = {name: report.get(name) for name in ("d_pef", "d_exp", "rehearsal_answers")}
    return {**sizes, "seconds": {n: round(x, 4) for n, x in seconds.items()}, "curve": curve}


def _curve(points: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """{"k": the largest k, "points": [[step, pass@1, pass@k], ...]} of summaries."""
    k = max((int(name[5:]) for _, told in points for name in told if name.startswith("pass@")), default=0)
    return {"k": k, "points": [[n, round(told["pass@1"][0], 5), round(told[f"pass@{k}"][0], 5)] for n, told in points]}


def _answers(policy: Policy, source: str, samples: int, config: Config) -> dict[str, Any]:
    """One set's {"source", "n", "correct", "greedy", "styles"}: a number, or a count of each style, a question."""
    task = open_task(source, config)
    data = tokenize(task, policy.tokenizer, config)
    result, answers = evaluate(policy, data, config, samples, True)
    task.close()
    prompts = {prompt.index: prompt for prompt in data.prompts}
    styles = {index: [0] * STYLES for index in prompts}
    for got in answers:
        prompt = prompts[got.rollout.prompt]
        style = style_of(prompt, got.text) if "family" in prompt.meta else None
        if style is not None:
            styles[prompt.index][style] += 1
    problems = result["problems"]
    counts = {"correct": [p["correct"] for p in problems], "greedy": [int(p["greedy"]) for p in problems]}
    return {"source": source, "n": samples, **counts, "styles": [styles[p["prompt"]] for p in problems]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    folder = parser.parse_args().run
    to_the_end(lambda: measure(folder), debug=False)
