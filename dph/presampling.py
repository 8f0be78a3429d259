"""Pre-sampling (E7): what the initial policy nearly always solves becomes D_pef, the rest D_exp.

pi_ref answers every training prompt k times. A prompt with at least `threshold` correct answers is near-perfect; one
more sample confirms it, without which the set would be biased to luck. Confirmed, it enters D_pef with that sample and
the correct ones of `rehearsal_responses` - 1 more as its rehearsal answers, token ids with pi_ref's log-probabilities;
otherwise it goes to D_exp with all the others.

Against the paper: thresholds are settings (it takes 6/8 for Llama, 7/8 for Qwen); more than one rehearsal answer a
prompt is our addition, and so is `confirm = false`, which keeps the k samples' own correct answers.

The folder RUN/presample holds partition.jsonl, rehearsal.safetensors and report.json; while it is being made,
progress.jsonl holds a line for each prompt that is done, and an interrupted run goes on from there.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from dph.answering import PRESAMPLE, Actor, Question, answer, autocast
from dph.checkpoint import write_tensors, write_text
from dph.config import Config
from dph.errors import UserError
from dph.model import Decoder
from dph.rollouts import Rollout, score
from dph.sampler import Settings
from dph.tasks import Task
from dph.tokenizer import Tokenizer

FIRST, SECOND = "first", "second"  # the k samples; the confirming one and those drawn with it


@dataclass(frozen=True)
class Partition:
    """Indices of the prompts of both sets, and D_pef's stored answers with pi_ref's log-probabilities."""

    pef: list[int]
    exp: list[int]
    rehearsal: list[Rollout]


def presample(
    model: Decoder,
    tokenizer: Tokenizer,
    task: Task,
    questions: Sequence[Question],
    config: Config,
    fingerprint: dict[str, str],
) -> Partition:
    """Makes RUN/presample, or reads it where it is already there and fits."""
    folder = config.run_folder / "presample"
    if (folder / "report.json").exists():
        return load_partition(folder, questions, fingerprint)
    folder.mkdir(parents=True, exist_ok=True)
    progress = _Progress(folder / "progress.jsonl", fingerprint)
    wanted = config.presample
    k, more = wanted.responses, wanted.rehearsal_responses
    ask = _Asker(model, tokenizer, task, config, progress)
    ask(FIRST, questions, range(k), keep=not wanted.confirm)
    near_perfect = [q for q in questions if progress.correct(FIRST, q) >= wanted.threshold]
    if wanted.confirm:
        ask(SECOND, near_perfect, range(k, k + more), keep=True)
    pef = [q for q in near_perfect if not wanted.confirm or progress[SECOND, q]["rewards"][0] == 1]
    stage = SECOND if wanted.confirm else FIRST
    rehearsal = [
        Rollout(q.prompt.index, number, q.tokens, tokens, [0.0] * len(tokens), True, 1.0)
        for q in pef
        for number, tokens in enumerate(progress[stage, q]["answers"][:more])
    ]
    with autocast(model, config.run.dtype):
        scores = score(model, rehearsal, config.sampling.temperature, config.train.microbatch_tokens)
    for rollout, logprobs in zip(rehearsal, scores, strict=True):
        rollout.logprobs = logprobs
    _write(folder, questions, near_perfect, pef, rehearsal, progress, config, fingerprint)
    return load_partition(folder, questions, fingerprint)


class _Progress:
    """The prompts that are done: an append-only file whose first line is the fingerprint."""

    def __init__(self, path: Path, fingerprint: dict[str, str]) -> None:
        self.path = path
        self.done: dict[tuple[str, int], dict[str, Any]] = {}
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        if len(lines) > 1:
            _refuse_stale(path, json.loads(lines[0]), fingerprint)
        text = "\n".join([json.dumps(fingerprint), *lines[1:-1], ""])  # the last piece is empty, or cut by a crash
        write_text(path, text)
        for line in lines[1:-1]:
            row = json.loads(line)
            self.done[row["stage"], row["prompt"]] = row

    def __getitem__(self, key: tuple[str, Question]) -> dict[str, Any]:
        return self.done[key[0], key[1].prompt.index]

    def correct(self, stage: str, question: Question) -> int:
        """Correct answers of one prompt in one stage."""
        return sum(reward == 1 for reward in self[stage, question]["rewards"])

    def add(self, row: dict[str, Any]) -> None:
        self.done[row["stage"], row["prompt"]] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


@dataclass(frozen=True)
class _Asker:
    """Draws and judges answers of pi_ref, and notes each prompt as its last answer comes in."""

    model: Decoder
    tokenizer: Tokenizer
    task: Task
    config: Config
    progress: _Progress

    def __call__(self, stage: str, questions: Sequence[Question], samples: range, keep: bool) -> None:
        todo = [q for q in questions if (stage, q.prompt.index) not in self.progress.done]
        settings = Settings(
            stream=(self.config.run.seed, PRESAMPLE, 0),
            end_ids=self.tokenizer.end_ids,
            max_new_tokens=self.config.sampling.max_new_tokens,
            temperature=self.config.sampling.temperature,
            top_p=self.config.presample.top_p,
            max_rows=self.config.sampling.max_rows,
        )
        actor = Actor(self.model, self.config.run.dtype)
        collected: dict[int, dict[int, tuple[float, list[int], str]]] = {}
        bar = tqdm(
            total=len(questions), initial=len(questions) - len(todo), desc=f"pre-sampling, {stage}", unit="prompt"
        )
        with bar:
            answers = answer(actor.model, self.tokenizer, self.task, todo, [samples] * len(todo), settings)
            for got in answers:
                row = collected.setdefault(got.rollout.prompt, {})
                row[got.rollout.sample] = (got.reward.value, got.rollout.tokens, got.reward.outcome)
                if len(row) == len(samples):
                    self.progress.add(_row(stage, got.rollout.prompt, collected.pop(got.rollout.prompt), keep))
                    bar.update()


def _row(stage: str, prompt: int, answers: dict[int, tuple[float, list[int], str]], keep: bool) -> dict[str, Any]:
    ordered = [answers[number] for number in sorted(answers)]
    return {
        "stage": stage,
        "prompt": prompt,
        "rewards": [value for value, _, _ in ordered],
        "outcomes": dict(Counter(outcome for _, _, outcome in ordered)),
        "answers": [tokens for value, tokens, _ in ordered if keep and value == 1],
    }


def _write(
    folder: Path,
    questions: Sequence[Question],
    near_perfect: Sequence[Question],
    pef: Sequence[Question],
    rehearsal: Sequence[Rollout],
    progress: _Progress,
    config: Config,
    fingerprint: dict[str, str],
) -> None:
    """All three files; report.json last, since it says that the others are complete."""
    in_pef = {q.prompt.index for q in pef}
    rows: list[dict[str, Any]] = []
    outcomes = Counter[str]()
    for question in questions:
        correct = progress.correct(FIRST, question)
        unsolved = config.presample.drop_unsolved and correct == 0
        chosen = "pef" if question.prompt.index in in_pef else "dropped" if unsolved else "exp"
        rows.append({"prompt": question.prompt.index, "set": chosen, "correct": correct})
        outcomes.update(progress[FIRST, question]["outcomes"])
    write_text(folder / "partition.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    tensors = {
        "prompt": torch.tensor([r.prompt for r in rehearsal], dtype=torch.int64),
        "lengths": torch.tensor([len(r.tokens) for r in rehearsal], dtype=torch.int64),
        "tokens": torch.tensor([t for r in rehearsal for t in r.tokens], dtype=torch.int64),
        "logprobs": torch.tensor([x for r in rehearsal for x in r.logprobs], dtype=torch.float32),
    }
    write_tensors(folder / "rehearsal.safetensors", tensors)
    sets = Counter(row["set"] for row in rows)
    report = {
        "prompts": len(rows),
        "near_perfect": len(near_perfect),
        "d_pef": sets["pef"],
        "d_exp": sets["exp"],
        "dropped": sets["dropped"],
        "rehearsal_answers": len(rehearsal),
        "pass@1": sum(row["correct"] for row in rows) / (len(rows) * config.presample.responses),
        "correct_of_k": {str(c): n for c, n in sorted(Counter(row["correct"] for row in rows).items())},
        "outcomes": dict(outcomes),
        "presample": asdict(config.presample),
        "fingerprint": fingerprint,
    }
    write_text(folder / "report.json", json.dumps(report, indent=1) + "\n")
    progress.path.unlink()


def load_partition(folder: Path, questions: Sequence[Question], fingerprint: dict[str, str]) -> Partition:
    """Reads RUN/presample.

    Raises: UserError when it was made from something else, or when both sets are empty.
    """
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        lines = (folder / "partition.jsonl").read_text(encoding="utf-8").splitlines()
        stored = load_file(folder / "rehearsal.safetensors")
        _refuse_stale(folder, report["fingerprint"], fingerprint)
        rows = [json.loads(line) for line in lines]
        rehearsal = list(_rollouts(stored, {q.prompt.index: q.tokens for q in questions}))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{folder}: cannot be read ({error}); delete it to pre-sample again") from error
    pef, exp = ([row["prompt"] for row in rows if row["set"] == name] for name in ("pef", "exp"))
    if not pef and not exp:
        raise UserError(
            f"{folder}: D_pef and D_exp are both empty ({len(rows)} prompts, all dropped); nothing to train on"
        )
    return Partition(pef, exp, rehearsal)


def _rollouts(stored: dict[str, torch.Tensor], prompts: dict[int, list[int]]) -> Iterator[Rollout]:
    lengths = stored["lengths"].tolist()
    pieces = (torch.split(stored[name], lengths) for name in ("tokens", "logprobs"))
    for number, (prompt, tokens, logprobs) in enumerate(zip(stored["prompt"].tolist(), *pieces, strict=True)):
        yield Rollout(prompt, number, prompts[prompt], tokens.tolist(), logprobs.tolist(), True, 1.0)


def make_fingerprint(model_folder: Path, questions: Sequence[Question], config: Config) -> dict[str, str]:
    """What a partition depends on, each part hashed: model, prompts (tokenized, with gold answers), settings."""
    model = hashlib.sha256()
    for path in sorted(model_folder.glob("*.safetensors")):
        with path.open("rb") as file:
            model.update(hashlib.file_digest(file, "sha256").digest())
    prompts = json.dumps([(q.prompt.index, q.tokens, repr(q.prompt.gold)) for q in questions])
    settings = {
        **asdict(config.sampling),
        **asdict(config.presample),
        "seed": config.run.seed,
        "dtype": config.run.dtype,
    }
    settings.pop("max_rows")  # how many at once changes nothing that is said
    settings["judge"] = [config.data.strict, config.data.sql_match, config.data.grader_timeout]
    return {
        "model": model.hexdigest(),
        "prompts": hashlib.sha256(prompts.encode()).hexdigest(),
        "settings": json.dumps(settings, sort_keys=True),
    }


def _refuse_stale(where: Path, found: dict[str, str], wanted: dict[str, str]) -> None:
    stale = [name for name in wanted if found.get(name) != wanted[name]]
    if stale:
        raise UserError(
            f"{where}: made with other {' and '.join(stale)}; delete it to pre-sample again, or change run.name"
        )
