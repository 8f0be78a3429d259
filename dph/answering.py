"""From prompts to judged answers: sample, decode, grade. Shared by pre-sampling, training and evaluation."""

import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from dph import distributed
from dph.config import Config
from dph.model import Decoder
from dph.rollouts import Rollout
from dph.sampler import Request, Settings, sample_stream
from dph.tasks import Reward
from dph.tasks.prompts import PromptSet
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
        """SHA-256 of the weights as they are now, in float32."""
        digest = hashlib.sha256()
        for weight in self.model.parameters():
            digest.update(weight.detach().float().cpu().contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Answer:
    """One judged answer; its rollout carries the reward's value too."""

    rollout: Rollout
    text: str
    reward: Reward


def sampling_settings(config: Config, policy: Policy, purpose: int, step: int = 0, top_p: float = 1.0) -> Settings:
    """The sampler's settings of a config for one purpose and step."""
    wanted, stream = config.sampling, (config.run.seed, purpose, step)
    return Settings(stream, policy.tokenizer.end_ids, wanted.max_new_tokens, wanted.temperature, top_p, wanted.max_rows)


def answer(policy: Policy, data: PromptSet, samples: Sequence[Sequence[int]], settings: Settings) -> Iterator[Answer]:
    """Judged answers in the order in which they end; `samples` holds for each question the numbers of its answers."""
    requests = [Request(q.prompt.index, q.tokens, s) for q, s in zip(data.questions, samples, strict=True)]
    own = distributed.deal(requests, lambda r: len(r.tokens) + len(r.samples) * settings.max_new_tokens)
    stream = sample_stream(policy.model, own[distributed.rank()], settings)
    yield from distributed.gather(_judged(policy, data, stream))


def _judged(policy: Policy, data: PromptSet, stream: Iterator[Rollout]) -> Iterator[Answer]:
    prompts = {question.prompt.index: question.prompt for question in data.questions}
    while written := [(r, policy.tokenizer.answer_text(r.tokens)) for r in islice(stream, GRADED_TOGETHER)]:
        rewards = data.task.rewards([(prompts[rollout.prompt], text) for rollout, text in written])
        for (rollout, text), reward in zip(written, rewards, strict=True):
            rollout.reward = reward.value
            yield Answer(rollout, text, reward)


@torch.no_grad()
def acting(policy: Policy, dtype: str, actor: Policy | None = None) -> Policy:
    """Who samples: the policy itself in fp32, or a bf16 copy of it: a new one, or `actor` brought up to date."""
    if dtype == "fp32":
        return policy
    if actor is None:
        actor = replace(policy, model=copy.deepcopy(policy.model).to(torch.bfloat16).requires_grad_(False))
        if policy.model.compiled:  # a copy is not
            actor.model.compile_layers()
        return actor
    for copied, weight in zip(actor.model.parameters(), policy.model.parameters(), strict=True):
        copied.copy_(weight)
    return actor


def autocast(model: Decoder, dtype: str) -> torch.autocast:
    """The context in which a model is scored and trained: bf16 autocast, or nothing for fp32."""
    return torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=dtype == "bf16")
