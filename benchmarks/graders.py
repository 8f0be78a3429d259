r"""How many answers a second the graders judge, and what one answer that hangs costs: python benchmarks/graders.py

Everything is generated, so it runs from a fresh clone. Prints Markdown tables and writes JSON (--out). Workers are
started and gold queries checked before the clock, as in a run. A prompt has eight answers, no two alike, half of them
right; figures are medians of --repeats batches.

--growth shows instead how the time of what is read in the training process grows with strange responses.
--mutants SPIDER_FOLDER counts instead how many gold queries, changed in one place, are caught with changed copies of
the database; the folder holds database/ and a file *_gold.sql, one query a line.
--copied FILE counts instead how many questions of a math set are answered right by what stands in the question.
"""

import argparse
import json
import os
import platform
import random
import re
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dph.config import DataConfig
from dph.tasks import Task, load_task
from dph.tasks.arithmetic import grade as grade_sum
from dph.tasks.base import Row
from dph.tasks.math_equality import quick
from dph.tasks.math_extraction import extract as extract_answer
from dph.tasks.sql import extract as extract_query
from dph.tasks.sql import judge
from dph.tasks.sql_variants import make_variants

LIMIT = 3.0  # seconds, the default
BATCH = 64
ANSWERS = 8  # to each prompt
WORKERS = (1, 2)
Case = tuple[dict[str, str], str]  # columns of the gold answer, response


# ---- answers -----------------------------------------------------------------------------------------------------


def drawn(number: int) -> tuple[list[int], int, bool]:
    """Three numbers that the answers to one prompt share, the answer's place among them, and whether it is wrong."""
    prompt, place = divmod(number, ANSWERS)
    rng = random.Random(prompt)
    return [rng.randint(2, 999) for _ in range(3)], place, random.Random(f"answer {number}").random() < 0.5


def plain_number(number: int) -> Case:
    """A whole number, written in another way, or another one."""
    (a, b, _), place, wrong = drawn(number)
    value = 1000 * a + b
    answer = str(value + 1 + place) if wrong else (f"{value:,}", f"{value}.00", f"{value} dollars")[place % 3]
    return {"answer": str(value)}, f"So it is \\boxed{{{answer}}}."


def algebra(number: int) -> Case:
    """What only algebra decides: a polynomial, a root, a set, an interval, a point, an equation."""
    (a, b, c), place, wrong = drawn(number)
    d = (1 + place) * wrong
    gold, answer = [
        (f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b + d})"),
        (f"\\frac{{{a}\\sqrt{{{b}}}}}{{{c}}}", f"\\frac{{{2 * a + d}}}{{{2 * c}}}\\sqrt{{{b}}}"),
        (f"\\{{{a}, {b}, {c}\\}}", f"\\{{{c + d}, {a}, {b}\\}}"),
        (f"[{a}, {a + b})", f"[{a}.0, {a + b + d})"),
        (f"({a}, \\frac{{{b}}}{{{c}}})", f"({a + d}, {b}/{c})"),
        (f"y = {a}x + {b}", f"{b + d} + {a}x = y"),
    ][a % 6]
    return {"answer": gold}, f"So it is \\boxed{{{' ' * place}{answer}{' ' * place} }}."


def join(number: int) -> Case:
    """A join with groups over 20,000 rows, and the same in other words."""
    (a, b, _), place, wrong = drawn(number)
    gold = (
        "SELECT customer.name, count(*) FROM customer JOIN purchase ON customer.id = purchase.customer "
        f"WHERE purchase.price > {a % 400} AND purchase.year = {2000 + b % 20} GROUP BY customer.id"
    )
    answer = (
        "WITH found AS (SELECT customer AS id, count(*) AS n FROM purchase "
        f"WHERE year = {2000 + b % 20} AND price {'>=' if wrong else '>'} {a % 400} GROUP BY 1) "
        f"SELECT name, n FROM found JOIN customer USING (id) LIMIT {1000 + place}"
    )
    return {"db_id": "shop", "query": gold}, f"```sql\n{answer}\n```"


def stuck(sql: str) -> Case:
    return {"db_id": "shop", "query": "SELECT 1"}, f"```sql\n{sql}\n```"


TOWER = ({"answer": "x"}, r"\boxed{\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}}")
ENDLESS = stuck("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c")
# One step of SQLite's program, and between steps alone does it look at the clock.
LONG_STEP = stuck("SELECT instr(hex(zeroblob(490000)), hex(zeroblob(240000)) || '1')")

RATES: dict[str, tuple[str, Callable[[int], Case], int]] = {
    "math, numbers": ("math", plain_number, 20_000),
    "math, algebra": ("math", algebra, 400),
    "SQL": ("sql", join, 800),
}
HANGING: dict[str, tuple[str, Callable[[int], Case], Case]] = {
    "math, a tower of powers": ("math", algebra, TOWER),
    "SQL, an endless recursion": ("sql", join, ENDLESS),
    "SQL, a function on a long text": ("sql", join, LONG_STEP),
}


def make_database(path: Path) -> None:
    """1,000 customers with 20,000 purchases."""
    rng = random.Random(0)
    path.parent.mkdir(parents=True)
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT)")
    connection.execute("CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer INTEGER, price INTEGER, year INTEGER)")
    connection.executemany("INSERT INTO customer VALUES (?, ?)", [(i, f"customer {i}") for i in range(1000)])
    rows = [(i, rng.randrange(1000), rng.randint(1, 500), rng.randint(2000, 2019)) for i in range(20_000)]
    connection.executemany("INSERT INTO purchase VALUES (?, ?, ?, ?)", rows)
    connection.commit()
    connection.close()


# ---- the clock ---------------------------------------------------------------------------------------------------


def make_task(kind: str, cases: Sequence[Case], root: Path, workers: int) -> Task:
    data = DataConfig(db_root=str(root), grader_workers=workers, grader_timeout=LIMIT)
    rows = [Row(Path("generated"), line, dict(gold)) for line, (gold, _) in enumerate(cases, start=1)]
    task = load_task(f"{kind}:generated", data, 0, root, rows)
    task.check()
    return task


def grade(task: Task, cases: Sequence[Case], numbers: range) -> tuple[float, list[str]]:
    """Seconds that some cases take, and their outcomes."""
    pairs = [(task.prompts()[i], cases[i][1]) for i in numbers]
    start = time.perf_counter()
    rewards = task.rewards(pairs)
    return time.perf_counter() - start, [reward.outcome for reward in rewards]


def rates(kind: str, make: Callable[[int], Case], count: int, root: Path, repeats: int) -> list[float]:
    """Answers a second with each number of workers."""
    found = []
    cases = [make(number) for number in range(BATCH + repeats * count)]
    for workers in WORKERS:
        with closing(make_task(kind, cases, root, workers)) as task:
            grade(task, cases, range(BATCH))  # starts the workers
            times = []
            for first in range(BATCH, len(cases), count):
                spent, outcomes = grade(task, cases, range(first, first + count))
                times.append(spent)
                assert 0.4 < outcomes.count("right") / count < 0.6, outcomes
            found.append(count / statistics.median(times))
    return found


def delays(kind: str, make: Callable[[int], Case], hanging: Case, root: Path, repeats: int) -> list[list[float]]:
    """Seconds of a batch without and with a hanging answer in its middle, with each number of workers."""
    found = []
    cases = [make(number) for number in range(BATCH * (1 + 2 * repeats))]
    late = range(2 * BATCH, len(cases), 2 * BATCH)  # where a batch with a hanging answer starts
    for first in late:
        cases[first + BATCH // 2] = hanging
    for workers in WORKERS:
        with closing(make_task(kind, cases, root, workers)) as task:
            times = []
            for first in range(0, len(cases), BATCH):
                spent, outcomes = grade(task, cases, range(first, first + BATCH))
                times.append(spent)
                assert outcomes.count("timeout") == (first in late), outcomes
        found.append([statistics.median(times[1::2]), statistics.median(times[2::2])])
    return found


# ---- growth ------------------------------------------------------------------------------------------------------

SIZES = (12_500, 25_000, 50_000)  # repetitions
GOLDS = ("5", "x+1", "1,2", r"\sqrt{2}", r"\text{east}")
STRANGE: dict[str, Callable[[int], str]] = {
    "`\\boxed`": lambda n: "\\boxed" * n,
    "`\\boxed{` opened": lambda n: "\\boxed{" * n,
    "`\\boxed{` opened, and closed": lambda n: "\\boxed{" * n + "5" + "}" * n,
    "backslashes": lambda n: "\\" * n,
    "`5`, `~`, `x` in a box": lambda n: "\\boxed{5" + "~" * n + "x}",
    "`5`, spaces, `x` in a box": lambda n: "\\boxed{5" + " " * n + "x}",
    "brackets in a box": lambda n: "\\boxed{" + "(" * n + "5" + ")" * n + "}",
    "digit groups in a box": lambda n: "\\boxed{1" + ",111" * n + "x}",
    "newlines after *answer is*": lambda n: "answer is" + "\n" * n,
    "lines of *answer*": lambda n: "answer\n" * n,
    "lines of `####`": lambda n: "####\n" * n,
    "numbers": lambda n: "1, " * n,
    "```` ```sql ````": lambda n: "```sql\n" * n,
    "lines of SELECT (": lambda n: "\nSELECT (" * n,
    "quotes after SELECT": lambda n: "SELECT " + "'" * n,
}


def read_everywhere(text: str) -> None:
    """What the training process does with a response, for each of the tasks."""
    for strict in (True, False):
        answer = extract_answer(text, strict)
        for gold in GOLDS if answer else ():
            quick(gold, str(answer))
        extract_query(text, strict)
    grade_sum(5, text)


def growth(repeats: int) -> None:
    """Seconds for each strange response at each size; linear if they double from column to column."""
    print(f"| seconds for so many repetitions | {' | '.join(f'{size:,}' for size in SIZES)} |")
    print("| --- | ---: | ---: | ---: |")
    for name, make in STRANGE.items():
        found = []
        for size in SIZES:
            times = []
            for _ in range(repeats):
                text = make(size)
                start = time.perf_counter()
                read_everywhere(text)
                times.append(time.perf_counter() - start)
            found.append(statistics.median(times))
        print(f"| {name} | " + " | ".join(f"{seconds:.3f}" for seconds in found) + " |", flush=True)


# ---- mutants -----------------------------------------------------------------------------------------------------

COPIES = (0, 4, 8, 16)
CLAUSE_END = r"(?=\b(?:GROUP|ORDER|LIMIT|UNION|EXCEPT|INTERSECT)\b|\)|$)"
CHANGES = {
    "JOIN to LEFT JOIN": (r"\bJOIN\b", "LEFT JOIN"),
    "> to >=": (r">(?!=)", ">="),
    "DISTINCT dropped": (r"\bDISTINCT\b", ""),
    "WHERE dropped": (rf"\bWHERE\b.*?{CLAUSE_END}", ""),
    "ORDER BY dropped": (rf"\bORDER BY\b.*?{CLAUSE_END}", ""),
}


def mutants(folder: Path) -> None:
    """Counts, for each change of the gold queries and number of copies, how many are not judged right."""
    (database,) = (folder / "database").rglob("*.sqlite")
    (queries,) = folder.glob("*_gold.sql")
    golds = [line.strip() for line in queries.read_text().splitlines() if line.strip()]
    changed = {
        name: [
            (gold, gold[: place.start()] + new + gold[place.end() :])
            for gold in golds
            for place in re.finditer(old, gold, re.IGNORECASE)
        ]
        for name, (old, new) in CHANGES.items()
    }
    print(f"| caught of the mutants, with copies | {' | '.join(map(str, COPIES))} | mutants |")
    print("| --- |" + " ---: |" * (len(COPIES) + 1))
    counts: Counter[tuple[str, int]] = Counter()
    with tempfile.TemporaryDirectory() as home:
        for copies in COPIES:
            made = make_variants(str(database), copies, 0, Path(home))
            job = {"database": str(database), "match": "spider", "seconds": LIMIT, "variants": made}
            assert all(judge({**job, "gold": gold, "query": gold})["outcome"] == "right" for gold in golds)
            for name, pairs in changed.items():
                for gold, query in pairs:
                    counts[name, copies] += judge({**job, "gold": gold, "query": query})["outcome"] != "right"
    for name, pairs in changed.items():
        print(f"| {name} | " + " | ".join(str(counts[name, copies]) for copies in COPIES) + f" | {len(pairs)} |")
    sums = [sum(counts[name, copies] for name in changed) for copies in COPIES]
    print(f"| all | {' | '.join(map(str, sums))} | {sum(map(len, changed.values()))} |")


# ---- copied answers ----------------------------------------------------------------------------------------------

FORMULA = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\$(.+?)\$|\\\((.+?)\\\)", re.DOTALL)
EQUALS = re.compile(r"(?<![<>!\\])=")
NUMERAL = re.compile(r"\d+(?:\.\d+)?")


def formulas(question: str) -> list[str]:
    """The formulas of a question, and the sides of its equations."""
    found = []
    for match in FORMULA.finditer(question):
        formula = next(group for group in match.groups() if group)
        found += [formula, *(EQUALS.split(formula) if EQUALS.search(formula) else [])]
    return [formula.strip().rstrip(".,") for formula in found if formula.strip(" .,")]


def copied(path: Path, fields: dict[str, str]) -> None:
    """Counts the questions of which a formula, or all numbers side by side, is a right answer."""
    with closing(load_task(f"math:{path}", DataConfig(fields=fields, grader_workers=2), 0, Path("runs"))) as task:
        questions = [(prompt, prompt.messages[-1]["content"]) for prompt in task.prompts()]
        for name, spans in (
            ("all its numbers", lambda text: [" ".join(NUMERAL.findall(text))]),
            ("a formula of it", formulas),
        ):
            pairs = [(prompt, f"\\boxed{{{span}}}") for prompt, text in questions for span in spans(text)]
            rewards = zip(pairs, task.rewards(pairs), strict=True)
            right = {prompt.index for (prompt, _), reward in rewards if reward.value == 1}
            print(f"{name} answers {len(right)} of {len(questions)} questions")


# ---- the report --------------------------------------------------------------------------------------------------


def machine() -> dict[str, object]:
    """What it ran on, and how busy that was."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), model)
    load = round(os.getloadavg()[0], 2)
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "load_before": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/graders.json"))
    parser.add_argument("--growth", action="store_true", help="time against the length of strange responses")
    parser.add_argument("--mutants", type=Path, metavar="SPIDER_FOLDER", help="count the mutants that are caught")
    parser.add_argument("--copied", type=Path, metavar="FILE", help="count the questions that answer themselves")
    parser.add_argument("--fields", nargs=2, metavar=("QUESTION", "ANSWER"), help="--copied: the columns of FILE")
    arguments = parser.parse_args()
    if arguments.copied:
        return copied(arguments.copied, dict(zip(("prompt", "answer"), arguments.fields or (), strict=False)))
    if arguments.growth:
        return growth(arguments.repeats)
    if arguments.mutants:
        return mutants(arguments.mutants)
    report: dict[str, object] = {"machine": machine(), "limit_seconds": LIMIT, "batch": BATCH}
    print("| answers a second | 1 worker | 2 workers |\n| --- | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_database(root / "shop" / "shop.sqlite")
        for name, (kind, make, count) in RATES.items():
            found = rates(kind, make, count, root, arguments.repeats)
            report[name] = dict(zip(WORKERS, found, strict=True))
            print(f"| {name} | " + " | ".join(f"{rate:,.0f}" for rate in found) + " |", flush=True)
        print(f"\n| seconds for {BATCH} answers, one of which hangs (none) | 1 worker | 2 workers |")
        print("| --- | ---: | ---: |")
        for name, (kind, make, case) in HANGING.items():
            times = delays(kind, make, case, root, arguments.repeats)
            report[name] = dict(zip(WORKERS, times, strict=True))
            print(f"| {name} | " + " | ".join(f"{late:.2f} ({usual:.2f})" for usual, late in times) + " |", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{report['machine']}; limit {LIMIT:g} s; written to {arguments.out}")


if __name__ == "__main__":
    main()
