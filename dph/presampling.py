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


def presample(policy: Policy, data: PromptSet, config: Config, other: Path | None = None) -> Partition:
    """Makes the partition of E7 in RUN/presample, or reads it where it is already there and fits.

    Args:
        other: a run whose partition is taken over, where it has one.

    Raises: UserError where a partition that is there was made from something else; one of `other` is not copied then.
    """
    folder = config.run_folder / "presample"
    fingerprint = made_from(policy, data, {**answer_settings(config), **asdict(config.presample)})
    if other is not None and (other / "presample" / "report.json").exists():
        with writer_first():
            load_partition(other / "presample", fingerprint, "record that run again, or leave out --rollouts-from")
        copy_folder(other / "presample", folder)
    if not (folder / "report.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _make_partition(policy, data, config, folder, fingerprint)
    with writer_first():
        partition = load_partition(folder, fingerprint)
    (folder / "progress.jsonl").unlink(missing_ok=True)
    return partition


def _make_partition(policy: Policy, data: PromptSet, config: Config, folder: Path, fingerprint: dict[str, str]) -> None:
    """Samples, divides, scores what is to be rehearsed, and writes the folder."""
    wanted = config.presample
    k = wanted.responses
    count = wanted.rehearsal_responses
    work = _Work(policy, data.task, config, folder / "progress.jsonl", fingerprint)
    work.ask("first", data.prompts, range(k), keep=not wanted.confirm)
    near_perfect = [prompt for prompt in data.prompts if work.correct("first", prompt) >= wanted.threshold]
    if wanted.confirm:
        stage = "second"
        work.ask(stage, near_perfect, range(k, k + count), keep=True)
        d_pef = [prompt for prompt in near_perfect if work.row(stage, prompt)["rewards"][0] == 1]
    else:
        stage = "first"
        d_pef = near_perfect
    rehearsal: list[Rollout] = []
    for prompt in d_pef:
        correct = work.row(stage, prompt)["answers"]
        for number, tokens in enumerate(correct[:count]):
            unknown = [0.0] * len(tokens)  # log-probabilities, until they are scored below
            finished = tokens[-1] in policy.tokenizer.end_ids  # a right answer may have been cut all the same
            rehearsal.append(Rollout(prompt.index, number, prompt.tokens, tokens, unknown, finished, reward=1.0))
    _score(policy, rehearsal, config)
    _write(folder, work, data.prompts, {prompt.index for prompt in d_pef}, rehearsal)


def _score(policy: Policy, rehearsal: Sequence[Rollout], config: Config) -> None:
    """Gives the answers pi_ref's log-probabilities, and its likeliest tokens where they are asked for (E10)."""
    temperature = config.sampling.temperature
    budget = config.train.microbatch_tokens
    with autocast(policy.model, config.run.dtype):
        scored = score_rollouts(policy.model, rehearsal, temperature, budget, config.presample.stored_top_k)
    for rollout, by_reference in zip(rehearsal, scored, strict=True):
        rollout.logprobs = by_reference.logprobs
        rollout.top = by_reference.top


class _Work:
    """The prompts that are done, each a row of an append-only file whose first line is the fingerprint."""

    def __init__(self, policy: Policy, task: Task, config: Config, path: Path, fingerprint: dict[str, str]) -> None:
        self.policy = policy
        self.task = task
        self.config = config
        self.path = path
        self.fingerprint = fingerprint
        self.done: dict[tuple[str, int], dict[str, Any]] = {}  # (stage, prompt) -> its row
        rows = read_log(path)
        if rows:
            refuse_other(path, rows[0], fingerprint, WAY_OUT)
        for row in rows[1:]:
            self.done[row["stage"], row["prompt"]] = row
        whole = [fingerprint, *rows[1:]]  # without a last line that was cut
        write_text(path, "".join(json.dumps(row) + "\n" for row in whole))

    def row(self, stage: str, prompt: Prompt) -> dict[str, Any]:
        """What is noted of a prompt: its rewards, their outcomes and, where they are kept, the correct answers."""
        return self.done[stage, prompt.index]

    def correct(self, stage: str, prompt: Prompt) -> int:
        """How many answers were right: a reward of 1, not of a half."""
        return sum(bool(reward == 1) for reward in self.row(stage, prompt)["rewards"])

    def ask(self, stage: str, prompts: list[Prompt], samples: range, keep: bool) -> None:
        """Draws and judges answers of pi_ref, in portions that are noted whole.

        A portion that was cut short is drawn anew: in batches of the same shapes it says the same, to the bit.
        """
        size = max(1, PORTION * self.config.sampling.max_rows // len(samples))
        portions = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        todo = [portion for portion in portions if not self._has(stage, portion)]
        left = len(samples) * sum(len(portion) for portion in todo)
        total = len(samples) * len(prompts)
        settings = sampling_settings(self.config, self.policy, PRESAMPLE, top_p=self.config.presample.top_p)
        actor = acting(self.policy, self.config.run.dtype)
        with tqdm(total=total, initial=total - left, desc=f"pre-sampling, {stage}", unit="answer") as bar:
            for portion in todo:
                found: list[Answer] = []
                for got in answer(actor, PromptSet(self.task, portion), [samples] * len(portion), settings):
                    found.append(got)
                    bar.update()
                found.sort(key=lambda each: (each.rollout.prompt, each.rollout.sample))
                self._note(stage, found, keep)

    def _has(self, stage: str, portion: Sequence[Prompt]) -> bool:
        """Whether all prompts of a portion are done."""
        return all((stage, prompt.index) in self.done for prompt in portion)

    def _note(self, stage: str, answers: Sequence[Answer], keep: bool) -> None:
        """Appends a portion's rows to the file, one for each prompt."""
        rows: dict[int, dict[str, Any]] = {}
        for each in answers:
            index = each.rollout.prompt
            if index not in rows:
                rows[index] = {"stage": stage, "prompt": index, "rewards": [], "outcomes": Counter(), "answers": []}
            row = rows[index]
            row["rewards"].append(float(each.reward.value))
            row["outcomes"][each.reward.outcome] += 1
            if keep and each.reward.value == 1:
                row["answers"].append(each.rollout.tokens)
        append_rows(self.path, rows.values())
        for index, row in rows.items():
            self.done[stage, index] = row


def _write(folder: Path, work: _Work, prompts: Sequence[Prompt], pef: set[int], rehearsal: list[Rollout]) -> None:
    """All three files; report.json last, since it says that the others are complete."""
    wanted = work.config.presample
    rows: list[dict[str, Any]] = []
    outcomes: Counter[str] = Counter()
    for prompt in prompts:
        correct = work.correct("first", prompt)
        if prompt.index in pef:
            chosen = "pef"
        elif wanted.drop_unsolved and correct == 0:
            chosen = "dropped"
        else:
            chosen = "exp"
        rows.append({"prompt": prompt.index, "set": chosen, "correct": correct})
        outcomes.update(work.row("first", prompt)["outcomes"])
    write_text(folder / "partition.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_tensors(folder / "rehearsal.safetensors", pack(rehearsal))
    sets = Counter(row["set"] for row in rows)
    correct_of_k = Counter(row["correct"] for row in rows)
    report = {
        "prompts": len(rows),
        "near_perfect": sum(row["correct"] >= wanted.threshold for row in rows),
        "d_pef": sets["pef"],
        "d_exp": sets["exp"],
        "rehearsal_answers": len(rehearsal),
        "pass@1": sum(row["correct"] for row in rows) / (len(rows) * wanted.responses),
        "correct_of_k": {str(correct): count for correct, count in sorted(correct_of_k.items())},
        "outcomes": outcomes,
        "presample": asdict(wanted),
        "fingerprint": work.fingerprint,
    }
    write_text(folder / "report.json", json.dumps(report, indent=1) + "\n")


def load_partition(folder: Path, fingerprint: dict[str, str], way_out: str = WAY_OUT) -> Partition:
    """Reads RUN/presample.

    Raises: UserError when it was made from something else, or when both sets are empty.
    """
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        refuse_other(folder, report["fingerprint"], fingerprint, way_out)
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
