"""From prompts to judged answers: tokenize, sample, decode, grade. Shared by pre-sampling, training and evaluation."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dph.errors import UserError
from dph.model import Decoder
from dph.rollouts import Rollout
from dph.sampler import Request, Settings, sample_stream
from dph.tasks import Prompt, Reward, Task
from dph.tokenizer import Tokenizer

GRADED_TOGETHER = 64

# Random streams never meet: each purpose has its number (the second entry of Settings.stream).
PRESAMPLE, TRAIN, EVALUATE = 1, 2, 3


@dataclass(frozen=True)
class Question:
    """A prompt as the model reads it."""

    prompt: Prompt
    tokens: list[int]


@dataclass(frozen=True)
class Answer:
    """One judged answer; its rollout carries the reward's value too."""

    rollout: Rollout
    text: str
    reward: Reward


def tokenize(task: Task, tokenizer: Tokenizer, longest: int) -> list[Question]:
    """The task's prompts through the chat template; those over `longest` tokens are left out, with a word on how many.

    Raises: UserError when nothing is left.
    """
    questions = [Question(prompt, tokenizer.chat(prompt.messages)) for prompt in task.prompts()]
    kept = [question for question in questions if len(question.tokens) <= longest]
    if len(kept) < len(questions):
        print(f"{task.name}: left out {len(questions) - len(kept)} of {len(questions)} prompts over {longest} tokens")
    if not kept:
        raise UserError(f"{task.name}: no prompt of at most data.max_prompt_tokens = {longest} tokens")
    return kept


def answer(
    model: Decoder,
    tokenizer: Tokenizer,
    task: Task,
    questions: Sequence[Question],
    samples: Sequence[Sequence[int]],
    settings: Settings,
) -> Iterator[Answer]:
    """Judged answers in the order in which they end.

    Args:
        samples: for each question the numbers of the answers to draw.
    """
    requests = [Request(q.prompt.index, q.tokens, s) for q, s in zip(questions, samples, strict=True) if len(s)]
    prompts = {question.prompt.index: question.prompt for question in questions}
    waiting: list[tuple[Rollout, str]] = []
    for rollout in sample_stream(model, requests, settings):
        waiting.append((rollout, tokenizer.decode(rollout.tokens)))
        if len(waiting) == GRADED_TOGETHER:
            yield from _grade(task, prompts, waiting)
            waiting = []
    yield from _grade(task, prompts, waiting)


def _grade(task: Task, prompts: dict[int, Prompt], written: list[tuple[Rollout, str]]) -> Iterator[Answer]:
    rewards = task.rewards([(prompts[rollout.prompt], text) for rollout, text in written]) if written else []
    for (rollout, text), reward in zip(written, rewards, strict=True):
        rollout.reward = reward.value
        yield Answer(rollout, text, reward)


class Actor:
    """The weights that sample: the model itself in fp32, or a bf16 copy of it that `refresh` brings up to date."""

    def __init__(self, model: Decoder, dtype: str) -> None:
        self.source = model
        self.model = copy.deepcopy(model).to(torch.bfloat16).requires_grad_(False) if dtype == "bf16" else model

    @torch.no_grad()
    def refresh(self) -> Decoder:
        """Copies the source's weights and returns the model to sample from."""
        if self.model is not self.source:
            for copied, weight in zip(self.model.parameters(), self.source.parameters(), strict=True):
                copied.copy_(weight)
        return self.model


def autocast(model: Decoder, dtype: str) -> torch.autocast:
    """The context in which a model is scored and trained: bf16 autocast, or nothing for fp32."""
    return torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=dtype == "bf16")
