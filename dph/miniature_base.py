"""The miniature's base model: a small Llama that learns the corpus on demand, in two to three minutes on two CPU cores.

What it is: supervised training on pairs of question and answer, loss on the answers alone, their end token included;
then a model folder in Hugging Face layout with a word-level sentencepiece tokenizer. Done once for a seed: `build_base`
returns the folder that is there already. The seed makes the corpus, the initial weights and the order of the pairs.

Simplified: the whole corpus lies in memory; no validation, no resume: a killed training leaves nothing and starts anew.

How to read it: `build_base` tells the story; below it the parts in its order.
"""

import dataclasses
import hashlib
import io
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from dph.model import Decoder
from dph.model_config import ModelConfig
from dph.model_folder import save_model
from dph.tasks.miniature_world import corpus, vocabulary
from dph.tokenizer import Tokenizer, load_tokenizer

CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %} {{ message['content'] }}{% endfor %}"
BEGIN, END = 1, 2
Pair = tuple[list[int], int]  # tokens of prompt and answer, and how many of them are the prompt's


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the base is trained; what another recipe makes lies in another folder."""

    pairs: int = 80_000
    steps: int = 600
    batch: int = 128
    microbatch: int = 32  # pairs of like length that are padded to one
    lr: float = 2.5e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    layers: int = 3
    width: int = 128
    heads: int = 4
    feed_forward: int = 352
    context: int = 96
    rope_theta: float = 1_000.0  # of so short a context; with 10,000 it takes 1,000 steps to learn as much


def build_base(folder: Path, seed: int, threads: int = 0, progress: bool = True, recipe: Recipe | None = None) -> Path:
    """Trains the base model of a seed, unless that is done, and returns its model folder.

    Args:
        folder: the runs' folder; the model lies in its miniature-seedS/base-RECIPE, RECIPE a hash of recipe and corpus.
        seed: of corpus, initial weights and order; the same seed and threads give the same weights on one machine.
        threads: CPU threads; 0 leaves PyTorch's own choice.
        progress: whether to show a bar.
        recipe: another than the default one.
    """
    recipe = recipe or Recipe()
    target = base_folder(folder, seed, recipe)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    if threads:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # AdamW's moments decay into denormal numbers, which are slow
    with tempfile.TemporaryDirectory(prefix=".base-", dir=target.parent) as scratch:
        made = Path(scratch) / "base"
        made.mkdir()
        write_tokenizer(made)
        tokenizer = load_tokenizer(made)
        torch.manual_seed(seed)
        model = Decoder(model_config(recipe, tokenizer.vocab_size))
        train(model, encode(corpus(seed, recipe.pairs), tokenizer), seed, recipe, progress)
        save_model(model, made)
        (made / "generation_config.json").write_text(json.dumps({"bos_token_id": BEGIN, "eos_token_id": END}) + "\n")
        if not target.is_dir():  # another process may have made the same meanwhile
            os.rename(made, target)
    return target


def base_folder(folder: Path, seed: int, recipe: Recipe | None = None) -> Path:
    """Returns where the base of a seed lies, or will lie once it is trained."""
    return folder / f"miniature-seed{seed}" / f"base-{_fingerprint(recipe or Recipe(), seed)}"


def _fingerprint(recipe: Recipe, seed: int) -> str:
    """Eight digits of a hash over the recipe, the words and the corpus's first pairs."""
    parts = [dataclasses.asdict(recipe), vocabulary(), CHAT_TEMPLATE, list(corpus(seed, 500))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.model, one piece a word of the world, and tokenizer_config.json with the chat template."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(vocabulary())]),
        model_writer=model,
        model_type="word",
        vocab_size=len(vocabulary()) + 3,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def model_config(recipe: Recipe, vocab_size: int) -> ModelConfig:
    """Returns the model's shape, Llama's."""
    return ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": recipe.width,
            "intermediate_size": recipe.feed_forward,
            "num_hidden_layers": recipe.layers,
            "num_attention_heads": recipe.heads,
            "num_key_value_heads": recipe.heads,
            "max_position_embeddings": recipe.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": recipe.rope_theta,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": BEGIN,
            "eos_token_id": END,
        }
    )


def encode(pairs: Iterator[tuple[str, str]], tokenizer: Tokenizer) -> list[Pair]:
    """Returns the tokens of each pair as the sampler will meet them: chat prompt, answer, end token."""
    encoded = []
    for question, answer in pairs:
        prompt = tokenizer.chat([{"role": "user", "content": question}])
        encoded.append((prompt + tokenizer.encode(answer) + [END], len(prompt)))
    return encoded


def train(model: Decoder, pairs: Sequence[Pair], seed: int, recipe: Recipe, progress: bool = False) -> list[float]:
    """Trains the model in place and returns each step's loss, nats a token of the answers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)
    losses, tokens, started = [], 0, time.monotonic()
    bar = tqdm(total=recipe.steps, desc="base model", unit="step", disable=not progress)
    for step, batch in enumerate(batches(pairs, seed, recipe)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * schedule(step, recipe)
        optimizer.zero_grad(set_to_none=True)
        losses.append(0.0)
        told = sum(len(row) - asked for row, asked in batch)
        for start in range(0, recipe.batch, recipe.microbatch):
            inputs, targets = collate(batch[start : start + recipe.microbatch])
            answers = targets >= 0
            logits = model.logits(model(inputs)[answers])  # (answer tokens, V)
            loss = F.cross_entropy(logits, targets[answers], reduction="sum") / told
            torch.autograd.backward(loss)
            losses[-1] += loss.item()
            tokens += inputs.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        optimizer.step()
        bar.update()
        rate = tokens / (time.monotonic() - started)
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {rate:,.0f} tokens/s", refresh=False)
    bar.close()
    return losses


def schedule(step: int, recipe: Recipe) -> float:
    """Returns the learning rate's factor: linear warm-up, then half a cosine down to 0."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def batches(pairs: Sequence[Pair], seed: int, recipe: Recipe) -> Iterator[list[Pair]]:
    """Yields recipe.steps batches, shuffled anew each epoch, and each sorted by length.

    Sorted within the batch, not across batches: those would hold one kind of question each, and learn a third as fast.
    """
    rng = random.Random(f"{seed}|order")
    order: list[Pair] = []
    for _ in range(recipe.steps):
        while len(order) < recipe.batch:
            order += rng.sample(pairs, len(pairs))
        yield sorted(order[: recipe.batch], key=lambda pair: len(pair[0]))
        del order[: recipe.batch]


def collate(rows: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """Returns inputs (B, T), padded on the right, and the tokens that follow them (B, T), -1 outside the answers."""
    width = max(len(tokens) for tokens, _ in rows) - 1
    inputs = [tokens[:-1] + [END] * (width + 1 - len(tokens)) for tokens, _ in rows]
    targets = [[-1] * (asked - 1) + tokens[asked:] + [-1] * (width + 1 - len(tokens)) for tokens, asked in rows]
    return torch.tensor(inputs), torch.tensor(targets)
