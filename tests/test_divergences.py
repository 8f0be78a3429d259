"""E1 and E2: every generator against the numbers, the invariants, autograd and enumeration."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dph.config import LEAST_ALPHA
from dph.divergences import GENERATORS, Divergence, make_divergence
from dph.errors import UserError
from dph.losses import penalty_loss, rehearsal_loss

# pi_ref = (.5, .5), pi_theta = (.9, .1): exact value and gradient with respect to logit 0.
EXACT = [
    ("reverse_kl", {}, 0.3680642, 0.1977502),
    ("forward_kl", {}, 0.5108256, 0.4),
    ("js", {}, 0.1017492, 0.0607467),
    ("alpha", {"alpha": 0.2}, 0.3865403, 0.2207881),
    ("alpha", {"alpha": 0.5}, 0.4222912, 0.2683282),
    ("alpha", {"alpha": 0.8}, 0.4702319, 0.3373919),
    ("jeffreys", {}, 0.8788898, 0.5977502),
    ("squared_hellinger", {}, 0.2111456, 0.1341641),
    ("pearson_chi2", {}, 0.64, 0.288),
    ("neyman_chi2", {}, 1.7777778, 2.2222222),
    ("total_variation", {}, 0.4, 0.09),
    ("skew_js", {"skew": 0.5}, 0.1017492, 0.0607467),
]
ALL = [make_divergence(name, alpha=0.3, skew=0.2) for name in GENERATORS]
by_name = pytest.mark.parametrize("divergence", ALL, ids=lambda d: d.name)
exact = pytest.mark.parametrize(("name", "parameters", "value", "gradient"), EXACT)


def policies() -> tuple[Tensor, Tensor]:
    logits = torch.tensor([0.9, 0.1], dtype=torch.float64).log().requires_grad_()
    return logits, torch.tensor([0.5, 0.5], dtype=torch.float64).log()


@exact
def test_value_and_gradient_of_reference_samples(
    name: str, parameters: dict[str, float], value: float, gradient: float
) -> None:
    logits, ref = policies()
    log_u = logits.log_softmax(0) - ref
    divergence = (ref.exp() * make_divergence(name, **parameters).f(log_u)).sum()
    (got,) = torch.autograd.grad(divergence, logits)
    assert divergence.item() == pytest.approx(value, abs=1e-7)
    assert got.tolist() == pytest.approx([gradient, -gradient], abs=1e-7)


@exact
def test_the_exact_penalty_on_own_samples_has_the_same_gradient(
    name: str, parameters: dict[str, float], value: float, gradient: float
) -> None:
    assert own_sample_gradient(make_divergence(name, **parameters), "exact") == pytest.approx(gradient, abs=1e-7)


@pytest.mark.parametrize(("estimator", "gradient"), [("k3", 0.4), ("k3_importance", 0.1977502), ("exact", 0.1977502)])
def test_k3_has_the_forward_kls_gradient_and_only_with_the_ratio_the_reverse_kls(
    estimator: str, gradient: float
) -> None:
    assert own_sample_gradient(make_divergence("reverse_kl"), estimator) == pytest.approx(gradient, abs=1e-7)


def own_sample_gradient(divergence: Divergence, estimator: str) -> float:
    """E_{pi_theta} of the surrogate's gradient, by enumeration of the two actions."""
    logits, ref = policies()
    logprobs = logits.log_softmax(0)[:, None]  # two rows of one token
    old, mask = logprobs.detach(), torch.ones(2, 1, dtype=torch.bool)
    surrogate = penalty_loss(logprobs, old, ref[:, None], mask, divergence, estimator, 2.0)
    (gradient,) = torch.autograd.grad((old.exp() * surrogate).sum(), logits)
    return float(gradient[0])


@pytest.mark.parametrize("name", list(GENERATORS))
def test_both_estimators_agree_over_a_random_vocabulary(name: str) -> None:
    torch.manual_seed(0)
    divergence = make_divergence(name, alpha=0.3, skew=0.2)
    logits, ref = (
        torch.randn(7, dtype=torch.float64, requires_grad=True),
        torch.randn(7, dtype=torch.float64).log_softmax(0),
    )
    logprobs, mask = logits.log_softmax(0)[:, None], torch.ones(7, 1, dtype=torch.bool)
    reference = (ref.exp()[:, None] * rehearsal_loss(logprobs, ref[:, None], mask, divergence)).sum()
    own = (
        logprobs.detach().exp()
        * penalty_loss(logprobs, logprobs.detach(), ref[:, None], mask, divergence, "exact", 2.0)
    ).sum()
    from_reference = torch.autograd.grad(reference, logits, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(own, logits)[0], from_reference)


@by_name
@given(log_u=st.floats(-15, 15))
@settings(max_examples=60, deadline=None)
def test_f_is_nonnegative_and_its_derivative_is_autograds(divergence: Divergence, log_u: float) -> None:
    x = torch.tensor(log_u, dtype=torch.float64, requires_grad=True)
    value = divergence.f(x)
    (slope,) = torch.autograd.grad(value, x)  # u f'(u)
    assert value.item() >= -1e-12
    if log_u != 0:
        assert slope.item() == pytest.approx((x.exp() * divergence.derivative(x)).item(), rel=1e-7, abs=1e-11)


@by_name
@given(a=st.floats(-8, 8), b=st.floats(-8, 8), share=st.floats(0.01, 0.99))
@settings(max_examples=60, deadline=None)
def test_f_is_convex_in_u(divergence: Divergence, a: float, b: float, share: float) -> None:
    u = torch.tensor([a, b, math.log(share * math.exp(a) + (1 - share) * math.exp(b))], dtype=torch.float64)
    f_a, f_b, f_mix = divergence.f(u).tolist()
    assert f_mix <= share * f_a + (1 - share) * f_b + 1e-9 * (1 + abs(f_a) + abs(f_b))


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_slope_and_gradient_are_exactly_zero_at_one(divergence: Divergence, dtype: torch.dtype) -> None:
    x = torch.zeros((), dtype=dtype, requires_grad=True)
    value = divergence.f(x)
    assert value.item() == 0
    assert divergence.derivative(x).item() == 0
    assert torch.autograd.grad(value, x)[0].item() == 0


@by_name
@pytest.mark.parametrize("log_u", [-1e4, -120.0, -30.0, 0.0, 30.0, 80.0, 120.0, 1e4])
def test_extremes_stay_finite_in_fp32(divergence: Divergence, log_u: float) -> None:
    x = torch.tensor(log_u, requires_grad=True)
    value = divergence.f(x)
    (slope,) = torch.autograd.grad(value, x)
    assert math.isfinite(value.item())
    assert math.isfinite(slope.item())
    assert math.isfinite(divergence.derivative(x).item())


@pytest.mark.parametrize(
    ("name", "alpha", "value"),
    [("js", 0.5, 0.3465736), ("alpha", 0.5, 2.0), ("alpha", 0.2, 1.25), ("squared_hellinger", 0.5, 1.0)],
)
def test_bounded_generators_lose_a_forgotten_token(name: str, alpha: float, value: float) -> None:
    x = torch.tensor(-120.0, requires_grad=True)
    f = make_divergence(name, alpha=alpha).f(x)
    assert f.item() == pytest.approx(value, abs=1e-6)
    assert torch.autograd.grad(f, x)[0].item() == pytest.approx(0, abs=1e-9)


def test_forward_kl_pulls_a_forgotten_token_back_with_full_weight() -> None:
    x = torch.tensor(-15.0, requires_grad=True)
    f = make_divergence("forward_kl").f(x)
    assert f.item() == pytest.approx(14.0000003, rel=1e-6)
    assert torch.autograd.grad(f, x)[0].item() == pytest.approx(-0.9999997, abs=1e-6)


def test_saturation_is_reported_and_keeps_the_pull() -> None:
    divergence = make_divergence("forward_kl")
    x = torch.tensor([0.0, 79.0, 200.0], requires_grad=True)
    assert divergence.saturated(x).tolist() == [False, False, True]
    gradient = torch.autograd.grad(divergence.f(x).sum(), x)[0]
    assert gradient[2] >= gradient[1] > 0


@pytest.mark.parametrize(("alpha", "limit"), [(1e-5, "reverse_kl"), (1 - 1e-5, "forward_kl")])
def test_alpha_tends_to_both_kls(alpha: float, limit: str) -> None:
    log_u = torch.linspace(-2, 2, 9, dtype=torch.float64)
    torch.testing.assert_close(
        make_divergence("alpha", alpha=alpha).f(log_u), make_divergence(limit).f(log_u), atol=1e-3, rtol=1e-4
    )


def test_alpha_one_half_is_twice_squared_hellinger_and_skew_one_half_is_js() -> None:
    log_u = torch.linspace(-9, 9, 19, dtype=torch.float64)
    torch.testing.assert_close(
        make_divergence("alpha", alpha=0.5).f(log_u), 2 * make_divergence("squared_hellinger").f(log_u)
    )
    torch.testing.assert_close(make_divergence("skew_js", skew=0.5).f(log_u), make_divergence("js").f(log_u))


def test_the_released_codes_js_generator_is_twice_the_divergence() -> None:
    u = torch.tensor([0.1, 0.5, 2.0, 9.0], dtype=torch.float64)
    released = u * u.log() - (u + 1) * ((u + 1) / 2).log()
    torch.testing.assert_close(released, 2 * make_divergence("js").f(u.log()))


def test_plain_forward_kl_is_supervised_learning() -> None:
    logits, ref = policies()
    logprobs = logits.log_softmax(0)
    plain = make_divergence("forward_kl", divergence_form="plain")
    (gradient,) = torch.autograd.grad(plain.f(logprobs - ref)[0], logits, retain_graph=True)
    assert torch.equal(gradient, torch.autograd.grad(-logprobs[0], logits)[0])


def test_plain_and_standard_agree_on_all_samples_and_differ_on_correct_ones_alone() -> None:
    def gradient(form: str, weights: Tensor) -> Tensor:
        logits, ref = policies()
        f = make_divergence("forward_kl", divergence_form=form).f(logits.log_softmax(0) - ref)
        return torch.autograd.grad((weights * f).sum(), logits)[0]

    every, correct = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])
    torch.testing.assert_close(gradient("plain", every), gradient("standard", every))
    assert gradient("plain", correct)[0] < 0 < gradient("standard", correct)[0]


def test_an_unknown_generator_is_named() -> None:
    with pytest.raises(UserError, match="'kl' should be none or one of forward_kl"):
        make_divergence("kl")


@pytest.mark.parametrize("alpha", [LEAST_ALPHA, 0.5, 1 - 1e-4, 1 - 1e-8])
def test_every_alpha_that_the_config_takes_is_exact_in_fp32(alpha: float) -> None:
    size = torch.logspace(-2, math.log10(8), 1000, dtype=torch.float64)
    log_u = torch.cat([-size, size]).float().requires_grad_()
    exact = log_u.detach().double().requires_grad_()
    value = make_divergence("alpha", alpha=alpha).f(log_u)
    expected = make_divergence("alpha", alpha=alpha).f(exact)
    (gradient,) = torch.autograd.grad(value.sum(), log_u)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), exact)
    assert ((value - expected) / expected).abs().max() < 0.003
    assert ((gradient - expected_gradient) / expected_gradient).abs().max() < 0.003


def test_below_the_least_alpha_fp32_loses_its_digits() -> None:
    """Why there is a bound: 2 % at 0.001, and nothing is left at 1e-8."""
    log_u = torch.logspace(-2, 0.9, 1000)
    exact = log_u.double()
    worst = {}
    for alpha in (1e-3, 1e-8):
        divergence = make_divergence("alpha", alpha=alpha)
        worst[alpha] = float((divergence.f(log_u) / divergence.f(exact) - 1).abs().max())
    assert worst[1e-3] > 0.01
    assert worst[1e-8] == pytest.approx(1.0)
