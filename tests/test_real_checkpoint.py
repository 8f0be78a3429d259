"""A real checkpoint ($DPH_CHECKPOINT, e.g. SmolLM2-135M-Instruct): run with -m checkpoint."""

import os

import pytest
import torch

from dph import attention
from dph.model_folder import load_model
from dph.rollouts import collate
from dph.sampler import SamplingSettings, sample
from dph.scoring import token_logprobs
from dph.tasks.base import Prompt
from dph.tokenizer import load_tokenizer

pytestmark = pytest.mark.checkpoint
QUESTIONS = [
    "What is the capital of France?", "Add 3 and 4.", "Name three colours.", "Why is the sky blue?",
    "Write a haiku about rain.", "What is 7 times 8?", "Who wrote Hamlet?", "Translate 'good morning' into Spanish.",
    "List two prime numbers.", "How do plants make food?", "Give a synonym of happy.", "What is water made of?",
    "Tell me a joke.", "How many days has a week?", "Explain gravity in one sentence, please.", "Count to five.",
]  # fmt: skip


def test_greedy_answers_to_sixteen_chats_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    folder = os.environ["DPH_CHECKPOINT"]
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    prompts = [tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    asked = [Prompt(index, tokens=tokens) for index, tokens in enumerate(prompts)]
    settings = SamplingSettings((0, 0, 0), tokenizer.end_ids, 64, temperature=0.0, max_rows=8)
    ours = sample(model, asked, [[0]] * len(asked), settings)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, got in zip(prompts, ours, strict=True):
        with torch.inference_mode():
            theirs = oracle.generate(
                torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=list(tokenizer.end_ids)
            )
        assert got.tokens == theirs[0, len(prompt) :].tolist()
    batch = collate(ours, "cpu")
    with torch.no_grad():
        scored = token_logprobs(model, batch, 1.0).logprobs
    torch.testing.assert_close(scored, batch.logprobs, atol=2e-4, rtol=0)


def test_training_in_bf16_is_as_exact_by_the_plain_form_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It rounds products of queries and keys to bf16, as the fused kernel does not; other roundings are larger."""
    folder = os.environ["DPH_CHECKPOINT"]
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    prompts = [tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    asked = [Prompt(index, tokens=tokens) for index, tokens in enumerate(prompts)]
    settings = SamplingSettings((0, 0, 0), tokenizer.end_ids, 64, temperature=1.0, max_rows=16)
    batch = collate(sample(model, asked, [[0]] * len(asked), settings), "cpu")
    gaps = []
    with torch.no_grad():
        exact = token_logprobs(model, batch, 1.0).logprobs
        for longest in (attention.SHORT, 0):
            monkeypatch.setattr(attention, "SHORT", longest)
            with torch.autocast("cpu", torch.bfloat16):
                found = token_logprobs(model, batch, 1.0).logprobs
            gaps.append((found - exact).abs()[batch.mask].mean().item())
    print(f"mean distance from fp32's log-probabilities: plain {gaps[0]:.3e}, fused {gaps[1]:.3e}")
    assert 0 < gaps[0] < 1.1 * gaps[1]
