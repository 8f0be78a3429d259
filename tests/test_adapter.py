"""LoRA: its gradient is the full one's projection, pi_ref is the policy without it, and its files are PEFT's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dph.adapter import AdaptedLinear, adapters, add_adapters, as_reference, check_rank, merged, merged_weights
from dph.adapter_folder import load_merged, save_adapter
from dph.answering import score_rollouts
from dph.checkpoint import newest_checkpoint
from dph.cli import load_policy
from dph.errors import UserError
from dph.made_from import model_hash
from dph.merge import main as merge_command
from dph.merge import merge
from dph.metrics import Meter
from dph.model import Decoder
from dph.model_folder import load_model, save_model
from dph.prompts import PromptSet
from dph.rollouts import Rollout, collate
from dph.scoring import token_logprobs
from dph.tokenizer import load_tokenizer
from dph.trainer import Trainer
from tests.helpers import rollout, tiny_folder, tiny_model
from tests.test_trainer import JS, METHODS, comparable, keep_gradients, moments, rehearse, trainer, weights

ROOT = Path(__file__).parent.parent
RANK = 4
ADAPTER = (f"--model.adapter_rank={RANK}", "--optim.lr=1e-2")
RKL = METHODS["rkl_k3"]
BOTH = [*JS, "--loss.samples=both"]


def adapted(rank: int = RANK, dtype: torch.dtype = torch.float64, zero: bool = False) -> Decoder:
    """A tiny model with adapters; B random, or zero as at the start."""
    model = tiny_model(dtype=dtype)
    add_adapters(model, rank, 8.0, "base")
    if not zero:
        randomise(model)
    return model


@torch.no_grad()
def randomise(model: Decoder) -> None:
    generator = torch.Generator().manual_seed(1)
    for layer in adapters(model).values():
        layer.lora_B.weight.normal_(0, 0.05, generator=generator)


def some_rollouts() -> list[Rollout]:
    return [rollout([1, 5, 9], [4, 7, 11, 2]), rollout([3, 8], [6, 2], 1)]


def scores(model: Decoder) -> Tensor:
    return token_logprobs(model, collate(some_rollouts(), "cpu"), 1.0).logprobs


def same_weights(model: Decoder, plain: Decoder) -> bool:
    """Whether a model, merged, has a plain one's weights to the bit."""
    theirs = dict(plain.named_parameters())
    return all(torch.equal(weight, theirs[name]) for name, weight in merged_weights(model))


# ---- the mathematics ---------------------------------------------------------------------------------------------


def test_one_layer_is_the_papers_formula_by_hand() -> None:
    linear = torch.nn.Linear(2, 2, dtype=torch.float64)
    layer = AdaptedLinear(linear, rank=1, alpha=3.0)  # s = 3
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        linear.bias.copy_(torch.tensor([0.5, -0.5]))
        layer.lora_A.weight.copy_(torch.tensor([[1.0, -1.0]]))
        layer.lora_B.weight.copy_(torch.tensor([[2.0], [1.0]]))
    x = torch.tensor([3.0, 1.0], dtype=torch.float64)  # A x = 2, s B A x = (12, 6); W x + b = (5.5, 12.5)
    assert layer(x).tolist() == [17.5, 18.5]
    assert layer.merged().tolist() == [[7.0, -4.0], [6.0, 1.0]]


def test_the_gradients_of_a_and_b_are_projections_of_full_trainings() -> None:
    model = adapted()
    scores(model).sum().backward()
    full = merged(model, torch.float64).requires_grad_(True)
    scores(full).sum().backward()
    full_gradients = {name: weight.grad for name, weight in full.named_parameters()}
    for name, layer in adapters(model).items():
        g = full_gradients[f"{name}.weight"]  # dL/dW
        a, b = layer.lora_A.weight, layer.lora_B.weight
        torch.testing.assert_close(b.grad, layer.scale * g @ a.T)
        torch.testing.assert_close(a.grad, layer.scale * b.T @ g)


def test_all_linear_layers_of_the_layers_are_adapted_and_nothing_else_is_trained() -> None:
    model = adapted()
    places = {name.rpartition(".")[2] for name in adapters(model)}
    assert places == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(adapters(model)) == 7 * 2
    scores(model).sum().backward()
    with_gradient = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if ".lora_" in name}


def test_the_merged_model_computes_the_same() -> None:
    model = adapted()
    torch.testing.assert_close(scores(merged(model, torch.float64)), scores(model))
    assert not torch.equal(scores(model), scores(tiny_model(dtype=torch.float64)))


def test_merged_weights_have_the_names_and_order_of_a_plain_model() -> None:
    plain = tiny_model()
    assert [name for name, _ in merged_weights(adapted())] == [name for name, _ in plain.named_parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_before_the_first_step_the_policy_is_its_base_to_the_bit(dtype: torch.dtype) -> None:
    base = tiny_model(dtype=dtype)
    assert torch.equal(scores(adapted(dtype=dtype, zero=True)), scores(base))


def test_within_the_block_the_model_is_its_base_and_afterwards_itself_again() -> None:
    model = adapted()
    before = scores(model)
    with as_reference(model) as pi_ref:
        assert torch.equal(scores(pi_ref), scores(tiny_model(dtype=torch.float64)))
        assert same_weights(model, tiny_model(dtype=torch.float64))
    assert torch.equal(scores(model), before)


def test_an_error_within_the_block_leaves_the_adapters_on() -> None:
    model = adapted()
    with pytest.raises(KeyError), as_reference(model):
        raise KeyError
    assert all(layer.on for layer in adapters(model).values())


def test_a_base_in_bf16_keeps_its_type_and_has_adapters_in_fp32() -> None:
    model = adapted(dtype=torch.bfloat16)
    kinds = {(".lora_" in name, weight.dtype) for name, weight in model.named_parameters()}
    assert kinds == {(False, torch.bfloat16), (True, torch.float32)}
    with torch.autocast("cpu", torch.bfloat16):
        loss = scores(model).sum()
    loss.backward()
    assert all(layer.lora_B.weight.grad.dtype == torch.float32 for layer in adapters(model).values())


def test_the_start_depends_on_the_seed_alone() -> None:
    a = [tiny_model(), tiny_model(), tiny_model()]
    for model, seed in zip(a, (0, 0, 1), strict=True):
        add_adapters(model, RANK, 8.0, "base", seed)
    starts = [next(iter(adapters(model).values())).lora_A.weight for model in a]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    assert starts[0].abs().max() <= 32**-0.5, "1 / sqrt(d_in)"


def test_a_rank_above_that_of_a_matrix_is_refused() -> None:
    check_rank(tiny_model(), 16)
    with pytest.raises(UserError, match=r"model\.adapter_rank = 17 should be at most 16: .*k_proj is 16 x 32"):
        check_rank(tiny_model(), 17)


# ---- training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grpo", "replay", "dph_js", "definition", "rkl_k3", "rkl_exact", "bf16"])
def test_every_kind_of_method_trains_adapters_and_leaves_the_base(tmp_path: Path, method: str) -> None:
    options = {**METHODS, "definition": BOTH}[method]
    made = trainer(tmp_path, *options, *ADAPTER, "--train.steps=2")
    base = load_model(tmp_path / "model")
    made.run()
    rows = comparable(tmp_path)
    assert rows[0]["sampler_gap"] < (0.3 if method == "bf16" else 1e-5), "the first ratio is 1"  # a maximum
    with as_reference(made.policy.model) as pi_ref:
        assert same_weights(pi_ref, base)
    assert all(layer.lora_B.weight.abs().max() > 0 for layer in adapters(made.policy.model).values())


@pytest.mark.parametrize("options", [RKL, BOTH], ids=["rkl", "definition"])
def test_the_reference_is_no_second_model(tmp_path: Path, options: list[str]) -> None:
    made = trainer(tmp_path, *options, *ADAPTER)
    assert made.collector.reference is made.policy.model
    made.run()
    experience = made.collector.collect(made.state, made.stored[:4], Meter())
    rollouts = experience.pef_rollouts or experience.rollouts
    for each, by_base in zip(
        rollouts, score_rollouts(load_model(tmp_path / "model"), rollouts, 1.0, 1000), strict=True
    ):
        assert each.ref_logprobs == pytest.approx(by_base.logprobs, abs=1e-6)
        assert each.ref_logprobs != pytest.approx(each.logprobs, abs=1e-4), "the policy has moved"


@pytest.mark.parametrize("options", [RKL, BOTH], ids=["rkl", "definition"])
def test_at_the_start_every_new_answer_has_a_ratio_of_one_exactly(tmp_path: Path, options: list[str]) -> None:
    made = trainer(tmp_path, *options, *ADAPTER)
    made.state.trust_sampler = False  # pi_old by the scorer, as pi_ref is
    experience = made.collector.collect(made.state, made.stored[:4], Meter())
    for each in experience.pef_rollouts or experience.rollouts:
        assert each.ref_logprobs == each.logprobs


def test_at_the_start_the_divergence_on_stored_answers_is_zero_exactly(tmp_path: Path) -> None:
    made = trainer(tmp_path, *JS, *ADAPTER)
    base = load_model(tmp_path / "model")
    budget = made.config.train.microbatch_tokens
    for each, by_base in zip(made.stored, score_rollouts(base, made.stored, 1.0, budget), strict=True):
        each.logprobs = by_base.logprobs
    assert rehearse(made, made.stored)["divergence"] == 0


@pytest.mark.parametrize("method", ["dapo", "dph_js", "rkl_k3", "bf16"])
def test_four_steps_with_adapters_are_two_a_stop_and_two(tmp_path: Path, method: str) -> None:
    straight = trainer(tmp_path / "a", *METHODS[method], *ADAPTER)
    straight.run()
    trainer(tmp_path / "b", *METHODS[method], *ADAPTER, "--train.steps=2").run()
    resumed = trainer(tmp_path / "b", *METHODS[method], *ADAPTER)
    resumed.run()
    assert torch.equal(weights(straight), weights(resumed))
    assert comparable(tmp_path / "a") == comparable(tmp_path / "b")
    assert all(torch.equal(mine, other) for mine, other in zip(moments(straight), moments(resumed), strict=True))


def test_the_merged_sampler_agrees_with_the_scorer_after_training_too(tmp_path: Path) -> None:
    made = trainer(tmp_path, *ADAPTER)
    made.run()
    made.state.trust_sampler = None  # as at the first step, where B is zero
    meter = Meter()
    made.collector.collect(made.state, [], meter)
    assert meter.means()["sampler_gap"] < 1e-5
    assert made.state.trust_sampler


def test_it_learns_what_full_training_learns(tmp_path: Path) -> None:
    made = trainer(tmp_path, *ADAPTER, "--train.steps=25")
    made.run()
    rows = comparable(tmp_path)
    assert sum(r["reward"] for r in rows[-5:]) / 5 > sum(r["reward"] for r in rows[:3]) / 3 + 0.2


def test_the_distance_from_the_base_is_taken_with_adapters_off(tmp_path: Path) -> None:
    made = trainer(tmp_path, *ADAPTER, "--train.eval_every=2", "--eval.during_samples=16")
    made.eval_sets = [PromptSet(made.collector.task, made.collector.explored)]
    assert made._evaluate(0)["kl_to_base"] == pytest.approx(0, abs=1e-12)
    made.run()
    rows = comparable(tmp_path)
    assert 1e-4 < rows[1]["kl_to_base"] < rows[3]["kl_to_base"] < 5


def test_gradients_and_moments_are_of_the_adapters_alone(tmp_path: Path) -> None:
    made = trainer(tmp_path, *JS, *ADAPTER)
    sides = [sum(layer.weight.shape) for layer in adapters(made.policy.model).values()]
    numbers = RANK * sum(sides)  # r (d_in + d_out) a layer
    found = keep_gradients(made)
    rehearse(made, made.stored)
    assert sum(gradient.nbytes for gradient in found) == 4 * numbers
    again = trainer(tmp_path / "again", *JS, *ADAPTER)
    rehearse(again, again.stored)
    assert sum(moment.nbytes for moment in moments(again) if moment.ndim) == 2 * 4 * numbers


# ---- files -------------------------------------------------------------------------------------------------------


def trained(folder: Path, *more: str) -> Trainer:
    """A run of two steps with adapters and a checkpoint."""
    made = trainer(folder, *JS, *ADAPTER, "--train.steps=2", *more)
    made.run()
    return made


def test_a_checkpoint_holds_pefts_layout_and_no_whole_weights(tmp_path: Path) -> None:
    trained(tmp_path)
    step = tmp_path / "run" / "checkpoints" / "step-2"
    names = {file.name for file in step.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "trainer.safetensors", "state.json"} <= names
    assert {"SHA256SUMS", "tokenizer.model"} <= names
    assert not names & {"model.safetensors", "config.json", "model.safetensors.index.json"}
    weights = load_file(step / "adapter_model.safetensors")
    assert len(weights) == 2 * 7 * 2
    assert weights["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (RANK, 32)
    config = json.loads((step / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, 32.0)
    assert config["base_model_name_or_path"] == str((tmp_path / "model").resolve())


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "trainer.safetensors"])
def test_a_checkpoint_without_one_of_its_files_is_passed_over(tmp_path: Path, name: str) -> None:
    trained(tmp_path, "--train.save_every=1")
    run = tmp_path / "run"
    (run / "checkpoints" / "step-2" / name).unlink()
    assert newest_checkpoint(run) == run / "checkpoints" / "step-1"


def test_peft_loads_a_checkpoint_and_computes_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    made = trained(tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "checkpoints" / "step-2")
    tokens = torch.tensor([[1, 5, 9, 4, 7]])
    with torch.no_grad():
        ours = made.policy.model.logits(made.policy.model(tokens))
        torch.testing.assert_close(theirs(tokens).logits, ours, atol=1e-5, rtol=1e-5)


def test_what_peft_saves_is_read(tmp_path: Path) -> None:
    """Adapters on some of the layers only, with B away from zero."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    tiny_folder(tmp_path / "model")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(base, settings)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_merged(tmp_path / "adapter")
    tokens = torch.tensor([[1, 5, 9, 4, 7]])
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(tokens)), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


CONFIG_HARM = {
    "use_dora": (True, "use_dora is True: only plain LoRA"),
    "use_rslora": (True, "use_rslora is True: only plain LoRA"),
    "rank_pattern": ({"q_proj": 8}, "rank_pattern is"),
    "init_lora_weights": ("pissa", "init_lora_weights is 'pissa'"),
    "peft_type": ("IA3", "peft_type is 'IA3'"),
    "r": (0, "r is 0; it must be a positive int"),
    "lora_alpha": ("x", "lora_alpha is 'x'; it must be a positive number"),
    "base_model_name_or_path": ("/no/such/base", r"base_model_name_or_path = '/no/such/base': no such folder"),
    "target_modules": (None, "target_modules is None; it should name the layers"),
    "exclude_modules": ("(", "target_modules, exclude_modules or layers_to_transform cannot be read"),
}


@pytest.mark.parametrize("key", CONFIG_HARM)
def test_an_adapter_that_is_not_plain_lora_is_named(tmp_path: Path, key: str) -> None:
    folder = saved(tmp_path)
    path = folder / "adapter_config.json"
    value, line = CONFIG_HARM[key]
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UserError, match=f"adapter_config.json: {line}"):
        load_merged(folder)


def saved(tmp_path: Path) -> Path:
    """The folder of an adapter on a tiny model."""
    folder = tiny_folder(tmp_path / "model")
    model = load_model(folder)
    add_adapters(model, RANK, 8.0, str(folder))
    randomise(model)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    save_adapter(model, weights, tmp_path / "adapter")
    return tmp_path / "adapter"


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WEIGHT_HARM = {
    "of a layer that has none": ({A.replace("q_proj", "x"): torch.zeros(4, 32)}, "belongs to no linear layer"),
    "of another shape": ({A: torch.zeros(4, 31)}, r"is \[4, 31\], not \[4, 32\]"),
    "NaN": ({A: torch.full((4, 32), float("nan"))}, "holds NaN"),
    "B without A": ({A: None}, "has no counterpart"),
    "of too few layers": (
        {A: None, A.replace("lora_A", "lora_B"): None},
        r"lacks model\.layers\.0\.self_attn\.q_proj, which adapter_config\.json names",
    ),
}


@pytest.mark.parametrize("what", WEIGHT_HARM)
def test_wrong_weights_of_an_adapter_are_named(tmp_path: Path, what: str) -> None:
    folder = saved(tmp_path)
    path = folder / "adapter_model.safetensors"
    changes, line = WEIGHT_HARM[what]
    changed = {name: weight.clone() for name, weight in load_file(path).items()} | changes
    save_file({name: weight for name, weight in changed.items() if weight is not None}, path)
    with pytest.raises(UserError, match=line):
        load_merged(folder)


@pytest.mark.parametrize(
    "named",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["model.layers.1.mlp.up_proj"]},
        {"target_modules": r".*\.1\..*_proj"},
        {"target_modules": "all-linear", "exclude_modules": ["o_proj", "gate_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 0},
    ],
)
def test_the_layers_that_peft_adapts_are_those_that_are_looked_for(tmp_path: Path, named: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    tiny_folder(tmp_path / "model")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **named))
    theirs.save_pretrained(tmp_path / "adapter")
    assert not same_weights(load_merged(tmp_path / "adapter"), load_model(tmp_path / "model"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    layer = next(iter(weights)).partition(".lora_")[0]
    save_file({name: weight for name, weight in weights.items() if not name.startswith(f"{layer}.")}, file)
    with pytest.raises(UserError, match=r"lacks model\.layers|holds no weights"):
        load_merged(tmp_path / "adapter")


def test_a_layer_that_the_config_does_not_name_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_modules": ["q_proj"]}))
    with pytest.raises(UserError, match=r"holds model\.layers\.0\..*, which adapter_config\.json does not name"):
        load_merged(folder)


def test_a_base_that_was_replaced_by_another_of_its_shape_is_refused(tmp_path: Path) -> None:
    made = trained(tmp_path)
    step = tmp_path / "run" / "checkpoints" / "step-2"
    tiny_folder(tmp_path / "model", seed=1)
    for use in (
        lambda: merge(step, tmp_path / "out", torch.float32),
        lambda: load_policy(str(step), made.config, torch.device("cpu"), may_be_adapter=True),
    ):
        with pytest.raises(UserError, match=r"was trained on other weights than those of .*; write where its own"):
            use()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_is_the_same_in_whatever_type_it_is_held(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = saved(tmp_path)
    model = load_model(tmp_path / "model", dtype)
    save_model(model, tmp_path / "model")
    load_merged(folder)


def test_an_adapter_is_taken_where_it_is_evaluated_and_refused_as_the_initial_policy(tmp_path: Path) -> None:
    made = trained(tmp_path)
    step = tmp_path / "run" / "checkpoints" / "step-2"
    loaded = load_policy(str(step), made.config, torch.device("cpu"), may_be_adapter=True)
    assert model_hash(loaded) == model_hash(made.policy), "an evaluation counts for both"
    with pytest.raises(UserError, match=f"python -m dph.adapter merge {step} OUT"):
        load_policy(str(step), made.config, torch.device("cpu"))


def test_a_base_that_has_moved_is_written_into_the_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path)
    step = tmp_path / "run" / "checkpoints" / "step-2"
    (tmp_path / "model").rename(tmp_path / "moved")
    path = step / "adapter_config.json"
    path.write_text(path.read_text().replace(str(tmp_path / "model"), str(tmp_path / "moved")))
    assert newest_checkpoint(tmp_path / "run") == step
    merge(tmp_path / "run", tmp_path / "out", torch.float32)


def test_a_damaged_step_is_neither_evaluated_nor_merged(tmp_path: Path) -> None:
    made = trained(tmp_path)
    step = tmp_path / "run" / "checkpoints" / "step-2"
    file = step / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    for use in (
        lambda: load_policy(str(step), made.config, torch.device("cpu"), may_be_adapter=True),
        lambda: merge(step, tmp_path / "out", torch.float32),
    ):
        with pytest.raises(UserError, match=r"not as it was written: adapter_model\.safetensors"):
            use()


# ---- the commands ------------------------------------------------------------------------------------------------


def test_a_merged_run_is_loaded_by_transformers_with_the_policys_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made = trained(tmp_path)
    merge(tmp_path / "run", tmp_path / "out", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.tensor([[1, 5, 9, 4, 7]])
    with torch.no_grad():
        ours = made.policy.model.logits(made.policy.model(tokens))
        torch.testing.assert_close(theirs(tokens).logits, ours, atol=1e-5, rtol=1e-5)
    assert load_tokenizer(tmp_path / "out").vocabulary == made.policy.tokenizer.vocabulary
    load_policy(str(tmp_path / "out"), made.config, torch.device("cpu"))


def test_an_adapter_without_a_tokenizer_takes_its_bases(tmp_path: Path) -> None:
    merge(saved(tmp_path), tmp_path / "out", torch.bfloat16)
    assert load_tokenizer(tmp_path / "out").vocabulary == load_tokenizer(tmp_path / "model").vocabulary
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_the_command_of_the_module_merges(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dph.adapter", "merge", str(saved(tmp_path)), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"model: {tmp_path / 'out'}\n"
    assert same_weights(load_merged(tmp_path / "adapter"), load_model(tmp_path / "out"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: what, RUN_OR_CHECKPOINT, OUT"),
        (["split", "adapter", "out"], "argument what: invalid choice: 'split'"),
        (["merge", "nowhere", "out"], "nowhere: no such folder"),
        (["merge", "model", "out"], "model: holds no adapter (adapter_config.json); there is nothing to merge"),
        (["merge", "begun", "out"], "begun: is the folder of a run that has no checkpoint yet"),
        (["merge", "adapter", "model"], "model: is already there; name a new folder"),
        (["merge", "adapter", "out", "--dtype=int8"], "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_a_wrong_merge_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    saved(tmp_path)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dph.adapter", *arguments])
    with pytest.raises(SystemExit) as stopped:
        merge_command()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {line}")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()
