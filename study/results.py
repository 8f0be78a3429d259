"""The study's results, from its JSON files alone: runs by setting, a score of every question, the choice of a setting.

Chosen is the value of the swept key with the highest mean of pass@1 and pass@16 on the set that chooses, averaged over
seeds. Its questions enter no other number. A difference of two settings is that of the same questions of the same seeds
(paired).

How to read it: `load_results` makes `Setting`s of the files; `values` gives a score of every question, whose mean and
interval statistics.py gives.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dph.errors import UserError, read_json
from dph.evaluation import pass_at_k
from study.plan import BASE, SetTable, Study, changed
from study.statistics import NOTHING, Array, Estimate, estimate, majority

CHOICE = (1, 16)  # the k whose mean pass@k chooses


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

    study: Study
    base: Setting
    settings: list[Setting]
    chosen: list[Setting]
    notes: list[str]

    @property
    def domains(self) -> dict[str, SetTable]:
        """The sets of graded questions, without the one that chooses and those for majority votes."""
        found = {name: each for name, each in self.study.sets.items() if each.source and each.graded}
        return {name: each for name, each in found.items() if not (each.chooses or each.votes)}

    @property
    def texts(self) -> dict[str, SetTable]:
        """The sets of texts."""
        return {name: each for name, each in self.study.sets.items() if each.text}

    @property
    def measured_kl(self) -> dict[str, SetTable]:
        """The sets on whose questions KL to the base is measured."""
        return {name: each for name, each in self.study.sets.items() if each.kl}

    def method(self, name: str) -> Setting | None:
        """The base or a method's chosen setting; None where it was not run."""
        return next((setting for setting in (self.base, *self.chosen) if setting.method == name), None)


def load_results(study: Study) -> Results:
    """Reads the study's JSON files.

    A run whose seed's base is not there, or has other weights, is left out: it can be held against nothing.

    Raises: UserError where there is no base or no run, or where seeds of one setting were run with different settings.
    """
    folder = study.results
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
            for key in _differing(run["settings"], other["settings"]):
                differs = f"{key} = {run['settings'].get(key)!r}, but {other['settings'].get(key)!r} at seed {seed}"
                raise UserError(f"{folder / name}: {differs}; run the study again")
        setting.runs[run["seed"]] = run
    base = found.pop((BASE, None), None)
    if base is None or not found:
        raise UserError(f"{folder}: holds no {'base' if base is None else 'run'} to report")
    rank = {name: number for number, name in enumerate(study.methods)}
    settings = sorted(found.values(), key=lambda s: (rank.get(s.method, len(rank)), s.method, s.value or 0.0))
    return Results(study, base, settings, choose(settings, study.chooser), notes)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The settings in which two seeds differ; a set that only one of them was measured on is no difference."""
    names = set(changed(one, other)) - {"run.seed"}
    return sorted(name for name in names if not name.startswith("sets.") or (name in one and name in other))


# ---- scores ----------------------------------------------------------------------------------------------------------


def seeds_with(setting: Setting, name: str) -> list[int]:
    """The seeds at which a setting was measured on a set."""
    return sorted(seed for seed, run in setting.runs.items() if name in run["sets"])


def values(setting: Setting, name: str, score: str, seeds: Iterable[int] | None = None) -> Array:
    """One score of every question of a set, (seeds, questions).

    Args:
        score: "greedy"; "pass@K"; "maj@K"; "forms", how many different right answers; "bits", the entropy of the
            different right answers or else of the answers' styles, and "top", the commonest's share, both NaN where no
            answer is right or in any style; "kl", KL to the base in nats a token; "logprob",
            the mean log-probability of a text's tokens. NaN where a result does not hold it.
        seeds: which; None: all at which the setting was measured on the set.
    """
    wanted = seeds_with(setting, name) if seeds is None else sorted(seeds)
    if not wanted:
        return np.zeros((0, 0))
    return np.array([_score(setting.runs[seed]["sets"][name], score) for seed in wanted])


def _score(found: Mapping[str, Any], score: str) -> Array:
    kind, _, number = score.partition("@")
    if kind == "pass":
        return np.array(_chances(found["n"])[found["correct"], int(number) - 1])
    if kind == "maj":
        stream = np.random.default_rng(0)
        groups = found["votes"]
        return np.array([majority(mine, found["n"], int(number), stream) for mine in groups], dtype=np.float64)
    if kind in ("bits", "top"):
        return np.array([_spread(kind, counts) for counts in found.get("forms", found["styles"])])
    if kind == "forms" and "forms" in found:
        return np.array([len(counts) for counts in found["forms"]], dtype=np.float64)
    questions = len(found["logprob"] if "logprob" in found else found["correct"])
    return np.array(found.get(kind, [np.nan] * questions), dtype=np.float64)


def _spread(kind: str, counts: Sequence[int]) -> float:
    """Entropy in bits, or the commonest's share, of answers counted by what they say; NaN where there are none."""
    found = np.array([count for count in counts if count], dtype=np.float64)
    if not len(found):
        return np.nan
    shares = found / found.sum()
    return float(-(shares * np.log2(shares)).sum() if kind == "bits" else shares.max())


def tells_ways(results: Results, name: str) -> bool:
    """Whether a set tells ways to answer apart, so that its answers have an entropy."""
    return not np.isnan(values(results.base, name, "bits")).all()


@cache
def _chances(n: int) -> Array:
    """(n + 1, n): pass@k at row c, column k - 1, for c of n answers right."""
    return np.array([[pass_at_k(n, correct, k) for k in range(1, n + 1)] for correct in range(n + 1)])


def curves(setting: Setting, name: str, seeds: Iterable[int]) -> Array:
    """pass@k for k = 1 ... n, (seeds, questions, n)."""
    found = [setting.runs[seed]["sets"][name] for seed in sorted(seeds)]
    return np.array([_chances(each["n"])[each["correct"]] for each in found])


def keep_explore(base: Setting, setting: Setting, name: str) -> tuple[Estimate, Estimate]:
    """Keep and explore of E11 over the questions of all seeds, "solved" meaning by at least one of the n answers."""
    score = f"pass@{samples(base, name)}"  # 1 where a question is solved, else 0
    seeds = common_seeds(base, setting, name)
    if not seeds:
        return NOTHING, NOTHING
    old = values(base, name, score, seeds)
    new = values(setting, name, score, seeds)
    return estimate(new, old), estimate(new, 1 - old)


def common_seeds(a: Setting, b: Setting, name: str) -> list[int]:
    """The seeds at which both were measured on a set."""
    return sorted({*seeds_with(a, name)} & {*seeds_with(b, name)})


def difference(a: Setting, b: Setting, name: str, score: str) -> Estimate:
    """a - b on the same questions of the seeds that both have; NaN where they have none."""
    seeds = common_seeds(a, b, name)
    if not seeds:
        return NOTHING
    return estimate(values(a, name, score, seeds) - values(b, name, score, seeds))


def samples(setting: Setting, name: str) -> int:
    """Answers to each question of a set, n; 0 where the setting was not measured on it."""
    return min((int(setting.runs[seed]["sets"][name]["n"]) for seed in seeds_with(setting, name)), default=0)


def pass_score(setting: Setting, name: str, k: int) -> str:
    """pass@k, or pass@n where there are only n answers."""
    return f"pass@{min(k, samples(setting, name))}"


def step_seconds(setting: Setting, seeds: Iterable[int], phase: str = "") -> Array:
    """Seconds of a step, or of one phase of it, (seeds, 1).

    NaN where it is not known that as many runs shared the machine at every seed: such seconds do not compare.
    """
    runs = [setting.runs[seed] for seed in sorted(seeds)]
    side_by_side = {run.get("workers") for run in runs}
    if len(side_by_side) > 1 or None in side_by_side:
        return np.full((len(runs), 1), np.nan)
    found = [run["seconds"] for run in runs]
    return np.array([[each.get(phase, 0.0) if phase else sum(each.values())] for each in found])


# ---- the choice ------------------------------------------------------------------------------------------------------


def choice_scores(setting: Setting, chooser: str) -> list[str]:
    """The scores that choose."""
    return [pass_score(setting, chooser, k) for k in CHOICE]


def validation_score(setting: Setting, chooser: str) -> float:
    """The mean of pass@1 and pass@16 on the set that chooses."""
    return float(np.mean([values(setting, chooser, score).mean() for score in choice_scores(setting, chooser)]))


def choose(settings: Sequence[Setting], chooser: str) -> list[Setting]:
    """One setting of each method: of those with the most seeds the best on the set `chooser`; of equals the first."""
    chosen = []
    for method in dict.fromkeys(setting.method for setting in settings):
        mine = [setting for setting in settings if setting.method == method]
        most = max(len(setting.runs) for setting in mine)
        full = [setting for setting in mine if len(setting.runs) == most]
        chosen.append(max(full, key=lambda setting: validation_score(setting, chooser)))
    return chosen
