"""The budget against the bytes that are alive: three shapes of a model, with the settings that change what is kept."""

from dataclasses import replace

import pytest
import torch

from benchmarks.measure import LiveBytes
from dph import scoring
from dph.adapter import add_adapters
from dph.attention import KVCache
from dph.budget import Plan, fits, held, plan_of, report, sampling, sizes_of, smallest_change, update
from dph.config import load_config
from dph.graphs import RecordedSteps
from dph.model import Decoder
from dph.model_config import ModelConfig
from dph.rollouts import Rollout, collate
from dph.sampler import RECORDED_COLUMNS, cache_columns
from dph.scoring import token_logprobs

TOKENS, PROMPT, ANSWER = 1024, 28, 100
KEYS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
KEYS += ["num_key_value_heads", "tie_word_embeddings"]
SHAPES = {
    "qwen2": (4096, 256, 1024, 4, 4, 2, True),
    "llama": (8192, 320, 896, 6, 5, 5, False),
    "qwen3": (2048, 512, 1536, 3, 8, 2, False),
}
SETTINGS = {  # model.dtype, run.dtype, train.recompute, model.adapter_rank
    "fp32": ("fp32", "fp32", False, 0),
    "autocast": ("fp32", "bf16", False, 0),
    "autocast, recompute": ("fp32", "bf16", True, 0),
    "bf16": ("bf16", "bf16", False, 0),
    "bf16, recompute": ("bf16", "bf16", True, 0),
    "adapters": ("fp32", "bf16", False, 8),
    "adapters on bf16": ("bf16", "bf16", True, 8),
}


def shape(kind: str) -> ModelConfig:
    return ModelConfig.from_dict({"model_type": kind, **dict(zip(KEYS, SHAPES[kind], strict=True))})


def plan(setting: str) -> Plan:
    dtype, run_dtype, recompute, rank = SETTINGS[setting]
    settings = [f"--model.dtype={dtype}", f"--run.dtype={run_dtype}", f"--model.adapter_rank={rank}"]
    settings += [f"--train.recompute={recompute}".lower(), f"--train.microbatch_tokens={TOKENS}"]
    settings += ["--sampling.max_rows=8", f"--sampling.max_new_tokens={ANSWER}", f"--data.max_prompt_tokens={PROMPT}"]
    return plan_of(load_config(None, settings))


def model(kind: str, setting: str) -> Decoder:
    dtype, _, recompute, rank = SETTINGS[setting]
    made = Decoder(shape(kind)).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    made.recompute = recompute
    if rank:
        add_adapters(made, rank, 32.0, "base")
    return made


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_an_update_takes_is_foretold_within_15_percent(kind: str, setting: str) -> None:
    made, foretold = model(kind, setting), update(sizes_of(shape(kind)), plan(setting))
    for weight in made.parameters():
        if weight.requires_grad:
            weight.grad_dtype = torch.float32
    rows = [Rollout(i, 0, [i + 1] * PROMPT, [2] * ANSWER, [0.0] * ANSWER, True) for i in range(8)]
    batch = collate(rows, torch.device("cpu"))
    _, run_dtype, _, _ = SETTINGS[setting]
    with LiveBytes() as live:
        for _ in range(2):  # the second micro-batch finds the gradients of the first
            with torch.autocast("cpu", torch.bfloat16, enabled=run_dtype == "bf16"):
                loss = token_logprobs(made, batch, 1.0).logprobs.mean()
            loss.backward()  # type: ignore[no-untyped-call]
    assert sum(foretold.values()) == pytest.approx(live.most, rel=0.15)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_always_held_is_counted_to_the_byte(kind: str, setting: str) -> None:
    made = model(kind, setting)
    trained = [weight for weight in made.parameters() if weight.requires_grad]
    found = held(sizes_of(shape(kind)), plan(setting))
    assert found["weights"] == sum(weight.nbytes for weight in made.parameters())
    halves = sum(2 * weight.numel() for weight in trained if weight.dtype == torch.bfloat16)
    assert found["moments"] == sum(8 * weight.numel() for weight in trained) + halves


def test_the_cache_is_counted_to_the_byte() -> None:
    counted = sampling(sizes_of(shape("qwen2")), plan("fp32"))["KV cache"]
    cache = KVCache.empty(shape("qwen2"), 8, cache_columns(PROMPT + ANSWER), torch.float32, "cpu")
    a_layer = cache.keys[0].nbytes  # copied when the cache is laid out anew
    assert counted == cache.memory.nbytes + a_layer


def test_recorded_steps_take_wider_columns_and_a_place_for_their_logits() -> None:
    size, plain = sizes_of(shape("qwen2")), plan("fp32")
    recorded = sampling(size, replace(plain, graphs=True))
    cache = KVCache.empty(shape("qwen2"), 8, cache_columns(PROMPT + ANSWER, RECORDED_COLUMNS), torch.float32, "cpu")
    assert recorded["KV cache"] == cache.memory.nbytes + cache.keys[0].nbytes
    steps = RecordedSteps(Decoder(shape("qwen2")), cache)
    with torch.inference_mode():
        for rows in (8, 4):  # fewer rows take no memory of their own
            cache.keys, cache.values = cache.keys[:, :rows], cache.values[:, :rows]
            cache.starts = cache.starts[:rows]
            steps.logits(torch.ones(rows, 1, dtype=torch.int64))
    assert len({each.logits.untyped_storage().data_ptr() for each in steps.recordings.values()}) == 1
    assert recorded["recorded logits"] == steps.recordings[8, cache.keys.shape[3]].logits.untyped_storage().nbytes()
    assert sampling(size, plain)["recorded logits"] == 0


@pytest.mark.parametrize(("dtype", "bytes_a_logit"), [(torch.float32, 4), (torch.bfloat16, 6)])
def test_the_heads_gradient_holds_one_chunk_at_a_time(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bytes_a_logit: int
) -> None:
    vocabulary, positions, chunks = 4096, 256, 4
    monkeypatch.setattr(scoring, "LOGIT_FLOATS", vocabulary * positions // chunks)
    states = torch.randn(positions, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, 8, dtype=dtype)
    ids = torch.zeros(positions, 1, dtype=torch.int64)
    logprobs, *_ = scoring._Head.apply(states, weight, ids, False)  # type: ignore[no-untyped-call]
    with LiveBytes() as live:
        logprobs.sum().backward()
    assert live.most < 1.2 * bytes_a_logit * vocabulary * positions / chunks


def test_a_smaller_card_asks_for_more_settings() -> None:
    size = sizes_of(shape("llama"))
    whole = plan("fp32")
    assert smallest_change(size, whole, 1.0) == ""
    changes = [smallest_change(size, whole, memory) for memory in (0.36, 0.28)]
    assert None not in changes
    assert [len(change or "") for change in changes] == sorted({len(change or "") for change in changes})
    assert smallest_change(size, whole, 0.001) is None
    assert not fits(size, whole, 0.1)


def test_shards_divide_what_is_held() -> None:
    config = load_config(None, ["--train.shard=full"])
    size = sizes_of(shape("llama"))
    alone, shared = held(size, plan_of(config, 1)), held(size, plan_of(config, 4))
    assert shared["weights"] == alone["weights"] / 4
    assert shared["moments"] == alone["moments"] / 4
    assert "GB a process" in report(shape("llama"), config, 24, 4)
