"""Recomputing activations: the same numbers to the last bit, in the memory of one layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dph.cli import load_policy
from dph.config import load_config
from dph.rollouts import collate
from dph.scoring import token_logprobs
from tests.helpers import rollout, tiny_folder, tiny_model

# Answers that share a prompt and more, so that the batch is a tree; another prompt beside them.
ROLLOUTS = [rollout([1, 2, 3], answer) for answer in ([4, 5, 6], [4, 9], [8])] + [rollout([7, 2], [3, 4, 5, 6])]


def loss_and_gradients(recompute: bool, dtype: torch.dtype = torch.float32, compiled: bool = False) -> list[Tensor]:
    """A loss on ROLLOUTS and the gradient of every parameter."""
    model = tiny_model(dtype=dtype)
    model.recompute = recompute
    if compiled:
        model.compile_layers()
    loss = token_logprobs(model, collate(ROLLOUTS, "cpu"), 1.0).logprobs.square().sum()
    loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


@contextmanager
def kept_bytes() -> Iterator[dict[int, int]]:
    """Bytes of what autograd keeps of the block for a backward pass, by storage; parameters left out."""
    sizes: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        yield sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_the_same_to_the_last_bit(dtype: torch.dtype) -> None:
    for kept, again in zip(loss_and_gradients(False, dtype), loss_and_gradients(True, dtype), strict=True):
        assert torch.equal(kept, again)


def test_they_are_so_under_autocast() -> None:
    found = []
    for recompute in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(loss_and_gradients(recompute))
    for kept, again in zip(*found, strict=True):
        assert torch.equal(kept, again)


def test_a_layer_keeps_its_input_alone() -> None:
    """Beside what all layers share (cos, sin, the layout), each keeps N x D floats."""
    batch = collate(ROLLOUTS, "cpu")
    kept = {}
    for layers in (1, 2):
        model = tiny_model()
        model.recompute = True
        model.model.layers = model.model.layers[:layers]
        with kept_bytes() as sizes:
            model(batch.tokens, layout=batch.layout)
        kept[layers] = sum(sizes.values())
    assert kept[2] - kept[1] == 4 * len(batch.tokens) * 32


@pytest.mark.slow
def test_compiled_layers_are_recomputed_too() -> None:
    for plain, compiled in zip(loss_and_gradients(True), loss_and_gradients(True, compiled=True), strict=True):
        torch.testing.assert_close(plain, compiled, atol=1e-4, rtol=1e-4)


def test_the_key_reaches_the_model(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    config = load_config(None, [f"--model.path={folder}", f"--run.folder={tmp_path}", "--train.recompute=true"])
    assert load_policy(str(folder), config, torch.device("cpu")).model.recompute
