"""One run of the study, trained and measured: python -m study.measure STUDY.toml METHOD VALUE SEED [busy].

run.py calls it. It trains as train.py does, answers every set of the study with the newest checkpoint, greedily and n
times, and writes one JSON file: of each question how many answers are right, whether the greedy one is, and how many
are in each style; where the set asks for it also KL to the base and what the answers vote for; of each text how likely
it is. Also sizes of the partition, seconds a step, how many runs shared the machine (null where other work did: `busy`)
and peak memory. The base is measured alone.
RUN/usage.json says, once the training is done, what it took.

Simplified: the seconds of an interrupted training are those since its last start.
"""

import json
import resource
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dph.answering import Answer, Policy, autocast, score_rollouts
from dph.checkpoint import newest_checkpoint, read_log, write_text
from dph.cli import load_policy, open_task, set_up, to_the_end
from dph.config import Config
from dph.errors import read_json
from dph.evaluation import evaluate, kl_to_base
from dph.model import Decoder
from dph.prompts import tokenize
from dph.rollouts import Rollout
from dph.tasks import Task
from dph.tasks.base import Prompt, read_rows
from dph.tasks.miniature import style_of
from study.plan import BASE, Run, SetTable, Study, load_study, make_run

TRAIN = Path(__file__).parent.parent / "train.py"
STYLES = 3  # of each family of the miniature
KL_ANSWERS = 8  # of each question's answers, on which KL to the base is measured
TEXT_TOKENS = 256  # of each text


def train(run: Run, busy: bool) -> None:
    """Does what the command train.py does, in this process; what it took into usage.json.

    A training that is done is begun again, too: train.py then has no step to take, and refuses the run where its
    questions or graders have changed since.
    """
    usage = run.config.run_folder / "usage.json"
    began = time.monotonic()
    sys.argv = [str(TRAIN), *run.command]
    runpy.run_path(str(TRAIN), run_name="__main__")
    if usage.exists():  # it was trained before; this start took no step
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    write_text(usage, json.dumps({"seconds": time.monotonic() - began, "peak_bytes": peak, "busy": busy}) + "\n")


def measure(study: Study, run: Run, busy: bool = False) -> None:
    """Answers all sets with the newest checkpoint of a run (the base: with its model), and writes its JSON file.

    Args:
        busy: other work ran on the machine.
    """
    began = time.monotonic()
    config = run.config
    device = set_up(config)
    policy = load_policy(config.model.path, config, device)
    base = policy.model
    found: dict[str, Any] = {"method": run.method, "sweep": run.sweep, "value": run.value, "seed": run.seed}
    found["base"] = policy.weights_hash()
    found["commit"] = _commit()
    found["torch"] = torch.__version__
    if run.method == BASE:
        usage: dict[str, Any] = {"seconds": 0.0, "peak_bytes": 0, "busy": busy}
    else:
        newest = newest_checkpoint(config.run_folder)
        assert newest is not None, f"{config.run_folder} holds no checkpoint"
        policy = load_policy(str(newest), config, device, may_be_adapter=True)
        found |= _of_training(config.run_folder)
        usage = read_json(config.run_folder / "usage.json")
    wanted = {name: each for name, each in study.sets.items() if each.at(run.seed)}
    found["sets"] = {name: _set(policy, base, each, config) for name, each in wanted.items()}
    found["workers"] = None if busy or usage.get("busy") else study.table.workers
    found["peak_bytes"] = usage["peak_bytes"]
    found["wall_seconds"] = round(usage["seconds"] + time.monotonic() - began, 1)
    found["settings"] = run.settings
    write_result(study.results / f"{run.id}.json", found)


def write_result(path: Path, found: Mapping[str, Any]) -> None:
    """One line for each key, so that a difference between two files can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in found.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _commit() -> str:
    """The project's commit, "" where it is no checkout."""
    if shutil.which("git") is None:
        return ""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()


def _of_training(folder: Path) -> dict[str, Any]:
    """Sizes of the partition, and medians of the seconds a step."""
    report = read_json(folder / "presample" / "report.json", optional=True)
    found: dict[str, Any] = {name: report.get(name) for name in ("d_pef", "d_exp", "rehearsal_answers")}
    rows = read_log(folder / "metrics.jsonl", "step")
    columns = sorted({name for row in rows for name in row if name.startswith("seconds/")})
    found["seconds"] = {}
    for column in columns:
        median = statistics.median(row.get(column, 0.0) for row in rows)
        found["seconds"][column.removeprefix("seconds/")] = round(median, 4)
    return found


def _set(policy: Policy, base: Decoder, wanted: SetTable, config: Config) -> dict[str, Any]:
    """What is measured on one set."""
    return _text(policy, wanted, config) if wanted.text else _answers(policy, base, wanted, config)


def _answers(policy: Policy, base: Decoder, wanted: SetTable, config: Config) -> dict[str, Any]:
    """One set's {"source", "n", "correct", "greedy", "styles"}: a number, or a count of each style, a question.

    Also of each question "kl", nats a token; "forms", how many answers gave each different right answer; and "votes",
    [answers that gave it, is it right] of each vote.
    """
    task = open_task(wanted.source, config)
    data = tokenize(task, policy.tokenizer, config)
    result, answers = evaluate(policy, data, config, wanted.samples, greedy=True)
    of_prompt: dict[int, list[Answer]] = {prompt.index: [] for prompt in data.prompts}
    for got in answers:
        of_prompt[got.rollout.prompt].append(got)
    problems = result["problems"]
    found: dict[str, Any] = {"source": wanted.source, "n": wanted.samples}
    found["correct"] = [problem["correct"] for problem in problems]
    found["greedy"] = [int(problem["greedy"]) for problem in problems]
    found["styles"] = [count_styles(prompt, of_prompt[prompt.index]) for prompt in data.prompts]
    if wanted.kl:
        rollouts = [got.rollout for got in answers if got.rollout.sample < KL_ANSWERS]
        distances = kl_to_base(policy.model, base, rollouts, config)
        found["kl"] = [round(distances[prompt.index], 6) for prompt in data.prompts]
    if wanted.forms or wanted.votes:
        votes = [count_votes(task, prompt, of_prompt[prompt.index]) for prompt in data.prompts]
        if wanted.votes:
            found["votes"] = votes
        if wanted.forms:
            found["forms"] = [[count for count, right in each if right] for each in votes]
    task.close()
    return found


def count_styles(prompt: Prompt, answers: Sequence[Answer]) -> list[int]:
    """How many answers are in each style of the prompt's family; only the miniature has styles."""
    counts = [0] * STYLES
    for got in answers:
        style = style_of(prompt, got.text) if "family" in prompt.meta else None
        if style is not None:
            counts[style] += 1
    return counts


def count_votes(task: Task, prompt: Prompt, answers: Sequence[Answer]) -> list[tuple[int, int]]:
    """(answers that gave it, is it right) of each different vote, the commonest first."""
    counts: Counter[tuple[str, int]] = Counter()
    for got in answers:
        vote = task.vote(prompt, got.text, got.reward)
        if vote is not None:
            counts[vote, int(got.reward.value == 1)] += 1
    return [(count, right) for (_, right), count in counts.most_common()]


def _text(policy: Policy, wanted: SetTable, config: Config) -> dict[str, Any]:
    """One set's {"text", "logprob"}: the mean log-probability of its tokens, of each row, at temperature 1.

    A text is read without a chat around it, after the begin token; where the tokenizer has none its first token is not
    scored. Of a long text the first TEXT_TOKENS tokens count.
    """
    rollouts: list[Rollout] = []
    for row in islice(read_rows(Path(wanted.text)), wanted.rows):
        tokenizer = policy.tokenizer
        tokens = [*tokenizer.begin, *tokenizer.encode(row.text(wanted.field))][: TEXT_TOKENS + 1]
        if len(tokens) < 2:
            raise row.error(f"{wanted.field} has {len(tokens)} tokens; it should have at least 2")
        rollouts.append(Rollout(len(rollouts), 0, tokens[:1], tokens[1:], [0.0] * (len(tokens) - 1), True))
    with autocast(policy.model, config.run.dtype):
        scored = score_rollouts(policy.model, rollouts, 1.0, config.train.microbatch_tokens)
    means = [statistics.mean(each.logprobs) for each in scored]
    return {"text": wanted.text, "logprob": [round(mean, 5) for mean in means]}


def main(file: str, method: str, value: str, seed: str, busy: str = "") -> None:
    """Trains and measures a run; VALUE is None where its method sweeps no key, BUSY anything where other work runs."""
    study = load_study(Path(file))
    run = make_run(study, (method, None if value == "None" else float(value)), int(seed))
    if method != BASE:
        train(run, bool(busy))
    measure(study, run, bool(busy))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    to_the_end(lambda: main(*arguments), debug=False)
