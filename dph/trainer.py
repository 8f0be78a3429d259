"""The training loop. One step reads as the method: sample -> reward -> advantage -> loss -> update.

Exploration rows (rollouts of D_exp, E4) and rehearsal rows (stored answers of D_pef, E5) are two batches with two loss
calls, each with its own denominator, added in one optimizer step (E6). No reference model is in memory unless the
divergence is taken on own samples (E2).

Exact savings: a row whose advantage is zero has no gradient in E4, so it is neither scored nor trained on unless a
penalty needs it (its tokens still count in the denominator); where the sampler's log-probabilities agree with the
scorer's, pi_old is not scored again. Metrics of trained tokens (entropy, clipping) are over the rows that are scored.

The order of prompts and of rehearsal answers is a function of (seed, position) alone, so resuming needs two counters.
"""

import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dph import losses
from dph.answering import TRAIN, Actor, Answer, Policy, PromptSet, Question, answer, autocast, sampling_settings
from dph.checkpoint import append_rows, checkpoints, load_checkpoint, save_checkpoint, write_text
from dph.config import Config
from dph.divergences import make_divergence
from dph.errors import UserError
from dph.evaluation import evaluate, summarise
from dph.model import Decoder
from dph.presampling import Partition
from dph.rollouts import Batch, Rollout, collate, microbatches, score, token_logprobs
from dph.tasks import Prompt

PROMPTS, REHEARSAL = 1, 2  # numbers of the two random orders
SAMPLER_GAP = 1e-4  # largest difference in log-probability at which the sampler's own replace a second scoring
SKIPS = 5  # so many updates in a row without a finite gradient end the run


class Trainer:
    """Trains one policy; `run` goes on from the newest checkpoint of the run's folder."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        data: PromptSet,
        partition: Partition | None = None,
        reference: Decoder | None = None,
        sets: Sequence[PromptSet] = (),
    ) -> None:
        """`partition`: None explores all prompts; `reference`: pi_ref online, for a divergence on own samples."""
        self.config, self.policy, self.task, self.sets = config, policy, data.task, sets
        self.model = model = policy.model
        chosen = None if partition is None else set(partition.exp)
        self.explore = [q for q in data.questions if chosen is None or q.prompt.index in chosen]
        self.rehearsal = partition.rehearsal if partition is not None and config.loss.eta > 0 else []
        self.reference = reference
        loss = config.loss
        settings = {"alpha": loss.alpha, "skew": loss.skew, "divergence_form": loss.divergence_form}
        self.divergence = None if loss.divergence == "none" else make_divergence(loss.divergence, **settings)
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            model.parameters(), optim.lr, (optim.betas[0], optim.betas[1]), weight_decay=optim.weight_decay, fused=True
        )
        self.actor = Actor(model, config.run.dtype)
        self.trust_sampler: bool | None = None  # decided at the first step
        self.state = {"step": 0, "updates": 0, "skipped": 0, "skipped_in_a_row": 0}
        self.device = next(model.parameters()).device

    def run(self) -> None:
        """All steps, with metrics, evaluations, checkpoints and a bar; stops cleanly at Ctrl-C or SIGTERM."""
        config, folder, train = self.config, self.config.run_folder, self.config.train
        if saved := checkpoints(folder):
            self.state = load_checkpoint(saved[-1], self.model, self.optimizer)
        for name in ("metrics.jsonl", "samples.jsonl"):
            _cut_log(folder / name, self.state["step"])
        writer = _tensorboard(folder) if config.run.tensorboard else None
        bar = tqdm(total=train.steps, initial=min(self.state["step"], train.steps), desc="training", unit="step")
        with bar, _stop_signals() as stopped:
            while self.state["step"] < train.steps:
                metrics = self.train_step()
                step = self.state["step"] = self.state["step"] + 1
                if train.eval_every and step % train.eval_every == 0:
                    metrics["eval"] = self._evaluate(step)
                append_rows(folder / "metrics.jsonl", [{"step": step, **metrics}])
                for name, value in metrics.items():
                    if writer is not None and isinstance(value, float):
                        writer.add_scalar(name, value, step)
                bar.set_postfix_str(f"reward {metrics['reward']:.3f}")
                bar.update()
                due = train.save_every and step % train.save_every == 0
                if due or step == train.steps or stopped:
                    save_checkpoint(
                        folder, self.model, self.policy.tokenizer, self.optimizer, self.state, train.keep_last
                    )
                if stopped and step < train.steps:
                    raise KeyboardInterrupt

    def train_step(self) -> dict[str, Any]:
        """One rollout step and its optimizer steps; returns its metrics."""
        meter, train = _Meter(), self.config.train
        questions = self._draw_prompts()
        with meter.seconds("sample_and_grade"):
            answers = self._sample(questions)
        rollouts = [a.rollout for a in answers]
        rewards = torch.tensor([r.reward for r in rollouts])
        groups = torch.arange(len(questions)).repeat_interleave(train.responses_per_prompt)
        advantages = losses.group_advantages(rewards, groups, self.config.loss.advantage_std)
        with meter.seconds("score"):
            self._score(rollouts, meter)
        with meter.seconds("train"):
            for update in range(train.updates_per_step):
                rows = range(update, len(rollouts), train.updates_per_step) if rollouts else []
                self._update([rollouts[i] for i in rows], advantages[list(rows)], self._draw_rehearsal(), meter)
        return {**_rollout_metrics(answers, advantages, groups), **meter.means(), **self._rates(rollouts, meter)}

    def _sample(self, questions: Sequence[Question]) -> list[Answer]:
        """G judged answers to each question, question-major."""
        size, seen, samples = self.config.train.responses_per_prompt, Counter[int](), []
        for question in questions:  # a question drawn twice is two groups of different answers
            first = seen[question.prompt.index]
            samples.append(range(first, first + size))
            seen[question.prompt.index] += size
        settings = sampling_settings(self.config, self.policy.tokenizer, TRAIN, self.state["step"])
        stream = answer(self.actor.refresh(), self.policy.tokenizer, self.task, questions, samples, settings)
        found = {(a.rollout.prompt, a.rollout.sample): a for a in stream}
        return [found[q.prompt.index, n] for q, numbers in zip(questions, samples, strict=True) for n in numbers]

    def _score(self, rollouts: list[Rollout], meter: "_Meter") -> None:
        """pi_old's log-probabilities, unless the sampler's own serve, and pi_ref's, where a penalty needs them."""
        how = (self.config.sampling.temperature, self.config.train.microbatch_tokens)
        with autocast(self.model, self.config.run.dtype):
            old = [] if self.trust_sampler else score(self.model, rollouts, *how)
            ref = score(self.reference, rollouts, *how) if self.reference is not None else []
        if old:
            gap = max(
                abs(a - b) for r, row in zip(rollouts, old, strict=True) for a, b in zip(r.logprobs, row, strict=True)
            )
            meter.add("sampler_gap", gap, 1)
            self.trust_sampler = gap < SAMPLER_GAP if self.trust_sampler is None else self.trust_sampler
        for rollout, row in zip(rollouts, () if self.trust_sampler else old, strict=False):
            rollout.logprobs = row
        for rollout, row in zip(rollouts, ref, strict=False):
            rollout.ref_logprobs = row

    def _update(self, rollouts: list[Rollout], advantages: Tensor, rehearsal: list[Rollout], meter: "_Meter") -> None:
        """One optimizer step on L_exp + eta L_pef (E6), or with the penalty on own samples in L_pef's place."""
        trained = self._backward(rollouts, advantages.to(self.device), meter)
        trained += self._backward(rehearsal, None, meter)
        meter.add("trained_tokens", trained, 0)
        if trained:
            self._optimize(meter)

    def _backward(self, rollouts: list[Rollout], advantages: Tensor | None, meter: "_Meter") -> int:
        """Adds the gradient of one batch, in micro-batches: exploration with advantages (B,), rehearsal with None.

        Returns: the tokens of the rows that have a gradient; the denominators count all rows.
        """
        loss, sampling = self.config.loss, self.config.sampling
        lengths = torch.tensor([len(r.tokens) for r in rollouts])
        total = losses.denominator(lengths, loss.aggregation, loss.aggregation_length or sampling.max_new_tokens)
        every = advantages is None or self.reference is not None
        rows = [i for i in range(len(rollouts)) if every or (advantages is not None and advantages[i] != 0)]
        for group in microbatches([rollouts[i] for i in rows], self.config.train.microbatch_tokens):
            index = [rows[i] for i in group]
            batch = collate([rollouts[i] for i in index], self.device)
            with autocast(self.model, self.config.run.dtype):
                logprobs, entropy = token_logprobs(self.model, batch, sampling.temperature)
            if advantages is None:
                values = loss.eta * self._rehearsal(batch, logprobs, meter)
            else:
                values = self._exploration(advantages[index], batch, logprobs, meter)
                meter.add_tokens(batch.mask, entropy=entropy)
            torch.autograd.backward(losses.aggregate(values, batch.mask, loss.aggregation, total))
        return sum(len(rollouts[i]) for i in rows)

    def _exploration(self, advantages: Tensor, batch: Batch, logprobs: Tensor, meter: "_Meter") -> Tensor:
        """Per-token values of E4, and of the penalty of E2 where there is one, (B, T)."""
        loss, mask, old, ref = self.config.loss, batch.mask, batch.logprobs, batch.ref_logprobs
        values = losses.clipped_loss(logprobs, old, advantages, mask, loss.clip_low, loss.clip_high, loss.dual_clip)
        low, high = losses.clipped_fractions(logprobs, old, advantages, mask, loss.clip_low, loss.clip_high)
        meter.add_tokens(mask, loss_exp=values, clip_low_fraction=low, clip_high_fraction=high)
        if self.reference is not None and self.divergence is not None:
            meter.add_tokens(mask, divergence=losses.own_sample_divergence(logprobs, ref, mask, self.divergence))
            penalty = losses.penalty_loss(logprobs, old, ref, mask, self.divergence, loss.penalty_estimator)
            values = values + loss.eta * penalty
        return values

    def _rehearsal(self, batch: Batch, logprobs: Tensor, meter: "_Meter") -> Tensor:
        """Per-token values of E5 on stored answers, (B, T)."""
        assert self.divergence is not None, "rehearsal without a divergence"
        values = losses.rehearsal_loss(logprobs, batch.logprobs, batch.mask, self.divergence)
        outside = self.divergence.saturated(logprobs - batch.logprobs)
        meter.add_tokens(batch.mask, divergence=values, saturated_fraction=outside)
        return values

    def _optimize(self, meter: "_Meter") -> None:
        """Clip, warm up, step; a gradient that is not finite leaves weights and moments as they are."""
        optim, state = self.config.optim, self.state
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.grad_clip or float("inf"))
        finite = bool(torch.isfinite(norm))
        meter.add("skipped_updates", float(not finite), 0)
        if finite:
            meter.add("grad_norm", float(norm), 1)
            warm = min(1.0, (state["updates"] + 1) / optim.warmup_steps) if optim.warmup_steps else 1.0
            for group in self.optimizer.param_groups:
                group["lr"] = optim.lr * warm
            meter.add("lr", optim.lr * warm, 1)
            self.optimizer.step()
            state["updates"] += 1
            state["skipped_in_a_row"] = 0
        else:
            state["skipped"] += 1
            state["skipped_in_a_row"] += 1
        self.optimizer.zero_grad(set_to_none=True)
        if state["skipped_in_a_row"] >= SKIPS:
            raise UserError(f"{SKIPS} updates in a row had no finite gradient; lower optim.lr or loss.eta")

    def _draw_prompts(self) -> list[Question]:
        count = min(self.config.train.prompts_per_step, len(self.explore))
        order = shuffled(len(self.explore), (self.config.run.seed, PROMPTS), self.state["step"] * count, count)
        return [self.explore[i] for i in order]

    def _draw_rehearsal(self) -> list[Rollout]:
        count = self.config.train.rehearsal_rows if self.rehearsal else 0
        position = self.state.get("rehearsed", 0)
        self.state["rehearsed"] = position + count
        order = shuffled(len(self.rehearsal), (self.config.run.seed, REHEARSAL), position, count)
        return [self.rehearsal[i] for i in order]

    def _rates(self, rollouts: list[Rollout], meter: "_Meter") -> dict[str, float]:
        sampled = sum(len(r.tokens) for r in rollouts)
        spent = meter.totals
        return {
            "sampled_tokens_per_second": sampled / max(float(spent["seconds/sample_and_grade"]), 1e-9),
            "trained_tokens_per_second": float(spent["trained_tokens"]) / max(float(spent["seconds/train"]), 1e-9),
        }

    def _evaluate(self, step: int) -> dict[str, Any]:
        """A small evaluation; eight answers of each set go to samples.jsonl."""
        found, small = {}, self.config.eval
        for data in self.sets:
            part = PromptSet(data.task, data.questions[: small.during_prompts])
            result, answers = evaluate(self.policy, part, self.config, small.during_samples, False, bar=False)
            found[data.task.name] = summarise(result, small.k)
            prompts = {q.prompt.index: q.prompt for q in part.questions}
            rows = [
                _shown(step, data.task.name, prompts[a.rollout.prompt], a) for a in answers[:: -(-len(answers) // 8)]
            ]
            append_rows(self.config.run_folder / "samples.jsonl", rows)
        return found


def shuffled(size: int, key: tuple[int, ...], start: int, count: int) -> list[int]:
    """Positions start ... start + count - 1 of an endless row of shuffles of range(size), keyed by `key`."""
    picked: list[int] = []
    while len(picked) < count:
        epoch, place = divmod(start + len(picked), size)
        order = np.random.Generator(np.random.Philox(np.random.SeedSequence((*key, epoch)))).permutation(size)
        picked += order[place : place + count - len(picked)].tolist()
    return picked


class _Meter:
    """Sums and counts of a step's metrics; tensors stay on their device until `means`."""

    def __init__(self) -> None:
        self.totals: dict[str, Any] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)

    def add_tokens(self, mask: Tensor, **values: Tensor) -> None:
        """Adds per-token values (B, T) to means over the tokens of mask (B, T)."""
        for name, value in values.items():
            self.add(name, torch.where(mask, value.detach(), 0).sum(), int(mask.sum()))

    def add(self, name: str, total: Tensor | float, count: float) -> None:
        """Adds to a mean; a count of 0 makes it a plain sum."""
        self.totals[name] = self.totals[name] + total
        self.counts[name] += count

    @contextmanager
    def seconds(self, phase: str) -> Iterator[None]:
        """Times a phase, the GPU's work included."""
        begin = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.add(f"seconds/{phase}", time.perf_counter() - begin, 0)

    def means(self) -> dict[str, float]:
        return {name: float(total) / (self.counts[name] or 1) for name, total in self.totals.items()}


def _rollout_metrics(answers: Sequence[Answer], advantages: Tensor, groups: Tensor) -> dict[str, float]:
    if not answers:
        return {"reward": float("nan")}
    count = len(answers)
    flat = torch.stack([(advantages[groups == g] == 0).all() for g in torch.unique(groups)])
    return {
        "reward": sum(a.rollout.reward for a in answers) / count,
        "pass_rate": sum(a.reward.outcome == "right" for a in answers) / count,
        "grader_error_fraction": sum(a.reward.outcome == "grader_error" for a in answers) / count,
        "length": sum(len(a.rollout.tokens) for a in answers) / count,
        "truncated_fraction": sum(not a.rollout.finished for a in answers) / count,
        "zero_variance_fraction": float(flat.float().mean()),
    }


def _shown(step: int, source: str, prompt: Prompt, got: Answer) -> dict[str, Any]:
    judged = {"reward": got.reward.value, "outcome": got.reward.outcome}
    return {"step": step, "source": source, "prompt": prompt.messages[-1]["content"], "response": got.text, **judged}


def _cut_log(path: Path, step: int) -> None:
    """Drops rows of steps that the checkpoint does not hold, so that each step stands there once."""
    if path.exists():
        lines = [line for line in path.read_text(encoding="utf-8").split("\n")[:-1] if json.loads(line)["step"] <= step]
        write_text(path, "".join(line + "\n" for line in lines))


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("run.tensorboard = true needs the package tensorboard: pip install tensorboard") from None
    return SummaryWriter(str(folder / "tensorboard"))


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects the first SIGINT or SIGTERM, for the loop to save at the end of its step; the second stops at once."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        tqdm.write("stopping after this step; once more stops at once")

    old = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
