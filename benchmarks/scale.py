"""A model of a step on many GPUs, and what fits on which: python -m benchmarks.scale [--fits]

Counts what a step of configs/gsm8k_dph_js.toml must compute, read and send, and divides by the speeds of the machine
below. Counted on this code: kernels that a decode step launches. Measured on a CPU and taken over: the share of its
limit that a step reaches (docs/performance.md). Assumed: the mean answer's length, a launch's time, the share of the
data sheet's rate that large matrix products reach. Memory is counted by dph/budget.py. docs/scale.md reads both tables.
"""

import argparse
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dph.attention import KVCache
from dph.budget import plan_of, sizes_of, smallest_change
from dph.config import load_config
from dph.model import Decoder
from dph.model_config import ModelConfig

QWEN = {"model_type": "qwen2", "vocab_size": 151936, "rms_norm_eps": 1e-6}
LLAMA = {"model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5}
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
MODELS = {
    "Qwen2.5-0.5B": {**QWEN, **dict(zip(NAMES, (896, 4864, 24, 14, 2), strict=True)), "tie_word_embeddings": True},
    "Qwen2.5-1.5B": {**QWEN, **dict(zip(NAMES, (1536, 8960, 28, 12, 2), strict=True)), "tie_word_embeddings": True},
    "Qwen2.5-3B": {**QWEN, **dict(zip(NAMES, (2048, 11008, 36, 16, 2), strict=True)), "tie_word_embeddings": True},
    "Qwen2.5-7B": {**QWEN, **dict(zip(NAMES, (3584, 18944, 28, 28, 4), strict=True)), "vocab_size": 152064},
    "Llama-3.1-8B": {**LLAMA, **dict(zip(NAMES, (4096, 14336, 32, 32, 8), strict=True))},
    "Qwen2.5-14B": {**QWEN, **dict(zip(NAMES, (5120, 13824, 48, 40, 8), strict=True)), "vocab_size": 152064},
}
# NVIDIA's data sheet of the H100 SXM: bf16 without sparsity, HBM3, NVLink one way; beyond a node 400 Gb/s a GPU.
FLOPS, HBM, NVLINK, NETWORK = 989e12, 3.35e12, 450e9, 50e9
LAUNCH = 5e-6  # seconds in which Python and PyTorch issue one kernel: assumed
PEAK = 0.6  # share of FLOPS that large products reach: assumed
DECODE, TRAIN = 0.65, 0.7  # of their limits: measured, docs/performance.md
ANSWER, PROMPT = 400, 150  # mean tokens: assumed
CARDS = (24, 48, 80)  # GB
WORDS = {
    "--train.microbatch_tokens": "{} tokens",
    "--sampling.max_rows": "{} rows",
    "--train.recompute": "recompute",
    "--run.dtype": "",
    "--model.dtype": "bf16 weights",
    "--model.adapter_rank": "adapters",
}


class Kernels(TorchDispatchMode):
    """Counts the operations that compute something (views launch nothing)."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def layers(shape: dict[str, Any], count: int) -> Decoder:
    """A model of this shape with `count` layers and a small vocabulary."""
    return Decoder(ModelConfig.from_dict({**shape, "num_hidden_layers": count, "vocab_size": 32}))


@torch.inference_mode()
def launches(shape: dict[str, Any]) -> tuple[int, int]:
    """Kernels of a decode step: a layer's, and the rest's."""
    counts = []
    for count in (1, 2):
        model = layers(shape, count)
        cache = KVCache.empty(model.config, 2, 8, torch.float32, "cpu")
        model(torch.zeros(2, 3, dtype=torch.int64), cache)
        with Kernels() as kernels:
            model(torch.zeros(2, 1, dtype=torch.int64), cache)
        counts.append(kernels.count)
    return counts[1] - counts[0], 2 * counts[0] - counts[1]


def step(shape: dict[str, Any], gpus: int, shard: str) -> dict[str, float]:
    """Seconds of a step on each of `gpus` GPUs."""
    config = load_config("configs/gsm8k_dph_js.toml")
    train, sampling = config.train, config.sampling
    size = sizes_of(ModelConfig.from_dict(shape))
    cached = 2 * 2 * size.layers * size.keys  # bytes a token
    rows = train.prompts_per_step * train.responses_per_prompt / gpus
    alive = min(rows, sampling.max_rows) * (ANSWER / sampling.max_new_tokens if rows <= sampling.max_rows else 1)
    steps = max(sampling.max_new_tokens, rows * ANSWER / sampling.max_rows)
    a_layer, rest = launches(shape)
    reading = (2 * size.weights + alive * (PROMPT + ANSWER / 2) * cached) / HBM / DECODE
    issuing = (a_layer * size.layers + rest + 30) * LAUNCH  # 30: logits, draw and bookkeeping
    updates = train.updates_per_step
    tokens = rows * ANSWER + train.prompts_per_step / gpus * PROMPT
    tokens += updates * train.rehearsal_rows / gpus * (ANSWER + PROMPT)
    multiply_add = size.weights / (FLOPS * PEAK * TRAIN / 2)  # seconds a token
    a_byte = (gpus - 1) / gpus / (NVLINK if gpus <= 8 else NETWORK)  # seconds, along a ring
    summed = 4 * size.weights  # fp32 gradients
    # Copies sum gradients: around the ring twice. Shards sum once, and gather weights for each update and to sample.
    sent = 2 * updates * summed if shard == "none" else updates * summed + (updates + 1) * 4 * size.weights
    return {
        "sampling: reading": steps * reading,
        "launching": steps * issuing,
        "training": 3 * tokens * multiply_add,
        "sending": sent * a_byte,
    }


def seconds() -> None:
    """The table of a step's seconds."""
    names = list(step(MODELS["Qwen2.5-0.5B"], 8, "none"))
    print(f"| model | GPUs | train.shard | {' | '.join(names)} |\n|{' --- |' * (len(names) + 3)}")
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Llama-3.1-8B"):
        for gpus in (8, 64):
            for shard in ("none", "full"):
                found = step(MODELS[name], gpus, shard)
                print(f"| {name} | {gpus} | {shard} | {' | '.join(f'{value:.1f}' for value in found.values())} |")


def _short(change: str) -> str:
    """What `smallest_change` says, in words."""
    words = []
    for option in change.split():
        name, _, value = option.partition("=")
        words.append(WORDS.get(name, "{}").format(value))
    return ", ".join(word for word in words if word) or "as it is"


def what_fits() -> None:
    """The table of what fits which GPU, by dph/budget.py, for configs/gsm8k_dph_js.toml in bf16."""
    asked = [(memory, 1) for memory in CARDS] + [(80, 8)]
    heads = [f"{memory} GB" if processes == 1 else f"{processes} x {memory} GB" for memory, processes in asked]
    print(f"| model | {' | '.join(heads)} |\n|{' --- |' * (len(heads) + 1)}")
    for name, shape in MODELS.items():
        cells = []
        for memory, processes in asked:
            shard = "full" if processes > 1 else "none"
            config = load_config("configs/gsm8k_dph_js.toml", ["--run.dtype=bf16", f"--train.shard={shard}"])
            change = smallest_change(sizes_of(ModelConfig.from_dict(shape)), plan_of(config, processes), memory)
            cells.append("no" if change is None else _short(change))
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", action="store_true", help="the table of memory in place of that of seconds")
    what_fits() if parser.parse_args().fits else seconds()


if __name__ == "__main__":
    main()
