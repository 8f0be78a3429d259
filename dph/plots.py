"""Tables and pictures of runs. python -m dph.plots RUN draws a run's again from the files it left."""

import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; no screen is needed
import matplotlib.pyplot as plt

from dph.checkpoint import read_log, write_bytes
from dph.cli import to_the_end
from dph.errors import UserError, read_json
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
    rows = [["set", "model", *columns, "keep", "explore", "tokens", "entropy", "KL to base"]]
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
    distance = f"{summary['kl_to_base']:.3f}" if "kl_to_base" in summary else ""
    rest = [f"{summary['tokens']:.1f}", f"{summary['entropy']:.2f}", distance]
    return [source, report["model"], *scores, *shares, *rest]


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
    return save(figure, folder / "pass_at_k.png")


def plot_metrics(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Reward, entropy, divergence, distance from the base and more, over steps: folder/metrics.png."""
    names = ["reward", "entropy", "divergence", "kl_to_base", "length", "grad_norm", "zero_variance_fraction"]
    shown = [name for name in names if any(name in row for row in rows)]
    figure, panels = plt.subplots(2, 4, figsize=(14, 5.6), layout="constrained")
    for panel, name in zip(panels.flat, shown, strict=False):
        points = [(row["step"], row[name]) for row in rows if name in row]
        panel.plot(*zip(*points, strict=True), linewidth=1, marker="." if len(points) < len(rows) else "")
        panel.set(title=name, xlabel="step")
        panel.grid(alpha=0.3)
    for panel in list(panels.flat)[len(shown) :]:
        panel.axis("off")
    return save(figure, folder / "metrics.png")


def save(figure: Any, path: Path) -> Path:
    """Writes a figure as PNG, closes it and returns the path."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    write_bytes(path, picture.getvalue())
    return path


def plot_run(run: Path) -> list[Path]:
    """Every picture that the run's files allow."""
    pictures = []
    if rows := read_log(run / "metrics.jsonl", "step"):
        pictures.append(plot_metrics(rows, run))
    reports = []
    for path in sorted((run / "evaluation").glob("*.json")):
        reports.append(read_json(path))
        if not isinstance(reports[-1].get("sets"), dict) or "model" not in reports[-1]:
            raise UserError(f"{path}: is no report of an evaluation; delete it, and evaluate again")
    if reports:
        pictures.append(plot_pass_at_k(reports, run))
    return pictures


def main(run: Path) -> None:
    """Draws the pictures and says where they are. UserError: the folder holds nothing to draw."""
    pictures = plot_run(run)
    if not pictures:
        raise UserError(f"{run}: holds neither metrics.jsonl nor evaluation/*.json, so there is nothing to draw")
    print("\n".join(map(str, pictures)))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m dph.plots RUN")
    to_the_end(lambda: main(Path(sys.argv[1])), debug=False)
