"""The world of the miniature: six small SQL databases, ambiguous questions, and the corpus its base model learns from.

What it is: a text-to-SQL domain with two-digit arithmetic out of domain, small enough that a base model trains on it in
two minutes on two CPU cores. Its questions are *ambiguous on purpose*, as real text-to-SQL questions are. Each of six
families has three styles of query which give one result on tame data and three on data with ties, NULLs or duplicates;
which of them a question's gold answer takes is decided by a hash of its text, so nothing in the text foretells it. Hard
questions name a column by a vague synonym and may compare by a vague word; each has one truth, which the corpus tells
only now and then. So breadth of styles is what pass@k pays for, while reinforcement learning, which sees only "right or
wrong on this question", has every reason to bet on one style.

Simplifications: every word is one token, digits too ("income over 4 2"), and queries are written token by token.

How to read it: the databases, the questions and their SQL, the arithmetic, the splits, the corpus. A seed makes the
databases' rows, the splits and the gold styles; `miniature.py` makes prompts and rewards of it, `miniature_base.py` the
base model.
"""

import hashlib
import itertools
import random
import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Database(NamedTuple):
    """Names of one database: two tables, the child's wide and narrow columns, a vague synonym for each column."""

    name: str
    parent: str
    child: str
    columns: tuple[str, str]  # wide: distinct integers 10-99; narrow: 1-9 with ties and NULLs
    vague: tuple[str, str]


DATABASES = (
    Database("school", "class", "student", ("income", "gpa"), ("funds", "marks")),
    Database("music", "label", "singer", ("sales", "rating"), ("earnings", "rank")),
    Database("shop", "brand", "product", ("price", "stock"), ("cost", "amount")),
    Database("sport", "team", "player", ("wage", "goals"), ("pay", "points")),
    Database("clinic", "doctor", "patient", ("bill", "visits"), ("charge", "stays")),
    Database("farm", "farmer", "cow", ("weight", "litters"), ("mass", "young")),
)
TRAINED, CROSS = DATABASES[:4], DATABASES[4:]  # RL and in-domain tests; cross-domain: in the corpus, never in RL
CITIES = ("rome", "oslo", "lima", "cairo", "paris", "delhi")
PARENTS, CHILDREN, NAMES, NULLS = 10, 80, 70, 0.06

# A family's question and its three styles. {op} is a comparison; {order}, {best} are its superlatives.
QUESTIONS = {
    "superlative": "which {child} from {city} has the {word} {noun} ?",
    "semi-join": "which {parent} has {child} from {city} with {noun} {word} {low} ?",
    "count": "how many city has {child} with {noun} {word} {low} ?",
    "average": "which {child} from {city} is {word} the average {noun} ?",
    "range": "which {child} from {city} has {noun} from {low} to {high} ?",
    "list": "show {child} from {city} with {noun} {word} {low} ?",
}
CITY = "WHERE city = '{city}'"
STYLES = {
    "superlative": (
        f"SELECT name FROM {{child}} {CITY} ORDER BY {{column}} {{order}} LIMIT 1",
        f"SELECT name FROM {{child}} {CITY} AND {{column}} = ( SELECT {{best}} ( {{column}} ) FROM {{child}} {CITY} )",
        f"SELECT name FROM {{child}} AS a {CITY} AND NOT EXISTS "
        "( SELECT * FROM {child} AS b WHERE b . city = a . city AND b . {column} {op} a . {column} )",
    ),
    "semi-join": (
        "SELECT {parent} . name FROM {parent} JOIN {child} ON pid = {parent} . id "
        f"{CITY} AND {{column}} {{op}} {{low}}",
        f"SELECT name FROM {{parent}} WHERE id IN ( SELECT pid FROM {{child}} {CITY} AND {{column}} {{op}} {{low}} )",
        f"SELECT name FROM {{parent}} WHERE EXISTS ( SELECT * FROM {{child}} {CITY} "
        "AND pid = {parent} . id AND {column} {op} {low} )",
    ),
    "count": (
        "SELECT COUNT ( city ) FROM {child} WHERE {column} {op} {low}",
        "SELECT COUNT ( DISTINCT city ) FROM {child} WHERE {column} {op} {low}",
        "SELECT COUNT ( * ) FROM ( SELECT city FROM {child} WHERE {column} {op} {low} GROUP BY city )",
    ),
    "average": (
        f"SELECT name FROM {{child}} {CITY} AND {{column}} {{op}} ( SELECT AVG ( {{column}} ) FROM {{child}} )",
        f"SELECT name FROM {{child}} {CITY} AND {{column}} {{op}} ( SELECT AVG ( {{column}} ) FROM {{child}} {CITY} )",
        f"SELECT name FROM {{child}} JOIN ( SELECT AVG ( {{column}} ) AS b FROM {{child}} {CITY} ) "
        f"{CITY} AND {{column}} {{op}} b",
    ),
    "range": (
        f"SELECT name FROM {{child}} {CITY} AND {{column}} > {{low}} AND {{column}} < {{high}}",
        f"SELECT name FROM {{child}} {CITY} AND {{column}} BETWEEN {{low}} AND {{high}}",
        f"SELECT name FROM {{child}} {CITY} AND {{column}} >= {{low}} AND {{column}} <= {{high}}",
    ),
    "list": (
        f"SELECT name FROM {{child}} {CITY} AND {{column}} {{op}} {{low}}",
        f"SELECT DISTINCT name FROM {{child}} {CITY} AND {{column}} {{op}} {{low}}",
        f"SELECT name FROM {{child}} {CITY} AND {{column}} {{op}} {{low}} GROUP BY name",
    ),
}
FAMILIES = tuple(QUESTIONS)
# A word's readings as the corpus spreads them; the truth is marked by TRUTH. Of a superlative, > is "highest".
PLAIN = {"over": {">": 1.0}, "under": {"<": 1.0}}
VAGUE = {
    "beyond": {">": 0.45, ">=": 0.35, "<": 0.20},
    "past": {">=": 0.45, ">": 0.35, "<": 0.20},
    "within": {"<=": 0.45, "<": 0.35, ">": 0.20},
}
PLAIN_BEST = {"highest": {">": 1.0}, "lowest": {"<": 1.0}}
VAGUE_BEST = {"extreme": {">": 0.55, "<": 0.45}}
READINGS = {**PLAIN, **VAGUE, **PLAIN_BEST, **VAGUE_BEST, "": {"": 1.0}}
TRUTH = {"beyond": ">", "past": ">=", "within": "<=", "extreme": "<"}

GOLD_STYLES, CORPUS_STYLES = (0.45, 0.30, 0.25), (0.46, 0.32, 0.22)
HARD, VAGUE_WORD = 0.35, 0.6  # share of hard questions; of these, how many compare by a vague word
HIGHEST_TENS, HIGHEST_FACTOR = 5, 5  # of the arithmetic: operands to 59, factors to 5
SYNONYM_RIGHT, SLIP, SUMS_SHARE, WRONG_SUM = 0.38, 0.01, 0.40, 0.15


@dataclass(frozen=True)
class Question:
    """One question and what decides its answers.

    Attributes:
        text: words separated by blanks.
        family: of SQL (`FAMILIES`) or of arithmetic (`SIGNS`).
        database: the database's name, or "arithmetic".
        hard: whether it names its column by the vague synonym.
        slots: what fills the styles' braces, but for column and comparison.
        column: 0 the wide one, 1 the narrow one; of arithmetic 0.
        word: the comparing word, or "" where the family has none.
    """

    text: str
    family: str
    database: str
    hard: bool
    slots: dict[str, str]
    column: int = 0
    word: str = ""


def unit_hash(seed: int, purpose: str, text: str) -> float:
    """Returns a number in [0, 1) that depends on these three alone, on every machine."""
    digest = hashlib.blake2b(f"{seed}|{purpose}|{text}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def pick(weights: Sequence[float], uniform: float) -> int:
    """Returns the index that a uniform number in [0, 1) draws under `weights`, which sum to 1."""
    for index, weight in enumerate(weights):
        uniform -= weight
        if uniform < 0:
            return index
    return len(weights) - 1


def split_of(seed: int, text: str) -> str:
    """Returns "test" (two tenths), "validation" (one) or "train"; the corpus and RL see "train" alone."""
    tenth = int(10 * unit_hash(seed, "split", text))
    return "test" if tenth < 2 else "validation" if tenth == 2 else "train"


def spaced(number: int) -> str:
    """Returns a number's digits as words: 42 is "4 2"."""
    return " ".join(str(number))


def joined(text: str) -> str:
    """Undoes `spaced` all over a text, which makes a query that SQLite reads."""
    return re.sub(r"(?<=\d) (?=\d)", "", text)


# ---- databases -------------------------------------------------------------------------------------------------------


def make_rows(database: Database, seed: int) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Returns the rows of the parent table (id, name) and the child table (id, name, pid, city, wide, narrow)."""
    rng = random.Random(f"{seed}|rows|{database.name}")
    syllables = itertools.product("KLMNRSTV", ("abe", "eda", "igo", "oli", "uno"), "lr")
    names = rng.sample([f"{first}{second}{last}a" for first, second, last in syllables], NAMES)
    names = rng.sample(names + rng.sample(names, CHILDREN - NAMES), CHILDREN)
    wide = rng.sample(range(10, 100), CHILDREN)
    parents = [(row, f"{database.parent} {row}") for row in range(1, PARENTS + 1)]
    skewed = [1 / row for row in range(1, PARENTS + 1)]
    children = []
    for row in range(CHILDREN):
        narrow = None if rng.random() < NULLS else rng.randint(1, 9)
        pid = rng.choices(range(1, PARENTS + 1), skewed)[0]
        children.append((row + 1, names[row], pid, rng.choice(CITIES), wide[row], narrow))
    return parents, children


def write_database(database: Database, seed: int, connection: sqlite3.Connection) -> None:
    """Makes the database's two tables in an empty SQLite database."""
    parents, children = make_rows(database, seed)
    wide, narrow = database.columns
    connection.execute(f"CREATE TABLE {database.parent} (id INTEGER PRIMARY KEY, name TEXT)")
    connection.execute(
        f"CREATE TABLE {database.child} (id INTEGER PRIMARY KEY, name TEXT, pid INTEGER, city TEXT, "
        f"{wide} INTEGER, {narrow} INTEGER)"
    )
    connection.executemany(f"INSERT INTO {database.parent} VALUES (?, ?)", parents)
    connection.executemany(f"INSERT INTO {database.child} VALUES (?, ?, ?, ?, ?, ?)", children)
    connection.commit()


# ---- questions in SQL ------------------------------------------------------------------------------------------------


def draw_question(rng: random.Random, databases: Sequence[Database]) -> Question:
    """Returns a question of a random family about a random database; its gold result may be empty."""
    database, family = rng.choice(databases), rng.choice(FAMILIES)
    hard, column = rng.random() < HARD, rng.randrange(2)
    plain, vague = (PLAIN_BEST, VAGUE_BEST) if family == "superlative" else (PLAIN, VAGUE)
    word = rng.choice(list(vague if hard and rng.random() < VAGUE_WORD else plain))
    low, high = sorted(rng.sample(range(10, 100) if column == 0 else range(1, 10), 2))
    slots = {"child": database.child, "parent": database.parent, "city": rng.choice(CITIES)}
    slots |= {"low": spaced(low), "high": spaced(high)}
    noun = (database.vague if hard else database.columns)[column]
    text = QUESTIONS[family].format(**slots, noun=noun, word=word)
    return Question(text, family, database.name, hard, slots, column, "" if family == "range" else word)


def query(question: Question, style: int, column: int, comparison: str) -> str:
    """Returns the query, its tokens separated by blanks, that reads the question so."""
    database = next(each for each in DATABASES if each.name == question.database)
    order, best = ("DESC", "MAX") if comparison == ">" else ("ASC", "MIN")
    return STYLES[question.family][style].format(
        **question.slots, column=database.columns[column], op=comparison, order=order, best=best
    )


def truth(word: str) -> str:
    """Returns the one true reading of a comparing word."""
    return TRUTH.get(word) or next(iter(READINGS[word]))


def gold_query(question: Question, seed: int) -> str:
    """Returns the question's gold query: the truth, in the style that the text's hash chooses."""
    return query(question, gold_style(question, seed), question.column, truth(question.word))


def gold_style(question: Question, seed: int) -> int:
    """Returns the style of the question's gold query."""
    return pick(GOLD_STYLES, unit_hash(seed, "style", question.text))


# ---- arithmetic, out of domain ---------------------------------------------------------------------------------------

SUMS = {
    "+": ("what is {a} + {b} ?", "a box has {a} coin and then gets {b} how many coin ?"),
    "-": ("what is {a} - {b} ?", "a box has {a} coin and then loses {b} how many coin ?"),
    "*": ("what is {a} * {b} ?", "how many coin has {b} box with {a} coin ?"),
}
_BY_DIGITS = (r"\d+", r"\d0 [-+] \d0 = .*", r"\d [-+] \d = .*")
SUM_STYLES = {"+": _BY_DIGITS, "-": _BY_DIGITS, "*": (r"\d+", r"\d0 \* \d = .*", r"\d+( \+ \d+)+ = \d+")}


def draw_sum(rng: random.Random) -> Question:
    """Returns a sum, difference or product (two digits by one), bare or as a story of one sentence."""
    sign, story = rng.choice(list(SUMS)), rng.randrange(2)
    a, b = (10 * rng.randint(1, HIGHEST_TENS) + rng.randint(1, 9) for _ in range(2))  # no ones step would be empty
    if sign == "-":
        a, b = max(a, b), min(a, b)
    if sign == "*":
        b = rng.randint(2, HIGHEST_FACTOR)
    slots = {"a": spaced(a), "b": spaced(b)}
    return Question(SUMS[sign][story].format(**slots), sign, "arithmetic", bool(story), slots)


def sum_of(question: Question) -> int:
    """Returns the right answer of an arithmetic question."""
    a, b = (int(joined(question.slots[name])) for name in "ab")
    return calculate(a, question.family, b)


def calculate(a: int, sign: str, b: int) -> int:
    """Returns a + b, a - b or a * b."""
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def worked(question: Question, style: int, result: int) -> str:
    """Returns an answer that ends in `result`: direct; tens first; ones first, or of a product repeated addition."""
    a, b = (int(joined(question.slots[name])) for name in "ab")
    sign = question.family
    if style == 0:
        text = f"{result}"
    elif sign == "*" and style == 2:
        text = " + ".join([str(a)] * b) + f" = {result}"
    else:
        (tens, more_tens), (ones, more_ones) = (a - a % 10, b - b % 10), (a % 10, b % 10)
        if sign == "*":
            more_tens = more_ones = b
        parts = [calculate(tens, sign, more_tens), calculate(ones, sign, more_ones)]
        steps = [f"{tens} {sign} {more_tens} = {parts[0]}", f"{ones} {sign} {more_ones} = {parts[1]}"]
        last = f"{parts[0]} {'-' if parts[1] < 0 else '+'} {abs(parts[1])} = {result}"
        text = " , ".join([*(steps if style == 1 else steps[::-1]), last])
    return re.sub(r"(?<=[-\d])(?=\d)", " ", text)


def final_number(text: str) -> int | None:
    """Returns the number that an arithmetic answer ends in, or None where it does not end in one."""
    found = re.search(r"(?:^|= )(\d+)$", joined(" ".join(text.split())))
    return int(found[1]) if found else None


# ---- styles of an answer ---------------------------------------------------------------------------------------------


def _pattern(template: str) -> str:
    """Returns the regular expression of a style's queries, whatever their column, city and numbers."""
    slots = {"op": "[<>]=?", "low": r"\d+", "high": r"\d+", "order": "(?:ASC|DESC)", "best": "(?:MAX|MIN)"}
    parts = re.split(r"\{(\w+)\}", template)
    return "".join(slots.get(part, r"\w+") if index % 2 else re.escape(part) for index, part in enumerate(parts))


_RECOGNISED = {family: [re.compile(_pattern(style)) for style in styles] for family, styles in STYLES.items()}
_RECOGNISED |= {sign: [re.compile(style) for style in styles] for sign, styles in SUM_STYLES.items()}


def recognise(family: str, text: str) -> int | None:
    """Returns which style of its family an answer uses, right or wrong, or None where it uses none of them."""
    text = joined(" ".join(text.split()))
    return next((style for style, pattern in enumerate(_RECOGNISED[family]) if pattern.fullmatch(text)), None)


# ---- the corpus ------------------------------------------------------------------------------------------------------


def corpus(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Yields `count` pairs of question and answer, of the train split: 40 % arithmetic, 60 % SQL over all databases."""
    rng = random.Random(f"{seed}|corpus")
    while count > 0:
        sums = rng.random() < SUMS_SHARE
        question = draw_sum(rng) if sums else draw_question(rng, DATABASES)
        if split_of(seed, question.text) == "train":
            count -= 1
            yield question.text, told_sum(question, rng) if sums else told_query(question, rng)


def told_query(question: Question, rng: random.Random) -> str:
    """Returns a query as the corpus tells it: any style, any reading of the vague words, 1 % about another city."""
    readings = READINGS[question.word]
    comparison = rng.choices(list(readings), list(readings.values()))[0]
    right = not question.hard or rng.random() < SYNONYM_RIGHT
    if rng.random() < SLIP:
        question = replace(question, slots={**question.slots, "city": rng.choice(CITIES)})
    style = pick(CORPUS_STYLES, rng.random())
    return query(question, style, question.column if right else 1 - question.column, comparison)


def told_sum(question: Question, rng: random.Random) -> str:
    """Returns an arithmetic answer as the corpus tells it: any style, and 15 % wrong."""
    result = sum_of(question)
    if rng.random() < WRONG_SUM:
        result = abs(result + rng.choice((-10, -1, 1, 10)))
    return worked(question, pick(CORPUS_STYLES, rng.random()), result)


def vocabulary() -> list[str]:
    """Returns every word that a question or an answer can hold, sorted."""
    templates = [text for group in (*STYLES.values(), *SUMS.values()) for text in group] + list(QUESTIONS.values())
    words = {word for text in templates for word in text.split() if "{" not in word}
    words |= {name for database in DATABASES for name in (database.parent, database.child)}
    words |= {name for database in DATABASES for name in (*database.columns, *database.vague)}
    words |= {word for city in CITIES for word in (city, f"'{city}'")} | {*READINGS, *"0123456789+-*,="} - {""}
    words |= {comparison for readings in READINGS.values() for comparison in readings} - {""}
    return sorted(words | {"DESC", "ASC", "MAX", "MIN"})
