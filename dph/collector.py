"""The first half of a step: draw prompts, sample answers, reward them; log-probabilities of pi_old and pi_ref.

dapo's dynamic sampling (E9) replaces groups that are all right or all wrong by groups of further prompts, for a bounded
number of rounds. A run's recorded rollouts can be taken in place of new ones: then two losses see the same data.

The order of prompts is a function of (seed, position) alone, so resuming needs one counter, `state.drawn`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dph.adapter import as_reference
from dph.answering import TRAIN, Answer, Policy, acting, answer, autocast, sampling_settings, score_rollouts
from dph.checkpoint import State, write_tensors
from dph.config import Config
from dph.errors import UserError
from dph.metrics import Meter
from dph.model import Decoder
from dph.prompts import PromptSet
from dph.rollouts import Rollout, pack, unpack
from dph.tasks.base import Prompt

PROMPTS, REHEARSAL = 1, 2  # numbers of the two random orders
SAMPLER_GAP = 1e-4  # largest difference in log-probability at which the sampler's own replace a second scoring


@dataclass(frozen=True)
class Experience:
    """What one step has sampled."""

    rollouts: list[Rollout]  # answers to the explored prompts: groups of G, one after another
    pef_rollouts: list[Rollout]  # new answers to prompts of D_pef, which E8 alone asks for


class Collector:
    """Samples for the trainer: groups of answers, with the dynamic sampling of E9 where it is asked for."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        data: PromptSet,
        explored: Sequence[Prompt],
        reference: Decoder | None = None,
        recorded: Path | None = None,
    ) -> None:
        """`explored`: those prompts of `data` to explore; `recorded`: a run's folder to take rollouts from."""
        self.config, self.policy, self.task = config, policy, data.task
        self.explored = list(explored)
        self.reference, self.recorded = reference, recorded
        self.prompts = {prompt.index: prompt for prompt in data.prompts}
        self.actor: Policy | None = None  # who samples: see `acting`

    def collect(self, state: State, stored: Sequence[Rollout], meter: Meter) -> Experience:
        """One step's experience, rewarded and scored; counts `state.drawn` on by the prompts it drew.

        Args:
            stored: the stored answers that this step rehearses; E8 answers their prompts anew.
        """
        file = Path("rollouts") / f"step-{state.step + 1}.safetensors"
        if self.recorded is not None:
            experience = self._read_recorded(self.recorded / file, stored)
            _add_entropy(experience.rollouts, meter)
            self._score_reference(experience)
        else:
            with meter.seconds("sample_and_grade"):
                try:
                    experience = self._sample(state, stored, meter)
                except UserError as error:
                    raise UserError(f"step {state.step + 1}: {error}") from None
            if self.config.train.shard == "full":
                self.release()  # makes room for training
            with meter.seconds("score"):
                self._score_old([*experience.rollouts, *experience.pef_rollouts], state, meter)
                self._score_reference(experience)
        if self.config.train.record_rollouts:
            self._record(experience, self.config.run_folder / file)
        return experience

    def release(self) -> None:
        """Drops the copy that samples, where there is one; the next step makes another. A compiled one is kept."""
        if not self.config.model.compile:
            self.actor = None

    def _sample(self, state: State, stored: Sequence[Rollout], meter: Meter) -> Experience:
        """New answers to the next prompts and, for E8, one to the prompt of each stored answer."""
        asked_before = Counter[int]()  # answers so far to each prompt: one drawn twice gets different ones
        rollouts = self._explore(state, asked_before, meter)
        pef_rollouts: list[Rollout] = []
        if self.config.loss.answers_pef_prompts:
            prompts = [self.prompts[rollout.prompt] for rollout in stored]
            pef_rollouts = [a.rollout for a in self._answer(state.step, prompts, 1, asked_before, meter)]
        return Experience(rollouts, pef_rollouts)

    def _explore(self, state: State, asked_before: Counter[int], meter: Meter) -> list[Rollout]:
        """Groups of answers to the next prompts; with dynamic sampling none that is all right or all wrong."""
        train = self.config.train
        wanted, size = min(train.prompts_per_step, len(self.explored)), train.responses_per_prompt
        groups: list[list[Rollout]] = []
        rounds = 0
        while len(groups) < wanted and rounds <= train.dynamic_sampling:
            count = wanted - len(groups)
            order = shuffled(len(self.explored), (self.config.run.seed, PROMPTS), state.drawn, count)
            state.drawn += count
            rounds += 1
            prompts = [self.explored[position] for position in order]
            answers = self._answer(state.step, prompts, size, asked_before, meter)
            meter.add("pass_rate", sum(a.reward.outcome == "right" for a in answers), len(answers))
            _add_entropy([a.rollout for a in answers], meter)
            for start in range(0, len(answers), size):
                group = answers[start : start + size]
                # The grader's verdicts decide, not the rewards: an overlong penalty makes wrong answers differ, too.
                if not train.dynamic_sampling or len({a.reward.value for a in group}) > 1:
                    groups.append([a.rollout for a in group])
        if train.dynamic_sampling:
            meter.add("sampling_rounds", rounds)
            meter.add("sampling_gave_up", float(len(groups) < wanted))
        return [rollout for group in groups for rollout in group]

    def _answer(
        self, step: int, prompts: Sequence[Prompt], size: int, asked_before: Counter[int], meter: Meter
    ) -> list[Answer]:
        """`size` judged answers to each prompt, prompt by prompt."""
        samples = []
        for prompt in prompts:
            first = asked_before[prompt.index]
            samples.append(range(first, first + size))
            asked_before[prompt.index] += size
        settings = sampling_settings(self.config, self.policy, TRAIN, step)
        self.actor = acting(self.policy, self.config.run.dtype, self.actor)
        found: dict[tuple[int, int], Answer] = {}
        for each in answer(self.actor, PromptSet(self.task, list(prompts)), samples, settings):
            found[each.rollout.prompt, each.rollout.sample] = each
            length = len(each.rollout.tokens)
            each.rollout.reward += overlong_penalty(length, settings.max_new_tokens, self.config.train.overlong_buffer)
            meter.add("sampled_tokens", length)
            meter.add("grader_error_fraction", float(each.reward.outcome == "grader_error"), 1)
        pairs = zip(prompts, samples, strict=True)
        return [found[prompt.index, number] for prompt, numbers in pairs for number in numbers]

    def _score_old(self, rollouts: Sequence[Rollout], state: State, meter: Meter) -> None:
        """log pi_old of every token: the sampler's own, where the run's first step has shown that they agree.

        On policy the loss finds log pi_old by itself (dph/objective.py), so the first step alone is scored.
        """
        compared = state.trust_sampler is not None
        if not rollouts or state.trust_sampler or (compared and self.config.train.on_policy):
            return
        with autocast(self.policy.model, self.config.run.dtype):
            scored = score_rollouts(self.policy.model, rollouts, *self._how_to_score())
        gap = 0.0
        for rollout, again in zip(rollouts, scored, strict=True):
            gap = max([gap, *(abs(a - b) for a, b in zip(rollout.logprobs, again.logprobs, strict=True))])
        meter.add("sampler_gap", gap, 1)
        if state.trust_sampler is None:
            state.trust_sampler = gap < SAMPLER_GAP
        if not state.trust_sampler:
            for rollout, again in zip(rollouts, scored, strict=True):
                rollout.logprobs = again.logprobs

    def _score_reference(self, experience: Experience) -> None:
        """log pi_ref of every token of the answers that a divergence is taken on: E2's penalty or E8's second half."""
        if self.reference is None:
            return
        rollouts = experience.pef_rollouts if self.config.loss.answers_pef_prompts else experience.rollouts
        with as_reference(self.reference) as pi_ref, autocast(pi_ref, self.config.run.dtype):
            scored = score_rollouts(pi_ref, rollouts, *self._how_to_score())
        for rollout, by_reference in zip(rollouts, scored, strict=True):
            rollout.ref_logprobs = by_reference.logprobs

    def _how_to_score(self) -> tuple[float, int]:
        return self.config.sampling.temperature, self.config.train.microbatch_tokens

    def _record(self, experience: Experience, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        tensors = {"group_size": torch.tensor(self.config.train.responses_per_prompt)}
        for name in ("rollouts", "pef_rollouts"):
            for key, tensor in pack(getattr(experience, name)).items():
                tensors[f"{name}.{key}"] = tensor
        write_tensors(path, tensors)

    def _read_recorded(self, path: Path, stored: Sequence[Rollout]) -> Experience:
        """A recorded step; its log-probabilities are pi_old's. UserError where it is missing or of another shape."""
        if not path.exists():
            raise UserError(f"{path}: no recorded rollouts; record them with --train.record_rollouts=true")
        found: dict[str, dict[str, Tensor]] = {"rollouts": {}, "pef_rollouts": {}}
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise UserError(f"{path}: not readable ({error}); record it again") from None
        recorded_size, size = int(tensors.pop("group_size")), self.config.train.responses_per_prompt
        if recorded_size != size:
            raise UserError(f"{path}: groups are of {recorded_size} answers, not train.responses_per_prompt = {size}")
        for name, tensor in tensors.items():
            kind, _, key = name.partition(".")
            found[kind][key] = tensor
        experience = Experience(unpack(found["rollouts"]), unpack(found["pef_rollouts"]))
        explored = {rollout.prompt for rollout in experience.rollouts}
        if explored - {prompt.index for prompt in self.explored}:
            raise UserError(f"{path}: explores prompts that are not in D_exp here; train.explore = 'all' takes them")
        if self.config.loss.answers_pef_prompts:
            answered = [rollout.prompt for rollout in experience.pef_rollouts]
            if answered != [rollout.prompt for rollout in stored]:
                raise UserError(f"{path}: holds no answers to the rehearsed prompts, which loss.samples = 'both' needs")
        return experience


def _add_entropy(rollouts: Sequence[Rollout], meter: Meter) -> None:
    """`entropy`, nats a token: the mean of -log pi of what was drawn. Over all rollouts, for every method alike."""
    tokens = sum(len(rollout.tokens) for rollout in rollouts)
    meter.add("entropy", -sum(sum(rollout.logprobs) for rollout in rollouts), tokens)


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft overlong penalty (E9; arXiv 2503.14476): 0 up to limit - buffer tokens, then down to -1 at limit."""
    return min(0.0, (limit - buffer - length) / buffer) if buffer else 0.0


def shuffled(size: int, key: tuple[int, ...], start: int, count: int) -> list[int]:
    """Positions start ... start + count - 1 of an endless row of shuffles of range(size), keyed by `key`."""
    picked: list[int] = []
    while len(picked) < count:
        epoch, place = divmod(start + len(picked), size)
        order = np.random.Generator(np.random.Philox(np.random.SeedSequence((*key, epoch)))).permutation(size)
        picked += order[place : place + count - len(picked)].tolist()
    return picked
