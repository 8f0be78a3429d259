"""One thread a process: small tensors gain nothing from more, and results stay equal from machine to machine."""

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _subnormal_numbers_stay() -> Iterator[None]:
    """Commands run in this process round them to 0, which hypothesis takes for a broken machine."""
    yield
    torch.set_flush_denormal(False)
