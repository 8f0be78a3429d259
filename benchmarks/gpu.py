"""One GPU in a few minutes, without a network: python -m benchmarks.gpu [MODEL] [--out FOLDER]    (see gpu.sh)

MODEL is a model folder; without one, random models of the shapes of Qwen2.5-0.5B and 1.5B are made. --tiny takes a
small one, so that a CPU goes through the same lines. Prompts are random tokens, and every answer has its full length.

- decode: tokens per second in bf16, with and without CUDA graphs, with and without compiled layers, of transformers'
  generate, of the matrix products alone, and the limit that memory sets: weights and cache read once a step, at the
  speed of a large copy.
- update: seconds of one optimizer step of two micro-batches, for the settings that change what is held, and the most
  memory in it and while sampling, beside what dph/budget.py says. On a CPU memory is that of the tensors alive.

Everything goes to gpu.json and gpu.md.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import LiveBytes, machine
from benchmarks.sampler import limit, measure, ours, theirs
from benchmarks.scale import MODELS, QWEN
from dph import budget
from dph.adapter import add_adapters
from dph.answering import Policy, acting
from dph.config import Config, load_config
from dph.metrics import Meter
from dph.model import Decoder
from dph.model_config import ModelConfig
from dph.model_folder import DTYPES, load_model, save_model
from dph.objective import Objective
from dph.rollouts import Rollout
from dph.sampler import SamplingSettings, sample
from dph.tasks.base import Prompt
from dph.updates import Optimizer, make_update

TINY = {
    **QWEN, "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
SETTINGS = {
    "autocast": ["--run.dtype=bf16"],
    "autocast, recompute": ["--run.dtype=bf16", "--train.recompute=true"],
    "bf16 weights": ["--run.dtype=bf16", "--model.dtype=bf16"],
    "bf16 weights, recompute": ["--run.dtype=bf16", "--model.dtype=bf16", "--train.recompute=true"],
    "adapters, recompute": [
        "--run.dtype=bf16", "--model.dtype=bf16", "--train.recompute=true", "--model.adapter_rank=16",
    ],
}  # fmt: skip
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def random_model(shape: dict[str, Any], folder: Path) -> Path:
    """A model of this shape with random weights, saved in bf16."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Decoder(ModelConfig.from_dict(shape))
    save_model(model, folder, torch.bfloat16)
    return folder


def settings(tiny: bool, *more: str) -> Config:
    """Lengths and rows of this benchmark; its prompts are as long as they may be."""
    prompt, answer, rows, tokens = (8, 56, 16, 1024) if tiny else (256, 256, 128, 8192)
    return load_config(
        None,
        [
            f"--data.max_prompt_tokens={prompt}",
            f"--sampling.max_new_tokens={answer}",
            f"--sampling.max_rows={rows}",
            f"--train.microbatch_tokens={tokens}",
            "--train.eval_every=0",
            *more,
        ],
    )


# ---- decode ------------------------------------------------------------------------------------------------------


def memory_speed(size: int) -> float:
    """Bytes a second that a copy of `size` bytes reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    found = measure(lambda: int(target.copy_(source).nbytes))
    return 2 * found["tokens/s"]


def memory_limit(model: Decoder, config: Config, speed: float) -> float:
    """Tokens a second where each step reads all weights, and of the cache what is written at half an answer."""
    rows, answer = config.sampling.max_rows, config.sampling.max_new_tokens
    size = budget.sizes_of(model.config)
    columns = config.data.max_prompt_tokens + answer / 2
    cache = rows * columns * 2 * size.layers * size.keys * budget.BF16
    return rows / ((budget.BF16 * size.weights + cache) / speed)


def fastest(run: Callable[[], int]) -> float:
    """Tokens a second of the faster of two runs, after one in which kernels are loaded and compiled."""
    run()
    return max(measure(run)["tokens/s"] for _ in range(2))


def decode_ours(folder: Path, config: Config, tiny: bool) -> dict[str, float]:
    """The limits, and this code, as it is, compiled and in recorded steps: `max_rows` answers, eight to a prompt."""
    rows, answer = config.sampling.max_rows, config.sampling.max_new_tokens
    model = load_model(folder, torch.bfloat16, DEVICE).requires_grad_(False)
    prompts = random_prompts(config, model.config.vocab_size)
    speed = memory_speed(2**24 if tiny else 2**31)
    found = {"limit of memory": memory_limit(model, config, speed)}
    found["limit of products"] = fastest(lambda: limit(model, rows, answer))
    for compiled in (False, True):
        if compiled:
            model.compile_layers()
        for graphs in (False, True):
            name = ", compiled" * compiled + ", graphs" * graphs
            found[f"ours{name}"] = fastest(lambda graphs=graphs: ours(model, prompts, 8, answer, (), graphs))  # type: ignore[misc]
    return found


def decode_theirs(folder: Path, config: Config) -> dict[str, float]:
    """transformers' generate on the same prompts."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to(DEVICE)
    prompts = random_prompts(config, model.config.vocab_size)
    return {"transformers": fastest(lambda: theirs(model, prompts, 8, config.sampling.max_new_tokens, ()))}


def random_prompts(config: Config, vocabulary: int) -> list[list[int]]:
    """One for eight of the `max_rows` answers."""
    shape = (config.sampling.max_rows // 8, config.data.max_prompt_tokens)
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).tolist()  # type: ignore


# ---- one update --------------------------------------------------------------------------------------------------


@contextmanager
def most_memory(held: float) -> Iterator[dict[str, float]]:
    """Puts the most bytes in use within its block under "bytes", `held` of them from before it, and "seconds"."""
    found: dict[str, float] = {}
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    with nullcontext() if CUDA else LiveBytes() as live:
        started = time.perf_counter()
        yield found
        if CUDA:
            torch.cuda.synchronize()
        found["seconds"] = time.perf_counter() - started
    found["bytes"] = float(torch.cuda.max_memory_allocated()) if live is None else held + live.most


def rollouts(config: Config, vocabulary: int) -> list[Rollout]:
    """Two micro-batches full of answers that begin unlike one another."""
    prompt, answer = config.data.max_prompt_tokens, config.sampling.max_new_tokens
    count = 2 * (config.train.microbatch_tokens // (prompt + answer))
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(vocabulary, (count, prompt + answer), generator=generator).tolist()
    return [Rollout(i, 0, text[:prompt], text[prompt:], [-5.0] * answer, True) for i, text in enumerate(texts)]


def take_update(optimizer: Optimizer, objective: Objective, rows: list[Rollout]) -> None:
    """One optimizer step on these rows, as `Trainer.train_step` takes it."""
    total = torch.zeros((), device=DEVICE)
    for attempt in optimizer.attempts(make_update(optimizer.config, rows, torch.ones(len(rows)))):
        with attempt as micro_batches:
            for micro in micro_batches:
                loss = objective.loss(micro, Meter())
                torch.autograd.backward(loss)
                total += loss.detach()
    assert optimizer.step(total, 0) is not None, "the gradient is not finite"


def update(folder: Path, config: Config) -> dict[str, float]:
    """Seconds, and measured and foretold bytes of an update and of sampling."""
    model = load_model(folder, DTYPES[config.model.dtype], DEVICE)
    model.recompute = config.train.recompute
    if config.model.adapter_rank:
        add_adapters(model, config.model.adapter_rank, config.model.adapter_alpha, "base")
    policy = Policy(model, None, folder)  # type: ignore[arg-type]  # nothing is tokenised
    optimizer, objective = Optimizer(model, config), Objective(model, config)
    rows = rollouts(config, model.config.vocab_size)
    take_update(optimizer, objective, rows)  # makes the moments
    actor = acting(policy, config.run.dtype).model
    plan, size = budget.plan_of(config), budget.sizes_of(model.config)
    said, held = budget.peaks(size, plan), sum(budget.held(size, plan).values())
    with most_memory(held) as updating:
        take_update(optimizer, objective, rows)
    how = SamplingSettings((0,), (), config.sampling.max_new_tokens, max_rows=config.sampling.max_rows)
    asked = [Prompt(row, tokens=rows[row % len(rows)].prompt_tokens) for row in range(config.sampling.max_rows)]
    with most_memory(held) as sampling:
        sample(actor, asked, [range(2)] * len(asked), how)
    return {
        "seconds": updating["seconds"],
        "tokens/s": sum(map(len, rows)) / updating["seconds"],
        "update": updating["bytes"], "update, budget": said["update"],
        "sampling": sampling["bytes"], "sampling, budget": said["sampling"],
    }  # fmt: skip


# ---- the report --------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    """Both tables, in Markdown."""
    lines = [f"{found['machine']}", "", "| model | decode, tokens/s |", "| --- | --- |"]
    for name, figures in found["models"].items():
        lines.append(f"| {name} | {', '.join(f'{key} {rate:,.0f}' for key, rate in figures['decode'].items())} |")
    lines += ["", "| model | settings | update, s | tokens/s | most, GB | budget | sampling, most | budget |"]
    lines.append("|" + " --- |" * 8)
    for name, figures in found["models"].items():
        for kind, f in figures["update"].items():
            gigabytes = [f[key] / 1e9 for key in ("update", "update, budget", "sampling", "sampling, budget")]
            cells = [f"{f['seconds']:.2f}", f"{f['tokens/s']:,.0f}", *(f"{size:.3g}" for size in gigabytes)]
            lines.append(f"| {name} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="a model folder")
    parser.add_argument("--tiny", action="store_true", help="a small random model")
    parser.add_argument("--out", type=Path, default=Path(), help="a folder for gpu.json and gpu.md")
    wanted = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "models": {}}
    with tempfile.TemporaryDirectory() as scratch:
        if wanted.model:
            folders = {wanted.model.name: wanted.model}
        else:
            shapes = {"tiny": TINY} if wanted.tiny else {name: MODELS[f"Qwen2.5-{name}"] for name in ("0.5B", "1.5B")}
            folders = {name: random_model(shape, Path(scratch) / name) for name, shape in shapes.items()}
        for name, folder in folders.items():
            config = settings(wanted.tiny)
            rates = decode_ours(folder, config, wanted.tiny) | decode_theirs(folder, config)
            figures: dict[str, Any] = {"decode": rates, "update": {}}
            for kind, keys in SETTINGS.items():
                gc.collect()
                torch.cuda.empty_cache()
                figures["update"][kind] = update(folder, settings(wanted.tiny, *keys))
            found["models"][name] = figures
    text = table(found)
    wanted.out.mkdir(parents=True, exist_ok=True)
    (wanted.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (wanted.out / "gpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
