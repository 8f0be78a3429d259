"""Llama, Qwen2 and Qwen3 decoders in one module.

Attribute names equal the checkpoint's keys, so loading (dph/model_folder.py) is one strict load. The families differ in
little: Qwen2 has biases on q, k and v; Qwen3 normalises each query and key head. A tied model has no lm_head: its
embedding serves. Simplified: no dropout, and what dph/model_config.py refuses.

The decoder is written from the inside out: attention, MLP, layer, decoder. What a token attends to is in
dph/attention.py.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dph.attention import KVCache, Layout, Window, causal, rotate
from dph.model_config import ModelConfig, rope_frequencies


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden = config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        bias = config.model_type == "qwen2"
        self.q_proj = nn.Linear(hidden, queries, bias=bias)
        self.k_proj = nn.Linear(hidden, keys, bias=bias)
        self.v_proj = nn.Linear(hidden, keys, bias=bias)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.model_type == "qwen3":
            self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Layout | Window | None) -> Tensor:
        """x (..., D) -> (..., D); cos and sin (..., 1, head_dim)."""
        heads = (*x.shape[:-1], -1, self.head_dim)  # (..., heads, head_dim)
        # Back to the type of x: autocast has made the projections bfloat16, norms and RoPE stay in float32.
        q = self.q_proj(x).view(heads).to(x.dtype)
        k = self.k_proj(x).view(heads).to(x.dtype)
        v = self.v_proj(x).view(heads)
        q = rotate(self.q_norm(q), cos, sin)
        k = rotate(self.k_norm(k), cos, sin)
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
        gated = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(gated)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and MLP, each behind its norm and added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
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
        self.config = config
        self.model = Trunk(config)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, False)
        self.compiled = False
        self.base = ""  # under adapters (dph/adapter.py): the folder or hub name of the model that they change
        self.base_sha256 = ""  # and the hash of its weights
        self.recompute = False  # see `_layer`
        self.packed_head: nn.Module | None = None  # what computes the logits of a model that dph/packing.py has packed
        # No buffer: it stays float32 when the model is cast, and real when the model is built on the meta device.
        self.frequencies, self.attention_factor = rope_frequencies(config)

    def forward(self, tokens: Tensor, cache: KVCache | None = None, layout: Layout | None = None) -> Tensor:
        """Hidden states after the final norm: tokens (B, T) -> (B, T, D), or (N,) by a layout -> (N, D).

        Without a cache, or into an empty one (prefill), rows are padded on the right and start at position 0.
        Into one that holds something (decode), T = 1: each row's token is written at cache.column, has position
        column − starts[row], and sees the columns starts[row]..column. The cache advances by T.
        """
        hidden = self.hidden_states(tokens, cache, layout)
        if cache is not None:
            cache.column += tokens.shape[-1]
        return hidden

    def hidden_states(self, tokens: Tensor, cache: KVCache | None = None, layout: Layout | None = None) -> Tensor:
        """What `forward` does, except that the cache does not advance."""
        length = tokens.shape[-1]
        positions = torch.arange(length, device=tokens.device)  # (T,)
        if layout is not None:
            positions = layout.positions  # (N,)
        x = self.model.embed_tokens(tokens)  # (B, T, D) or (N, D)
        pasts: Sequence[Layout | Window | None] = [layout] * len(self.model.layers)
        if cache is not None:
            assert not torch.is_grad_enabled(), "a KV cache holds no gradients: use torch.inference_mode()"
            assert cache.column == 0 or length == 1, "decoding takes one token a row"
            assert cache.column + length <= cache.keys.shape[3], f"the cache's {cache.keys.shape[3]} columns are full"
            if cache.column > 0:
                positions = (cache.here - cache.starts)[:, None]  # (B, 1)
            pasts = cache.windows(length, x.dtype)
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
        cos = angles.cos() * self.attention_factor
        sin = angles.sin() * self.attention_factor
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
