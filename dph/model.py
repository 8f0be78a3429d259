"""Llama, Qwen2 and Qwen3 decoders in one module, and their KV cache.

Attribute names equal the checkpoint's keys, so loading (dph/model_folder.py) is one strict load. The families differ in
little: Qwen2 has biases on q, k and v; Qwen3 normalises each query and key head. A tied model has no lm_head: its
embedding serves.

Simplified: no dropout; dense layers and full attention only; RoPE of type default, linear, llama3 or yarn. A config
that asks for more is refused by name.

Read top-down: ModelConfig, RoPE, KVCache, then the decoder from the inside out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dph.errors import UserError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
# What a config, and the RoPE settings in it, may say or leave out: another value asks for more than is here.
ONLY: dict[str, Any] = {"hidden_act": "silu", "use_sliding_window": False, "mlp_bias": False, "attention_dropout": 0}
ONLY |= {"partial_rotary_factor": 1, "truncate": True, "attention_factor": None, "mscale": None}
LENGTH = "original_max_position_embeddings"
ROPES = {"default": [], "linear": ["factor"], "llama3": ["factor", LENGTH, "low_freq_factor", "high_freq_factor"]}
ROPES |= {"yarn": ["factor", LENGTH, "beta_fast", "beta_slow"]}
LARGEST = 100_000_000  # of a size in config.json
Device = torch.device | str


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, made by `from_dict`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: dict[str, Any]  # rope_type, rope_theta and what the type needs, whichever way config.json spelled them
    source: dict[str, Any] = field(repr=False)  # config.json as it was read, with `architectures`

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        """Read the contents of a config.json. UserError: a key is missing, out of range or asks for the unsupported."""
        if (kind := data.get("model_type")) not in list(ARCHITECTURES):
            raise UserError(f"config.json: model_type is {kind!r}; supported are {', '.join(ARCHITECTURES)}")
        _refuse_quantised(data)
        sizes = {key: _positive(data, key) for key in SIZES}
        heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
        only = ONLY | {"architectures": [ARCHITECTURES[kind]], LENGTH: None}
        only["layer_types"] = ["full_attention"] * sizes["num_hidden_layers"]
        only |= {} if kind == "qwen2" else {"attention_bias": False}  # Qwen2 has its biases whatever the config says
        _refuse_others(data, only)
        sizes["num_key_value_heads"] = groups = _positive(data, "num_key_value_heads", default=heads)
        sizes["head_dim"] = dim = _positive(data, "head_dim", default=hidden // heads)
        if heads % groups or dim % 2:
            raise UserError(f"config.json: num_key_value_heads {groups} must divide {heads}, head_dim {dim} be even")
        return cls(
            model_type=kind,
            rms_norm_eps=_positive(data, "rms_norm_eps", float, default=1e-6),
            tie_word_embeddings=bool(data.get("tie_word_embeddings")),
            rope=_rope_parameters(data),
            source={**data, "architectures": only["architectures"]},
            **sizes,
        )


def _positive(data: dict[str, Any], key: str, kind: type[float] = int, default: float | None = None) -> Any:
    value: Any = default if data.get(key) is None else data[key]
    number = isinstance(value, (int, kind)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value <= 0:
        raise UserError(f"config.json: {key} is {value!r}; it must be a positive {kind.__name__}")
    if kind is int and value > LARGEST:
        raise UserError(f"config.json: {key} is {value}; no size of a model is above {LARGEST:,}")
    return value


def _refuse_quantised(data: dict[str, Any]) -> None:
    """AWQ, GPTQ, bitsandbytes, FP8 and their like name themselves in one of two keys."""
    for key in ("quantization_config", "compression_config"):
        if data.get(key) is not None:
            method = data[key].get("quant_method") if isinstance(data[key], dict) else None
            raise UserError(
                f"config.json: {key} names {method or data[key]!r}: quantised weights are not supported; "
                "take the folder that the model was quantised from"
            )


def _refuse_others(data: dict[str, Any], only: dict[str, Any]) -> None:
    for key, value in only.items():
        if data.get(key) not in (None, value):
            raise UserError(f"config.json: {key} is {data[key]!r}; only {value!r} is supported")


def _rope_parameters(data: dict[str, Any]) -> dict[str, Any]:
    """One spelling for three: rope_theta + rope_scaling{rope_type}, the older {type}, rope_parameters{rope_theta}."""
    spelled = data.get("rope_scaling") or data.get("rope_parameters") or {}
    kind = spelled.get("rope_type", spelled.get("type", "default")) if isinstance(spelled, dict) else None
    if kind not in list(ROPES) or any(isinstance(value, dict) for value in spelled.values()):  # dicts: one RoPE a layer
        raise UserError(f"config.json: the rope_type of {spelled!r} is not supported; {', '.join(ROPES)} are")
    _refuse_others(spelled, ONLY)
    defaults = {"rope_theta": data.get("rope_theta", 10_000.0), "beta_fast": 32.0, "beta_slow": 1.0}
    needed = ["rope_theta", *ROPES[kind]]
    return {"rope_type": kind} | {key: _positive(spelled, key, float, defaults.get(key)) for key in needed}


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position of each pair of channels, (head_dim / 2,) float32, and the factor on cos and sin."""
    rope, dim, factor, scale = config.rope, config.head_dim, config.rope.get("factor", 1.0), 1.0
    theta, original = rope["rope_theta"], rope.get(LENGTH, 0)
    plain: Tensor = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    keep = torch.zeros_like(plain)  # the factor slows a channel down wholly (0), in part, or not at all (1)
    if rope["rope_type"] == "llama3":  # channels that turn often within the original context stay as they are
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((original * plain / math.tau - low) / (high - low)).clamp(0, 1)
    if rope["rope_type"] == "yarn":  # the same, but linear in the channel's number (arXiv 2309.00071)
        first, last = (dim / 2 * math.log(original / (math.tau * rope[n]), theta) for n in ("beta_fast", "beta_slow"))
        low, high = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
        slowed = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low or 0.001)
        keep, scale = 1 - slowed.clamp(0, 1), 0.1 * math.log(max(factor, 1)) + 1
    return (1 - keep) * plain / factor + keep * plain, scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) by its angle. `sin` carries the sign: its first half is negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over rows that start at position 0: q (B, T, heads, head_dim), k and v (B, T, kv_heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Layout(NamedTuple):
    """N tokens as the nodes of a tree: texts that begin alike share what they have in common, and nothing is padded.

    Everything but attention works on single tokens, so it runs on the N nodes. Attention needs whole texts: `attend`
    spreads the nodes out to rows, and collects each node's result from one of the rows that it stands in.
    """

    positions: Tensor  # (N,) of each token in its texts
    rows: Tensor  # (R, L) the tokens of each text from its start, for attention; 0 where padded on the right
    cells: Tensor  # (N,) one place of each token in `rows`, end to end

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (N, heads, head_dim), k and v (N, kv_heads, head_dim) -> (N, heads, head_dim)."""
        # F.embedding is indexing by `rows` whose backward pass sums a node's gradients from all its rows at once;
        # q, k and v go through it side by side, as one row of numbers a node.
        side_by_side = torch.cat((q, k, v), 1).flatten(1)  # (N, (heads + 2 kv_heads) head_dim)
        rows = F.embedding(self.rows, side_by_side).unflatten(2, (-1, q.shape[2]))  # type: ignore[no-untyped-call]
        out = causal(*rows.split((q.shape[1], k.shape[1], v.shape[1]), 2))  # (R, L, heads, head_dim)
        # A node stands in several rows with the same past, so with the same result: one of them is enough. Padding on
        # the right is seen by nobody, since attention is causal.
        return F.embedding(self.cells, out.flatten(2).flatten(0, 1)).view_as(q)


class Window(NamedTuple):
    """What one layer reads and writes of a KVCache in one call."""

    keys: Tensor  # (rows, kv_heads, columns, head_dim)
    values: Tensor
    written: Tensor  # (T,) the columns that the call's tokens take
    mask: Tensor | None  # (rows, 1, 1, columns) to add; None in a prefill, which reads its own columns alone

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (rows, T, heads, head_dim), k and v (rows, T, kv_heads, head_dim) -> (rows, T, heads, head_dim)."""
        for store, new in ((self.keys, k), (self.values, v)):
            store.index_copy_(2, self.written, new.transpose(1, 2).to(store.dtype))
        if self.mask is None:
            return causal(q, k, v)
        # The query heads of one kv head become that many query positions: no key or value is replicated.
        grouped = q.reshape(len(q), k.shape[2], -1, q.shape[3])  # (rows, kv_heads, heads / kv_heads, head_dim)
        return self._read(grouped, self.mask).reshape(q.shape)

    def _read(self, q: Tensor, mask: Tensor) -> Tensor:
        """softmax(q · keys / sqrt(head_dim)) · values, for q (rows, kv_heads, positions, head_dim)."""
        if not self.keys.is_cpu:
            return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        # On a CPU the fused kernel makes two tiny products for each row and head; two products for all rows and heads
        # together take half its time, as long as keys and values are contiguous: KVCache.lay_out sees to that.
        scores = torch.matmul(q, self.keys.mT) * q.shape[-1] ** -0.5 + mask  # (rows, kv_heads, positions, columns)
        return torch.matmul(scores.softmax(-1), self.values)


class KVCache:
    """Keys and values of rows that all write at one column. The owner may re-index rows and set their starts.

    Its memory is taken once, for the most columns that it may have. `keys` and `values` see only as much of it as
    `lay_out` last asked for, without gaps: a step reads these columns all, so the fewer the faster.
    """

    keys: Tensor  # (layers, rows, kv_heads, columns, head_dim), contiguous in each layer
    values: Tensor  # (layers, rows, kv_heads, columns, head_dim)
    starts: Tensor  # (rows,) int64: first valid column of each row; what lies before is masked, but must be finite
    column: int  # the next column to write

    def __init__(self, memory: Tensor, shape: tuple[int, int, int, int], starts: Tensor) -> None:
        """`memory` (2, layers, numbers of a layer), of which `shape` (rows, kv_heads, columns, head_dim) is seen."""
        self.memory, self.starts, self.column = memory, starts, 0
        self.keys, self.values = self._seen(shape)

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, columns: int, dtype: torch.dtype, device: Device) -> "KVCache":
        """A cache of zeros in which every row starts at column 0."""
        shape = (rows, config.num_key_value_heads, columns, config.head_dim)
        memory = torch.zeros(2, config.num_hidden_layers, math.prod(shape), dtype=dtype, device=device)
        return cls(memory, shape, torch.zeros(rows, dtype=torch.int64, device=device))

    def lay_out(self, kept: int, column: int, columns: int) -> None:
        """Keeps the last `kept` columns, moved so that the next to write is `column`, in a store of `columns`."""
        _, rows, heads, _, dim = self.keys.shape
        keys, values = self._seen((rows, heads, columns, dim))
        for store, new in ((self.keys, keys), (self.values, values)):
            for before, after in zip(store, new, strict=True):  # layer by layer; both lie in the same memory: clone
                after[:, :, column - kept : column] = before[:, :, self.column - kept : self.column].clone()
        self.keys, self.values = keys, values
        self.starts = (self.starts + column - self.column).clamp(min=0)
        self.column = column

    def _seen(self, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
        """The beginning of each layer's memory as keys and values of this shape."""
        keys, values = self.memory[:, :, : math.prod(shape)]
        return keys.view(-1, *shape), values.view(-1, *shape)

    def windows(self, length: int, dtype: torch.dtype) -> list[Window]:
        """Each layer's window for the next `length` columns; its mask hides what is not between start and column."""
        written = torch.arange(self.column, self.column + length, device=self.starts.device)
        mask = None
        if self.column > 0:
            columns = torch.arange(self.keys.shape[3], device=self.starts.device)
            hidden = (columns < self.starts[:, None]) | (columns > self.column)  # (rows, columns)
            mask = torch.where(hidden[:, None, None], -torch.inf, 0.0).to(dtype)
        return [Window(keys, values, written, mask) for keys, values in zip(self.keys, self.values, strict=True)]


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, hidden = config.head_dim, config.hidden_size
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        bias, head_norm = config.model_type == "qwen2", config.model_type == "qwen3"
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, out, bias=bias) for out in (queries, keys, keys))
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if head_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if head_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Layout | Window | None) -> Tensor:
        """x (..., D) -> (..., D); cos and sin (..., 1, head_dim)."""
        heads = (*x.shape[:-1], -1, self.head_dim)  # (..., heads, head_dim)
        # Back to the type of x: autocast has made the projections bfloat16, norms and RoPE stay in float32.
        q = rotate(self.q_norm(self.q_proj(x).view(heads).to(x.dtype)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads).to(x.dtype)), cos, sin)
        v = self.v_proj(x).view(heads)
        out = causal(q, k, v) if past is None else past.attend(q, k, v)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and MLP, each behind its norm and added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Layout | Window | None) -> Tensor:
        """x (..., D) -> (..., D)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, past)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """Embedding, layers and final norm, in the place where checkpoints have them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model. A new one holds PyTorch's default initialisation until a load."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.model, self.compiled = config, Trunk(config), False
        self.base = ""  # under adapters (dph/adapter.py): the folder or hub name of the model that they change
        self.recompute = False  # see `_layer`
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, False)
        self.packed_head: nn.Module | None = None  # what computes the logits of a model that dph/packing.py has packed
        # No buffer: it stays float32 when the model is cast, and real when the model is built on the meta device.
        self.frequencies, self.attention_factor = rope_frequencies(config)

    def forward(self, tokens: Tensor, cache: KVCache | None = None, layout: Layout | None = None) -> Tensor:
        """Hidden states after the final norm: tokens (B, T) -> (B, T, D), or (N,) by a layout -> (N, D).

        Without a cache, or into an empty one (prefill), rows are padded on the right and start at position 0.
        Into one that holds something (decode), T = 1: each row's token is written at cache.column, has position
        column − starts[row], and sees the columns starts[row]..column. The cache advances by T.
        """
        length = tokens.shape[-1]
        positions = torch.arange(length, device=tokens.device) if layout is None else layout.positions  # (T,) or (N,)
        x = self.model.embed_tokens(tokens)  # (B, T, D) or (N, D)
        pasts: Sequence[Layout | Window | None] = [layout] * len(self.model.layers)
        if cache is not None:
            assert not torch.is_grad_enabled(), "a KV cache holds no gradients: use torch.inference_mode()"
            assert cache.column == 0 or length == 1, "decoding takes one token a row"
            assert cache.column + length <= cache.keys.shape[3], f"the cache's {cache.keys.shape[3]} columns are full"
            positions = positions if cache.column == 0 else (cache.column - cache.starts)[:, None]  # (B, 1)
            pasts = cache.windows(length, x.dtype)
            cache.column += length
        cos, sin = self.angles(positions[..., None], x.dtype)  # (T or N, 1, head_dim) or (B, 1, 1, head_dim)
        for layer, past in zip(self.model.layers, pasts, strict=True):
            x = self._layer(layer, x, cos, sin, past)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def _layer(self, layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, past: Layout | Window | None) -> Tensor:
        """One layer: x (..., D) -> (..., D).

        Where `recompute` is set and gradients are on, the layer keeps its input alone. The backward pass computes the
        layer once more, with the same result, when it gets there: a third more work, for the memory of one layer.
        """
        if not (self.recompute and torch.is_grad_enabled()):
            return layer(x, cos, sin, past)  # type: ignore[no-any-return]
        # No layer draws random numbers, so there is no state of theirs to keep.
        return checkpoint(layer, x, cos, sin, past, use_reentrant=False, preserve_rng_state=False)  # type: ignore

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin of positions (...) as (..., head_dim): the angles in float32, the result in `dtype`."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None].float() * self.frequencies
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def compile_layers(self) -> None:
        """torch.compile of what one layer does, for all layers, and for every number of rows and columns, at once."""
        self.compiled = True
        for layer in self.model.layers:
            layer.compile(dynamic=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V), in the type of the model (or of autocast)."""
        if self.packed_head is not None:
            return self.packed_head(hidden)  # type: ignore[no-any-return]
        return F.linear(hidden, self.head)

    @property
    def head(self) -> Tensor:
        """The vocabulary's matrix (V, D): lm_head's, or the embedding's where they are tied."""
        return (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight
