"""What a config.json says of a decoder: its family, its sizes, its RoPE. What this code does not know it refuses.

Simplified: dense layers and full attention only; RoPE of type default, linear, llama3 or yarn. A config that asks for
more is refused by name.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dph.errors import UserError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
LARGEST = 100_000_000  # of a size in config.json
LENGTH = "original_max_position_embeddings"  # of the context that a model was first trained with
ROPES = {  # the types of RoPE, and the keys that each needs beside rope_theta
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", LENGTH, "low_freq_factor", "high_freq_factor"],
    "yarn": ["factor", LENGTH, "beta_fast", "beta_slow"],
}
ONLY: dict[str, Any] = {  # what a config, and the RoPE settings in it, may say or leave out: all else asks for more
    "hidden_act": "silu",
    "use_sliding_window": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "truncate": True,
    "attention_factor": None,
    "mscale": None,
}


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
        kind = data.get("model_type")
        if kind not in list(ARCHITECTURES):
            raise UserError(f"config.json: model_type is {kind!r}; supported are {', '.join(ARCHITECTURES)}")
        architectures = [ARCHITECTURES[kind]]
        _refuse_quantised(data)
        sizes = {key: _positive(data, key) for key in SIZES}
        _refuse_others(data, _only(kind, architectures, sizes["num_hidden_layers"]))
        heads = sizes["num_attention_heads"]
        groups = _positive(data, "num_key_value_heads", default=heads)
        head_dim = _positive(data, "head_dim", default=sizes["hidden_size"] // heads)
        if heads % groups or head_dim % 2:
            raise UserError(
                f"config.json: num_key_value_heads {groups} must divide {heads}, head_dim {head_dim} be even"
            )
        return cls(
            model_type=kind,
            num_key_value_heads=groups,
            head_dim=head_dim,
            rms_norm_eps=_positive(data, "rms_norm_eps", float, default=1e-6),
            tie_word_embeddings=bool(data.get("tie_word_embeddings")),
            rope=_rope_parameters(data),
            source={**data, "architectures": architectures},
            **sizes,
        )


def _positive(data: dict[str, Any], key: str, kind: type[float] = int, default: float | None = None) -> Any:
    """A positive number of config.json. UserError: it is missing, or something else."""
    value: Any = data.get(key)
    if value is None:
        value = default
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value <= 0:
        raise UserError(f"config.json: {key} is {value!r}; it must be a positive {kind.__name__}")
    if kind is int and value > LARGEST:
        raise UserError(f"config.json: {key} is {value}; no size of a model is above {LARGEST:,}")
    return value


def _refuse_quantised(data: dict[str, Any]) -> None:
    """AWQ, GPTQ, bitsandbytes, FP8 and their like name themselves in one of two keys."""
    for key in ("quantization_config", "compression_config"):
        settings = data.get(key)
        if settings is None:
            continue
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        raise UserError(
            f"config.json: {key} names {method or settings!r}: quantised weights are not supported; "
            "take the folder that the model was quantised from"
        )


def _only(kind: str, architectures: list[str], layers: int) -> dict[str, Any]:
    """The one supported value of each key that could ask for more."""
    only = {**ONLY, "architectures": architectures, LENGTH: None, "layer_types": ["full_attention"] * layers}
    if kind != "qwen2":  # which has its biases whatever the config says
        only["attention_bias"] = False
    return only


def _refuse_others(data: dict[str, Any], only: dict[str, Any]) -> None:
    for key, value in only.items():
        if data.get(key) not in (None, value):
            raise UserError(f"config.json: {key} is {data[key]!r}; only {value!r} is supported")


def _rope_parameters(data: dict[str, Any]) -> dict[str, Any]:
    """One spelling for three: rope_theta + rope_scaling{rope_type}, the older {type}, rope_parameters{rope_theta}."""
    spelled = data.get("rope_scaling") or data.get("rope_parameters") or {}
    kind = None
    if isinstance(spelled, dict) and not any(isinstance(value, dict) for value in spelled.values()):  # else one a layer
        kind = spelled.get("rope_type", spelled.get("type", "default"))
    if kind not in list(ROPES):
        raise UserError(f"config.json: the rope_type of {spelled!r} is not supported; {', '.join(ROPES)} are")
    _refuse_others(spelled, ONLY)
    defaults = {"rope_theta": data.get("rope_theta", 10_000.0), "beta_fast": 32.0, "beta_slow": 1.0}
    found = {"rope_type": kind}
    for key in ["rope_theta", *ROPES[kind]]:
        found[key] = _positive(spelled, key, float, defaults.get(key))
    return found


# ---- RoPE: how fast each pair of channels turns with the position -------------------------------------------------


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position of each pair of channels, (head_dim / 2,) float32, and the factor on cos and sin."""
    rope = config.rope
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    plain: Tensor = 1.0 / rope["rope_theta"] ** channels
    factor = rope.get("factor", 1.0)
    scale = 1.0
    keep = torch.zeros_like(plain)  # the factor slows a channel down wholly (0), in part, or not at all (1)
    if rope["rope_type"] == "llama3":
        keep = _kept_by_llama3(rope, plain)
    if rope["rope_type"] == "yarn":
        keep = _kept_by_yarn(rope, config.head_dim)
        scale = 0.1 * math.log(max(factor, 1)) + 1
    return (1 - keep) * plain / factor + keep * plain, scale


def _kept_by_llama3(rope: dict[str, Any], plain: Tensor) -> Tensor:
    """Channels that turn often within the original context stay as they are."""
    turns: Tensor = plain * rope[LENGTH] / math.tau
    low = float(rope["low_freq_factor"])
    high = float(rope["high_freq_factor"])
    return ((turns - low) / (high - low)).clamp(0, 1)


def _kept_by_yarn(rope: dict[str, Any], head_dim: int) -> Tensor:
    """The same, but linear in the channel's number (arXiv 2309.00071)."""

    def channel(turns: float) -> float:
        """The number of the channel that turns so often within the original context."""
        return head_dim / 2 * math.log(rope[LENGTH] / (math.tau * turns), rope["rope_theta"])

    low = max(math.floor(channel(rope["beta_fast"])), 0)
    high = min(math.ceil(channel(rope["beta_slow"])), head_dim - 1)
    numbers = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    slowed = (numbers - low) / (high - low or 0.001)
    return 1 - slowed.clamp(0, 1)
