"""The study's tables, from its JSON files alone: tables.md, tables_many.md (many tries), tables_kl.md (KL to the base).

How to read it: results.py makes scores of the files, statistics.py their means and intervals, tables.py and
forgetting.py rows of them; here they are joined. Pictures of the same: plots.py.
"""

from collections.abc import Sequence
from pathlib import Path

from dph.checkpoint import write_text
from study.forgetting import READINGS, change_row, equal_kl_rows, forgetting_rows
from study.results import Results, Setting, samples
from study.tables import (
    Row,
    ahead_from,
    choice,
    costs,
    differences,
    many_tries,
    markdown,
    row_of,
    scores,
    text_row,
)

HEAD = """# Tables of the study

Written by `python -m study.run --report` from the files in runs/; not by hand.

A number is the mean over all questions of all seeds ± half its 95 % interval (hierarchical bootstrap over seeds and
questions). pass@k is of {n} answers a question in domain. keep: the share of the questions solved by the base that are
still solved; explore: the share of the others that are now solved; "solved" by at least one answer. bits: entropy of a
question's different right answers, or else of the styles of its answers; commonest: the share of the commonest.
"""
COST = """Medians over a run's steps, means over seeds. "runs at a time": how many runs of the study shared the machine.
Where that is not known or differs, no seconds are given. Memory is the largest of the training process.

"""
PAIRED = "The same questions of the same seeds; bold where the interval leaves out 0.\n\n"
LIKELY = "Mean log-probability of a text's tokens, nats.\n\n"

MANY_HEAD = """# Tables of the study: many tries

Written by `python -m study.run --report` from the files in runs/; not by hand. Each method at the setting chosen on
validation.

maj@k: the answer that most of k answers give is right; of equals chance decides (mean over seeded draws of k of the n
answers). "base ahead from k": the smallest k at which the base's pass@k is above the method's, with its 95 % interval
over resampled seeds and questions; "> n": never up to n tries.
"""
KL_HEAD = """# Tables of the study: KL to the base

Written by `python -m study.run --report` from the files in runs/; not by hand.

KL: KL(policy || base) on the policy's own answers, nats a token, with its 95 % interval. Everything else is minus the
base, the same questions of the same seeds; bold where the interval leaves out 0. "median question": of the questions'
KLs the median, since a few questions can make most of the mean.
"""
EXPLAIN = """One point is one run: its KL to the base, and what changed against the base of its seed. The rank
correlation is Spearman's, its interval a bootstrap over seeds and runs. R²: the share of the change's variance that is
predicted for runs left out one at a time, by a straight line in log KL, or by the mean of the method's other runs.
Below 0: the mean of all other runs predicts better.

"""
EQUAL = """Each method at the η at which its KL in domain{added} is that of {method} at its chosen setting, minus
{method}. Between two values of the sweep log KL and all scores are taken to be straight lines in log η. Nothing is read
beyond a sweep's ends.

"""


def write_tables(folder: Path, results: Results) -> list[Path]:
    """Writes the tables into FOLDER, and returns their files."""
    texts = {"tables.md": main_tables(results)}
    if any(each.votes for each in results.study.sets.values()):
        texts["tables_many.md"] = many_tables(results)
    if results.measured_kl:
        texts["tables_kl.md"] = kl_tables(results)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def main_tables(results: Results) -> str:
    """Scores of the chosen settings, their differences, then every setting."""
    base, settings, chosen = results.base, results.settings, results.chosen
    parts = [HEAD.format(n=samples(base, results.study.in_domain))]
    parts += [f"Note: {note}.\n" for note in results.notes]
    parts += ["## Methods at the setting chosen on validation\n", *tables_of(results, chosen)]
    for method in results.study.table.against:
        against = results.method(method)
        if against is not None:
            rows = [differences(results, each, against) for each in chosen if each.method != method]
            parts.append(f"## Each method minus {method}\n\n{PAIRED}{markdown(rows)}")
    rows = [choice(each, chosen, results.study.chooser) for each in (base, *settings)]
    parts += ["## Every setting\n", "### The choice\n\n" + markdown(rows), *tables_of(results, settings)]
    return "\n".join([*parts, made_with(base, settings)])


def tables_of(results: Results, settings: Sequence[Setting]) -> list[str]:
    """A table of each domain's scores, one of the texts if there are any, and one of what the settings cost."""
    base = results.base
    tables = []
    for name, each in results.domains.items():
        rows = [scores(base, setting, name) for setting in (base, *settings)]
        tables.append(f"### {each.title}\n\n{markdown(rows)}")
    if results.texts:
        rows = [text_row(results, setting) for setting in (base, *settings)]
        tables.append(f"### Likelihood of texts\n\n{LIKELY}{markdown(rows)}")
    rows = [costs(each) for each in settings]
    return [*tables, f"### Partition, seconds a step, memory\n\n{COST}{markdown(rows)}"]


def many_tables(results: Results) -> str:
    """pass@k and majority votes of the sets with votes; for all sets, from which k on the base is ahead."""
    parts = [MANY_HEAD]
    with_votes = [name for name, each in results.study.sets.items() if each.votes]
    for name in with_votes:
        if samples(results.base, name) == 0:
            continue
        rows = [many_tries(results, each, name) for each in (results.base, *results.chosen)]
        parts.append(f"## {results.study.sets[name].title}\n\n{markdown(rows)}")
    rows = [ahead_row(results, each) for each in results.chosen]
    return "\n".join([*parts, f"## From which k on the base is ahead\n\n{markdown(rows)}"])


def ahead_row(results: Results, setting: Setting) -> Row:
    """From which k on the base is ahead of a setting, in each domain."""
    row = row_of(setting)
    for name, each in results.domains.items():
        row[each.title] = ahead_from(results.base, setting, name)
    return row


def kl_tables(results: Results) -> str:
    """KL and what changed, of every setting; what explains it; the methods at equal KL."""
    rows = [row_of(each) | change_row(results, each) for each in results.settings]
    parts = [KL_HEAD, f"## KL and what changed\n\n{markdown(rows)}"]
    explained = forgetting_rows(results)
    if explained:
        parts.append(f"## Does KL or the method explain it?\n\n{EXPLAIN}{markdown(explained)}")
    for added, read in READINGS.items():
        equal = equal_kl_rows(results, read)
        if equal:
            head = EQUAL.format(method=results.study.table.equal_kl, added=added)
            parts.append(f"## At equal KL{added}\n\n{head}{markdown(equal)}")
    return "\n".join(parts)


def made_with(base: Setting, settings: Sequence[Setting]) -> str:
    """How many runs there are, how long they took, and what made them."""
    runs = [run for setting in (base, *settings) for run in setting.runs.values()]
    versions = sorted({run["torch"] for run in runs})
    commits = sorted({run["commit"][:8] or "unknown" for run in runs})
    hours = sum(run["wall_seconds"] for run in runs) / 3600
    made = f"{len(runs)} runs, {hours:.1f} hours of one thread"
    return f"{made}; torch {', '.join(versions)}; commit {', '.join(commits)}.\n"
