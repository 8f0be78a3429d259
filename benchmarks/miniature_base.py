"""What the miniature's base model can do before any reinforcement learning: the yardstick that RL is held against.

    python -m benchmarks.miniature_base [--seed 0] [--folder runs] [--samples 64] [--threads 0]

Trains the seed's base if it is not there. Prints one row for each prompt set: greedy, pass@k, the share of prompts with
eight of eight right (near-perfect), style entropy in bits and the top style's share, a question; answers in no style.
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from dph.answering import Policy, answer
from dph.config import DataConfig
from dph.evaluation import pass_at_k
from dph.miniature_base import build_base
from dph.model_folder import load_model
from dph.prompts import PromptSet
from dph.sampler import SamplingSettings
from dph.tasks.miniature import COUNTS, MiniatureTask, style_of, style_spread
from dph.tokenizer import load_tokenizer

KS = (1, 8, 16, 64)


def measure(policy: Policy, task: MiniatureTask, samples: int, seed: int) -> list[float]:
    data = PromptSet(task, [replace(p, tokens=policy.tokenizer.chat(p.messages)) for p in task.prompts()])
    count, end_ids = len(data.prompts), policy.tokenizer.end_ids
    right, styles = defaultdict(list), defaultdict(list)
    settings = SamplingSettings((seed, 0, 0), end_ids, 44, 1.0, 1.0, 192)
    for given in answer(policy, data, [range(samples)] * count, settings):
        right[given.rollout.prompt].append((given.rollout.sample, given.reward.value))
        styles[given.rollout.prompt].append(style_of(task.prompts()[given.rollout.prompt], given.text))
    greedy_settings = SamplingSettings((seed, 0, 1), end_ids, 44, 0.0, 1.0, 192)
    greedy = [a.reward.value for a in answer(policy, data, [[0]] * count, greedy_settings)]
    counts = [int(sum(value for _, value in found)) for found in right.values()]
    passes = [fmean(pass_at_k(samples, count, k) for count in counts) if k <= samples else float("nan") for k in KS]
    perfect = fmean(all(value for _, value in sorted(found)[:8]) for found in right.values())
    spreads = [style_spread(found) for found in styles.values() if any(style is not None for style in found)]
    bits, top = (fmean(column) for column in zip(*spreads, strict=True))
    unstyled = fmean(style is None for found in styles.values() for style in found)
    return [fmean(greedy), *passes, perfect, bits, top, unstyled]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    base = build_base(options.folder, options.seed, options.threads)
    policy = Policy(load_model(base), load_tokenizer(base), base)
    if options.threads:
        torch.set_num_threads(options.threads)
    names = ["greedy", *(f"pass@{k}" for k in KS), "8 of 8", "bits", "top style", "no style"]
    print(f"| set | {' | '.join(names)} |\n| --- |{' ---: |' * len(names)}")
    for where in COUNTS:
        task = MiniatureTask(where, {}, DataConfig(), options.seed, options.folder)
        found = measure(policy, task, 8 if where == "train" else options.samples, options.seed)
        print(f"| {where} | {' | '.join(f'{value:.3f}' for value in found)} |", flush=True)


if __name__ == "__main__":
    main()
