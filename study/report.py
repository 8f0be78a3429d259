"""What the study found, from its JSON files alone: statistics, the choice of each method's setting, tables.md.

A number is a mean over all questions of all seeds. Its 95 % interval is a hierarchical bootstrap: seeds are drawn with
replacement, and within each drawn seed its questions; so it covers another base, world and training set as well as
other questions. A difference of two settings is that of the same questions of the same seeds (paired), resampled alike.

Chosen is the value of the swept key with the highest mean of pass@1 and pass@16 on the validation questions, averaged
over seeds. Those questions enter no other number.

How to read it: `load_results` makes `Setting`s of the files; `values` gives a score for each question, `estimate` its
mean and interval; `write_tables` puts them together. Pictures of the same: plots.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dph.checkpoint import write_text
from dph.errors import UserError, read_json
from dph.evaluation import pass_at_k
from study.plan import BASE, changed

RESAMPLES = 2000
KS = (1, 4, 8, 16, 32, 64)
DOMAINS = {"in_domain": "in domain", "cross_domain": "cross-domain", "out_of_domain": "out of domain"}
VALIDATION, CHOICE = "validation", (1, 16)  # the k whose mean pass@k on validation chooses
Array = NDArray[np.float64]
PHASES = ("sample_and_grade", "score", "train")  # of a step
Row = dict[str, str]  # of a table: cells by column


class Estimate(NamedTuple):
    """A mean with its 95 % interval, each NaN where nothing counts."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return "–" if self.mean != self.mean else f"{self.mean:.3f} ± {(self.high - self.low) / 2:.3f}"

    def signed(self) -> str:
        """As a difference with its interval, bold where that leaves 0 out."""
        mean, low, high = (f"{round(x, 3) + 0.0:+.3f}".replace("-", "−") for x in self)  # + 0.0: no −0.000
        text = f"{mean} [{low}, {high}]"
        return f"**{text}**" if self.low > 0 or self.high < 0 else text


NOTHING = Estimate(np.nan, np.nan, np.nan)


@dataclass(frozen=True)
class Setting:
    """A method at one value of its swept key: the runs' JSON objects by seed."""

    method: str
    sweep: str
    value: float | None
    runs: dict[int, dict[str, Any]]

    @property
    def swept(self) -> str:
        """E.g. "eta = 16", or "" where nothing is swept."""
        return "" if self.value is None else f"{self.sweep.rpartition('.')[2]} = {self.value:g}"

    @property
    def label(self) -> str:
        """The method with its value, for pictures."""
        return f"{self.method}, {self.swept}" if self.swept else self.method


@dataclass(frozen=True)
class Results:
    """All that the JSON files hold: the base, every setting, each method's chosen one, notes on what is left out."""

    base: Setting
    settings: list[Setting]
    chosen: list[Setting]
    notes: list[str]


def load_results(folder: Path, order: Sequence[str] = ()) -> Results:
    """Reads FOLDER/*.json, the methods in `order`.

    A run whose seed's base is not there, or has other weights, is left out: it can be held against nothing.

    Raises: UserError where there is no base or no run, or where seeds of one setting were run with different settings.
    """
    runs = [(path.name, read_json(path)) for path in sorted(folder.glob("*.json"))]
    bases = {run["seed"]: run for _, run in runs if run["method"] == BASE}
    found: dict[tuple[str, float | None], Setting] = {}
    notes = []
    for name, run in runs:
        if run["base"] != bases.get(run["seed"], {}).get("base"):
            notes.append(f"{name} is left out: it started from another base than seed {run['seed']}'s")
            continue
        new = Setting(run["method"], run["sweep"], run["value"], {})
        setting = found.setdefault((new.method, new.value), new)
        for seed, other in setting.runs.items():
            for key in set(changed(run["settings"], other["settings"])) - {"run.seed"}:
                differs = f"{key} = {run['settings'].get(key)!r}, but {other['settings'].get(key)!r} at seed {seed}"
                raise UserError(f"{folder / name}: {differs}; run the study again")
        setting.runs[run["seed"]] = run
    base = found.pop((BASE, None), None)
    if base is None or not found:
        raise UserError(f"{folder}: holds no {'base' if base is None else 'run'} to report")
    rank = {name: number for number, name in enumerate(order)}
    settings = sorted(found.values(), key=lambda s: (rank.get(s.method, len(rank)), s.method, s.value or 0.0))
    return Results(base, settings, choose(settings), notes)


@cache
def _weights(seeds: int, questions: int) -> Array:
    """(RESAMPLES, seeds * questions): how often each question of each seed is drawn, from a fixed stream."""
    stream = np.random.default_rng(0)
    drawn = stream.integers(seeds, size=(RESAMPLES, seeds))
    counts = stream.multinomial(questions, np.full(questions, 1 / questions), size=(RESAMPLES, seeds))
    weights = np.zeros((RESAMPLES, seeds, questions))
    np.add.at(weights, (np.arange(RESAMPLES)[:, None], drawn), counts)
    return weights.reshape(RESAMPLES, -1)


def estimate(values: Array, shares: Array | None = None) -> Estimate:
    """The mean of values (seeds, questions) with its interval.

    Args:
        shares: how much each counts, (seeds, questions); None: all alike, and NaN not at all.
    """
    if shares is None:
        shares = (~np.isnan(values)).astype(np.float64)
    flat = np.where(shares > 0, values * shares, 0.0).reshape(-1)
    each = shares.reshape(-1)
    if not each.any():
        return NOTHING
    weights = _weights(*values.shape)
    with np.errstate(invalid="ignore"):  # a resample may hold none that counts
        means = (weights @ flat) / (weights @ each)
    low, high = np.nanquantile(means, [0.025, 0.975])
    return Estimate(float(flat.sum() / each.sum()), float(low), float(high))


def values(setting: Setting, role: str, score: str, seeds: Iterable[int] | None = None) -> Array:
    """One score of every question of a set, (seeds, questions).

    Args:
        score: "greedy"; "pass@K"; "bits", the entropy of the answers' styles; "top", the commonest style's share. NaN
            where no answer is in any style.
        seeds: which; None: all that the setting has.
    """
    wanted = sorted(setting.runs if seeds is None else seeds)
    return np.array([_score(setting.runs[seed]["sets"][role], score) for seed in wanted])


def _score(found: Mapping[str, Any], score: str) -> Array:
    if score == "greedy":
        return np.array(found["greedy"], dtype=np.float64)
    if score.startswith("pass@"):
        n, k = found["n"], int(score.removeprefix("pass@"))
        chances: Array = np.array([pass_at_k(n, correct, k) for correct in range(n + 1)])
        return np.array(chances[found["correct"]])
    styles: Array = np.array(found["styles"], dtype=np.float64)  # (questions, styles)
    with np.errstate(invalid="ignore"):
        shares = styles / styles.sum(1, keepdims=True)
    terms = -shares * np.log2(np.where(shares == 0, 1.0, shares))
    return np.array(terms.sum(1) if score == "bits" else shares.max(1))


def keep_explore(base: Setting, setting: Setting, role: str) -> tuple[Estimate, Estimate]:
    """Keep and explore of E11 over the questions of all seeds, "solved" meaning by at least one of the n answers."""
    score = f"pass@{samples(base, role)}"  # 1 where a question is solved, else 0
    old = values(base, role, score, setting.runs)
    new = values(setting, role, score)
    return estimate(new, old), estimate(new, 1 - old)


def difference(a: Setting, b: Setting, role: str, score: str) -> Estimate:
    """a - b on the same questions of the seeds that both have; NaN where they have none."""
    seeds = a.runs.keys() & b.runs.keys()
    if not seeds:
        return NOTHING
    return estimate(values(a, role, score, seeds) - values(b, role, score, seeds))


def samples(setting: Setting, role: str) -> int:
    """Answers to each question of a set, n."""
    return min(int(run["sets"][role]["n"]) for run in setting.runs.values())


def choice_scores(setting: Setting) -> list[str]:
    """The scores that choose: pass@1 and pass@16 (pass@n, where there are only n answers)."""
    return [f"pass@{min(k, samples(setting, VALIDATION))}" for k in CHOICE]


def validation_score(setting: Setting) -> float:
    """The mean of pass@1 and pass@16 on validation."""
    return float(np.mean([values(setting, VALIDATION, score).mean() for score in choice_scores(setting)]))


def choose(settings: Sequence[Setting]) -> list[Setting]:
    """One setting of each method: of those with the most seeds the best on validation; of equals the first."""
    chosen = []
    for method in dict.fromkeys(setting.method for setting in settings):
        mine = [setting for setting in settings if setting.method == method]
        most = max(len(setting.runs) for setting in mine)
        chosen.append(max((s for s in mine if len(s.runs) == most), key=validation_score))
    return chosen


# ---- tables ----------------------------------------------------------------------------------------------------------

HEAD = """# Tables of the study

Written by `python -m study.run --report` from the files in runs/; not by hand. What is compared, and how to read this:
[study.md](../study.md).

A number is the mean over all questions of all seeds ± half its 95 % interval (hierarchical bootstrap over seeds and
questions). pass@k is of {n} answers a question. keep: the share of the questions solved by the base that are still
solved; explore: the share of the others that are now solved; "solved" by at least one of the {n}. bits: entropy of the
styles of a question's answers; top style: the share of the commonest.
"""
COST = "Medians over a run's steps, means over seeds; memory is the largest of the training process.\n\n"
PAIRED = "The same questions of the same seeds; bold where the interval leaves out 0.\n\n"


def write_tables(folder: Path, results: Results) -> Path:
    """Writes FOLDER/tables.md, and returns it."""
    base, settings, chosen = results.base, results.settings, results.chosen
    parts = [HEAD.format(n=samples(base, "in_domain"))]
    parts += [f"Note: {note}.\n" for note in results.notes]
    parts += ["## Methods at the setting chosen on validation\n", *tables_of(base, chosen)]
    named = {setting.method: setting for setting in (base, *chosen)}
    for method in ("grpo", BASE, "rkl"):
        if method in named:
            rows = [differences(each, named[method]) for each in chosen if each.method != method]
            parts.append(f"## Each method minus {method}\n\n{PAIRED}{markdown(rows)}")
    rows = [choice(each, chosen) for each in (base, *settings)]
    parts += ["## Every setting\n", "### The choice\n\n" + markdown(rows), *tables_of(base, settings)]
    write_text(folder / "tables.md", "\n".join([*parts, made_with(base, settings)]))
    return folder / "tables.md"


def tables_of(base: Setting, settings: Sequence[Setting]) -> list[str]:
    """A table of each domain's scores, and one of what the settings cost."""
    tables = []
    for role, name in DOMAINS.items():
        rows = [scores(base, each, role) for each in (base, *settings)]
        tables.append(f"### {name}\n\n{markdown(rows)}")
    rows = [costs(each) for each in settings]
    return [*tables, f"### Partition, seconds a step, memory\n\n{COST}{markdown(rows)}"]


def markdown(rows: Sequence[Row]) -> str:
    """A table; its columns are those of the first row, "" where there is none."""
    columns = list(rows[0]) if rows else []
    cells = [columns, ["---"] * len(columns), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def row_of(setting: Setting) -> Row:
    """The first cells of a setting's row."""
    return {"method": setting.method, "setting": setting.swept}


def scores(base: Setting, setting: Setting, role: str) -> Row:
    """Greedy, pass@k, keep, explore and styles of one set."""
    row = row_of(setting) | {"seeds": str(len(setting.runs))}
    n = samples(base, role)
    for score in ("greedy", *(f"pass@{k}" for k in KS if k <= n)):
        row[score] = str(estimate(values(setting, role, score)))
    keep, explore = keep_explore(base, setting, role)
    row["keep"] = "" if setting is base else str(keep)
    row["explore"] = "" if setting is base else str(explore)
    row["bits"] = str(estimate(values(setting, role, "bits")))
    row["top style"] = str(estimate(values(setting, role, "top")))
    return row


def costs(setting: Setting) -> Row:
    """|D_pef|, |D_exp|, seconds a step by phase, peak memory."""
    row = row_of(setting)
    runs = list(setting.runs.values())
    for name, column in (("d_pef", "D_pef"), ("d_exp", "D_exp")):
        sizes = [run[name] for run in runs]
        row[column] = "–" if None in sizes else f"{np.mean(sizes):.0f}"
    for phase in PHASES:
        row[f"{phase} s"] = f"{np.mean([run['seconds'].get(phase, 0.0) for run in runs]):.2f}"
    row["step s"] = f"{np.mean([sum(run['seconds'].values()) for run in runs]):.2f}"
    row["MB"] = f"{np.mean([run['peak_bytes'] / 1e6 for run in runs]):.0f}"
    return row


def differences(setting: Setting, against: Setting) -> Row:
    """pass@1, pass@16 and pass@64 of each domain, minus those of `against`."""
    row = row_of(setting)
    for role, name in DOMAINS.items():
        for k in (1, 16, 64):
            if k <= samples(against, role):
                row[f"{name}, pass@{k}"] = difference(setting, against, role, f"pass@{k}").signed()
    return row


def choice(setting: Setting, chosen: Sequence[Setting]) -> Row:
    """The scores on validation by which a setting is chosen."""
    row = row_of(setting) | {"seeds": str(len(setting.runs))}
    for score in choice_scores(setting):
        row[score] = str(estimate(values(setting, VALIDATION, score)))
    row["their mean"] = f"{validation_score(setting):.4f}"
    row[""] = "chosen" if setting in chosen and setting.swept else ""
    return row


def made_with(base: Setting, settings: Sequence[Setting]) -> str:
    """How many runs there are, how long they took, and what made them."""
    runs = [run for setting in (base, *settings) for run in setting.runs.values()]
    versions = sorted({run["torch"] for run in runs})
    commits = sorted({run["commit"][:8] or "unknown" for run in runs})
    hours = sum(run["wall_seconds"] for run in runs) / 3600
    made = f"{len(runs)} runs, {hours:.1f} hours of one thread"
    return f"{made}; torch {', '.join(versions)}; commit {', '.join(commits)}.\n"
