"""Tokens per second of the sampler, of transformers' generate and of the machine: python -m benchmarks.sampler MODEL

Same chat prompts, same type, same run, one after the other and again, the medians counted. Forced: every answer has
exactly --tokens tokens. Natural: an answer ends at the model's end token, at the latest there.

The limit is the time of a decode step's matrix products alone, at the same number of rows, weights and head read in
the order of the layers: what no sampler that decodes token by token with these weights can beat on this machine.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import cost, machine
from dph.model import Decoder
from dph.model_folder import load_model
from dph.packing import PackedLinear, can_pack, pack
from dph.sampler import SamplingSettings, sample
from dph.tasks.base import Prompt
from dph.tokenizer import load_tokenizer

ASKED = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue.",
    "What is 17 plus 25?",
    "Name three animals that live in the desert.",
    "How do I boil an egg?",
    "Tell me a story about a brave little mouse.",
    "Translate 'good morning' into Spanish.",
)


def ours(
    model: Decoder,
    prompts: list[list[int]],
    samples: int,
    tokens: int,
    end_ids: tuple[int, ...],
    graphs: bool = False,
) -> int:
    """Samples once and returns the tokens written."""
    settings = SamplingSettings((0,), end_ids, tokens, max_rows=len(prompts) * samples, graphs=graphs)
    asked = [Prompt(index, tokens=prompt) for index, prompt in enumerate(prompts)]
    return sum(len(rollout.tokens) for rollout in sample(model, asked, [range(samples)] * len(asked), settings))


def theirs(model: Any, prompts: list[list[int]], samples: int, tokens: int, end_ids: tuple[int, ...]) -> int:
    """The same through transformers' generate, prompts padded on the left."""
    width, device = max(map(len, prompts)), model.device
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    forced = {} if end_ids else {"min_new_tokens": tokens}
    ends = list(end_ids) or None
    with torch.inference_mode():
        written = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
            num_return_sequences=samples, max_new_tokens=tokens, eos_token_id=ends, **forced,
        )[:, width:]  # fmt: skip
    if not end_ids:
        return int(written.numel())
    ended = torch.isin(written, torch.tensor(ends, device=device)).cumsum(1)
    return int((ended == 0).sum() + (ended[:, -1] > 0).sum())  # what follows an end token is padding


def products(model: Decoder, rows: int) -> list[tuple[nn.Linear | PackedLinear, Tensor]]:
    """The layers' products in the order in which a token meets them: what multiplies, and `rows` rows for it.

    The head's is not among them.
    """
    linears = [each for each in model.model.layers.modules() if isinstance(each, nn.Linear | PackedLinear)]
    sizes = {linear.in_features for linear in linears}
    inputs = {size: torch.randn(rows, size, dtype=model.head.dtype, device=model.head.device) for size in sizes}
    return [(linear, inputs[linear.in_features]) for linear in linears]


def limit(model: Decoder, rows: int, tokens: int) -> int:
    """The matrix products of `tokens` decode steps of `rows` rows, and nothing else; returns rows * tokens."""
    layers = products(model, rows)
    hidden = torch.randn(rows, model.head.shape[1], dtype=model.head.dtype, device=model.head.device)
    with torch.inference_mode():
        for _ in range(tokens):
            for module, inputs in layers:
                module(inputs)
            model.logits(hidden)
    return rows * tokens


def measure(run: Callable[[], int]) -> dict[str, float]:
    """Tokens per second and peak memory of a run, which returns the tokens written."""
    with cost() as found:
        written = run()
    return {"tokens/s": written / found.seconds, "peak MiB": found.peak}


def compare(folder: Path, dtype: torch.dtype, wanted: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """{"forced" or "natural": {"ours", "transformers", "limit": figures}}."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, model = load_tokenizer(folder), load_model(folder, dtype, device)
    if can_pack(model, dtype):  # as answering.acting does
        pack(model)
    prompts = [tokenizer.chat([{"role": "user", "content": ASKED[i % len(ASKED)]}]) for i in range(wanted.prompts)]
    oracle = None
    if not wanted.alone:
        import transformers

        oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, ends in (("forced", ()), ("natural", tokenizer.end_ids)):
        how = (prompts, wanted.samples, wanted.tokens, ends)
        runs: dict[str, Callable[[], int]] = {"ours": lambda how=how: ours(model, *how)}  # type: ignore[misc]
        if oracle is not None:
            runs["transformers"] = lambda how=how: theirs(oracle, *how)  # type: ignore[misc]
        if not ends:
            runs["limit"] = lambda: limit(model, wanted.prompts * wanted.samples, wanted.tokens)
        for run in runs.values():
            run() if torch.cuda.is_available() else None  # kernels are loaded once
        rounds = [{who: measure(run) for who, run in runs.items()} for _ in range(wanted.repeats)]
        found[name] = {
            who: {key: statistics.median(r[who][key] for r in rounds) for key in rounds[0][who]} for who in runs
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a model folder with a chat template")
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without transformers")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    wanted = parser.parse_args()
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    results = {name: compare(wanted.model, types[name], wanted) for name in wanted.dtype}
    print("| type | ends | ours, tokens/s | transformers | ratio | limit | share of it | peak MiB, ours | theirs |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for dtype, found in results.items():
        for ends, f in found.items():
            rate, nothing = f["ours"]["tokens/s"], {"tokens/s": float("nan"), "peak MiB": float("nan")}
            other, most = f.get("transformers", nothing), f.get("limit", nothing)
            cells = [f"{rate:,.0f}", f"{other['tokens/s']:,.0f}", f"{rate / other['tokens/s']:.2f}"]
            cells += [f"{most['tokens/s']:,.0f}", f"{rate / most['tokens/s']:.2f}"]
            cells += [f"{f['ours']['peak MiB']:,.0f}", f"{other['peak MiB']:,.0f}"]
            print(f"| {dtype} | {ends} | {' | '.join(cells).replace('nan', '-')} |")
    if wanted.out:
        wanted.out.write_text(json.dumps({**machine(), **vars(wanted), "found": results}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
