"""Weights in bf16 that learn as those in float32 do: the two halves of a float32, the step, the gradient's sum."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dph import distributed
from dph.answering import acting, autocast
from dph.config import OptimConfig
from dph.optimizer import SplitAdamW, join, make_adamw, split
from dph.rollouts import collate
from dph.scoring import token_logprobs
from tests.helpers import rollout, tiny_model
from tests.test_trainer import JS, comparable, moments, trainer, weights

BF16 = ("--model.dtype=bf16", "--run.dtype=bf16")
SETTINGS = OptimConfig(lr=1e-5, weight_decay=0.1)


def gradients(steps: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) for _ in range(steps)]


def start(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


# ---- the two halves ----------------------------------------------------------------------------------------------

EDGES = [0.0, -0.0, 1e-40, -1e-40, 1 + 2**-8, 1 + 2**-9, -1 - 2**-8, 1.99999, -3.999999, 3e38]


def test_a_float32_comes_back_from_its_halves_to_the_bit() -> None:
    whole = torch.cat([torch.randn(10_000) * 10.0 ** torch.randint(-8, 8, (10_000,)), torch.tensor(EDGES)])
    assert torch.equal(join(*split(whole)).view(torch.int32), whole.view(torch.int32))


def test_the_upper_half_is_a_nearest_bf16() -> None:
    whole = torch.cat([torch.randn(10_000), torch.tensor(EDGES)])
    weight, _ = split(whole)
    torch.testing.assert_close((weight.float() - whole).abs(), (whole.bfloat16().float() - whole).abs(), atol=0, rtol=0)


def test_a_bf16_number_has_nothing_left() -> None:
    weight, rest = split(start(1000).float())
    assert torch.equal(weight, start(1000))
    assert not rest.any()


# ---- the step ----------------------------------------------------------------------------------------------------


def test_bf16_weights_take_the_steps_of_float32_ones_to_the_bit() -> None:
    held, whole = nn.Parameter(start(7, 5)), nn.Parameter(start(7, 5).float())
    ours, theirs = make_adamw([held], SETTINGS), make_adamw([whole], SETTINGS)
    assert isinstance(theirs, torch.optim.AdamW)
    for gradient in gradients(100, 7, 5):
        held.grad, whole.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
        assert torch.equal(join(held.detach(), ours.state[held]["rest"]), whole)


def test_steps_too_small_for_bf16_add_up() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = make_adamw([weight], OptimConfig(lr=1e-5))
    for _ in range(1000):
        weight.grad = torch.ones(3)
        optimizer.step()
    assert torch.equal(weight, torch.full((3,), 0.99).bfloat16())
    assert torch.equal(weight - 1e-5, weight), "each step alone is lost in bf16"


def test_a_step_at_learning_rate_0_changes_nothing() -> None:
    weight = nn.Parameter(start(50))
    optimizer = make_adamw([weight], SETTINGS)
    for number, gradient in enumerate(gradients(2, 50)):
        before = weight.detach().clone(), optimizer.state[weight].get("rest", torch.zeros(50)).clone()
        optimizer.param_groups[0]["lr"] = 1e-3 if number == 0 else 0.0
        weight.grad = gradient
        optimizer.step()
    assert torch.equal(weight, before[0])
    assert torch.equal(optimizer.state[weight]["rest"], before[1])


def test_a_weight_without_a_gradient_stays_and_a_frozen_one_is_left_out() -> None:
    idle, frozen = nn.Parameter(start(4)), nn.Parameter(start(4), requires_grad=False)
    optimizer = make_adamw([idle, frozen], SETTINGS)
    optimizer.step()
    assert torch.equal(idle, start(4))
    assert optimizer.param_groups[0]["params"] == [idle]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_weights_have_the_optimizer_of_pytorch(dtype: torch.dtype) -> None:
    assert type(make_adamw([nn.Parameter(start(3).to(dtype))], SETTINGS)) is torch.optim.AdamW


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_weights_take_the_same_steps(one_process: dist.DeviceMesh) -> None:
    plain = nn.Parameter(start(6, 4))
    sharded = nn.Parameter(distribute_tensor(start(6, 4), one_process, [Shard(0)]))
    optimizers = [make_adamw([weight], SETTINGS) for weight in (plain, sharded)]
    for gradient in gradients(5, 6, 4):
        rounded = gradient.bfloat16()  # as FSDP2 leaves it
        plain.grad, sharded.grad = rounded.float(), distribute_tensor(rounded, one_process, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    assert isinstance(sharded.data, DTensor)
    assert torch.equal(sharded.data.to_local(), plain.data)
    kept = optimizers[1].state[sharded]
    assert all(isinstance(kept[name], DTensor) for name in ("rest", "exp_avg", "exp_avg_sq"))
    assert torch.equal(kept["rest"].to_local(), optimizers[0].state[plain]["rest"])


# ---- the gradient ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sharded", "kept"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_gradient_takes_four_bytes_and_of_a_shard_two(
    one_process: dist.DeviceMesh, sharded: bool, kept: torch.dtype
) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    if sharded:
        distributed.shard(model, model.model.layers)
    make_adamw(model.parameters(), SETTINGS)
    batch = collate([rollout([1, 2, 3], [4, 5, 6])], "cpu")
    with distributed.whole_weights(model):
        token_logprobs(model, batch, 1.0).logprobs.sum().backward()
        distributed.sum_gradients(model, lambda: 0 * token_logprobs(model, batch, 1.0).logprobs.sum())
    assert {weight.grad.dtype for weight in model.parameters() if weight.grad is not None} == {kept}


def test_micro_batches_are_summed_in_float32() -> None:
    """In bf16 a sum of 1 takes no addition of 1/1,024."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    make_adamw([weight], SETTINGS)
    for scale in (1.0, *[2.0**-10] * 1024):
        (scale * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert weight.grad.item() == 2.0


def test_so_are_the_heads_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [rollout([1, 2, 3], [4 + n % 50, 5, 6]) for n in range(300)]
    found = []
    for floats in (2**24, 97):  # all positions at once, and one at a time
        monkeypatch.setattr("dph.scoring.LOGIT_FLOATS", floats)
        model = tiny_model(dtype=torch.bfloat16)
        make_adamw(model.parameters(), SETTINGS)
        token_logprobs(model, collate(rows, "cpu"), 1.0).logprobs.sum().backward()
        assert model.head.grad is not None
        found.append(model.head.grad)
    error = (found[0] - found[1]).norm() / found[0].norm()
    assert error < 2**-8  # each chunk is rounded once


# ---- a run -------------------------------------------------------------------------------------------------------


def test_a_bf16_policy_samples_and_scores_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dph.answering.can_pack", lambda model, dtype: False)  # as on a GPU
    made = trainer(tmp_path, *BF16)
    assert acting(made.policy, "bf16") is made.policy
    with autocast(made.policy.model, "bf16"):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("save_dtype", ["fp32", "bf16"])
def test_a_run_in_bf16_goes_on_to_the_bit(tmp_path: Path, save_dtype: str) -> None:
    how = (*JS, *BF16, f"--train.save_dtype={save_dtype}")
    unbroken = trainer(tmp_path / "a", *how, "--train.steps=4")
    unbroken.run()
    trainer(tmp_path / "b", *how, "--train.steps=2").run()
    resumed = trainer(tmp_path / "b", *how, "--train.steps=4")
    resumed.run()
    assert isinstance(resumed.optimizer.adamw, SplitAdamW)
    assert torch.equal(weights(unbroken), weights(resumed))
    assert comparable(tmp_path / "a") == comparable(tmp_path / "b")
    assert all(torch.equal(mine, other) for mine, other in zip(moments(unbroken), moments(resumed), strict=True))


@pytest.mark.parametrize("save_dtype", ["fp32", "bf16"])
def test_its_checkpoint_holds_bf16_weights_once_and_their_other_halves(tmp_path: Path, save_dtype: str) -> None:
    trainer(tmp_path, *BF16, "--train.steps=1", f"--train.save_dtype={save_dtype}").run()
    folder = tmp_path / "run" / "checkpoints" / "step-1"
    assert not (folder / "master_weights.safetensors").exists(), "nothing is rounded, so nothing stands beside"
    stored, kept = load_file(folder / "model.safetensors"), load_file(folder / "trainer.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    for name in stored:
        assert kept[f"{name}:rest"].dtype == torch.int16
        assert kept[f"{name}:exp_avg"].dtype == torch.float32
