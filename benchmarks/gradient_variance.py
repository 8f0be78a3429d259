"""How much noise stored distributions take out of the rehearsal gradient (E10): python -m benchmarks.gradient_variance

The miniature's base is pre-sampled (its stored answers keep 127 of 128 log-probabilities at each position) and moved by
three steps of plain exploration noise; then the gradient of L_pef is taken on many batches of 64 stored answers, in the
one-sample form f(u) and with the K likeliest tokens. Printed and drawn: the variance of the gradient over batches, as a
ratio to the one-sample form's, and what K costs in bytes a token.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from dph import losses
from dph.checkpoint import open_run
from dph.cli import load_policy, open_task, set_up
from dph.collector import shuffled
from dph.config import load_config
from dph.divergences import make_divergence
from dph.model import Decoder
from dph.presampling import presample
from dph.prompts import tokenize
from dph.rollouts import Rollout, collate
from dph.scoring import token_logprobs

ROWS, BATCHES, WIDTHS = 64, 40, (1, 2, 4, 8, 16, 32, 127)


def gradient(model: Decoder, rollouts: list[Rollout], name: str, width: int) -> Tensor:
    """The gradient of L_pef on one batch, flat; width 0 is the one-sample form."""
    batch, divergence = collate(rollouts, "cpu"), make_divergence(name)
    scores = token_logprobs(model, batch, 1.0)
    if width:
        top, rest = narrowed(scores.top, scores.rest, width)
        ref_top, ref_rest = narrowed(batch.top_logprobs, batch.top_rest, width)
        values = losses.stored_distribution_loss(top, rest, ref_top, ref_rest, batch.mask, divergence)
    else:
        values = losses.rehearsal_loss(scores.logprobs, batch.logprobs, batch.mask, divergence)
    loss = losses.aggregate(values, batch.mask, "token-mean", float(batch.mask.sum()))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def narrowed(top: Tensor | None, rest: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """The first `width` of the likeliest tokens, and the others put into the rest."""
    assert top is not None
    assert rest is not None
    return top[..., :width], torch.cat((top[..., width:], rest[..., None]), -1).logsumexp(-1)


def spread(model: Decoder, rehearsal: list[Rollout], name: str, width: int) -> float:
    """Mean squared distance of the batches' gradients from their mean."""
    found = torch.stack(
        [
            gradient(model, [rehearsal[i] for i in shuffled(len(rehearsal), (0, 9), b * ROWS, ROWS)], name, width)
            for b in range(BATCHES)
        ]
    )
    return float((found - found.mean(0)).square().sum(1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of gradient_variance.json and .png")
    out = parser.parse_args().out
    config = load_config(
        "configs/miniature_dph_f_top32.toml", ["--presample.stored_top_k=127", "--run.name=gradient_variance"]
    )
    policy = load_policy(config.model.path, config, set_up(config))
    open_run(config)
    rehearsal = presample(
        policy, tokenize(open_task(config.data.train, config), policy.tokenizer, config), config
    ).rehearsal
    torch.manual_seed(0)
    with torch.no_grad():  # move the policy: relative noise of 3 % on every matrix
        for weight in policy.model.parameters():
            if weight.ndim == 2:
                weight.mul_(1 + 0.03 * torch.randn_like(weight))
    report: dict[str, dict[str, float]] = {}
    for name in ("forward_kl", "js"):
        base = spread(policy.model, rehearsal, name, 0)
        report[name] = {str(width): spread(policy.model, rehearsal, name, width) / base for width in WIDTHS}
    print("| K | bytes a token | variance, forward_kl | variance, js |\n| --- | --- | --- | --- |")
    print("| one sample | 4 | 1 | 1 |")
    for width in map(str, WIDTHS):
        size = 8 * int(width) + 8  # K tokens and their log-probabilities, the rest's and the answer's own
        print(f"| {width} | {size} | {report['forward_kl'][width]:.3f} | {report['js'][width]:.3f} |")
    (out / "gradient_variance.json").write_text(json.dumps(report, indent=1) + "\n")
    figure, panel = plt.subplots(figsize=(5, 3.4), layout="constrained")
    for name, values in report.items():
        panel.plot(WIDTHS, list(values.values()), marker="o", label=name)
    panel.axhline(1, color="gray", linewidth=0.8, linestyle="--")
    panel.set(xscale="log", xlabel="K stored log-probabilities", ylabel="gradient variance / one-sample form's")
    panel.set_xticks(WIDTHS, map(str, WIDTHS))
    panel.legend()
    figure.savefig(out / "gradient_variance.png", dpi=120)


if __name__ == "__main__":
    main()
