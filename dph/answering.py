"""From prompts to judged answers, and from answers to log-probabilities: the work that several processes divide.

`answer` samples, decodes and grades; `score_rollouts` gives log-probabilities under any model. Pre-sampling, training
and evaluation share both. Where torchrun has started several processes, each does its share of the prompts or rollouts
here and all of them get all results (dph/distributed.py); alone, one process does everything.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from dph import distributed
from dph.adapter import adapters, merged, merged_weights
from dph.config import Config
from dph.model import Decoder
from dph.packing import can_pack, pack, set_weights
from dph.prompts import PromptSet
from dph.rollouts import Rollout, TopTokens, collate, group_by_tokens
from dph.sampler import SamplingSettings, sample_stream
from dph.scoring import likeliest_tokens, token_logprobs
from dph.tasks import Reward
from dph.tasks.base import Prompt
from dph.tokenizer import Tokenizer

GRADED_TOGETHER = 64
PRESAMPLE, TRAIN, EVALUATE = 1, 2, 3  # each purpose has random streams of its own


@dataclass(frozen=True)
class Policy:
    """A model with its tokenizer and the folder that it came from."""

    model: Decoder
    tokenizer: Tokenizer
    folder: Path

    def weights_hash(self) -> str:
        """SHA-256 of the weights as they are now, in float32, adapters merged."""
        digest = hashlib.sha256()
        with distributed.whole_weights(self.model):
            for _, weight in merged_weights(self.model):
                copied = weight.detach().to("cpu", torch.float32, copy=True)  # NumPy must not share FSDP's memory
                digest.update(copied.contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Answer:
    """One judged answer; its rollout carries the reward's value too."""

    rollout: Rollout
    text: str
    reward: Reward


def sampling_settings(
    config: Config, policy: Policy, purpose: int, step: int = 0, top_p: float = 1.0
) -> SamplingSettings:
    """The sampler's settings of a config for one purpose and step."""
    return SamplingSettings(
        stream=(config.run.seed, purpose, step),
        end_ids=policy.tokenizer.end_ids,
        max_new_tokens=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        top_p=top_p,
        max_rows=config.sampling.max_rows,
        graphs=config.sampling.graphs,
    )


def answer(
    policy: Policy, data: PromptSet, samples: Sequence[Sequence[int]], settings: SamplingSettings
) -> Iterator[Answer]:
    """Judged answers in the order in which they end; `samples` holds for each prompt the numbers of its answers.

    Whoever wants another sampler (an inference server, say) writes another `answer`: this is all that is asked of it.
    """

    def cost(pair: tuple[Prompt, Sequence[int]]) -> float:
        prompt, numbers = pair
        return len(prompt.tokens) + len(numbers) * settings.max_new_tokens

    mine = distributed.deal_share(list(zip(data.prompts, samples, strict=True)), cost)
    rollouts = sample_stream(policy.model, [prompt for prompt, _ in mine], [numbers for _, numbers in mine], settings)
    yield from distributed.gather(_judged(policy, data, rollouts))


def _judged(policy: Policy, data: PromptSet, rollouts: Iterator[Rollout]) -> Iterator[Answer]:
    prompts = {prompt.index: prompt for prompt in data.prompts}
    while written := list(islice(rollouts, GRADED_TOGETHER)):
        texts = [policy.tokenizer.answer_text(rollout.tokens) for rollout in written]
        asked = [prompts[rollout.prompt] for rollout in written]
        rewards = data.task.rewards(list(zip(asked, texts, strict=True)))
        for rollout, text, reward in zip(written, texts, rewards, strict=True):
            rollout.reward = float(reward.value)
            yield Answer(rollout, text, reward)


@dataclass(frozen=True)
class Scored:
    """A rollout under some model: log-probabilities of its tokens, and the likeliest tokens if they are asked for."""

    logprobs: list[float]
    top: TopTokens | None = None


@torch.no_grad()
def score_rollouts(
    model: Decoder, rollouts: Sequence[Rollout], temperature: float, budget: int, top_k: int = 0
) -> list[Scored]:
    """Every rollout under `model`, in their order, in micro-batches of at most `budget` tokens."""
    device = next(model.parameters()).device

    def cost(group: list[int]) -> float:
        return sum(len(rollouts[index]) for index in group)

    scored: dict[int, Scored] = {}
    with distributed.whole_weights(model):
        for group in distributed.deal_share(group_by_tokens(rollouts, budget), cost):
            batch = collate([rollouts[index] for index in group], device)
            logprobs = token_logprobs(model, batch, temperature).logprobs.tolist()
            lengths = [len(rollouts[index].tokens) for index in group]
            tops: list[TopTokens | None] = [None] * len(group)
            if top_k:
                top = likeliest_tokens(model, batch, temperature, top_k)
                pieces = [torch.split(tensor.cpu(), lengths) for tensor in top]
                tops = [TopTokens(*parts) for parts in zip(*pieces, strict=True)]
            for row, index in enumerate(group):
                scored[index] = Scored(logprobs[row][: lengths[row]], tops[row])
    everyones = dict(distributed.gather(scored.items()))
    return [everyones[index] for index in range(len(rollouts))]


@torch.no_grad()
def acting(policy: Policy, dtype: str, actor: Policy | None = None) -> Policy:
    """Who samples: the policy itself, or a plain copy where it has adapters, is sharded or samples in another type.

    A CPU samples with a copy in any case, where its matrices can be packed: they are multiplied faster.

    Args:
        actor: an older copy, which is brought up to date in place of a new one.
    """
    model = policy.model
    held = torch.bfloat16 if dtype == "bf16" else torch.promote_types(model.head.dtype, torch.float32)
    can_sample = model.head.dtype == held and not adapters(model) and not distributed.is_sharded(model)
    packs = can_pack(model, held)
    if can_sample and not packs:
        return policy
    with distributed.whole_weights(model):
        if actor is None:
            actor = replace(policy, model=merged(model, held))
            if model.compiled:  # a copy is not
                actor.model.compile_layers()
            if packs:
                pack(actor.model)
        else:
            set_weights(actor.model, merged_weights(model))
    return actor


def autocast(model: Decoder, dtype: str) -> torch.autocast:
    """The context in which a model is scored and trained: bf16 autocast over wider weights, or nothing."""
    weight = model.head
    wider = weight.dtype != torch.bfloat16
    return torch.autocast(weight.device.type, torch.bfloat16, enabled=dtype == "bf16" and wider)
