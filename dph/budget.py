"""The memory of a run before it runs, from config.json and the config alone: train.py CONFIG --budget

    always held     weights, moments, the copy that samples, pi_ref where the loss needs it
    sampling        ... and the KV cache, a prefill, a draw
    evaluation      ... and what sampling takes, and pi_ref for `kl_to_base`
    update          ... and gradients, the activations of a micro-batch, the head's pieces
    gathering       shards alone: ... and whole weights, beside the copy that is made of them

The largest of the last four is what a GPU must hold. Every function counts bytes of the tensors that the code makes;
tests/test_budget.py compares them with the bytes that are alive. Letters: D hidden, V vocabulary, F width of the MLP,
A and K channels of all query and of all key heads, L layers.

Upper bounds: micro-batches are full and share no beginnings, prompts and answers are as long as they may be. Not
counted: what a kernel takes within itself, the CUDA context, holes between tensors. `FREE` leaves room for these.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dph.config import Config
from dph.model_config import ModelConfig
from dph.sampler import COLUMNS, PREFILL_TOKENS, RECORDED_COLUMNS, cache_columns
from dph.scoring import LOGIT_FLOATS

FREE = 0.1  # share of a GPU that is left to what is not counted
FP32, BF16 = 4, 2  # bytes


@dataclass(frozen=True)
class Plan:
    """The settings that memory depends on."""

    weight: int  # bytes of a weight: model.dtype
    compute: int  # bytes of what is computed: run.dtype
    recompute: bool
    adapter_rank: int  # 0: the weights themselves are trained
    microbatch_tokens: int
    max_rows: int
    prompt: int  # tokens, at most
    answer: int
    reference: bool  # pi_ref is in memory
    evaluates: bool  # while it trains
    graphs: bool = False  # sampling in recorded steps: wider caches
    shard: bool = False  # over `processes`
    processes: int = 1

    @property
    def autocast(self) -> bool:
        """Whether bf16 is computed with wider weights."""
        return self.compute < self.weight


def plan_of(config: Config, processes: int = 1) -> Plan:
    """The plan of a config."""
    return Plan(
        weight=BF16 if config.model.dtype == "bf16" else FP32,
        compute=BF16 if config.run.dtype == "bf16" else FP32,
        recompute=config.train.recompute,
        adapter_rank=config.model.adapter_rank,
        microbatch_tokens=config.train.microbatch_tokens,
        max_rows=config.sampling.max_rows,
        prompt=config.data.max_prompt_tokens,
        answer=config.sampling.max_new_tokens,
        reference=config.loss.needs_reference,
        evaluates=bool(config.train.eval_every and config.data.eval),
        graphs=config.sampling.graphs,
        shard=config.train.shard == "full",
        processes=processes,
    )


# ---- numbers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Counts of numbers in a model."""

    hidden: int  # D
    vocabulary: int  # V
    mlp: int  # F
    queries: int  # A
    keys: int  # K
    layers: int  # L
    matrices: int  # of the layers
    small: int  # norms and biases
    tied: bool
    head_norms: bool

    @property
    def weights(self) -> int:
        """All of the model's."""
        return self.matrices + self.small + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def adapters(self, rank: int) -> int:
        """r (d_in + d_out) for each of a layer's seven matrices."""
        attention = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys)
        return self.layers * rank * (attention + 3 * (self.hidden + self.mlp))


def sizes_of(shape: ModelConfig) -> Sizes:
    """Counted as dph/model.py makes them: q, k, v, o; gate, up, down; two norms a layer and the last one."""
    dim = shape.head_dim
    depth = shape.num_hidden_layers
    hidden = shape.hidden_size
    queries = shape.num_attention_heads * dim
    keys = shape.num_key_value_heads * dim
    matrices = 2 * hidden * (queries + keys) + 3 * hidden * shape.intermediate_size
    small = 2 * hidden
    small += queries + 2 * keys if shape.model_type == "qwen2" else 0  # biases
    small += 2 * dim if shape.model_type == "qwen3" else 0  # norms of heads
    return Sizes(
        hidden=hidden,
        vocabulary=shape.vocab_size,
        mlp=shape.intermediate_size,
        queries=queries,
        keys=keys,
        layers=depth,
        matrices=depth * matrices,
        small=depth * small + hidden,
        tied=shape.tie_word_embeddings,
        head_norms=shape.model_type == "qwen3",
    )


# ---- bytes that are always held ----------------------------------------------------------------------------------


def held(size: Sizes, plan: Plan) -> dict[str, float]:
    """Weights; AdamW's two moments in fp32, beside bf16 weights with their other halves; the copy that samples; pi_ref.

    The copy is bf16 for wider weights, and whole for adapters; of shards it is there while they sample alone. With
    adapters the base has no moments, and pi_ref is the policy without them.
    """
    here = plan.processes if plan.shard else 1
    trained = size.adapters(plan.adapter_rank) if plan.adapter_rank else size.weights
    halves = BF16 if plan.weight == BF16 and not plan.adapter_rank else 0
    adapters = FP32 * trained if plan.adapter_rank else 0
    copied = (plan.autocast or plan.adapter_rank > 0) and not plan.shard
    return {
        "weights": (plan.weight * size.weights + adapters) / here,
        "moments": (2 * FP32 + halves) * trained / here,
        "sampling copy": plan.compute * size.weights if copied else 0,
        "pi_ref": plan.weight * size.weights if plan.reference and not plan.adapter_rank else 0,
    }


# ---- bytes of sampling -------------------------------------------------------------------------------------------


def sampling(size: Sizes, plan: Plan) -> dict[str, float]:
    """The KV cache: 2 L K numbers a column and row; a layer's keys are copied when it is laid out anew.

    A prefill has its own cache, and the widest part of a layer. A draw has logits and probabilities in fp32, and where
    the vocabulary is no multiple of a block, those once more. Recorded steps leave their logits in one more place.
    """
    columns = cache_columns(plan.prompt + plan.answer, RECORDED_COLUMNS if plan.graphs else COLUMNS)
    a_token = 2 * size.layers * size.keys * plan.compute
    cache = plan.max_rows * columns * a_token
    prefilled = min(plan.max_rows * plan.prompt, max(PREFILL_TOKENS, plan.prompt))
    return {
        "whole copy": plan.compute * size.weights if plan.shard else 0,
        "KV cache": cache + cache / (2 * size.layers),
        "prefill": prefilled * (a_token + plan.compute * (3 * size.mlp + 3 * size.hidden)),
        "draw": plan.max_rows * size.vocabulary * (plan.compute + 3 * FP32),
        "recorded logits": plan.max_rows * size.vocabulary * plan.compute if plan.graphs else 0,
    }


# ---- bytes of an update ------------------------------------------------------------------------------------------


def layer_activations(size: Sizes, plan: Plan) -> float:
    """Bytes a token that one layer keeps for its backward pass.

    Two norms: their input, in fp32, and, where their weights learn, what is divided by its root mean square. The
    inputs of the matrices: two norms' results, of which autocast makes a copy for each of q, k, v, gate and up;
    attention's result; the MLP's product. Adapters on bf16 weights have all of these in fp32. Attention: q, k, v and
    its result row by row. The MLP: gate, silu(gate), up.
    """
    stream = size.hidden
    of_a_norm = 1 if plan.adapter_rank else 2
    norms = 2 * of_a_norm * FP32 * stream
    if size.head_norms:
        norms += of_a_norm * FP32 * (size.queries + size.keys)
    if plan.adapter_rank and plan.weight == BF16:
        inputs = FP32 * (5 * stream + size.queries + size.mlp)
    else:
        copies = 5 if plan.autocast else 2
        inputs = plan.compute * (copies * stream + size.queries + size.mlp)
    attention = plan.compute * 2 * (size.queries + size.keys)
    return norms + inputs + attention + 3 * plan.compute * size.mlp


def update(size: Sizes, plan: Plan) -> dict[str, float]:
    """Gradients, summed in fp32; and the largest of three moments of a backward pass (see `backward_moments`).

    Sharded weights are whole while an update lasts, beside the shards.
    """
    trained = size.adapters(plan.adapter_rank) if plan.adapter_rank else size.weights
    moments = backward_moments(size, plan)
    return {
        "whole weights": plan.weight * size.weights if plan.shard else 0,
        "gradients": FP32 * trained,
        "activations and head": max(moments.values()),
    }


def backward_moments(size: Sizes, plan: Plan) -> dict[str, float]:
    """Bytes at the three moments of a micro-batch that may be the largest.

    - head: activations of all layers, or with train.recompute their inputs alone; the vocabulary's gradient in fp32;
      its matrix and one product in bf16; a chunk of logits.
    - layer: one layer whole, with the gradients of the MLP's inside. Where head and embedding are one, the head's
      gradient waits for the embedding's.
    - embedding: that gradient, the embedding's own, and their sum.

    Autocast keeps bf16 copies of all matrices while the forward pass lasts; without recomputing, until the end.
    """
    tokens = plan.microbatch_tokens
    stream = FP32 if plan.weight == FP32 else BF16  # of the residual stream
    table = size.vocabulary * size.hidden
    trains_head = not plan.adapter_rank
    one = layer_activations(size, plan)
    copies = BF16 * size.matrices if plan.autocast else 0
    kept = tokens * size.layers * (stream * size.hidden if plan.recompute else one)
    ends = tokens * size.hidden * (3 * FP32 + 2 * stream + 2 * plan.compute)  # last norm, states by position and back
    responses = tokens * plan.answer // (plan.prompt + plan.answer)
    chunk = max(1, min(responses, LOGIT_FLOATS // size.vocabulary)) * size.vocabulary
    matrix = plan.compute * table if plan.autocast else 0
    gradient = FP32 * table if trains_head else 0
    product = BF16 * table if plan.compute == BF16 and trains_head else 0
    logits = chunk * (FP32 if plan.compute == FP32 else FP32 + BF16)
    inside = tokens * plan.compute * 2 * size.mlp
    waiting = FP32 * table if size.tied and trains_head else 0
    whole_layer = tokens * one if plan.recompute else 0
    forward = kept + ends + copies + matrix + chunk * 2 * FP32  # logits, and the copy of them that a log-sum takes
    head = kept + ends + (0 if plan.recompute else copies) + matrix + gradient + product + logits
    layer = kept + whole_layer + (0 if plan.recompute else copies) + inside + waiting
    embedding = waiting + (plan.weight + (FP32 if size.tied else 0)) * table if trains_head else 0
    return {"forward": forward, "head": head, "layer": layer, "embedding": embedding}


# ---- the whole ---------------------------------------------------------------------------------------------------


def peaks(size: Sizes, plan: Plan) -> dict[str, float]:
    """Bytes at the moments of a run that may be the largest."""
    always = sum(held(size, plan).values())
    samples = always + sum(sampling(size, plan).values())
    found = {"sampling": samples, "update": always + sum(update(size, plan).values())}
    if plan.evaluates:
        base = 0 if plan.reference or plan.adapter_rank else plan.weight * size.weights
        found["evaluation"] = samples + base
    if plan.shard:
        found["gathering"] = always + (plan.weight + plan.compute) * size.weights
    return found


def fits(size: Sizes, plan: Plan, memory: float) -> bool:
    """Whether a run fits a GPU of `memory` GB, `FREE` of it left."""
    return max(peaks(size, plan).values()) <= (1 - FREE) * memory * 1e9


def cheaper(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans that take less, with the settings to be changed: those first that change no result and cost least time."""
    yield "", plan
    said: list[str] = []
    for microbatch, rows in ((plan.microbatch_tokens, 256), (16384, 128), (8192, 64)):
        plan = replace(
            plan,
            microbatch_tokens=min(plan.microbatch_tokens, microbatch),
            max_rows=min(plan.max_rows, rows),
        )
        said = [f"--train.microbatch_tokens={plan.microbatch_tokens}", f"--sampling.max_rows={plan.max_rows}"]
        yield " ".join(said), plan
    plan = replace(plan, recompute=True)
    yield " ".join([*said, "--train.recompute=true"]), plan
    plan = replace(plan, weight=BF16, compute=BF16)
    said += ["--train.recompute=true", "--run.dtype=bf16", "--model.dtype=bf16"]
    yield " ".join(said), plan
    plan = replace(plan, adapter_rank=16, reference=False)
    said.append("--model.adapter_rank=16")
    yield " ".join(said), plan
    said[:2] = ["--train.microbatch_tokens=2048", "--sampling.max_rows=32"]
    yield " ".join(said), replace(plan, microbatch_tokens=min(plan.microbatch_tokens, 2048), max_rows=32)


def smallest_change(size: Sizes, plan: Plan, memory: float) -> str | None:
    """The first settings of `cheaper` that fit: "" for the plan as it is, None where none do."""
    return next((said for said, other in cheaper(plan) if fits(size, other, memory)), None)


def report(shape: ModelConfig, config: Config, memory: float, processes: int = 1) -> str:
    """The page that --budget prints: GB piece by piece, the largest moment, and what makes it fit."""
    size, plan = sizes_of(shape), plan_of(config, processes)
    lines = [f"{size.weights / 1e9:.2f} billion weights; GB a process:"]
    for title, pieces in (
        ("always", held(size, plan)),
        ("sampling", sampling(size, plan)),
        ("update", update(size, plan)),
    ):
        lines += [f"  {title:<10} {name:<22} {number / 1e9:8.2f}" for name, number in pieces.items() if number]
    found = peaks(size, plan)
    lines += [f"  {'most in':<10} {name:<22} {number / 1e9:8.2f}" for name, number in found.items()]
    most = max(found, key=lambda name: found[name])
    need = math.ceil(found[most] / 1e9 / (1 - FREE))
    lines.append(f"largest: {most}; with {FREE:.0%} left free it takes a GPU of {need} GB")
    if memory:
        change = smallest_change(size, plan, memory)
        if change is None:
            lines.append(
                f"{memory:g} GB: too little, even with {list(cheaper(plan))[-1][0]}; take train.shard = 'full'"
            )
        else:
            lines.append(f"{memory:g} GB: fits" + (f" with {change}" if change else ""))
    return "\n".join(lines)
