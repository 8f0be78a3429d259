"""A task of your own in one file: sums that must show their work, every step of it true.

A config names it: `data.train = "task:examples/worked_sums.py"`. How such a file is written: docs/own_task.md.
"""

import random
import re
from collections.abc import Sequence

from dph.config import DataConfig
from dph.errors import UserError
from dph.tasks import Prompt, Reward, Task, chat, known_options, whole_number


class WorkedSums(Task):
    """`count` sums of two numbers. A tenth of all sums is for `split=test`; training never asks them."""

    def __init__(self, options: dict[str, str], data: DataConfig, seed: int) -> None:
        known_options("worked_sums", options, ("split", "count"))
        split = options.get("split", "train")
        if split not in ("train", "test"):
            raise UserError(f"worked_sums: split = {split!r} should be train or test")
        count = whole_number("worked_sums", options, "count", default=200, low=1, high=240)
        pairs = [(a, b) for a in range(11, 60) for b in range(11, 60)]
        chosen = [(a, b) for a, b in pairs if ((7 * a + b) % 10 == 0) == (split == "test")]
        prompts = []
        for index, (a, b) in enumerate(random.Random(seed).sample(chosen, count)):
            question = f"what is {' '.join(str(a))} + {' '.join(str(b))} ?"  # the miniature reads digits one by one
            prompts.append(Prompt(index, chat(question, data.system, data.instruction), gold=a + b, meta={}))
        super().__init__("worked sums", prompts)

    def rewards(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        """Judges a batch of (prompt, answer)."""
        return [judge(prompt.gold, text) for prompt, text in pairs]


def judge(gold: int, text: str) -> Reward:
    """Right: two or more steps, such as `30 + 10 = 40`, all of them true, the last of them with the gold result."""
    text = re.sub(r"(?<=\d) (?=\d)", "", text)
    steps = re.findall(r"(\d{1,6}(?: *[-+] *\d{1,6})+) *= *(\d{1,6})", text)
    if not steps:
        return Reward.of("no_answer")
    results = [int(result) for _, result in steps]
    sums = [sum(map(int, re.findall(r"[-+]?\d+", left.replace(" ", "")))) for left, _ in steps]
    right = len(steps) >= 2 and sums == results and results[-1] == gold
    return Reward.of("right" if right else "wrong", str(results[-1]))
