"""What a step has counted, by one process and by several."""

import pytest
import torch

from dph.metrics import Meter


def counted(rewards: list[float], seconds: float) -> Meter:
    meter = Meter()
    meter.add("reward", torch.tensor(sum(rewards)), len(rewards))
    meter.add("seconds/score", seconds)
    return meter


def test_a_mean_is_over_all_that_was_counted_and_a_sum_is_a_sum() -> None:
    meter = counted([1.0, 0.0], seconds=3.0)
    meter.add("reward", 1.0, 2)
    assert meter.means() == {"reward": 0.5, "seconds/score": 3.0}


def test_several_processes_give_one_mean_over_their_rows_and_one_process_s_share_of_a_sum() -> None:
    whole = counted([1.0], seconds=1.0)
    whole.merge(counted([0.0, 0.0, 1.0], seconds=2.0))
    assert whole.means() == {"reward": 0.5, "seconds/score": 1.5}


def test_what_one_process_alone_has_counted_stays_a_mean() -> None:
    whole = Meter()
    whole.merge(counted([1.0, 0.0], seconds=2.0))
    assert whole.means() == {"reward": 0.5, "seconds/score": 1.0}


def test_a_meter_that_is_read_holds_numbers_alone() -> None:
    read = counted([1.0], seconds=1.0).read()
    assert {type(value) for value in [*read.totals.values(), *read.counts.values()]} == {float}
    assert read.means() == pytest.approx({"reward": 1.0, "seconds/score": 1.0})
