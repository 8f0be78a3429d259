"""How fast this CPU multiplies few rows by a matrix, by layout and type: python -m benchmarks.products [--threads N]

The matrices of twelve SmolLM2-135M layers, one after the other as decoding reads them, row by row (as files have them)
and column by column (as load_model lays them out on a CPU). The best of --repeats rounds counts.
"""

import argparse

import torch
from torch import Tensor, nn

from benchmarks.measure import cost, machine

SHAPES = [(576, 576)] * 2 + [(192, 576)] * 2 + [(1536, 576)] * 2 + [(576, 1536)]  # (outputs, inputs)
LAYERS = 12


def rate(weights: list[Tensor], rows: int, repeats: int) -> float:
    """GFLOP/s of `rows` rows through all matrices."""
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]).to(w.dtype) for w in weights}
    seconds = []
    for _ in range(repeats):
        with cost() as found:
            for weight in weights:
                nn.functional.linear(inputs[weight.shape[1]], weight)
        seconds.append(found.seconds)
    return 2e-9 * rows * sum(w.numel() for w in weights) / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves PyTorch's own choice")
    parser.add_argument("--repeats", type=int, default=8)
    wanted = parser.parse_args()
    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    print(machine())
    print("| type | rows | row by row, GFLOP/s | column by column | ratio |\n| --- | --- | --- | --- | --- |")
    for dtype in (torch.float32, torch.bfloat16):
        by_rows = [torch.randn(shape).to(dtype) for _ in range(LAYERS) for shape in SHAPES]
        by_columns = [weight.T.contiguous().T for weight in by_rows]
        for rows in (64, 48, 32, 16, 8):
            first, second = (rate(weights, rows, wanted.repeats) for weights in (by_rows, by_columns))
            print(f"| {dtype} | {rows} | {first:.0f} | {second:.0f} | {second / first:.2f} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
