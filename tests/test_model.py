"""The decoder against transformers (logits, gradients, RoPE), its cache against no cache, its files both ways."""

import copy
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from dph.attention import KVCache, Window
from dph.errors import UserError
from dph.model import Decoder
from dph.model_config import SIZES, ModelConfig, rope_frequencies
from dph.model_folder import load_model, save_model
from tests.helpers import initialize

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, own ramp": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
}


def oracle(folder: Path, kind: str = "llama", shard: str = "50GB", **changes: Any) -> Any:
    """A transformers model with lively weights (biases and norms too), saved into the folder."""
    torch.manual_seed(0)
    theirs = CLASSES[kind][1](CLASSES[kind][0](**{**SMALL, **changes}))
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, 1.5 / math.sqrt(weight.shape[1]))
            else:
                weight.normal_(1.0 if "norm" in name else 0.0, 0.3)
    theirs.save_pretrained(folder, max_shard_size=shard)
    return theirs.eval()


def edit_config(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    path = folder / "config.json"
    data = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(data | changes))


def edit_weights(folder: Path, drop: tuple[str, ...] = (), **changes: torch.Tensor) -> None:
    """Drops and replaces tensors; a keyword's double underscores stand for dots."""
    path = folder / "model.safetensors"
    weights = {name: weight.clone() for name, weight in load_file(path).items() if name not in drop}
    save_file(weights | {name.replace("__", "."): weight for name, weight in changes.items()}, path)


def tokens(rows: int = 3, length: int = 40, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    return model.logits(model(ids))


def assert_same_logits(ours: Decoder, theirs: Any, ids: torch.Tensor, tolerance: float = 1e-4) -> None:
    with torch.no_grad():
        expected = theirs(ids).logits
    assert expected.std() > 0.5  # lively enough to tell models apart
    torch.testing.assert_close(logits(ours, ids), expected, atol=tolerance, rtol=0)


# Logits and gradients


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 16, "num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4, "num_attention_heads": 4}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    theirs = oracle(tmp_path, kind, **changes)
    assert_same_logits(load_model(tmp_path), theirs, tokens())


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_logits_are_those_of_transformers_with_every_rope_type(tmp_path: Path, rope: dict[str, Any]) -> None:
    theirs = oracle(tmp_path, rope_parameters={"rope_theta": 5000.0, **rope})
    assert_same_logits(load_model(tmp_path), theirs, tokens(length=60))


@pytest.mark.parametrize("kind", CLASSES)
def test_gradients_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    theirs, ours, ids = oracle(tmp_path, kind, head_dim=8), load_model(tmp_path), tokens()
    F.cross_entropy(theirs(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    F.cross_entropy(ours.logits(ours(ids))[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name].grad, atol=1e-5, rtol=1e-4, msg=name)


def test_padding_on_the_right_changes_nothing_before_it(tmp_path: Path) -> None:
    oracle(tmp_path)
    model, ids = load_model(tmp_path, torch.float64), tokens(2, 12)
    padded = torch.cat((ids, torch.zeros(2, 5, dtype=torch.int64)), 1)
    torch.testing.assert_close(logits(model, padded)[:, :12], logits(model, ids), atol=1e-10, rtol=0)


def test_qwen2_has_biases_on_q_k_v_and_llama_has_none(tmp_path: Path) -> None:
    def biases(kind: str, **extra: Any) -> set[str]:
        model = Decoder(ModelConfig.from_dict({**SMALL, "model_type": kind, **extra}))
        return {name.split(".")[-2] for name, _ in model.named_parameters() if name.endswith("bias")}

    assert biases("qwen2") == biases("qwen2", attention_bias=False) == {"q_proj", "k_proj", "v_proj"}
    assert biases("llama") == biases("qwen3") == set()


def test_head_dim_may_be_absent_or_null() -> None:
    config = {**SMALL, "model_type": "llama"}
    assert ModelConfig.from_dict(config).head_dim == ModelConfig.from_dict({**config, "head_dim": None}).head_dim == 8
    assert ModelConfig.from_dict({**config, "head_dim": 16}).head_dim == 16


# RoPE


def llama_with(rope: dict[str, Any], head_dim: int) -> ModelConfig:
    return ModelConfig.from_dict({**SMALL, "model_type": "llama", "head_dim": head_dim, **rope})


@pytest.mark.parametrize(
    ("head_dim", "factor", "expected"),
    [
        (64, 32.0, {14: 0.003211446, 15: 0.001290548, 16: 0.000429557, 17: 9.708288e-5, 31: 9.418307e-8}),
        (128, 8.0, {28: 0.003211446, 29: 0.002166571, 32: 0.000524846, 63: 3.068926e-7}),
    ],
)
def test_llama3_frequencies_to_the_digit(head_dim: int, factor: float, expected: dict[int, float]) -> None:
    scaling = {**LLAMA3, "factor": factor, "original_max_position_embeddings": 8192}
    frequencies, scale = rope_frequencies(llama_with({"rope_theta": 5e5, "rope_scaling": scaling}, head_dim))
    assert scale == 1.0
    for channel, value in expected.items():
        assert frequencies[channel].item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_three_spellings_give_one_table_and_it_is_transformers(rope: dict[str, Any]) -> None:
    older = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    spellings: list[dict[str, Any]] = [
        {"rope_theta": 5e5, "rope_scaling": rope},
        {"rope_theta": 5e5, "rope_scaling": older},
        {"rope_parameters": {**rope, "rope_theta": 5e5}},
    ]
    config = transformers.LlamaConfig(**{**SMALL, "head_dim": 64}, rope_parameters={**rope, "rope_theta": 5e5})
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    for spelling in spellings:
        frequencies, scale = rope_frequencies(llama_with(spelling, 64))
        torch.testing.assert_close(frequencies, theirs.inv_freq, atol=0, rtol=1e-6)
        assert scale == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_the_table_stays_float32_when_the_model_is_cast(tmp_path: Path) -> None:
    oracle(tmp_path)
    model = load_model(tmp_path).to(torch.bfloat16)
    logits(model, tokens())
    assert model.frequencies.dtype == torch.float32
    cos, _ = model.angles(torch.tensor([1000]), torch.float32)
    assert cos[0, 0].item() == pytest.approx(math.cos(1000.0), abs=1e-6)


# The cache


def prefill(model: Decoder, ids: torch.Tensor, columns: int) -> tuple[KVCache, torch.Tensor]:
    cache = KVCache.empty(model.config, len(ids), columns, model.model.norm.weight.dtype, "cpu")
    with torch.inference_mode():
        return cache, model(ids, cache)


def place(cache: KVCache, row: int, source: KVCache, length: int) -> None:
    """Puts a prompt's keys and values where they end at the shared column."""
    start = cache.column - length
    cache.keys[:, row, :, start : cache.column] = source.keys[:, 0, :, :length]
    cache.values[:, row, :, start : cache.column] = source.values[:, 0, :, :length]
    cache.starts[row] = start


def test_decodings_plain_attention_is_the_fused_kernels() -> None:
    q, keys, values = (torch.randn(4, 2, size, 8, dtype=torch.float64) for size in (3, 32, 32))
    starts, columns = torch.tensor([0, 5, 20, 30]), torch.arange(32)
    hidden = (columns < starts[:, None]) | (columns > 30)
    mask = torch.where(hidden[:, None, None], -torch.inf, 0.0).double()
    plain = Window(keys, values, columns[:1], mask)._read(q, mask)
    torch.testing.assert_close(plain, F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_rows_that_start_apart_decode_as_if_alone(
    tmp_path: Path, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Prompts of 3 and 9 tokens, greedy; at step 8 the first row ends and a prompt of 5 takes its place."""
    oracle(tmp_path, kind, head_dim=8)
    model = load_model(tmp_path, dtype)
    texts = [tokens(1, 3, seed=3), tokens(1, 9, seed=9)]
    cache = KVCache.empty(model.config, 2, 40, dtype, "cpu")
    cache.keys.fill_(1e3)  # what lies before a row's start must not be seen
    cache.values.fill_(1e3)
    cache.column = 12
    for row, text in enumerate(texts):
        place(cache, row, prefill(model, text, 9)[0], text.shape[1])
    assert cache.starts.tolist() == [9, 3]
    for step in range(16):
        if step == 8:
            texts[0] = tokens(1, 5, seed=5)
            place(cache, 0, prefill(model, texts[0], 5)[0], 5)
        alone = [logits(model, text)[0, -1] for text in texts]
        texts = [torch.cat((text, row.argmax()[None, None]), 1) for text, row in zip(texts, alone, strict=True)]
        with torch.inference_mode():
            together = model.logits(model(torch.cat([text[:, -1:] for text in texts]), cache))[:, 0]
        expected = torch.stack([logits(model, text)[0, -1] for text in texts])
        torch.testing.assert_close(together, expected, atol=tolerance, rtol=0)
        assert together.argmax(-1).tolist() == expected.argmax(-1).tolist()
    assert cache.column == 28


def test_prefill_into_a_cache_gives_the_same_hidden_states_and_advances_it(tmp_path: Path) -> None:
    oracle(tmp_path)
    model, ids = load_model(tmp_path), tokens()
    cache, hidden = prefill(model, ids, 50)
    with torch.inference_mode():
        assert torch.equal(hidden, model(ids))
    assert cache.column == 40


def test_a_looser_first_column_changes_nothing(tmp_path: Path) -> None:
    oracle(tmp_path)
    model = load_model(tmp_path, torch.float64)
    cache, _ = prefill(model, tokens(2, 10), 12)
    cache.starts = torch.tensor([4, 6])
    outs = []
    for first in (0, 3, 4):
        again = copy.deepcopy(cache)
        again.first = first
        with torch.inference_mode():
            outs.append(model(tokens(2, 1), again))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-12, rtol=0)
    torch.testing.assert_close(outs[0], outs[2], atol=1e-12, rtol=0)


def test_wrong_use_of_a_cache_is_an_assertion(tmp_path: Path) -> None:
    oracle(tmp_path)
    model = load_model(tmp_path)
    cache, _ = prefill(model, tokens(2, 10), 11)
    with pytest.raises(AssertionError, match="no gradients"):
        model(tokens(2, 1), cache)
    with torch.no_grad():
        with pytest.raises(AssertionError, match="one token a row"):
            model(tokens(2, 2), cache)
        model(tokens(2, 1), cache)
        with pytest.raises(AssertionError, match="11 columns are full"):
            model(tokens(2, 1), cache)


# bfloat16


@pytest.mark.parametrize("kind", CLASSES)
def test_bf16_weights_are_as_close_to_fp32_as_transformers_are(tmp_path: Path, kind: str) -> None:
    theirs, ids = oracle(tmp_path, kind, head_dim=8), tokens()
    model = load_model(tmp_path, torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        exact = theirs(ids).logits
        their_error = (theirs.to(torch.bfloat16)(ids).logits - exact).abs().mean()
    our_error = (logits(model, ids) - exact).abs().mean()
    assert our_error < 1.2 * their_error


@pytest.mark.parametrize("kind", CLASSES)
def test_autocast_trains_and_decodes_over_fp32_weights(tmp_path: Path, kind: str) -> None:
    theirs, ids = oracle(tmp_path, kind, head_dim=8), tokens()
    model = load_model(tmp_path)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")  # a mixed-type norm warns that it falls off the fast path
        out = model.logits(model(ids))
        F.cross_entropy(out[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        for dtype in (torch.float32, torch.bfloat16):
            cache = KVCache.empty(model.config, 3, 40, dtype, "cpu")
            with torch.inference_mode():
                model(ids[:, :-1], cache)
                last = model.logits(model(ids[:, -1:], cache))
            torch.testing.assert_close(last[:, 0], out[:, -1].detach(), atol=0.3, rtol=0)
    with torch.no_grad():
        assert (out - theirs(ids).logits).abs().mean() < 0.05
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.dtype == torch.float32
        assert weight.grad.isfinite().all(), name


# Files


@pytest.mark.parametrize("kind", CLASSES)
def test_transformers_loads_what_we_save(tmp_path: Path, kind: str) -> None:
    theirs = oracle(tmp_path / "theirs", kind, head_dim=8, rope_parameters={"rope_theta": 5000.0, **LLAMA3})
    save_model(load_model(tmp_path / "theirs"), tmp_path / "ours")
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, theirs(tokens()).logits)


def test_config_comes_back_as_it_was_read(tmp_path: Path) -> None:
    oracle(tmp_path / "theirs")
    edit_config(
        tmp_path / "theirs", ("rope_parameters",), rope_theta=5000.0, rope_scaling=LLAMA3, head_dim=None, mine=1
    )
    save_model(load_model(tmp_path / "theirs"), tmp_path / "ours")
    read, written = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    assert written == read
    assert ModelConfig.from_dict(written) == ModelConfig.from_dict(read)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_names_the_type_that_was_written(tmp_path: Path, key: str) -> None:
    oracle(tmp_path / "theirs")
    edit_config(tmp_path / "theirs", ("dtype",), **{key: "float32"})
    model = load_model(tmp_path / "theirs")
    save_model(model, tmp_path / "ours", torch.bfloat16)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert "torch_dtype" not in written
    assert {w.dtype for w in load_file(tmp_path / "ours" / "model.safetensors").values()} == {torch.bfloat16}
    assert model.model.norm.weight.dtype == torch.float32  # saving leaves the model alone


@pytest.mark.parametrize("kind", CLASSES)
def test_shards_are_one_model(tmp_path: Path, kind: str) -> None:
    theirs = oracle(tmp_path, kind, shard="20KB", head_dim=8)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_logits(load_model(tmp_path), theirs, tokens())


def test_training_does_not_touch_the_file_it_was_loaded_from(tmp_path: Path) -> None:
    oracle(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    initialize(load_model(tmp_path), 1)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_rope_table_in_an_old_checkpoint_is_passed_over(tmp_path: Path) -> None:
    theirs = oracle(tmp_path)
    edit_weights(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert_same_logits(load_model(tmp_path), theirs, tokens())


# Tied embeddings


def test_tied_stays_tied_after_a_step_and_a_save_and_load(tmp_path: Path) -> None:
    oracle(tmp_path / "theirs", tie_word_embeddings=True)
    model = load_model(tmp_path / "theirs")
    assert sum(weight.shape == (64, 32) for weight in model.parameters()) == 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.logits(model(tokens())).logsumexp(-1).mean().backward()
    optimizer.step()
    save_model(model, tmp_path / "ours")
    assert "lm_head.weight" not in load_file(tmp_path / "ours" / "model.safetensors")
    again, theirs = (
        load_model(tmp_path / "ours"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours"),
    )
    assert theirs.lm_head.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))
    assert_same_logits(again, theirs, tokens())


def test_tied_with_the_head_stored_twice_loads_if_both_are_the_same(tmp_path: Path) -> None:
    theirs = oracle(tmp_path, tie_word_embeddings=True)
    weight = theirs.model.embed_tokens.weight.detach()
    edit_weights(tmp_path, lm_head__weight=weight.clone())
    assert_same_logits(load_model(tmp_path), theirs, tokens())
    edit_weights(tmp_path, lm_head__weight=weight + 1)
    with pytest.raises(UserError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        load_model(tmp_path)


def test_untied_without_a_head_is_an_error_never_random_weights(tmp_path: Path) -> None:
    oracle(tmp_path)
    edit_weights(tmp_path, ("lm_head.weight",))
    with pytest.raises(UserError, match=r'Missing key.*: "lm_head\.weight"\.$'):
        load_model(tmp_path)


# Mistakes


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"model_type": None}, "model_type is None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is .*Classification"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config names .*bits"),
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*sliding_attention"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type .*longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type .*dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_type .*full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": "4"}}, "high_freq_factor is '4'"),
        ({"rope_scaling": {**YARN, "beta_fast": "32"}}, "beta_fast is '32'"),
        ({"rope_scaling": {**YARN, "factor": None}}, "factor is None"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": None}}, "original_max_position.* is None"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate is False"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.5}}, "attention_factor is 1.5"),
        ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}}, "mscale is 1.0"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 8}, "original_max_position_embeddings is 8"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "64"}, "vocab_size is '64'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 must divide 4"),
        ({"head_dim": 7}, "head_dim 7 be even"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"hidden_size": 10**12}, "no size of a model is above 100,000,000"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        ModelConfig.from_dict({**SMALL, "model_type": "llama", **change})
    assert "\n" not in str(caught.value)


def test_settings_that_change_nothing_are_not_refused() -> None:
    idle = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1, "attention_dropout": 0.0}
    rope = {"rope_scaling": None, "rope_theta": 1e6, "layer_types": ["full_attention"] * 2, "hidden_act": "silu"}
    config = ModelConfig.from_dict({**SMALL, "model_type": "qwen2", **idle, **rope, "quantization_config": None})
    assert config.rope["rope_theta"] == 1e6
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    "key", [*SIZES, "rms_norm_eps", "model_type", "architectures", "head_dim", "rope_scaling", "layer_types"]
)
def test_nonsense_in_any_key_is_a_user_error(key: str) -> None:
    for nonsense in (True, -1, "x", [1], {"a": {"b": 1}}):
        with pytest.raises(UserError, match=r"^config\.json: "):
            ModelConfig.from_dict({**SMALL, "model_type": "llama", key: nonsense})


def damage(folder: Path, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    index, shards = folder / "model.safetensors.index.json", sorted(folder.glob("model-*"))
    ones = torch.ones
    actions = {
        "no folder": lambda: (
            weights.unlink(),
            config.unlink(),
            (folder / "generation_config.json").unlink(),
            folder.rmdir(),
        ),
        "no config": config.unlink,
        "broken config": lambda: config.write_text("{"),
        "config is a list": lambda: config.write_text("[]"),
        "unsupported config": lambda: edit_config(folder, model_type="gpt2"),
        "no weights": weights.unlink,
        "pickle": lambda: weights.rename(folder / "pytorch_model.bin"),
        "truncated": lambda: weights.write_bytes(weights.read_bytes()[:-100]),
        "missing key": lambda: edit_weights(folder, ("model.norm.weight",)),
        "unknown key": lambda: edit_weights(folder, extra__weight=ones(1)),
        "wrong shape": lambda: edit_weights(folder, model__norm__weight=ones(31)),
        "vocabulary": lambda: edit_config(folder, vocab_size=65),
        "NaN": lambda: edit_weights(folder, model__norm__weight=torch.full((32,), torch.nan)),
        "infinite": lambda: edit_weights(folder, model__norm__weight=torch.full((32,), torch.inf)),
        "missing shard": lambda: shards[1].unlink(),
        "broken index": lambda: index.write_text("nope"),
        "empty index": lambda: index.write_text("{}"),
    }
    actions[how]()


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("no folder", r"config\.json: no such file"),
        ("no config", r"config\.json: no such file"),
        ("broken config", r"config\.json: not JSON"),
        ("config is a list", r"config\.json: holds a list"),
        ("unsupported config", r"/config\.json: model_type is 'gpt2'"),
        ("no weights", r"model\.safetensors: not readable"),
        ("pickle", r"instead of model\.safetensors it holds pytorch_model\.bin"),
        ("truncated", r"model\.safetensors: not readable"),
        ("missing key", r'Missing key.*: "model\.norm\.weight"\.$'),
        ("unknown key", r'Unexpected key.*: "extra\.weight"\.$'),
        ("wrong shape", r"model\.norm\.weight: .*\(\[31\]\) from checkpoint, .*\(\[32\]\)"),
        ("vocabulary", r"lm_head\.weight: .*\(\[64, 32\]\) from checkpoint, .*\(\[65, 32\]\)"),
        ("NaN", r"/model\.safetensors: model\.norm\.weight holds NaN"),
        ("infinite", r"model\.norm\.weight holds NaN or infinite"),
        ("missing shard", r"model-00002-of-\d+\.safetensors: not readable .*: No such file"),
        ("broken index", r"index\.json: not JSON"),
        ("empty index", r"weight_map must name a file of this folder"),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_the_damage(tmp_path: Path, how: str, named: str) -> None:
    folder = tmp_path / "model"
    oracle(folder, shard="20KB" if how in ("missing shard", "broken index", "empty index") else "50GB")
    damage(folder, how)
    with pytest.raises(UserError, match=named) as caught:
        load_model(folder)
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)


def test_many_missing_keys_are_cut_short(tmp_path: Path) -> None:
    oracle(tmp_path)
    edit_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(UserError, match=r"Missing key.*model\.layers\.2\.self_attn\.q_proj\.weight") as caught:
        load_model(tmp_path)
    assert len(str(caught.value)) < 502 + len(str(tmp_path))


# A real checkpoint


@pytest.mark.checkpoint
def test_logits_of_a_real_checkpoint_are_those_of_transformers() -> None:
    folder = Path(os.environ["DPH_CHECKPOINT"])
    theirs, ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load_model(folder)
    ids = torch.arange(100, 164)[None] * 7 % ours.config.vocab_size
    assert_same_logits(ours, theirs, ids)
