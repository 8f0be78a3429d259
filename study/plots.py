"""The study's pictures, from the same JSON files as its tables (report.py), each method in one colour throughout.

pass_at_k.png shows each method that was run at all seeds, at the setting chosen on validation, and what it gains and
loses against the base; pareto.png shows every setting minus the base; forgetting.png shows every run, what it changed
against its KL to the base.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; no screen is needed
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from study.forgetting import points, remembered
from study.plan import BASE
from study.results import CHOICE, Results, Setting, difference, pass_score, samples, seeds_with, values
from study.tables import KS

COLOURS = [colour for name in ("tab10", "Dark2", "tab20b") for colour in plt.get_cmap(name).colors]  # type: ignore[attr-defined]
MARKERS = "osD^vP*X<>"
ACROSS = 4  # panels in a row
Looks = dict[str, dict[str, Any]]  # colour and marker of each method


def draw(folder: Path, results: Results) -> list[Path]:
    """Draws all pictures into FOLDER, and returns them."""
    looks: Looks = {BASE: {"color": "black", "marker": "."}}
    for i, method in enumerate(dict.fromkeys(setting.method for setting in results.settings)):
        looks[method] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
    figures = {"pass_at_k.png": _pass_at_k(results, looks), "pareto.png": _pareto(results, looks)}
    scatter = _forgetting(results, looks)
    if scatter is not None:
        figures["forgetting.png"] = scatter
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110)
        plt.close(figure)
    return [folder / name for name in figures]


def _pass_at_k(results: Results, looks: Looks) -> Any:
    """Above pass@k against k; below each method minus the base with paired 95 % intervals. A column for each domain."""
    domains = results.domains
    columns = len(domains)
    figure, grid = plt.subplots(2, columns, figsize=(4.4 * columns, 7.2), layout="constrained", squeeze=False)
    for above, below, (name, each) in zip(*grid, domains.items(), strict=True):
        ks = [k for k in sorted({*KS, 2}) if k <= samples(results.base, name)]
        for setting in (results.base, *_measured(results, name)):
            heights = [values(setting, name, f"pass@{k}").mean() for k in ks]
            above.plot(ks, heights, label=setting.label, markersize=4, **looks[setting.method])
        above.set(title=each.title, ylabel="pass@k")
        _minus_base(below, results, name, ks, looks)
        for panel in (above, below):
            panel.set_xscale("log")
            panel.set_xticks(ks, map(str, ks))
            panel.minorticks_off()
            panel.grid(alpha=0.3)
    _legend(figure, grid[0][0])
    return figure


def _minus_base(panel: Any, results: Results, name: str, ks: Sequence[int], looks: Looks) -> None:
    """Each chosen setting's pass@k minus the base's, with its interval, beside one another at each k."""
    settings = _measured(results, name)
    middle = (len(settings) - 1) / 2
    for place, setting in enumerate(settings):
        found = [difference(setting, results.base, name, f"pass@{k}") for k in ks]
        means = np.array([each.mean for each in found])
        down = means - [each.low for each in found]
        up = [each.high for each in found] - means
        apart = 1.05 ** (place - middle)  # a factor, as k has a logarithmic axis
        panel.errorbar(np.array(ks) * apart, means, (down, up), linewidth=0.9, markersize=4, **looks[setting.method])
    panel.axhline(0, color=looks[BASE]["color"], linewidth=0.8)
    panel.set(xlabel="k", ylabel="pass@k minus the base's")


def _measured(results: Results, name: str) -> list[Setting]:
    """The chosen settings that were measured on a set at all seeds: the means of others are of other questions."""
    everywhere = seeds_with(results.base, name)
    return [setting for setting in results.chosen if seeds_with(setting, name) == everywhere]


def _legend(figure: Any, panel: Any) -> None:
    """One legend for all panels, under them, where it hides nothing."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=min(len(labels), 8))


def _panels(count: int) -> tuple[Any, list[Any]]:
    """A figure with panels side by side, at most ACROSS in a row."""
    columns = min(count, ACROSS)
    rows = -(-count // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.4 * columns, 4 * rows), layout="constrained", squeeze=False)
    panels = list(grid.flat)
    for empty in panels[count:]:
        empty.set_visible(False)
    return figure, panels[:count]


def _pareto(results: Results, looks: Looks) -> Any:
    """In domain: pass@1 against pass@16, both minus the base at the same seeds; each method a curve along its sweep."""
    home = results.study.in_domain
    everything: Sequence[Setting] = (results.base, *results.settings)
    figure, panel = plt.subplots(figsize=(7.4, 5), layout="constrained")
    across, up = [pass_score(results.base, home, k) for k in CHOICE]
    for method in dict.fromkeys(setting.method for setting in everything):
        mine = [setting for setting in everything if setting.method == method]
        xs = [difference(setting, results.base, home, across).mean for setting in mine]
        ys = [difference(setting, results.base, home, up).mean for setting in mine]
        panel.plot(xs, ys, label=method, markersize=5, linewidth=1, **looks[method])
        for setting, x, y in zip(mine, xs, ys, strict=True):
            if setting.value is not None:
                panel.annotate(f"{setting.value:g}", (x, y), (3, 3), textcoords="offset points", fontsize=7)
    title = "In domain, minus the base; numbers are the swept key's value"
    panel.set(title=title, xlabel=f"{across} minus the base's", ylabel=f"{up} minus the base's")
    panel.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    return figure


def _forgetting(results: Results, looks: Looks) -> Any:
    """Every run: what changed against KL to the base on the first set that measures it; None where no run holds KL."""
    kl_set = next(iter(results.measured_kl), None)
    if kl_set is None:
        return None
    found = {title: points(results, kl_set, *measure) for title, measure in remembered(results).items()}
    if not any(len(each.kl) for each in found.values()):
        return None
    figure, panels = _panels(len(found))
    for panel, (title, each) in zip(panels, found.items(), strict=True):
        for method in dict.fromkeys(each.methods):
            mine = [i for i, name in enumerate(each.methods) if name == method]
            panel.plot(each.kl[mine], each.change[mine], linestyle="", label=method, markersize=5, **looks[method])
        panel.axhline(0, color="black", linewidth=0.8)
        kl_title = results.study.sets[kl_set].title
        panel.set(title=title, xscale="log", xlabel=f"KL to the base, {kl_title}, nats a token", ylabel="minus base")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    _legend(figure, panels[0])
    return figure
