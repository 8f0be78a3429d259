"""Recorded decode steps: few shapes, and the same answers as without. What a GPU does with them: test_cuda.py."""

from pathlib import Path

import pytest
import torch

from dph.attention import KVCache
from dph.graphs import RecordedSteps
from dph.model import Decoder
from dph.sampler import RECORDED_COLUMNS, SamplingSettings, _Job, _Slots, sample
from dph.tasks.base import Prompt
from tests.helpers import tiny_model
from tests.test_trainer import trainer

PROMPTS = [Prompt(index, tokens=list(range(1, 3 + 5 * index))) for index in range(5)]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(dtype=torch.float64)


def settings(rows: int, graphs: bool) -> SamplingSettings:
    return SamplingSettings((3,), end_ids=(0, 3, 4), max_new_tokens=150, max_rows=rows, graphs=graphs)


@pytest.mark.parametrize("rows", [1, 6, 32])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_answers_are_those_of_plain_steps(model: Decoder, rows: int, top_p: float) -> None:
    """Rows and columns are rounded up, but what a row says is its own affair."""
    plain, recorded = (
        sample(model, PROMPTS, [range(6)] * 5, SamplingSettings(**{**vars(settings(rows, graphs)), "top_p": top_p}))
        for graphs in (False, True)
    )
    assert [r.tokens for r in recorded] == [r.tokens for r in plain]
    for one, other in zip(recorded, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
    assert sum(len(r.tokens) for r in plain) > 3 * RECORDED_COLUMNS, "on few rows the columns must run out"


def test_there_are_few_shapes_however_answers_end(model: Decoder) -> None:
    slots = _Slots(model, 13, 200, settings(13, graphs=True))
    slots.admit(range(13), [_Job(PROMPTS[row % 5], row, more=False) for row in range(13)])
    sizes = []
    for row in range(13):
        slots.step()
        sizes.append(len(slots.jobs))
        (ended,) = [slot for slot, job in enumerate(slots.jobs) if job is not None and job.sample == row]
        slots.jobs[ended] = None
        if row < 12:
            slots.pack()
    assert sizes == [13, 13, 13, 13, 13, 8, 8, 8, 8, 4, 4, 2, 1]
    assert slots.recorded is not None
    assert {rows for rows, _ in slots.recorded.recordings} <= {13, 8, 4, 2, 1}
    assert all(columns % RECORDED_COLUMNS == 0 for _, columns in slots.recorded.recordings)


def test_a_step_is_recorded_once_a_shape_and_replayed_on_what_the_cache_then_holds(model: Decoder) -> None:
    """The second step reads another column, other starts and other tokens through the memory of the first."""
    logits = []
    for recorded in (False, True):
        with torch.inference_mode():
            cache = KVCache.empty(model.config, 2, 32, torch.float64, "cpu")
            model(torch.tensor([[1, 2, 3], [4, 5, 6]]), cache)
            steps = RecordedSteps(model, cache)
            for tokens in ([[7], [8]], [[9], [10]]):
                last = torch.tensor(tokens)
                found = steps.logits(last) if recorded else model.logits(model(last, cache)[:, 0])
                logits.append(found.clone())
                cache.starts[1] += 1
    assert len(steps.recordings) == 1
    assert cache.column == 5
    torch.testing.assert_close(logits[:2], logits[2:], atol=1e-12, rtol=0)
    assert not torch.allclose(logits[0], logits[1])


def test_a_run_samples_by_recorded_steps_where_its_config_says_so(tmp_path: Path) -> None:
    made = [trainer(tmp_path / name, f"--sampling.graphs={name}") for name in ("true", "false")]
    found = [each.train_step() for each in made]
    assert found[0]["sampled_tokens"] == found[1]["sampled_tokens"]
    assert found[0]["loss_exp"] == pytest.approx(found[1]["loss_exp"], abs=1e-5)
