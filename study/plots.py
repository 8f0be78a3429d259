"""The study's pictures, from the same JSON files as its tables (report.py), each method in one colour throughout.

pass_at_k.png, keep_explore.png and styles.png show each method at the setting chosen on validation; training.png
validation over training steps; pareto.png every setting, a curve for each method, and what it costs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; no screen is needed
import matplotlib.pyplot as plt
import numpy as np

from study.plan import BASE
from study.report import CHOICE, DOMAINS, KS, Results, Setting, estimate, keep_explore, samples, values

COLOURS = [*plt.get_cmap("tab10").colors, *plt.get_cmap("Dark2").colors]  # type: ignore[attr-defined]
MARKERS = "osD^vP*X<>"
TRIES = 8  # in which a question counts as solved in keep_explore.png: in all 64 the base solves nearly every one
Looks = dict[str, dict[str, Any]]  # colour and marker of each method


def draw(folder: Path, results: Results) -> list[Path]:
    """Draws all pictures into FOLDER, and returns them."""
    looks: Looks = {BASE: {"color": "black", "marker": "."}}
    for i, method in enumerate(dict.fromkeys(setting.method for setting in results.settings)):
        looks[method] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
    base, chosen = results.base, results.chosen
    figures = {
        "pass_at_k.png": _pass_at_k(base, chosen, looks),
        "training.png": _training(base, chosen, looks),
        "styles.png": _styles(base, chosen),
        "keep_explore.png": _keep_explore(base, chosen, looks),
        "pareto.png": _pareto(base, results.settings, looks),
    }
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110)
        plt.close(figure)
    return [folder / name for name in figures]


def _panels(count: int, width: float = 4.4, height: float = 4.0) -> tuple[Any, Any]:
    return plt.subplots(1, count, figsize=(width * count, height), squeeze=False, layout="constrained")


def _pass_at_k(base: Setting, chosen: Sequence[Setting], looks: Looks) -> Any:
    """pass@k against k with 95 % intervals."""
    figure, panels = _panels(len(DOMAINS))
    for panel, (role, name) in zip(panels[0], DOMAINS.items(), strict=True):
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
    panels[0][0].legend(fontsize=8)
    return figure


def _training(base: Setting, chosen: Sequence[Setting], looks: Looks) -> Any:
    """pass@1 and pass@k on validation over training steps: means over seeds, each seed a thin line."""
    figure, panels = _panels(2, 5.0)
    k = max(run["curve"]["k"] for setting in (base, *chosen) for run in setting.runs.values())
    for column, name in ((1, "pass@1"), (2, f"pass@{k}")):
        panel = panels[0][column - 1]
        for setting in chosen:
            look = looks[setting.method]
            curves = [base.runs[seed]["curve"]["points"] + run["curve"]["points"] for seed, run in setting.runs.items()]
            longest = max(map(len, curves))
            whole = np.array([points for points in curves if len(points) == longest])  # (seeds, evaluations, 3)
            for points in whole:
                panel.plot(points[:, 0], points[:, column], color=look["color"], alpha=0.2, linewidth=0.8)
            panel.plot(whole[0, :, 0], whole[:, :, column].mean(0), label=setting.label, markersize=4, **look)
        panel.set(title=f"{name}, validation", xlabel="step", ylabel=name)
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    return figure


def _styles(base: Setting, chosen: Sequence[Setting]) -> Any:
    """Shares of a question's answers in its commonest, second and third style, and in none; means over questions."""
    shown = [base, *chosen]
    figure, panels = _panels(len(DOMAINS), height=1.2 + 0.32 * len(shown))
    for panel, (role, title) in zip(panels[0], DOMAINS.items(), strict=True):
        shares = np.array([_shares(setting, role) for setting in shown])  # (settings, 4)
        left = np.zeros(len(shown))
        for i, name in enumerate(("commonest style", "second", "third", "no style")):
            panel.barh(range(len(shown)), shares[:, i], left=left, label=name, color=plt.get_cmap("viridis")(i / 3.3))
            left = left + shares[:, i]
        panel.set_yticks(range(len(shown)), [setting.label for setting in shown], fontsize=8)
        panel.set(title=title, xlabel="share of answers", xlim=(0, 1))
        panel.invert_yaxis()
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _shares(setting: Setting, role: str) -> list[float]:
    found = [run["sets"][role] for run in setting.runs.values()]
    ranked = np.array([sorted(styles, reverse=True) for each in found for styles in each["styles"]])
    shares = ranked.mean(0) / samples(setting, role)
    return [*map(float, shares), float(1 - shares.sum())]


def _keep_explore(base: Setting, chosen: Sequence[Setting], looks: Looks) -> Any:
    """Keep against explore, with "solved" meaning in TRIES answers; crosses are 95 % intervals."""
    figure, panels = _panels(len(DOMAINS))
    for panel, (role, name) in zip(panels[0], DOMAINS.items(), strict=True):
        k = min(TRIES, samples(base, role))
        for setting in chosen:
            keep, explore = keep_explore(base, setting, role, k)
            across, up = ([[max(0, e.mean - e.low)], [max(0, e.high - e.mean)]] for e in (explore, keep))
            look = looks[setting.method]
            panel.errorbar(
                explore.mean, keep.mean, up, across, label=setting.label, linestyle="", elinewidth=0.7, **look
            )
        panel.set(title=name, xlabel=f"explore: solved in {k} answers, not by the base", ylabel="keep: still solved")
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    return figure


def _pareto(base: Setting, settings: Sequence[Setting], looks: Looks) -> Any:
    """In domain: pass@1 against pass@16, each method a curve along its sweep; their mean against seconds a step."""
    figure, (plane, price) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    ks = [min(k, samples(base, "in_domain")) for k in CHOICE]
    found = {s.label: [values(s, "in_domain", f"pass@{k}").mean() for k in ks] for s in (base, *settings)}
    plane.plot(*found[base.label], label=base.label, linestyle="", **looks[BASE])
    price.axhline(np.mean(found[base.label]), color="black", linewidth=0.8, linestyle=":", label=base.label)
    for method in dict.fromkeys(setting.method for setting in settings):
        mine = [setting for setting in settings if setting.method == method]
        scores = np.array([found[setting.label] for setting in mine])  # (settings, 2)
        seconds = [setting.step_seconds for setting in mine]
        memory = np.mean([setting.megabytes for setting in mine])
        look = {"markersize": 5, "linewidth": 1, **looks[method]}
        plane.plot(scores[:, 0], scores[:, 1], label=method, **look)
        price.plot(seconds, scores.mean(1), label=f"{method}: {memory:.0f} MB", **look)
        for setting, score, x in zip(mine, scores, seconds, strict=True):
            if setting.value is not None:
                for panel, place in ((plane, score), (price, (x, score.mean()))):
                    panel.annotate(f"{setting.value:g}", place, (3, 3), textcoords="offset points", fontsize=7)
    plane.set(title="In domain; numbers are the swept key's value", xlabel=f"pass@{ks[0]}", ylabel=f"pass@{ks[1]}")
    price.set(title="What a result costs", xlabel="seconds a step", ylabel=f"mean of pass@{ks[0]} and pass@{ks[1]}")
    for panel in (plane, price):
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    return figure
