"""Llama, Qwen2 and Qwen3 decoders in one module, their KV cache, and checkpoints in Hugging Face layout.

Attribute names equal the checkpoint's keys, so loading is one strict load. The families differ in little: Qwen2 has
biases on q, k and v; Qwen3 normalises each query and key head. A tied model has no lm_head: its embedding serves.

Simplified: no dropout; dense layers and full attention only; RoPE of type default, linear, llama3 or yarn; weights in
safetensors only. A checkpoint that asks for more is refused by name, never half loaded.

Read top-down: ModelConfig, RoPE, KVCache, the decoder from the inside out, then load_model and save_model.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dph.errors import UserError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
ROPE_NEEDS = {"default": (), "linear": ("factor",), "llama3": LLAMA3, "yarn": ()}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Made by `from_dict`; `source` keeps config.json as it was read, for `to_dict`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    rope: dict[str, Any]  # rope_type, rope_theta and what the type needs, whichever way config.json spelled them
    source: dict[str, Any] = field(repr=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str | Path = "config.json") -> "ModelConfig":
        """Read the contents of a config.json; `where` names it in errors.

        Raises:
            UserError: a key is missing or out of range, or the model needs something that is not supported.
        """
        kind = data.get("model_type")
        if kind not in ARCHITECTURES:
            raise UserError(f"{where}: model_type is {kind!r}; supported are {', '.join(ARCHITECTURES)}")
        architectures = data.get("architectures") or [ARCHITECTURES[kind]]
        if architectures != [ARCHITECTURES[kind]]:
            raise UserError(f"{where}: architectures is {architectures!r}; supported is {[ARCHITECTURES[kind]]!r}")
        _refuse_unsupported(data, where)
        heads, hidden = _size(data, "num_attention_heads", where), _size(data, "hidden_size", where)
        plain = ("vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
        bias = bool(data.get("attention_bias"))
        config = cls(
            model_type=kind,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=_size(data, "num_key_value_heads", where, heads),
            head_dim=_size(data, "head_dim", where, hidden // heads),
            rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            qkv_bias=bias or kind == "qwen2",  # Qwen2's config does not say so
            o_bias=bias and kind != "qwen2",
            mlp_bias=kind == "llama" and bool(data.get("mlp_bias")),
            rope=_rope_parameters(data, where),
            source={**data, "architectures": architectures},
            **{key: _size(data, key, where) for key in plain},
        )
        if heads % config.num_key_value_heads:
            raise UserError(f"{where}: num_key_value_heads is {config.num_key_value_heads}; it must divide {heads}")
        if config.head_dim % 2:
            raise UserError(f"{where}: head_dim is {config.head_dim}; RoPE needs an even number")
        return config

    def to_dict(self) -> dict[str, Any]:
        """The contents of config.json: what was read, with `architectures` filled in."""
        return dict(self.source)


def _size(data: Mapping[str, Any], key: str, where: str | Path, default: int | None = None) -> int:
    value = default if data.get(key) is None else data[key]
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{where}: {key} is {data.get(key)!r}; it must be a positive integer")
    return value


def _refuse_unsupported(data: Mapping[str, Any], where: str | Path) -> None:
    only = {"hidden_act": "silu", "attention_dropout": 0, "partial_rotary_factor": 1, "quantization_config": None}
    for key, value in only.items():
        if data.get(key) not in (None, value):
            raise UserError(f"{where}: {key} is {data[key]!r}; only {value!r} is supported")
    slides = data.get("use_sliding_window") and data.get("sliding_window")
    if slides and data.get("max_window_layers", 0) < _size(data, "num_hidden_layers", where):
        raise UserError(f"{where}: use_sliding_window is true; only full attention is supported")
    for kind in data.get("layer_types") or ():
        if kind != "full_attention":
            raise UserError(f"{where}: layer_types has {kind!r}; only 'full_attention' is supported")


# RoPE


def _rope_parameters(data: Mapping[str, Any], where: str | Path) -> dict[str, Any]:
    """One spelling for three: rope_theta + rope_scaling{rope_type}, the older {type}, rope_parameters{rope_theta}."""
    rope = dict(data.get("rope_scaling") or data.get("rope_parameters") or {})
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    if kind not in ROPE_NEEDS:
        raise UserError(f"{where}: rope_type is {kind!r}; supported are {', '.join(ROPE_NEEDS)}")
    rope.setdefault("rope_theta", data.get("rope_theta", 10_000.0))
    original, longest = "original_max_position_embeddings", data.get("max_position_embeddings")
    rope[original] = data.get(original) or rope.get(original) or longest
    for key in ("rope_theta", *ROPE_NEEDS[kind]):
        if not isinstance(rope.get(key), int | float):
            raise UserError(f"{where}: {key} is {rope.get(key)!r}; rope_type {kind!r} needs a number")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise UserError(f"{where}: partial_rotary_factor is {rope['partial_rotary_factor']!r}; only 1 is supported")
    return rope


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position of each pair of channels, and the factor on cos and sin (1 but for yarn).

    Returns:
        frequencies (head_dim / 2,) in float32 on the CPU, and the attention factor.
    """
    rope, dim = config.rope, config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    plain: Tensor = 1.0 / rope["rope_theta"] ** exponents
    if rope["rope_type"] == "linear":
        return plain / rope["factor"], 1.0
    if rope["rope_type"] == "llama3":
        # Channels that turn often within the original context stay; those that hardly turn slow down by `factor`.
        turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        return _slow_down(plain, rope["factor"], keep=(turns - low) / (high - low)), 1.0
    if rope["rope_type"] == "yarn":
        return _yarn(plain, rope, config)
    return plain, 1.0


def _slow_down(plain: Tensor, factor: float, keep: Tensor) -> Tensor:
    """Blend of the plain frequencies (keep ≥ 1) and the slowed ones (keep ≤ 0)."""
    keep = keep.clamp(0, 1)
    return (1 - keep) * plain / factor + keep * plain


def _yarn(plain: Tensor, rope: dict[str, Any], config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071). The attention factor is given, or comes from mscale, or is 0.1 ln(factor) + 1."""
    original, dim = rope["original_max_position_embeddings"], config.head_dim
    factor = rope.get("factor") or config.max_position_embeddings / original

    def channel(turns: float) -> float:  # the (fractional) channel that makes this many turns in the original context
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    low, high = channel(rope.get("beta_fast") or 32), channel(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low or 0.001)
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        attention_factor = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"]) if both else mscale(1)
    return _slow_down(plain, factor, keep=1 - slowed), float(attention_factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) by its angle. `sin` carries the sign: its first half is negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


# The cache


@dataclass
class KVCache:
    """Keys and values of a batch of rows that all write at the same column.

    The owner keeps the fields: it may re-index rows, shift columns, and set `column`, `starts` and `first`.
    """

    keys: Tensor  # (layers, rows, kv_heads, columns, head_dim)
    values: Tensor  # (layers, rows, kv_heads, columns, head_dim)
    starts: Tensor  # (rows,) int64: first valid column of each row
    column: int = 0  # the next column to write
    first: int = 0  # a lower bound of starts, the tighter the faster; a Python int, so that no step waits for the GPU

    @classmethod
    def empty(
        cls, config: ModelConfig, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> "KVCache":
        """A cache of zeros in which every row starts at column 0."""
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, columns, config.head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values, torch.zeros(rows, dtype=torch.int64, device=device))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (rows, kv_heads, T, head_dim) of the next T columns."""
        end = self.column + keys.shape[2]
        self.keys[layer, :, :, self.column : end] = keys
        self.values[layer, :, :, self.column : end] = values

    def visible(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values from the first column that any row needs to the one just written."""
        columns = slice(self.first, self.column + 1)
        return self.keys[layer, :, :, columns], self.values[layer, :, :, columns]

    def mask(self, dtype: torch.dtype) -> Tensor:
        """0 where a row may look, −inf before its start: (rows, 1, 1, C) over the columns of `visible`."""
        columns = torch.arange(self.first, self.column + 1, device=self.starts.device)
        before = (columns < self.starts[:, None])[:, None, None]  # (rows, 1, 1, C)
        return torch.zeros(before.shape, dtype=dtype, device=before.device).masked_fill(before, -torch.inf)


# The decoder


class RMSNorm(nn.Module):
    """x / rms(x) · weight, in the type of x (under autocast a bfloat16 head meets a float32 weight)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key and value head."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.o_bias)
        qwen3 = config.model_type == "qwen3"
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qwen3 else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qwen3 else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        """x (B, T, D) -> (B, T, D). A mask means decoding: T = 1, and keys and values come from the cache."""
        rows, length, _ = x.shape
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).view(rows, length, -1, self.head_dim) for project in projections)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)  # (B, heads, T, head_dim)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin)  # (B, kv_heads, T, head_dim)
        v = v.transpose(1, 2)
        if cache is not None:
            cache.write(self.layer, k, v)
        if cache is None or mask is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        else:
            # The query heads of one kv head become that many query positions: no key or value is replicated.
            q = q.reshape(rows, k.shape[1], -1, self.head_dim)
            out = F.scaled_dot_product_attention(q, *cache.visible(self.layer), attn_mask=mask)
        mixed: Tensor = self.o_proj(out.reshape(rows, length, -1))
        return mixed


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        wide, bias = config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden_size, wide, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, wide, bias=bias)
        self.down_proj = nn.Linear(wide, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each behind its norm and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, mask)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Trunk(nn.Module):
    """Embedding, layers and final norm: what checkpoints call `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # No buffer: it stays float32 when the model is cast, and real when the model is built on the meta device.
        self.frequencies, self.attention_factor = rope_frequencies(config)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin of positions (...) as (..., head_dim): the angles in float32, the result in `dtype`."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None].float() * self.frequencies
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def forward(self, tokens: Tensor, cache: KVCache | None) -> Tensor:
        """See Decoder.forward."""
        x = self.embed_tokens(tokens)  # (B, T, D)
        mask = None
        if cache is None or cache.column == 0:
            cos, sin = self.angles(torch.arange(tokens.shape[1], device=tokens.device), x.dtype)  # (T, head_dim)
        else:
            mask = cache.mask(x.dtype)
            cos, sin = self.angles((cache.column - cache.starts)[:, None, None], x.dtype)  # (B, 1, 1, head_dim)
        for layer in self.layers:
            x = layer(x, cos, sin, cache, mask)
        out: Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    """A causal language model. New ones hold PyTorch's default initialisation until `initialize` or a load."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Hidden states after the final norm.

        Without a cache, or into an empty one (prefill): rows are padded on the right and start at position 0.
        Into a cache that holds something (decode): one token a row, written at cache.column, at position
        column − starts[row]; the row sees columns starts[row]..column.

        Args:
            tokens: (B, T) token ids.
            cache: advanced by T columns; needs torch.no_grad() or inference mode.

        Returns:
            (B, T, D)
        """
        if cache is not None:
            rows, columns = cache.keys.shape[1], cache.keys.shape[3]
            assert not torch.is_grad_enabled(), "a KV cache holds no gradients: use torch.inference_mode()"
            assert rows == len(tokens), f"{len(tokens)} rows of tokens for a cache of {rows}"
            assert cache.column == 0 or tokens.shape[1] == 1, "decoding takes one token a row"
            assert cache.column + tokens.shape[1] <= columns, f"the cache's {columns} columns are full"
        hidden: Tensor = self.model(tokens, cache)
        if cache is not None:
            cache.column += tokens.shape[1]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V), in the type of the model (or of autocast)."""
        return F.linear(hidden, (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Weights to train from scratch: matrices N(0, initializer_range), norms 1, biases 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, self.config.source.get("initializer_range", 0.02), generator=generator)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)


# Checkpoints


def load_model(folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Decoder:
    """Load a model folder in Hugging Face layout: config.json and safetensors, whole or in shards.

    Raises:
        UserError: something is missing, malformed, unsupported, mis-shaped or not finite; the message names it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such model folder")
    config = ModelConfig.from_dict(_read_json(folder / "config.json"), folder / "config.json")
    with torch.device("meta"):
        model = Decoder(config)
    weights = _read_weights(config, folder, {name: weight.shape for name, weight in model.state_dict().items()})
    for name, weight in weights.items():
        weights[name] = weight.to(device, dtype, copy=True)
        if not weights[name].isfinite().all():
            raise UserError(f"{folder}: {name} holds NaN or infinite values in {dtype}")
    model.load_state_dict(weights, assign=True)
    return model


def save_model(model: Decoder, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors, each beside its place and then renamed, so that no half file is left.

    Args:
        dtype: the type to write, by default the model's own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.model.embed_tokens.weight.dtype
    weights = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in model.state_dict().items()}
    config = model.config.to_dict()
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    save_file(weights, folder / (WEIGHTS + ".part"), metadata={"format": "pt"})
    os.replace(folder / (WEIGHTS + ".part"), folder / WEIGHTS)
    (folder / "config.json.part").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(folder / "config.json.part", folder / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a {type(data).__name__}; it must be an object")
    return data


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder}: neither {WEIGHTS} nor {INDEX} (weights are read from safetensors only)")
    shards = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise UserError(f"{folder / INDEX}: no weight_map")
    files = [folder / name for name in sorted(set(map(str, shards.values())))]
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder / INDEX}: names {file.name}, which is not there")
    return files


def _read_weights(config: ModelConfig, folder: Path, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The named tensors as they are stored, still in the mapped files; names and shapes are checked."""
    found: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        try:
            found |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: not readable as safetensors: {error}") from None
    # Old Llama checkpoints store the RoPE table, which config.json determines; some tied ones store the head again.
    found = {name: weight for name, weight in found.items() if not name.endswith("rotary_emb.inv_freq")}
    head, embedding = found.get("lm_head.weight"), found.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and head is not None and embedding is not None:
        if not torch.equal(head, embedding):
            raise UserError(f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from the embedding")
        del found["lm_head.weight"]
    wrong = (n for n, shape in shapes.items() if n in found and found[n].shape != shape)
    for what, names in {
        "lacks": shapes.keys() - found.keys(),
        "has what this architecture has not:": found.keys() - shapes.keys(),
        "against config.json:": {f"{n} is {tuple(found[n].shape)} for {tuple(shapes[n])}" for n in wrong},
    }.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(f"{folder}: the checkpoint {what} {', '.join(sorted(names)[:3])}{more}")
    return found
