"""The first half of a step: draw prompts, sample, reward, advantage; what the losses need besides the policy.

dapo's dynamic sampling (E9) replaces groups whose rewards are all equal by groups of further prompts, for a bounded
number of rounds. Recorded rollouts can be played back instead of sampled: then two losses see the same data.

The order of prompts is a function of (seed, position) alone, so resuming needs one counter, `drawn`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dph.answering import TRAIN, Answer, Policy, acting, answer, autocast, sampling_settings
from dph.checkpoint import write_tensors
from dph.config import Config
from dph.errors import UserError
from dph.losses import group_advantages, overlong_penalty
from dph.metrics import Meter
from dph.model import Decoder
from dph.rollouts import Rollout, pack, score, unpack
from dph.tasks.prompts import PromptSet, Question

PROMPTS, REHEARSAL = 1, 2  # numbers of the two random orders
State = dict[str, Any]  # what a run's next step depends on beside weights and moments: counters, decisions, the best
SAMPLER_GAP = 1e-4  # largest difference in log-probability at which the sampler's own replace a second scoring


@dataclass(frozen=True)
class Experience:
    """The rollouts of one step: groups of G answers one after another, and own answers to rehearsal prompts (E8)."""

    rollouts: list[Rollout]
    advantages: Tensor  # one for each of `rollouts`
    own: list[Rollout]


class Collector:
    """Samples for the trainer."""

    def __init__(
        self, config: Config, policy: Policy, data: PromptSet, explore: list[Question], reference: Decoder | None
    ) -> None:
        self.config, self.policy, self.task = config, policy, data.task
        self.explore, self.reference = explore, reference
        self.questions = {question.prompt.index: question for question in data.questions}
        self.actor: Policy | None = None
        self.replay: Path | None = None  # a run's folder whose recorded rollouts are played back

    def collect(self, state: State, rehearsed: Sequence[Rollout], meter: Meter) -> Experience:
        """One step's experience; counts `state["drawn"]` on by the prompts it drew.

        Args:
            rehearsed: the stored answers that this step rehearses; E8 answers their prompts anew.
        """
        train, loss = self.config.train, self.config.loss
        name = f"rollouts/step-{state['step'] + 1}.safetensors"
        if self.replay is not None:
            rollouts, own = self._played_back(self.replay / name)
        else:
            seen = Counter[int]()  # answers so far to each prompt: one drawn twice gets different ones
            with meter.seconds("sample_and_grade"):
                rollouts = self._explore(state, seen, meter)
                asked = [self.questions[r.prompt] for r in rehearsed] if loss.samples == "both" else []
                own = [a.rollout for a in self._sample(state["step"], asked, 1, seen, meter)]
            with meter.seconds("score"):
                self._score(rollouts, own, state, meter)
        if train.record_rollouts:
            folder = self.config.run_folder / "rollouts"
            folder.mkdir(exist_ok=True)
            parts = {"rollouts": pack(rollouts), "own": pack(own)}
            flat = {f"{part}.{key}": x for part, tensors in parts.items() for key, x in tensors.items()}
            write_tensors(self.config.run_folder / name, flat)
        rewards = torch.tensor([r.reward for r in rollouts])
        groups = torch.arange(len(rollouts)) // train.responses_per_prompt
        advantages = group_advantages(rewards, groups, loss.advantage_std)
        flat_rows = int((advantages.view(-1, train.responses_per_prompt) == 0).all(dim=1).sum())
        meter.add("reward", rewards.sum(), len(rollouts))
        meter.add("length", sum(len(r.tokens) for r in rollouts), len(rollouts))
        meter.add("truncated_fraction", sum(not r.finished for r in rollouts), len(rollouts))
        meter.add("zero_variance_fraction", flat_rows, len(rollouts) / train.responses_per_prompt)
        return Experience(rollouts, advantages, own)

    def _explore(self, state: State, seen: Counter[int], meter: Meter) -> list[Rollout]:
        """Groups of answers to the next prompts; with dynamic sampling only those whose rewards differ."""
        train = self.config.train
        wanted, size, rounds = min(train.prompts_per_step, len(self.explore)), train.responses_per_prompt, 0
        groups: list[list[Rollout]] = []
        while len(groups) < wanted and rounds <= train.dynamic_sampling:
            count = wanted - len(groups)
            order = shuffled(len(self.explore), (self.config.run.seed, PROMPTS), state["drawn"], count)
            state["drawn"] += count
            rounds += 1
            answers = self._sample(state["step"], [self.explore[i] for i in order], size, seen, meter)
            new = [[a.rollout for a in answers[i : i + size]] for i in range(0, len(answers), size)]
            groups += [g for g in new if not train.dynamic_sampling or len({r.reward for r in g}) > 1]
        if train.dynamic_sampling:
            meter.add("sampling_rounds", rounds)
            meter.add("sampling_gave_up", float(len(groups) < wanted))
        return [rollout for group in groups for rollout in group]

    def _sample(
        self, step: int, questions: list[Question], size: int, seen: Counter[int], meter: Meter
    ) -> list[Answer]:
        """`size` judged answers to each question, question-major."""
        samples = []
        for question in questions:
            first = seen[question.prompt.index]
            samples.append(range(first, first + size))
            seen[question.prompt.index] += size
        settings = sampling_settings(self.config, self.policy, TRAIN, step)
        self.actor = acting(self.policy, self.config.run.dtype, self.actor)
        stream = answer(self.actor, PromptSet(self.task, questions), samples, settings)
        found = {(a.rollout.prompt, a.rollout.sample): a for a in stream}
        for a in found.values():
            buffer, limit = self.config.loss.overlong_buffer, self.config.sampling.max_new_tokens
            a.rollout.reward += overlong_penalty(len(a.rollout.tokens), limit, buffer)
            meter.add("sampled_tokens", len(a.rollout.tokens))
            meter.add("pass_rate", float(a.reward.outcome == "right"), 1)
            meter.add("grader_error_fraction", float(a.reward.outcome == "grader_error"), 1)
        return [found[q.prompt.index, n] for q, numbers in zip(questions, samples, strict=True) for n in numbers]

    def _score(self, rollouts: list[Rollout], own: list[Rollout], state: State, meter: Meter) -> None:
        """pi_old's log-probabilities, unless the sampler's own serve (the run's first step decides), and pi_ref's."""
        how = (self.config.sampling.temperature, self.config.train.microbatch_tokens)
        needs_ref = own if self.config.loss.samples == "both" else rollouts
        with autocast(self.policy.model, self.config.run.dtype):
            old = [] if state.get("trust_sampler") else score(self.policy.model, rollouts, *how)
            ref = score(self.reference, needs_ref, *how) if self.reference is not None else []
        if old:
            pairs = [zip(r.logprobs, s, strict=True) for r, (s, _) in zip(rollouts, old, strict=True)]
            gap = max(abs(a - b) for pair in pairs for a, b in pair)
            meter.add("sampler_gap", gap, 1)
            state.setdefault("trust_sampler", gap < SAMPLER_GAP)
        for rollout, (logprobs, _) in zip(rollouts, () if state.get("trust_sampler") else old, strict=False):
            rollout.logprobs = logprobs
        for rollout, (logprobs, _) in zip(needs_ref, ref, strict=False):
            rollout.ref_logprobs = logprobs

    def _played_back(self, path: Path) -> tuple[list[Rollout], list[Rollout]]:
        """A recorded step; UserError where it is missing."""
        if not path.exists():
            raise UserError(f"{path}: no recorded rollouts; record them with --train.record_rollouts=true")
        flat = load_file(path)
        parts = [{k.removeprefix(p): x for k, x in flat.items() if k.startswith(p)} for p in ("rollouts.", "own.")]
        rollouts, own = (unpack(part) for part in parts)
        if self.reference is not None:
            self._score(rollouts, own, {"trust_sampler": True}, Meter())  # what was recorded is pi_old's
        return rollouts, own


def shuffled(size: int, key: tuple[int, ...], start: int, count: int) -> list[int]:
    """Positions start ... start + count - 1 of an endless row of shuffles of range(size), keyed by `key`."""
    picked: list[int] = []
    while len(picked) < count:
        epoch, place = divmod(start + len(picked), size)
        order = np.random.Generator(np.random.Philox(np.random.SeedSequence((*key, epoch)))).permutation(size)
        picked += order[place : place + count - len(picked)].tolist()
    return picked
