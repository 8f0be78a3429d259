"""A model of a step on many GPUs: python -m benchmarks.scale

Counts what a step of configs/gsm8k_dph_js.toml must compute, read and send, and divides by the speeds of the machine
below. Counted on this code: kernels a decode step launches, bytes a layer saves for its gradient. Measured on a CPU and
taken over: the share of its limit that a step reaches (docs/performance.md). Assumed: the mean answer's length, a
launch's time, the share of the data sheet's rate that large matrix products reach. docs/scale.md reads the table.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dph.attention import KVCache
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
    "Llama-3.1-8B": {**LLAMA, **dict(zip(NAMES, (4096, 14336, 32, 32, 8), strict=True))},
}
# NVIDIA's data sheet of the H100 SXM: bf16 without sparsity, HBM3, NVLink one way; beyond a node 400 Gb/s a GPU.
FLOPS, HBM, NVLINK, NETWORK, MEMORY = 989e12, 3.35e12, 450e9, 50e9, 80e9
LAUNCH = 5e-6  # seconds in which Python and PyTorch issue one kernel: assumed
PEAK = 0.6  # share of FLOPS that large products reach: assumed
DECODE, TRAIN = 0.65, 0.7  # of their limits: measured, docs/performance.md
ANSWER, PROMPT = 400, 150  # mean tokens: assumed
MICROBATCH = 4096  # tokens: lower than in the config, so that activations fit; it changes no result


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


def saved(shape: dict[str, Any], tokens: int = 64) -> float:
    """Bytes a token that a layer saves for its gradient, under bf16 autocast."""
    model, sizes = layers(shape, 1), dict[int, int]()

    def note(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.nn.Parameter):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, tokens, dtype=torch.int64))
    weights = sum(2 * w.numel() for w in model.parameters() if w.ndim == 2)  # autocast's copies, once a micro-batch
    return (sum(sizes.values()) - weights) / tokens


def step(shape: dict[str, Any], gpus: int) -> dict[str, float]:
    """Seconds and GB of a step on one of `gpus` GPUs."""
    config = load_config("configs/gsm8k_dph_js.toml")
    train, sampling = config.train, config.sampling
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_dict(shape))
    weights, depth = sum(w.numel() for w in model.parameters()), model.config.num_hidden_layers
    embedding = model.head.numel()  # the largest parameter, and the last whose gradient is there
    cached = 2 * 2 * depth * model.config.num_key_value_heads * model.config.head_dim  # bytes a token
    rows = train.prompts_per_step * train.responses_per_prompt / gpus
    alive = min(rows, sampling.max_rows) * (ANSWER / sampling.max_new_tokens if rows <= sampling.max_rows else 1)
    steps = max(sampling.max_new_tokens, rows * ANSWER / sampling.max_rows)
    a_layer, rest = launches(shape)
    reading = (2 * weights + alive * (PROMPT + ANSWER / 2) * cached) / HBM / DECODE
    issuing = (a_layer * depth + rest + 30) * LAUNCH  # 30: logits, draw and bookkeeping
    updates = train.updates_per_step
    tokens = rows * ANSWER + train.prompts_per_step / gpus * PROMPT
    tokens += updates * train.rehearsal_rows / gpus * (ANSWER + PROMPT)
    microbatch = min(MICROBATCH, tokens / updates)
    multiply_add = weights / (FLOPS * PEAK * TRAIN / 2)  # seconds a token
    seconds = 4 / (NVLINK if gpus <= 8 else NETWORK)  # to send a number along a ring; a sum goes around twice
    summing = 2 * (gpus - 1) / gpus * seconds
    hidden = 2 * microbatch * multiply_add  # seconds of the last backward pass, under which gradients are summed
    memory = {
        "weights": (4 + 2) * weights,  # fp32, and the bf16 copy that samples
        "moments": 8 * max(weights / gpus, embedding),  # the most that one rank owns
        "cache": min(rows, sampling.max_rows) * (PROMPT + 1.5 * sampling.max_new_tokens) * cached,
        "gradients": (4 + 2) * weights + 4 * embedding,  # fp32, autocast's copies of the weights, the head's part
        "activations": microbatch * depth * saved(shape),
    }
    peak = memory["weights"] + memory["moments"] + max(memory["cache"], memory["gradients"] + memory["activations"])
    return {
        "reading": steps * reading, "issuing": steps * issuing, "sampling": steps * max(reading, issuing),
        "training": 3 * tokens * multiply_add,
        "sending": updates * (seconds * weights + max(summing * embedding, summing * weights - hidden)),
        **{name: size / 1e9 for name, size in memory.items()}, "most": peak / 1e9,
    }  # fmt: skip


def main() -> None:
    names = list(step(MODELS["Qwen2.5-0.5B"], 8))
    print(f"| model | GPUs | {' | '.join(names)} | fits {MEMORY / 1e9:.0f} GB |\n|{' --- |' * (len(names) + 3)}")
    for name, shape in MODELS.items():
        for gpus in (8, 64):
            found = step(shape, gpus)
            cells = " | ".join(f"{value:.1f}" for value in found.values())
            print(f"| {name} | {gpus} | {cells} | {'yes' if found['most'] * 1e9 < MEMORY else 'no'} |")


if __name__ == "__main__":
    main()
