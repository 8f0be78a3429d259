"""Packed matrices of a copy that samples: the same numbers, brought up to date with the weights they were made from."""

from pathlib import Path

import pytest
import torch

from dph.answering import Policy, acting
from dph.model import Decoder
from dph.packing import PackedLinear, pack
from tests.helpers import tiny_model

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def logits(model: Decoder) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(model(TOKENS))


def packed_layers(model: Decoder) -> int:
    return sum(isinstance(module, PackedLinear) for module in model.modules())


def test_a_packed_model_computes_what_the_plain_one_does() -> None:
    model = tiny_model().to(torch.bfloat16)
    plain = logits(model)
    pack(model)
    assert packed_layers(model) == 7 * model.config.num_hidden_layers + 1
    torch.testing.assert_close(logits(model), plain, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_of_another_type_is_left_alone(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    pack(model)
    assert packed_layers(model) == 0


def test_the_copy_that_samples_follows_the_policys_weights() -> None:
    policy = Policy(tiny_model(), None, Path())  # type: ignore[arg-type]
    actor = acting(policy, "bf16")
    before = logits(actor.model)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.5)
    actor = acting(policy, "bf16", actor)
    fresh = acting(policy, "bf16")
    assert torch.equal(logits(actor.model), logits(fresh.model))
    assert not torch.equal(logits(actor.model), before)
    assert packed_layers(policy.model) == 0
