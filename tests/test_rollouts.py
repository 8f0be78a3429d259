"""Scoring and batching: one function scores everything, and how a batch is cut changes nothing."""

import pytest
import torch

import dph.scoring
from benchmarks.measure import cost
from dph.rollouts import Rollout, collate, group_by_tokens
from dph.scoring import token_logprobs
from tests.helpers import rollout, tiny_model

ROLLOUTS = [rollout([1, 2, 3], [4, 5]), rollout([6], [7, 8, 9, 10]), rollout([1] * 5, [2])]


def test_cutting_the_vocabulary_scores_into_chunks_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for floats in (2**24, 200):  # 200 floats: two positions at a time
        monkeypatch.setattr(dph.scoring, "LOGIT_FLOATS", floats)
        model = tiny_model()
        token_logprobs(model, collate(ROLLOUTS, "cpu"), 1.0)[0].sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_the_gradients_by_hand_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dph.scoring, "LOGIT_FLOATS", 3 * 11)
    states, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    ids = torch.stack([torch.randperm(11)[:4] for _ in range(7)])  # the response token, and three top ones
    inputs = (states.requires_grad_(), weight.requires_grad_(), ids)
    assert torch.autograd.gradcheck(lambda *x: dph.scoring._Head.apply(*x, True), inputs)
    assert torch.autograd.gradcheck(lambda *x: dph.scoring._Head.apply(*x, False)[:2], inputs)


def test_scoring_a_large_vocabulary_takes_little_memory() -> None:
    """4,096 tokens over a vocabulary of 151,936 (2.5 GB of logits), with gradient, in less than 500 MB."""
    vocabulary, width = 151_936, 16
    states = torch.randn(4096, width, requires_grad=True)
    weight = (0.1 * torch.randn(vocabulary, width)).requires_grad_()
    ids = torch.randint(vocabulary, (4096, 1))
    weight.grad = torch.zeros_like(weight)
    with cost() as found:
        logprobs, *_ = dph.scoring._Head.apply(states, weight, ids, False)
        logprobs.sum().backward()
    assert found.peak < 500
    few = states.detach()[:64].requires_grad_()
    naive = (few @ weight.detach().T).log_softmax(-1).gather(-1, ids[:64])
    naive.sum().backward()
    torch.testing.assert_close(logprobs[:64], naive, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states.grad[:64], few.grad, atol=1e-5, rtol=1e-5)


def test_a_row_scores_the_same_beside_longer_ones() -> None:
    model = tiny_model(dtype=torch.float64)
    together = token_logprobs(model, collate(ROLLOUTS, "cpu"), 1.0)[0]
    alone = token_logprobs(model, collate(ROLLOUTS[:1], "cpu"), 1.0)[0]
    torch.testing.assert_close(together[0, :2], alone[0])


def test_common_beginnings_are_computed_once_and_change_nothing() -> None:
    """Answers to one prompt, equal ones, one that begins another, and a prompt that begins like another."""
    rows = [rollout([1, 2, 3], a) for a in ([4, 5, 6], [4, 5, 6], [4, 5], [4, 9, 6, 7], [8])] + [
        rollout([1, 2], [3, 4])
    ]
    weights = torch.rand(len(rows), 4, dtype=torch.float64)
    model = tiny_model(dtype=torch.float64)
    batch = collate(rows, "cpu")
    assert len(batch.tokens) == 3 + 4  # 1 2 3, 4 5, 9 6
    assert batch.layout.rows.shape == (2, 6)  # the ways to 5 and 6
    shared = token_logprobs(model, batch, 1.0).logprobs
    (shared * weights).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    for row, r in enumerate(rows):
        tokens = torch.tensor([r.prompt_tokens + r.tokens])
        found = model.logits(model(tokens))[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        naive = found[len(r.prompt_tokens) - 1 :]
        torch.testing.assert_close(shared[row, : len(naive)].detach(), naive.detach(), rtol=1e-6, atol=1e-8)
        (naive * weights[row, : len(naive)]).sum().backward()
    for a, b in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-5, atol=1e-8)


def test_the_end_token_may_be_the_padding_token() -> None:
    batch = collate([rollout([1, 0], [0]), rollout([1], [0, 0, 5])], "cpu")
    assert batch.mask.tolist() == [[True, False, False], [True, True, True]]


def test_groups_hold_every_row_once_and_keep_the_budget() -> None:
    rows = [rollout([1] * n, [2]) for n in (3, 50, 4, 9, 1, 9, 30)]
    groups = group_by_tokens(rows, budget=40)
    assert sorted(i for group in groups for i in group) == list(range(7))
    assert all(len(group) == 1 or len(group) * max(len(rows[i]) for i in group) <= 40 for group in groups)


def test_groups_keep_answers_to_a_prompt_together() -> None:
    rows = [rollout([prompt], [3] * length) for length in (1, 9, 2, 8) for prompt in (1, 2)]
    assert group_by_tokens(rows, budget=40) == [[0, 4, 6, 2], [1, 5, 7, 3]]


def test_a_count_of_log_probabilities_that_differs_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 tokens has 1 log-prob"):
        Rollout(0, 0, [1], [2, 3], [-1.0], True)
