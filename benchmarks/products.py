"""How fast this CPU multiplies few rows by a matrix, by layout and type: python -m benchmarks.products [--threads N]

The matrices of twelve SmolLM2-135M layers, one after the other as decoding reads them: row by row (as files and
load_model have them), column by column, and in oneDNN's order (dph/packing.py). The best of --repeats rounds counts.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.measure import cost, machine
from dph.packing import PackedLinear

SHAPES = [(576, 576)] * 2 + [(192, 576)] * 2 + [(1536, 576)] * 2 + [(576, 1536)]  # (outputs, inputs)
LAYERS = 12


def rate(linears: Sequence[nn.Linear | PackedLinear], rows: int, dtype: torch.dtype, repeats: int) -> float:
    """GFLOP/s of `rows` rows through all matrices."""
    inputs = {linear.in_features: torch.randn(rows, linear.in_features, dtype=dtype) for linear in linears}
    seconds = []
    for _ in range(repeats):
        with cost() as found:
            for linear in linears:
                linear(inputs[linear.in_features])
        seconds.append(found.seconds)
    return 2e-9 * rows * sum(linear.in_features * linear.out_features for linear in linears) / min(seconds)


def by_rows(dtype: torch.dtype) -> list[nn.Linear]:
    """The layers' linear modules as they are made."""
    return [nn.Linear(i, o, bias=False, dtype=dtype) for _ in range(LAYERS) for o, i in SHAPES]


def by_columns(dtype: torch.dtype) -> list[nn.Linear]:
    """The same, the numbers of a column side by side in memory."""
    linears = by_rows(dtype)
    for linear in linears:
        linear.weight.data = linear.weight.data.T.contiguous().T
    return linears


def packed(dtype: torch.dtype) -> list[PackedLinear]:
    """The same, packed."""
    return [PackedLinear(linear.weight) for linear in by_rows(dtype)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves PyTorch's own choice")
    parser.add_argument("--repeats", type=int, default=8)
    wanted = parser.parse_args()
    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    print(machine())
    print("| type | rows | row by row, GFLOP/s | column by column | packed |\n| --- | --- | --- | --- | --- |")
    for dtype in (torch.float32, torch.bfloat16):
        layouts = (by_rows(dtype), by_columns(dtype), packed(dtype))
        for rows in (64, 48, 32, 16, 8):
            found = [f"{rate(linears, rows, dtype, wanted.repeats):.0f}" for linears in layouts]
            print(f"| {dtype} | {rows} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
