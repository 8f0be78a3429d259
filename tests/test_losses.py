"""E3 to E6: each term against numbers that a reader can check by hand, and against how batches may be cut."""

import pytest
import torch
from torch import Tensor

from dph.divergences import make_divergence
from dph.losses import (
    aggregate,
    clipped_fractions,
    clipped_loss,
    denominator,
    group_advantages,
    own_sample_divergence,
    rehearsal_loss,
)

ONE = torch.ones(1, 1, dtype=torch.bool)


def advantages(rewards: list[float], groups: list[int], divide_by_std: bool = True) -> list[float]:
    return group_advantages(torch.tensor(rewards, dtype=torch.float32), torch.tensor(groups), divide_by_std).tolist()


def test_advantages_of_one_success_in_four() -> None:
    assert advantages([1, 0, 0, 0], [5] * 4) == pytest.approx([1.7320508] + [-0.5773503] * 3, abs=1e-5)
    assert advantages([1, 0, 0, 0], [5] * 4, divide_by_std=False) == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("rewards", [[0.2] * 6, [1.0] * 4, [0.0] * 3, [0.1], [1e-9] * 7])
@pytest.mark.parametrize("divide_by_std", [True, False])
def test_equal_rewards_give_exactly_zero(rewards: list[float], divide_by_std: bool) -> None:
    assert advantages(rewards, [0] * len(rewards), divide_by_std) == [0.0] * len(rewards)


@pytest.mark.parametrize("order", [[0, 0, 1, 1], [0, 1, 0, 1]])
def test_groups_are_by_index_in_any_order(order: list[int]) -> None:
    assert advantages([1.0 if g == 0 else 0.0 for g in order], order) == [0.0] * 4


def test_advantages_follow_their_rows() -> None:
    rewards, groups = torch.tensor([1.0, 0, 0, 1, 1, 0]), torch.tensor([7, 7, 7, 2, 2, 2])
    shuffled = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(
        group_advantages(rewards[shuffled], groups[shuffled]), group_advantages(rewards, groups)[shuffled]
    )


@pytest.mark.parametrize(
    ("advantage", "ratio", "dual_clip", "loss", "gradient"),
    [
        (1.0, 1.5, 0.0, -1.28, 0.0),
        (1.0, 0.5, 0.0, -0.5, -0.5),
        (-1.0, 0.5, 0.0, 0.8, 0.0),
        (-1.0, 1.5, 0.0, 1.5, 1.5),
        (-1.0, 10.0, 0.0, 10.0, 10.0),
        (-1.0, 10.0, 3.0, 3.0, 0.0),
        (1.0, 1.0, 3.0, -1.0, -1.0),
        (-1.0, 1.0, 0.0, 1.0, 1.0),
    ],
)
def test_clipped_loss_and_its_gradient(
    advantage: float, ratio: float, dual_clip: float, loss: float, gradient: float
) -> None:
    logprobs = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    got = clipped_loss(logprobs, torch.zeros(1, 1), torch.tensor([advantage]), ONE, 0.2, 0.28, dual_clip)
    assert got.item() == pytest.approx(loss, abs=1e-6)
    assert torch.autograd.grad(got.sum(), logprobs)[0].item() == pytest.approx(gradient, abs=1e-6)


def test_clipped_fractions_are_where_the_gradient_stops() -> None:
    ratios = torch.tensor([[0.5, 1.0, 1.5]] * 2).log()
    below, above = clipped_fractions(
        ratios, torch.zeros(2, 3), torch.tensor([1.0, -1.0]), torch.ones(2, 3, dtype=torch.bool), 0.2, 0.28
    )
    assert below.tolist() == [[False, False, False], [True, False, False]]
    assert above.tolist() == [[False, False, True], [False, False, False]]


def two_sequences() -> tuple[Tensor, Tensor, Tensor]:
    """A: 2 tokens of loss 1; B: 6 tokens of loss 3; padding holds NaN."""
    values = torch.full((2, 6), float("nan"))
    values[0, :2], values[1] = 1.0, 3.0
    lengths = torch.tensor([2, 6])
    return values, torch.arange(6) < lengths[:, None], lengths


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token-mean", 2.5), ("sequence-mean", 2.0), ("sequence-sum", 1.25)]
)
def test_aggregations(aggregation: str, expected: float) -> None:
    values, mask, lengths = two_sequences()
    total = denominator(lengths, aggregation, length=8)
    assert aggregate(values, mask, aggregation, total).item() == pytest.approx(expected)
    pieces = [aggregate(values[i : i + 1], mask[i : i + 1], aggregation, total).item() for i in (0, 1)]
    assert sum(pieces) == pytest.approx(expected), "cutting the batch changes nothing"


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum"])
def test_a_batch_without_a_valid_token_is_zero(aggregation: str) -> None:
    mask, lengths = torch.zeros(3, 4, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    logprobs = torch.zeros(3, 4, requires_grad=True)
    values = clipped_loss(logprobs, logprobs.detach(), torch.ones(3), mask, 0.2, 0.2)
    loss = aggregate(values, mask, aggregation, denominator(lengths, aggregation, 8))
    assert loss.item() == 0
    assert torch.autograd.grad(loss, logprobs)[0].abs().sum() == 0
    empty = torch.zeros(0, 4)
    assert aggregate(empty, empty.bool(), aggregation, denominator(lengths[:0], aggregation, 8)).item() == 0


@pytest.mark.parametrize("junk", [float("nan"), float("-inf"), float("inf"), 1e30])
def test_padding_may_hold_anything(junk: float) -> None:
    mask = torch.tensor([[True, True, False]])
    gradients = []
    for fill in (0.0, junk):
        logprobs = torch.tensor([[-1.0, -2.0, fill]], requires_grad=True)
        other = torch.tensor([[-1.1, -1.5, fill]])
        exploration = aggregate(clipped_loss(logprobs, other, torch.ones(1), mask, 0.2, 0.2), mask, "token-mean", 2)
        rehearsal = aggregate(rehearsal_loss(logprobs, other, mask, make_divergence("js")), mask, "token-mean", 2)
        gradients.append(
            (
                exploration.item(),
                rehearsal.item(),
                *torch.autograd.grad(exploration + rehearsal, logprobs)[0][0].tolist(),
            )
        )
    assert gradients[0] == gradients[1]


@pytest.mark.parametrize("name", ["forward_kl", "js", "alpha"])
def test_rehearsal_is_zero_at_the_reference(name: str) -> None:
    logprobs = torch.randn(3, 5).sub(3).requires_grad_()
    loss = rehearsal_loss(
        logprobs, logprobs.detach(), torch.ones(3, 5, dtype=torch.bool), make_divergence(name, alpha=0.3)
    ).sum()
    assert loss.item() == 0
    assert torch.autograd.grad(loss, logprobs)[0].abs().max() == 0


def test_the_logged_divergence_of_own_samples_is_the_divergence() -> None:
    theta, ref = (
        torch.tensor([[0.9], [0.1]], dtype=torch.float64).log(),
        torch.full((2, 1), 0.5, dtype=torch.float64).log(),
    )
    values = own_sample_divergence(theta, ref, torch.ones(2, 1, dtype=torch.bool), make_divergence("js"))
    assert (theta.exp() * values).sum().item() == pytest.approx(0.1017492, abs=1e-7)
