"""The picture of a forgetful policy: what it shows holds in numbers."""

import pytest
import torch

from dph.divergences import make_divergence
from examples.figures import fit, forgetful_start

LOG_REF, START, (FADING, GONE) = forgetful_start()


def recovered(name: str, samples: str, steps: int = 250) -> tuple[float, float]:
    """The mass of the fading and of the gone mode at the end, as shares of pi_ref's; means over the repeats."""
    last = fit(make_divergence(name, alpha=0.5), LOG_REF, START, samples, steps)[-1].mean(0)
    fading, gone = (float(last[mode].sum() / LOG_REF.exp()[mode].sum()) for mode in (FADING, GONE))
    return fading, gone


def test_the_start_has_forgotten_what_it_says() -> None:
    log_u = START.log_softmax(0) - LOG_REF
    middle = log_u[15]
    assert log_u[5] - middle == pytest.approx(-2, abs=1e-3)
    assert log_u[25] - middle == pytest.approx(-9, abs=1e-3)
    assert LOG_REF.exp().sum() == pytest.approx(1)


def test_only_a_pull_that_does_not_vanish_brings_back_what_is_gone() -> None:
    for name in ("forward_kl", "jeffreys"):
        assert min(recovered(name, "exact")) > 0.7, name
    for name in ("alpha", "js", "reverse_kl"):
        fading, gone = recovered(name, "exact")
        assert fading > 0.9
        assert gone < 0.01


def test_own_samples_hardly_see_what_is_gone() -> None:
    assert recovered("forward_kl", "reference")[1] == pytest.approx(recovered("forward_kl", "exact")[1], abs=0.02)
    assert recovered("forward_kl", "own")[1] < 0.5 * recovered("forward_kl", "reference")[1]


def test_one_step_is_the_exact_gradient() -> None:
    first, second = fit(make_divergence("forward_kl"), LOG_REF, START, "exact", 2)[:, 0]
    assert torch.allclose(first, START.softmax(0))
    moved = START - (first - LOG_REF.exp())  # the forward KL's gradient, pi_theta - pi_ref, is shorter than 1
    assert torch.allclose(second, moved.softmax(0))
