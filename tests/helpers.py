"""Small models and rollouts that many tests share."""

from collections.abc import Sequence
from pathlib import Path

import torch

from dph.miniature_base import write_tokenizer
from dph.model import Decoder
from dph.model_config import ModelConfig
from dph.model_folder import save_model
from dph.rollouts import Rollout
from dph.tasks.base import Prompt, Reward, Task
from dph.tasks.miniature_world import vocabulary
from dph.tokenizer import load_tokenizer

# Sections of a config that is done in seconds; [train] goes on with what follows.
SMALL_RUN = """\
[presample]
responses = 2
threshold = 1
[train]
steps = 2
prompts_per_step = 2
responses_per_prompt = 2
rehearsal_rows = 2
"""
# A run of one step in the folder where one stands; [data] goes on with what follows, and so does [train].
SMALL_HERE = """
[run]
name = "small"
folder = "runs"
device = "cpu"
[model]
path = "model"
[data]
"""
ONE_STEP = """\
[sampling]
max_new_tokens = 3
[presample]
responses = 2
threshold = 2
[train]
steps = 1
prompts_per_step = 2
responses_per_prompt = 2
eval_every = 0
"""


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
        }
    )
    model = Decoder(config)
    initialize(model, seed, scale)
    return model.to(dtype)


@torch.no_grad()
def initialize(model: Decoder, seed: int, scale: float = 0.02) -> None:
    """Random weights: matrices N(0, scale), norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.normal_(0.0, scale, generator=generator)
        else:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)


def rollout(prompt: list[int], tokens: list[int], index: int = 0, sample: int = 0, reward: float = 0.0) -> Rollout:
    return Rollout(index, sample, prompt, tokens, [-1.0] * len(tokens), True, reward)


class WordTask(Task):
    """A task that a random model can learn: an answer is right if its first word stands early in the alphabet."""

    def __init__(self, count: int = 12) -> None:
        words = vocabulary()
        prompts = [{"role": "user", "content": f"{words[i]} {words[i + 1]}"} for i in range(count)]
        super().__init__("words", [Prompt(i, (message,), None, {}) for i, message in enumerate(prompts)])

    def rewards(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        return [Reward.of("right" if text and text[0] < "h" else "wrong", text) for _, text in pairs]


def tiny_folder(folder: Path, seed: int = 0) -> Path:
    """A model folder in Hugging Face layout: the miniature's tokenizer and a tiny random model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    vocab = load_tokenizer(folder).vocab_size
    save_model(tiny_model(seed, vocab), folder)
    return folder
