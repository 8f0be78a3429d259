"""Small models and rollouts that many tests share."""

import torch

from dph.model import Decoder, ModelConfig
from dph.rollouts import Rollout


def tiny_model(seed: int = 0, vocab: int = 97, dtype: torch.dtype = torch.float32, scale: float = 0.3) -> Decoder:
    """A random two-layer Llama with grouped queries; `scale` makes its distributions far from flat."""
    config = ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "initializer_range": scale,
        }
    )
    model = Decoder(config)
    model.initialize(seed)
    return model.to(dtype)


def rollout(prompt: list[int], tokens: list[int], index: int = 0, sample: int = 0, reward: float = 0.0) -> Rollout:
    return Rollout(index, sample, prompt, tokens, [-1.0] * len(tokens), True, reward)
