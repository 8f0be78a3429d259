"""Two pictures of E1 and E2 that docs/equations.md explains:

python -m examples.figures generators docs/generators.png    f(u) and the pull u f'(u) of every generator
python -m examples.figures fits docs/fits.png                who brings back what a policy has forgotten
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from dph.divergences import GENERATORS, Divergence, make_divergence
from dph.plots import save


def plot_generators(path: Path) -> Path:
    """f(u) and the weight u f'(u) on grad log pi_theta against log u, for every generator."""
    log_u = torch.linspace(-8, 3, 400, dtype=torch.float64)
    figure, (values, pulls) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for number, name in enumerate(GENERATORS):
        divergence = make_divergence(name, alpha=0.5, skew=0.2)
        style = {"label": name, "linewidth": 1.4, "linestyle": "-" if number < 5 else "--"}
        values.plot(log_u, divergence.f(log_u), **style)
        pulls.plot(log_u, log_u.exp() * divergence.derivative(log_u), **style)
    values.set(title="f(u)", xlabel="log u", ylim=(-0.1, 6))
    pulls.set(title="u f'(u): below 0 a forgotten token is pulled back", xlabel="log u", ylim=(-3, 3))
    for panel in (values, pulls):
        panel.axvline(0, color="gray", linewidth=0.6)
        panel.grid(alpha=0.3)
    values.legend(fontsize=8)
    return save(figure, path)


def fit(divergence: Divergence, log_ref: Tensor, start: Tensor, samples: str, steps: int = 400) -> Tensor:
    """Gradient descent of a softmax policy over V tokens on one divergence, by each estimator of E2.

    One logit a token, so every divergence has its minimum at pi_ref and only the way there differs: too few steps, from
    a start that has forgotten much, is what training has. Plain gradient descent at rate 1 on D_f / f''(1), so that all
    are equally strong near pi_ref, with gradients clipped to norm 1 as in training; Adam would hide a vanishing pull.

    Args:
        log_ref, start: (V,) log-probabilities of pi_ref, and logits to begin with.
        samples: "exact" sums over all tokens; "reference" and "own" take 64 samples a step, of pi_ref or of pi_theta.

    Returns: (steps, 16, V) probabilities before each step, of 16 repeats.
    """
    stream, logits = torch.Generator().manual_seed(0), start.repeat(16, 1).requires_grad_()
    near = torch.tensor([-1e-3, 1e-3], dtype=torch.float64)
    curvature = float(divergence.derivative(near).diff() / near.diff())
    path = []
    for _ in range(steps):
        log_theta = logits.log_softmax(-1)  # (16, V)
        path.append(log_theta.detach().exp())
        if samples == "exact":
            values = log_ref.exp() * divergence.f(log_theta - log_ref)
        else:
            source = log_ref.expand_as(log_theta) if samples == "reference" else log_theta.detach()
            drawn = torch.multinomial(source.exp(), 64, replacement=True, generator=stream)
            log_u, chosen = (x.gather(1, drawn) for x in (log_theta - log_ref, log_theta))
            values = divergence.f(log_u) if samples == "reference" else divergence.derivative(log_u).detach() * chosen
            values = values / 64
        (gradient,) = torch.autograd.grad(values.sum() / curvature, logits)
        with torch.no_grad():
            logits -= gradient / gradient.norm(dim=1, keepdim=True).clamp(min=1)
    return torch.stack(path)


def forgetful_start() -> tuple[Tensor, Tensor, list[slice]]:
    """pi_ref, as log-probabilities of 31 tokens in three modes, and logits that have forgotten two of them.

    The slices are the tokens of these two: the fading mode, where log u is -2 up to a constant, and the gone one, where
    it is -9.
    """
    x = torch.arange(31, dtype=torch.float64)
    modes = torch.stack(
        [w * torch.softmax(-0.5 * ((x - m) / 1.5) ** 2, 0) for m, w in ((5, 0.3), (15, 0.4), (25, 0.3))]
    )
    tilt = torch.tensor([-2.0, 0.0, -9.0], dtype=torch.float64).exp()
    return modes.sum(0).log(), (modes * tilt[:, None]).sum(0).log(), [slice(0, 10), slice(21, 31)]


def plot_fits(path: Path) -> Path:
    """Who brings back a mode that fades, and one that is gone: `fit` for five divergences and all three gradients."""
    log_ref, start, (fading, gone) = forgetful_start()
    figure, panels = plt.subplots(2, 5, figsize=(15, 5.2), sharey="row", layout="constrained")
    for (above, below), name in zip(panels.T, ("forward_kl", "jeffreys", "alpha", "js", "reverse_kl"), strict=True):
        above.fill_between(range(31), log_ref.exp(), color="gray", alpha=0.25, label="pi_ref")
        above.plot(start.softmax(0), color="gray", linestyle=":", label="start")
        for samples, colour, width in (("reference", "tab:blue", 4), ("own", "tab:orange", 2), ("exact", "black", 1)):
            told, look = fit(make_divergence(name, alpha=0.5), log_ref, start, samples), {"color": colour}
            above.plot(
                told[-1].mean(0), label=samples if samples == "exact" else f"{samples} samples", linewidth=width, **look
            )
            for mode, line, word in ((fading, "-", "fading mode"), (gone, "--", "gone mode")):
                share = told[:, :, mode].sum(-1) / log_ref.exp()[mode].sum()  # (steps, repeats)
                below.plot(share.mean(1), line, label=word if width == 1 else None, linewidth=width, **look)
                below.fill_between(range(len(share)), *share.sort(1).values[:, [1, -2]].T, alpha=0.15, **look)
        above.set(title=name, xlabel="token")
        below.set(xlabel="step", ylim=(0, 1.6))
    panels[0][0].set_ylabel("probability, mean of 16 fits")
    panels[1][0].set_ylabel("mode's mass / pi_ref's")
    panels[0][-1].legend(fontsize=7, loc="upper left")
    panels[1][-1].legend(fontsize=7, loc="center right")
    return save(figure, path)


if __name__ == "__main__":
    drawings = {"generators": plot_generators, "fits": plot_fits}
    if len(sys.argv) != 3 or sys.argv[1] not in drawings:
        sys.exit("usage: python -m examples.figures generators | fits FILE.png")
    print(drawings[sys.argv[1]](Path(sys.argv[2])))
