"""docs/own_loss.md keeps its word: its change applies to the file as it is, and is GSPO."""

import re
import types
from pathlib import Path

import pytest
import torch

from dph import losses
from tests.test_trainer import comparable, trainer

ROOT = Path(__file__).parent.parent


def changed() -> types.ModuleType:
    """dph/losses.py with the document's change."""
    document = (ROOT / "docs" / "own_loss.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"```diff\n(.*?)```", document, re.S)
    lines = diff.splitlines()
    old = "\n".join(line[1:] for line in lines if line[0] in " -")
    new = "\n".join(line[1:] for line in lines if line[0] in " +")
    source = Path(losses.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, "the document shows the file as it is"
    module = types.ModuleType("changed_losses")
    exec(compile(source.replace(old, new), "losses.py", "exec"), module.__dict__)
    return module


def test_the_change_is_gspo_by_hand() -> None:
    """Two answers, of 2 and 3 tokens, A = 1 and -1; s is the geometric mean of the ratios."""
    old = torch.tensor([[-1.0, -2.0, float("nan")], [-1.0, -1.0, -1.0]])
    new = torch.tensor([[-0.9, -1.7, float("nan")], [-1.2, -0.7, -0.8]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    values = changed().clipped_loss(new, old, torch.tensor([1.0, -1.0]), mask, 0.5, 0.5)
    first, second = torch.tensor((0.1 + 0.3) / 2).exp(), torch.tensor((-0.2 + 0.3 + 0.2) / 3).exp()
    torch.testing.assert_close(values.detach(), torch.stack([-first * mask[0], second * mask[1]]))
    loss = losses.aggregate(values, mask, "sequence-mean", 2.0)
    gradient = torch.autograd.grad(loss, new)[0]
    expected = torch.stack([-first / 2 / 2 * mask[0], second / 3 / 2 * mask[1]])
    torch.testing.assert_close(gradient, expected)


def test_the_change_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "clipped_loss", changed().clipped_loss)
    options = ["loss.aggregation=sequence-mean", "loss.clip_low=3e-4", "loss.clip_high=4e-4"]
    trainer(tmp_path, *(f"--{option}" for option in options), "--train.steps=2", "--train.passes=2").run()
    assert [row["step"] for row in comparable(tmp_path)] == [1, 2]
