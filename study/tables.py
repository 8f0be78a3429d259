"""The rows of the study's tables: one function a kind of row, a dict of cells by column. report.py joins them."""

from collections.abc import Sequence

import numpy as np

from study.results import (
    Results,
    Setting,
    choice_scores,
    common_seeds,
    curves,
    difference,
    keep_explore,
    samples,
    seeds_with,
    step_seconds,
    tells_ways,
    validation_score,
    values,
)
from study.statistics import crossing, estimate

KS = (1, 4, 8, 16, 32, 64)
MANY_KS = (1, 4, 16, 64, 256)
PHASES = ("sample_and_grade", "score", "train")  # of a step
NOTHING_SAID = ("", "–")
Row = dict[str, str]  # of a table: cells by column


def markdown(rows: Sequence[Row]) -> str:
    """A table; its columns are those of the first row, without those in which no row says anything."""
    columns = [name for name in (rows[0] if rows else ()) if any(row[name] not in NOTHING_SAID for row in rows)]
    cells = [columns, ["---"] * len(columns), *([row[name] for name in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def row_of(setting: Setting) -> Row:
    """The first cells of a setting's row."""
    return {"method": setting.method, "setting": setting.swept}


def scores(base: Setting, setting: Setting, name: str) -> Row:
    """Greedy, pass@k, keep, explore and ways to answer of one set."""
    row = row_of(setting) | {"seeds": str(len(seeds_with(setting, name)))}
    n = samples(base, name)
    for score in ("greedy", *(f"pass@{k}" for k in KS if k <= n)):
        row[score] = str(estimate(values(setting, name, score)))
    keep, explore = keep_explore(base, setting, name)
    row["keep"] = "" if setting is base else str(keep)
    row["explore"] = "" if setting is base else str(explore)
    for column, score in (("different right", "forms"), ("bits", "bits"), ("commonest", "top")):
        row[column] = str(estimate(values(setting, name, score)))
    return row


def text_row(results: Results, setting: Setting) -> Row:
    """Log-likelihood of every set of texts, nats a token."""
    row = row_of(setting)
    for name, each in results.texts.items():
        row[each.title] = str(estimate(values(setting, name, "logprob")))
    return row


def costs(setting: Setting) -> Row:
    """|D_pef|, |D_exp|, seconds a step by phase, peak memory; no seconds where they do not compare."""
    row = row_of(setting)
    runs = list(setting.runs.values())
    for name, column in (("d_pef", "D_pef"), ("d_exp", "D_exp")):
        sizes = [run[name] for run in runs]
        row[column] = "–" if None in sizes else f"{np.mean(sizes):.0f}"
    for phase in (*PHASES, ""):
        seconds = step_seconds(setting, setting.runs, phase).mean()
        row[f"{phase or 'step'} s"] = "–" if np.isnan(seconds) else f"{seconds:.2f}"
    row["runs at a time"] = "–" if np.isnan(seconds) else f"{runs[0]['workers']}"
    row["MB"] = f"{np.mean([run['peak_bytes'] / 1e6 for run in runs]):.0f}"
    return row


def differences(results: Results, setting: Setting, against: Setting) -> Row:
    """pass@1, pass@16, pass@64 and bits of each domain, minus those of `against`."""
    row = row_of(setting)
    for name, each in results.domains.items():
        for k in (1, 16, 64):
            if k <= samples(against, name):
                row[f"{each.title}, pass@{k}"] = difference(setting, against, name, f"pass@{k}").signed()
        if tells_ways(results, name):
            row[f"{each.title}, bits"] = difference(setting, against, name, "bits").signed()
    return row


def choice(setting: Setting, chosen: Sequence[Setting], chooser: str) -> Row:
    """The scores by which a setting is chosen."""
    row = row_of(setting) | {"seeds": str(len(setting.runs))}
    for score in choice_scores(setting, chooser):
        row[score] = str(estimate(values(setting, chooser, score)))
    row["their mean"] = f"{validation_score(setting, chooser):.4f}"
    row[""] = "chosen" if setting in chosen and setting.swept else ""
    return row


def many_tries(results: Results, setting: Setting, name: str) -> Row:
    """pass@k and maj@k up to all samples of one set, and where the base's pass@k overtakes."""
    row = row_of(setting) | {"seeds": str(len(seeds_with(setting, name)))}
    n = samples(results.base, name)
    for kind in ("pass", "maj"):
        for k in MANY_KS:
            if k <= n and (kind, k) != ("maj", 1):  # one vote is one try
                row[f"{kind}@{k}"] = str(estimate(values(setting, name, f"{kind}@{k}")))
    row["base ahead from k"] = "" if setting is results.base else ahead_from(results.base, setting, name)
    return row


def ahead_from(base: Setting, setting: Setting, name: str) -> str:
    """The k from which the base's pass@k is above a setting's, with its interval."""
    seeds = common_seeds(base, setting, name)
    if not seeds:
        return "–"
    found = crossing(curves(base, name, seeds), curves(setting, name, seeds))
    n = samples(base, name)
    mean, low, high = (f"{k:.0f}" if np.isfinite(k) else f"> {n}" for k in found)
    return f"{mean} [{low}, {high}]"
