"""Where the time of one decode step goes: python -m benchmarks.decode MODEL, or --tiny for a small random model

--rows answers stand at --columns columns, each after a prompt of half of them; then steps are taken at that very column
again and again, and the fastest counts. Each part runs alone on the step's own shapes:

- products: the layers' matrices; vocabulary: the head's
- attention: writing the new keys and values, and reading the cache
- norms, rotation: RMSNorms, RoPE; and silu(gate) * up
- draw: one token a row from the logits; bookkeeping: writing it down, ended answers
- rest: the whole step without these: embedding, mask, additions, Python

With --cpu-seconds the clock is this thread's, which other programs on the machine disturb less: for one thread alone.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.measure import machine
from benchmarks.sampler import products
from benchmarks.scaling import make_model
from dph.attention import rotate
from dph.drawing import draw
from dph.model import Decoder
from dph.model_folder import load_model
from dph.packing import can_pack, pack
from dph.sampler import SamplingSettings, _Job, _Slots
from dph.tasks.base import Prompt

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARTS = ["products", "vocabulary", "attention", "norms, rotation, silu", "draw", "bookkeeping", "rest"]


def fastest(run: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of some runs, after one to warm up."""
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = []
    for _ in range(repeats):
        started = clock()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(clock() - started)
    return min(seconds)


def stand(model: Decoder, rows: int, columns: int) -> _Slots:
    """The sampler's slots, each with half of `columns` columns of prompt and the rest of answer."""
    settings = SamplingSettings((0,), (), columns, max_rows=rows)
    slots = _Slots(model, rows, 2 * columns, settings)
    prompts = [Prompt(index, tokens=[index % 50 + 1] * (columns // 2)) for index in range(-(-rows // 8))]
    slots.admit(range(rows), [_Job(prompts[row // 8], row, more=False) for row in range(rows)])
    while slots.cache.column < columns:
        slots.step()
    return slots


def small_operations(model: Decoder, rows: int) -> Callable[[], None]:
    """What all layers do between their products and their attention."""
    config, weight = model.config, model.head
    x, queries, keys, angles, gate = (
        torch.randn(rows, 1, *shape, dtype=weight.dtype, device=weight.device)
        for shape in (
            (config.hidden_size,),
            (config.num_attention_heads, config.head_dim),
            (config.num_key_value_heads, config.head_dim),
            (1, config.head_dim),
            (config.intermediate_size,),
        )
    )

    def run() -> None:
        for layer in model.model.layers:
            layer.input_layernorm(x)
            rotate(layer.self_attn.q_norm(queries), angles, angles)
            rotate(layer.self_attn.k_norm(keys), angles, angles)
            layer.post_attention_layernorm(x)
            F.silu(gate) * gate

    return run


def attention(slots: _Slots) -> Callable[[], None]:
    """Each layer's window of the cache, written and read."""
    config, keys = slots.model.config, slots.cache.keys
    rows = keys.shape[1]
    q = torch.randn(rows, 1, config.num_attention_heads, config.head_dim, dtype=keys.dtype, device=keys.device)
    new = torch.randn(rows, 1, config.num_key_value_heads, config.head_dim, dtype=keys.dtype, device=keys.device)

    def run() -> None:
        for window in slots.cache.windows(1, keys.dtype):
            window.attend(q, new, new)

    return run


def profile(model: Decoder, rows: int, columns: int, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of a step's parts, and of the whole as "step"."""
    slots = stand(model, rows, columns)
    column = slots.cache.column
    parts = products(model, rows)

    def multiply() -> None:
        for module, inputs in parts:
            module(inputs)

    def step() -> None:
        slots.cache.column = column
        slots.step()

    def measured(run: Callable[[], object]) -> float:
        return fastest(run, repeats, clock)

    with torch.inference_mode():
        hidden = torch.randn(rows, model.config.hidden_size, dtype=model.head.dtype, device=model.head.device)
        logits, uniforms = model.logits(hidden), slots.uniforms[:, 0]
        found = {
            "products": measured(multiply),
            "vocabulary": measured(lambda: model.logits(hidden)),
            "attention": measured(attention(slots)),
            "norms, rotation, silu": measured(small_operations(model, rows)),
            "draw": measured(lambda: draw(logits, uniforms, 1.0, 1.0)),
        }
        found["bookkeeping"] = max(0.0, measured(lambda: slots._write(logits, None)) - found["draw"])
        whole = measured(step)
    found["rest"] = whole - sum(found.values())
    return found | {"step": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="a model folder")
    parser.add_argument("--tiny", action="store_true", help="a small random model instead")
    parser.add_argument("--dtype", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 8])
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--plain", action="store_true", help="also without packed matrices (dph/packing.py)")
    parser.add_argument("--cpu-seconds", action="store_true", help="this thread's clock, with one thread")
    wanted = parser.parse_args()
    if (wanted.model is None) != wanted.tiny:
        parser.error("one of MODEL and --tiny is needed")
    if wanted.cpu_seconds:
        torch.set_num_threads(1)
    clock = time.thread_time if wanted.cpu_seconds else time.perf_counter
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(machine())
    print(f"| type | rows | a step, ms | {' | '.join(PARTS)} |\n|{' --- |' * (len(PARTS) + 3)}")
    for name in wanted.dtype:
        for packs in (False, True) if wanted.plain else (True,):
            model = (
                make_model(4096, device).to(TYPES[name])
                if wanted.tiny
                else load_model(wanted.model, TYPES[name], device)
            )
            if packs and can_pack(model, TYPES[name]):
                pack(model)
            for rows in wanted.rows:
                found = profile(model, rows, wanted.columns, wanted.repeats, clock)
                cells = [f"{found[part] * 1e3:.1f} ({found[part] / found['step']:.0%})" for part in PARTS]
                matrices = name if packs else f"{name}, not packed"
                print(f"| {matrices} | {rows} | {found['step'] * 1e3:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
