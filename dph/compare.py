"""Compares runs: python -m dph.compare RUN [RUN ...] [--base NAME] [--out FOLDER]

Reads RUN/evaluation/*.json of every run, as train.py and evaluate.py leave them; the base is taken once, from the first
run that has it. Prints a table of all models on all sets and three sentences that say what to see, and leaves both in
FOLDER/comparison.txt. Draws FOLDER/pass_at_k.png, a panel for each set and a curve with its interval for each model.

The sentences are about the first set, which is the one in domain. Intervals are of 95 %, over its prompts; where those
of two models overlap, it is open which is better.

How to read it: `load_reports` reads and checks that the runs can be held against each other; `sentences` says what to
see; `main` puts it together.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dph.checkpoint import write_text
from dph.cli import fail, to_the_end
from dph.errors import UserError, read_json
from dph.evaluation import keep_explore
from dph.made_from import ASKED
from dph.plots import Report, plot_pass_at_k, table

# May differ between evaluations that are held against each other; the prompts are compared by their own hash.
FREE = ("seed", "dtype", "greedy", "max_rows")
EXPLANATION = (
    "keep is the share of the prompts solved by the base that a model still solves, explore the share of the others "
    "that it now solves; solved means that at least one of the {n} answers is right."
)


def load_reports(runs: Sequence[Path], base: str) -> list[Report]:
    """The reports of all models of all runs, the base first and once; every model's name tells it apart.

    Args:
        base: the name of the base, which is that of its file without .json.

    Raises: UserError where there is nothing to compare, or where models were evaluated on other sets, other prompts,
        with other settings, or against another base.
    """
    bases: dict[Path, Report] = {}
    models: dict[Path, Report] = {}
    for run in dict.fromkeys(runs):
        files = sorted((run / "evaluation").glob("*.json"))
        if not files:
            raise UserError(f"{run / 'evaluation'}: holds no evaluation; train.py ends with one, evaluate.py makes one")
        for file in files:
            (bases if file.stem == base else models)[file] = read_report(file)
    if not bases:
        found = ", ".join(file.stem for file in models)
        raise UserError(f"no run has evaluation/{base}.json; name the base among {found} by --base")
    if not models:
        raise UserError(f"{next(iter(bases))} is all that there is; name a run with a model beside the base")
    first = next(iter(bases))
    for file, report in (bases | models).items():
        check_comparable(first, bases[first], file, report)
    for file, report in bases.items():
        if weights(report) != weights(bases[first]):
            raise UserError(f"{file}: another base than {first} (other weights); compare runs from one base")
    for file, report in models.items():
        if measured_from(report) - weights(bases[first]):
            raise UserError(f"{file}: another base than {first} (kl_to_base); compare runs from one base")
    return [bases[first], *named(models)]


def read_report(file: Path) -> Report:
    """One model's report. UserError: it is not what evaluate.py writes."""
    report = read_json(file)
    try:
        for found in report["sets"].values():
            _ = found["n"], found["summary"]["pass@1"], found["problems"][0]["correct"]
            _ = found["fingerprint"]["model"], found["fingerprint"]["prompts"], found["fingerprint"]["settings"]
        _ = report["model"], next(iter(report["sets"]))
    except (KeyError, TypeError, AttributeError, IndexError, StopIteration):
        raise UserError(f"{file}: is no evaluation as evaluate.py writes it; evaluate the model again") from None
    return report


def weights(report: Report) -> set[str]:
    """Hashes of the weights that answered."""
    return {found["fingerprint"]["model"] for found in report["sets"].values()}


def measured_from(report: Report) -> set[str]:
    """Hashes of the base that `kl_to_base` was measured from, where it was."""
    found = {data["fingerprint"].get("base") for data in report["sets"].values()}
    return {base for base in found if base is not None}


def check_comparable(first: Path, one: Report, second: Path, other: Report) -> None:
    """Raises a UserError unless both answered the same sets, the same prompts, with the same settings."""
    if one["sets"].keys() != other["sets"].keys():
        sets = f"evaluated on {', '.join(other['sets'])}, but {first} on {', '.join(one['sets'])}"
        raise UserError(f"{second}: {sets}; evaluate both on the same sets (data.eval)")
    for source in one["sets"]:
        here, there = one["sets"][source], other["sets"][source]
        if here["n"] != there["n"]:
            found = f"n = {there['n']} answers a prompt, but {here['n']} in {first}"
            raise UserError(f"{second}: {source}: {found}; evaluate both with the same eval.samples")
        asked = [name for name in ASKED if here["fingerprint"].get(name) != there["fingerprint"].get(name)]
        if asked:
            found = f"other {' and '.join(asked)} than in {first}"
            raise UserError(f"{second}: {source}: {found}; compare runs of the same data, tokenizer and run.seed")
        mine, theirs = (json.loads(each["fingerprint"]["settings"]) for each in (here, there))
        for name in sorted((mine.keys() | theirs.keys()) - set(FREE)):
            if mine.get(name) != theirs.get(name):
                found = f"{name} = {theirs.get(name)!r}, but {mine.get(name)!r} in {first}"
                raise UserError(f"{second}: {source}: {found}; evaluate both with the same settings")


def named(models: Mapping[Path, Report]) -> list[Report]:
    """The reports, each under a name of its own: the model's, with its run's folder where two have the same."""
    names = [report["model"] for report in models.values()]
    reports: list[Report] = []
    for file, report in models.items():
        name = report["model"]
        if names.count(name) > 1:
            name = f"{file.parent.parent}: {name}"
        reports.append({**report, "model": name})
    return reports


def sentences(reports: Sequence[Report]) -> list[str]:
    """What to see on the first set: the highest pass@1, pass@k at the largest k against the base, keep and explore."""
    source = next(iter(reports[0]["sets"]))
    return [
        highest(reports, source),
        against_the_base(reports, source),
        kept_and_explored(reports, source),
        EXPLANATION.format(n=reports[0]["sets"][source]["n"]),
    ]


def highest(reports: Sequence[Report], source: str) -> str:
    """Which model has the highest pass@1, by how much, and whether the intervals overlap."""
    ranked = sorted(reports, key=lambda report: score(report, source, 1)[0], reverse=True)
    best, second = ranked[0]["model"], ranked[1]["model"]
    top, below = score(ranked[0], source, 1), score(ranked[1], source, 1)
    return (
        f"On {source} {best} has the highest pass@1, {shown(top)}: {top[0] - below[0]:.3f} above {second}, "
        f"{shown(below)}; their intervals {overlap(top, below)}."
    )


def against_the_base(reports: Sequence[Report], source: str) -> str:
    """What has become of pass@k at the largest k that all reports have."""
    base, *others = reports
    scores = [{name for name in report["sets"][source]["summary"] if name.startswith("pass@")} for report in reports]
    k = max(int(name.removeprefix("pass@")) for name in set.intersection(*scores))
    start = score(base, source, k)
    told = []
    for report in others:
        end = score(report, source, k)
        how = "above" if end[0] > start[0] else "below"
        told.append(f"{report['model']} {shown(end)}, {abs(end[0] - start[0]):.3f} {how} ({overlap(start, end)})")
    return f"At {k} tries, pass@{k}, {base['model']} has {shown(start)}; {'; '.join(told)}."


def kept_and_explored(reports: Sequence[Report], source: str) -> str:
    """Keep and explore of each model, and of how many prompts they are shares."""
    base, *others = reports
    before = correct(base, source)
    solved = sum(count > 0 for count in before.values())
    told = []
    for report in others:
        keep, explore = keep_explore(before, correct(report, source))
        told.append(f"{report['model']} has keep {share(keep)} and explore {share(explore)}")
    counts = f"{base['model']} solves {solved} of {len(before)} prompts and leaves {len(before) - solved}"
    return f"{counts}; {'; '.join(told)}."


def score(report: Report, source: str, k: int) -> list[float]:
    """pass@k as [mean, low, high]."""
    found: list[float] = report["sets"][source]["summary"][f"pass@{k}"]
    return found


def correct(report: Report, source: str) -> dict[int, int]:
    """Correct answers by prompt."""
    return {problem["prompt"]: problem["correct"] for problem in report["sets"][source]["problems"]}


def shown(found: Sequence[float]) -> str:
    """A mean with its interval."""
    return f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def share(value: float) -> str:
    """A share, or – where it is one of no prompts."""
    return "–" if value != value else f"{value:.3f}"


def overlap(one: Sequence[float], other: Sequence[float]) -> str:
    """Whether two intervals have a point in common."""
    return "overlap" if one[1] <= other[2] and other[1] <= one[2] else "do not overlap"


def main(arguments: argparse.Namespace) -> None:
    """Table, sentences and picture."""
    runs: list[Path] = arguments.runs
    folder: Path = arguments.out or runs[0].parent
    reports = load_reports(runs, arguments.base)
    text = "\n".join([table(reports, base=reports[0]["model"]), "", *sentences(reports)])
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "comparison.txt", text + "\n")
    print(text)
    print(f"\ntable: {folder / 'comparison.txt'}\npicture: {plot_pass_at_k(reports, folder)}")


def _parser() -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m dph.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail  # type: ignore[method-assign]  # its own prints the usage, too
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, e.g. runs/gsm8k_dph_js")
    parser.add_argument("--base", default="base", metavar="NAME", help="the base, of evaluation/NAME.json")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: where the first RUN lies")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    given = _parser().parse_args()
    to_the_end(lambda: main(given), given.debug)
