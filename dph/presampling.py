"""Pre-sampling (E7): what the initial policy nearly always solves becomes D_pef, the rest D_exp.

pi_ref answers every training prompt k times. A prompt with at least `threshold` correct answers is near-perfect; one
more sample confirms it, without which the set would be biased to luck. Confirmed, it enters D_pef with that sample and
the correct ones of `rehearsal_responses` - 1 more as its rehearsal answers, token ids with pi_ref's log-probabilities;
otherwise it goes to D_exp with all the others.

Against the paper: thresholds are settings (it takes 6/8 for Llama, 7/8 for Qwen); more than one rehearsal answer a
prompt is our addition, and so is `confirm = false`, which keeps up to `rehearsal_responses` of the k samples' own
correct answers.

The folder RUN/presample holds partition.jsonl, rehearsal.safetensors and report.json; while it is being made,
progress.jsonl holds a line for each prompt that is done, and an interrupted run goes on from there.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tqdm import tqdm

from dph.answering import PRESAMPLE, Answer, Policy, acting, answer, autocast, sampling_settings, score_rollouts
from dph.checkpoint import append_rows, copy_folder, read_log, write_tensors, write_text, writer_first
from dph.config import Config
from dph.errors import UserError
from dph.made_from import answer_settings, made_from, refuse_other
from dph.prompts import PromptSet
from dph.rollouts import Rollout, pack, unpack
from dph.tasks import Task
from dph.tasks.base import Prompt

PORTION = 8  # batches of sampling.max_rows answers that are drawn between two notes of progress
WAY_OUT = "delete it to pre-sample again, or change run.name"


@dataclass(frozen=True)
class Partition:
    """Indices of the prompts of both sets, and D_pef's stored answers with pi_ref's log-probabilities."""

    pef: list[int]
    exp: list[int]
    rehearsal: list[Rollout]


def presample(policy: Policy, data: PromptSet, config: Config) -> Partition:
    """Makes RUN/presample, or reads it where it is already there and fits."""
    folder = config.run_folder / "presample"
    fingerprint = made_from(policy, data, {**answer_settings(config), **asdict(config.presample)})
    if not (folder / "report.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _make_partition(policy, data, config, folder, fingerprint)
    with writer_first():
        partition = load_partition(folder, fingerprint)
    (folder / "progress.jsonl").unlink(missing_ok=True)
    return partition


def _make_partition(policy: Policy, data: PromptSet, config: Config, folder: Path, fingerprint: dict[str, str]) -> None:
    """Samples, divides, scores what is to be rehearsed, and writes the folder."""
    wanted, prompts = config.presample, data.prompts
    work = _Work(policy, data.task, config, folder / "progress.jsonl", fingerprint)
    k, count = wanted.responses, wanted.rehearsal_responses
    work.ask("first", prompts, range(k), keep=not wanted.confirm)
    near_perfect = [prompt for prompt in prompts if work.correct("first", prompt) >= wanted.threshold]
    stage = "first"
    d_pef = near_perfect
    if wanted.confirm:
        stage = "second"
        work.ask(stage, near_perfect, range(k, k + count), keep=True)
        d_pef = [prompt for prompt in near_perfect if work[stage, prompt]["rewards"][0] == 1]
    rehearsal: list[Rollout] = []
    for prompt in d_pef:
        for tokens in work[stage, prompt]["answers"][:count]:  # the correct ones
            rehearsal.append(Rollout(prompt.index, 0, prompt.tokens, tokens, [0.0] * len(tokens), True, 1.0))
    temperature, budget = config.sampling.temperature, config.train.microbatch_tokens
    with autocast(policy.model, config.run.dtype):
        scored = score_rollouts(policy.model, rehearsal, temperature, budget, wanted.stored_top_k)
    for rollout, by_reference in zip(rehearsal, scored, strict=True):
        rollout.logprobs, rollout.top = by_reference.logprobs, by_reference.top
    _write(folder, work, prompts, {prompt.index for prompt in d_pef}, rehearsal)


class _Work:
    """The prompts that are done, each a row of an append-only file whose first line is the fingerprint."""

    def __init__(self, policy: Policy, task: Task, config: Config, path: Path, fingerprint: dict[str, str]) -> None:
        self.policy, self.task, self.config, self.path, self.fingerprint = policy, task, config, path, fingerprint
        rows = read_log(path)
        if rows:
            refuse_other(path, rows[0], fingerprint, WAY_OUT)
        write_text(path, "".join(json.dumps(row) + "\n" for row in [fingerprint, *rows[1:]]))
        self.done: dict[tuple[str, int], dict[str, Any]] = {(row["stage"], row["prompt"]): row for row in rows[1:]}

    def __getitem__(self, key: tuple[str, Prompt]) -> dict[str, Any]:
        stage, prompt = key
        return self.done[stage, prompt.index]

    def correct(self, stage: str, prompt: Prompt) -> int:
        """How many answers were right: a reward of 1, not of a half."""
        return sum(bool(reward == 1) for reward in self[stage, prompt]["rewards"])

    def ask(self, stage: str, prompts: list[Prompt], samples: range, keep: bool) -> None:
        """Draws and judges answers of pi_ref, in portions that are noted whole.

        A portion that was cut short is drawn anew: in batches of the same shapes it says the same, to the bit.
        """
        size = max(1, PORTION * self.config.sampling.max_rows // len(samples))
        portions = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        todo = [p for p in portions if any((stage, prompt.index) not in self.done for prompt in p)]
        settings = sampling_settings(self.config, self.policy, PRESAMPLE, top_p=self.config.presample.top_p)
        actor = acting(self.policy, self.config.run.dtype)
        total, left = (len(samples) * sum(map(len, each)) for each in (portions, todo))
        with tqdm(total=total, initial=total - left, desc=f"pre-sampling, {stage}", unit="answer") as bar:
            for portion in todo:
                found: list[Answer] = []
                for got in answer(actor, PromptSet(self.task, portion), [samples] * len(portion), settings):
                    found.append(got)
                    bar.update()
                self._note(stage, sorted(found, key=lambda a: (a.rollout.prompt, a.rollout.sample)), keep)

    def _note(self, stage: str, answers: Sequence[Answer], keep: bool) -> None:
        rows: dict[int, dict[str, Any]] = {}
        for a in answers:
            new = {"stage": stage, "prompt": a.rollout.prompt, "rewards": [], "outcomes": Counter(), "answers": []}
            row = rows.setdefault(a.rollout.prompt, new)
            row["rewards"].append(float(a.reward.value))
            row["outcomes"][a.reward.outcome] += 1
            row["answers"] += [a.rollout.tokens] if keep and a.reward.value == 1 else []
        append_rows(self.path, rows.values())
        self.done |= {(stage, prompt): row for prompt, row in rows.items()}


def _write(folder: Path, work: _Work, prompts: Sequence[Prompt], pef: set[int], rehearsal: list[Rollout]) -> None:
    """All three files; report.json last, since it says that the others are complete."""
    wanted = work.config.presample
    rows: list[dict[str, Any]] = []
    outcomes: Counter[str] = Counter()
    for prompt in prompts:
        correct = work.correct("first", prompt)
        dropped = wanted.drop_unsolved and correct == 0
        chosen = "pef" if prompt.index in pef else "dropped" if dropped else "exp"
        rows.append({"prompt": prompt.index, "set": chosen, "correct": correct})
        outcomes += Counter(work["first", prompt]["outcomes"])
    write_text(folder / "partition.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_tensors(folder / "rehearsal.safetensors", pack(rehearsal))
    counts = Counter(row["correct"] for row in rows)
    report = {
        "prompts": len(rows),
        "near_perfect": sum(n for c, n in counts.items() if c >= wanted.threshold),
        **{f"d_{name}": sum(row["set"] == name for row in rows) for name in ("pef", "exp")},
        "rehearsal_answers": len(rehearsal),
        "pass@1": sum(c * n for c, n in counts.items()) / (len(rows) * wanted.responses),
        "correct_of_k": {str(c): n for c, n in sorted(counts.items())},
        "outcomes": outcomes,
        "presample": asdict(wanted),
        "fingerprint": work.fingerprint,
    }
    write_text(folder / "report.json", json.dumps(report, indent=1) + "\n")


def take_over_partition(other: Path, run: Path) -> None:
    """Copies the partition of another run, where it has one; `presample` then reads it, or refuses it."""
    if (other / "presample").is_dir():
        copy_folder(other / "presample", run / "presample")


def load_partition(folder: Path, fingerprint: dict[str, str]) -> Partition:
    """Reads RUN/presample.

    Raises: UserError when it was made from something else, or when both sets are empty.
    """
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        refuse_other(folder, report["fingerprint"], fingerprint, WAY_OUT)
        lines = (folder / "partition.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]  # not read_log, which forgives a line that was cut
        rehearsal = unpack(load_file(folder / "rehearsal.safetensors"))
        pef = [row["prompt"] for row in rows if row["set"] == "pef"]
        exp = [row["prompt"] for row in rows if row["set"] == "exp"]
        if len(rows) != report["prompts"]:
            raise ValueError(f"partition.jsonl has {len(rows)} of {report['prompts']} rows")
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{folder}: cannot be read ({error}); delete it to pre-sample again") from error
    if not pef and not exp:
        raise UserError(f"{folder}: D_pef and D_exp are both empty: all {len(rows)} prompts were dropped")
    return Partition(pef, exp, rehearsal)
