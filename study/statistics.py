"""The study's statistics, on arrays alone: means with intervals, majority votes, crossings, ranks, explained variance.

Scores stand in arrays (seeds, questions). A 95 % interval is a hierarchical bootstrap: seeds are drawn with
replacement, and within each drawn seed its questions; so it covers another base, world and training set as well as
other questions. The streams are fixed: the same numbers give the same interval.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
VOTES_DRAWN = 200  # draws of k answers a question, for a majority of k
Array = NDArray[np.float64]


class Estimate(NamedTuple):
    """A mean with its 95 % interval, each NaN where nothing counts."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return "–" if self.mean != self.mean else f"{self.mean:.3f} ± {(self.high - self.low) / 2:.3f}"

    def signed(self) -> str:
        """As a difference with its interval, bold where that leaves 0 out."""
        if self.mean != self.mean:
            return "–"
        mean, low, high = (f"{round(x, 3) + 0.0:+.3f}".replace("-", "−") for x in self)  # + 0.0: no −0.000
        text = f"{mean} [{low}, {high}]"
        return f"**{text}**" if self.low > 0 or self.high < 0 else text


NOTHING = Estimate(np.nan, np.nan, np.nan)


@cache
def weights(seeds: int, questions: int) -> Array:
    """(RESAMPLES, seeds * questions): how often each question of each seed is drawn, from a fixed stream."""
    stream = np.random.default_rng(0)
    drawn = stream.integers(seeds, size=(RESAMPLES, seeds))
    counts = stream.multinomial(questions, np.full(questions, 1 / questions), size=(RESAMPLES, seeds))
    found = np.zeros((RESAMPLES, seeds, questions))
    np.add.at(found, (np.arange(RESAMPLES)[:, None], drawn), counts)
    return found.reshape(RESAMPLES, -1)


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
    drawn = weights(*values.shape)
    with np.errstate(invalid="ignore"):  # a resample may hold none that counts
        means = (drawn @ flat) / (drawn @ each)
    low, high = np.nanquantile(means, [0.025, 0.975])
    return Estimate(float(flat.sum() / each.sum()), float(low), float(high))


# ---- many tries ------------------------------------------------------------------------------------------------------


def majority(groups: Sequence[tuple[int, int]], n: int, k: int, stream: np.random.Generator) -> float:
    """maj@k of one question: the chance that the commonest vote among k of its n answers is right.

    Of equals chance decides. Answers that say nothing do not vote; where none of the k votes, nothing is right. Exact
    for k = 1 and k = n; else the mean over VOTES_DRAWN draws without replacement.

    Args:
        groups: of each different vote, how many answers gave it and whether it is right (1 or 0).
    """
    if not groups:
        return 0.0
    counts = np.array([count for count, _ in groups])
    right = np.array([is_right for _, is_right in groups], dtype=np.float64)
    if k == 1:
        return float(counts @ right / n)
    silent = n - counts.sum()
    if k == n:
        drawn = counts[None]
    else:
        drawn = stream.multivariate_hypergeometric([*counts, silent], k, size=VOTES_DRAWN)[:, :-1]  # (draws, groups)
    most = drawn.max(1, keepdims=True)
    winners = (drawn == most) & (most > 0)
    chances = (winners * right).sum(1) / np.maximum(winners.sum(1), 1)
    return float(chances.mean())


def crossing(base: Array, method: Array) -> Estimate:
    """The smallest k at which the base's pass@k is above the method's; infinite where it never is.

    Args:
        base, method: (seeds, questions, K), pass@k for k = 1 ... K.
    """
    seeds, questions, _ = base.shape
    if base.size == 0:
        return NOTHING
    ahead = (base - method).reshape(seeds * questions, -1)  # (seeds * questions, K)
    drawn = [_first_above_zero(row) for row in weights(seeds, questions) @ ahead]
    low, high = np.quantile(drawn, [0.025, 0.975], method="inverted_cdf")  # one of them: infinite ones have no middle
    return Estimate(_first_above_zero(ahead.sum(0)), float(low), float(high))


def _first_above_zero(row: Array) -> float:
    above = np.flatnonzero(row > 1e-9)
    return float(above[0] + 1) if len(above) else np.inf


# ---- one number of each run against another --------------------------------------------------------------------------


def ranks(values: Array) -> Array:
    """Ranks from 0, equal values sharing the mean of theirs."""
    below = (values[:, None] > values[None, :]).sum(1)
    equal = (values[:, None] == values[None, :]).sum(1)  # itself is one of them
    return np.asarray(below + (equal - 1) / 2, dtype=np.float64)


def spearman(x: Array, y: Array) -> float:
    """The correlation of the ranks; NaN where all of x or all of y are equal, or where there are fewer than 3."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return np.nan
    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def spearman_interval(x: Array, y: Array, seeds: Sequence[int]) -> Estimate:
    """Spearman's correlation over runs with its interval: seeds are drawn, and within each drawn seed its runs."""
    stream = np.random.default_rng(0)
    of_seed = [np.flatnonzero(np.array(seeds) == seed) for seed in sorted(set(seeds))]
    drawn = []
    for _ in range(RESAMPLES):
        picked = [of_seed[i] for i in stream.integers(len(of_seed), size=len(of_seed))]
        runs = np.concatenate([stream.choice(mine, size=len(mine)) for mine in picked])
        drawn.append(spearman(x[runs], y[runs]))
    if np.isnan(drawn).all():
        return NOTHING
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Estimate(spearman(x, y), float(low), float(high))


def explained_by_line(x: Array, y: Array) -> float:
    """The share of y's variance that a straight line in x predicts, each run left out of its own prediction."""
    design = np.stack([np.ones_like(x), x], 1)  # (runs, 2)
    hat = design @ np.linalg.pinv(design)
    errors = (y - hat @ y) / (1 - np.diag(hat))  # the error at a run of the line through all others
    return _explained(errors, y)


def explained_by_group(groups: Sequence[str], y: Array) -> float:
    """The same of the group's mean: each run is predicted by the other runs of its group, or of all if it is alone."""
    errors = []
    for i, group in enumerate(groups):
        others = [y[j] for j, other in enumerate(groups) if j != i and other == group]
        everything = np.delete(y, i)
        errors.append(y[i] - (np.mean(others) if others else everything.mean()))
    return _explained(np.array(errors), y)


def _explained(errors: Array, y: Array) -> float:
    """1 - squared errors / those of the mean of all other runs; below 0 where that mean predicts better."""
    if len(y) < 3 or np.ptp(y) == 0:
        return np.nan
    baseline = (y - y.mean()) * len(y) / (len(y) - 1)
    return float(1 - (errors**2).sum() / (baseline**2).sum())
