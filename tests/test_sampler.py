"""The sampler: what a row says is its own affair, and what is drawn is the distribution that is scored."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from dph.drawing import draw, inverse_cdf, nucleus
from dph.errors import UserError
from dph.model import Decoder
from dph.rollouts import Rollout, collate
from dph.sampler import COLUMNS, SamplingSettings, _Job, _Slots, sample
from dph.scoring import token_logprobs
from dph.tasks.base import Prompt
from tests.helpers import tiny_model

TOKENS = [[5, 6, 7], [8] * 9, [1, 2], [3, 1, 4, 1, 5, 9, 2, 6], [11], [12, 13, 14, 15]]
PROMPTS = [Prompt(index, tokens=tokens) for index, tokens in enumerate(TOKENS)]


def settings(**changes: object) -> SamplingSettings:
    return SamplingSettings(**{"stream": (0, 1), "end_ids": (0, 3, 4), "max_new_tokens": 24, **changes})  # type: ignore[arg-type]


def answers(model: Decoder, count: int = 5, **changes: object) -> list[Rollout]:
    """`count` answers to each of PROMPTS."""
    return sample(model, PROMPTS, [range(count)] * len(PROMPTS), settings(**changes))


def words(rollouts: list[Rollout]) -> dict[tuple[int, int], list[int]]:
    return {(r.prompt, r.sample): r.tokens for r in rollouts}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(dtype=torch.float64)


@pytest.mark.parametrize("max_rows", [1, 2, 7, 30])
def test_a_row_says_the_same_with_any_batch_limit(model: Decoder, max_rows: int) -> None:
    assert words(answers(model, max_rows=max_rows)) == words(answers(model, max_rows=64))


def test_a_row_says_the_same_alone_and_in_any_order(model: Decoder) -> None:
    together = words(answers(model))
    for (prompt, number), tokens in itertools.islice(together.items(), 0, None, 4):
        alone = sample(model, [PROMPTS[prompt]], [[number]], settings())
        assert alone[0].tokens == tokens
    shuffled = random.Random(0).sample(PROMPTS, len(PROMPTS))
    assert words(sample(model, shuffled, [range(5)] * len(PROMPTS), settings(max_rows=8))) == together


def test_answers_come_back_in_the_order_asked(model: Decoder) -> None:
    got = sample(model, PROMPTS[::-1], [range(3)] * len(PROMPTS), settings(max_rows=4))
    assert [(r.prompt, r.sample) for r in got] == [(p, s) for p in reversed(range(len(PROMPTS))) for s in range(3)]


def test_long_runs_outlast_the_columns(model: Decoder) -> None:
    """Many waiting answers on few rows: the columns run out and are moved again and again."""
    prompts, numbers = [Prompt(index, tokens=TOKENS[index % 6]) for index in range(24)], [range(8)] * 24
    few = sample(model, prompts, numbers, settings(max_rows=3))
    assert sum(len(r.tokens) for r in few) > 3 * 200, "the test must fill more than one width of the cache"
    assert words(few) == words(sample(model, prompts, numbers, settings(max_rows=192)))


def test_the_cache_stays_without_gaps_and_little_wider_than_needed(model: Decoder) -> None:
    """What makes a step's attention fast on a CPU: contiguous keys and values, and few columns that nobody needs."""
    slots = _Slots(model, 4, 209, settings(end_ids=(), max_new_tokens=200))
    slots.admit(range(4), [_Job(PROMPTS[1], number, more=False) for number in range(4)])
    for step in range(150):
        slots.step()
        if step == 70:
            slots.jobs[1] = slots.jobs[2] = None
            slots.pack()
            slots._make_room()
        assert slots.cache.keys[0].is_contiguous()
        assert slots.cache.values[-1].is_contiguous()
        assert slots.cache.keys.shape[3] < slots.cache.column + 2 * COLUMNS
    assert slots.cache.column == 9 + 150


def test_another_stream_or_sample_says_something_else(model: Decoder) -> None:
    first = words(answers(model))
    assert words(answers(model, stream=(0, 2))) != first
    assert len({tuple(tokens) for (prompt, _), tokens in first.items() if prompt == 3}) > 1


def test_every_answer_ends_at_its_first_end_token_or_at_the_limit(model: Decoder) -> None:
    got = answers(model, 20, max_new_tokens=12)
    assert {r.finished for r in got} == {True, False}
    for r in got:
        assert all(token not in (0, 3, 4) for token in r.tokens[:-1])
        assert r.finished == (r.tokens[-1] in (0, 3, 4))
        assert r.finished or len(r.tokens) == 12
    assert len({r.tokens[-1] for r in got if r.finished}) > 1, "several end tokens must occur"


def greedy_alone(model: Decoder, prompt: list[int], steps: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            tokens.append(int(model.logits(model(torch.tensor([tokens]))[0, -1]).argmax()))
    return tokens[len(prompt) :]


def test_greedy_batched_and_cached_equals_greedy_alone_and_uncached() -> None:
    model = tiny_model(seed=3)
    got = answers(model, 1, temperature=0.0, end_ids=(96,), max_new_tokens=16, max_rows=4)
    for r in got:
        assert r.tokens == greedy_alone(model, r.prompt_tokens, 16)[: len(r.tokens)]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.7, 0.8), (0.0, 1.0)])
def test_the_samplers_log_probabilities_are_the_scorers(temperature: float, top_p: float) -> None:
    model = tiny_model(seed=1, scale=0.2)
    got = answers(model, temperature=temperature, top_p=top_p, max_rows=7)
    batch = collate(got, "cpu")
    scored, *_ = token_logprobs(model, batch, temperature)
    ratio = torch.exp(scored - batch.logprobs)[batch.mask]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


def test_frequencies_follow_the_distribution() -> None:
    """A chi-square test at V = 300 (three blocks): 20,000 draws, threshold at p = 0.001."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 1.5
    uniforms = torch.from_numpy(np.random.default_rng(0).random(20_000))
    tokens, logprobs = draw(logits.expand(20_000, -1), uniforms, 0.7, 1.0)
    expected = torch.softmax(logits / 0.7, 0) * 20_000
    torch.testing.assert_close(logprobs, torch.log_softmax(logits / 0.7, 0)[tokens])
    counts = torch.bincount(tokens, minlength=300)
    often = expected >= 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    freedom = int(often.sum()) - 1
    assert statistic < freedom + 3.09 * (2 * freedom) ** 0.5 + 6


def test_temperature_scales_the_logits() -> None:
    _, logprobs = draw(torch.tensor([[2.0, 1.0, 0.0]] * 3), torch.tensor([0.1, 0.9, 0.99]), 0.5, 1.0)
    assert logprobs.tolist() == pytest.approx([-0.1429316, -2.1429316, -4.1429316], abs=1e-6)


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    probs = torch.tensor([[0.5, 0.35, 0.1, 0.05]])
    kept = nucleus(probs, 0.9)
    assert (kept / kept.sum())[0].tolist() == pytest.approx([0.526316, 0.368421, 0.105263, 0], abs=1e-6)
    assert (nucleus(probs, 1e-9) > 0)[0].tolist() == [True, False, False, False]


@pytest.mark.parametrize("flatness", [0.01, 3.0])
def test_top_p_draws_from_the_whole_set_also_where_it_is_large(flatness: float) -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * flatness
    probs = torch.softmax(logits, -1)[0]
    order = probs.argsort(descending=True)
    allowed = set(order[: int((probs[order].double().cumsum(0) < 0.9).sum()) + 1].tolist())
    uniforms = torch.linspace(0, 1, 2001, dtype=torch.float64)[:-1]
    tokens, _ = draw(logits.expand(2000, -1), uniforms, 1.0, 0.9)
    assert set(tokens.tolist()) <= allowed
    assert len(set(tokens.tolist())) > min(len(allowed), 2000) * 0.4


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 1000])
def test_a_draw_never_picks_a_token_without_probability(size: int) -> None:
    weights = torch.rand(64, size, generator=torch.Generator().manual_seed(0))
    weights[:, ::3] = 0
    if size == 1:
        weights[:] = 1.0
    for u in (0.0, 1e-17, 0.5, 1 - 2**-53):
        tokens = inverse_cdf(weights, torch.full((64,), u, dtype=torch.float64))
        assert (weights.gather(1, tokens[:, None]) > 0).all()


def test_a_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    weights = torch.rand(200, 1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    uniforms = torch.rand(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    flat = torch.searchsorted(weights.cumsum(-1), uniforms[:, None] * weights.sum(-1, keepdim=True), right=True)[:, 0]
    assert torch.equal(inverse_cdf(weights, uniforms), flat)


def test_a_prompt_is_prefilled_once_for_all_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prefilled = tiny_model(), []
    forward = Decoder.forward

    def counted(self: Decoder, tokens: torch.Tensor, cache: object = None) -> torch.Tensor:
        if cache.column == 0:  # type: ignore[attr-defined]
            prefilled.append(len(tokens))
        return forward(self, tokens, cache)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward", counted)
    answers(model, 9, max_rows=4)
    assert sum(prefilled) == len(PROMPTS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_said_with_their_prompt(temperature: float, poison: float) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = poison
    with pytest.raises(UserError, match=r"logits are not finite after prompt \d \(its answer \d\)"):
        answers(model, temperature=temperature)


def test_nothing_asked_nothing_said_and_mistakes_are_named(model: Decoder) -> None:
    assert sample(model, [], [], settings()) == []
    with pytest.raises(ValueError, match="same sample"):
        sample(model, [PROMPTS[0], PROMPTS[0]], [[0], [0]], settings())
    with pytest.raises(ValueError, match="at least one token"):
        sample(model, [Prompt(0)], [[0]], settings())
