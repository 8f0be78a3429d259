"""The training loop. One step reads as the method: sample -> reward -> advantage -> loss -> update.

`Trainer.train_step` is that step, and calls what has a file of its own: dph/collector.py draws prompts, samples and
rewards; dph/objective.py is the loss, L_exp + eta L_pef; dph/updates.py cuts it into micro-batches and takes the step.
No reference model is in memory unless the divergence is taken on own samples (E2, E8).

Exact savings: a rollout whose advantage is zero has no gradient in E4, so it is not trained on unless a penalty or an
entropy bonus needs it (its tokens still count in the denominator); where the sampler's log-probabilities agree with
the scorer's, or a step is one update, pi_old is not scored again. Metrics of trained tokens are over the rows that are
trained on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dph.answering import Policy
from dph.checkpoint import State, append_rows, load_checkpoint, newest_checkpoint, save_checkpoint
from dph.cli import StopSignals
from dph.collector import REHEARSAL, Collector, shuffled
from dph.config import Config
from dph.errors import UserError
from dph.evaluation import evaluate, load_base, summarise
from dph.losses import group_advantages
from dph.metrics import Meter, RunLog
from dph.model import Decoder
from dph.objective import Objective
from dph.presampling import Partition
from dph.prompts import PromptSet
from dph.rollouts import Rollout
from dph.updates import Optimizer, Update, gather_metrics, make_update

SKIPS = 5  # so many updates in a row without a finite gradient end the run


@dataclass(frozen=True)
class Data:
    """What a run trains and is evaluated on."""

    prompts: PromptSet  # all training prompts
    partition: Partition | None = None  # None explores all prompts, and rehearses nothing
    reference: Decoder | None = None  # pi_ref online, for a divergence on own samples
    eval_sets: Sequence[PromptSet] = ()
    recorded: Path | None = None  # a run's folder whose recorded rollouts are taken in place of new ones


class Trainer:
    """Trains one policy; `run` goes on from the newest checkpoint of the run's folder."""

    def __init__(self, config: Config, policy: Policy, data: Data) -> None:
        self.config, self.policy, self.eval_sets = config, policy, data.eval_sets
        self.device = policy.model.head.device
        explored = data.prompts.prompts
        self.stored: list[Rollout] = []  # answers to D_pef, to be rehearsed
        if data.partition is not None:
            d_exp = set(data.partition.exp)
            if config.train.explore == "exp":
                explored = [prompt for prompt in explored if prompt.index in d_exp]
            if config.loss.eta > 0:
                self.stored = data.partition.rehearsal
        self.collector = Collector(config, policy, data.prompts, explored, data.reference, data.recorded)
        self.objective = Objective(policy.model, config, config.train.on_policy and data.recorded is None)
        self.optimizer = Optimizer(policy.model, config)
        self.state = State()

    def run(self) -> None:
        """All steps, with metrics, evaluations, checkpoints and a bar; stops cleanly at Ctrl-C or SIGTERM."""
        folder, train = self.config.run_folder, self.config.train
        if saved := newest_checkpoint(folder):
            self.state = load_checkpoint(saved, self.policy.model, self.optimizer.adamw)
        log = RunLog(folder, self.state.step, self.config.run.tensorboard)
        bar = tqdm(total=train.steps, initial=min(self.state.step, train.steps), desc="training", unit="step")
        with bar, StopSignals() as signals:
            while self.state.step < train.steps:
                metrics = self.train_step()
                step = self.state.step
                if train.eval_every and step % train.eval_every == 0:
                    metrics |= self._evaluate(step)
                log.write(step, metrics)
                bar.set_postfix_str(f"reward {metrics['reward']:.3f}" if "reward" in metrics else "no rollouts")
                bar.update()
                due = step == train.steps or (train.save_every and step % train.save_every == 0)
                stop = signals.anywhere()
                if stop or due or (train.keep_best and step == self.state.best_step):
                    optimizer = self.optimizer.adamw
                    save_checkpoint(folder, self.policy.model, self.policy.tokenizer, optimizer, self.state, train)
                if stop:
                    raise KeyboardInterrupt

    def train_step(self) -> dict[str, Any]:
        """One step of the method and its optimizer steps; returns its metrics."""
        meter = Meter()
        stored = self._draw_stored()  # answers to D_pef
        experience = self.collector.collect(self.state, stored, meter)  # answers to D_exp, with rewards
        rewards = torch.tensor([rollout.reward for rollout in experience.rollouts])  # (rollouts,)
        groups = torch.arange(len(rewards)) // self.config.train.responses_per_prompt
        advantages = group_advantages(rewards, groups, self.config.loss.advantage_std)  # (rollouts,)
        meter.add_rollouts(experience.rollouts, advantages, self.config.train.responses_per_prompt)
        with meter.seconds("train"):
            for update in self._updates(experience.rollouts, advantages, stored, experience.pef_rollouts):
                for attempt in self.optimizer.attempts(update):  # a second one where memory ran out
                    total = torch.zeros((), device=self.device)
                    with attempt as micro_batches:
                        for micro in micro_batches:
                            loss = self.objective.loss(micro, meter)  # L_exp + eta L_pef
                            loss.backward()  # type: ignore[no-untyped-call]
                            total += loss.detach()
                self._take_step(update, total, meter)
        self.state.step += 1
        return gather_metrics(meter).means()

    def _draw_stored(self) -> list[Rollout]:
        """The next stored answers, for all updates of a step, in an order keyed like that of the prompts."""
        train = self.config.train
        count = train.rehearsal_rows * train.updates_per_step * train.passes if self.stored else 0
        order = shuffled(len(self.stored), (self.config.run.seed, REHEARSAL), self.state.rehearsed, count)
        self.state.rehearsed += count
        return [self.stored[position] for position in order]

    def _updates(
        self, rollouts: list[Rollout], advantages: Tensor, stored: list[Rollout], pef_rollouts: list[Rollout]
    ) -> Iterator[Update]:
        """A step's rows dealt out to its updates, groups as wholes.

        Each pass goes through all rollouts; stored answers, and new ones to their prompts, are used once.
        """
        train = self.config.train
        count = train.updates_per_step * train.passes
        groups = torch.arange(len(rollouts)) // train.responses_per_prompt
        for number in range(count):
            mine = (groups % train.updates_per_step == number % train.updates_per_step).nonzero()[:, 0]
            explored = [rollouts[row] for row in mine.tolist()]
            share = slice(number, None, count)
            update = make_update(self.config, explored, advantages[mine], stored[share], pef_rollouts[share])
            if update.tokens:  # else there is nothing to learn from: not even a step along the old moments
                yield update

    def _take_step(self, update: Update, loss: Tensor, meter: Meter) -> None:
        """The optimizer's step; where the gradient is not finite nothing moves, and a streak of that ends the run."""
        state = self.state
        taken = self.optimizer.step(loss, state.updates)
        meter.add("trained_tokens", update.tokens)
        meter.add("skipped_updates", float(taken is None))
        if taken is not None:
            for name, value in taken.items():
                meter.add(name, value, 1)
            state.updates += 1
            state.skipped_in_a_row = 0
            return
        state.skipped += 1
        state.skipped_in_a_row += 1
        kinds = {"rollouts": update.rollouts, "stored": update.stored, "pef_rollouts": update.pef_rollouts}
        row: dict[str, Any] = {"step": state.step + 1}
        for name, rollouts in kinds.items():
            row[name] = [[rollout.prompt, rollout.sample] for rollout in rollouts]
        append_rows(self.config.run_folder / "skipped.jsonl", [row])
        if state.skipped_in_a_row >= SKIPS:
            raise UserError(f"{SKIPS} updates in a row had no finite gradient; lower optim.lr or loss.eta")

    def _evaluate(self, step: int) -> dict[str, Any]:
        """A small evaluation: `eval` by set, `kl_to_base` on the first; eight answers of each go to samples.jsonl."""
        settings = self.config.eval
        summaries: dict[str, Any] = {}
        if not self.eval_sets:
            return {"eval": summaries}
        self.collector.release()  # an evaluation makes its own
        # pi_ref is in memory for this alone, unless the loss keeps it there, or it is the policy without its adapters.
        base = self.collector.reference or load_base(self.policy, self.policy.folder)
        for data in self.eval_sets:
            few = PromptSet(data.task, data.prompts[: settings.during_prompts])
            result, answers = evaluate(self.policy, few, self.config, settings.during_samples, False, base, bar=False)
            summaries[data.task.name] = summarise(result, settings.k)
            shown = answers[:: -(-len(answers) // 8)]
            rows = [{"step": step, **few.sample_row(a.rollout.prompt, a.text, a.reward)} for a in shown]
            append_rows(self.config.run_folder / "samples.jsonl", rows)
        first = summaries[self.eval_sets[0].task.name]
        if first["pass@1"][0] > self.state.best:
            self.state.best, self.state.best_step = first["pass@1"][0], step
        return {"eval": summaries, "kl_to_base": first["kl_to_base"]}
