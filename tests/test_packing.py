"""Packed matrices of a copy that samples: the same numbers, brought up to date with the weights they were made from."""

from pathlib import Path

import pytest
import torch

from dph.answering import Policy, acting
from dph.model import Decoder
from dph.packing import PackedLinear, can_pack, pack
from tests.helpers import tiny_model

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def logits(model: Decoder) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(model(TOKENS))


def packed_layers(model: Decoder) -> int:
    return sum(isinstance(module, PackedLinear) for module in model.modules())


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
x86 = pytest.mark.skipif(not can_pack(tiny_model(), torch.float32), reason="packs on x86 processors alone")


@x86
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_model_computes_what_the_plain_one_does(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    plain = logits(model)
    pack(model)
    assert packed_layers(model) == 7 * model.config.num_hidden_layers + 1
    torch.testing.assert_close(logits(model), plain, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@x86
def test_a_packed_layer_adds_its_bias() -> None:
    linear, x = torch.nn.Linear(32, 48), torch.randn(3, 1, 32)
    torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(x), linear(x))


@x86
def test_a_packed_model_holds_its_matrices_once() -> None:
    model = tiny_model()
    pack(model)
    assert not [name for name, _ in model.model.layers.named_parameters() if name.endswith("proj.weight")]


def test_a_model_in_float64_or_compiled_samples_as_it_is() -> None:
    assert not can_pack(tiny_model(), torch.float64)
    policy = Policy(tiny_model().double(), None, Path())  # type: ignore[arg-type]
    assert acting(policy, "fp32") is policy
    compiled = tiny_model()
    compiled.compiled = True
    assert not can_pack(compiled, torch.float32)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_copy_that_samples_follows_the_policys_weights(dtype: str) -> None:
    policy = Policy(tiny_model(), None, Path())  # type: ignore[arg-type]
    actor = acting(policy, dtype)
    before = logits(actor.model)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.5)
    actor = acting(policy, dtype, actor)
    fresh = acting(policy, dtype)
    assert torch.equal(logits(actor.model), logits(fresh.model))
    assert not torch.equal(logits(actor.model), before)
    assert packed_layers(policy.model) == 0
