"""Memory of full training and of LoRA adapters: python -m benchmarks.adapters MODEL [--rank 16]

Each way takes one optimizer step on random answers, in a process of its own. Counted are the bytes held: weights,
gradients and moments, the copy that samples, and pi_ref for a loss that needs it (rkl, E8). Measured is the most memory
beyond the weights while the step is taken, activations included.
"""

import argparse
import multiprocessing
from pathlib import Path

import torch

from benchmarks.measure import cost, machine
from dph.adapter import adapters, add_adapters
from dph.answering import Policy, acting, autocast
from dph.model import Decoder
from dph.model_folder import load_model
from dph.rollouts import Rollout, collate
from dph.scoring import token_logprobs
from dph.tokenizer import load_tokenizer

WAYS = {  # whether there are adapters, the type that the weights are held in, run.dtype
    "full, fp32": (False, torch.float32, "fp32"),
    "full, bf16": (False, torch.float32, "bf16"),
    "adapters, fp32": (True, torch.float32, "fp32"),
    "adapters, bf16": (True, torch.float32, "bf16"),
    "adapters on bf16 weights": (True, torch.bfloat16, "bf16"),
}
COLUMNS = ["trained, M", "weights", "gradients", "moments", "sampling copy", "pi_ref", "sum", "peak of a step"]


def held(model: Decoder) -> float:
    """MB of a model's weights."""
    return sum(weight.nbytes for weight in model.parameters()) / 1e6


def measure(way: str, wanted: argparse.Namespace) -> list[float]:
    """One way's row of the table; MB but for the first column."""
    with_adapters, dtype, run_dtype = WAYS[way]
    torch.set_num_threads(1)
    policy = Policy(load_model(wanted.model, dtype), load_tokenizer(wanted.model), wanted.model)
    model, reference = policy.model, held(policy.model)
    if with_adapters:
        add_adapters(model, wanted.rank, 32.0, str(wanted.model))
        reference = 0.0  # the model itself
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    shape = (wanted.rows, wanted.tokens)
    drawn = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).tolist()
    batch = collate([Rollout(0, i, [1], tokens, [0.0] * len(tokens), True) for i, tokens in enumerate(drawn)], "cpu")
    with cost() as spent:
        with autocast(model, run_dtype):
            loss = token_logprobs(model, batch, 1.0).logprobs.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    gradients = sum(weight.grad.nbytes for weight in parameters if weight.grad is not None) / 1e6
    moments = sum(x.nbytes for kept in optimizer.state.values() for x in kept.values()) / 1e6
    actor = acting(policy, run_dtype)
    copy = 0.0 if actor is policy else held(actor.model)
    assert bool(adapters(model)) == with_adapters
    kept = [held(model), gradients, moments, copy, reference]
    return [sum(weight.numel() for weight in parameters) / 1e6, *kept, sum(kept), spent.peak * 2**20 / 1e6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8, help="answers of the step's one micro-batch")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    wanted = parser.parse_args()
    print(machine())
    print(f"| MB | {' | '.join(COLUMNS)} |\n|{' --- |' * (len(COLUMNS) + 1)}")
    for way in WAYS:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            row = process.apply(measure, (way, wanted))
        print(f"| {way} | {row[0]:.1f} | {' | '.join(f'{value:,.0f}' for value in row[1:])} |")


if __name__ == "__main__":
    main()
