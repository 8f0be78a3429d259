"""Tables and pictures. python -m dph.plots RUN draws a run's again from the files it left;
python -m dph.plots generators FILE.png draws f(u) and the pull u f'(u) of every generator (E1, E2), fits FILE.png what
each divergence makes of three modes.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; no screen is needed
import matplotlib.pyplot as plt
import torch

from dph.checkpoint import read_log
from dph.divergences import GENERATORS, make_divergence
from dph.errors import read_json
from dph.evaluation import interval, keep_explore, pass_at_k

Report = Mapping[str, Any]


def table(reports: Sequence[Report], base: str | None = None) -> str:
    """One line for each set and model, scores as mean ± half the 95 % interval; keep and explore against `base`."""
    columns = list(
        dict.fromkeys(
            name for r in reports for d in r["sets"].values() for name, v in d["summary"].items() if isinstance(v, list)
        )
    )
    against = next((report for report in reports if report["model"] == base), None)
    rows = [["set", "model", *columns, "keep", "explore", "tokens", "entropy"]]
    for source in dict.fromkeys(source for report in reports for source in report["sets"]):
        rows += [_row(source, report, columns, against) for report in reports if source in report["sets"]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _row(source: str, report: Report, columns: Sequence[str], base: Report | None) -> list[str]:
    summary = report["sets"][source]["summary"]
    scores = [
        f"{summary[c][0]:.3f} ±{(summary[c][2] - summary[c][1]) / 2:.3f}" if c in summary else "" for c in columns
    ]
    shares = ["", ""]
    if base is not None and base is not report and source in base["sets"]:
        counts = [{p["prompt"]: p["correct"] for p in r["sets"][source]["problems"]} for r in (base, report)]
        shares = ["-" if x != x else f"{x:.3f}" for x in keep_explore(*counts)]  # x != x: NaN
    return [source, report["model"], *scores, *shares, f"{summary['tokens']:.1f}", f"{summary['entropy']:.2f}"]


def plot_pass_at_k(reports: Sequence[Report], folder: Path) -> Path:
    """pass@k against k with 95 % intervals, one panel for each set, one curve for each model: folder/pass_at_k.png."""
    sources = list(dict.fromkeys(source for report in reports for source in report["sets"]))
    figure, panels = plt.subplots(
        1, len(sources), figsize=(4.2 * len(sources), 3.6), squeeze=False, layout="constrained"
    )
    for panel, source in zip(panels[0], sources, strict=True):
        for report in (r for r in reports if source in r["sets"]):
            data = report["sets"][source]
            ks = [2**i for i in range(data["n"].bit_length()) if 2**i <= data["n"]]
            values = [[pass_at_k(data["n"], p["correct"], k) for p in data["problems"]] for k in ks]
            low, high = zip(*map(interval, values), strict=True)
            panel.plot(ks, [sum(v) / len(v) for v in values], marker="o", markersize=3, label=report["model"])
            panel.fill_between(ks, low, high, alpha=0.15)
        panel.set(title=source, xscale="log", xlabel="k", ylabel="pass@k", ylim=(0, 1.02))
        panel.set_xticks(ks, map(str, ks))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].legend()
    return _save(figure, folder / "pass_at_k.png")


def plot_metrics(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Reward, entropy, divergence, length, gradient norm and zero-variance groups over steps: folder/metrics.png."""
    names = ["reward", "entropy", "divergence", "length", "grad_norm", "zero_variance_fraction"]
    shown = [name for name in names if any(name in row for row in rows)]
    figure, panels = plt.subplots(2, 3, figsize=(11, 5.6), layout="constrained")
    for panel, name in zip(panels.flat, shown, strict=False):
        points = [(row["step"], row[name]) for row in rows if name in row]
        panel.plot(*zip(*points, strict=True), linewidth=1)
        panel.set(title=name, xlabel="step")
        panel.grid(alpha=0.3)
    for panel in list(panels.flat)[len(shown) :]:
        panel.axis("off")
    return _save(figure, folder / "metrics.png")


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def plot_run(run: Path) -> list[Path]:
    """Every picture that the run's files allow."""
    pictures = []
    if rows := read_log(run / "metrics.jsonl", "step"):
        pictures.append(plot_metrics(rows, run))
    reports = [read_json(path) for path in sorted((run / "evaluation").glob("*.json"))]
    if reports:
        pictures.append(plot_pass_at_k(reports, run))
    return pictures


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
    return _save(figure, path)


def plot_fits(path: Path) -> Path:
    """A single bump fitted to three modes by gradient descent on each exact divergence: covering against seeking."""
    x = torch.linspace(-9, 9, 181, dtype=torch.float64)
    modes = [(-5.5, 0.6, 0.3), (0.3, 0.8, 0.45), (6.0, 0.5, 0.25)]  # centre, width, weight
    ref = torch.stack([w * torch.exp(-0.5 * ((x - m) / s) ** 2) / s for m, s, w in modes]).sum(0)
    log_ref = (ref / ref.sum()).log()
    figure, panels = plt.subplots(1, 5, figsize=(15, 2.8), sharey=True, layout="constrained")
    for panel, name in zip(panels, ("forward_kl", "jeffreys", "alpha", "js", "reverse_kl"), strict=True):
        divergence = make_divergence(name, alpha=0.5)
        centre, log_width = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.8, 0.0))
        optimizer = torch.optim.Adam([centre, log_width], lr=0.02)
        for _ in range(1500):
            log_theta = (-0.5 * ((x - centre) / log_width.exp()) ** 2).log_softmax(0)
            loss = (log_ref.exp() * divergence.f(log_theta - log_ref)).sum()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        panel.fill_between(x, log_ref.exp(), alpha=0.3, label="pi_ref")
        panel.plot(x, log_theta.detach().exp(), label="pi_theta")
        panel.set(title=f"{name}, D = {loss.item():.2f}")
    panels[0].legend(fontsize=8)
    return _save(figure, path)


if __name__ == "__main__":
    drawings = {"generators": plot_generators, "fits": plot_fits}
    if len(sys.argv) == 3 and sys.argv[1] in drawings:
        print(drawings[sys.argv[1]](Path(sys.argv[2])))
    elif len(sys.argv) == 2:
        print("\n".join(map(str, plot_run(Path(sys.argv[1])))))
    else:
        sys.exit("usage: python -m dph.plots RUN | generators FILE.png | fits FILE.png")
