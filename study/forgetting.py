"""What goes with forgetting: how far a policy has moved from its base, or which method moved it? And: all at equal KL.

A policy's KL to its base on what it says predicts what it forgets (arXiv 2509.04259). The paper's claim is about the
method. `forgetting_rows` lets both explain the same runs. `equal_kl_rows` takes KL out of the comparison: each method's
scores are interpolated along its eta, at the eta at which its KL is that of one reference method.

A few questions of which the policy now says something that the base never would can make most of the mean KL. So
everything is read twice: with the mean over questions, which is the KL, and with the median question's.

Simplified: straight lines between neighbouring values of eta, in log eta and log KL; nothing beyond a sweep's ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from study.results import Results, Setting, common_seeds, pass_score, seeds_with, step_seconds, tells_ways, values
from study.statistics import (
    NOTHING,
    Array,
    Estimate,
    estimate,
    explained_by_group,
    explained_by_line,
    spearman_interval,
)
from study.tables import Row

Reading = Callable[[Array], np.float64]  # one KL of the questions' KLs
MEDIAN = " (median question)"
READINGS: dict[str, Reading] = {"": np.mean, MEDIAN: np.median}  # by what a table adds to a set's title

ETA = "loss.eta"
TRIES = 16  # k of the pass@k that counts as remembering


# ---- KL to the base against what is forgotten ------------------------------------------------------------------------


@dataclass(frozen=True)
class Points:
    """One number of each run against its KL to the base: all arrays (runs,)."""

    methods: list[str]
    seeds: list[int]
    kl: Array  # nats a token
    change: Array  # the score minus the base's, at the same seed


def remembered(results: Results) -> dict[str, tuple[str, str]]:
    """What a policy may forget: the title of each measure, with its set and score."""
    measures = {}
    for name, each in results.domains.items():
        score = pass_score(results.base, name, TRIES)
        measures[f"{each.title}, {score}"] = (name, score)
        if tells_ways(results, name):
            measures[f"{each.title}, bits"] = (name, "bits")
    for name, each in results.texts.items():
        measures[f"{each.title}, log-likelihood"] = (name, "logprob")
    return measures


def points(results: Results, kl_set: str, name: str, score: str, read: Reading = np.mean) -> Points:
    """Every run of every setting that was measured on both sets; KL of 0 has no logarithm and is left out."""
    methods: list[str] = []
    seeds: list[int] = []
    kls: list[float] = []
    changes: list[float] = []
    for setting in results.settings:
        for seed in common_seeds(setting, results.base, name):
            if seed not in seeds_with(setting, kl_set):
                continue
            kl = float(read(values(setting, kl_set, "kl", [seed])))
            if not kl > 0:  # nor where an older result does not hold it
                continue
            change = np.nanmean(values(setting, name, score, [seed]) - values(results.base, name, score, [seed]))
            methods.append(setting.method)
            seeds.append(seed)
            kls.append(kl)
            changes.append(float(change))
    return Points(methods, seeds, np.array(kls), np.array(changes))


def change_row(results: Results, setting: Setting) -> Row:
    """KL to the base, with the median question's, and every measure minus the base's."""
    row = {}
    for name, each in results.measured_kl.items():
        kl = values(setting, name, "kl")
        row[f"KL, {each.title}"] = _short(estimate(kl))
        row[f"KL, {each.title}{MEDIAN}"] = _four(float(np.median(kl)) if kl.size else np.nan)
    for title, (name, score) in remembered(results).items():
        seeds = common_seeds(setting, results.base, name)
        found = NOTHING
        if seeds:
            found = estimate(values(setting, name, score, seeds) - values(results.base, name, score, seeds))
        row[title] = found.signed()
    return row


def _short(found: Estimate) -> str:
    return "–" if found.mean != found.mean else f"{found.mean:.4f} [{found.low:.4f}, {found.high:.4f}]"


def _four(number: float) -> str:
    return "–" if number != number else f"{number:.4f}"


def forgetting_rows(results: Results) -> list[Row]:
    """For each KL and each measure: rank correlation, and what log KL and the method's name explain of its variance."""
    rows = []
    for kl_set, each in results.measured_kl.items():
        for added, read in READINGS.items():
            for title, (name, score) in remembered(results).items():
                found = points(results, kl_set, name, score, read)
                if len(found.kl) >= 3:
                    rows.append({"KL on": f"{each.title}{added}", "change of": title} | _explained(found))
    return rows


def _explained(found: Points) -> Row:
    """The rank correlation of change and KL, and both explanations' R²."""
    return {
        "runs": str(len(found.kl)),
        "rank correlation": spearman_interval(found.kl, found.change, found.seeds).signed(),
        "R² of log KL": _number(explained_by_line(np.log(found.kl), found.change)),
        "R² of the method": _number(explained_by_group(found.methods, found.change)),
    }


def _number(value: float) -> str:
    return "–" if value != value else f"{value:.3f}".replace("-", "−")


# ---- equal KL --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Between:
    """A point of a sweep between two of its settings: (1 - share) of `low` and `share` of `high`."""

    low: Setting
    high: Setting
    share: float

    @property
    def eta(self) -> float:
        """Its eta, on the straight line in log eta."""
        assert self.low.value is not None, "a swept setting has a value"
        assert self.high.value is not None, "a swept setting has a value"
        return float(self.low.value ** (1 - self.share) * self.high.value**self.share)

    def at(self, name: str, score: str, seeds: Sequence[int]) -> Array:
        """A score of every question, (seeds, questions), interpolated."""
        low = values(self.low, name, score, seeds)
        return (1 - self.share) * low + self.share * values(self.high, name, score, seeds)


def log_kl(setting: Setting, name: str, seeds: Sequence[int], read: Reading = np.mean) -> float:
    """The logarithm of KL to the base, averaged over seeds; NaN where it was not measured or is 0."""
    kl = np.array([read(mine) for mine in values(setting, name, "kl", seeds)])  # (seeds,)
    return float(np.log(kl).mean()) if (kl > 0).all() else np.nan


def find_equal(
    sweep: Sequence[Setting], target: float, name: str, seeds: Sequence[int], read: Reading = np.mean
) -> Between | None:
    """The point of a sweep, its settings by rising eta, at which log KL first reaches `target`; None: nowhere."""
    heights = [log_kl(setting, name, seeds, read) for setting in sweep]
    for i in range(len(sweep) - 1):
        before, after = heights[i], heights[i + 1]
        if min(before, after) <= target <= max(before, after):
            share = (target - before) / (after - before) if after != before else 0.0
            return Between(sweep[i], sweep[i + 1], share)
    return None


def equal_kl_rows(results: Results, read: Reading = np.mean) -> list[Row]:
    """Each swept method at the eta at which its KL in domain is the reference method's, minus the reference."""
    reference = results.method(results.study.table.equal_kl)
    home = results.study.in_domain
    if reference is None or home not in results.measured_kl:
        return []
    rows = []
    for method in dict.fromkeys(setting.method for setting in results.settings):
        sweep = [each for each in results.settings if each.method == method and each.sweep == ETA and each.value]
        if len(sweep) < 2 or method == reference.method:
            continue
        seeds = sorted(set.intersection(*(set(seeds_with(each, home)) for each in (reference, *sweep))))
        if not seeds:
            continue
        target = log_kl(reference, home, seeds, read)
        if np.isnan(target):
            continue
        place = find_equal(sweep, target, home, seeds, read)
        row = {"method": method, "seeds": str(len(seeds)), "KL": _kl(target)}
        if place is None:
            ends = [log_kl(each, home, seeds, read) for each in (sweep[0], sweep[-1])]
            row["eta"] = f"outside the sweep, whose KL goes from {_kl(ends[0])} to {_kl(ends[1])}"
        else:
            row["eta"] = f"{place.eta:.3g}"
        rows.append(row | _minus(results, place, reference, seeds))
    return rows


def _kl(log: float) -> str:
    return _four(float(np.exp(log)))


def _minus(results: Results, place: Between | None, reference: Setting, seeds: Sequence[int]) -> Row:
    """pass@1, pass@16 and bits of each domain and seconds a step, minus the reference's at the same seeds."""
    row = {}
    for name, each in results.domains.items():
        mine = [seed for seed in seeds if seed in seeds_with(reference, name)]
        scores = [pass_score(reference, name, 1), pass_score(reference, name, TRIES)]
        if tells_ways(results, name):
            scores.append("bits")
        for score in scores:
            found = NOTHING
            if place is not None and mine:
                found = estimate(place.at(name, score, mine) - values(reference, name, score, mine))
            row[f"{each.title}, {score}"] = found.signed()
    seconds = NOTHING
    if place is not None:
        low, high, other = (step_seconds(each, seeds) for each in (place.low, place.high, reference))
        seconds = estimate((1 - place.share) * low + place.share * high - other)
    return row | {"s a step": seconds.signed()}
