"""What a decode step could be made of instead, operation by operation: python -m benchmarks.operations [--threads N]

Each line is one operation of twelve SmolLM2-135M layers, beside what dph/ does in its place; milliseconds of a step of
all thirty layers. It runs on the layers' own shapes, with memory that no cache holds. The best of --repeats counts.
The last lines are of training: attention of --rows texts, forward and backward; and a second table says how exact it is
in bf16.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.decode import fastest
from benchmarks.measure import machine
from dph.attention import KVCache, causal
from dph.drawing import draw, inverse_cdf
from dph.model import Decoder
from dph.model_config import ModelConfig
from dph.packing import PackedLinear

HIDDEN, MLP, KV_HEADS, GROUP, HEAD_DIM = 576, 1536, 3, 3, 64
COLUMNS = 128  # of the cache
VOCABULARY = 49152
LAYERS, OF = 12, 30


def packed(outputs: int, dtype: torch.dtype) -> list[PackedLinear]:
    """A matrix of each layer."""
    return [PackedLinear(torch.randn(outputs, HIDDEN, dtype=dtype)) for _ in range(LAYERS)]


def projections(rows: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Matrices one by one, or joined."""
    x = torch.randn(rows, HIDDEN, dtype=dtype)
    queries, keys, values = packed(HIDDEN, dtype), packed(192, dtype), packed(192, dtype)
    gates, ups = packed(MLP, dtype), packed(MLP, dtype)
    three_in_one, two_in_one = packed(HIDDEN + 384, dtype), packed(2 * MLP, dtype)
    return {
        "q, k, v": lambda: [(q(x), k(x), v(x)) for q, k, v in zip(queries, keys, values, strict=True)],
        "q, k, v: one matrix": lambda: [linear(x) for linear in three_in_one],
        "gate, up": lambda: [(gate(x), up(x)) for gate, up in zip(gates, ups, strict=True)],
        "gate, up: one matrix": lambda: [linear(x) for linear in two_in_one],
    }


def norms(rows: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Two norms a layer."""
    x = torch.randn(rows, 1, HIDDEN, dtype=dtype)
    norm = nn.RMSNorm(HIDDEN, 1e-5, dtype=dtype)
    ones = torch.ones(2 * HIDDEN, dtype=dtype)

    def by_hand() -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return x * (size.square() / HIDDEN + 1e-5).rsqrt().to(dtype) * norm.weight

    def through_layer_norm() -> Tensor:  # the mean of x and -x is 0, so LayerNorm divides by the root mean square
        both = torch.cat((x, -x), -1)
        return F.layer_norm(both, (2 * HIDDEN,), ones, None, 1e-5)[..., :HIDDEN]

    compiled = torch.compile(lambda y: F.rms_norm(y, (HIDDEN,), norm.weight, 1e-5))
    found = {"RMSNorm": lambda: norm(x), "RMSNorm: by hand": by_hand, "RMSNorm: LayerNorm": through_layer_norm}
    found["RMSNorm: compiled"] = lambda: compiled(x)
    return {name: lambda run=run: [run() for _ in range(2 * LAYERS)] for name, run in found.items()}  # type: ignore[misc]


def attention(rows: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """One query a head against a cache."""
    q = torch.randn(rows, KV_HEADS, GROUP, HEAD_DIM, dtype=dtype)
    mask = torch.zeros(rows, 1, 1, COLUMNS, dtype=dtype)
    flat_mask = mask.expand(rows, KV_HEADS, 1, COLUMNS).reshape(-1, 1, COLUMNS)
    shape = (rows, KV_HEADS, COLUMNS, HEAD_DIM)
    cache = [(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)) for _ in range(LAYERS)]

    def products(k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.mT) * HEAD_DIM**-0.5 + mask
        return torch.matmul(scores.softmax(-1), v)

    def one_operation(k: Tensor, v: Tensor) -> Tensor:
        keys, values = k.flatten(0, 1), v.flatten(0, 1)
        scores = torch.baddbmm(flat_mask, q.flatten(0, 1), keys.mT, alpha=HEAD_DIM**-0.5)
        return torch.bmm(scores.softmax(-1), values)

    def fused(k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def blocks(k: Tensor, v: Tensor) -> list[Tensor]:  # 8 blocks of rows, of which each needs from 1/8 to all columns
        found = []
        for block in range(8):
            here, start = slice(block * rows // 8, (block + 1) * rows // 8), COLUMNS * block // 8
            keys, values = k[here, :, start:], v[here, :, start:]
            scores = torch.matmul(q[here], keys.mT) * HEAD_DIM**-0.5 + mask[here, ..., start:]
            found.append(torch.matmul(scores.softmax(-1), values))
        return found

    found: dict[str, Callable[[Tensor, Tensor], object]] = {
        "attention": products,
        "attention: baddbmm": one_operation,
        "attention: fused kernel": fused,
        "attention: blocks of alike starts": blocks,
    }
    return {name: lambda run=run: [run(k, v) for k, v in cache] for name, run in found.items()}  # type: ignore[misc]


def drawing(rows: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """One draw, as a step has."""
    logits, uniforms = torch.randn(rows, VOCABULARY, dtype=dtype), torch.rand(rows, dtype=torch.float64)

    def one_pass() -> tuple[Tensor, Tensor]:
        wide = logits.float()
        peak = wide.amax(-1, keepdim=True)
        weights = wide.sub_(peak).exp_()  # no division by the sum: the draw does without
        tokens = inverse_cdf(weights, uniforms)
        chosen = weights.gather(1, tokens[:, None])[:, 0]
        return tokens, chosen.log() - weights.sum(-1).log()

    return {"draw": lambda: draw(logits, uniforms, 1.0, 1.0), "draw: without the softmax": one_pass}


def whole_layers(rows: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """All layers of a decode step by dph/, and in one compiled function of fixed shapes; matrices are not packed."""
    shape = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_hidden_layers": LAYERS, "num_attention_heads": KV_HEADS * GROUP, "num_key_value_heads": KV_HEADS,
    }  # fmt: skip
    model = Decoder(ModelConfig.from_dict(shape)).to(dtype)
    cache = KVCache.empty(model.config, rows, COLUMNS, dtype, "cpu")
    cache.column = COLUMNS // 2
    tokens = torch.ones(rows, 1, dtype=torch.int64)
    compiled = torch.compile(lambda: model.hidden_states(tokens, cache), dynamic=False)
    return {"layers, not packed": lambda: model.hidden_states(tokens, cache), "layers: compiled whole": compiled}


def training_attention(rows: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """One layer's attention over texts of COLUMNS tokens, with its backward pass."""
    shape = (rows, COLUMNS, KV_HEADS * (GROUP + 2), HEAD_DIM)
    with torch.inference_mode(False):
        heads = torch.randn(shape, dtype=dtype, requires_grad=True)

    def run(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            q, k, v = heads.split((KV_HEADS * GROUP, KV_HEADS, KV_HEADS), 2)
            attend(q, k, v).sum().backward()  # type: ignore[no-untyped-call]

    return {"training: attention": lambda: run(causal), "training: attention, fused kernel": lambda: run(fused)}


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`causal` by the fused kernel."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def rounding(scale: float) -> dict[str, float]:
    """How far training's attention in bf16 is from float64's, over the size of the latter, by either way.

    Args:
        scale: of queries and keys, drawn from a normal distribution; the larger, the fewer tokens are attended to.
    """
    stream = torch.Generator().manual_seed(0)
    shapes = [(4, COLUMNS, heads, HEAD_DIM) for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, generator=stream, dtype=torch.float64).bfloat16() for shape in shapes)
    q, k = q * scale, k * scale
    exact = fused(q.double(), k.double(), v.double()).transpose(1, 2)
    found = {"plain": causal(q, k, v), "fused": fused(q, k, v).transpose(1, 2)}
    return {name: float((out - exact).norm() / exact.norm()) for name, out in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves PyTorch's own choice")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 8])
    wanted = parser.parse_args()
    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    cases = [(dtype, rows) for dtype in (torch.float32, torch.bfloat16) for rows in wanted.rows]
    milliseconds: dict[str, list[str]] = {}
    for dtype, rows in cases:
        for made in (projections, norms, attention, drawing, whole_layers, training_attention):
            times = {drawing: 1, training_attention: OF}.get(made, OF / LAYERS)
            for name, run in made(rows, dtype).items():
                milliseconds.setdefault(name, []).append(f"{1e3 * times * fastest(run, wanted.repeats):.1f}")
    print(machine())
    heads = [f"{str(dtype).removeprefix('torch.')}, {rows} rows" for dtype, rows in cases]
    print(f"| ms a step | {' | '.join(heads)} |\n|{' --- |' * (len(cases) + 1)}")
    for name, cells in milliseconds.items():
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| training's attention in bf16, off float64's by | plain | fused |\n| --- | --- | --- |")
    for scale in (0.5, 1.0, 2.0):
        print(f"| queries and keys of size {scale:g} | {' | '.join(f'{x:.4f}' for x in rounding(scale).values())} |")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
