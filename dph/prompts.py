"""A task's prompts as a model reads them: tokenized, those that are too long left out."""

from dataclasses import dataclass, replace
from typing import Any

from dph.config import Config
from dph.errors import UserError
from dph.tasks.base import Prompt, Reward, Task
from dph.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptSet:
    """A task with its prompts tokenized; `task.name` is the source as the config names it."""

    task: Task
    prompts: list[Prompt]

    def sample_row(self, index: int, text: str, reward: Reward) -> dict[str, Any]:
        """A row of samples.jsonl: an answer to prompt `index`; with what the task records it can be graded again."""
        prompt = next(prompt for prompt in self.prompts if prompt.index == index)
        asked = {"source": self.task.name, "prompt": prompt.messages[-1]["content"]}
        judged = {"response": text, "reward": reward.value, "outcome": reward.outcome}
        return {**asked, **self.task.record(prompt), **judged}


def tokenize(task: Task, tokenizer: Tokenizer, config: Config) -> PromptSet:
    """The task's prompts through the chat template; those over data.max_prompt_tokens are left out, and counted aloud.

    So are those that stay, but leave too little of the model's positions for the longest answer.

    Raises: UserError when nothing is left.
    """
    longest = config.data.max_prompt_tokens
    prompts = [replace(prompt, tokens=tokenizer.chat(prompt.messages)) for prompt in task.prompts()]
    kept = [prompt for prompt in prompts if len(prompt.tokens) <= longest]
    if len(kept) < len(prompts):
        print(f"{task.name}: left out {len(prompts) - len(kept)} of {len(prompts)} prompts over {longest} tokens")
    longest_answer, positions = config.sampling.max_new_tokens, tokenizer.model_max_length
    if positions is not None:
        beyond = sum(len(prompt.tokens) + longest_answer > positions for prompt in kept)
        if beyond:
            print(
                f"{task.name}: {beyond} of {len(kept)} prompts may get answers beyond the {positions} positions of the "
                f"model (max_position_embeddings), at sampling.max_new_tokens = {longest_answer}"
            )
    if not kept:
        raise UserError(f"{task.name}: no prompt of at most data.max_prompt_tokens = {longest} tokens")
    return PromptSet(task, kept)
