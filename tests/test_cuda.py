"""What must hold on a GPU: the CPU's results, no wait for the device in a decode step, and a step in bf16."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dph.attention import KVCache
from dph.cli import load_policy, open_task, set_up
from dph.config import load_config
from dph.miniature_base import Recipe, build_base
from dph.prompts import tokenize
from dph.rollouts import collate
from dph.sampler import SamplingSettings, _Job, _Slots, sample
from dph.scoring import token_logprobs
from dph.tasks.base import Prompt
from dph.trainer import Data, Trainer
from tests.helpers import rollout, tiny_model

pytestmark = pytest.mark.cuda
PROMPTS = [Prompt(i, tokens=[1 + i, 2, 3][: 1 + i % 3]) for i in range(5)]


def test_tokens_and_scores_are_those_of_the_cpu() -> None:
    settings = SamplingSettings((0,), (5,), 20, max_rows=8)
    models = (tiny_model(dtype=torch.float64).to(device) for device in ("cuda", "cpu"))
    there, here = (sample(model, PROMPTS, [range(4)] * 5, settings) for model in models)
    assert [r.tokens for r in there] == [r.tokens for r in here]
    rows = [rollout([1, 2, 3], [4, 5]), rollout([6], [7, 8, 9, 10])]
    scores = [token_logprobs(tiny_model().to(d), collate(rows, d), 1.0).logprobs.cpu() for d in ("cuda", "cpu")]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=1e-4)


def test_a_decode_step_never_waits_for_the_gpu() -> None:
    slots = _Slots(tiny_model().to("cuda"), 8, 40, SamplingSettings((0,), (5,), 20, max_rows=8))
    slots.admit(list(range(8)), [_Job(prompt, n, more=n < 3) for prompt in PROMPTS[:2] for n in range(4)])
    slots.step()  # constants are made at the first one
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            slots.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_recorded_steps_write_what_plain_ones_do_and_never_wait() -> None:
    settings = SamplingSettings((0,), (5,), 200, max_rows=8)
    model = tiny_model(dtype=torch.float64).to("cuda")
    plain, recorded = (sample(model, PROMPTS, [range(4)] * 5, replace(settings, graphs=on)) for on in (False, True))
    assert [r.tokens for r in plain] == [r.tokens for r in recorded]
    slots = _Slots(model, 8, 40, replace(settings, max_new_tokens=20, graphs=True))
    slots.admit(list(range(8)), [_Job(prompt, n, more=n < 3) for prompt in PROMPTS[:2] for n in range(4)])
    slots.step()  # is recorded
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_layers_decode_the_same_tokens() -> None:
    plain, compiled = tiny_model().to("cuda"), tiny_model().to("cuda")
    compiled.compile_layers()
    with torch.inference_mode():
        caches = [KVCache.empty(plain.config, 2, 16, torch.float32, "cuda") for _ in range(2)]
        tokens = torch.tensor([[1, 2, 3], [4, 5, 6]], device="cuda")
        for model, cache in zip((plain, compiled), caches, strict=True):
            model(tokens, cache)
        last = torch.tensor([[7], [8]], device="cuda")
        hidden = [model(last, cache) for model, cache in zip((plain, compiled), caches, strict=True)]
    torch.testing.assert_close(*hidden, atol=1e-4, rtol=1e-4)


def test_a_step_trains_in_bf16(tmp_path: Path) -> None:
    base = build_base(tmp_path, 0, progress=False, recipe=Recipe(pairs=500, steps=4))
    sizes = {"model.path": str(base), "run.folder": str(tmp_path), "run.dtype": "bf16", "train.prompts_per_step": 4}
    config = load_config("configs/miniature_grpo.toml", [f"--{key}={json.dumps(x)}" for key, x in sizes.items()])
    device, task = set_up(config), open_task(config.data.train, config)
    policy = load_policy(config.model.path, config, device)
    trainer = Trainer(config, policy, Data(tokenize(task, policy.tokenizer, config)))
    metrics = trainer.train_step()
    assert metrics["sampled_tokens"] > 0
    assert all(weight.isfinite().all() for weight in policy.model.parameters())
