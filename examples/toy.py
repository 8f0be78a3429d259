"""The plain method (dph/plain.py) on a toy: write two digits that add up to n. python -m examples.toy

A tiny base model writes right answers to small n and, to large ones, right and wrong ones alike. Every n has n - 1
right answers. GRPO and DPH-F train it; the table says how often they are right, and how many right answers still live.
"""

import random

import torch
import torch.nn.functional as F

from dph.model import Decoder
from dph.model_config import ModelConfig
from dph.plain import Answer, Ask, Method, presample, sample, train

END = 0
EASY = [[n] for n in (3, 4, 5, 6, 7)]  # the base is right
HARD = [[n] for n in (8, 9, 10)]  # the base is right in half of the cases


def asker(rng: random.Random) -> Ask:
    """A function that samples an answer and judges it."""

    def ask(model: Decoder, prompt: list[int]) -> Answer:
        answer = sample(model, prompt, iter(rng.random, None), [END], limit=3)
        answer.reward = float(len(answer.tokens) == 3 and answer.tokens[-1] == END and sum(answer.tokens) == prompt[0])
        return answer

    return ask


def base_model(rng: random.Random, steps: int = 400) -> Decoder:
    """A tiny Llama, trained on random right answers, and on as many wrong ones where n is large."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Decoder(ModelConfig.from_dict({"model_type": "llama", "vocab_size": 11, **sizes}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        rows = []
        for _ in range(64):
            (n,) = rng.choice(EASY + HARD)
            first = rng.randint(1, n - 1)
            slip = [n] in HARD and rng.random() < 0.5
            rows.append([n, first, n - first - 1 if slip else n - first, END])
        tokens = torch.tensor(rows)
        logits = model.logits(model(tokens[:, :-1]))  # (64, 3, V)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return model


def describe(model: Decoder, prompts: list[list[int]], ask: Ask) -> tuple[float, float]:
    """Of 64 answers to each prompt: the share of right ones, and how many different right ones a prompt has."""
    right = distinct = 0.0
    for prompt in prompts:
        found = [tuple(a.tokens) for a in (ask(model, prompt) for _ in range(64)) if a.reward == 1]
        right += len(found) / 64 / len(prompts)
        distinct += len(set(found)) / len(prompts)
    return right, distinct


def main(steps: int = 40, base_steps: int = 400) -> dict[str, list[tuple[float, float]]]:
    """Trains, prints the table and returns it: (share right, distinct right answers) on EASY and HARD."""
    rng = random.Random(0)
    ask = asker(rng)
    base = base_model(rng, base_steps)
    d_pef, d_exp = presample(base, EASY + HARD, ask)
    print(f"D_pef: n = {sorted({a.prompt[0] for a in d_pef})}; D_exp: n = {[n for (n,) in d_exp]}")
    models = {
        "base": base,
        "grpo": train(base, Method(), d_pef, EASY + HARD, ask, steps),
        "dph_f": train(base, Method("forward_kl", eta=1.0), d_pef, d_exp, ask, steps),
    }
    table = {name: [describe(model, prompts, ask) for prompts in (EASY, HARD)] for name, model in models.items()}
    print("model   right: easy   hard   distinct right answers: easy   hard")
    for name, ((easy, ways_easy), (hard, ways_hard)) in table.items():
        print(f"{name:7} {easy:11.2f} {hard:6.2f} {ways_easy:29.1f} {ways_hard:6.1f}")
    return table


if __name__ == "__main__":
    main()
