"""How cost grows with rows, length and vocabulary: python -m benchmarks.scaling [--picture docs/scaling.png]

A random Llama of 4 layers and width 256 samples answers of forced length, then scores them with gradient in
micro-batches of 4,096 tokens. One size varies, the others stay at 64 rows, 128 tokens, a vocabulary of 32,768. Sampling
is held against the limit of benchmarks/sampler.py. The growth is the slope of log seconds over log size between a size
and the one before: 1 is linear. Each size is measured in a process of its own, whose memory is then its own.
"""

import argparse
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from benchmarks.measure import cost, machine
from benchmarks.sampler import limit
from benchmarks.step import alone
from dph.model import Decoder
from dph.model_config import ModelConfig
from dph.rollouts import collate, group_by_tokens
from dph.sampler import SamplingSettings, sample
from dph.scoring import token_logprobs
from dph.tasks.base import Prompt

SWEEPS = {
    "rows": (8, 16, 32, 64, 128, 256),
    "length": (64, 128, 256, 512, 1024),
    "vocabulary": (4096, 16384, 32768, 65536, 151936),
}
STANDARD = {"rows": 64, "length": 128, "vocabulary": 32768}
PROMPT = 16


def make_model(vocabulary: int, device: str) -> Decoder:
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
    shape |= {"num_key_value_heads": 4, "max_position_embeddings": 2048, "vocab_size": vocabulary}
    torch.manual_seed(0)
    return Decoder(ModelConfig.from_dict({"model_type": "llama", "rms_norm_eps": 1e-5, **shape})).to(device)


def measure(rows: int, length: int, vocabulary: int) -> dict[str, float]:
    """Seconds and peak MiB of sampling `rows` answers, of scoring them with gradient, and sampling's limit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(vocabulary, device)
    prompts = [Prompt(i, tokens=[1 + i % 7] * PROMPT) for i in range(rows // 8)]
    numbers = [range(8)] * len(prompts)
    sample(model, prompts, numbers, SamplingSettings((0,), (), 8, max_rows=rows))  # to warm up
    with cost() as sampling:
        rollouts = sample(model, prompts, numbers, SamplingSettings((0,), (), length, max_rows=rows))
    with cost() as products:
        limit(model, rows, length)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    with cost() as training:
        for group in group_by_tokens(rollouts, 4096):
            torch.autograd.backward(token_logprobs(model, collate([rollouts[i] for i in group], device), 1.0)[0].sum())
    found = {"sampling": sampling.seconds, "limit": products.seconds, "training": training.seconds}
    return {**found, "sampling MiB": sampling.peak, "training MiB": training.peak}


def growth(sizes: list[int], seconds: list[float]) -> float:
    """The slope between the last two sizes."""
    return math.log(seconds[-1] / seconds[-2]) / math.log(sizes[-1] / sizes[-2])


def draw(found: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for panel, (name, sweep) in zip(panels, found.items(), strict=True):
        sizes, standard = list(sweep), STANDARD
        tokens = [{**standard, name: size}["rows"] * {**standard, name: size}["length"] for size in sizes]
        for key in ("sampling", "training", "limit"):
            rates = [count / sweep[size][key] for count, size in zip(tokens, sizes, strict=True)]
            panel.loglog(sizes, rates, marker="o", linestyle="--" if key == "limit" else "-", label=key)
        memory = panel.twinx()
        memory.plot(sizes, [sweep[size]["training MiB"] for size in sizes], color="gray", linestyle=":")
        memory.set(ylabel="MiB of training (dotted)", ylim=(0, None))
        panel.set(xlabel=name, ylabel="tokens/s")
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", nargs="+", choices=tuple(SWEEPS), default=list(SWEEPS))
    parser.add_argument("--most", type=int, default=1 << 20, help="leave out larger sizes")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    wanted = parser.parse_args()
    found: dict[str, dict[int, dict[str, float]]] = {}
    print("| size | sampling, s | of its limit | growth | MiB | training, s | growth | MiB |\n|" + " --- |" * 8)
    for name in wanted.sweeps:
        found[name] = {}
        for size in (size for size in SWEEPS[name] if size <= wanted.most):
            f = found[name][size] = alone(measure, *{**STANDARD, name: size}.values())
            sizes, column = list(found[name]), found[name].values()
            slopes = [
                f"{growth(sizes, [c[key] for c in column]):.2f}" if len(sizes) > 1 else "-"
                for key in ("sampling", "training")
            ]
            sampled = f"{f['sampling']:.2f} | {f['limit'] / f['sampling']:.2f} | {slopes[0]} | {f['sampling MiB']:.0f}"
            trained = f"{f['training']:.2f} | {slopes[1]} | {f['training MiB']:.0f}"
            print(f"| {name} {size:,} | {sampled} | {trained} |", flush=True)
    if wanted.picture and len(found) == len(SWEEPS):
        draw(found, wanted.picture)
    if wanted.out:
        wanted.out.write_text(json.dumps({**machine(), "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
