"""The training loop. One step reads as the method: sample -> reward -> advantage -> loss -> update.

Exploration rows (rollouts of D_exp, E4) and rehearsal rows (stored answers of D_pef, E5) are two batches with two loss
calls, each with its own denominator, added in one optimizer step (E6). No reference model is in memory unless the
divergence is taken on own samples (E2, E8).

Exact savings: a row whose advantage is zero has no gradient in E4, so it is neither scored nor trained on unless a
penalty or an entropy bonus needs it (its tokens still count in the denominator); where the sampler's log-probabilities
agree with the scorer's, pi_old is not scored again. Metrics of trained tokens are over the rows that are trained on.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dph import distributed, losses
from dph.answering import Policy, autocast
from dph.checkpoint import append_rows, load_checkpoint, newest_checkpoint, save_checkpoint
from dph.collector import REHEARSAL, Collector, State, shuffled
from dph.config import Config
from dph.divergences import make_divergence
from dph.errors import UserError
from dph.evaluation import evaluate, summarise
from dph.metrics import Meter, RunLog
from dph.model import Decoder
from dph.presampling import Partition
from dph.rollouts import Batch, Rollout, Scores, collate, microbatches, token_logprobs
from dph.tasks.prompts import PromptSet

SKIPS = 5  # so many updates in a row without a finite gradient end the run
Rows = list[Rollout]
RowLoss = Callable[[list[int], Batch, Scores], Tensor]  # (rows' indices, batch, scores) -> per-token values (B, T)
Parts = list[Callable[[], Tensor]]  # a loss, micro-batch by micro-batch, each computed when it is called


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
        self.config, self.policy, self.model, self.sets = config, policy, policy.model, sets
        self.device = next(policy.model.parameters()).device
        explore = None if partition is None or config.train.explore == "all" else set(partition.exp)
        questions = [q for q in data.questions if explore is None or q.prompt.index in explore]
        self.collector = Collector(config, policy, data, questions, reference)
        self.rehearsal = partition.rehearsal if partition is not None and config.loss.eta > 0 else []
        loss, optim = config.loss, config.optim
        settings = {"alpha": loss.alpha, "skew": loss.skew, "divergence_form": loss.divergence_form}
        self.divergence = None if loss.divergence == "none" else make_divergence(loss.divergence, **settings)
        self.penalised = self.divergence is not None and loss.samples == "own"
        betas = (optim.betas[0], optim.betas[1])
        self.shares = distributed.deal(self.model.parameters(), torch.numel)  # by the rank that updates them
        own = self.shares[distributed.rank()]
        self.optimizer = torch.optim.AdamW(own, optim.lr, betas, weight_decay=optim.weight_decay, fused=True)
        self.state: State = dict.fromkeys(("step", "updates", "drawn", "rehearsed", "skipped", "skipped_in_a_row"), 0)
        self.state |= {"best": -1.0, "best_step": 0}  # pass@1 of the first evaluation set

    def run(self) -> None:
        """All steps, with metrics, evaluations, checkpoints and a bar; stops cleanly at Ctrl-C or SIGTERM."""
        folder, train, tokenizer = self.config.run_folder, self.config.train, self.policy.tokenizer
        if saved := newest_checkpoint(folder):
            self.state = load_checkpoint(saved, self.model, self.optimizer)
        log = RunLog(folder, self.state["step"], self.config.run.tensorboard)
        bar = tqdm(total=train.steps, initial=min(self.state["step"], train.steps), desc="training", unit="step")
        with bar, _stop_signals() as stopped:
            while self.state["step"] < train.steps:
                metrics = self.train_step()
                step = self.state["step"]
                if train.eval_every and step % train.eval_every == 0:
                    metrics["eval"] = self._evaluate(step)
                log.write(step, metrics)
                bar.set_postfix_str(f"reward {metrics['reward']:.3f}")
                bar.update()
                due = step == train.steps or (train.save_every and step % train.save_every == 0)
                stop = any(distributed.gather([bool(stopped)]))
                if stop or due or (train.keep_best and step == self.state["best_step"]):
                    save_checkpoint(folder, self.model, tokenizer, self.optimizer, self.state, train)
                if stop:
                    raise KeyboardInterrupt

    def train_step(self) -> dict[str, Any]:
        """One rollout step and its optimizer steps; returns its metrics."""
        train, meter = self.config.train, Meter()
        rounds = train.updates_per_step * train.passes
        rehearsal = self._draw_rehearsal(train.rehearsal_rows * rounds)
        experience = self.collector.collect(self.state, rehearsal, meter)
        with meter.seconds("train"):
            for update in range(rounds):
                part = slice(update % train.updates_per_step, None, train.updates_per_step)
                rows, own = experience.rollouts[part], experience.own[update::rounds]
                self._update(rows, experience.advantages[part], rehearsal[update::rounds], own, meter)
        self.state["step"] += 1
        return meter.means()

    def _update(self, rollouts: Rows, advantages: Tensor, rehearsal: Rows, own: Rows, meter: Meter) -> None:
        """One optimizer step; where the GPU's memory is full, once more in micro-batches of half the tokens."""
        whole, advantages = self.config.train.microbatch_tokens, advantages.to(self.device)
        for self.budget in (whole, whole // 2):
            self.loss = torch.zeros((), device=self.device)
            parts, trained = self._objective(rollouts, advantages, rehearsal, own, meter)
            full = trained > 0 and not self._backward(parts)
            if not any(distributed.gather([full])):
                break
            self.model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        else:
            raise UserError(f"out of memory in micro-batches of {self.budget} tokens; lower train.microbatch_tokens")
        meter.add("trained_tokens", trained)
        if trained and not self._optimize(meter):
            batches = {"exploration": rollouts, "rehearsal": rehearsal, "own": own}
            ids = {name: [[r.prompt, r.sample] for r in batch] for name, batch in batches.items()}
            append_rows(self.config.run_folder / "skipped.jsonl", [{"step": self.state["step"] + 1, **ids}])
            if self.state["skipped_in_a_row"] >= SKIPS:
                raise UserError(f"{SKIPS} updates in a row had no finite gradient; lower optim.lr or loss.eta")

    def _objective(
        self, rollouts: Rows, advantages: Tensor, rehearsal: Rows, own: Rows, meter: Meter
    ) -> tuple[Parts, int]:
        """L_exp + eta L_pef (E6), with E8's second half of L_pef on own samples; and how many tokens it trains."""
        loss, every = self.config.loss, self.penalised or self.config.loss.entropy > 0
        rows = [i for i, advantage in enumerate(advantages.tolist()) if every or advantage != 0]  # one wait for the GPU
        parts = self._parts(rollouts, rows, lambda i, b, s: self._exploration(advantages[i], b, s, meter))
        stored, answered, per_sequence = range(len(rehearsal)), range(len(own)), loss.level == "sequence"
        parts += self._parts(rehearsal, stored, lambda _, b, s: self._rehearsal(b, s, meter), per_sequence)
        parts += self._parts(own, answered, lambda _, b, s: self._own_half(b, s))
        return parts, sum(len(r) for r in (*(rollouts[i] for i in rows), *rehearsal, *own))

    def _parts(self, rollouts: Rows, rows: Sequence[int], loss: RowLoss, per_sequence: bool = False) -> Parts:
        """The loss of `rows`, those micro-batches of it that are this rank's; the denominator counts all rollouts."""
        aggregation, length = self.config.loss.aggregation, self.config.loss.aggregation_length
        if per_sequence:  # values sum to one number a row: average those
            aggregation, length = "sequence-sum", 1
        lengths = torch.tensor([len(r.tokens) for r in rollouts])
        total = losses.denominator(lengths, aggregation, length or self.config.sampling.max_new_tokens)
        temperature = self.config.sampling.temperature

        def part(index: list[int]) -> Tensor:
            batch = collate([rollouts[i] for i in index], self.device)
            with autocast(self.model, self.config.run.dtype):
                scores = token_logprobs(self.model, batch, temperature, self.config.loss.entropy > 0)
            return losses.aggregate(loss(index, batch, scores), batch.mask, aggregation, total)

        groups = microbatches([rollouts[i] for i in rows], self.budget)
        return [partial(part, [rows[i] for i in group]) for group in groups]

    def _backward(self, parts: Parts) -> bool:
        """The gradient of all parts of all ranks; False where the GPU's memory is full."""
        with distributed.sum_gradients(list(self.model.parameters()), len(parts)):
            try:
                for part in parts:
                    value = part()
                    torch.autograd.backward(value)
                    self.loss = self.loss + value.detach()
            except torch.OutOfMemoryError:  # a part of the gradient may be there; means count that part twice
                return False
        return True

    def _exploration(self, advantages: Tensor, batch: Batch, scores: Scores, meter: Meter) -> Tensor:
        """Per-token values of E4, with the penalty of E2 and the entropy bonus where there are any, (B, T)."""
        loss, mask, logprobs = self.config.loss, batch.mask, scores.logprobs
        old, ref = batch.logprobs, batch.ref_logprobs
        values = losses.clipped_loss(logprobs, old, advantages, mask, loss.clip_low, loss.clip_high, loss.dual_clip)
        low, high = losses.clipped_fractions(logprobs, old, advantages, mask, loss.clip_low, loss.clip_high)
        meter.add_tokens(mask, loss_exp=values, clip_low_fraction=low, clip_high_fraction=high, entropy=scores.entropy)
        if self.penalised and self.divergence is not None:
            meter.add_tokens(mask, divergence=losses.own_sample_divergence(logprobs, ref, mask, self.divergence))
            penalty = losses.penalty_loss(logprobs, old, ref, mask, self.divergence, loss.penalty_estimator)
            values = values + loss.eta * penalty
        return values - loss.entropy * scores.entropy if loss.entropy else values

    def _rehearsal(self, batch: Batch, scores: Scores, meter: Meter) -> Tensor:
        """Per-token values of eta L_pef on stored answers, (B, T): E5, E10 with stored distributions, half of E8."""
        assert self.divergence is not None, "rehearsal without a divergence"
        logprobs, ref, mask = scores.logprobs, batch.logprobs, batch.mask
        if scores.top is not None and batch.top_logprobs is not None:
            values = losses.stored_distribution_loss(scores.top, batch.top_logprobs, mask, self.divergence)
        elif self.config.loss.samples == "both":
            values = losses.js_reference_half(logprobs, ref, mask)
        else:
            values = losses.rehearsal_loss(logprobs, ref, mask, self.divergence, self.config.loss.level)
        meter.add_tokens(mask, divergence=values, saturated_fraction=self.divergence.saturated(logprobs - ref))
        return self.config.loss.eta * values

    def _own_half(self, batch: Batch, scores: Scores) -> Tensor:
        """Per-token values of eta times E8's other half, on own samples, (B, T)."""
        return self.config.loss.eta * losses.js_own_half(scores.logprobs, batch.ref_logprobs, batch.mask)

    def _optimize(self, meter: Meter) -> bool:
        """Clip, warm up, step; a loss or gradient that is not finite leaves weights and moments as they are: False."""
        optim, state = self.config.optim, self.state
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.grad_clip or float("inf")))
        finite = all(distributed.gather([norm < float("inf") and bool(self.loss.isfinite())]))  # False for NaN, too
        meter.add("skipped_updates", float(not finite))
        if finite:
            rate = optim.lr * min(1.0, (state["updates"] + 1) / max(1, optim.warmup_steps))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            distributed.publish(self.shares)
            meter.add("grad_norm", norm, 1)
            meter.add("lr", rate, 1)
            state["updates"] += 1
        self.model.zero_grad(set_to_none=True)
        state["skipped"] += not finite
        state["skipped_in_a_row"] = 0 if finite else state["skipped_in_a_row"] + 1
        return finite

    def _draw_rehearsal(self, count: int) -> list[Rollout]:
        """The next `count` stored answers, in an order keyed like that of the prompts."""
        count = count if self.rehearsal else 0
        order = shuffled(len(self.rehearsal), (self.config.run.seed, REHEARSAL), self.state["rehearsed"], count)
        self.state["rehearsed"] += count
        return [self.rehearsal[i] for i in order]

    def _evaluate(self, step: int) -> dict[str, Any]:
        """A small evaluation; eight answers of each set go to samples.jsonl."""
        found, small = {}, self.config.eval
        for data in self.sets:
            part = PromptSet(data.task, data.questions[: small.during_prompts])
            result, answers = evaluate(self.policy, part, self.config, small.during_samples, False, bar=False)
            found[data.task.name] = summarise(result, small.k)
            few = answers[:: -(-len(answers) // 8)]
            rows = [{"step": step, **part.shown(a.rollout.prompt, a.text, a.reward)} for a in few]
            append_rows(self.config.run_folder / "samples.jsonl", rows)
        if found and (score := found[self.sets[0].task.name]["pass@1"][0]) > self.state["best"]:
            self.state |= {"best": score, "best_step": step}
        return found


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
