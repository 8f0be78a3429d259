"""From prompts to judged answers: tokenize, sample, decode, grade. Shared by pre-sampling, training and evaluation."""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dph.config import Config
from dph.errors import UserError
from dph.model import Decoder
from dph.rollouts import Rollout
from dph.sampler import Request, Settings, sample_stream
from dph.tasks import Prompt, Reward, Task
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
class Question:
    """A prompt as the model reads it."""

    prompt: Prompt
    tokens: list[int]


@dataclass(frozen=True)
class PromptSet:
    """A task with its prompts tokenized; `task.name` is the source as the config names it."""

    task: Task
    questions: list[Question]

    def fingerprint(self, weights: str, config: Config, settings: Mapping[str, Any]) -> dict[str, str]:
        """What answers of `weights` (a hash) depend on: model, prompts (tokenized, with gold answers), settings."""
        prompts = json.dumps([(q.prompt.index, q.tokens, repr(q.prompt.gold)) for q in self.questions])
        found = {**asdict(config.sampling), **settings, "seed": config.run.seed, "dtype": config.run.dtype}
        found.pop("max_rows")  # how many at once changes nothing that is said
        found["judge"] = [config.data.strict, config.data.sql_match, config.data.grader_timeout]
        hashed = hashlib.sha256(prompts.encode()).hexdigest()
        return {"model": weights, "prompts": hashed, "settings": json.dumps(found, sort_keys=True)}

    def shown(self, got: "Answer") -> dict[str, Any]:
        """A row of samples.jsonl; with what the task records it can be graded again."""
        prompt = next(q.prompt for q in self.questions if q.prompt.index == got.rollout.prompt)
        judged = {"response": got.text, "reward": got.reward.value, "outcome": got.reward.outcome}
        asked = {"source": self.task.name, "prompt": prompt.messages[-1]["content"]}
        return {**asked, **self.task.record(prompt), **judged}


@dataclass(frozen=True)
class Answer:
    """One judged answer; its rollout carries the reward's value too."""

    rollout: Rollout
    text: str
    reward: Reward


def tokenize(task: Task, tokenizer: Tokenizer, config: Config) -> PromptSet:
    """The task's prompts through the chat template; those over data.max_prompt_tokens are left out, and counted aloud.

    Raises: UserError when nothing is left.
    """
    longest = config.data.max_prompt_tokens
    questions = [Question(prompt, tokenizer.chat(prompt.messages)) for prompt in task.prompts()]
    kept = [question for question in questions if len(question.tokens) <= longest]
    if len(kept) < len(questions):
        print(f"{task.name}: left out {len(questions) - len(kept)} of {len(questions)} prompts over {longest} tokens")
    if not kept:
        raise UserError(f"{task.name}: no prompt of at most data.max_prompt_tokens = {longest} tokens")
    return PromptSet(task, kept)


def sampling_settings(
    config: Config, tokenizer: Tokenizer, purpose: int, step: int = 0, top_p: float = 1.0
) -> Settings:
    """The sampler's settings of a config for one purpose and step."""
    wanted, stream = config.sampling, (config.run.seed, purpose, step)
    return Settings(stream, tokenizer.end_ids, wanted.max_new_tokens, wanted.temperature, top_p, wanted.max_rows)


def answer(policy: Policy, data: PromptSet, samples: Sequence[Sequence[int]], settings: Settings) -> Iterator[Answer]:
    """Judged answers in the order in which they end; `samples` holds for each question the numbers of its answers."""
    requests = [Request(q.prompt.index, q.tokens, s) for q, s in zip(data.questions, samples, strict=True)]
    prompts = {question.prompt.index: question.prompt for question in data.questions}
    stream = sample_stream(policy.model, requests, settings)
    while written := [(r, policy.tokenizer.decode(r.tokens)) for r in islice(stream, GRADED_TOGETHER)]:
        rewards = data.task.rewards([(prompts[rollout.prompt], text) for rollout, text in written])
        for (rollout, text), reward in zip(written, rewards, strict=True):
            rollout.reward = reward.value
            yield Answer(rollout, text, reward)


class Actor:
    """Who samples: the policy itself in fp32, or a bf16 copy of it that `refresh` brings up to date."""

    def __init__(self, policy: Policy, dtype: str) -> None:
        self.source = self.policy = policy
        if dtype == "bf16":
            copied = copy.deepcopy(policy.model).to(torch.bfloat16).requires_grad_(False)
            self.policy = replace(policy, model=copied)
            if policy.model.compiled:  # a copy is not
                copied.compile_layers()

    @torch.no_grad()
    def refresh(self) -> Policy:
        """Copies the source's weights and returns the policy that samples."""
        if self.policy is not self.source:
            for copied, weight in zip(self.policy.model.parameters(), self.source.model.parameters(), strict=True):
                copied.copy_(weight)
        return self.policy


def autocast(model: Decoder, dtype: str) -> torch.autocast:
    """The context in which a model is scored and trained: bf16 autocast, or nothing for fp32."""
    return torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=dtype == "bf16")
