"""The study's pictures, from the same JSON files as its tables (report.py), each method in one colour throughout.

pass_at_k.png shows each method at the setting chosen on validation; pareto.png shows every setting.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; no screen is needed
import matplotlib.pyplot as plt

from study.plan import BASE
from study.report import CHOICE, DOMAINS, KS, Results, Setting, estimate, samples, values

COLOURS = [*plt.get_cmap("tab10").colors, *plt.get_cmap("Dark2").colors]  # type: ignore[attr-defined]
MARKERS = "osD^vP*X<>"
Looks = dict[str, dict[str, Any]]  # colour and marker of each method


def draw(folder: Path, results: Results) -> list[Path]:
    """Draws all pictures into FOLDER, and returns them."""
    looks: Looks = {BASE: {"color": "black", "marker": "."}}
    for i, method in enumerate(dict.fromkeys(setting.method for setting in results.settings)):
        looks[method] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
    base, chosen = results.base, results.chosen
    figures = {
        "pass_at_k.png": _pass_at_k(base, chosen, looks),
        "pareto.png": _pareto(base, results.settings, looks),
    }
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110)
        plt.close(figure)
    return [folder / name for name in figures]


def _pass_at_k(base: Setting, chosen: Sequence[Setting], looks: Looks) -> Any:
    """pass@k against k with 95 % intervals."""
    figure, panels = plt.subplots(1, len(DOMAINS), figsize=(4.4 * len(DOMAINS), 4), layout="constrained")
    for panel, (role, name) in zip(panels, DOMAINS.items(), strict=True):
        ks = [k for k in sorted({*KS, 2}) if k <= samples(base, role)]
        for setting in (base, *chosen):
            found = [estimate(values(setting, role, f"pass@{k}")) for k in ks]
            look = looks[setting.method]
            panel.plot(ks, [e.mean for e in found], label=setting.label, markersize=4, **look)
            panel.fill_between(ks, [e.low for e in found], [e.high for e in found], color=look["color"], alpha=0.1)
        panel.set(title=name, xscale="log", xlabel="k", ylabel="pass@k")
        panel.set_ylim(top=1.02)
        panel.set_xticks(ks, map(str, ks))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    return figure


def _pareto(base: Setting, settings: Sequence[Setting], looks: Looks) -> Any:
    """In domain: pass@1 against pass@16, each method a curve along its sweep."""
    figure, panel = plt.subplots(figsize=(6, 5), layout="constrained")
    across, up = [f"pass@{min(k, samples(base, 'in_domain'))}" for k in CHOICE]
    for method in dict.fromkeys(setting.method for setting in (base, *settings)):
        mine = [setting for setting in (base, *settings) if setting.method == method]
        xs = [values(setting, "in_domain", across).mean() for setting in mine]
        ys = [values(setting, "in_domain", up).mean() for setting in mine]
        panel.plot(xs, ys, label=method, markersize=5, linewidth=1, **looks[method])
        for setting, x, y in zip(mine, xs, ys, strict=True):
            if setting.value is not None:
                panel.annotate(f"{setting.value:g}", (x, y), (3, 3), textcoords="offset points", fontsize=7)
    panel.set(title="In domain; numbers are the swept key's value", xlabel=across, ylabel=up)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    return figure
